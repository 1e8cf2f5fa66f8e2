"""Counters of blocks are read in ranges: each once, into its place, whatever the ids."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.errors import TransferError
from kvstow.route.blocks import Blocks
from kvstow.transfer.channel.messages import Begun, Failed
from kvstow.transfer.fence import (
    ENTRY_BYTES,
    LONG_GAP,
    QUICK_LOOKS,
    CounterRead,
    changed,
    check_fence,
    counter_ranges,
    ready_reads,
)
from kvstow.transfer.loop import NOW_AND_THEN, SOON

TABLES = (1 << 20, 1 << 24)
IDS = st.one_of(
    st.lists(st.integers(0, 50), unique=True, max_size=12),
    st.lists(st.integers(0, 299_999), unique=True, max_size=60),
    st.integers(1, 9000).map(lambda n: list(range(0, 31 * n, 31))),
)


def read(ranges, counters):
    """What a transport would do: copy every range into memory that is full of canaries."""
    memory = np.full(ranges.num_counters, -7, np.int64)
    copies = ranges.copies
    for source, place, nbytes in zip(
        copies.source.tolist(), copies.destination.tolist(), copies.nbytes.tolist(), strict=True
    ):
        group = 1 if source >= TABLES[1] else 0
        first, count = (source - TABLES[group]) // ENTRY_BYTES, nbytes // ENTRY_BYTES
        at = place // ENTRY_BYTES
        assert (memory[at : at + count] == -7).all()
        memory[at : at + count] = counters[group][first : first + count]
    assert (memory != -7).all()
    return {g: memory[where] for g, where in ranges.where.items()}


@given(IDS, IDS, st.data())
def test_exactly_the_blocks_whose_counters_moved_are_found(first, second, data):
    blocks = {0: Blocks.first(first), 1: Blocks.first(second)}
    counters = [np.arange(300_000, dtype=np.int64) * 3 + g for g in range(2)]
    expected = {g: counters[g][listed.ids] for g, listed in blocks.items()}
    moved = {}
    for g, listed in blocks.items():
        if len(listed):
            some = set(data.draw(st.lists(st.sampled_from(listed.ids.tolist()), max_size=4)))
            for block in some:
                counters[g][block] += 1
            if some:
                moved[g] = some
    found = read(counter_ranges(TABLES, blocks), counters)
    wrong = changed(found, blocks, expected)
    assert {g: set(ids) for g, ids in wrong.items()} == moved


def test_blocks_that_lie_close_together_are_one_range_and_a_long_gap_is_left_out():
    far = 5 + LONG_GAP + 1
    ranges = counter_ranges(TABLES, {0: Blocks.first([7, 4, 5, far, far + 1])})
    assert ranges.copies.nbytes.tolist() == [(far + 1 - 4 + 1) * ENTRY_BYTES]
    far = 7 + LONG_GAP
    ranges = counter_ranges(TABLES, {0: Blocks.first([7, 4, 5, far])})
    assert ranges.copies.nbytes.tolist() == [(far - 4 + 1) * ENTRY_BYTES]
    far = 7 + LONG_GAP + 1
    ranges = counter_ranges(TABLES, {0: Blocks.first([7, 4, 5, far, far + 1])})
    assert ranges.copies.nbytes.tolist() == [4 * ENTRY_BYTES, 2 * ENTRY_BYTES]


def test_two_groups_are_read_by_one_post_side_by_side():
    ranges = counter_ranges(TABLES, {0: Blocks.first([3, 2]), 1: Blocks.first([9])})
    assert ranges.copies.source.tolist() == [TABLES[0] + 16, TABLES[1] + 72]
    assert ranges.copies.destination.tolist() == [0, 16]


def test_no_blocks_need_no_reads():
    assert counter_ranges(TABLES, {0: Blocks.first([])}).num_counters == 0


class Counters:
    """An endpoint's counters, and a peer that is gone where `is_gone`."""

    def __init__(self, *, is_gone: bool = False) -> None:
        self.is_gone = is_gone
        self.taken = 0
        self.started = 0

    def take_counters(self, count):
        self.taken += 1
        return np.zeros(count, np.int64)

    def give_counters(self, memory):
        self.taken -= 1

    def post(self, operation, engine, kinds, copies):
        if self.is_gone:
            raise TransferError("gone", kind="peer")
        return self

    def after(self, ended):
        self.drop = ended

    def start(self):
        self.started += 1


