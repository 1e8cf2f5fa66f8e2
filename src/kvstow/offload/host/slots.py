"""Rows of a host tier: which are free, whose slab is whose, when each was last used.

Taking and giving back costs by the row, not by the size of the tier: every group knows its slabs
that have free rows, and slabs of nobody lie on a stack, lowest on top.
"""

import numpy as np

from kvstow.plan.layout import NULL_SLABS, Layout
from kvstow.plan.view import Ints, ceil_div

NOBODY = -1


class Slots:
    """Rows of every group in slabs that pass between groups; all in arrays."""

    def __init__(self, layout: Layout) -> None:
        self._rows_per_slab = [rows.rows_per_slab for rows in layout.groups]
        self._owner = np.full(layout.num_slabs, NOBODY, np.int64)
        self._owner[:NULL_SLABS] = len(layout.groups)  # no group
        self._busy = np.zeros(layout.num_slabs, np.int64)
        """Rows in use, by slab."""
        self._idle = np.arange(layout.num_slabs - 1, NULL_SLABS - 1, -1)
        self._num_idle = len(self._idle)
        self._partial: tuple[dict[int, None], ...] = tuple({} for _ in layout.groups)
        """Slabs of a group that have both used and free rows."""
        self._num_slabs = [0] * len(layout.groups)
        sizes = [layout.num_blocks(g) for g in range(len(layout.groups))]
        self.used = tuple(np.zeros(n, bool) for n in sizes)
        self.pins = tuple(np.zeros(n, np.int32) for n in sizes)
        self._last_use = tuple(np.zeros(n, np.int64) for n in sizes)
        self._clock = 0

    def num_rows(self, group: int) -> int:
        """Rows that the group's slabs have room for."""
        return self._num_slabs[group] * self._rows_per_slab[group]

    def take_free(self, group: int, count: int) -> Ints:
        """At most `count` rows: of the group's slabs, ascending, then of slabs of nobody."""
        rows = self._free_in(group, self._partly_free(group, count))[:count]
        if len(rows) < count:
            slabs = self._claimed(group, ceil_div(count - len(rows), self._rows_per_slab[group]))
            rows = np.append(rows, self._free_in(group, slabs)[: count - len(rows)])
        self._use(group, rows)
        return rows

    def give_back(self, group: int, rows: Ints) -> None:
        """Rows, each named once, are free; a slab without rows in use is nobody's."""
        if not len(rows):
            return
        self.used[group][rows] = False
        size = self._rows_per_slab[group]
        slabs, counts = (rows, 1) if size == 1 else np.unique(rows // size, return_counts=True)
        self._busy[slabs] -= counts
        empty = slabs[self._busy[slabs] == 0]
        self._owner[empty] = NOBODY
        self._num_slabs[group] -= len(empty)
        self._idle[self._num_idle : self._num_idle + len(empty)] = np.sort(empty)[::-1]
        self._num_idle += len(empty)
        if size > 1:
            self._note_partial(group, slabs)

    def touch(self, group: int, rows: Ints) -> None:
        self._last_use[group][rows] = np.arange(self._clock + 1, self._clock + 1 + len(rows))
        self._clock += len(rows)

    def coldest_slab(self, but: int, *, older_than_own: bool) -> tuple[int, Ints]:
        """Of all other groups' slabs without pinned rows the one that was not used for
        longest: its group and its rows; no rows where there is none.

        With `older_than_own`, only if that is before any use of the group's own rows.
        """
        nothing = but, np.empty(0, np.int64)
        others = [g for g, n in enumerate(self._num_slabs) if g != but and n]
        if not others:
            return nothing
        limit = self._oldest(but) if older_than_own else self._clock + 1
        best: tuple[int, int, int] = (limit, but, 0)
        for group in others:
            size = self._rows_per_slab[group]
            slabs = np.flatnonzero(self._owner == group)
            newest = self._last_use[group].reshape(-1, size)[slabs].max(axis=1)
            pinned = self.pins[group].reshape(-1, size)[slabs].any(axis=1)
            newest[pinned] = self._clock + 2
            at = int(newest.argmin())
            if newest[at] < best[0]:
                best = int(newest[at]), group, int(slabs[at])
        _, group, slab = best
        if group == but:
            return nothing
        rows = _rows_of(np.array([slab]), self._rows_per_slab[group])
        return group, rows[self.used[group][rows]]

    def _oldest(self, group: int) -> int:
        used = self.used[group]
        return int(self._last_use[group][used].min()) if used.any() else 0

    def _partly_free(self, group: int, count: int) -> Ints:
        """Slabs of the group that have, together, about `count` free rows."""
        found: list[int] = []
        for slab in self._partial[group]:
            if count <= 0:
                break
            found.append(slab)
            count -= self._rows_per_slab[group] - int(self._busy[slab])
        return np.array(sorted(found), np.int64)

    def _claimed(self, group: int, count: int) -> Ints:
        """At most so many slabs of nobody, the group's from now on, ascending."""
        first = max(0, self._num_idle - count)
        slabs = np.sort(self._idle[first : self._num_idle])
        self._num_idle = first
        self._owner[slabs] = group
        self._num_slabs[group] += len(slabs)
        return slabs

    def _free_in(self, group: int, slabs: Ints) -> Ints:
        rows = _rows_of(slabs, self._rows_per_slab[group])
        return rows[~self.used[group][rows]]

    def _use(self, group: int, rows: Ints) -> None:
        self.used[group][rows] = True
        size = self._rows_per_slab[group]
        if size == 1:
            self._busy[rows] = 1
            return
        slabs, counts = np.unique(rows // size, return_counts=True)
        self._busy[slabs] += counts
        self._note_partial(group, slabs)

    def _note_partial(self, group: int, slabs: Ints) -> None:
        partial, size = self._partial[group], self._rows_per_slab[group]
        for slab, busy in zip(slabs.tolist(), self._busy[slabs].tolist(), strict=True):
            if 0 < busy < size:
                partial[slab] = None
            else:
                partial.pop(slab, None)


def _rows_of(slabs: Ints, size: int) -> Ints:
    return slabs if size == 1 else (slabs[:, None] * size + np.arange(size)).ravel()
