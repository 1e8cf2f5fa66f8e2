"""Rows read whole and cut here: chosen by price, byte-exact, quiet when given up."""

import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from kvstow.errors import ArenaError
from kvstow.plan.alignment import Alignment
from kvstow.plan.manifest import encode
from kvstow.route.price import LinkSpeed
from kvstow.transfer.move.staged import SLOTS
from kvstow.transfer.peers.probe import Path
from kvstow.transfer.transport.local import Fabric, LocalTransport
from strategies import Served
from transfer_node import ALL_RETENTIONS, CANARY, Node, rows_for

TOKENS = 90
OPTIONS = {
    "transfer_seconds": 15.0,
    "heartbeat_seconds": 0.1,
    "drain_seconds": 0.3,
    "quarantine_seconds": 1.0,
}


def layout(block_tokens: int) -> Any:
    states = {kind.retention: block_tokens for kind in ALL_RETENTIONS}
    how = Served(tp=1, pp=1, states=states, order="BLHNC", pack="packed", alignment=Alignment())
    return how.layout(ALL_RETENTIONS, 0, 0, TOKENS)


SHORT, LONG = layout(16), layout(64)
SOURCE, TARGET = rows_for(SHORT, TOKENS, 1), rows_for(LONG, TOKENS, 2)


@pytest.fixture
def fabric() -> Fabric:
    return Fabric()


@pytest.fixture
def pair(fabric: Fabric) -> Iterator[tuple[Node, Node]]:
    made = (
        Node(encode(SHORT), fabric, name="producer", options=OPTIONS),
        Node(encode(LONG), fabric, name="consumer", options=OPTIONS),
    )
    made[0].fill(SOURCE)
    yield made
    for node in made:
        node.close()


def slots(consumer: Node) -> int:
    return consumer.agent.endpoint.num_slots_in_use


def priced(consumer: Node, producer: Node, link: float, here: float) -> None:
    """Give the agent prices as if it had measured them: seconds per copy."""
    peer = consumer.agent.connect(producer.address)
    peer.path = Path(direction="read", read_rate=1e9, write_rate=1e9)
    peer.link = LinkSpeed(name="link", bytes_per_second=1e9, seconds_per_copy=link)
    consumer.agent.endpoint.copy_speed = LinkSpeed(
        name="here", bytes_per_second=1e9, seconds_per_copy=here
    )


@pytest.mark.parametrize(
    ("slot_bytes", "tokens"),
    [
        (None, (0, TOKENS)),
        (32, (17, TOKENS)),
        (32, (0, 1)),
        (100, (33, 41)),
        (100, (0, TOKENS)),
        (4096, (64, 65)),
    ],
)
def test_cut_rows_are_byte_exact_in_every_group(fabric, slot_bytes, tokens):
    start, end = tokens
    producer = Node(encode(SHORT), fabric, name="producer")
    consumer = Node(encode(LONG), fabric, name="consumer", options={"slot_bytes": slot_bytes})
    source, target = rows_for(SHORT, end, 1), rows_for(LONG, end, 2)
    producer.fill(source)
    ticket = producer.offer(source, end)
    stats = consumer.pull([ticket], target, start_token=start, direction="rows", digest="always")
    assert stats.get("directions") == ["rows"], stats
    assert stats["digest"] == "passed"
    assert consumer.check(target, start, end) == ""
    assert slots(consumer) == 0
    for node in (consumer, producer):
        node.close()


@pytest.mark.parametrize(
    ("link", "here", "way"), [(1e-3, 1e-6, "rows"), (1e-6, 1e-3, "read"), (1e-3, 1e-3, "read")]
)
def test_the_cheaper_way_is_taken(pair, link, here, way):
    producer, consumer = pair
    priced(consumer, producer, link, here)
    stats = consumer.pull([producer.offer(SOURCE, TOKENS)], TARGET)
    assert stats["directions"] == [way]
    assert consumer.check(TARGET, 0, TOKENS) == ""


def test_far_fewer_descriptors_are_read(pair):
    producer, consumer = pair
    direct, rows = (
        consumer.pull([producer.offer(SOURCE, TOKENS)], TARGET, direction=way)
        for way in ("read", "rows")
    )
    assert rows["descriptors"] <= sum(len(ids) for ids, _ in SOURCE.values())
    assert 4 * rows["descriptors"] < direct["descriptors"]
    assert consumer.metric("kvstow_transfer_bytes_total", direction="rows") == rows["bytes"]


