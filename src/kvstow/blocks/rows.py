"""The rows of one group: what each is, and the two lists in which rows are found.

    state        holds   what is in the row
    FREE         0       nothing that anybody needs
    NEW          1 …     what its holders write; free after the last hold
    KEPT         0 …     what may be wanted again: cached, and evicted, while nobody holds it
    PARTIAL      1 …     less than all: its request may use it, it is never cached
    UNKNOWN      1 …     nothing that anybody may use: a pull into it has failed
    QUARANTINED  1 …     the same: somebody writes to it, and one of the holds is for that

`LruQueue` has the cached rows in the order of their last use, `FreeSlabs` the slabs in which rows
are free. Rows that lie in slabs of other groups are free here; who owns a slab is written down
once, in `Slabs`.
"""

import numpy as np
import numpy.typing as npt

from kvstow.errors import BlockError
from kvstow.plan.layout import NULL_SLABS, Layout
from kvstow.plan.retention import Bools
from kvstow.plan.view import Ints, ceil_div

FREE, NEW, KEPT, PARTIAL, UNKNOWN, QUARANTINED = range(6)

NONE = np.zeros(0, np.int64)
"""No ids."""

SEGMENT_BITS = 10
SEGMENT = 1 << SEGMENT_BITS


class FreeSlabs:
    """Slabs by level, which says how free they are. Those of level 0 are not listed.

        level   per slab                │ 0 0 2 1 … │ 1 1 1 1 … │ 0 0 0 0 … │
        counts  per level and segment   │ 1: 17     │ 1: 1024   │ 1: 0      │

    A search looks at the counts, a thousandth of the slabs, and into as many segments as
    have enough slabs of the level.
    """

    def __init__(self, num_slabs: int, num_levels: int) -> None:
        num_segments = ceil_div(num_slabs, SEGMENT)
        self.level = np.zeros(num_segments * SEGMENT, np.int8)
        self.totals = np.zeros(num_levels + 1, np.int64)
        self._counts = np.zeros((num_levels + 1, num_segments), np.int64)
        self._open = 0

    def move(self, slabs: Ints, level: Ints | int) -> None:
        """Give slabs, each named once, a level, or each its own."""
        segments, counts = slabs >> SEGMENT_BITS, self._counts.reshape(-1)
        num_segments = self._counts.shape[1]
        np.subtract.at(counts, self.level[slabs].astype(np.int64) * num_segments + segments, 1)
        np.add.at(counts, level * num_segments + segments, 1)
        self.level[slabs] = level
        self.totals = self._counts.sum(axis=1)

    # ── searches ──────────────────────────────────────────────────────────────────

    def search(self, levels: range, count: int, *, from_top: bool = False) -> Ints:
        """The lowest slabs of several levels, ascending, or the highest, descending: `count` of
        them, or all."""
        order = -1 if from_top else 1
        counts = self._counts[levels.start : levels.stop].sum(axis=0)
        segments = _enough(counts.nonzero()[0][::order], counts, count)
        return self._within(levels, segments)[::order][:count]

    def side_by_side(self, level: int, count: int) -> Ints:
        """`count` slabs of a level, or all, in few runs, ascending.

        Goes on in the segment it used last, and to the emptiest one when that has too few.
        """
        counts = self._counts[level]
        if counts[self._open] < count:
            self._open = int(counts.argmax())
        here = int(counts[self._open])
        if here == SEGMENT >= count:
            start = self._open << SEGMENT_BITS
            return np.arange(start, start + count)
        if here >= count:
            segments = np.array([self._open])
        else:
            segments = _enough(np.argsort(-counts, kind="stable"), counts, count)
        return fewest_runs(self._within(range(level, level + 1), segments), count)

    def scattered(self, level: int, count: int) -> Ints:
        """`count` slabs of a level, or all, ascending, from the segments that have the
        fewest: long runs are left alone."""
        counts = self._counts[level]
        segments = counts.nonzero()[0]
        segments = segments[np.argsort(counts[segments], kind="stable")]
        segments = _enough(segments, counts, count)
        return self._within(range(level, level + 1), segments)[:count]

    def _within(self, levels: range, segments: Ints) -> Ints:
        """All slabs of the levels in the segments, ascending."""
        if len(segments) == 1:
            start = int(segments[0]) << SEGMENT_BITS
            part = self.level[start : start + SEGMENT]
            return ((part >= levels.start) & (part < levels.stop)).nonzero()[0] + start
        segments = np.sort(segments)
        part = self.level.reshape(-1, SEGMENT)[segments]
        lines, columns = ((part >= levels.start) & (part < levels.stop)).nonzero()
        return (segments[lines] << SEGMENT_BITS) + columns


