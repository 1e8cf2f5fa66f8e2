"""`kvstow peers` and `kvstow bench transfer`, run as a user runs them."""

import json
import subprocess
import sys

import pytest

from kvstow.plan.manifest import encode
from kvstow.transfer.channel.curve import Keys
from kvstow.transfer.transport.local import Fabric
from transfer_node import Node, hybrid_layout, rows_for


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


def test_bench_transfer_prints_its_stable_keys():
    done = kvstow("bench", "transfer", "--rows", "8", "--layers", "2", "--repeats", "1", "--json")
    assert done.returncode == 0, done.stderr
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
