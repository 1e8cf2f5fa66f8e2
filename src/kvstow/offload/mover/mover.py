"""Rows between the arena, the host tier and the tier below, in the background.

    store    arena → host, then, if the row is worth it, host → disk
    load     disk → host → arena; what the host has comes from there
    prefetch disk → host

A job's blocks are held (where a pool is given) from submission until `reap`, so none of them is
handed out for writing while bytes move. A job that fails names its blocks; nothing else stops.

Inward and outward have workers, a queue and a stream each. A worker submits a part's copy, waits
for it and enters the result; meanwhile the direction's other workers submit the parts behind it:

    copies     ├── part 0 ──┼── part 1 ──┼── part 2 ──┼── part 3 ─
    worker 0   submit ····· enter, submit ············ enter, …
    worker 1     submit ················ enter, submit ····
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock, Thread
from time import monotonic
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstow.errors import StoreError
from kvstow.memory.arena import Arena
from kvstow.memory.copy import copy
from kvstow.offload.disk.format import ChainLink
from kvstow.offload.eviction.admission import SecondTouch
from kvstow.offload.eviction.policies import mark
from kvstow.offload.host.tier import HostTier
from kvstow.offload.mover.checks import PendingSums, RowChecks, Sums
from kvstow.offload.mover.direct import DirectCopies
from kvstow.offload.mover.jobs import JobKind, JobPart, JobQueue, MoverJob
from kvstow.offload.mover.promote import Promoter
from kvstow.offload.mover.streams import StreamOrder
from kvstow.offload.rows import RowMapping, check_same_rows, matching_group
from kvstow.offload.tier import Bools, Tier, check_process, chosen, stored_in
from kvstow.plan.view import Ints
from kvstow.route.copies import Copies

log = logging.getLogger("kvstow.offload")


class Holds(Protocol):
    """What the mover asks of a block pool."""

    def share(self, group: int, ids: npt.ArrayLike) -> None: ...
    def release(self, group: int, ids: npt.ArrayLike) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much may be under way at a time in each direction.

    `workers` parts of about `part_bytes` are on their way, at least half of them loads or
    stores where there are any; `max_parts` and `max_bytes` of each kind of job may wait. Without
    workers nothing moves but by `Mover.step`.
    """

    workers: int = 2
    max_bytes: int = 4 << 30
    max_parts: int = 4096
    part_bytes: int = 128 << 20


USUAL = Limits()


