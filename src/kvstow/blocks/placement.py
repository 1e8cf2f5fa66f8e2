"""Which rows a hold gets: partly used slabs first, then free slabs, then cached rows.

Rows that are wanted together come in few runs; rows that are wanted singly fill the gaps
that runs cannot use. When slabs become scarce, rows that a window will leave fill gaps,
too: from the lowest slab up, and from the highest down where they are wanted briefly, so
that the highest slabs become empty. What has to be evicted is what was used longest ago:
rows of the group's own, or whole idle slabs of others.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvstow.blocks.rows import GroupRows
from kvstow.blocks.runs import NONE, Where, fewest_runs, ids_at, num_at, num_runs, span
from kvstow.blocks.slabs import FREE, Slabs
from kvstow.plan.view import Ints

MAX_SLABS_LOOKED_AT = 16
MAX_PIECES = 2
"""Runs in partly used slabs that are better than a slab of its own."""


@dataclass(frozen=True, slots=True)
class EvictionCandidates:
    """Cached rows that may be evicted, those that waited longest first."""

    group: int
    rows: Ints
    last_use: Ints


Kind = Literal["lasting", "moving", "single", "brief"]
"""How rows are wanted: in few runs and for long; in few runs, as long as a window sees
them; one by one; for a step or two only."""

ROOMY = 24
"""While more than one slab in so many is free, runs come before filling gaps."""

EvictionPolicy = Callable[[EvictionCandidates, int], Ints]
"""Chooses `n` of the candidates to give up: positions among them."""


def lru(candidates: EvictionCandidates, count: int) -> Ints:
    """Those that waited longest."""
    return np.arange(min(count, len(candidates.rows)))


def picked(slabs: Slabs, stock: GroupRows, count: int, policy: EvictionPolicy, kind: Kind) -> Where:
    """`count` rows of slabs that the group owns by now, ascending; free, not yet held.

    May use up to one idle slab per row.
    """
    parts: list[Where] = []
    if stock.rows_per_slab > 1:
        own = _in_own_slabs(slabs, stock, count, kind)
        parts.append(own)
        count -= len(own)
    if count and slabs.free.totals[FREE]:
        parts.append(_in_free_slabs(slabs, stock, count, kind))
        count -= num_at(parts[-1])
    if count and stock.rows_per_slab > 1:
        every = _free_rows(stock, range(1, 2 * stock.top + 1), 1 << 62)
        taken = ids_at(parts[0])
        if len(taken):
            every = every[~np.isin(every, taken)]
        rows = fewest_runs(np.sort(every), count)
        parts.append(rows)
        count -= len(rows)
    if count:
        parts.append(_evicted(slabs, stock, count, policy))
    return _together(parts)


def most_idle_slabs(slabs: Slabs, stock: GroupRows, count: int, kind: Kind) -> int:
    """The most idle slabs that `picked` may use for so many rows."""
    used = whole = -(-count // stock.rows_per_slab)
    if kind != "lasting" and not roomy(slabs):
        used = min(whole, slabs.needed(stock, count + len(stock.queue)))
    if any(len(other.idle) for other in slabs.stocks if other is not stock):
        used += whole
    return min(count, used + len(stock.idle))


def picked_frugally(slabs: Slabs, stock: GroupRows, count: int, kind: Kind) -> Ints:
    """The same with as few idle slabs as possible."""
    own = np.nonzero(stock.partial.shelf[: slabs.num_slabs])[0]
    busy = own[slabs.held[own] > 0]
    gaps = stock.free_rows_of(busy[::-1] if kind == "brief" else busy)
    parts = [fewest_runs(gaps, count) if kind == "lasting" else np.sort(gaps[:count])]
    count -= len(parts[0])
    if count:
        rows, _ = stock.queue.oldest(len(stock.queue))
        rows = rows[slabs.held[stock.slabs_of(rows)] > 0][:count]
        slabs.evict(stock, rows)
        parts.append(np.sort(rows))
        count -= len(rows)
    if count:
        wanted = -(-count // stock.rows_per_slab)
        free = slabs.free.side_by_side(FREE, min(wanted, slabs.free.totals[FREE]))
        slabs.take_free(stock, free)
        chosen = ids_at(free)
        if len(chosen) < wanted:
            idle = _oldest_idle(slabs, slabs.stocks, wanted - len(chosen))
            chosen = np.sort(np.concatenate((chosen, _handed_over(slabs, stock, idle))))
        parts.append(stock.rows_of(chosen)[:count])
    return np.sort(np.concatenate(parts))


def _together(parts: list[Where]) -> Where:
    parts = [part for part in parts if num_at(part)]
    if len(parts) == 1:
        return parts[0] if isinstance(parts[0], slice) else span(parts[0])
    return span(np.sort(np.concatenate([ids_at(part) for part in parts])))


# ── without evicting ──────────────────────────────────────────────────────────────────


def _in_own_slabs(slabs: Slabs, stock: GroupRows, count: int, kind: Kind) -> Ints:
    """Free rows in partly used slabs, as many as are good to have there."""
    if kind in ("moving", "brief") and not roomy(slabs):
        return _in_gaps(slabs, stock, count, kind)
    top = stock.top
    if kind == "single":
        levels = range(1, (top if roomy(slabs) else 2 * top) + 1)
        return np.sort(_free_rows(stock, levels, count)[:count])
    if kind == "brief":
        return fewest_runs(np.sort(_free_rows(stock, range(2 * top, top, -1), 2 * count)), count)
    size = stock.rows_per_slab
    if count >= size and not roomy(slabs):
        near = stock.free_rows_of(stock.partial.lowest(range(1, top + 1), count))
        found = fewest_runs(near, count, most=MAX_PIECES * (count // size))
        if len(found) >= count % size:
            return fewest_runs(found, len(found) - (len(found) - count) % size)
    whole = min(count // size, slabs.free.totals[FREE])
    rest = count - whole * size
    if rest == 0 or not any(stock.partial.totals[1 : top + 1]):
        return NONE
    for level in range(min(rest.bit_length(), top), top + 1):
        if stock.partial.totals[level]:
            near = stock.free_rows_of(
                stock.partial.lowest(range(level, level + 1), MAX_SLABS_LOOKED_AT)
            )
            found = fewest_runs(near, rest)
            if len(found) == rest and num_runs(found) <= MAX_PIECES:
                return found
    near = _free_rows(stock, range(top, 0, -1), 4 * rest)
    found = fewest_runs(np.sort(near), rest)
    if len(found) < rest or (roomy(slabs) and num_runs(found) > MAX_PIECES):
        return NONE
    return found


def _in_gaps(slabs: Slabs, stock: GroupRows, count: int, kind: Kind) -> Ints:
    """Free rows of the lowest slabs, or of the highest where they are wanted briefly;
    slabs in which nothing stays come last."""
    pick = stock.partial.highest if kind == "brief" else stock.partial.lowest
    parts: list[Ints] = []
    for shelves in (range(1, stock.top + 1), range(stock.top + 1, 2 * stock.top + 1)):
        own = pick(shelves, count)
        if len(own):
            free = stock.rows_per_slab - slabs.held[own] - slabs.cached[own]
            enough = int(np.searchsorted(free.cumsum(), count)) + 1
            parts.append(stock.free_rows_of(own[:enough])[:count])
            count -= len(parts[-1])
        if count == 0:
            break
    return np.sort(np.concatenate(parts)) if parts else NONE


def roomy(slabs: Slabs) -> bool:
    """Whether there are free slabs enough to care for runs more than for gaps."""
    return slabs.free.totals[FREE] * ROOMY > slabs.num_slabs


def _free_rows(stock: GroupRows, levels: Iterable[int], enough: int) -> Ints:
    """Free rows of partly used slabs, level by level, until there are enough."""
    parts: list[Ints] = []
    for level in levels:
        if enough > 0 and stock.partial.totals[level]:
            own = stock.partial.lowest(range(level, level + 1), enough)
            parts.append(stock.free_rows_of(own))
            enough -= len(parts[-1])
    return np.concatenate(parts) if parts else NONE


def _in_free_slabs(slabs: Slabs, stock: GroupRows, count: int, kind: Kind) -> Where:
    size = stock.rows_per_slab
    wanted = min(-(-count // size), slabs.free.totals[FREE])
    if kind != "single" or size > 1:
        chosen = slabs.free.side_by_side(FREE, wanted)
    else:
        chosen = span(slabs.free.scattered(FREE, wanted))
    slabs.take_free(stock, chosen)
    if isinstance(chosen, slice):
        start = chosen.start * size
        return slice(start, min(start + count, chosen.stop * size))
    return stock.rows_of(chosen)[:count]


# ── evicting ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Idle:
    """Idle slabs, the owner of each, and when each was used last."""

    slabs: Ints
    owners: Ints
    last_use: Ints

    def part(self, where: Ints) -> "_Idle":
        return _Idle(self.slabs[where], self.owners[where], self.last_use[where])


def _oldest_idle(slabs: Slabs, stocks: Iterable[GroupRows], count: int) -> _Idle:
    """`count` idle slabs of the groups, oldest first; among the oldest those with the
    fewest cached rows."""
    parts: list[_Idle] = []
    for stock in stocks:
        found, stamps = stock.idle.oldest(2 * count + 8)
        parts.append(_Idle(found, np.full(len(found), stock.group), stamps))
    idle = _Idle(
        np.concatenate([p.slabs for p in parts]),
        np.concatenate([p.owners for p in parts]),
        np.concatenate([p.last_use for p in parts]),
    )
    oldest = idle.part(np.argsort(idle.last_use, kind="stable")[: 2 * count + 8])
    cheapest = oldest.part(np.argsort(slabs.cached[oldest.slabs], kind="stable")[:count])
    return cheapest.part(np.argsort(cheapest.last_use, kind="stable"))


def _handed_over(slabs: Slabs, stock: GroupRows, idle: _Idle) -> Ints:
    """Idle slabs made the group's own, ascending; what was cached in them is gone."""
    for other in slabs.stocks:
        if len(lost := idle.slabs[idle.owners == other.group]):
            slabs.vacate(other, lost)
    slabs.claim(stock, idle.slabs)
    return np.sort(idle.slabs)


