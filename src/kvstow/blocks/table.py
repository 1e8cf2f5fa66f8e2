"""Tables: the ids that every request has in one group, and what a step adds to them.

A recurrent group has one block per request, its running row.

    slot     logical block k at column k, of a window at column k % width
    0      │ 40 41 42 17 ·  ·  ·  · │        blocks [first, end) are held
    1      │  ·  ·  · 70 71 72 73 · │

The ring of a window is as wide as the longest stretch that was ever held, for any length.
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

    def reserve(self, num_slots: int) -> None:
        """Make room for so many requests."""
        grown = np.zeros((num_slots, self._ids.shape[1]), np.int64)
        grown[: len(self._ids)] = self._ids
        self._ids = grown
        self.first = np.concatenate((self.first, np.zeros(num_slots - len(self.first), np.int64)))
        self.end = np.concatenate((self.end, np.zeros(num_slots - len(self.end), np.int64)))

    # ── questions ─────────────────────────────────────────────────────────────────

    def held(self, slot: int) -> Ints:
        """Logical blocks that the request holds, ascending."""
        return np.arange(int(self.first[slot]), int(self.end[slot]))

    def ids(self, slot: int, first: int, end: int) -> Ints:
        """Ids of blocks `[first, end)`, all of them held."""
        row = self._ids[slot]
        parts = [row[columns] for columns in self._stretches(first, end)]
        return parts[0].copy() if len(parts) == 1 else np.concatenate(parts)

    def all_ids(self, slot: int) -> Ints:
        """Ids of everything that the request holds, by logical block."""
        return self.ids(slot, int(self.first[slot]), int(self.end[slot]))

    def blocks(self, slot: int) -> Blocks:
        return Blocks(self.all_ids(slot), self.held(slot))

    def last_ids(self, slots: Ints) -> Ints:
        """The id of each request's last block, 0 where there is none."""
        last = self.end[slots] - 1
        ids = self._ids[slots, self._columns(np.maximum(last, 0))]
        return ids if len(last) == 0 or last.min() >= 0 else np.where(last < 0, 0, ids)

    def near(self, slots: Ints) -> Ints:
        """Per request, the row behind which it would like its next one: the last one, or
        the one before the row that its window has just left."""
        if not self.moves:
            return self.last_ids(slots)
        first = self.first[slots]
        left = self._ids[slots, self._columns(np.maximum(first - 1, 0))] - 1
        return np.where(first > 0, left, self.last_ids(slots))

    # ── changes ───────────────────────────────────────────────────────────────────

    def open(self, slot: int, first: int, ids: Ints) -> None:
        """Begin a request that has blocks from `first` on."""
        self.first[slot] = self.end[slot] = first
        self.append(slot, ids)

    def copy(self, slot: int, twin: int) -> None:
        """Begin a request with all that another one has."""
        self._ids[twin] = self._ids[slot]
        self.first[twin] = self.first[slot]
        self.end[twin] = self.end[slot]

    def write(self, slot: int, first: int, ids: Ints) -> None:
        """Enter the ids of blocks from `first` on, for which there is room."""
        row, done = self._ids[slot], 0
        for columns in self._stretches(first, first + len(ids)):
            more = columns.stop - columns.start
            row[columns] = ids[done : done + more]
            done += more

    def append(self, slot: int, ids: Ints) -> None:
        """Add blocks behind the last one."""
        end = int(self.end[slot])
        self._widen(end + len(ids), end + len(ids) - int(self.first[slot]))
        self.write(slot, end, ids)
        self.end[slot] = end + len(ids)

    def append_one_each(self, slots: Ints, ids: Ints) -> None:
        """Add one block to each request, each named once."""
        end = self.end[slots]
        self._widen(int(end.max()) + 1, int((end - self.first[slots]).max()) + 1)
        self._ids[slots, self._columns(end)] = ids
        self.end[slots] = end + 1

    def replace_last(self, slot: int, row: int) -> None:
        self.write(slot, int(self.end[slot]) - 1, np.array([row]))

    def slide(self, slots: Ints, num_tokens: Ints) -> Ints:
        """Give up what no token at `num_tokens` or later sees: its ids."""
        seen = first_seen_block(self.retention, num_tokens, self.block_tokens)
        seen = np.minimum(seen, self.end[slots])
        first = self.first[slots]
        moved = np.nonzero(seen > first)[0]
        if not len(moved):
            return moved
        slots, seen, first = slots[moved], seen[moved], first[moved]
        gone = seen - first
        self.first[slots] = seen
        if gone.max() == 1:
            return self._ids[slots, self._columns(first)]
        lines = np.repeat(np.arange(len(moved)), gone)
        steps = np.arange(len(lines)) - np.repeat(gone.cumsum() - gone, gone)
        return self._ids[slots[lines], self._columns(first[lines] + steps)]

    def _columns(self, logical: Ints) -> Ints:
        return logical % self._ids.shape[1] if self.moves else logical

    def _stretches(self, first: int, end: int) -> list[slice]:
        """The columns of blocks `[first, end)`, in their order."""
        if not self.moves:
            return [slice(first, end)]
        ring = self._ids.shape[1]
        start = first % ring
        over = start + end - first - ring
        if over <= 0:
            return [slice(start, start + end - first)]
        return [slice(start, ring), slice(0, over)]

    def _widen(self, end: int, stretch: int) -> None:
        """Make room for a request that holds so many blocks, or a stretch of them."""
        needed = stretch if self.moves else end
        width = self._ids.shape[1]
        if needed <= width:
            return
        slots: list[int] = np.nonzero(self.end > 0)[0].tolist() if self.moves else []
        before, held = self._ids, [self.all_ids(slot) for slot in slots]
        self._ids = np.zeros((len(before), max(needed, 2 * width)), np.int64)
        if not self.moves:
            self._ids[:, :width] = before
        for slot, ids in zip(slots, held, strict=True):
            self.write(slot, int(self.first[slot]), ids)


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