def _enough(segments: Ints, counts: Ints, count: int) -> Ints:
    """The first segments, as many as have `count` slabs together."""
    return segments[: int(np.searchsorted(counts[segments].cumsum(), count)) + 1]


# ── runs: ids that follow one another ─────────────────────────────────────────────────


def num_runs(ids: Ints) -> int:
    """How many runs the ids make, in the order in which they are."""
    return int(np.count_nonzero(ids[1:] - ids[:-1] != 1)) + 1 if len(ids) else 0


def fewest_runs(ids: Ints, count: int) -> Ints:
    """`count` of the ascending ids in few runs: the tightest run that is long enough, or
    the longest ones where none is."""
    if len(ids) <= count or ids[-1] - ids[0] == len(ids) - 1:
        return ids[:count]
    starts = np.concatenate(([0], np.nonzero(ids[1:] - ids[:-1] != 1)[0] + 1))
    lengths = np.diff(starts, append=len(ids))
    fitting = np.nonzero(lengths >= count)[0]
    if len(fitting):
        start = int(starts[fitting[lengths[fitting].argmin()]])
        return ids[start : start + count]
    longest = np.argsort(-lengths, kind="stable")
    reach = lengths[longest].cumsum()
    longest = longest[: int(np.searchsorted(reach, count)) + 1]
    ends = starts[longest] + lengths[longest]
    ends[-1] -= max(0, reach[len(longest) - 1] - count)
    edges = np.zeros(len(ids) + 1, np.int64)
    np.add.at(edges, starts[longest], 1)
    np.add.at(edges, ends, -1)
    return ids[edges[:-1].cumsum() > 0]


# ── cached rows ───────────────────────────────────────────────────────────────────────


class LruQueue:
    """Items in the order of their last use, at most one place for each of `num_items`.

        items   7 2 9 2 5 · ·        a log; the place of 2 is 3, so the 2 at 1 is stale
                ↑         ↑
                head      tail

    An item is taken out by forgetting its place; its entry goes stale and is skipped. The
    log is compacted when it has run to its end, once per at least as many entries as there
    are items.
    """

    def __init__(self, num_items: int) -> None:
        self._place = np.full(num_items, -1, np.int64)
        self._items = np.empty(2 * num_items + 64, np.int64)
        self._stamps = np.empty(2 * num_items + 64, np.int64)
        self._head = 0
        self._tail = 0
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def has(self, items: Ints) -> Bools:
        """Which items are in the queue."""
        return self._place[items] >= 0

    def put(self, items: Ints, stamp: int) -> None:
        """Queue items that are not in it, each named once, behind the others."""
        if self._tail + len(items) > len(self._items):
            self._compact()
        end = self._tail + len(items)
        self._items[self._tail : end] = items
        self._stamps[self._tail : end] = stamp
        self._place[items] = np.arange(self._tail, end)
        self._tail = end
        self._num += len(items)

    def remove(self, items: Ints) -> None:
        """Take out items that are in the queue, each named once."""
        self._place[items] = -1
        self._num -= len(items)

    def oldest(self, count: int) -> tuple[Ints, Ints]:
        """The `count` items that have waited longest, or all, with their stamps."""
        missing = min(count, self._num)
        if self._num == 0:
            self._head = self._tail
        if missing < 1:
            return NONE, NONE
        parts: list[Ints] = []
        start, length = self._head, count + 32
        while missing > 0:
            end = min(start + length, self._tail)
            valid = np.nonzero(self._place[self._items[start:end]] == np.arange(start, end))[0]
            if not parts:
                self._head = start + int(valid[0]) if len(valid) else end
            if len(valid):
                parts.append(valid + start)
                missing -= len(valid)
            start, length = end, 2 * length
        places = (parts[0] if len(parts) == 1 else np.concatenate(parts))[:count]
        return self._items[places], self._stamps[places]

    def _compact(self) -> None:
        """Close the gaps that stale entries leave."""
        live = np.arange(self._head, self._tail)
        live = live[self._place[self._items[live]] == live]
        items, stamps = self._items[live], self._stamps[live]
        self._head, self._tail = 0, len(live)
        self._items[: self._tail] = items
        self._stamps[: self._tail] = stamps
        self._place[items] = np.arange(self._tail)