def _evicted(slabs: Slabs, stock: GroupRows, count: int, policy: EvictionPolicy) -> Ints:
    """Rows of the group's own cache and idle slabs of others, whichever are older."""
    rows, stamps = _own_candidates(stock, count, policy)
    others = [other for other in slabs.stocks if other is not stock and len(other.idle)]
    if others:
        wanted = -(-count // stock.rows_per_slab)
        idle = _oldest_idle(slabs, others, wanted)
        weights = np.ones(len(rows) + len(idle.slabs), np.int64)
        weights[len(rows) :] = stock.rows_per_slab
        order = np.argsort(np.concatenate((stamps, idle.last_use)), kind="stable")
        enough = int(np.searchsorted(weights[order].cumsum(), count)) + 1
        foreign = order[:enough]
        foreign = foreign[foreign >= len(rows)] - len(rows)
        if len(foreign):
            gained = stock.rows_of(_handed_over(slabs, stock, idle.part(foreign)))[:count]
            rows = rows[: count - len(gained)]
            slabs.evict(stock, rows)
            return np.sort(np.concatenate((gained, rows)))
    slabs.evict(stock, rows)
    return np.sort(rows)


def _own_candidates(stock: GroupRows, count: int, policy: EvictionPolicy) -> tuple[Ints, Ints]:
    if policy is lru:
        return stock.queue.oldest(count)
    rows, stamps = stock.queue.oldest(4 * count + 64)
    chosen = policy(EvictionCandidates(stock.group, rows, stamps), count)[:count]
    return rows[chosen], stamps[chosen]
