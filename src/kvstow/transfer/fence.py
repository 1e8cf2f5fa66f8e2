"""The fence: the generations of a ticket's blocks, read again after the last byte.

Blocks that nobody has reused still have the generations on the ticket. One post reads the
smallest ranges of the peer's counters that cover the blocks; a long gap starts another range:

    counters   · · 4 5 · 7 · · · · · · ⋯ · · · 9003 9004 · ·
    ranges         └─────┘                     └───────┘
    memory         4 5 6 7 9003 9004
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TYPE_CHECKING

import numpy as np

from kvstow.errors import TransferError
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks
from kvstow.route.copies import Copies
from kvstow.transfer.channel.messages import Begun, Failed
from kvstow.transfer.loop import IDLE, NOW_AND_THEN, SOON, Routine
from kvstow.transfer.transport.base import Kinds, lost

if TYPE_CHECKING:
    from kvstow.transfer.channel.messages import Card
    from kvstow.transfer.peers.endpoint import Endpoint
    from kvstow.transfer.source import Source

ENTRY_BYTES = 8
LONG_GAP = 4096
"""Counters between two blocks from which on they are read apart: 32 KiB cost a copy less than
another descriptor does."""

QUICK_LOOKS = 250
"""So often a read is looked at without a pause; a peer that has not answered then may hang."""


@dataclass(frozen=True, slots=True, eq=False)
class Ranges:
    """Where counters are read: `copies` go from the peer's addresses to byte offsets, and the
    counters of group `g`'s blocks are then the entries `where[g]`."""

    copies: Copies
    where: Mapping[int, Ints]

    @property
    def num_counters(self) -> int:
        return self.copies.total // ENTRY_BYTES


def counter_ranges(tables: Sequence[int], blocks: Mapping[int, Blocks]) -> Ranges:
    """The ranges of counters that cover these blocks; `tables` are the counters' addresses."""
    rows: list[tuple[int, int, int]] = []
    where: dict[int, Ints] = {}
    used = 0
    for g, listed in blocks.items():
        if not len(listed):
            continue
        first, count = _covering(listed.ids)
        places: list[int] = []
        for start, length in zip(first, count, strict=True):
            places.append(used)
            rows.append((tables[g] + start * ENTRY_BYTES, used * ENTRY_BYTES, length * ENTRY_BYTES))
            used += length
        if len(first) == 1:
            where[g] = listed.ids + (places[0] - first[0])
        else:
            number = np.searchsorted(first, listed.ids, side="right") - 1
            where[g] = listed.ids + (np.array(places) - np.array(first))[number]
    copies = Copies(*np.array(rows, np.int64).T) if rows else Copies.none()
    return Ranges(copies, where)


def _covering(ids: Ints) -> tuple[list[int], list[int]]:
    """First id and length of the ranges that cover these ids, long gaps left out."""
    low, high = int(np.minimum.reduce(ids)), int(np.maximum.reduce(ids))
    if high - low < LONG_GAP:
        return [low], [high - low + 1]
    ordered = np.sort(ids)
    cuts = np.flatnonzero(np.diff(ordered) > LONG_GAP)
    first = ordered[np.concatenate(([0], cuts + 1))]
    last = ordered[np.concatenate((cuts, [len(ordered) - 1]))]
    return first.tolist(), (last - first + 1).tolist()


def changed(
    current: Mapping[int, Ints], blocks: Mapping[int, Blocks], expected: Mapping[int, Ints]
) -> dict[int, list[int]]:
    """Per group, the blocks whose generations are not the expected ones."""
    return {
        g: blocks[g].ids[there != expected[g]].tolist()
        for g, there in current.items()
        if there.tobytes() != expected[g].tobytes()
    }


class CounterRead:
    """One read of a peer's counters, made ready now and started later. Raises TransferError.

    The blocks must be ones of the peer's layout.
    """

    def __init__(self, endpoint: "Endpoint", card: "Card", blocks: Mapping[int, Blocks]) -> None:
        self._ranges = ranges = counter_ranges(card.tables, blocks)
        self._memory = memory = endpoint.take_counters(ranges.num_counters)
        copies = ranges.copies.moved(0, memory.ctypes.data)
        try:
            self._flight = endpoint.post("read", card.engine, Kinds(), copies)
        except TransferError:
            endpoint.give_counters(memory)
            raise
        self._flight.after(lambda: endpoint.give_counters(memory))

    def generations(self) -> Routine[dict[int, Ints]]:
        """Read; the counters of the blocks, per group. Raises TransferError."""
        if not self._ranges.num_counters:
            self.drop()
            return {}
        self._flight.start()
        pauses = chain(repeat(SOON, QUICK_LOOKS), repeat(NOW_AND_THEN))
        while not self._flight.poll():
            yield next(pauses)
        # the memory is another's from the next turn on
        return {g: self._memory.take(places) for g, places in self._ranges.where.items()}

    def drop(self) -> None:
        """Give the memory back, if nothing was started."""
        self._flight.drop()


@contextmanager
def ready_reads(
    endpoint: "Endpoint", sources: Sequence["Source"]
) -> Generator[list[CounterRead | None]]:
    """What the fence of each source reads; nothing where its counters are memory of ours. Made
    ready before the rows move: afterwards caches are full of them, and the same work takes several
    times as long. Raises TransferError."""
    reads: list[CounterRead | None] = []
    try:
        for source in sources:
            blocks = source.ticket.blocks
            reads.append(None if source.mapped else CounterRead(endpoint, source.card, blocks))
        yield reads
    finally:
        for read in reads:
            if read is not None:
                read.drop()


def check_fence(source: "Source", read: CounterRead | None) -> Routine[None]:
    """Return if every block of a source's ticket still has its generation; TransferError otherwise.
    To be called when the last byte has arrived."""
    fence = mapped_fence(source) if read is None else read_fence(source, read)
    moved = yield from fence
    if moved:
        groups = source.layout.groups
        where = "; ".join(f"group {groups[g].group.name!r}: {ids[:8]}" for g, ids in moved.items())
        raise source.fault(
            f"{sum(map(len, moved.values()))} source blocks were given to others before the last "
            f"byte had arrived: {where}",
            "fence",
        )


def read_fence(source: "Source", read: CounterRead) -> Routine[dict[int, list[int]]]:
    """Blocks whose generations are not the ticket's."""
    current = yield from read.generations()
    return changed(current, source.ticket.blocks, source.ticket.generations)


def mapped_fence(source: "Source") -> Routine[dict[int, list[int]]]:
    """The same of a source whose counters are memory of ours.

    An engine's agent sets them when it hears of a ticket that its scheduler has written. So one
    that differs may be early, and is read again when the producer has answered: no generation ever
    comes back, and one that equals the ticket's then has held ever since the ticket was written.
    """
    if not _changed_there(source):
        return {}
    while not source.mailbox.has(Begun):
        if source.mailbox.has(Failed):
            raise source.failure(source.mailbox.first(Failed))
        if source.peer.line is not source.line:
            raise lost(source.peer.name, "before it has said that it keeps the rows")
        yield IDLE
    return _changed_there(source)


def _changed_there(source: "Source") -> dict[int, list[int]]:
    ticket = source.ticket
    assert source.mapped is not None
    current = source.mapped.generations(ticket.blocks)
    if current is None:
        raise source.fault("it has closed its agent", "peer")
    return changed(current, ticket.blocks, ticket.generations)
