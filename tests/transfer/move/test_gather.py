"""Short copies that a producer gathers before it writes them: chosen by price, byte-exact, and a
slot is nobody else's before its writes are quiet."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kvstow.errors import ArenaError, CopyError
from kvstow.memory import cuda
from kvstow.memory.arena import Arena
from kvstow.memory.copy import CopyHandle, copy
from kvstow.memory.kernels import copy as kernels
from kvstow.plan.alignment import Alignment
from kvstow.plan.layout import Layout
from kvstow.plan.manifest import encode
from kvstow.route import ways
from kvstow.route.copies import Copies, num_stretches
from kvstow.route.ways import Amount, gathers
from kvstow.transfer.move import gather
from kvstow.transfer.move.staged import SLOTS, Stage
from kvstow.transfer.peers.endpoint import Endpoint
from kvstow.transfer.transport.base import Region
from kvstow.transfer.transport.local import Fabric, LocalTransport
from strategies import Served
from transfer_node import ALL_RETENTIONS, Node, rows_for
from waiting import wait_for

TOKENS = 130
OPTIONS: dict[str, Any] = {
    "transfer_seconds": 15.0,
    "heartbeat_seconds": 0.1,
    "drain_seconds": 0.3,
    "quarantine_seconds": 1.0,
    "slot_bytes": 2000,
}
ENGINE_STEP = 64
"""Bytes that an engine moves in a turn: a slot takes several."""


def layout(block_tokens: int, order: str = "BLHNC", tp: int = 1, rank: int = 0) -> Layout:
    states = {kind.retention: block_tokens for kind in ALL_RETENTIONS}
    how = Served(tp=tp, pp=1, states=states, order=order, pack="packed", alignment=Alignment())
    return how.layout(ALL_RETENTIONS, rank, 0, TOKENS)


SHORT, LONG = layout(4), layout(64)
SOURCE, TARGET = rows_for(SHORT, TOKENS, 1), rows_for(LONG, TOKENS, 2)

Make = Callable[..., Node]


@pytest.fixture
def fabric() -> Fabric:
    return Fabric()


@pytest.fixture
def node(fabric: Fabric) -> Iterator[Make]:
    """A function that makes a node, which gathers whatever it writes."""
    made: list[Node] = []

    def make(where: Layout, name: str, *, step: int = 64 << 20, **options: Any) -> Node:
        transport = LocalTransport(fabric, step_bytes=step)
        how = {**OPTIONS, **options}
        made.append(Node(encode(where), name=name, options=how, transport=transport))
        made[-1].agent.endpoint.gathers = True
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def pair(node: Make) -> tuple[Node, Node]:
    made = node(SHORT, "producer", step=ENGINE_STEP), node(LONG, "consumer")
    made[0].fill(SOURCE)
    made[1].agent.connect(made[0].address)
    return made


def pull(producer: Node, consumer: Node, **how: Any) -> dict[str, Any]:
    return consumer.pull([producer.offer(SOURCE, TOKENS)], TARGET, direction="write", **how)


def slots(producer: Node) -> int:
    return producer.agent.endpoint.num_slots_in_use


# ── bytes ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("ends", "slot_bytes", "tokens"),
    [
        ((SHORT, LONG), None, (0, TOKENS)),
        ((SHORT, LONG), 32, (17, TOKENS)),
        ((SHORT, LONG), 100, (33, 41)),
        ((SHORT, LONG), 100, (0, TOKENS)),
        ((SHORT, LONG), 4096, (64, 65)),
        ((LONG, SHORT), 100, (0, TOKENS)),
        ((LONG, SHORT), 300, (0, 1)),
        ((SHORT, layout(1)), 100, (1, 20)),
        ((layout(2), layout(2, "BLNHC")), 100, (0, 3)),
        ((SHORT, layout(32, "LBNHC")), 300, (5, TOKENS)),
        ((layout(16, "LBHNC"), layout(64, "BHLNC")), 300, (0, TOKENS)),
        ((SHORT, layout(16, tp=2)), 300, (0, TOKENS)),
        ((SHORT, SHORT), 300, (0, TOKENS)),
    ],
)
def test_gathered_bytes_are_exact_in_every_group_and_no_other_changes(
    node, ends, slot_bytes, tokens
):
    start, end = tokens
    source, target = rows_for(ends[0], end, 1), rows_for(ends[1], end, 2)
    producer = node(ends[0], "producer", slot_bytes=slot_bytes)
    consumer = node(ends[1], "consumer", slot_bytes=slot_bytes)
    producer.fill(source)
    before = producer.memory.copy()
    ticket = producer.offer(source, end)
    stats = consumer.pull([ticket], target, start_token=start, direction="write", digest="always")
    assert stats.get("directions") == ["write"], stats
    assert stats["digest"] == "passed"
    assert consumer.check(target, start, end) == ""
    assert (producer.memory == before).all()
    assert slots(producer) == 0


def test_far_fewer_descriptors_are_written_and_as_many_bytes(pair):
    producer, consumer = pair
    gathered = pull(producer, consumer)
    producer.agent.endpoint.gathers = False
    direct = pull(producer, consumer)
    assert gathered["bytes"] == direct["bytes"]
    assert 4 * gathered["descriptors"] < direct["descriptors"]
    assert slots(producer) == 0


def test_ranks_of_a_producer_gather_into_the_same_rows(node):
    ranks = [layout(16, "BHLNC", 2, rank) for rank in range(2)]
    listed = [rows_for(where, TOKENS, i) for i, where in enumerate(ranks)]
    producers = [node(where, f"rank {i}", step=ENGINE_STEP) for i, where in enumerate(ranks)]
    for producer, rows in zip(producers, listed, strict=True):
        producer.fill(rows)
    consumer = node(LONG, "consumer")
    tickets = [p.offer(rows, TOKENS) for p, rows in zip(producers, listed, strict=True)]
    stats = consumer.pull(tickets, TARGET, direction="write", digest="always")
    assert stats.get("directions") == ["write", "write"], stats
    assert consumer.check(TARGET, 0, TOKENS) == ""


def test_several_consumers_share_the_slots(node, pair):
    producer, _ = pair
    consumers = [node(LONG, f"consumer {i}") for i in range(4)]
    pulls = [
        each.begin_pull([producer.offer(SOURCE, TOKENS)], TARGET, direction="write")
        for each in consumers
    ]
    for each, number in zip(consumers, pulls, strict=True):
        stats = each.end_pull(number)
        assert "error" not in stats, stats
        assert each.check(TARGET, 0, TOKENS) == ""
    assert slots(producer) == 0


# ── the choice ────────────────────────────────────────────────────────────────────────


def copies(count: int, nbytes: int, together: int) -> Copies:
    """So many copies, of which that many at a time fill one stretch, in no order."""
    starts = np.arange(count) * nbytes
    order = np.random.default_rng(count).permutation(count)
    places = starts + np.arange(count) // together
    return Copies(starts[order] * 2, places[order], np.full(count, nbytes))


@pytest.mark.parametrize(
    ("count", "nbytes", "together", "writes"),
    [
        (131072, 8 << 10, 1024, 128),  # Llama-8B, 16 to 64 tokens
        (16384, 8 << 10, 64, 256),  # tp 1 to 8
        (40960, 8 << 10, 1, 40960),  # Llama-70B, tp 8 to 4: nothing meets
        (1536, 12 << 10, 3, 512),
        (511, 2 << 20, 2, 511),  # whole rows, of which some meet
        (4096, 256 << 10, 32, 4096),  # long enough
        (257, 8, 257, 257),  # too few
        (258, 8, 258, 1),
        (1, 1, 1, 1),
        (0, 0, 1, 0),
    ],
)
def test_copies_are_gathered_where_that_saves_many_writes(count, nbytes, together, writes):
    pieces, stretches = (
        Amount(count, count * nbytes),
        num_stretches(copies(count, nbytes, together)),
    )
    assert gathers(pieces, stretches, on_device=True) == (writes < count)
    assert stretches == writes or writes == count
    assert not gathers(pieces, stretches, on_device=False)


def test_a_producer_on_a_device_gathers_by_itself_and_one_on_a_host_does_not(pair):
    producer, consumer = pair
    endpoint = producer.agent.endpoint
    counts = {}
    for kind in ("DRAM", "VRAM"):
        endpoint.gathers, endpoint.kind = True, "DRAM"
        endpoint.scratch()  # made before: there is no device here
        endpoint.gathers, endpoint.kind = None, kind
        with mock.patch.object(ways, "LEAST_SAVED", 32):
            counts[kind] = pull(producer, consumer, digest="always")["descriptors"]
        assert consumer.check(TARGET, 0, TOKENS) == ""
    assert 4 * counts["VRAM"] < counts["DRAM"], counts


# ── what is ready before the first pull ───────────────────────────────────────────────


@contextmanager
def compiled() -> Iterator[list[int]]:
    """The lengths of words for which the kernel has to be compiled. It is not run: copies into
    slots are also made as they are on a host."""
    words: list[int] = []

    def counted(source: Any, destination: Any, table: Any, word: int, **how: Any) -> None:
        if word not in words:
            words.append(word)

    def by_kernel(source: Arena, destination: Arena, wanted: Copies) -> CopyHandle:
        cuda.gather(source.bytes, destination.bytes, wanted)
        return copy(source, destination, wanted)

    def on_host(_: Endpoint, slots: Stage) -> Region:
        return Region(slots.arena.address, slots.arena.nbytes)

    with (
        mock.patch.object(kernels, "copy_runs", counted),
        mock.patch("kvstow.transfer.move.staged.copy", by_kernel),
        mock.patch.object(Endpoint, "_scratch_region", on_host),  # there is no device here
    ):
        yield words


def wait_until_ready(producer: Node) -> None:
    loop = producer.agent.loop
    wait_for(lambda: not any(task.name.startswith("get ready") for task in tuple(loop.tasks)))


@pytest.mark.parametrize(
    "ends", [(SHORT, LONG), (LONG, SHORT), (layout(2, "LBHNC"), layout(3)), (SHORT, SHORT)]
)
def test_after_contact_the_first_gather_compiles_nothing_and_takes_no_memory(node, ends):
    source, target = (rows_for(end, TOKENS, i) for i, end in enumerate(ends))
    producer, consumer = node(ends[0], "producer"), node(ends[1], "consumer")
    producer.fill(source)
    endpoint = producer.agent.endpoint
    endpoint.kind = "VRAM"
    with compiled() as words:
        consumer.agent.connect(producer.address)
        wait_until_ready(producer)
        ready = list(words)
        assert ready
        with mock.patch("kvstow.transfer.peers.endpoint.Stage") as more:
            for start, end in ((0, TOKENS), (1, TOKENS), (63, 66), (7, 8)):
                ticket = producer.offer(rows_for(ends[0], end, 0), end)
                into = rows_for(ends[1], end, 1)
                told = consumer.pull([ticket], into, start_token=start, direction="write")
                assert "error" not in told, told
        assert words == ready
    more.assert_not_called()
    producer.fill(source)
    assert "error" not in consumer.pull([producer.offer(source, TOKENS)], target, digest="always")


def test_a_producer_that_gathers_nothing_takes_no_memory_for_slots_at_contact(node):
    same, other = node(SHORT, "same"), node(LONG, "on a host")
    same.agent.endpoint.gathers, same.agent.endpoint.kind = None, "VRAM"
    other.agent.endpoint.gathers = None
    consumer = node(SHORT, "consumer")
    with compiled() as words:
        for producer in (same, other):
            consumer.agent.connect(producer.address)
            wait_until_ready(producer)
            assert producer.agent.endpoint._scratch is None
    assert words == []


# ── slots that are not to be had ──────────────────────────────────────────────────────


def test_rows_are_written_as_they_lie_while_others_have_all_slots(pair):
    producer, consumer = pair
    scratch = producer.agent.endpoint.scratch()
    few = pull(producer, consumer)["descriptors"]
    taken = [scratch._free.popleft() for _ in range(SLOTS)]
    consumer.wipe()
    with mock.patch.object(gather, "PATIENCE", 0.05):
        stats = pull(producer, consumer, digest="always")
    assert stats["descriptors"] > 4 * few
    assert consumer.check(TARGET, 0, TOKENS) == ""
    scratch._free.extend(taken)
    assert pull(producer, consumer)["descriptors"] == few


def test_a_slot_that_comes_free_in_time_is_waited_for(pair):
    producer, consumer = pair
    scratch = producer.agent.endpoint.scratch()
    few = pull(producer, consumer)["descriptors"]
    taken = [scratch._free.popleft() for _ in range(SLOTS)]
    with mock.patch.object(gather, "PATIENCE", 60.0):
        number = consumer.begin_pull(
            [producer.offer(SOURCE, TOKENS)], TARGET, direction="write", deadline=60
        )
        wait_for(lambda: producer.agent.server.servings)
        assert not producer.agent.endpoint.flights
        scratch._free.extend(taken)
        assert consumer.end_pull(number)["descriptors"] == few
    assert consumer.check(TARGET, 0, TOKENS) == ""


def test_rows_are_written_as_they_lie_where_there_is_no_memory_for_slots(node):
    producer, consumer = node(SHORT, "producer"), node(LONG, "consumer")
    producer.fill(SOURCE)
    full = mock.patch("kvstow.transfer.peers.endpoint.Stage", side_effect=ArenaError("full"))
    with full as asked:
        assert "error" not in pull(producer, consumer, digest="always")
    assert asked.call_count >= 2  # at contact, and for the pull
    assert consumer.check(TARGET, 0, TOKENS) == ""


def test_slots_are_known_to_an_engine_that_replaces_another(pair):
    producer, consumer = pair
    assert "error" not in pull(producer, consumer)
    scratch = producer.agent.endpoint.scratch().arena
    fresh = LocalTransport(Fabric())
    producer.agent.endpoint._register(fresh)
    assert fresh.holds(scratch.address, scratch.nbytes)


# ── what goes wrong ───────────────────────────────────────────────────────────────────


def test_an_aborted_pull_has_its_slots_given_back_when_their_writes_are_quiet(pair, fabric):
    producer, consumer = pair
    assert "error" not in pull(producer, consumer)
    names = [each.agent.endpoint.transport.name for each in pair]
    ticket = producer.offer(SOURCE, TOKENS, lease_seconds=600)
    consumer.wipe()
    fabric.cut(*names)
    number = consumer.begin_pull([ticket], TARGET, direction="write", deadline=60)
    wait_for(lambda: producer.agent.endpoint.flights)
    consumer.abort(number)
    assert consumer.end_pull(number)["kind"] == "aborted"
    servings = producer.agent.server.servings
    wait_for(lambda: all(serving.is_stopping for serving in tuple(servings.values())))
    assert slots(producer) > 0  # something may still be written from there
    assert not consumer.wait_quiet(number, 0.2)
    fabric.reconnect(*names)
    assert consumer.wait_quiet(number, 15)
    wait_for(lambda: slots(producer) == 0)
    assert "error" not in pull(producer, consumer, digest="always")
    assert consumer.check(TARGET, 0, TOKENS) == ""


def test_a_lease_withdrawn_in_the_middle_is_an_error_and_leaves_no_slot_in_use(pair, fabric):
    producer, consumer = pair
    names = [each.agent.endpoint.transport.name for each in pair]
    ticket = producer.offer(SOURCE, TOKENS)
    fabric.cut(*names)
    number = consumer.begin_pull([ticket], TARGET, direction="write", deadline=60)
    wait_for(lambda: producer.agent.endpoint.flights)
    producer.withdraw(ticket)
    assert consumer.end_pull(number)["kind"] == "expired"
    fabric.reconnect(*names)
    assert consumer.wait_quiet(number, 15)
    wait_for(lambda: slots(producer) == 0)


def test_a_producer_that_dies_in_the_middle_is_an_error_and_its_rows_come_free(pair, fabric):
    producer, consumer = pair
    names = [each.agent.endpoint.transport.name for each in pair]
    ticket = producer.offer(SOURCE, TOKENS)
    fabric.cut(*names)
    number = consumer.begin_pull([ticket], TARGET, direction="write", digest="off")
    wait_for(lambda: producer.agent.endpoint.flights)
    fabric.kill(names[0])
    fabric.reconnect(*names)
    result = consumer.end_pull(number)
    assert result.get("kind") in ("peer", "transport", "timeout"), result
    assert consumer.wait_quiet(number, 15)
    assert consumer.held() == 0


def test_a_consumer_that_dies_in_the_middle_costs_no_slot(node, pair, fabric):
    producer, consumer = pair
    names = [each.agent.endpoint.transport.name for each in pair]
    fabric.cut(*names)
    ticket = producer.offer(SOURCE, TOKENS, lease_seconds=1.0)
    consumer.begin_pull([ticket], TARGET, direction="write")
    wait_for(lambda: producer.agent.endpoint.flights)
    fabric.kill(names[1])
    fabric.reconnect(*names)
    wait_for(lambda: slots(producer) == 0)
    after = node(LONG, "after")
    assert "error" not in pull(producer, after, digest="always")
    assert after.check(TARGET, 0, TOKENS) == ""


def test_a_copy_into_a_slot_that_fails_is_an_error_that_leaves_no_slot_in_use(pair):
    producer, consumer = pair
    with mock.patch("kvstow.transfer.move.staged.copy", side_effect=CopyError("no")):
        result = pull(producer, consumer)
    assert result["kind"] == "transport", result
    assert slots(producer) == 0
    assert "error" not in pull(producer, consumer)


@pytest.mark.parametrize("digest", ["off", "always"])
def test_rows_reused_while_they_are_gathered_are_never_accepted(pair, digest):
    producer, consumer = pair
    copied = gather.copied
    tripped: list[int] = []

    def in_the_middle(*args: Any) -> Any:
        tripped.append(len(tripped))
        if len(tripped) == 3:
            producer.reuse(SOURCE, salt=99)
        yield from copied(*args)

    with mock.patch.object(gather, "copied", in_the_middle):
        result = pull(producer, consumer, digest=digest)
    assert result.get("kind") in ("fence", "digest"), result
    assert len(tripped) > 3


def test_a_slot_that_is_reused_before_its_writes_are_quiet_is_found(pair):
    """What the bytes above would show of a producer that gives slots back too early."""
    producer, consumer = pair
    scratch = producer.agent.endpoint.scratch()
    moved = gather.moved

    def early(endpoint: Any, *how: Any, **rest: Any) -> Any:
        slot = (int(how[-1].source[0]) - scratch.arena.address) // scratch.slot_bytes
        scratch._free.appendleft(slot)
        yield from moved(endpoint, *how, **rest)

    with (
        mock.patch.object(gather, "moved", early),
        mock.patch.object(gather, "when_quiet"),
    ):
        assert "error" not in pull(producer, consumer, digest="off")
        assert "bytes wrong" in consumer.check(TARGET, 0, TOKENS)
        assert pull(producer, consumer, digest="always")["kind"] == "digest"
    assert "error" not in pull(producer, consumer, digest="always")
    assert consumer.check(TARGET, 0, TOKENS) == ""
