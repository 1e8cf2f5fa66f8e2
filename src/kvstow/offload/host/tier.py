"""The host tier: an arena of the same rows in host memory, pinned when CUDA is there.

A row is *reserved* while it is filled, then *kept*; one that is *held* is being read. Reserved
and held rows are never given up.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import repeat
from threading import RLock

import numpy as np
import numpy.typing as npt
import torch

from kvstow.errors import StoreError
from kvstow.memory.arena import Arena
from kvstow.offload.disk.format import ChainLink
from kvstow.offload.host.eviction import Policy, PolicyName, mark
from kvstow.offload.host.eviction import policy as policy_of
from kvstow.offload.rows import pooled
from kvstow.offload.tier import (
    Bools,
    Bytes,
    Counter,
    Counts,
    Usage,
    checked_keys,
    checked_rows,
    chosen,
    loaded,
    log,
)
from kvstow.plan.layout import NULL_SLABS, Layout
from kvstow.plan.view import Ints, ceil_div, parse_size

NOBODY = -1


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Rows to be filled: key `keys[i]` gets row `ids[i]` of the tier's arena."""

    group: int
    keys: tuple[bytes, ...]
    ids: Ints


class HostTier:
    """Rows of one layout in one host arena of at most `capacity` bytes.

    `on_change` is called with a group and keys whose rows have come or gone, in whichever thread
    that happens, while the tier is locked. What it raises is logged.
    """

    name = "host"

    def __init__(
        self,
        layout: Layout,
        *,
        capacity: int | str,
        policy: PolicyName = "lru",
        numa_node: int | None = None,
        on_change: Callable[[int, Sequence[bytes]], None] | None = None,
    ) -> None:
        most = parse_size(capacity) if isinstance(capacity, str) else capacity
        self.layout = pooled(layout, most)
        pinned = torch.cuda.is_available()
        self.arena = Arena(self.layout, pinned=pinned, huge_pages=True, numa_node=numa_node)
        self._slots = Slots(self.layout)
        groups = range(len(self.layout.groups))
        self._policies: tuple[Policy, ...] = tuple(
            policy_of(policy, self.layout.num_blocks(g)) for g in groups
        )
        self._ids: tuple[dict[bytes, int], ...] = tuple({} for _ in groups)
        self._keys: tuple[dict[int, bytes], ...] = tuple({} for _ in groups)
        self._lock = RLock()
        self._counter = Counter()
        self._on_change = on_change

    def close(self) -> None:
        """Let go of the memory."""
        self.arena.close()

    # ── questions ─────────────────────────────────────────────────────────────────

    @property
    def counts(self) -> Counts:
        return self._counter.now

    @property
    def usage(self) -> Usage:
        with self._lock:
            rows = [len(ids) for ids in self._ids]
        nbytes = sum(n * self.layout.row_bytes(g) for g, n in enumerate(rows))
        return Usage(rows=sum(rows), nbytes=nbytes, capacity=self.layout.nbytes)

    def contains(self, group: int, keys: Sequence[bytes]) -> Bools:
        checked_keys(self.layout, group, keys)
        ids = self._ids[group]
        with self._lock:
            return np.fromiter(map(ids.__contains__, keys), bool, len(keys))

    def keys(self, group: int) -> list[bytes]:
        """The keys of all rows of a group."""
        with self._lock:
            return list(self._ids[group])

    def views(self, group: int, ids: Ints) -> list[Bytes]:
        """The bytes of rows, in place."""
        memory: npt.NDArray[np.uint8] = self.arena.bytes.numpy()
        strip = self.layout.footprints[group].strips[0]
        starts = (strip.offset + ids * strip.stride).tolist()
        return [memory[start : start + strip.nbytes] for start in starts]

    # ── filling ───────────────────────────────────────────────────────────────────

    def reserve(self, group: int, keys: Sequence[bytes]) -> Reservation:
        """Rows for those keys that are not here yet, each once; others are given up for them.

        Fewer rows where everything else is in use. End it by `keep` or `abandon`.
        """
        checked_keys(self.layout, group, keys)
        with self._lock:
            known = self._ids[group]
            new = [key for key in dict.fromkeys(keys) if key not in known]
            ids = self._room(group, new)
            self._slots.pins[group][ids] += 1
            return Reservation(group, tuple(new[: len(ids)]), ids)

    def keep(self, reservation: Reservation, filled: Bools | None = None) -> None:
        """The rows hold what their keys say; those not `filled` are given back."""
        group, ids = reservation.group, self._ids[reservation.group]
        with self._lock:
            self._slots.pins[group][reservation.ids] -= 1
            good = np.array([key not in ids for key in reservation.keys], bool)
            if filled is not None:
                good &= filled
            keys, rows = chosen(reservation.keys, good), reservation.ids[good]
            ids.update(zip(keys, rows.tolist(), strict=True))
            self._keys[group].update(zip(rows.tolist(), keys, strict=True))
            self._policies[group].size = max(1, self._slots.num_rows(group))
            self._policies[group].insert(rows, map(mark, keys))
            self._slots.touch(group, rows)
            self._tell(group, keys)
            self._slots.give_back(group, reservation.ids[~good])
        nbytes = len(keys) * self.layout.row_bytes(group)
        self._counter.add(Counts(stored_rows=len(keys), stored_bytes=nbytes))

    def abandon(self, reservation: Reservation) -> None:
        """The rows were not filled."""
        self.keep(reservation, np.zeros(len(reservation.ids), bool))

    def store(
        self,
        group: int,
        keys: Sequence[bytes],
        rows: Sequence[Bytes],
        links: Sequence[ChainLink] = (),
    ) -> Bools:
        checked_rows(self.layout, group, keys, rows)
        reservation = self.reserve(group, keys)
        where = {key: i for i, key in reversed(list(enumerate(keys)))}
        try:
            for key, view in zip(reservation.keys, self.views(group, reservation.ids), strict=True):
                view[:] = rows[where[key]]
        except BaseException:
            self.abandon(reservation)
            raise
        self.keep(reservation)
        return self.contains(group, keys)

    # ── reading ───────────────────────────────────────────────────────────────────

    @contextmanager
    def held(self, group: int, keys: Sequence[bytes]) -> Generator[tuple[Bools, Ints]]:
        """Which keys are here, and their rows, which stay as they are until the end."""
        with self._lock:
            rows = self.ids(group, keys)
            mask = rows >= 0
            ids = rows[mask]
            self.pin(group, ids)
        try:
            yield mask, ids
        finally:
            self.unpin(group, ids)

    def still(self) -> AbstractContextManager[object]:
        """The tier's lock: while it is held, no row comes, moves or goes."""
        return self._lock

    def ids(self, group: int, keys: Sequence[bytes]) -> Ints:
        """The row of each key, −1 where there is none. It may be gone at once: see `still`."""
        checked_keys(self.layout, group, keys)
        with self._lock:
            return np.fromiter(map(self._ids[group].get, keys, repeat(-1)), np.int64, len(keys))

    def pin(self, group: int, ids: Ints) -> None:
        """Keep rows from being given up; `unpin` ends it."""
        with self._lock:
            np.add.at(self._slots.pins[group], ids, 1)
            self._policies[group].touch(ids)
            self._slots.touch(group, ids)

    def unpin(self, group: int, ids: Ints) -> None:
        """Undo one `pin`."""
        with self._lock:
            np.subtract.at(self._slots.pins[group], ids, 1)

    def load(self, group: int, keys: Sequence[bytes], rows: Sequence[Bytes]) -> Bools:
        checked_rows(self.layout, group, keys, rows)
        with self.held(group, keys) as (mask, ids):
            wanted = np.flatnonzero(mask).tolist()
            for i, view in zip(wanted, self.views(group, ids), strict=True):
                rows[i][:] = view
        self.count_load(group, len(keys), len(wanted))
        return mask

    def count_load(self, group: int, num_asked: int, num_rows: int) -> None:
        """Enter a load into the counts."""
        self._counter.add(loaded(num_asked, num_rows, self.layout.row_bytes(group)))

    def discard(self, group: int, keys: Sequence[bytes]) -> None:
        """Forget rows that are not what was stored, and count them as failures."""
        self.evict(group, keys)
        self._counter.add(Counts(failures=len(keys)))

    # ── giving up ─────────────────────────────────────────────────────────────────

    def evict(self, group: int, keys: Sequence[bytes]) -> int:
        """Forget rows that nobody reads; how many."""
        checked_keys(self.layout, group, keys)
        with self._lock:
            found = {self._ids[group][key] for key in keys if key in self._ids[group]}
            rows = np.array(sorted(found), np.int64)
            rows = rows[self._slots.pins[group][rows] == 0]
            self._policies[group].remove(rows)
            self._forget(group, rows)
            return len(rows)

    def _room(self, group: int, keys: Sequence[bytes]) -> Ints:
        """Rows for new keys: free ones; slabs of other groups that are older than all our rows; our
        own victims; then any slab of another group."""
        found = self._slots.take_free(group, len(keys))
        while len(found) < len(keys) and self._take_over(group, older_than_own=True):
            found = np.append(found, self._slots.take_free(group, len(keys) - len(found)))
        if len(found) < len(keys):
            lacking = len(keys) - len(found)
            victims = self._policies[group].victims(lacking, self._slots.pins[group] > 0)
            self._forget(group, victims)
            found = np.append(found, self._slots.take_free(group, len(victims)))
        while len(found) < len(keys) and self._take_over(group, older_than_own=False):
            found = np.append(found, self._slots.take_free(group, len(keys) - len(found)))
        return found

    def _take_over(self, group: int, *, older_than_own: bool) -> bool:
        other, rows = self._slots.coldest_slab(group, older_than_own=older_than_own)
        if not len(rows):
            return False
        self._policies[other].remove(rows)
        self._forget(other, rows)
        return True

    def _forget(self, group: int, rows: Ints) -> None:
        ids = self._ids[group]
        gone = list(map(self._keys[group].pop, rows.tolist()))
        for key in gone:
            del ids[key]
        self._slots.give_back(group, rows)
        self._tell(group, gone)
        self._counter.add(Counts(evicted_rows=len(rows)))

    def _tell(self, group: int, keys: Sequence[bytes]) -> None:
        """Rows of these keys have come or gone."""
        if self._on_change is None or not keys:
            return
        try:
            self._on_change(group, keys)
        except Exception:
            log.exception("host tier: on_change missed %d rows", len(keys))

    def check(self) -> None:
        """Raises with the numbers that do not add up; changes nothing."""
        with self._lock:
            for group, ids in enumerate(self._ids):
                pinned = int(np.count_nonzero(self._slots.pins[group]))
                used = int(np.count_nonzero(self._slots.used[group]))
                known = len(self._policies[group])
                if not len(ids) == known <= used <= known + pinned:
                    raise StoreError(
                        f"group {group}: {len(ids)} keys, {known} rows in the policy, "
                        f"{used} rows in use, {pinned} pinned"
                    )


# ── which rows are free ───────────────────────────────────────────────────────────────


class Slots:
    """Rows of every group in slabs that pass between groups: which are free, whose slab is whose,
    when each was last used; all in arrays.

    Taking and giving back costs by the row, not by the size of the tier: every group knows its
    slabs that have free rows, and slabs of nobody lie on a stack, lowest on top.
    """

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