def test_prices_are_measured_once_for_a_peer_and_only_where_layouts_differ(pair, fabric):
    producer, consumer = pair
    peer = consumer.agent.connect(producer.address)
    peer.path = Path(direction="read", read_rate=1e9, write_rate=1e9)
    assert peer.link is None
    consumer.pull([producer.offer(SOURCE, TOKENS)], TARGET)
    link, here = peer.link, consumer.agent.endpoint.copy_speed
    assert link is not None
    assert here is not None
    assert min(link.seconds_per_copy, here.seconds_per_copy) >= 0
    consumer.pull([producer.offer(SOURCE, TOKENS)], TARGET)
    assert peer.link is link
    twin = Node(encode(SHORT), fabric, name="twin")
    stats = twin.pull([producer.offer(SOURCE, TOKENS)], rows_for(SHORT, TOKENS, 3))
    assert stats["directions"] != ["rows"]
    assert twin.agent.endpoint.copy_speed is None
    twin.close()


def test_rows_are_read_directly_while_all_slots_are_taken(pair):
    producer, consumer = pair
    priced(consumer, producer, link=1e-3, here=1e-6)
    scratch = consumer.agent.endpoint.scratch()
    taken = [next_of(scratch.taken()) for _ in range(SLOTS - 1)]
    stats = consumer.pull([producer.offer(SOURCE, TOKENS)], TARGET)
    assert stats["directions"] == ["read"]
    scratch.give(taken[0])
    assert consumer.pull([producer.offer(SOURCE, TOKENS)], TARGET)["directions"] == ["rows"]


def next_of(story: Any) -> Any:
    """The result of a story that need not wait."""
    with pytest.raises(StopIteration) as end:
        next(story)
    return end.value.value


def test_rows_are_read_directly_where_there_is_no_memory_for_slots(pair):
    producer, consumer = pair
    priced(consumer, producer, link=1e-3, here=1e-6)
    full = mock.patch("kvstow.transfer.peers.endpoint.Stage", side_effect=ArenaError("full"))
    with full:
        stats = consumer.pull([producer.offer(SOURCE, TOKENS)], TARGET)
        assert stats["directions"] == ["read"]
        forced = consumer.pull([producer.offer(SOURCE, TOKENS)], TARGET, direction="rows")
    assert forced["kind"] == "transport"
    assert "slots to cut rows in: full" in forced["error"]


def test_rows_of_a_device_are_cut_by_the_same_prices(pair):
    producer, consumer = pair
    priced(consumer, producer, link=1e-3, here=1e-6)
    consumer.agent.endpoint.scratch()  # made before: there is no device here
    consumer.agent.endpoint.kind = "VRAM"
    assert consumer.pull([producer.offer(SOURCE, TOKENS)], TARGET)["directions"] == ["rows"]
    assert consumer.check(TARGET, 0, TOKENS) == ""


def test_an_aborted_pull_by_rows_leaves_its_rows_quiet_and_its_slots_free(pair, fabric):
    producer, consumer = pair
    assert "error" not in consumer.pull([producer.offer(SOURCE, TOKENS)], TARGET, direction="rows")
    names = [node.agent.endpoint.transport.name for node in pair]
    ticket = producer.offer(SOURCE, TOKENS, lease_seconds=600)
    consumer.wipe()
    fabric.cut(*names)
    number = consumer.begin_pull([ticket], TARGET, direction="rows", deadline=60)
    wait_for(lambda: slots(consumer) > 0)
    consumer.abort(number)
    assert consumer.end_pull(number)["kind"] == "aborted"
    assert slots(consumer) > 0  # something may still land there
    fabric.reconnect(*names)
    assert consumer.wait_quiet(number, 15)
    wait_for(lambda: slots(consumer) == 0)
    assert (consumer.memory == CANARY).all()
    assert "error" not in consumer.pull([producer.offer(SOURCE, TOKENS)], TARGET, direction="rows")
    assert consumer.check(TARGET, 0, TOKENS) == ""


def wait_for(question: Any, seconds: float = 15.0) -> None:
    limit = time.monotonic() + seconds
    while not question():
        assert time.monotonic() < limit, "did not come true in time"
        time.sleep(0.01)


def test_slots_are_known_to_an_engine_that_replaces_another(pair):
    producer, consumer = pair
    assert "error" not in consumer.pull([producer.offer(SOURCE, TOKENS)], TARGET, direction="rows")
    scratch = consumer.agent.endpoint.scratch().arena
    fresh = LocalTransport(Fabric())
    consumer.agent.endpoint._register(fresh)
    assert fresh.holds(scratch.address, scratch.nbytes)
