"""Slabs: who owns which, among groups that pass them around.

    slab    1        2        3        4        5
    owner   full     full     window   –        window
    rows    ████▒▒░  ███████  █░░      ·        ▒▒▒       █ held  ▒ cached  ░ free

A slab without held or cached rows is nobody's. One without held rows is *idle*: any group
may have it, which costs its owner the cached rows in it. So a set of demands can be met
exactly when the slabs that they need beyond each group's spare rows are not more than the
idle ones (`missing`), and that is known before anything is changed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count as counter

import numpy as np
import numpy.typing as npt

from kvstow.blocks.rows import FREE, KEPT, NEW, FreeSlabs, GroupRows
from kvstow.plan.layout import NULL_SLABS, Layout
from kvstow.plan.retention import Bools
from kvstow.plan.view import Ints, ceil_div

OnEvict = Callable[[int, Ints], None]
"""Told the group and the rows whose content is given up, before they are used again."""

VACANT = 1
"""The level of slabs that nobody owns."""
NOBODY = -1


class Slabs:
    """Slabs `[num_null, num_slabs)`, passed around among some groups of a layout. A group that is
    alone has slabs of one row."""

    def __init__(self, layout: Layout, members: Sequence[int], on_evict: OnEvict) -> None:
        slabs_each = layout.groups[members[0]].rows_per_slab if len(members) == 1 else 1
        self.num_slabs = num_slabs = layout.num_slabs * slabs_each
        self.num_null = num_null = NULL_SLABS * slabs_each
        self.groups = tuple(GroupRows(layout, g, num_slabs=num_slabs) for g in members)
        self.owner = np.full(num_slabs, NOBODY, np.int64)
        self.last_owner = np.full(num_slabs, NOBODY, np.int64)
        self.held = np.zeros(num_slabs, np.int64)
        self.cached = np.zeros(num_slabs, np.int64)
        self.vacant = FreeSlabs(num_slabs, VACANT)
        self.vacant.move(np.arange(num_null, num_slabs), VACANT)
        self.num_idle = num_slabs - num_null
        self._on_evict = on_evict
        self._clock = counter(1)

    # ── questions ─────────────────────────────────────────────────────────────────

    def needed(self, rows: GroupRows, count: int) -> int:
        """Idle slabs without which the group cannot hold so many more rows."""
        return max(0, ceil_div(count - rows.spare, rows.per_slab))

    def missing(self, needs: Mapping[int, int]) -> int:
        """Idle slabs that so many rows of the groups need beyond those there are; negative:
        left over."""
        missing = -self.num_idle
        for rows in self.groups:
            if count := needs.get(rows.group):
                missing += self.needed(rows, count)
        return missing

    def num_available(self, rows: GroupRows) -> int:
        """Rows that the group could hold, if no other group wanted any."""
        return rows.spare + self.num_idle * rows.per_slab

    @property
    def num_vacant(self) -> int:
        return int(self.vacant.totals[VACANT])

    # ── slabs change hands ────────────────────────────────────────────────────────

    def claim(self, rows: GroupRows, slabs: Ints) -> None:
        """Make slabs without an owner the group's own.

        What other groups' rows in them once held is about to be written over: their
        generations move on, too.
        """
        self.owner[slabs] = rows.group
        if len(self.groups) == 1:
            return
        before = self.last_owner[slabs]
        if np.count_nonzero(before != rows.group):
            for other in self.groups:
                if other is not rows and len(lost := slabs[before == other.group]):
                    other.generations[other.rows_of(lost)] += 1
            self.last_owner[slabs] = rows.group

    def claim_vacant(self, rows: GroupRows, slabs: Ints) -> None:
        """Make vacant slabs the group's own."""
        self.vacant.move(slabs, 0)
        self.claim(rows, slabs)

    def empty(self, rows: GroupRows, slabs: Ints) -> None:
        """Evict what idle slabs of the group have cached, and take them from it. The caller
        is about to claim them: they are not listed as vacant."""
        self.evict(rows, rows.cached_rows_of(slabs))
        if rows.per_slab > 1:
            rows.partial.move(slabs, 0)
            rows.idle.remove(slabs[rows.idle.has(slabs)])
        self.owner[slabs] = NOBODY

    def _vacate(self, slabs: Ints) -> None:
        """Take slabs without rows in use from their owner."""
        self.owner[slabs] = NOBODY
        self.vacant.move(slabs, VACANT)

    # ── rows change state ─────────────────────────────────────────────────────────

    def hold(self, rows: GroupRows, ids: Ints, *, briefly: bool = False) -> None:
        """Hold free rows, ascending, of slabs that the group owns, for new content."""
        rows.generations[ids] += 1
        rows.refs[ids] = 1
        rows.state[ids] = NEW
        rows.num_held += len(ids)
        if rows.per_slab == 1:
            self.held[ids] = 1
            self.num_idle -= len(ids)
            return
        slabs, counts = rows.by_slab(ids)
        before = self.held[slabs]
        if briefly:
            rows.brief[slabs[before == 0]] = 1
        else:
            rows.brief[slabs] = 0
        self._update(rows, slabs, before, before + counts)

    def hold_cached(self, rows: GroupRows, ids: Ints) -> None:
        """Take cached rows, each named once, that are held by now, out of the cache."""
        rows.cached.remove(ids)
        rows.num_held += len(ids)
        if rows.per_slab == 1:
            self.held[ids] = 1
            self.cached[ids] = 0
            self.num_idle -= len(ids)
            return
        slabs, counts = rows.by_slab(np.sort(ids))
        before = self.held[slabs]
        self.cached[slabs] -= counts
        self._update(rows, slabs, before, before + counts)

    def release(self, rows: GroupRows, ids: Ints) -> None:
        """End the last hold on rows, each named once: kept ones are cached, the last of
        them to be evicted first; others are free."""
        rows.num_held -= len(ids)
        state = rows.state[ids]
        cached, freed = ids[state == KEPT], ids[state != KEPT]
        stamp = next(self._clock)
        rows.cached.put(cached[::-1], stamp)
        rows.state[freed] = FREE
        if rows.per_slab == 1:
            self.held[ids] = 0
            self.num_idle += len(ids)
            self.cached[cached] = 1
            self._vacate(freed)
            return
        slabs, counts = rows.by_slab(np.sort(ids))
        np.add.at(self.cached, rows.slabs_of(cached), 1)
        before = self.held[slabs]
        self._update(rows, slabs, before, before - counts, stamp)

    def evict(self, rows: GroupRows, ids: Ints) -> None:
        """Give up the content of cached rows. Their slabs stay the group's: the caller is
        about to use them, or calls `discard` instead."""
        if not len(ids):
            return
        self._on_evict(rows.group, ids)
        rows.cached.remove(ids)
        rows.state[ids] = FREE
        np.subtract.at(self.cached, rows.slabs_of(ids), 1)

    def discard(self, rows: GroupRows, ids: Ints) -> None:
        """Give up the content of cached rows, which become free."""
        self.evict(rows, ids)
        if rows.per_slab == 1:
            self._vacate(ids)
            return
        slabs, _ = rows.by_slab(np.sort(ids))
        held = self.held[slabs]
        self._update(rows, slabs, held, held)

    def _update(
        self, rows: GroupRows, slabs: Ints, before: Ints, after: Ints, stamp: int = 0
    ) -> None:
        """Write down how many rows of slabs are held, which were `before`; bring counts and
        lists up to date with it and with `cached`. Slabs without rows in use become vacant."""
        self.held[slabs] = after
        num_busy = int(np.count_nonzero(after))
        more_busy = num_busy - int(np.count_nonzero(before))
        rows.num_busy += more_busy
        self.num_idle -= more_busy
        num_free = rows.per_slab - after - self.cached[slabs]
        levels = rows.levels_of(slabs, num_free)
        num_empty = 0
        if num_busy < len(slabs):
            empty = num_free == rows.per_slab
            num_empty = int(np.count_nonzero(empty))
            if num_empty:
                levels[empty] = 0
                self._vacate(slabs[empty])
        if len(rows.idle) or num_busy + num_empty < len(slabs):
            self._queue_idle(rows, slabs, (after == 0) & (num_free < rows.per_slab), stamp)
        rows.partial.move(slabs, levels)

    def _queue_idle(self, rows: GroupRows, slabs: Ints, idle: Bools, stamp: int) -> None:
        """Have exactly the idle ones of the slabs in the queue."""
        queued = rows.idle.has(slabs)
        if np.count_nonzero(leaves := queued & ~idle):
            rows.idle.remove(slabs[leaves])
        if np.count_nonzero(comes := idle & ~queued):
            rows.idle.put(slabs[comes], stamp or next(self._clock))


