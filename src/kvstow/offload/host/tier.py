"""The host tier: an arena of the same rows in host memory, pinned when CUDA is there.

A row is *reserved* while it is filled, then *kept*; one that is *held* is being read. Reserved
and held rows are never given up; of the others, those used longest ago go first. Which rows are
free, held and kept, and how slabs pass between groups, is the business of a pool of blocks.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import repeat
from threading import RLock

import numpy as np
import torch

from kvstow.blocks.pool import Pool
from kvstow.errors import StoreError
from kvstow.memory.arena import Arena
from kvstow.offload.disk.format import ChainLink
from kvstow.offload.rows import pooled, views
from kvstow.offload.tier import (
    Bools,
    Bytes,
    Counts,
    Tallies,
    Usage,
    checked_keys,
    checked_rows,
    first_positions,
    log,
    select,
)
from kvstow.plan.layout import Layout
from kvstow.plan.view import Ints, parse_size


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
        numa_node: int | None = None,
        on_change: Callable[[int, Sequence[bytes]], None] | None = None,
    ) -> None:
        most = parse_size(capacity) if isinstance(capacity, str) else capacity
        self.layout = pooled(layout, most)
        pinned = torch.cuda.is_available()
        self.arena = Arena(self.layout, pinned=pinned, huge_pages=True, numa_node=numa_node)
        self._pool = Pool(self.layout)
        self._pool.on_evict.append(self._forget)
        groups = range(len(self.layout.groups))
        self._ids: tuple[dict[bytes, int], ...] = tuple({} for _ in groups)
        self._keys: tuple[dict[int, bytes], ...] = tuple({} for _ in groups)
        self._lock = RLock()
        self._tallies = Tallies()
        self._on_change = on_change

    def close(self) -> None:
        """Let go of the memory."""
        self.arena.close()

    # ── questions ─────────────────────────────────────────────────────────────────

    @property
    def counts(self) -> Counts:
        return Counts(**self._tallies.now)

    @property
    def usage(self) -> Usage:
        with self._lock:
            rows = [len(ids) for ids in self._ids]
        nbytes = sum(n * self.layout.row_bytes(g) for g, n in enumerate(rows))
        return Usage(rows=sum(rows), nbytes=nbytes, capacity=self.layout.nbytes)

    def contains(self, group: int, keys: Sequence[bytes]) -> Bools:
        return self.ids(group, keys) >= 0

    def keys(self, group: int) -> list[bytes]:
        """The keys of all rows of a group."""
        with self._lock:
            return list(self._ids[group])

    def views(self, group: int, ids: Ints) -> list[Bytes]:
        """The bytes of rows, in place."""
        return views(self.arena.bytes.numpy(), self.layout, group, ids)

    # ── filling ───────────────────────────────────────────────────────────────────

    @contextmanager
    def _changing(self) -> Generator[Pool]:
        """The pool, which belongs to whoever has the lock."""
        with self._lock:
            try:
                yield self._pool
            finally:
                self._pool.hand_over()

    def reserve(self, group: int, keys: Sequence[bytes]) -> Reservation:
        """Rows for those keys that are not here yet, each once; others are given up for them.

        Fewer rows where everything else is in use. End it by `keep` or `abandon`.
        """
        checked_keys(self.layout, group, keys)
        with self._changing() as pool:
            present = self._ids[group]
            new = [key for key in dict.fromkeys(keys) if key not in present]
            ids = pool.hold(group, min(len(new), pool.num_free(group)))
            return Reservation(group, tuple(new[: len(ids)]), ids)

    def keep(self, reservation: Reservation, filled: Bools | None = None) -> None:
        """The rows hold what their keys say; those not `filled` are given back."""
        group, ids = reservation.group, self._ids[reservation.group]
        with self._changing() as pool:
            good = np.array([key not in ids for key in reservation.keys], bool)
            if filled is not None:
                good &= filled
            keys, rows = select(reservation.keys, good), reservation.ids[good]
            ids.update(zip(keys, rows.tolist(), strict=True))
            self._keys[group].update(zip(rows.tolist(), keys, strict=True))
            pool.keep(group, rows)
            pool.release(group, reservation.ids)
            self._tell(group, keys)
        self._tallies.add_rows("stored", len(keys), self.layout.row_bytes(group))

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
        first = first_positions(keys)
        try:
            for key, view in zip(reservation.keys, self.views(group, reservation.ids), strict=True):
                view[:] = rows[first[key]]
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
        with self._changing() as pool:
            pool.share(group, ids)

    def unpin(self, group: int, ids: Ints) -> None:
        """Undo one `pin`."""
        with self._changing() as pool:
            pool.release(group, ids)

    def load(self, group: int, keys: Sequence[bytes], rows: Sequence[Bytes]) -> Bools:
        checked_rows(self.layout, group, keys, rows)
        with self.held(group, keys) as (mask, ids):
            for row, view in zip(select(rows, mask), self.views(group, ids), strict=True):
                row[:] = view
        self.count_load(group, len(keys), len(ids))
        return mask

    def count_load(self, group: int, num_keys: int, num_rows: int) -> None:
        """Enter a load into the counts."""
        self._tallies.add_load(num_keys, num_rows, self.layout.row_bytes(group))

    # ── giving up ─────────────────────────────────────────────────────────────────

    def evict(self, group: int, keys: Sequence[bytes]) -> int:
        """Forget rows that nobody reads; how many."""
        with self._changing() as pool:
            rows = np.unique(self.ids(group, keys))
            rows = rows[rows >= 0]
            rows = rows[pool.holds(group, rows) == 0]
            pool.forget(group, rows)
            return len(rows)

    def discard(self, group: int, keys: Sequence[bytes]) -> None:
        """Forget rows that are not what was stored, and count them as failures."""
        self.evict(group, keys)
        self._tallies.add("failures", len(keys))

    def _forget(self, group: int, rows: Ints) -> None:
        """The pool gives rows up."""
        gone = list(map(self._keys[group].pop, rows.tolist()))
        for key in gone:
            del self._ids[group][key]
        self._tell(group, gone)
        self._tallies.add("evicted_rows", len(gone))

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
            self._pool.check()
            for group, ids in enumerate(self._ids):
                rows = np.array(sorted(ids.values()), np.int64)
                kept = int(self._pool.kept(group, rows).sum())
                cached = self._pool.num_cached(group)
                if not cached <= len(ids) == kept == len(self._keys[group]):
                    raise StoreError(
                        f"group {group}: {len(ids)} keys, {kept} rows kept, {cached} cached"
                    )