class Mover:
    """Moves rows of one arena through a host tier and, if there is one, a tier below it.

    Call `store`, `load`, `prefetch` and `reap` from the thread that owns the pool. With `checked`,
    rows that come back from the host tier, or go on below it, are compared with what left
    (`checks`); those that differ are forgotten, and fetched from the tier below where that has
    them.
    """

    def __init__(
        self,
        arena: Arena,
        host: HostTier,
        below: Tier | None = None,
        *,
        pool: Holds | None = None,
        admission: SecondTouch | None = None,
        limits: Limits = USUAL,
        checked: bool = False,
    ) -> None:
        self._arena, self._host, self._below = arena, host, below
        self._pool = pool
        self._admission = admission
        self._limits = limits
        groups = range(len(arena.layout.groups))
        self._host_group = [matching_group(arena.layout, g, host.layout) for g in groups]
        self._mappings = [
            RowMapping(arena.layout, g, host.layout, h)
            for g, h in zip(groups, self._host_group, strict=True)
        ]
        if below is not None:
            _check_identity(host, below)
            check_same_rows(host.layout, below.name, below.layout)
        self._order = StreamOrder(arena.device)
        self._checks = RowChecks(arena, host) if checked else None
        self._promoter: Promoter | None = None
        if below is not None:
            self._promoter = Promoter(arena, host, below, self._order, self._checks)
        self._direct = self._direct_copies(self._checks) if self._checks is not None else None
        self._queues = {kind.inward: _queue(kind, limits) for kind in (JobKind.LOAD, JobKind.STORE)}
        self._runs = {
            JobKind.LOAD: self._load,
            JobKind.PREFETCH: self._prefetch,
            JobKind.STORE: self._store,
            JobKind.DEMOTE: self._demote,
        }
        self._opener = os.getpid()
        self._lock = Lock()
        self._finished: list[MoverJob] = []
        self.dropped_rows = 0
        """Rows that went no further than the host tier, because too many waited already."""
        self._threads = self._workers(limits.workers)
        for thread in self._threads:
            thread.start()

    def _direct_copies(self, checks: RowChecks) -> DirectCopies:
        return DirectCopies(
            self._arena,
            self._host,
            host_group=self._host_group,
            mappings=self._mappings,
            order=self._order,
            checks=checks,
            on_stored=self._begin_demotion,
        )

    def _workers(self, each_way: int) -> list[Thread]:
        """Threads that bring rows in, and as many that bring rows out."""
        return [
            Thread(target=self._work, args=(queue,), name=f"kvstow-mover-{name}-{i}", daemon=True)
            for queue, name in ((self._queues[True], "in"), (self._queues[False], "out"))
            for i in range(each_way)
        ]

    @property
    def direct(self) -> DirectCopies:
        """Copies without a queue, for the thread that owns this mover. Only a checked one has
        them."""
        if self._direct is None:
            raise StoreError("no direct copies\n\nhint: Mover(..., checked=True)")
        return self._direct

    # ── commands ──────────────────────────────────────────────────────────────────

    def store(
        self,
        group: int,
        ids: npt.ArrayLike,
        keys: Sequence[bytes],
        links: Sequence[ChainLink] = (),
    ) -> MoverJob:
        """Bring blocks to the host tier, after what the current stream has been given.

        Nobody may write to the blocks until the job is over. `links`, one per key or none, say
        where they stand in their sequences, for a disk below (`kvstow store convert`).
        """
        return self._submit(JobKind.STORE, group, ids, keys, links)

    def load(
        self,
        group: int,
        keys: Sequence[bytes],
        ids: npt.ArrayLike,
        *,
        after_stream: bool = True,
    ) -> MoverJob:
        """Bring rows from wherever they are to blocks; `result()` says which arrived.

        The copies start after what the current stream has been given. With `after_stream=False`
        they do not wait for it, so none of that work may use the blocks.
        """
        return self._submit(JobKind.LOAD, group, ids, keys, after_stream=after_stream)

    def prefetch(self, group: int, keys: Sequence[bytes]) -> MoverJob:
        """Bring rows from below to the host tier, as far as there is room."""
        job = MoverJob(JobKind.PREFETCH, group, keys, np.empty(0, np.int64))
        self._enqueue(job)
        return job

    def reap(self) -> tuple[MoverJob, ...]:
        """Jobs that ended since the last time; the holds on their blocks end here."""
        with self._lock:
            finished, self._finished = self._finished, []
        for job in finished:
            if self._pool is not None and len(job.ids):
                self._pool.release(job.group, job.ids)
        return tuple(finished)

    def step(self) -> bool:
        """Run the next part in this thread, loads first; whether there was one."""
        for inward in (True, False):
            part = self._queues[inward].take(wait=False)
            if part is not None:
                self._run(self._queues[inward], part)
                return True
        return False

    def drain(self, timeout: float | None = None) -> bool:
        """Whether everything is over, demotion included, within so many seconds."""
        while not self._threads and self.step():
            pass
        end = None if timeout is None else monotonic() + timeout
        return all(
            queue.wait_empty(None if end is None else max(0.0, end - monotonic()))
            for queue in self._queues.values()
        )

    def close(self) -> None:
        """Give up what has not begun, wait for what has."""
        if self._direct is not None:
            self._direct.wait()
        for queue in self._queues.values():
            for part in queue.close():
                part.job.cancel()
                self._end(part, ran=False, error=None)
        for thread in self._threads:
            thread.join()
        self.reap()

    def _submit(
        self,
        kind: JobKind,
        group: int,
        ids: npt.ArrayLike,
        keys: Sequence[bytes],
        links: Sequence[ChainLink] = (),
        *,
        after_stream: bool = True,
    ) -> MoverJob:
        blocks = self._arena.checked(group, ids)
        if len(blocks) != len(keys):
            raise StoreError(f"{len(keys)} keys for {len(blocks)} blocks")
        if links and len(links) != len(keys):
            raise StoreError(f"{len(links)} links for {len(keys)} keys")
        job = MoverJob(kind, group, keys, blocks, links)
        if after_stream:
            self._order.record(job)
        if self._pool is not None and len(blocks):
            self._pool.share(group, blocks)
        try:
            self._enqueue(job)
        except BaseException:
            if self._pool is not None and len(blocks):
                self._pool.release(group, blocks)
            raise
        return job

    def _enqueue(self, job: MoverJob) -> None:
        check_process(self._opener, "the mover")  # a fork has none of its threads
        row_bytes = self._host.layout.row_bytes(self._host_group[job.group])
        rows_per_part = max(1, self._limits.part_bytes // row_bytes)
        self._queues[job.kind.inward].put(job, row_bytes, rows_per_part)
        if not job.keys:  # no part will end it
            self._finish(job)

    # ── workers ───────────────────────────────────────────────────────────────────

    def _work(self, queue: JobQueue) -> None:
        while (part := queue.take()) is not None:
            self._run(queue, part)

    def _run(self, queue: JobQueue, part: JobPart) -> None:
        ran = part.job.begun()
        error: StoreError | None = None
        if ran:
            try:
                self._runs[part.job.kind](part.job, part.positions)
            except Exception as cause:
                error = _named(part, cause)
                log.warning("%s", error)
        self._end(part, ran=ran, error=error)
        if ran and error is None and part.job.kind is JobKind.STORE:
            self._begin_demotion(part.job, part.positions)
        queue.done(part)

    def _end(self, part: JobPart, *, ran: bool, error: StoreError | None) -> None:
        if part.job.ended(ran=ran, error=error):
            self._finish(part.job)

    def _finish(self, job: MoverJob) -> None:
        if job.kind != JobKind.DEMOTE:
            with self._lock:
                self._finished.append(job)

    def _copied(self, job: MoverJob, moves: Copies, rows: Ints) -> Sums | None:
        """Copy after the job's fence; wait until all bytes have arrived. The rows' sums."""
        outward = not job.kind.inward
        ends = (self._arena, self._host.arena) if outward else (self._host.arena, self._arena)
        here, there = moves.source, moves.destination
        if not outward:
            here, there = there, here
        sums: PendingSums | None = None
        with self._order.after(job) as stream:
            under_way = copy(ends[0], ends[1], moves, stream=stream)
            if self._checks is not None:
                group = self._host_group[job.group]
                sums = self._checks.begin(group, rows, here, there, moves.nbytes)
        under_way.wait()
        return sums.result() if sums else None

    def _store(self, job: MoverJob, positions: slice) -> None:
        group = self._host_group[job.group]
        keys, ids = job.keys[positions], job.ids[positions]
        reservation = self._host.reserve(group, keys)
        try:
            if len(reservation.ids):
                sources = _of(reservation.keys, keys, ids)
                moves = self._mappings[job.group].out(sources, reservation.ids)
                sums = self._copied(job, moves, reservation.ids)
                if self._checks is not None and sums is not None:
                    self._checks.note(reservation, sums)
        except BaseException:
            self._host.abandon(reservation)
            raise
        self._host.keep(reservation)
        job.moved[positions] = self._host.contains(group, keys)

    def _load(self, job: MoverJob, positions: slice) -> None:
        group = self._host_group[job.group]
        keys, ids = job.keys[positions], job.ids[positions]
        moved = self._from_host(job, keys, ids)
        if self._promoter is not None and not moved.all():
            rest = chosen(keys, ~moved)
            self._promoter.promote(group, rest)
            moved[~moved] = self._from_host(job, rest, ids[~moved], count=False)
        if self._promoter is not None and not moved.all():
            rest = chosen(keys, ~moved)
            moved[~moved] = self._promoter.past_host(job, group, rest, ids[~moved])
        job.moved[positions] = moved

    def _from_host(
        self, job: MoverJob, keys: Sequence[bytes], ids: Ints, *, count: bool = True
    ) -> Bools:
        """Bring rows that the host has to their blocks; which."""
        group = self._host_group[job.group]
        moved = np.zeros(len(keys), bool)
        with self._host.held(group, keys) as (mask, rows):
            if len(rows):
                moves = self._mappings[job.group].back(rows, ids[mask])
                sums = self._copied(job, moves, rows)
                moved |= mask
                if self._checks is not None and sums is not None:
                    moved[mask] = self._checks.good(group, chosen(keys, mask), rows, sums)
        damaged = chosen(keys, mask & ~moved)
        if damaged:
            self._host.discard(group, damaged)
            job.num_damaged += len(damaged)
        if count:
            self._host.count_load(group, len(keys), int(moved.sum()))
        return moved

    def _prefetch(self, job: MoverJob, positions: slice) -> None:
        group = self._host_group[job.group]
        keys = job.keys[positions]
        if self._promoter is not None:
            here = self._host.contains(group, keys)
            self._promoter.promote(group, chosen(keys, ~here))
        job.moved[positions] = self._host.contains(group, keys)

    def _begin_demotion(self, job: MoverJob, positions: slice) -> None:
        """Rows that are worth it go on to the tier below, when nothing else is to do."""
        if self._below is None:
            return
        keys: Sequence[bytes] = job.keys[positions]
        links: Sequence[ChainLink] = job.links[positions]
        if self._admission is not None:
            with self._lock:
                admitted = self._admission.admits(np.array([mark(k) for k in keys], np.uint64))
            keys, links = chosen(keys, admitted), chosen(links, admitted)
        if not keys:
            return
        try:
            self._enqueue(MoverJob(JobKind.DEMOTE, job.group, keys, np.empty(0, np.int64), links))
        except StoreError as error:  # the queue is full: a cache may forget
            with self._lock:
                is_first, self.dropped_rows = not self.dropped_rows, self.dropped_rows + len(keys)
            if is_first:
                log.warning("rows stay in host memory only, and are counted: %s", error)

    def _demote(self, job: MoverJob, positions: slice) -> None:
        assert self._below is not None
        group = self._host_group[job.group]
        keys, links = job.keys[positions], job.links[positions]
        damaged: Sequence[bytes] = ()
        with self._host.held(group, keys) as (mask, rows):
            if self._checks is not None:
                runs = self._mappings[job.group].runs
                good = self._checks.unchanged(group, chosen(keys, mask), rows, runs)
                damaged = chosen(chosen(keys, mask), ~good)
                mask[mask], rows = good, rows[good]
            views = self._host.views(group, rows)
            kept = stored_in(self._below, group, chosen(keys, mask), views, chosen(links, mask))
        job.moved[positions][mask] = kept
        if damaged:
            log.warning("%d rows were damaged in host memory, and are forgotten", len(damaged))
            self._host.discard(group, damaged)


def _queue(urgent: JobKind, limits: Limits) -> JobQueue:
    """A queue that takes jobs of the urgent kind first."""
    return JobQueue(
        urgent=urgent,
        others=max(1, limits.workers // 2),
        max_parts=limits.max_parts,
        max_bytes=limits.max_bytes,
    )


def _of(wanted: Sequence[bytes], keys: Sequence[bytes], ids: Ints) -> Ints:
    """The blocks of the wanted keys, which are among `keys`."""
    if len(wanted) == len(keys):  # all of them, in the same order
        return ids
    block = dict(zip(keys, ids.tolist(), strict=True))
    return np.array([block[key] for key in wanted], np.int64)


def _named(part: JobPart, cause: Exception) -> StoreError:
    """The error of a part, naming the blocks that it leaves undone."""
    ids = part.job.ids[part.positions].tolist()
    what = f"blocks {ids[:8]}{' …' if ids[8:] else ''}" if ids else f"{len(part.job.keys)} rows"
    return StoreError(
        f"{part.job.kind.name.lower()} of group {part.job.group}, {what}: {cause}",
        blocks=tuple((part.job.group, block) for block in ids),
    )


def _check_identity(host: HostTier, below: Tier) -> None:
    """Refuses a tier below that keeps rows of another computation."""
    mine, theirs = host.layout.identity, below.layout.identity
    if mine is not None and theirs is not None and (unlike := theirs.differences(mine)):
        raise StoreError(
            f"tier {below.name!r} keeps rows of another computation than the host tier:\n"
            + "\n".join(unlike)
        )