# ── integrity ─────────────────────────────────────────────────────────────────────────


def broken_counts(slabs: Slabs) -> Iterator[str]:
    """Every number that does not add up when all is counted again from the rows, with both
    values."""
    for what, count, written in _recounted(slabs):
        count, written = np.atleast_1d(count), np.atleast_1d(written)
        for at in np.nonzero(count != written)[0][:3]:
            place = f" {at}" if len(count) > 1 else ""
            yield f"{what}{place}: {count[at]} counted, {written[at]} in the books"


def _recounted(slabs: Slabs) -> Iterator[tuple[str, npt.ArrayLike, npt.ArrayLike]]:
    """What was counted, as it is and as it is written down: a number, or one for each place."""
    held, cached = np.zeros(slabs.num_slabs, np.int64), np.zeros(slabs.num_slabs, np.int64)
    for rows in slabs.groups:
        is_held, is_cached = rows.refs > 0, rows.cached.has(np.arange(rows.num_rows))
        slab = rows.slabs_of(np.arange(rows.num_rows))
        held += np.bincount(slab[is_held], minlength=slabs.num_slabs)
        cached += np.bincount(slab[is_cached], minlength=slabs.num_slabs)
        for what, count, written in _recounted_rows(slabs, rows, is_held, is_cached):
            yield f"group {rows.name!r}: {what}", count, written
    yield "held rows of slab", held, slabs.held
    yield "cached rows of slab", cached, slabs.cached
    usable = np.arange(slabs.num_slabs) >= slabs.num_null
    vacant = (slabs.owner == NOBODY) & usable
    yield "vacant slab", vacant, slabs.vacant.level[: slabs.num_slabs] == VACANT
    yield "slab that is nobody's", usable & (slabs.held + slabs.cached == 0), vacant
    yield "idle slabs", np.count_nonzero(usable & (slabs.held == 0)), slabs.num_idle
    yield "vacant slabs", np.count_nonzero(vacant), slabs.num_vacant


