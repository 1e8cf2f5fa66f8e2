"""Placement: which rows a demand gets. Partly used slabs first, then free slabs, then cached rows.

While free slabs abound, runs matter: rows that are wanted together come in few runs, rows
that are wanted one by one fill the gaps that runs cannot use. When free slabs become scarce
(not `roomy`), gaps matter: rows that a window will leave fill them from the lowest slab up,
those that are wanted briefly from the highest down, so that the highest slabs become empty.
What has to be evicted is what was used longest ago: rows of the group's own, or whole idle
slabs of others.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvstow.blocks.rows import FREE, NONE, GroupRows, fewest_runs, num_runs
from kvstow.blocks.slabs import VACANT, Slabs
from kvstow.plan.retention import Bools
from kvstow.plan.view import Ints, ceil_div

Kind = Literal["lasting", "moving", "single", "brief"]
"""How rows are wanted: in few runs and for long; in few runs, as long as a window sees
them; one by one; for a step or two only. What `brief` and ROOMY are good for, on
deepseek-v4-flash in 40 GiB with the trace `chat`: 1,678 requests at once and 2.4 % lost to
fragmentation; without ROOMY 1,546 and 10 %, without either 1,428 and 17 %."""

ROOMY = 24
"""While more than one slab in so many is free, runs come before filling gaps. The figures are
beside `Kind`."""

MAX_PIECES = 2
"""Runs in partly used slabs that are better than a slab of its own."""


@dataclass(frozen=True, slots=True)
class RowDemand:
    """`count` rows of a group.

    Side by side; or one each next to the rows of `after`, if those are given, `moving` ones
    only while there is room. `brief` ones will be released soon: they go where they hinder
    least.
    """

    group: int
    count: int
    kind: Kind = "lasting"
    after: Ints | None = None


def roomy(slabs: Slabs) -> bool:
    """Whether there are free slabs enough to care for runs more than for gaps."""
    return slabs.num_vacant * ROOMY > slabs.num_slabs


# ── holding ───────────────────────────────────────────────────────────────────────────


def hold_rows(
    slabs: Slabs, rows: GroupRows, count: int, kind: Kind, needs: Mapping[int, int]
) -> Ints:
    """Hold `count` rows of one group, ascending, so that all that is needed besides can be
    held, too. There are rows enough for all `needs`, of which these are a part."""
    if count == 0:
        return NONE
    if rows.per_slab > 1 and not _has_slabs_to_spare(slabs, rows, count, kind, needs):
        ids = _placed_in_fewest_slabs(slabs, rows, count, kind)
    else:
        ids = _placed(slabs, rows, count, kind)
    slabs.hold(rows, ids, briefly=kind == "brief")
    return ids


def hold_rows_after(
    slabs: Slabs, rows: GroupRows, after: Ints, kind: Kind, needs: Mapping[int, int]
) -> Ints:
    """Hold one row next to each of `after` where that is free, and any row elsewhere."""
    if kind == "moving" and rows.per_slab > 1 and not roomy(slabs):
        return hold_rows(slabs, rows, len(after), "moving", needs)
    ids = after + 1
    fits = _free_at_no_cost(slabs, rows, ids)
    near = np.sort(ids[fits])
    if len(near):
        if rows.per_slab == 1:
            slabs.claim_vacant(rows, near)
        slabs.hold(rows, near)
    rest = len(ids) - len(near)
    if rest:
        left = {**needs, rows.group: needs[rows.group] - len(near)}
        ids[~fits] = hold_rows(slabs, rows, rest, "single", left)
    return ids


def _free_at_no_cost(slabs: Slabs, rows: GroupRows, ids: Ints) -> Bools:
    """Which rows are free, in a slab in use or (where a row is a slab) in a free one. Of a
    row that is named twice the first counts."""
    exist = ids < rows.num_rows
    near = np.where(exist, ids, 0)
    if rows.per_slab == 1:
        fits = exist & (slabs.vacant.level[near] == VACANT)
    else:
        slab = rows.slabs_of(near)
        in_use = (slabs.owner[slab] == rows.group) & (slabs.held[slab] > 0)
        fits = exist & (rows.state[near] == FREE) & in_use
    some = np.sort(near[fits])
    if np.count_nonzero(some[1:] == some[:-1]):
        first = np.zeros(len(ids), np.bool_)
        first[np.unique(near, return_index=True)[1]] = True
        fits &= first
    return fits


# ── choosing ──────────────────────────────────────────────────────────────────────────


def _placed(slabs: Slabs, rows: GroupRows, count: int, kind: Kind) -> Ints:
    """`count` rows of slabs that the group owns by now, ascending; free, not yet held.

    May use up to `_most_slabs` idle slabs.
    """
    parts: list[Ints] = []
    if rows.per_slab > 1:
        parts.append(_in_partial_slabs(slabs, rows, count, kind))
    missing = count - sum(map(len, parts))
    if missing and slabs.num_vacant:
        parts.append(_in_vacant_slabs(slabs, rows, missing, kind))
        missing -= len(parts[-1])
    if missing and rows.per_slab > 1:
        gaps = _free_rows(rows, range(1, 2 * rows.top + 1), rows.num_rows)
        gaps = np.setdiff1d(gaps, parts[0])
        parts.append(fewest_runs(gaps, missing))
        missing -= len(parts[-1])
    if missing:
        parts.append(_evicted(slabs, rows, missing))
    return parts[0] if len(parts) == 1 else np.sort(np.concatenate(parts))


def _has_slabs_to_spare(
    slabs: Slabs, rows: GroupRows, count: int, kind: Kind, needs: Mapping[int, int]
) -> bool:
    """Whether all `needs` can still be met when these rows take as many idle slabs as
    `_placed` may use."""
    beyond_need = _most_slabs(slabs, rows, count, kind) - slabs.needed(rows, count)
    return beyond_need <= -slabs.missing(needs)


def _most_slabs(slabs: Slabs, rows: GroupRows, count: int, kind: Kind) -> int:
    """The most idle slabs that `_placed` may use for so many rows."""
    most = whole = ceil_div(count, rows.per_slab)
    if kind != "lasting" and not roomy(slabs):
        most = min(whole, slabs.needed(rows, count + len(rows.cached)))
    if any(len(other.idle) for other in slabs.groups if other is not rows):
        most += whole
    return min(count, most + len(rows.idle))


def _placed_in_fewest_slabs(slabs: Slabs, rows: GroupRows, count: int, kind: Kind) -> Ints:
    """The same with as few idle slabs as possible: gaps in slabs in use first, then cached
    rows in these, then free slabs, then idle ones."""
    listed = np.nonzero(rows.partial.level[: slabs.num_slabs])[0]
    busy = listed[slabs.held[listed] > 0]
    gaps = rows.free_rows_of(busy[::-1] if kind == "brief" else busy)
    parts = [fewest_runs(gaps, count) if kind == "lasting" else gaps[:count]]
    missing = count - len(parts[0])
    if missing:
        cached, _ = rows.cached.oldest(len(rows.cached))
        cached = cached[slabs.held[rows.slabs_of(cached)] > 0][:missing]
        slabs.evict(rows, cached)
        parts.append(cached)
        missing -= len(cached)
    if missing:
        num_slabs = ceil_div(missing, rows.per_slab)
        more = slabs.vacant.side_by_side(VACANT, min(num_slabs, slabs.num_vacant))
        slabs.claim_vacant(rows, more)
        if len(more) < num_slabs:
            idle, owners, _ = _oldest_idle(slabs, slabs.groups, num_slabs - len(more))
            more = np.sort(np.concatenate((more, _taken_over(slabs, rows, idle, owners))))
        parts.append(rows.rows_of(more)[:missing])
    return np.sort(np.concatenate(parts))


# ── without evicting ──────────────────────────────────────────────────────────────────


def _in_partial_slabs(slabs: Slabs, rows: GroupRows, count: int, kind: Kind) -> Ints:
    """Free rows in partly used slabs, as many as are good to have there, ascending."""
    if kind == "single":
        levels = range(1, (rows.top if roomy(slabs) else 2 * rows.top) + 1)
        return np.sort(_free_rows(rows, levels, count)[:count])
    if kind in ("moving", "brief") and not roomy(slabs):
        return _in_gaps(slabs, rows, count, kind)
    if kind == "brief":
        levels = range(2 * rows.top, rows.top, -1)
        return fewest_runs(np.sort(_free_rows(rows, levels, 2 * count)), count)
    whole = min(count // rows.per_slab, slabs.num_vacant)
    return _in_few_pieces(slabs, rows, count - whole * rows.per_slab)


def _in_few_pieces(slabs: Slabs, rows: GroupRows, count: int) -> Ints:
    """`count` free rows; none at all where they would be more than a run or two and a free slab
    can be had."""
    if count == 0:
        return NONE
    ids = fewest_runs(np.sort(_free_rows(rows, range(rows.top, 0, -1), 4 * count)), count)
    if len(ids) < count or (roomy(slabs) and num_runs(ids) > MAX_PIECES):
        return NONE
    return ids


def _in_gaps(slabs: Slabs, rows: GroupRows, count: int, kind: Kind) -> Ints:
    """Free rows of the lowest slabs, or of the highest where they are wanted briefly;
    slabs in which nothing stays come last."""
    parts: list[Ints] = []
    for levels in (range(1, rows.top + 1), range(rows.top + 1, 2 * rows.top + 1)):
        some = rows.partial.search(levels, count, from_top=kind == "brief")
        num_free = rows.per_slab - slabs.held[some] - slabs.cached[some]
        enough = int(np.searchsorted(num_free.cumsum(), count)) + 1
        parts.append(rows.free_rows_of(some[:enough])[:count])
        count -= len(parts[-1])
        if count == 0:
            break
    return np.sort(np.concatenate(parts))


def _free_rows(rows: GroupRows, levels: Iterable[int], enough: int) -> Ints:
    """Free rows of partly used slabs, level by level, until there are enough."""
    parts = [NONE]
    for level in levels:
        if enough > 0 and rows.partial.totals[level]:
            some = rows.partial.search(range(level, level + 1), enough)
            parts.append(rows.free_rows_of(some))
            enough -= len(parts[-1])
    return np.concatenate(parts)


def _in_vacant_slabs(slabs: Slabs, rows: GroupRows, count: int, kind: Kind) -> Ints:
    """Rows of vacant slabs, as many as there are."""
    num_slabs = min(ceil_div(count, rows.per_slab), slabs.num_vacant)
    if kind == "single" and rows.per_slab == 1:
        more = slabs.vacant.scattered(VACANT, num_slabs)
    else:
        more = slabs.vacant.side_by_side(VACANT, num_slabs)
    slabs.claim_vacant(rows, more)
    return rows.rows_of(more)[:count]


# ── evicting ──────────────────────────────────────────────────────────────────────────


def _oldest_idle(slabs: Slabs, groups: Iterable[GroupRows], count: int) -> tuple[Ints, Ints, Ints]:
    """`count` idle slabs of the groups, oldest first, with the owner and the last use of each;
    among the oldest those with the fewest cached rows."""
    parts: list[Ints] = []
    for rows in groups:
        some, last_use = rows.idle.oldest(2 * count + 8)
        parts.append(np.stack((some, np.full(len(some), rows.group), last_use)))
    idle = np.concatenate(parts, axis=1)
    idle = idle[:, np.argsort(idle[2], kind="stable")[: 2 * count + 8]]
    idle = idle[:, np.argsort(slabs.cached[idle[0]], kind="stable")[:count]]
    some, owners, last_use = idle[:, np.argsort(idle[2], kind="stable")]
    return some, owners, last_use


def _taken_over(slabs: Slabs, rows: GroupRows, idle: Ints, owners: Ints) -> Ints:
    """Idle slabs made the group's own, ascending; what was cached in them is gone."""
    for other in slabs.groups:
        if len(lost := idle[owners == other.group]):
            slabs.empty(other, lost)
    slabs.claim(rows, idle)
    return np.sort(idle)


def _evicted(slabs: Slabs, rows: GroupRows, count: int) -> Ints:
    """Rows of the group's own cache and idle slabs of others, whichever are older."""
    own, last_use = rows.cached.oldest(count)
    gained = NONE
    others = [other for other in slabs.groups if other is not rows and len(other.idle)]
    if others:
        num_slabs = ceil_div(count, rows.per_slab)
        idle, owners, idle_since = _oldest_idle(slabs, others, num_slabs)
        order = np.argsort(np.concatenate((last_use, idle_since)), kind="stable")
        is_slab = order >= len(own)
        reach = np.where(is_slab, rows.per_slab, 1).cumsum()
        oldest = order[: int(np.searchsorted(reach, count)) + 1]
        foreign = oldest[oldest >= len(own)] - len(own)
        if len(foreign):
            taken = _taken_over(slabs, rows, idle[foreign], owners[foreign])
            gained = rows.rows_of(taken)[:count]
    own = own[: count - len(gained)]
    slabs.evict(rows, own)
    return np.sort(np.concatenate((gained, own)))
