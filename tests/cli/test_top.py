"""`kvstow top` on real stores and running agents."""

import json
import os
from contextlib import closing, contextmanager

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Counter, start_http_server
from typer.testing import CliRunner

from kvstow.cli import app
from kvstow.observe import Telemetry
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.host.tier import HostTier
from kvstow.offload.store import Store
from kvstow.plan.manifest import encode
from kvstow.transfer.transport.local import Fabric
from offloading import hybrid, key, random_rows
from transfer_node import Node, rows_for
from waiting import wait_for

MIB = 1 << 20


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def look(*arguments):
    return run("top", *arguments, "--every", "0.1")


@pytest.fixture
def host_only():
    """A store without a disk, of which one row was found and one was not."""
    with Store(host=MIB).bind(hybrid()) as store:
        assert store.host is not None
        rows = random_rows(store.layout.row_bytes(0), 2, 0)
        store.host.store(0, [key(0, 0)], rows[:1])
        store.host.load(0, [key(0, 0), b"none"], rows)
        yield store


@pytest.mark.parametrize("width", [40, 80, 160])
def test_top_fits_the_terminal(width):
    from kvstow.cli.top import _shown

    line = dict.fromkeys(("rows", "nbytes", "capacity", "failures"), 12345)
    rates = dict.fromkeys(("stored_bytes_per_s", "loaded_bytes_per_s", "evicted_rows_per_s"), 1.5)
    text = _shown(
        [
            {"store": "/a/store", "pid": 7, "tier": "disk", "hit_rate": None, **line, **rates}
            | {"idle_seconds": 100.0}
        ],
        width=width,
    )
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize(
    ("told", "looks", "rate"),
    [
        ((100.0, 102.0), (100.5, 102.5), 30.0),  # 60 bytes in two seconds
        ((100.0, 100.0), (100.5, 102.5), 0.0),  # nothing was told since
        ((100.0, 3702.0), (3700.5, 3702.5), 30.0),  # an hour of nothing, and then 60 bytes
        ((100.0, 101.0), (101.1, 101.2), 60.0),  # looks that are closer than what is told
    ],
)
def test_rates_of_top_are_over_the_time_in_which_something_was_done(told, looks, rate):
    from kvstow.cli.top import RATES, _lines, _Sample

    samples = [_Sample(), _Sample()]
    for sample, at, beat, count in zip(samples, looks, told, (0, 60), strict=True):
        sample.at = at
        nothing = dict.fromkeys(RATES, 0)
        sample.tiers["s", 7, "host"] = beat, nothing | {"loaded_bytes": count if rate else 0}
    (line,) = _lines(*samples)
    assert line["loaded_bytes_per_s"] == pytest.approx(rate)
    assert line["idle_seconds"] == pytest.approx(looks[1] - told[1])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "–"), (1.9, "–"), (2.0, "2 s"), (59.9, "59 s"), (60, "1 min"), (7200, "2 h")],
)
def test_top_says_for_how_long_a_process_has_been_idle(seconds, text):
    from kvstow.cli.top import _duration

    assert _duration(seconds) == text


def test_top_takes_the_directory_above_several_ranks_and_says_what_it_shows(directory):
    rank = directory.parent / "tp0of2-pp0of1"
    directory.rename(rank)
    tier = DiskTier(rank)
    tier.beat()
    done = run("top", directory.parent, "--once", "--every", "0.1")
    tier.close()
    assert "tp0of2" in done.stdout
    assert "peers of an agent: kvstow peers" in done.stdout
    assert run("top", directory.parent / "none", "--once").exit_code == 2


def test_top_shows_the_tiers_of_a_living_process(directory):
    tier = DiskTier(directory)
    host = HostTier(tier.layout, capacity=MIB)
    tier.publish(host)
    rows = [np.zeros(tier.layout.row_bytes(0), np.uint8) for _ in range(21)]
    host.load(0, [b"none"], rows[:1])
    tier.load(0, [key(0, i) for i in range(21)], rows)
    tier.beat()
    found = json.loads(run("top", directory, "--every", "0.1", "--json").stdout)["tiers"]
    tier.close()
    disk, host_line = found
    assert disk["tier"] == "disk"
    assert disk["pid"] == os.getpid()
    assert disk["hits"] == 20
    assert disk["hit_rate"] == 20 / 21
    assert host_line["misses"] == 1
    assert "no running process" in run("top", directory, "--once", "--every", "0.1").stdout


def test_top_shows_a_process_without_a_disk_that_is_named_by_its_agent(host_only):
    with closing(Node(encode(hybrid()), Fabric())) as node:
        without = look(node.address, "--once")
        host_only.watch(node.agent.telemetry)
        (tier,) = json.loads(look(node.address, "--json").stdout)["tiers"]
        text = look(node.address, "--once")
    assert "transfers of" in without.stdout
    assert "tier " not in without.stdout
    assert without.exit_code == 0
    assert (tier["store"], tier["pid"], tier["tier"]) == (node.address, None, "host")
    assert (tier["rows"], tier["hits"], tier["misses"], tier["hit_rate"]) == (1, 1, 1, 0.5)
    assert tier["capacity"] == host_only.host.usage.capacity
    assert tier["loaded_bytes"] == host_only.layout.row_bytes(0)
    assert text.exit_code == 0
    assert node.address.removeprefix("tcp://") in text.stdout
    assert "50%" in text.stdout


