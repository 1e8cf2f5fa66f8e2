"""`kvstow status` on running agents and Prometheus endpoints, as a user runs it."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Counter, start_http_server
from typer.testing import CliRunner

import dns_name
from kvstow.cli import app
from kvstow.cli.status import ProcessStatus
from kvstow.offload.store import Store
from kvstow.plan.manifest import encode
from kvstow.transfer.channel.curve import Keys
from kvstow.transfer.transport.local import Fabric
from offloading import hybrid, key, random_rows
from transfer_node import Node, hybrid_layout, rows_for
from waiting import wait_for

MIB = 1 << 20


def status(*words):
    return CliRunner().invoke(app, ["status", *map(str, words)])


def documents(*words):
    return json.loads(status("--json", *words).stdout)


@pytest.fixture(scope="module")
def pair():
    """Two agents; the second has pulled from the first, which offers once more."""
    fabric, layout = Fabric(), hybrid_layout()
    producer, consumer = (Node(encode(layout), fabric, name=n) for n in ("prefill", "decode"))
    rows = rows_for(layout, 18, 1)
    consumer.pull([producer.offer(rows, 18)], rows)
    producer.offer(rows, 18)
    yield producer, consumer
    for node in (producer, consumer):
        node.close()


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


def test_it_shows_who_talks_to_whom_and_what_was_counted(pair):
    producer, consumer = pair
    done = status(consumer.address, producer.address)
    assert done.exit_code == 0, done.stderr
    for word in ("decode", "prefill", "ready", "guest", "hybrid", "1 lease,", "transfers accepted"):
        assert word in done.stdout
    assert "prefill is not mapped: an option forbids it" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 200


def test_the_json_is_the_agents_own_document_with_its_metrics_as_numbers(pair):
    producer, consumer = pair
    first, second = documents(consumer.address, producer.address)
    assert first["agent"] == "decode"
    assert first["peers"][0]["name"] == "prefill"
    assert first["metrics"]['kvstow_transfers_total{outcome="accepted"}'] == 1
    assert second["leases"] == 1
    assert second["guests"][0]["name"] == "decode"
    served = sum(
        nbytes
        for name, nbytes in second["metrics"].items()
        if name.startswith("kvstow_transfer_served_bytes_total{")
    )
    assert served == second["guests"][0]["moved_bytes"] > 0


def test_an_agent_that_does_not_answer_is_exit_code_1_and_hides_no_other(pair):
    done = status("tcp://127.0.0.1:9", "http://127.0.0.1:9/metrics", pair[0].address)
    assert done.exit_code == 1
    assert "tcp://127.0.0.1:9: agent at tcp://127.0.0.1:9 did not answer" in done.stdout
    assert "http://127.0.0.1:9/metrics: Connection refused" in done.stdout
    assert "prefill" in done.stdout


@pytest.mark.parametrize(
    "address", ["ftp://127.0.0.1:1", "tcp://nowhere", "http://", "dns://", "a-directory", ""]
)
def test_what_is_no_address_is_exit_code_2(address):
    done = status(address)
    assert done.exit_code == 2
    assert "hint:" in done.stderr


def test_agents_with_keys_are_shown_to_those_who_have_some(tmp_path):
    fresh = Keys.fresh()
    keys = Keys(public=fresh.public, secret=fresh.secret, peers=frozenset([fresh.public]))
    node = Node(encode(hybrid_layout()), Fabric(), name="guarded", keys=keys)
    file = tmp_path / "keys.json"
    others = [Keys.fresh().public, keys.public]
    file.write_text(json.dumps({"public": keys.public, "secret": keys.secret, "peers": others}))
    shown = status(node.address, "--keys-file", file)
    refused = status(node.address)
    node.close()
    assert shown.exit_code == 0, shown.stdout
    assert "guarded" in shown.stdout
    assert refused.exit_code == 1
    assert "hint: an agent with keys answers only those that have some" in refused.stdout
    file.write_text("{}")
    assert status(node.address, "--keys-file", file).exit_code == 2


def test_agents_are_found_by_a_name_in_dns(tmp_path):
    """The system's resolver asks a DNS server in a network of its own: two addresses, one name."""
    own_network = ["unshare", "-rmn"]
    if subprocess.run([*own_network, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no network of its own without user namespaces")
    command = [*own_network, sys.executable, str(Path(dns_name.__file__)), str(tmp_path)]
    source = f"dns://{dns_name.NAME}:{dns_name.PORT}"
    command += [sys.executable, "-m", "kvstow", "status", "--json", source]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    agents = {each["agent"]: each["address"] for each in json.loads(done.stdout)}
    assert agents == {f"agent-{each}": f"tcp://{each}:{dns_name.PORT}" for each in dns_name.HOSTS}


class Lent:
    """One block, which nobody finds."""

    def __len__(self) -> int:
        return 1

    def ids(self, group, keys):
        return np.full(len(keys), -1)

    def still(self):
        return nullcontext()


def test_it_shows_what_is_lent_and_why_requests_got_no_ticket(pair):
    """Its layout has recurrent states: none of them is lent."""
    producer, consumer = pair
    producer.agent.lend(Lent())
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(
            consumer.agent.ask, producer.address, [bytes(32)], step=4, seconds=30
        )
        wait_for(lambda: producer.agent.settle() or asking.done())
    assert asking.result() is None
    text = status(producer.address).stdout
    assert "1 block lent, 0 of 1 request answered with a ticket (1 for recurrent states" in text
    assert documents(producer.address)[0]["answers"] == {"states": 1}
    name = producer.agent.name
    assert f"{name} had no ticket for 1 request: 1 for recurrent" in status(consumer.address).stdout
    (document,) = documents(consumer.address)
    assert [peer["misses"] for peer in document["peers"]] == [{"states": 1}]


def test_it_shows_the_tiers_of_an_agents_process():
    with Store(host=MIB).bind(hybrid()) as store:
        assert store.host is not None
        rows = random_rows(store.layout.row_bytes(0), 2, 0)
        store.host.store(0, [key(0, 0)], rows[:1])
        store.host.load(0, [key(0, 0), b"none"], rows)
        node = Node(encode(hybrid()), Fabric())
        assert "tier" not in status(node.address).stdout
        store.watch(node.agent.telemetry)
        wait_for(lambda: "tier " in status(node.address).stdout)
        text = status(node.address).stdout
        (document,) = documents(node.address)
        node.close()
    (line,) = (line for line in text.splitlines() if line.startswith("host"))
    assert line.split()[1] == "1"
    assert "50%" in line
    assert document["metrics"]['kvstow_tier_hits_total{tier="host"}'] == 1


def test_it_shows_the_counters_of_a_prometheus_endpoint_and_no_others():
    registry = CollectorRegistry()
    pulls = Counter("kvstow_vllm_pulls", "", ["engine", "outcome"], registry=registry)
    pulls.labels("0", "accepted").inc(2)
    Counter("kvstow_vllm_pulled_bytes", "", ["engine"], registry=registry).labels("0").inc(3 * MIB)
    Counter("kvstow_vllm_stored_rows", "", registry=registry)
    Counter("somebody_elses", "", registry=registry).inc()
    with endpoint(registry) as address:
        text = status(address).stdout
        (document,) = documents(address)
    assert "vllm pulls 0 accepted" in text
    assert "3 MiB" in text
    assert "stored_rows" not in text, "zeros are left out"
    assert "somebody" not in text + str(document)
    assert document["metrics"]["kvstow_vllm_stored_rows_total"] == 0


def test_a_process_that_has_counted_nothing_says_so():
    with endpoint(CollectorRegistry()) as address:
        done = status(address)
    assert f"{address}\n\nno peers, no tiers, nothing counted yet" in done.stdout
    assert done.exit_code == 0


def test_rates_are_those_since_the_last_look():
    def look(at, value, before=None):
        return ProcessStatus("a", at, {}, {"kvstow_bytes_total": value}, before=before)

    first = look(10.0, 100.0)
    assert "per second" not in str(first)
    assert "30 B" in str(look(12.0, 160.0, first)).splitlines()[-1]