def _recounted_rows(
    slabs: Slabs, rows: GroupRows, is_held: Bools, is_cached: Bools
) -> Iterator[tuple[str, npt.ArrayLike, npt.ArrayLike]]:
    in_use = rows.state != FREE
    owner = slabs.owner[rows.slabs_of(np.arange(rows.num_rows))]
    yield "held rows", np.count_nonzero(is_held), rows.num_held
    yield "negative holds of block", np.minimum(rows.refs, 0), np.zeros_like(rows.refs)
    yield "null rows in use", np.count_nonzero(in_use[: rows.num_null]), 0
    yield "block in use", is_held | is_cached, in_use
    yield "cached block", ~is_held & in_use, is_cached
    yield "kept block in the cache", is_cached & (rows.state == KEPT), is_cached
    yield (
        "owner of the slab of block",
        np.where(in_use, owner, rows.group),
        np.full_like(owner, rows.group),
    )
    own = slabs.owner == rows.group
    spare = (rows.per_slab - slabs.held[own & (slabs.held > 0)]).sum()
    yield "spare rows", spare, rows.spare
    if rows.per_slab > 1:
        each = np.arange(slabs.num_slabs)
        num_free = np.where(own, rows.per_slab - slabs.held - slabs.cached, 0)
        yield "level of slab", rows.levels_of(each, num_free), rows.partial.level[each]
        yield "idle slab", own & (slabs.held == 0), rows.idle.has(each)


# ── status ────────────────────────────────────────────────────────────────────────────

MAX_LETTERS = 960
FIRST_LETTER = 33
LEVELS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabMap:
    """Who owns which slab, as a string: one letter for every `step`-th of `num_slabs` slabs.

    A letter's code is 33 + 4 · (owner + 1) + fullness; the owner is an index into `groups`,
    -1 for nobody. Fullness counts held rows: 0 none, 1 up to half of them, 2 more, 3 all.
    The null slab is left out. There are no letters where no slabs pass between the groups.
    """

    groups: tuple[str, ...]
    num_slabs: int
    step: int
    letters: str


def slab_map(sets: Sequence[Slabs]) -> SlabMap:
    """The slabs of a pool as letters. A group that is alone has one row per slab."""
    groups = sorted((rows for slabs in sets for rows in slabs.groups), key=lambda rows: rows.group)
    names = tuple(rows.name for rows in groups)
    if len(sets) != 1:
        return SlabMap(groups=names, num_slabs=0, step=1, letters="")
    (slabs,) = sets
    num_slabs = slabs.num_slabs - slabs.num_null
    step = max(1, ceil_div(num_slabs, MAX_LETTERS))
    owner, held = slabs.owner[slabs.num_null :: step], slabs.held[slabs.num_null :: step]
    size = np.where(owner < 0, 1, np.array([rows.per_slab for rows in groups])[owner])
    level = np.where(held == 0, 0, np.where(held == size, 3, 1 + (2 * held > size)))
    codes = (FIRST_LETTER + LEVELS * (owner + 1) + level).astype("<u4")
    letters = codes.tobytes().decode("utf-32-le")
    return SlabMap(groups=names, num_slabs=num_slabs, step=step, letters=letters)
