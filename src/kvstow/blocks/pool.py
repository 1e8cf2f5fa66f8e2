"""Pool: which blocks of a layout are free, held and cached. Ids only, no memory.

A row is held by as many holders as asked for it; when the last one releases it, it is
cached if its content was `keep`t, and free otherwise. Rows wander between groups in whole
slabs, where the layout lets groups share them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstow.blocks.placement import (
    EvictionPolicy,
    Kind,
    lru,
    most_idle_slabs,
    picked,
    picked_frugally,
    roomy,
)
from kvstow.blocks.rows import GroupRows
from kvstow.blocks.runs import Bools, ids_at, span
from kvstow.blocks.slabs import Slabs, broken_counts
from kvstow.errors import BlockError, OutOfBlocks, PlanError
from kvstow.plan.layout import NULL_SLABS, Layout
from kvstow.plan.view import Ints

Forgets = Callable[[int, Ints], None]


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


class Ownership(NamedTuple):
    """Slab by slab: the group that owns it (-1: nobody), its held and its cached rows."""

    owner: Ints
    held: Ints
    cached: Ints


class Pool:
    """All blocks of a layout but the null ones, free at first.

    `generations` may be memory that others read: one contiguous int64 array per group,
    one entry per block. `policy` chooses what is evicted.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        generations: Sequence[Ints] | None = None,
        policy: EvictionPolicy = lru,
    ) -> None:
        if generations is not None and len(generations) != len(layout.groups):
            raise PlanError(
                f"{len(generations)} generation arrays for {len(layout.groups)} groups"
            )  # fmt: skip
        self.layout = layout
        self.on_evict: list[Forgets] = []
        self._policy = policy
        self._slabs: list[Slabs] = []
        by_group: dict[int, tuple[Slabs, GroupRows]] = {}
        for members in layout.sharing:
            slabs = _slabs(layout, members, generations, self._evicted)
            self._slabs.append(slabs)
            by_group |= {stock.group: (slabs, stock) for stock in slabs.stocks}
        self._of = [by_group[g] for g in range(len(layout.groups))]
        self.generations: tuple[Ints, ...] = tuple(stock.generations for _, stock in self._of)

    def _evicted(self, group: int, rows: Ints) -> None:
        for told in self.on_evict:
            told(group, rows)

    # ── questions ─────────────────────────────────────────────────────────────────

    def num_free(self, group: int) -> int:
        """Rows the group could hold if no other group wanted any; cached ones count."""
        slabs, stock = self._of[group]
        return slabs.num_available(stock)

    def num_held(self, group: int) -> int:
        return self._of[group][1].num_held

    def num_cached(self, group: int) -> int:
        return len(self._of[group][1].queue)

    def has_gaps(self, group: int) -> bool:
        """Whether slabs are of several rows, so that free ones can be stranded."""
        return self._of[group][1].rows_per_slab > 1

    def num_stranded(self, group: int) -> int:
        """Free rows in slabs that the group cannot give up, because of held ones in them."""
        slabs, stock = self._of[group]
        busy = (slabs.owner == group) & (slabs.held > 0)
        return stock.spare - int(slabs.cached[busy].sum()) if stock.spare else 0

    def holds(self, group: int, ids: npt.ArrayLike) -> Ints:
        """How many hold each row."""
        stock = self._of[group][1]
        return stock.refs[stock.known(ids)]

    def kept(self, group: int, ids: npt.ArrayLike) -> Bools:
        """Whether each row's content is to be cached after its last hold."""
        stock = self._of[group][1]
        return stock.kept[stock.known(ids)]

    def quarantined(self, group: int) -> Ints:
        """The rows in quarantine."""
        return np.nonzero(self._of[group][1].quarantined)[0]

    def num_quarantined(self, group: int) -> int:
        return self._of[group][1].num_quarantined

    def in_quarantine(self, group: int, ids: npt.ArrayLike) -> Bools:
        stock = self._of[group][1]
        return stock.quarantined[stock.known(ids)]

    def ownership(self) -> tuple[Ownership, ...]:
        """Who owns which slab now, per set of groups that pass slabs around."""
        return tuple(
            Ownership(slabs.owner.copy(), slabs.held.copy(), slabs.cached.copy())
            for slabs in self._slabs
        )

    def refuse(self, needs: Mapping[int, int]) -> None:
        """Raises if so many rows of the groups cannot be held at once."""
        for slabs in self._slabs:
            missing = slabs.missing(needs)
            if missing > 0:
                raise self._out_of_blocks(slabs, needs, missing)

    def _out_of_blocks(self, slabs: Slabs, needs: Mapping[int, int], missing: int) -> OutOfBlocks:
        demands = [(stock, needs.get(stock.group, 0)) for stock in slabs.stocks]
        wanted = [
            f"{stock.name!r}: {rows} needed, {slabs.num_available(stock)} free"
            for stock, rows in demands
            if rows
        ]
        needed = sum(rows for _, rows in demands)
        free = sum(min(rows, slabs.num_available(stock)) for stock, rows in demands)
        together = f"; {missing} slabs too few for all of them together" if wanted[1:] else ""
        return OutOfBlocks(
            f"rows of group {'; of group '.join(wanted)}{together}\n\n"
            "hint: release a request, or plan a larger budget",
            needed=needed,
            free=free,
        )

    # ── holds ─────────────────────────────────────────────────────────────────────

    def hold(self, group: int, count: int) -> Ints:
        """Hold `count` rows for new content, ascending, in few runs; all or none."""
        return self.hold_all((RowDemand(group, count),))[0]

    def hold_all(self, wants: Sequence[RowDemand]) -> list[Ints]:
        """Hold the rows of every want; all or none."""
        needs: dict[int, int] = {}
        for want in wants:
            if want.count < 0:
                raise BlockError(f"group {want.group}: {want.count} rows cannot be held")
            needs[want.group] = needs.get(want.group, 0) + want.count
        self.refuse(needs)
        held: list[Ints] = []
        for want in wants:
            if want.after is None:
                rows = self._hold(want.group, want.count, needs, want.kind)
            else:
                rows = self._hold_after(want.group, want.kind, want.after, needs)
            held.append(rows)
            needs[want.group] -= want.count
        return held

    def _hold_after(self, group: int, kind: Kind, after: Ints, needs: dict[int, int]) -> Ints:
        slabs, stock = self._of[group]
        if kind == "moving" and stock.rows_per_slab > 1 and not roomy(slabs):
            return self._hold(group, len(after), needs, "moving")
        rows = after + 1
        fits = _free_next(slabs, stock, rows)
        near = rows[fits]
        if len(near):
            where = span(np.sort(near))
            if stock.rows_per_slab == 1:
                slabs.take_free(stock, where)
            slabs.occupy(stock, where)
        rest = len(rows) - len(near)
        if rest:
            left = needs | {group: needs[group] - len(near)}
            rows[~fits] = self._hold(group, rest, left, "single")
        return rows

    def _hold(self, group: int, count: int, needs: Mapping[int, int], kind: Kind) -> Ints:
        """Hold rows of one group, so that all that is needed besides can be held, too."""
        if count == 0:
            return np.zeros(0, np.int64)
        slabs, stock = self._of[group]
        if stock.rows_per_slab == 1 or (
            most_idle_slabs(slabs, stock, count, kind) - slabs.needed(stock, count)
            <= -slabs.missing(needs)
        ):
            where = picked(slabs, stock, count, self._policy, kind)
        else:
            where = span(picked_frugally(slabs, stock, count, kind))
        slabs.occupy(stock, where, briefly=kind == "brief")
        return ids_at(where)

    def share(self, group: int, ids: npt.ArrayLike) -> None:
        """Add one hold to each row that is held or cached; what is in it stays."""
        slabs, stock = self._of[group]
        rows, where = stock.located(ids)
        refs = stock.refs[where]
        cached = refs == 0
        num_cached = np.count_nonzero(cached)
        if num_cached:
            stock.refuse(
                rows, cached & (stock.queue.place[where] < 0), "is neither held nor cached"
            )
        if isinstance(where, slice):
            stock.refs[where] = refs + 1
        else:
            np.add.at(stock.refs, rows, 1)
        if num_cached:
            if num_cached < len(rows):
                rows = where = rows[cached]
            if not isinstance(where, slice) and np.count_nonzero(stock.refs[rows] != 1):
                rows = where = np.unique(rows)
            slabs.revive(stock, rows, where)

    def release(self, group: int, ids: npt.ArrayLike) -> None:
        """Give back one hold on each row; one named twice gives back two.

        Raises before changing anything if some row has fewer holds than that.
        """
        slabs, stock = self._of[group]
        rows, where = stock.located(ids)
        if not len(rows):
            return
        before = stock.refs[where]
        if isinstance(where, slice):
            left = before - 1
            if left[left.argmin()] < 0:
                stock.refuse(rows, left < 0, "is released more often than it is held")
            stock.refs[where] = left
            once = True
        else:
            np.subtract.at(stock.refs, rows, 1)
            left = stock.refs[rows]
            if left[left.argmin()] < 0:
                np.add.at(stock.refs, rows, 1)
                stock.refuse(rows, left < 0, "is released more often than it is held")
            once = not np.count_nonzero(before - left != 1)
        if np.count_nonzero(left):
            rows = where = rows[left == 0]
        if not once:
            rows = where = _unique(rows)
        if len(rows):
            slabs.vacated(stock, rows, where)

    def renewable(self, group: int, ids: Ints) -> Bools:
        """Which held rows their only holder may use for new content right away.

        None where slabs are scarce: then rows had better move to where they fill gaps.
        """
        slabs, stock = self._of[group]
        if stock.rows_per_slab > 1 and not roomy(slabs):
            return np.zeros(len(ids), np.bool_)
        return (stock.refs[ids] == 1) & ~stock.kept[ids]

    def renew(self, group: int, ids: Ints) -> None:
        """Use renewable rows, each named once, for new content."""
        self._of[group][1].generations[ids] += 1

    # ── content ───────────────────────────────────────────────────────────────────

    def keep(self, group: int, ids: npt.ArrayLike) -> None:
        """Cache the content of held rows when their last hold ends."""
        stock = self._of[group][1]
        rows, where = stock.located(ids)
        refs = stock.refs[where]
        if len(refs) and refs[refs.argmin()] == 0:
            stock.refuse(rows, refs == 0, "is not held")
        stock.kept[where] = True

    def forget(self, group: int, ids: npt.ArrayLike) -> None:
        """Do not cache the content of rows; cached ones become free."""
        slabs, stock = self._of[group]
        rows = _unique(stock.known(ids))
        cached = rows[stock.queue.place[rows] >= 0]
        if len(cached):
            slabs.discarded(stock, cached)
        held = rows[stock.kept[rows]]
        if len(held):
            self._evicted(group, held)
            stock.kept[held] = False

    def quarantine(self, group: int, ids: npt.ArrayLike) -> None:
        """Keep held rows out of use, whoever releases them, until `unquarantine`.

        For rows that somebody may still be writing to. Their content is forgotten.
        """
        stock = self._of[group][1]
        rows = stock.known(ids)
        stock.refuse(rows, stock.refs[rows] == 0, "is not held")
        stock.refuse(rows, stock.quarantined[rows], "is in quarantine already")
        rows = _unique(rows)
        self.forget(group, rows)
        stock.refs[rows] += 1
        stock.quarantined[rows] = True
        stock.num_quarantined += len(rows)

    def unquarantine(self, group: int, ids: npt.ArrayLike) -> None:
        """End the quarantine of rows: free, unless somebody still holds them."""
        stock = self._of[group][1]
        rows = _unique(stock.known(ids))
        stock.refuse(rows, ~stock.quarantined[rows], "is not in quarantine")
        stock.quarantined[rows] = False
        stock.num_quarantined -= len(rows)
        self.release(group, rows)

    # ── integrity ─────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Raises with every number that does not add up; changes nothing."""
        broken = [line for slabs in self._slabs for line in broken_counts(slabs)]
        if broken:
            raise BlockError("\n".join(broken))


