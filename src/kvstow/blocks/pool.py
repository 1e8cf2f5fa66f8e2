"""Pool: which blocks of a layout are free, held and cached. Ids only, no memory.

A row is held by as many holders as asked for it; when the last one releases it, it is
cached if its content was `keep`t, and free otherwise. Rows move between groups in whole
slabs, where the layout lets groups share them.

One thread owns a pool: the first one that changes it. A change in another thread is an
error, because nothing here is locked; `hand_over` lets the next thread have it. Questions
may be asked in any thread; the answer may be outdated when it arrives.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from threading import get_ident

import numpy as np
import numpy.typing as npt

from kvstow.blocks.placement import RowDemand, hold_rows, hold_rows_after
from kvstow.blocks.rows import (
    KEPT,
    NEW,
    PARTIAL,
    QUARANTINED,
    UNKNOWN,
    GroupRows,
)
from kvstow.blocks.slabs import OnEvict, SlabMap, Slabs, broken_counts, slab_map
from kvstow.errors import BlockError, OutOfBlocks, WrongThread
from kvstow.plan.layout import Layout, Planned, as_layout
from kvstow.plan.retention import Bools
from kvstow.plan.view import Ints

log = logging.getLogger(__name__)

NO_THREAD = 0


class Pool:
    """All blocks of a layout but the null ones, free at first.

    The callables in `on_evict` are called with a group and its evicted rows, before these are
    used again. What they raise is logged.
    """

    def __init__(self, layout: Layout | Planned) -> None:
        self.layout = layout = as_layout(layout)
        self.on_evict: list[OnEvict] = []
        self._thread = NO_THREAD
        self._slabs: list[Slabs] = []
        by_group: dict[int, tuple[Slabs, GroupRows]] = {}
        for members in layout.sharing:
            slabs = Slabs(layout, members, self._evicted)
            self._slabs.append(slabs)
            by_group |= {rows.group: (slabs, rows) for rows in slabs.groups}
        self._of = [by_group[g] for g in range(len(layout.groups))]
        self.generations: tuple[Ints, ...] = tuple(rows.generations for _, rows in self._of)

    def place_generations(self, tables: Sequence[Ints]) -> None:
        """Keep the generations in memory that others read: one array of int64 per group."""
        for (_, rows), table in zip(self._of, tables, strict=True):
            table[:] = rows.generations
            rows.generations = table
        self.generations = tuple(tables)

    def _evicted(self, group: int, ids: Ints) -> None:
        for listener in self.on_evict:
            try:
                listener(group, ids)
            except Exception:
                log.exception("pool: a listener was not told of %d evicted rows", len(ids))

    # ── the owner's thread ────────────────────────────────────────────────────────

    def check_thread(self) -> None:
        """Raises WrongThread in any thread but the owner's; the first caller becomes the owner."""
        thread = get_ident()
        if thread == self._thread:
            return
        if self._thread != NO_THREAD:
            names = {other.ident: other.name for other in threading.enumerate()}
            owner = names.get(self._thread, "that has ended")
            raise WrongThread(
                f"the pool is changed in thread {names.get(thread, 'unknown')!r} ({thread}) and "
                f"belongs to thread {owner!r} ({self._thread})\n\n"
                "hint: change it in one thread only, or call pool.hand_over() when its owner "
                "is done with it"
            )
        self._thread = thread

    def hand_over(self) -> None:
        """Let the next thread that changes the pool own it. For when the owner is done."""
        self._thread = NO_THREAD

    # ── questions ─────────────────────────────────────────────────────────────────

    def num_free(self, group: int) -> int:
        """Rows the group could hold if no other group wanted any; cached ones count."""
        slabs, rows = self._of[group]
        return slabs.num_available(rows)

    def num_held(self, group: int) -> int:
        return self._of[group][1].num_held

    def num_cached(self, group: int) -> int:
        return len(self._of[group][1].cached)

    def has_gaps(self, group: int) -> bool:
        """Whether slabs are of several rows, so that free ones can be stranded."""
        return self._of[group][1].per_slab > 1

    def num_stranded(self, group: int) -> int:
        """Free rows in slabs that the group cannot give up, because of held ones in them."""
        slabs, rows = self._of[group]
        busy = (slabs.owner == group) & (slabs.held > 0)
        return rows.spare - int(slabs.cached[busy].sum()) if rows.spare else 0

    def holds(self, group: int, ids: npt.ArrayLike) -> Ints:
        """How many hold each row."""
        rows = self._of[group][1]
        return rows.refs[rows.existing(ids)]

    def kept(self, group: int, ids: npt.ArrayLike) -> Bools:
        """Whether each row's content is to be cached after its last hold."""
        return self._states(group, ids) == KEPT

    def suspect(self, group: int, ids: npt.ArrayLike) -> Bools:
        """Whether each row may lack something, since it was given out: a pull has not filled all
        of it, or it is `unknown`. It cannot be kept."""
        return self._states(group, ids) >= PARTIAL

    def unknown(self, group: int, ids: npt.ArrayLike) -> Bools:
        """Whether each row holds nothing that anybody may use: a pull writes to it, or has failed,
        since it was given out."""
        return self._states(group, ids) >= UNKNOWN

    def quarantined(self, group: int) -> Ints:
        """The rows in quarantine."""
        return np.nonzero(self._of[group][1].state == QUARANTINED)[0]

    def _states(self, group: int, ids: npt.ArrayLike) -> npt.NDArray[np.int8]:
        rows = self._of[group][1]
        return rows.state[rows.existing(ids)]

    def slab_map(self) -> SlabMap:
        """Who owns which slab now, as letters, for pages and status documents."""
        return slab_map(self._slabs)

    def check_room(self, needs: Mapping[int, int]) -> None:
        """Raises `OutOfBlocks` if so many rows of the groups cannot be held at once."""
        for slabs in self._slabs:
            missing = slabs.missing(needs)
            if missing > 0:
                raise _out_of_blocks(slabs, needs, missing)

    # ── holds ─────────────────────────────────────────────────────────────────────

    def hold(self, group: int, count: int) -> Ints:
        """Hold `count` rows for new content, ascending, in few runs; all or none."""
        return self.hold_all((RowDemand(group, count),))[0]

    def hold_all(self, demands: Sequence[RowDemand]) -> list[Ints]:
        """Hold the rows of every demand; all or none."""
        self.check_thread()
        needs: dict[int, int] = {}
        for demand in demands:
            if not 0 <= demand.group < len(self._of):
                raise BlockError(f"group {demand.group} is not one of {len(self._of)}")
            if demand.count < 0:
                raise BlockError(f"group {demand.group}: {demand.count} rows cannot be held")
            needs[demand.group] = needs.get(demand.group, 0) + demand.count
        self.check_room(needs)
        held: list[Ints] = []
        for demand in demands:
            slabs, rows = self._of[demand.group]
            if demand.after is None:
                held.append(hold_rows(slabs, rows, demand.count, demand.kind, needs))
            else:
                held.append(hold_rows_after(slabs, rows, demand.after, demand.kind, needs))
            needs[demand.group] -= demand.count
        return held

    def share(self, group: int, ids: npt.ArrayLike) -> None:
        """Add one hold to each row that is held or cached; what is in it stays."""
        self.check_thread()
        slabs, rows = self._of[group]
        ids, times = _each_once(rows.existing(ids))
        cached = rows.refs[ids] == 0
        rows.check_none(ids, cached & (rows.state[ids] != KEPT), "is neither held nor cached")
        rows.refs[ids] += times
        if np.count_nonzero(cached):
            slabs.hold_cached(rows, ids[cached])

    def release(self, group: int, ids: npt.ArrayLike) -> None:
        """Give back one hold on each row; one named twice gives back two.

        Raises before changing anything if some row has fewer holds than that.
        """
        self.check_thread()
        slabs, rows = self._of[group]
        ids, times = _each_once(rows.existing(ids))
        left = rows.refs[ids] - times
        least = rows.state[ids] == QUARANTINED
        rows.check_none(ids, left < least, "is released more often than it is held")
        rows.refs[ids] = left
        if np.count_nonzero(left):
            ids = ids[left == 0]
        if len(ids):
            slabs.release(rows, ids)

    # ── content ───────────────────────────────────────────────────────────────────

    def keep(self, group: int, ids: npt.ArrayLike) -> None:
        """Cache the content of held rows when their last hold ends.

        Raises if some row is `suspect`: a late writer may have changed it.
        """
        self.check_thread()
        rows = self._of[group][1]
        ids = rows.existing(ids)
        rows.check_none(ids, rows.refs[ids] == 0, "is not held")
        what = "was quarantined, its content is not known and not kept"
        rows.check_none(ids, rows.state[ids] >= PARTIAL, what)
        rows.state[ids] = KEPT

    def forget(self, group: int, ids: npt.ArrayLike) -> None:
        """Do not cache the content of rows; cached ones become free."""
        self.check_thread()
        slabs, rows = self._of[group]
        ids = np.unique(rows.existing(ids))
        ids = ids[rows.state[ids] == KEPT]
        held = rows.refs[ids] > 0
        if not held.all():
            slabs.discard(rows, ids[~held])
        if held.any():
            self._evicted(group, ids[held])
            rows.state[ids[held]] = NEW

    def distrust(self, group: int, ids: npt.ArrayLike) -> None:
        """Forget the content of held rows: it is `unknown` until `trust`, or until they were free.
        For rows that somebody writes to, and may fail."""
        self.check_thread()
        rows = self._of[group][1]
        ids = np.unique(rows.existing(ids))
        rows.check_none(ids, rows.refs[ids] == 0, "is not held")
        self.forget(group, ids)
        rows.state[ids[rows.state[ids] != QUARANTINED]] = UNKNOWN

    def trust(self, group: int, ids: npt.ArrayLike, whole: Bools | None = None) -> None:
        """The rows hold what their request needs; those that are `whole`, all of them if not
        given, lack nothing and may be cached. Not those in quarantine."""
        self.check_thread()
        rows = self._of[group][1]
        ids = rows.existing(ids)
        filled = ids if whole is None else ids[whole]
        state = rows.state[filled]
        rows.state[filled[(state == PARTIAL) | (state == UNKNOWN)]] = NEW
        rows.state[ids[rows.state[ids] == UNKNOWN]] = PARTIAL

    def inherit(self, group: int, source: int, row: int) -> None:
        """A new row gets a copy of `source`: it is `unknown`, or `suspect`, if that is."""
        state = self._of[group][1].state
        if state[source] >= PARTIAL:
            state[row] = min(state[source], UNKNOWN)

    def quarantine(self, group: int, ids: npt.ArrayLike) -> None:
        """Somebody writes to held rows: keep them out of use, whoever releases them, until
        `unquarantine`.

        Their content is forgotten and `unknown`, and their generations move on.
        """
        self.check_thread()
        rows = self._of[group][1]
        ids = np.unique(rows.existing(ids))
        rows.check_none(ids, rows.state[ids] == QUARANTINED, "is in quarantine already")
        self.distrust(group, ids)
        rows.state[ids] = QUARANTINED
        rows.generations[ids] += 1
        rows.refs[ids] += 1

    def unquarantine(self, group: int, ids: npt.ArrayLike, whole: Bools | None = None) -> None:
        """Nobody writes to the rows any more: free, unless somebody still holds them. With `whole`
        all has been written, and they are trusted. Their generations move on."""
        self.check_thread()
        rows = self._of[group][1]
        ids = rows.existing(ids)
        rows.check_none(ids, rows.state[ids] != QUARANTINED, "is not in quarantine")
        rows.state[ids] = UNKNOWN
        if whole is not None:
            self.trust(group, ids, whole)
        ids = np.unique(ids)
        rows.generations[ids] += 1
        self.release(group, ids)

    # ── integrity ─────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Raises with every number that does not add up; changes nothing. Slow, for tests."""
        broken = [line for slabs in self._slabs for line in broken_counts(slabs)]
        if broken:
            raise BlockError("\n".join(broken))


def _each_once(ids: Ints) -> tuple[Ints, int | Ints]:
    """Each row once, in the given order where none is named twice; and how often each is named."""
    if not np.count_nonzero(ids[1:] <= ids[:-1]):
        return ids, 1
    each, times = np.unique(ids, return_counts=True)
    return (ids, 1) if len(each) == len(ids) else (each, times)


def _out_of_blocks(slabs: Slabs, needs: Mapping[int, int], missing: int) -> OutOfBlocks:
    """What is needed and what is free, in every group that needs some."""
    available = {rows.group: slabs.num_available(rows) for rows in slabs.groups}
    groups = [rows for rows in slabs.groups if needs.get(rows.group)]
    lines = [
        f"{rows.name!r}: {needs[rows.group]} needed, {available[rows.group]} free"
        for rows in groups
    ]
    together = f"; {missing} slabs too few for all of them together" if len(groups) > 1 else ""
    return OutOfBlocks(
        f"rows of group {'; of group '.join(lines)}{together}\n\n"
        "hint: release a request, or plan a larger budget",
        needed=sum(needs[rows.group] for rows in groups),
        free=sum(min(needs[rows.group], available[rows.group]) for rows in groups),
    )
