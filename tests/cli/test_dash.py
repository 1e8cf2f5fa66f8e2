"""The dashboard: whom it answers, what it tells, and that it never does more than tell."""

import http.client
import json
import socket
import threading
from contextlib import closing, contextmanager

import numpy as np
import pytest
from prometheus_client import Counter, start_http_server
from typer.testing import CliRunner

from kvstow.cli import app
from kvstow.cli.dash import Answer, Watch, dashboard, is_local
from kvstow.cli.sources import places, read_store, samples, transfers_in
from kvstow.observe import Telemetry, TransferMetrics
from kvstow.offload.disk.tier import DiskTier
from kvstow.plan.group import grouped
from kvstow.plan.identity import Identity
from kvstow.plan.manifest import encode
from kvstow.plan.pack import packed
from kvstow.transfer.channel.curve import Keys
from kvstow.transfer.transport.local import Fabric
from planning import attention
from transfer_node import Node, hybrid_layout
from waiting import wait_for

KEY = "correct horse battery"


@contextmanager
def served(watch, key=""):
    server = dashboard(watch, ("127.0.0.1", 0), key=key)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def sources(watch):
    return watch.state(history=True)["sources"]


def asked(port, path, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_the_page_and_its_numbers_are_served():
    with served(Watch(["tcp://127.0.0.1:1"])) as port:
        status, headers, body = asked(port, "/")
        assert status == 200
        assert b"<!doctype html>" in body
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert headers["Cache-Control"] == "no-store"
        status, _, body = asked(port, "/state.json")
        assert status == 200
        (source,) = json.loads(body)["sources"]
        assert source["error"] == "not asked yet"
        assert asked(port, "/etc/passwd")[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_but_questions_is_understood(method):
    with served(Watch([])) as port:
        assert asked(port, "/", method)[0] == 501


def test_a_page_whose_name_was_pointed_here_is_refused():
    with served(Watch([])) as port:
        assert asked(port, "/state.json", Host="evil.example")[0] == 403
        assert asked(port, "/state.json", Host="127.0.0.1.evil.example")[0] == 403
        assert asked(port, "/state.json", Host=f"localhost:{port}")[0] == 200


@pytest.mark.parametrize("beginning", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: local"])
def test_a_browser_that_does_not_finish_its_question_is_hung_up_on(beginning, monkeypatch):
    monkeypatch.setattr(Answer, "timeout", 0.1)
    with (
        served(Watch([])) as port,
        socket.create_connection(("127.0.0.1", port), timeout=20) as browser,
    ):
        browser.sendall(beginning)
        assert browser.recv(1) == b""


def test_with_a_key_only_those_who_have_it_are_answered():
    with served(Watch([]), key=KEY) as port:
        for path in ("/", "/state.json", "/state.json?key=", "/?key=correct+horse+batterx"):
            assert asked(port, path)[0] == 403
        assert asked(port, "/state.json?key=correct+horse+battery", Host="far.example")[0] == 200


def test_other_machines_are_not_served_without_a_key(tmp_path):
    done = CliRunner().invoke(app, ["dash", "tcp://127.0.0.1:1", "--listen", "0.0.0.0:0"])
    assert done.exit_code == 2
    assert "there is no key" in done.output
    short = tmp_path / "key"
    short.write_text("short\n")
    done = CliRunner().invoke(
        app, ["dash", "tcp://127.0.0.1:1", "--listen", "0.0.0.0:0", "--page-key", str(short)]
    )
    assert done.exit_code == 2
    assert "a key of 5 characters" in done.output
    assert "--key-file" not in done.output


def test_the_page_key_is_still_taken_by_its_old_name_which_is_said(tmp_path):
    short = tmp_path / "key"
    short.write_text("short\n")
    done = CliRunner().invoke(
        app, ["dash", "tcp://127.0.0.1:1", "--listen", "0.0.0.0:0", "--key-file", str(short)]
    )
    assert done.exit_code == 2
    assert "--key-file is called --page-key now" in done.stderr
    assert "a key of 5 characters" in done.stderr


def test_agents_with_keys_are_shown_to_a_page_that_has_some(tmp_path):
    fresh = Keys.fresh()
    keys = Keys(public=fresh.public, secret=fresh.secret, peers=frozenset([fresh.public]))
    node = Node(encode(hybrid_layout()), Fabric(), name="guarded", keys=keys)
    without, watch = Watch([node.address]), Watch([node.address], keys=keys)
    with closing(node), closing(without), closing(watch):
        for each in (without, watch):
            each.start()
        wait_for(lambda: sources(watch)[0].get("agent") == "guarded")
        wait_for(lambda: "did not answer" in sources(without)[0].get("error", ""))
    file = tmp_path / "keys.json"
    file.write_text("{}")
    done = CliRunner().invoke(app, ["dash", node.address, "--keys-file", str(file)])
    assert done.exit_code == 2


@pytest.mark.parametrize("source", ["ftp://127.0.0.1/x", "redis://a:1", "no/such/store"])
def test_a_source_that_cannot_be_asked_is_refused_before_anything_is_served(source):
    done = CliRunner().invoke(app, ["dash", source, "--listen", "127.0.0.1:0"])
    assert done.exit_code == 2
    assert source in done.output
    assert "hint:" in done.output


@pytest.mark.parametrize("listen", ["8643", "127.0.0.1", "127.0.0.1:x", ":", "127.0.0.1:99999"])
def test_an_address_that_is_none_is_refused(listen):
    done = CliRunner().invoke(app, ["dash", "tcp://127.0.0.1:1", "--listen", listen])
    assert done.exit_code == 2
    assert "HOST:PORT" in done.output


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("", False),
        ("localhost.evil.example", False),
    ],
)
def test_this_machine_is_known_without_asking_a_name_server(host, local):
    assert is_local(host) is local


def test_samples_are_what_a_registry_counted():
    telemetry = Telemetry()
    metrics = TransferMetrics(telemetry.registry)
    metrics.transfers.labels("accepted").inc(3)
    metrics.transfers.labels("fence").inc(2)
    metrics.bytes.labels("read").inc(1000)
    metrics.served_bytes.labels("write").inc(700)
    metrics.seconds.observe(0.5)
    found = samples(telemetry.exposition().decode())
    told = {(each["name"], *each["labels"].values()): each["value"] for each in found}
    assert told["kvstow_transfers_total", "accepted"] == 3
    assert told["kvstow_transfer_seconds_sum",] == 0.5
    assert not any(name[0].endswith("_bucket") for name in told)
    summed = transfers_in(found)
    assert (summed["pulls"], summed["failures"], summed["pulled_bytes"]) == (5, 2, 1000)
    assert summed["served_bytes"] == 700


def test_a_prometheus_endpoint_is_read_and_a_silent_one_is_reported():
    telemetry = Telemetry()
    Counter("kvstow_transfers", "t", ["outcome"], registry=telemetry.registry).labels("peer").inc()
    server, thread = start_http_server(0, "127.0.0.1", telemetry.registry)
    watch = Watch(
        [f"http://127.0.0.1:{server.server_port}/metrics", "http://127.0.0.1:1/"], seconds=0.01
    )
    watch.start()
    try:
        wait_for(lambda: all(each.get("error") != "not asked yet" for each in sources(watch)))
        good, bad = sources(watch)
        assert good["history"][-1]["failures"] == 1
        assert good["totals"] == good["history"][-1]
        assert "refused" in bad["error"]
    finally:
        watch.close()
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_store_that_nobody_has_open_says_what_it_holds(tmp_path):
    layout = packed(grouped([attention("l", heads=2, dim=4, tokens=2)]), num_slabs=4)
    rows = [np.full(layout.row_bytes(0), i, np.uint8) for i in range(3)]
    identity = Identity.unverified("a test")
    with closing(DiskTier(tmp_path, layout, identity=identity, capacity=1 << 26)) as tier:
        tier.store(0, [b"a", b"b", b"c"], rows)
    found = read_store(tmp_path)["store"]
    (group,) = found["groups"]
    assert (found["rows"], found["processes"], group["rows"]) == (3, 0, 3)
    assert group["bytes"] == 3 * layout.row_bytes(0)
    assert 0 < found["data_bytes"] <= found["capacity"]


def test_a_directory_of_several_ranks_stands_for_their_stores(tmp_path):
    for name in ("tp0of2-pp0of1", "tp1of2-pp0of1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "layout.json").touch()
    (tmp_path / "else").mkdir()
    first, second = (str(tmp_path / f"tp{rank}of2-pp0of1") for rank in (0, 1))
    assert places(str(tmp_path)) == [first, second]
    assert places(first) == [first]
    assert places(str(tmp_path / "else")) == [str(tmp_path / "else")]
    assert places("tcp://127.0.0.1:1") == ["tcp://127.0.0.1:1"]


def test_a_directory_that_is_no_store_is_reported(tmp_path):
    watch = Watch([str(tmp_path)], seconds=0.01)
    watch.start()
    try:
        wait_for(lambda: sources(watch)[0]["error"] != "not asked yet")
        assert "no store there" in sources(watch)[0]["error"]
    finally:
        watch.close()


@pytest.mark.parametrize("host", ["[", "[::1", "a[b", "[v1]", "]"])
def test_a_host_that_is_none_is_not_answered(host):
    with served(Watch([])) as port:
        assert asked(port, "/", Host=host)[0] == 403


@pytest.mark.parametrize("listen", ["[", "127.0.0.1", ":8643", "127.0.0.1:99999", "[::1:80"])
def test_an_address_that_is_none_ends_with_2(listen):
    result = CliRunner().invoke(app, ["dash", "tcp://127.0.0.1:1", "--listen", listen])
    assert result.exit_code == 2
    assert "is not HOST:PORT" in result.stderr