def _slabs(
    layout: Layout,
    members: tuple[int, ...],
    generations: Sequence[Ints] | None,
    evicted: Forgets,
) -> Slabs:
    alone = len(members) == 1
    size = layout.groups[members[0]].rows_per_slab if alone else 1
    stocks = [
        GroupRows(
            group=g,
            name=layout.groups[g].group.name,
            num_slabs=layout.num_slabs * size,
            rows_per_slab=1 if alone else layout.groups[g].rows_per_slab,
            num_null=NULL_SLABS * layout.groups[g].rows_per_slab,
            generations=None if generations is None else generations[g],
        )
        for g in members
    ]
    return Slabs(
        stocks,
        num_slabs=layout.num_slabs * size,
        num_null=NULL_SLABS * size,
        evicted=evicted,
    )


def _unique(rows: Ints) -> Ints:
    return rows if len(rows) < 2 else np.unique(rows)


def _free_next(slabs: Slabs, stock: GroupRows, rows: Ints) -> Bools:
    """Which rows can be had at no cost: free, in a slab in use or (where a row is a slab)
    in a free one; each row once."""
    inside = rows < stock.num_rows
    near = np.where(inside, rows, 0)
    if stock.rows_per_slab == 1:
        fits = inside & (slabs.free.shelf[near] == 1)
    else:
        of = stock.slabs_of(near)
        fits = inside & stock.free[near] & (slabs.owner[of] == stock.group) & (slabs.held[of] > 0)
    if len(rows) > 1 and np.count_nonzero(fits):
        twice = np.sort(near[fits])
        if np.count_nonzero(twice[1:] == twice[:-1]):
            first = np.unique(near, return_index=True)[1]
            once = np.zeros(len(rows), np.bool_)
            once[first] = True
            fits &= once
    return fits