CARD = SimpleNamespace(tables=TABLES, engine="engine")


def test_memory_for_the_counters_of_a_peer_that_is_gone_is_given_back():
    endpoint = Counters(is_gone=True)
    with pytest.raises(TransferError, match="gone"):
        CounterRead(endpoint, CARD, {0: Blocks.first([3])})
    assert endpoint.taken == 0


def test_no_blocks_are_answered_without_a_read_and_give_their_memory_back():
    endpoint = Counters()
    read = CounterRead(endpoint, CARD, {0: Blocks.first([])})
    with pytest.raises(StopIteration) as end:
        next(read.generations())
    assert end.value.value == {}
    assert (endpoint.taken, endpoint.started) == (0, 0)


def test_a_read_that_hangs_is_looked_at_only_now_and_then():
    """The thread was never idle while a peer was silent."""
    endpoint: Any = Counters()
    endpoint.poll = lambda: False
    reading = CounterRead(endpoint, CARD, {0: Blocks.first([3])}).generations()
    pauses = [next(reading) for _ in range(1000)]
    assert pauses[0] == SOON
    assert set(pauses[QUICK_LOOKS:]) == {NOW_AND_THEN}
    endpoint.poll = lambda: True
    with pytest.raises(StopIteration):
        next(reading)


def test_reads_that_were_made_ready_and_not_started_give_their_memory_back():
    endpoint = Counters()
    ticket = SimpleNamespace(blocks={0: Blocks.first([3])})
    sources = [SimpleNamespace(mapped=each, card=CARD, ticket=ticket) for each in (None, "memory")]
    with ready_reads(endpoint, sources) as reads:
        assert [read is None for read in reads] == [False, True]
        assert endpoint.taken == 1
    assert (endpoint.taken, endpoint.started) == (0, 0)


# ── counters that are memory of ours ──────────────────────────────────────────────────


class Mapped:
    """A source whose counters can be looked at, and whose ticket is for blocks 3 and 4."""

    def __init__(self) -> None:
        self.counters = np.array([0, 0, 0, 7, 9, 0])
        self.is_closed = False
        self.said: set[type] = set()
        self.line = object()
        self.peer = SimpleNamespace(name="producer", line=self.line)
        self.layout = SimpleNamespace(groups=[SimpleNamespace(group=SimpleNamespace(name="full"))])
        self.mapped = SimpleNamespace(generations=self.generations)
        self.mailbox = SimpleNamespace(has=self.said.__contains__, first=lambda kind: kind)
        self.ticket = SimpleNamespace(
            blocks={0: Blocks.first([3, 4])}, generations={0: np.array([7, 9])}
        )

    def generations(self, blocks):
        return None if self.is_closed else {0: self.counters[blocks[0].ids]}

    def fault(self, what, kind):
        return TransferError(what, kind=kind, peer="producer")

    def failure(self, message):
        return TransferError(f"{message.__name__} was said", kind="used")


def passed(fence):
    return next(fence, "passed") == "passed"


def test_counters_that_are_the_ticket_s_need_no_answer():
    assert passed(check_fence(Mapped(), None))


def test_a_counter_that_differs_is_read_again_when_the_producer_has_answered():
    for is_early in (True, False):
        source = Mapped()
        source.counters[4] += 1
        fence = check_fence(source, None)
        assert not passed(fence)
        source.counters[4] -= is_early
        assert not passed(fence)
        source.said.add(Begun)
        if is_early:
            assert passed(fence)
            continue
        with pytest.raises(TransferError, match=r"1 source blocks .* group 'full': \[4\]") as error:
            next(fence)
        assert error.value.kind == "fence"


def test_a_producer_that_refuses_or_is_lost_ends_the_waiting_for_its_answer():
    refuses, is_lost = Mapped(), Mapped()
    for source in (refuses, is_lost):
        source.counters[3] += 1
    waiting = [check_fence(source, None) for source in (refuses, is_lost)]
    assert not any(map(passed, waiting))
    refuses.said.add(Failed)
    with pytest.raises(TransferError, match="Failed was said"):
        next(waiting[0])
    is_lost.peer.line = None
    with pytest.raises(TransferError, match="before it has said that it keeps the rows"):
        next(waiting[1])


def test_counters_of_an_agent_that_is_closed_are_not_believed():
    source = Mapped()
    source.is_closed = True
    with pytest.raises(TransferError, match="closed its agent"):
        next(check_fence(source, None))
