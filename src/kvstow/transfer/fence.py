"""The fence: the generations of a ticket's blocks, read again after the last byte.

Blocks that nobody has reused still have the generations on the ticket. One post reads the
smallest ranges of the peer's counters that cover the blocks; a long gap starts another range:

    counters   · · 4 5 · 7 · · · · · · ⋯ · · · 9003 9004 · ·
    ranges         └─────┘                     └───────┘
    memory         4 5 6 7 9003 9004
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstow.errors import TransferError
from kvstow.plan.layout import Layout
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks
from kvstow.route.copies import Copies, joined
from kvstow.transfer.loop import AT_ONCE, Story
from kvstow.transfer.transport.base import Kinds

if TYPE_CHECKING:
    from kvstow.transfer.channel.messages import Card
    from kvstow.transfer.peers.endpoint import Endpoint
    from kvstow.transfer.ticket import Ticket

ENTRY_BYTES = 8
LONG_GAP = 4096
"""Counters between two blocks from which on they are read apart: 32 KiB cost a copy less than
another descriptor does."""


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
    parts: list[Copies] = []
    where: dict[int, Ints] = {}
    used = 0
    for g, listed in blocks.items():
        if not len(listed):
            continue
        first, count = _covering(listed.ids)
        place = used + count.cumsum() - count
        number = np.searchsorted(first, listed.ids, side="right") - 1
        where[g] = listed.ids - first[number] + place[number]
        nbytes = count * ENTRY_BYTES
        parts.append(Copies(tables[g] + first * ENTRY_BYTES, place * ENTRY_BYTES, nbytes))
        used += int(count.sum())
    return Ranges(joined(parts), where)


def _covering(ids: Ints) -> tuple[Ints, Ints]:
    """First id and length of the ranges that cover these ids, long gaps left out."""
    low, high = int(np.minimum.reduce(ids)), int(np.maximum.reduce(ids))
    if high - low < LONG_GAP:
        return np.array([low]), np.array([high - low + 1])
    ordered = np.sort(ids)
    cuts = np.flatnonzero(np.diff(ordered) > LONG_GAP)
    first = ordered[np.concatenate(([0], cuts + 1))]
    last = ordered[np.concatenate((cuts, [len(ordered) - 1]))]
    return first, last - first + 1


def changed(
    found: Mapping[int, Ints], blocks: Mapping[int, Blocks], expected: Mapping[int, Ints]
) -> dict[int, tuple[int, ...]]:
    """Per group, the blocks whose generations are not the expected ones."""
    return {
        g: tuple(blocks[g].ids[there != expected[g]].tolist())
        for g, there in found.items()
        if there.tobytes() != expected[g].tobytes()
    }


def read_generations(
    endpoint: "Endpoint", card: "Card", blocks: Mapping[int, Blocks]
) -> Story[dict[int, Ints]]:
    """Read a peer's counters of these blocks, one-sidedly. Raises TransferError.

    The blocks must be ones of the peer's layout.
    """
    ranges = counter_ranges(card.tables, blocks)
    if not ranges.num_counters:
        return {}
    memory = endpoint.take_counters(ranges.num_counters)

    def give_back() -> None:
        endpoint.give_counters(memory)

    copies = ranges.copies.moved(0, memory.ctypes.data)
    try:
        flight = endpoint.post("read", card.engine, Kinds(), copies, give_back)
    except TransferError:
        give_back()
        raise
    flight.start()
    while not flight.poll():
        yield AT_ONCE
    return {g: memory.take(places) for g, places in ranges.where.items()}


def fence(endpoint: "Endpoint", card: "Card", layout: Layout, ticket: "Ticket") -> Story[None]:
    """TransferError unless every block of a ticket still has its generation.

    To be called when the last byte has arrived.
    """
    found = yield from read_generations(endpoint, card, ticket.blocks)
    moved = changed(found, ticket.blocks, ticket.generations)
    if moved:
        where = "; ".join(
            f"group {layout.groups[g].group.name!r}: {list(ids[:8])}" for g, ids in moved.items()
        )
        raise TransferError(
            f"peer {card.agent!r}: {sum(map(len, moved.values()))} source blocks were given to "
            f"others before the last byte had arrived: {where}",
            kind="fence",
            peer=card.agent,
        )
