"""`kvstow peers` and `kvstow bench transfer`, run as a user runs them."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import dns_name
from etcd_server import etcd, free_port
from kvstow.plan.manifest import encode
from kvstow.route.blocks import Blocks
from kvstow.transfer.channel.curve import Keys
from kvstow.transfer.discovery import EtcdLease
from kvstow.transfer.transport.local import Fabric
from transfer_node import Node, hybrid_layout, rows_for
from waiting import wait_for


def kvstow(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvstow", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


@pytest.fixture(scope="module")
def pair():
    fabric, layout = Fabric(), hybrid_layout()
    producer, consumer = (Node(encode(layout), fabric, name=n) for n in ("prefill", "decode"))
    rows = rows_for(layout, 18, 1)
    consumer.pull([producer.offer(rows, 18)], rows)
    producer.offer(rows, 18)
    yield producer, consumer
    for node in (producer, consumer):
        node.close()


def test_peers_shows_who_talks_to_whom(pair):
    producer, consumer = pair
    done = kvstow("peers", consumer.address, producer.address)
    assert done.returncode == 0, done.stderr
    for word in ("decode", "prefill", "ready", "guest", "hybrid", "1 lease,"):
        assert word in done.stdout


def test_peers_as_json_is_the_agents_own_document(pair):
    producer, consumer = pair
    done = kvstow("peers", "--json", consumer.address, producer.address)
    first, second = json.loads(done.stdout)
    assert first["agent"] == "decode"
    assert first["peers"][0]["name"] == "prefill"
    assert second["leases"] == 1
    assert second["guests"][0]["name"] == "decode"


def test_an_agent_that_does_not_answer_is_exit_code_1(pair):
    done = kvstow("peers", "tcp://127.0.0.1:9", pair[0].address)
    assert done.returncode == 1
    assert "did not answer" in done.stdout
    assert "prefill" in done.stdout


def test_agents_with_keys_are_shown_to_those_who_have_some(tmp_path):
    fresh = Keys.fresh()
    keys = Keys(public=fresh.public, secret=fresh.secret, peers=frozenset([fresh.public]))
    node = Node(encode(hybrid_layout()), Fabric(), name="guarded", keys=keys)
    file = tmp_path / "keys.json"
    others = [Keys.fresh().public, keys.public]
    file.write_text(json.dumps({"public": keys.public, "secret": keys.secret, "peers": others}))
    shown = kvstow("peers", node.address, "--keys-file", str(file))
    refused = kvstow("peers", node.address)
    node.close()
    assert shown.returncode == 0, shown.stdout
    assert "guarded" in shown.stdout
    assert refused.returncode == 1
    assert "hint: an agent with keys answers only those that have some" in refused.stdout
    file.write_text("{}")
    assert kvstow("peers", node.address, "--keys-file", str(file)).returncode == 2


def test_peers_finds_agents_by_a_name_in_dns(tmp_path):
    """The system's resolver asks a DNS server in a network of its own: two addresses, one name."""
    own_network = ["unshare", "-rmn"]
    if subprocess.run([*own_network, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no network of its own without user namespaces")
    command = [*own_network, sys.executable, str(Path(dns_name.__file__)), str(tmp_path)]
    source = f"dns://{dns_name.NAME}:{dns_name.PORT}"
    command += [sys.executable, "-m", "kvstow", "peers", "--json", source]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    found = {each["agent"]: each["address"] for each in json.loads(done.stdout)}
    assert found == {f"agent-{each}": f"tcp://{each}:{dns_name.PORT}" for each in dns_name.HOSTS}


def test_peers_finds_agents_that_have_a_lease_in_etcd(pair, tmp_path):
    port = free_port()
    source = f"etcd://127.0.0.1:{port}/kvstow/"
    with etcd(tmp_path, port):
        with EtcdLease(source, "prefill", pair[0].address):
            found = json.loads(kvstow("peers", "--json", source).stdout)
            assert [each["agent"] for each in found] == ["prefill"]
        assert json.loads(kvstow("peers", "--json", source).stdout) == []
    gone = kvstow("peers", source)
    assert gone.returncode == 2
    assert source in gone.stderr


def test_peers_shows_what_may_be_asked_for_and_why_questions_got_no_ticket(pair):
    """Its layout has recurrent states: none of them is lent."""
    producer, consumer = pair
    producer.agent.register({0: Blocks.first([1])}, {0: [bytes(32)]})
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(
            consumer.agent.ask, producer.address, [bytes(32)], step=4, seconds=30
        )
        wait_for(lambda: producer.agent.settle() or asking.done())
    assert asking.result() is None
    shown = kvstow("peers", producer.address).stdout
    said = "1 block to be asked for, 0 of 1 question answered with a ticket (1 for recurrent states"
    assert said in shown
    (document,) = json.loads(kvstow("peers", "--json", producer.address).stdout)
    assert document["answers"] == {"states": 1}
    name = producer.agent.name
    shown = kvstow("peers", consumer.address).stdout
    assert f"{name} had no ticket for 1 question: 1 for recurrent states" in shown
    (document,) = json.loads(kvstow("peers", "--json", consumer.address).stdout)
    assert [peer["misses"] for peer in document["peers"]] == [{"states": 1}]


def test_bench_transfer_prints_its_stable_keys():
    done = kvstow("bench", "transfer", "--rows", "8", "--layers", "2", "--repeats", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert "note: round 2 of 2" in done.stderr
    assert "not verified" not in done.stderr
    found = json.loads(done.stdout)
    assert {"ratio_to_raw", "ratio_to_per_layer", "overhead_us_per_pull", "machine"} <= set(found)
    assert found["descriptors"]["prepared"] == found["descriptors"]["built"] == 8 * 2 * 2
    assert found["descriptors"]["contiguous"] == 1
    assert 1 < found["descriptors"]["rows"] <= 8
    assert found["row_bytes"] == 2 * 2 * 16384
    times = (
        "ratio_to_per_layer",
        "ratio_to_per_layer_built",
        "producer_us_per_pull",
        "contact_million_rows_ms",
        "contact_million_rows_nixl_ms",
    )
    assert all(isinstance(found[name], float) for name in times)