def test_top_shows_what_agents_without_tiers_pull_and_serve():
    layout, fabric = encode(hybrid()), Fabric()
    far = Node(layout, fabric, "far")
    near = Node(layout, fabric, "near", {"direction": "read"})
    with closing(far), closing(near):
        blocks = rows_for(far.layout, 20, 1)
        ticket = far.offer(blocks, 20, readers=2)
        moved = near.pull([ticket], blocks)["bytes"]
        near.pull([ticket], blocks)
        assert near.pull([ticket], blocks)["kind"] == "used"
        served = far.agent.endpoint.metrics.served_bytes.labels("read")
        wait_for(lambda: served._value.get() == 2 * moved)
        found = json.loads(look(near.address, far.address, "--json").stdout)
        text = look(near.address, far.address, "--once").stdout
    lines = {line["agent"]: line for line in found["transfers"]}
    assert found["tiers"] == []
    assert lines["near"]["address"] == near.address
    assert (lines["near"]["pulls"], lines["near"]["failures"]) == (3, 1)
    assert lines["near"]["pulled_bytes"] in (2 * moved, 3 * moved)  # one may be refused too late
    assert (lines["far"]["served_bytes"], lines["far"]["leases"]) == (2 * moved, 0)
    assert near.address.removeprefix("tcp://") in text


@contextmanager
def endpoint(registry):
    """A Prometheus endpoint of these metrics."""
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_top_shows_a_process_that_is_named_by_its_prometheus_endpoint(host_only):
    telemetry = Telemetry()
    host_only.watch(telemetry)
    with endpoint(telemetry.registry) as address:
        found = json.loads(look(address, "--json").stdout)
    assert [(tier["store"], tier["tier"]) for tier in found["tiers"]] == [(address, "host")]
    assert found["errors"] == {}


def test_top_shows_what_an_engine_pulls_by_the_metrics_of_vllm_itself():
    """vLLM's endpoint has the sums of all ranks, each under the label of its engine."""
    registry = CollectorRegistry()
    pulls = Counter("kvstow_vllm_pulls", "", ["engine", "outcome"], registry=registry)
    moved = Counter("kvstow_vllm_pulled_bytes", "", ["engine"], registry=registry)
    for engine in ("0", "1"):
        pulls.labels(engine, "accepted").inc(2)
        pulls.labels(engine, "timeout").inc()
        moved.labels(engine).inc(100)
    with endpoint(registry) as address:
        (line,) = json.loads(look(address, "--json").stdout)["transfers"]
        text = look(address, "--once").stdout
    assert (line["address"], line["agent"]) == (address, None)
    assert (line["pulls"], line["failures"], line["pulled_bytes"]) == (6, 2, 200)
    assert (line["served_bytes"], line["served_bytes_per_s"], line["leases"]) == (None, None, None)
    assert "200 B" in text


def test_top_says_of_an_endpoint_that_it_tells_nothing():
    with endpoint(CollectorRegistry()) as address:
        done = look(address, "--once")
    assert f"{address}: tells of no tiers and no transfers" in done.stdout
    assert done.exit_code == 0


def test_top_shows_processes_with_and_without_a_disk_side_by_side(directory, host_only):
    tier = DiskTier(directory)
    tier.beat()
    with closing(Node(encode(hybrid()), Fabric())) as node:
        host_only.watch(node.agent.telemetry)
        found = json.loads(look(directory, node.address, "--json").stdout)["tiers"]
    tier.close()
    assert {(line["pid"], line["tier"]) for line in found} == {
        (os.getpid(), "disk"),
        (None, "host"),
    }


def test_top_shows_the_others_when_an_agent_does_not_answer_and_ends_with_1(directory):
    tier = DiskTier(directory)
    tier.beat()
    done = look(directory, "tcp://127.0.0.1:1", "--json")
    tier.close()
    found = json.loads(done.stdout)
    assert done.exit_code == 1
    assert [line["tier"] for line in found["tiers"]] == ["disk"]
    assert "did not answer" in found["errors"]["tcp://127.0.0.1:1"]


def test_top_says_in_words_why_an_endpoint_does_not_answer():
    done = look("http://127.0.0.1:1/metrics", "--once")
    assert done.exit_code == 1
    assert "http://127.0.0.1:1/metrics: Connection refused" in done.stdout


def test_top_that_finds_nobody_says_how_processes_without_a_disk_are_found(directory):
    done = look(directory, "--once")
    assert done.exit_code == 0
    assert "no running process" in done.stdout
    assert "hint: a process without a store on disk is found by the address of" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("source", ["ftp://127.0.0.1:1", "tcp://nowhere", "no-such-directory"])
def test_top_refuses_what_is_no_source(source):
    assert look(source, "--once").exit_code == 2
