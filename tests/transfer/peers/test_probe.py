"""What agents measure at first contact."""

from concurrent.futures import Future

import numpy as np
import pytest

from kvstow.errors import TransferError
from kvstow.plan.group import grouped
from kvstow.plan.layout import Layout
from kvstow.plan.manifest import encode
from kvstow.plan.pack import Site, packed
from kvstow.plan.retention import Full
from kvstow.route.ways import Path, Rates
from kvstow.transfer.loop import Task
from kvstow.transfer.peers.probe import _slot_rate
from kvstow.transfer.slots import SLOTS, Stage
from kvstow.transfer.transport.local import Fabric
from transfer_node import CANARY, Node, attention, rows_for

TOKENS = 30


def layout(block_tokens: int, num_slabs: int = 12) -> Layout:
    layers = [attention(f"layers.{i}", Full(), block_tokens) for i in range(3)]
    return packed(grouped(layers), num_slabs=num_slabs, site=Site(model="probed"))


def test_both_ways_are_measured_with_long_and_short_pieces_and_a_forced_one_is_not():
    fabric = Fabric()
    producer = Node(encode(layout(4)), fabric, name="producer")
    consumer = Node(encode(layout(16)), fabric, name="consumer")
    forced = Node(encode(layout(16)), fabric, name="forced", options={"direction": "write"})
    path = consumer.agent.connect(producer.address).path
    assert min(*path.read, *path.write, path.slots) > 0
    peer = forced.agent.connect(producer.address)
    assert (peer.path, peer.way()["direction"]) == (Path(), "write")
    for node in (consumer, forced, producer):
        node.close()


def test_what_is_measured_between_slots_touches_no_slot_that_is_in_use():
    fabric = Fabric()
    producer = Node(encode(layout(4)), fabric, name="producer")
    consumer = Node(encode(layout(16)), fabric, name="consumer")
    agent = consumer.agent
    card = agent.connect(producer.address).card
    stage = agent.endpoint.stage
    memory = stage.arena.bytes.numpy()
    memory[:] = CANARY
    in_use = [next_slot(stage) for _ in range(SLOTS)]

    def measured() -> "Future[float]":
        return agent.loop.future(
            Task("probe"),
            _slot_rate(agent.endpoint, card, 4 << 20),
            seconds=0.5,
            late=lambda: TransferError("late", kind="timeout"),
        )

    with pytest.raises(TransferError, match="late"):
        measured().result(5)
    assert (memory == CANARY).all()
    stage.give(in_use[2])
    assert measured().result(5) > 0
    others = np.ones(len(memory), bool)
    others[in_use[2] : in_use[2] + stage.slot_bytes] = False
    assert (memory[others] == CANARY).all()
    assert not (memory[~others] == CANARY).all()
    assert stage.num_free == 1
    for node in (consumer, producer):
        node.close()


def next_slot(stage: Stage) -> int:
    """The place of a free slot, taken."""
    with pytest.raises(StopIteration) as taken:
        next(stage.take())
    return taken.value.value


@pytest.mark.parametrize("way", ["write", "read", "slots"])
def test_the_way_that_was_found_is_taken(way):
    fabric = Fabric()
    producer = Node(encode(layout(4)), fabric, name="producer")
    consumer = Node(encode(layout(16)), fabric, name="consumer")
    source, into = rows_for(layout(4), TOKENS, 1), rows_for(layout(16), TOKENS, 2)
    producer.fill(source)
    peer = consumer.agent.connect(producer.address)
    peer.path = Path(**{way: 9e9 if way == "slots" else Rates(9e9, 9e9)})
    stats = consumer.pull([producer.offer(source, TOKENS)], into)
    assert stats.get("directions") == [way], stats
    assert consumer.check(into, 0, TOKENS) == ""
    for node in (consumer, producer):
        node.close()
