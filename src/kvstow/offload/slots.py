"""Rows of a host tier: which are free, whose slab is whose, when each was last used."""

import numpy as np

from kvstow.offload.policies import Bools, Ints
from kvstow.plan.layout import NULL_SLABS, Layout

NOBODY = -1


class Slots:
    """Rows of every group in slabs that pass between groups; all in arrays."""

    def __init__(self, layout: Layout) -> None:
        self._rows_per_slab = [rows.rows_per_slab for rows in layout.groups]
        self._owner = np.full(layout.num_slabs, NOBODY, np.int64)
        self._owner[:NULL_SLABS] = len(layout.groups)  # no group
        sizes = [layout.num_blocks(g) for g in range(len(layout.groups))]
        self.used = tuple(np.zeros(n, bool) for n in sizes)
        self.pins = tuple(np.zeros(n, np.int32) for n in sizes)
        self._last_use = tuple(np.zeros(n, np.int64) for n in sizes)
        self._clock = 0

    def num_rows(self, group: int) -> int:
        """Rows that the group's slabs have room for."""
        return int(np.count_nonzero(self._owner == group)) * self._rows_per_slab[group]

    def take_free(self, group: int, count: int) -> Ints:
        """At most `count` rows, ascending: of the group's slabs, then of slabs of nobody."""
        found = self._free_rows(group)
        lacking = count - len(found)
        if lacking > 0:
            slabs = np.flatnonzero(self._owner == NOBODY)
            slabs = slabs[: -(-lacking // self._rows_per_slab[group])]
            self._owner[slabs] = group
            found = self._free_rows(group)
        rows = found[:count]
        self.used[group][rows] = True
        return rows

    def give_back(self, group: int, rows: Ints) -> None:
        """Rows are free; a slab without rows in use is nobody's."""
        self.used[group][rows] = False
        slabs = np.unique(rows // self._rows_per_slab[group])
        busy = self.used[group].reshape(-1, self._rows_per_slab[group])[slabs].any(axis=1)
        self._owner[slabs[~busy]] = NOBODY

    def touch(self, group: int, rows: Ints) -> None:
        self._last_use[group][rows] = np.arange(self._clock + 1, self._clock + 1 + len(rows))
        self._clock += len(rows)

    def coldest_slab(self, but: int, *, older_than_own: bool) -> tuple[int, Ints]:
        """Of all other groups' slabs without pinned rows the one that was not used for
        longest: its group and its rows; no rows where there is none.

        With `older_than_own`, only if that is before any use of the group's own rows.
        """
        limit = self._oldest(but) if older_than_own else self._clock + 1
        best: tuple[int, int, int] = (limit, but, 0)
        for group, size in enumerate(self._rows_per_slab):
            slabs = np.flatnonzero(self._owner == group)
            if group == but or not len(slabs):
                continue
            newest = self._last_use[group].reshape(-1, size)[slabs].max(axis=1)
            pinned = self.pins[group].reshape(-1, size)[slabs].any(axis=1)
            newest[pinned] = self._clock + 2
            at = int(newest.argmin())
            if newest[at] < best[0]:
                best = int(newest[at]), group, int(slabs[at])
        _, group, slab = best
        if group == but:
            return but, np.empty(0, np.int64)
        rows = np.arange(slab, slab + 1)[:, None] * self._rows_per_slab[group]
        rows = (rows + np.arange(self._rows_per_slab[group])).ravel()
        return group, rows[self.used[group][rows]]

    def _oldest(self, group: int) -> int:
        used: Bools = self.used[group]
        return int(self._last_use[group][used].min()) if used.any() else 0

    def _free_rows(self, group: int) -> Ints:
        size = self._rows_per_slab[group]
        owned = np.repeat(self._owner == group, size)
        return np.flatnonzero(owned & ~self.used[group])
