"""Tables: the ids that every request has in one group, and what a step adds to them.

A recurrent group has one block per request, its running row.

    slot     logical block k at column k
    0      │ 40 41 42 17 ·  ·  ·  · │        blocks [first, end) are held
    1      │  ·  ·  · 70 71 72 73 · │
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvstow.blocks.placement import RowDemand
from kvstow.blocks.pool import Pool
from kvstow.plan.group import Group
from kvstow.plan.retention import first_seen_block, forgets
from kvstow.plan.view import Ints, ceil_div
from kvstow.route.blocks import Blocks


class BlockTable:
    """Ids of logical blocks `[0, end)` of every request, less those it gave back.

    `gaps` says whether it matters to the pool how long rows are wanted.
    """

    def __init__(self, group: Group, *, gaps: bool = True) -> None:
        self.gaps = gaps
        self.block_tokens = group.block_tokens
        self.retention = group.retention
        self.moves = forgets(group.retention)
        self.first = np.zeros(0, np.int64)
        self.end = np.zeros(0, np.int64)
        self._ids = np.zeros((0, 8), np.int64)

    # ── questions ─────────────────────────────────────────────────────────────────

    def ids(self, slot: int, first: int, end: int) -> Ints:
        """Ids of blocks `[first, end)`, all of them held."""
        return self._ids[slot, first:end].copy()

    def all_ids(self, slot: int) -> Ints:
        """Ids of everything that the request holds, by logical block."""
        return self.ids(slot, int(self.first[slot]), int(self.end[slot]))

    def blocks(self, slot: int) -> Blocks:
        return Blocks(self.all_ids(slot), np.arange(int(self.first[slot]), int(self.end[slot])))

    def last_ids(self, slots: Ints) -> Ints:
        """The id of each request's last block, 0 where there is none."""
        last = self.end[slots] - 1
        return np.where(last < 0, 0, self._ids[slots, np.maximum(last, 0)])

    def near(self, slots: Ints) -> Ints:
        """Per request, the row behind which it would like its next one: the last one, or
        the one before the row that its window has just left."""
        if not self.moves:
            return self.last_ids(slots)
        first = self.first[slots]
        left = self._ids[slots, np.maximum(first - 1, 0)] - 1
        return np.where(first > 0, left, self.last_ids(slots))

    # ── changes ───────────────────────────────────────────────────────────────────

    def open(self, slot: int, first: int, ids: Ints) -> None:
        """Begin a request that has blocks from `first` on."""
        if slot >= len(self._ids):
            self._reshape(max(64, 2 * slot), self._ids.shape[1])
        self.first[slot] = self.end[slot] = first
        self.append(slot, ids)

    def append(self, slot: int, ids: Ints) -> None:
        """Add blocks behind the last one."""
        start = int(self.end[slot])
        end = start + len(ids)
        self._widen(end)
        self._ids[slot, start:end] = ids
        self.end[slot] = end

    def append_one_each(self, slots: Ints, ids: Ints) -> None:
        """Add one block to each request, each named once."""
        end = self.end[slots]
        self._widen(int(end.max()) + 1)
        self._ids[slots, end] = ids
        self.end[slots] = end + 1

    def replace_last(self, slot: int, row: int) -> None:
        self._ids[slot, self.end[slot] - 1] = row

    def slide(self, slots: Ints, num_tokens: Ints) -> Ints:
        """Give up what no token at `num_tokens` or later sees: its ids."""
        seen = first_seen_block(self.retention, num_tokens, self.block_tokens)
        first = self.first[slots]
        gone = np.maximum(np.minimum(seen, self.end[slots]) - first, 0)
        self.first[slots] = first + gone
        starts = np.repeat(first - (gone.cumsum() - gone), gone)
        return self._ids[np.repeat(slots, gone), starts + np.arange(len(starts))]

    def _widen(self, width: int) -> None:
        """Make room for a request of so many blocks."""
        num_slots, before = self._ids.shape
        if width > before:
            self._reshape(num_slots, max(width, 2 * before))

    def _reshape(self, num_slots: int, width: int) -> None:
        before, self._ids = self._ids, np.zeros((num_slots, width), np.int64)
        self._ids[: len(before), : before.shape[1]] = before
        more = np.zeros(num_slots - len(before), np.int64)
        self.first = np.concatenate((self.first, more))
        self.end = np.concatenate((self.end, more))


# ── what a step adds ──────────────────────────────────────────────────────────────────


class Growth(NamedTuple):
    """Rows that requests need in one group: one for each of them, or several for a single one."""

    table: BlockTable
    slots: Ints
    demands: list[RowDemand]

    def enter(self, parts: list[Ints]) -> None:
        """Write what was held for the demands into the table."""
        if len(self.slots) == 1:
            self.table.append(int(self.slots[0]), by_block(parts))
        else:
            self.table.append_one_each(self.slots, parts[0])


def growths(
    g: int, table: BlockTable, slots: Ints, more: Ints, num_tokens: Ints
) -> Iterator[Growth]:
    """What requests need of which each gets so many more blocks to reach so many tokens."""
    one = slots[more == 1]
    if len(one):
        kind = "moving" if table.moves else "single"
        yield Growth(table, one, [RowDemand(g, len(one), kind, table.near(one))])
    for i in np.nonzero(more > 1)[0].tolist():
        demands = demands_of(g, table, int(more[i]), int(num_tokens[i]))
        yield Growth(table, slots[i : i + 1], demands)


def demands_of(g: int, table: BlockTable, count: int, num_tokens: int) -> list[RowDemand]:
    """Rows for a request's `count` blocks that end at `num_tokens`.

    Those that no later token sees are wanted briefly. They come first in the request and
    last here, when the others have their places.
    """
    if not table.moves or not table.gaps:
        return [RowDemand(g, count)]
    end = ceil_div(num_tokens, table.block_tokens)
    seen = first_seen_block(table.retention, num_tokens, table.block_tokens)
    brief = min(count, max(0, seen - (end - count)))
    if brief == 0:
        return [RowDemand(g, count, "moving")]
    return [RowDemand(g, count - brief, "moving"), RowDemand(g, brief, "brief")]


def by_block(parts: list[Ints]) -> Ints:
    """The rows that `demands_of` one request got, in the order of its blocks."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts[::-1])


# ── copies before a step ──────────────────────────────────────────────────────────────


class RowCopy(NamedTuple):
    """Row `source` of a group is to be copied to row `destination`."""

    group: int
    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class SharedTail:
    """A request's last block, not full, that others hold, too."""

    group: int
    slot: int
    row: int


def shared_tails(
    pool: Pool, tables: Mapping[int, BlockTable], slots: Ints, num_tokens: Ints
) -> tuple[SharedTail, ...]:
    """Last blocks that the requests must not write to; of several that share one, and
    nobody else, the last may keep it."""
    tails: list[SharedTail] = []
    for g, table in tables.items():
        part = num_tokens % table.block_tokens != 0
        rows = table.last_ids(slots[part])
        left = dict(zip(rows.tolist(), pool.holds(g, rows).tolist(), strict=True))
        for slot, row in zip(slots[part].tolist(), rows.tolist(), strict=True):
            if left[row] > 1:
                left[row] -= 1
                tails.append(SharedTail(g, slot, row))
    return tuple(tails)