# ── rows ──────────────────────────────────────────────────────────────────────────────


class GroupRows:
    """The rows of one group, `per_slab` to each of `num_slabs` slabs; the first `num_null`
    rows are never given out.

    Slabs with free rows are listed in `partial` by the number of those: at level `1 … top` by the
    power of two, and at `top + 1 … 2 · top` where all that is held in them is held briefly
    (`brief`).
    """

    def __init__(self, layout: Layout, group: int, *, num_slabs: int) -> None:
        self.group = group
        self.name = layout.groups[group].group.name
        self.num_rows = layout.num_blocks(group)
        self.num_null = NULL_SLABS * layout.groups[group].rows_per_slab
        self.per_slab = per_slab = self.num_rows // num_slabs
        self.refs = np.zeros(self.num_rows, np.int64)
        self.state = np.full(self.num_rows, FREE, np.int8)
        self.generations = np.zeros(self.num_rows, np.int64)
        self.cached = LruQueue(self.num_rows)
        self.idle = self.cached if per_slab == 1 else LruQueue(num_slabs)
        self.top = per_slab.bit_length()
        self.partial = FreeSlabs(num_slabs, 2 * self.top)
        self.brief = np.zeros(num_slabs, np.int64)
        self.num_busy = 0
        self.num_held = 0
        levels = [n.bit_length() for n in range(per_slab + 1)]
        self._level = np.array([levels, [n and n + self.top for n in levels]], np.int64)

    @property
    def spare(self) -> int:
        """Rows that are not held, in slabs that have held ones."""
        return 0 if self.per_slab == 1 else self.num_busy * self.per_slab - self.num_held

    # ── rows and slabs ────────────────────────────────────────────────────────────

    def levels_of(self, slabs: Ints, num_free: Ints) -> Ints:
        """The levels of slabs with so many free rows."""
        return self._level[self.brief[slabs], num_free]

    def slabs_of(self, ids: Ints) -> Ints:
        """The slab of each row."""
        return ids if self.per_slab == 1 else ids // self.per_slab

    def by_slab(self, ids: Ints) -> tuple[Ints, Ints]:
        """The slabs that ascending rows lie in, and how many of the rows lie in each."""
        slabs = ids // self.per_slab
        starts = np.concatenate(([0], (slabs[1:] != slabs[:-1]).nonzero()[0] + 1, [len(slabs)]))
        return slabs[starts[:-1]], starts[1:] - starts[:-1]

    def rows_of(self, slabs: Ints) -> Ints:
        """All rows of the slabs, in their order."""
        if self.per_slab == 1:
            return slabs
        return (slabs[:, None] * self.per_slab + np.arange(self.per_slab)).ravel()

    def free_rows_of(self, slabs: Ints) -> Ints:
        """The free rows of slabs that the group owns."""
        ids = self.rows_of(slabs)
        return ids[self.state[ids] == FREE]

    def cached_rows_of(self, slabs: Ints) -> Ints:
        ids = self.rows_of(slabs)
        return ids[self.cached.has(ids)]

    # ── checks ────────────────────────────────────────────────────────────────────

    def existing(self, ids: npt.ArrayLike) -> Ints:
        """The rows as an array; raises if some row does not exist."""
        array = np.asarray(ids, np.int64).reshape(-1)
        unsigned = array.view(np.uint64)  # a negative id is a large one
        if len(array) and unsigned[unsigned.argmax()] >= self.num_rows:
            wrong = array[unsigned >= self.num_rows]
            raise BlockError(
                f"group {self.name!r}: block {wrong[0]} is not among the {self.num_rows} there are"
            )
        return array

    def check_none(self, ids: Ints, wrong: Bools, what: str) -> None:
        """Raises if any row is wrong, naming the first of them."""
        if np.count_nonzero(wrong):
            first = int(ids[wrong][0])
            raise BlockError(
                f"group {self.name!r}: block {first} {what}: it has {int(self.refs[first])} holds "
                f"({int(wrong.sum())} of {len(ids)} blocks are such)"
            )
