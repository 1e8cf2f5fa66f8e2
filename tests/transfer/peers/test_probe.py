"""The way that is chosen between two agents."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from msgspec import structs

from kvstow.plan.group import grouped
from kvstow.plan.layout import Layout
from kvstow.plan.manifest import encode
from kvstow.plan.pack import Site, packed
from kvstow.plan.retention import Full
from kvstow.route import ways
from kvstow.route.ways import Amount
from kvstow.transfer.move.staged import SLOTS
from kvstow.transfer.peers import probe
from kvstow.transfer.peers.endpoint import PROBE_BYTES
from kvstow.transfer.peers.probe import Path, chosen
from kvstow.transfer.transport.local import Fabric
from transfer_node import Node, attention, rows_for


@pytest.mark.parametrize(
    ("read", "write", "staged", "expected"),
    [
        (5.0, 5.0, 0.0, "read"),
        (5.0, 9.0, 0.0, "read"),
        (0.48, 144.0, 3.0, "write"),  # one H200, device to device
        (0.44, 0.6, 3.2, "staged"),  # one H200, device to host
        (5.0, 0.0, 9.0, "read"),
        (0.0, 0.0, 0.0, "read"),
    ],
)
def test_the_fastest_way_is_chosen_and_the_simpler_one_where_there_is_little_to_gain(
    read, write, staged, expected
):
    assert chosen(read, write, staged).direction == expected
    assert chosen(read, write, staged, "write").direction == "write"


@pytest.mark.parametrize(
    ("count", "nbytes", "way"),
    [
        (20480, 8 << 10, "staged"),  # Llama-70B, tp 8 to 4
        (47104, 16 << 10, "staged"),
        (47104, 32 << 10, "write"),  # 5 GB/s written: staged is not twice as fast
        (512, 1 << 20, "write"),
        (128, 8 << 20, "write"),  # Llama-8B, 16 to 64 tokens, gathered by the producer
        (1, 1, "staged"),
        (0, 0, "write"),
    ],
)
def test_so_many_small_writes_are_staged_that_they_are_slower(count, nbytes, way):
    # rates that first contact found on one H200, the staged one an estimate; 6 µs by its writes
    path = Path(
        direction="write",
        read_rate=2.3e9,
        write_rate=68e9,
        staged_rate=6.3e9,
        seconds_per_write=6e-6,
    )
    assert path.direction_of(Amount(count, count * nbytes)) == way


def test_a_price_that_was_not_measured_changes_nothing():
    for direction in ("read", "write", "staged"):
        path = Path(direction=direction, read_rate=1.0, write_rate=1.0, staged_rate=9e9)
        assert path.direction_of(Amount(1000, 1000)) == direction


# ── agents ────────────────────────────────────────────────────────────────────────────


TOKENS = 30
OPTIONS = {"slot_bytes": 256}


def layout(block_tokens: int, num_slabs: int = 12) -> Layout:
    layers = [attention(f"layers.{i}", Full(), block_tokens) for i in range(3)]
    return packed(grouped(layers), num_slabs=num_slabs, site=Site(model="probed"))


SHORT, LONG = layout(4), layout(16)
SOURCE = rows_for(SHORT, TOKENS, 1)


@pytest.fixture
def met() -> Iterator[Callable[[Layout], tuple[Node, Node]]]:
    """A function that makes a producer with short blocks, and a consumer with this layout which
    takes its memory for a device's and finds writing to be fast."""
    nodes: list[Node] = []

    def made(where: Layout) -> tuple[Node, Node]:
        fabric = Fabric()
        pair = (
            Node(encode(SHORT), fabric, name="producer", options=OPTIONS),
            Node(encode(where), fabric, name="consumer", options=OPTIONS),
        )
        nodes.extend(pair)
        pair[0].fill(SOURCE)
        pair[1].agent.endpoint.kind = "VRAM"
        with (
            mock.patch.object(ways, "PREFER_READ", 1e-6),
            mock.patch.object(probe, "STAGED_SHARE", 1e-9),
        ):
            pair[1].agent.connect(pair[0].address)
        return pair

    yield made
    for node in nodes:
        node.close()


def priced(consumer: Node, producer: Node, seconds: float) -> None:
    """Give the agent prices as if it had measured them."""
    peer = consumer.agent.connect(producer.address)
    assert peer.path is not None
    peer.path = replace(
        peer.path, write_rate=50e9, staged_rate=5e9, seconds_per_write=seconds, forced=False
    )


def pretended(consumer: Node, producer: Node, **changes: Any) -> None:
    """Have the consumer take the producer for another one."""
    peer, endpoint = consumer.agent.connect(producer.address), consumer.agent.endpoint
    assert peer.card is not None
    peer.card = structs.replace(peer.card, **changes)
    endpoint._cards[peer.card.engine] = peer.card


def test_what_a_write_costs_is_measured_on_a_device_where_layouts_differ(met):
    for where, is_measured in ((LONG, True), (SHORT, False)):
        producer, consumer = met(where)
        path = consumer.agent.connect(producer.address).path
        assert path.direction == "write"
        assert (path.seconds_per_write > 0) == is_measured


def test_slots_that_are_smaller_than_a_probe_do_not_hinder_a_device_s_first_contact(met):
    producer, consumer = met(SHORT)
    assert SLOTS * OPTIONS["slot_bytes"] < PROBE_BYTES
    assert consumer.agent.connect(producer.address).path.staged_rate > 0


@pytest.mark.parametrize(("seconds", "way"), [(1e-3, "staged"), (1e-12, "write")])
def test_many_copies_are_staged_where_that_is_cheaper_than_writing_them(met, seconds, way):
    producer, consumer = met(LONG)
    into = rows_for(LONG, TOKENS, 2)
    priced(consumer, producer, seconds)
    stats = consumer.pull([producer.offer(SOURCE, TOKENS)], into)
    assert stats["directions"] == [way], stats
    assert consumer.check(into, 0, TOKENS) == ""


@pytest.mark.parametrize(("kind", "way"), [("DRAM", "staged"), ("VRAM", "write")])
def test_copies_that_a_producer_gathers_cost_as_few_writes_as_it_makes(met, kind, way):
    producer, consumer = met(LONG)
    into = rows_for(LONG, TOKENS, 2)
    priced(consumer, producer, 1e-7)
    pretended(consumer, producer, kind=kind)
    with mock.patch.object(ways, "LEAST_SAVED", 16):
        stats = consumer.pull([producer.offer(SOURCE, TOKENS)], into)
    assert stats["directions"] == [way], stats
    assert consumer.check(into, 0, TOKENS) == ""


def test_a_forced_way_is_taken_whatever_it_costs(met):
    producer, consumer = met(LONG)
    priced(consumer, producer, 1e-3)
    for way in ("write", "read", "staged"):
        stats = consumer.pull(
            [producer.offer(SOURCE, TOKENS)], rows_for(LONG, TOKENS, 2), direction=way
        )
        assert stats.get("directions") == [way], stats


@pytest.mark.parametrize("who", ["producer", "consumer"])
def test_nothing_is_staged_where_one_side_has_no_slots(met, who):
    producer, consumer = met(LONG)
    priced(consumer, producer, 1e-3)
    if who == "consumer":
        consumer.agent.endpoint.stage = None
    else:
        pretended(consumer, producer, stage=None)
    stats = consumer.pull([producer.offer(SOURCE, TOKENS)], rows_for(LONG, TOKENS, 2))
    assert stats["directions"] == ["write"]
