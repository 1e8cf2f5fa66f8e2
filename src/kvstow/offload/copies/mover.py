"""Rows between an arena and its tiers, always by way of host memory.

    store    arena → host, then host → below              (demotion, another job)
    load     host → arena; what the host lacks: below → host → arena

Without a host tier rows pass through a window, in which they are reserved and never kept, and a
store is over when the tiers below have them. So do rows for which a host tier has no room.

A job's blocks are held (where a pool is given) from submission until `reap`, so none of them is
handed out for writing while bytes move. A job that fails names its blocks; nothing else stops.

Each kind of job has a queue and workers of its own, loads and stores a stream each. How a part
of a job is done is a generator, which pauses when it has submitted a copy. A worker waits for the
copy and goes on; meanwhile others submit the parts behind it:

    copies     ├── part 0 ──┼── part 1 ──┼── part 2 ──┼── part 3 ─
    worker 0   submit ····· enter, submit ············ enter, …
    worker 1     submit ················ enter, submit ····

A job may be begun `here`, by the thread that submits it: then `reap` goes on with it, and no
other thread's turn lies between.
"""

import logging
import os
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from threading import Event, Lock
from time import monotonic, sleep

import numpy as np
import numpy.typing as npt

from kvstow.blocks.pool import Pool
from kvstow.errors import CopyError, StoreError
from kvstow.memory.arena import Arena
from kvstow.memory.copy import CopyHandle, copy
from kvstow.offload.copies.checks import PendingSums, RowChecks, Sums
from kvstow.offload.copies.jobs import JobKind, JobPart, JobQueue, MoverJob, StreamOrder
from kvstow.offload.disk.format import ChainLink
from kvstow.offload.host.tier import HostTier, Reservation
from kvstow.offload.rows import RowMapping, check_same_rows, row_layout
from kvstow.offload.tier import (
    Tier,
    check_process,
    checked_keys,
    first_positions,
    held_by_any,
    load_from_first,
    select,
    store_in_all,
)
from kvstow.plan.layout import NULL_SLABS
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks, check_ids
from kvstow.threads import guarded_thread

log = logging.getLogger("kvstow.offload")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much may be under way at a time.

    `workers` loads and as many stores, in parts of about `part_bytes`, are on their way, and half
    as many demotions; `max_bytes` of each kind of job may wait. Without workers nothing moves but
    by `Mover.step`.
    """

    workers: int = 2
    max_bytes: int = 4 << 30
    part_bytes: int = 128 << 20


USUAL = Limits()

POLL_SECONDS = 0.0002

WINDOW_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, eq=False)
class PendingCopy:
    """A copy that was submitted, and the sums that are taken of its rows."""

    handle: CopyHandle
    sums: PendingSums | None

    def over(self) -> bool:
        return self.handle.poll() and (self.sums is None or self.sums.over())

    def result(self) -> Sums | None:
        """The sums, when all bytes have arrived. Raises CopyError if they don't."""
        self.handle.wait()
        return None if self.sums is None else self.sums.result()


Story = Generator[PendingCopy]
"""How a part is done. It pauses when it has submitted a copy, and then waits for it itself."""


class HostRows:
    """Blocks of an arena, and the rows of a host tier that are theirs. Of a window, which keeps
    nothing, one part at a time has all rows, by `turn`."""

    def __init__(self, arena: Arena, tier: HostTier) -> None:
        self.tier, self.turn = tier, Lock()
        groups = range(len(arena.layout.groups))
        self.mappings = [RowMapping(arena.layout, g, tier.layout) for g in groups]

    def group(self, group: int) -> int:
        """The tier's group for one of the arena's."""
        return self.mappings[group].there_group

    def row_bytes(self, group: int) -> int:
        return self.tier.layout.row_bytes(self.group(group))

    def num_rows(self, group: int) -> int:
        """The rows that there is room for, where nothing is kept."""
        layout, there = self.tier.layout, self.group(group)
        return layout.num_blocks(there) - NULL_SLABS * layout.groups[there].rows_per_slab


class Mover:
    """Moves rows of one arena through a host tier, or a window, and the tiers below.

    Call `store`, `load` and `reap` from the thread that owns the pool. With `checked`,
    rows that come back from the host tier, or go on below it, are compared with what left
    (`checks`); those that differ are forgotten, and fetched from the tier below where that has
    them.
    """

    def __init__(
        self,
        arena: Arena,
        host: HostTier | None,
        *below: Tier,
        pool: Pool | None = None,
        limits: Limits = USUAL,
        checked: bool = False,
    ) -> None:
        self._arena, self._below, self._pool, self._limits = arena, below, pool, limits
        above = host or next(iter(below), None)
        if above is None:
            raise StoreError("a mover needs a host tier, or a tier below")
        self._layout = above.layout
        for tier in below:
            check_same_rows(above.layout, tier.name, tier.layout)
        self._lock = Lock()
        self._host = None if host is None else HostRows(arena, host)
        self._windows: dict[JobKind, HostRows] = {}
        self._rows = self._host or self._window(JobKind.STORE)
        self._order = StreamOrder(arena.device)
        self._checks = RowChecks(arena, host) if checked and host is not None else None
        self._queues = {kind: JobQueue(max_bytes=limits.max_bytes) for kind in JobKind}
        self._opener = os.getpid()
        self._fetches: dict[tuple[int, bytes], Event] = {}
        """Rows that some part is bringing to the host from below."""
        self._here: list[tuple[JobPart, Story, PendingCopy]] = []
        self._finished: list[MoverJob] = []
        self._broken: BaseException | None = None
        self.dropped_rows = 0
        """Rows that went no further than the host tier, because too many waited already."""
        self._threads = [
            guarded_thread(
                f"kvstow-mover-{kind.name.lower()}-{i}",
                lambda queue=self._queues[kind]: self._work(queue),
                on_broken=self._break,
            )
            for kind, count in (
                (JobKind.LOAD, limits.workers),
                (JobKind.STORE, limits.workers),
                (JobKind.DEMOTE, (limits.workers + 1) // 2 if host and below else 0),
            )
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    # ── commands ──────────────────────────────────────────────────────────────────

    def store(
        self,
        group: int,
        ids: npt.ArrayLike,
        keys: Sequence[bytes],
        links: Sequence[ChainLink] = (),
        *,
        here: bool = False,
    ) -> MoverJob:
        """Keep blocks, after what the current stream has been given.

        Nobody may write to the blocks until the job is over. `links`, one per key or none, say
        where they stand in their sequences, for a disk below (`kvstow store convert`).
        """
        job = self._job(JobKind.STORE, group, keys, ids, links)
        self._order.record(job)
        self._submit(job, here=here and self._host is not None)
        return job

    def load(
        self,
        group: int,
        keys: Sequence[bytes],
        ids: npt.ArrayLike,
        *,
        after_stream: bool = True,
        here: bool = False,
    ) -> MoverJob:
        """Bring rows from wherever they are to blocks; `result()` says which arrived.

        The copies start after what the current stream has been given. With `after_stream=False`
        they do not wait for it, so none of that work may use the blocks. Only rows that host
        memory has are loaded `here`.
        """
        job = self._job(JobKind.LOAD, group, keys, ids)
        if after_stream:
            self._order.record(job)
        host = self._host
        here = here and host is not None and bool(host.tier.contains(host.group(group), keys).all())
        self._submit(job, here=here)
        return job

    def reap(self) -> tuple[MoverJob, ...]:
        """Jobs that ended since the last time; the holds on their blocks end here."""
        self._go_on_here()
        with self._lock:
            finished, self._finished = self._finished, []
        for job in finished:
            self._release(job)
        return tuple(finished)

    def step(self) -> bool:
        """Run the next part in this thread, loads first; whether there was one."""
        for queue in self._queues.values():
            part = queue.take(wait=False)
            if part is not None:
                self._run(queue, part)
                return True
        return False

    def drain(self, timeout: float | None = None) -> bool:
        """Whether everything is over, demotion included, within so many seconds."""
        end = None if timeout is None else monotonic() + timeout
        while self._go_on_here():
            if end is not None and monotonic() > end:
                return False
            sleep(POLL_SECONDS)
        while not self._threads and self.step():
            pass
        return all(
            queue.wait_empty(None if end is None else max(0.0, end - monotonic()))
            for queue in self._queues.values()
        )

    def close(self) -> None:
        """Give up what has not begun, wait for what has."""
        while self._go_on_here():
            sleep(POLL_SECONDS)
        for queue in self._queues.values():
            for part in queue.close():
                part.job.cancel()
                self._end(part, None)
        for thread in self._threads:
            thread.join()
        self.reap()
        for window in self._windows.values():
            window.tier.close()

    # ── submission ────────────────────────────────────────────────────────────────

    def _job(
        self,
        kind: JobKind,
        group: int,
        keys: Sequence[bytes],
        ids: npt.ArrayLike,
        links: Sequence[ChainLink] = (),
    ) -> MoverJob:
        """A job, once it is certain that each block is one, is named once, and has a key: a block
        under two keys, or a null row under one, would be taken for what it is not."""
        blocks = self._arena.checked(group, ids)
        if len(blocks) != len(keys):
            raise StoreError(f"{len(keys)} keys for {len(blocks)} blocks")
        if links and len(links) != len(keys):
            raise StoreError(f"{len(links)} links for {len(keys)} keys")
        check_ids(self._arena.layout, group, Blocks.first(blocks), "arena")
        checked_keys(self._arena.layout, group, keys)
        return MoverJob(kind, group, keys, blocks, links)

    def _submit(self, job: MoverJob, *, here: bool) -> None:
        if self._pool is not None and len(job.ids):
            self._pool.share(job.group, job.ids)
        try:
            if here:
                job.expect_parts(1)
                part = JobPart(job, slice(0, len(job.keys)), 0)
                story = self._store if job.kind is JobKind.STORE else self._from_host
                self._go_on(part, story(part))
            else:
                self._enqueue(job)
        except BaseException:
            self._release(job)
            raise

    def _enqueue(self, job: MoverJob) -> None:
        check_process(self._opener, "the mover")  # a fork has none of its threads
        if self._broken is not None:
            raise StoreError(f"the mover has lost a thread: {self._broken!r}", blocks=job.blocks)
        row_bytes = self._rows.row_bytes(job.group)
        rows_per_part = max(1, self._limits.part_bytes // row_bytes)
        if self._host is None:  # all of a part passes through the window at once
            rows_per_part = min(rows_per_part, self._rows.num_rows(job.group))
        self._queues[job.kind].put(job, row_bytes, rows_per_part)
        if not job.keys:  # no part will end it
            self._finish(job)

    def _release(self, job: MoverJob) -> None:
        if self._pool is not None and len(job.ids):
            self._pool.release(job.group, job.ids)

    # ── workers ───────────────────────────────────────────────────────────────────

    def _work(self, queue: JobQueue) -> None:
        while (part := queue.take()) is not None:
            self._run(queue, part)

    def _run(self, queue: JobQueue, part: JobPart) -> None:
        try:
            if part.job.begin_part():
                tell = {
                    JobKind.LOAD: self._load,
                    JobKind.STORE: self._store if self._host else self._store_below,
                    JobKind.DEMOTE: self._demote,
                }[part.job.kind]
                self._go_on(part, tell(part), may_pause=False)
            else:
                self._end(part, None)
        finally:
            queue.done(part)

    def _go_on(self, part: JobPart, story: Story, *, may_pause: bool = True) -> None:
        """Go on with a part until it is over, or waits for a copy and may."""
        error: StoreError | None = None
        try:
            for copying in story:
                if may_pause and not _is_over(copying):
                    self._here.append((part, story, copying))
                    return
        except Exception as cause:
            error = _named(part, cause)
            log.warning("%s", error)
        self._end(part, error)

    def _go_on_here(self) -> bool:
        """Go on with what was begun here, where copies are over; whether something is left."""
        paused, self._here = self._here, []
        for part, story, copying in paused:
            if _is_over(copying):
                self._go_on(part, story)
            else:
                self._here.append((part, story, copying))
        return bool(self._here)

    def _end(self, part: JobPart, error: StoreError | None) -> None:
        if part.job.end_part(error):
            self._finish(part.job)

    def _finish(self, job: MoverJob) -> None:
        if job.kind is not JobKind.DEMOTE:
            with self._lock:
                self._finished.append(job)

    def _break(self, cause: BaseException) -> None:
        """A worker has ended: nothing waits for it."""
        self._broken = cause
        for queue in self._queues.values():
            for part in queue.close():
                self._end(part, _named(part, cause))

    # ── how a part is done ────────────────────────────────────────────────────────

    def _copied(
        self,
        job: MoverJob,
        host: HostRows,
        ids: Ints,
        rows: Ints,
        *,
        has_sums: bool = True,
    ) -> Generator[PendingCopy, None, Sums | None]:
        """Copy between blocks and rows of the host, after the job's fence; the rows' sums."""
        if not len(rows):
            return None
        is_inward = job.kind is JobKind.LOAD
        mapping = host.mappings[job.group]
        moves = mapping.back(rows, ids) if is_inward else mapping.out(ids, rows)
        source, target = self._arena, host.tier.arena
        here, there = moves.source, moves.destination
        if is_inward:
            source, target, here, there = target, source, there, here
        sums: PendingSums | None = None
        with self._order.after(job) as stream:
            handle = copy(source, target, moves, stream=stream)
            if self._checks is not None and has_sums:
                sums = self._checks.begin(host.group(job.group), rows, here, there, moves.nbytes)
        pending = PendingCopy(handle, sums)
        yield pending
        return pending.result()

    def _copied_out(
        self, part: JobPart, host: HostRows
    ) -> Generator[PendingCopy, None, tuple[Reservation, list[int]]]:
        """Rows of host memory with the bytes of their blocks, and positions of these in the job."""
        job, keys = part.job, part.job.keys[part.positions]
        first = first_positions(keys)
        reservation = host.tier.reserve(host.group(job.group), keys)
        which = [part.positions.start + first[key] for key in reservation.keys]
        try:
            sums = yield from self._copied(job, host, job.ids[which], reservation.ids)
            if self._checks is not None and sums is not None:
                self._checks.note(reservation, sums)
        except BaseException:
            host.tier.abandon(reservation)
            raise
        return reservation, which

    def _store(self, part: JobPart) -> Story:
        """Blocks to the host tier. Rows for which it has no room are not kept."""
        host, job, keys = self._host, part.job, part.job.keys[part.positions]
        assert host is not None
        reservation, _ = yield from self._copied_out(part, host)
        host.tier.keep(reservation)
        job.moved[part.positions] = host.tier.contains(reservation.group, keys)
        if self._below and keys:
            self._begin_demotion(job, keys, job.links[part.positions])

    def _store_below(self, part: JobPart) -> Story:
        """Blocks through the window to the tier below."""
        job, window = part.job, self._rows
        with window.turn:
            reservation, which = yield from self._copied_out(part, window)
            try:
                rows = window.tier.views(reservation.group, reservation.ids)
                links = [job.links[i] for i in which] if job.links else ()
                kept = store_in_all(self._below, reservation.group, reservation.keys, rows, links)
            finally:
                window.tier.abandon(reservation)
        stored = set(select(reservation.keys, kept))
        job.moved[part.positions] = [key in stored for key in job.keys[part.positions]]

    def _begin_demotion(
        self, job: MoverJob, keys: Sequence[bytes], links: Sequence[ChainLink]
    ) -> None:
        """Rows go on to the tier below, when nothing else is to do."""
        try:
            self._enqueue(MoverJob(JobKind.DEMOTE, job.group, keys, np.empty(0, np.int64), links))
        except StoreError as error:  # the queue is full: a cache may forget
            with self._lock:
                is_first, self.dropped_rows = not self.dropped_rows, self.dropped_rows + len(keys)
            if is_first:
                log.warning("rows stay in host memory only, and are counted: %s", error)

    def _demote(self, part: JobPart) -> Story:
        """Rows of the host tier to the tier below."""
        host, job = self._host, part.job
        assert host is not None
        group = host.group(job.group)
        keys, links = job.keys[part.positions], job.links[part.positions]
        damaged: Sequence[bytes] = ()
        with host.tier.held(group, keys) as (mask, rows):
            if self._checks is not None:
                held = select(keys, mask)
                good = self._checks.unchanged(group, held, rows, host.mappings[job.group].runs)
                damaged = select(held, ~good)
                mask[mask], rows = good, rows[good]
            views = host.tier.views(group, rows)
            kept = store_in_all(self._below, group, select(keys, mask), views, select(links, mask))
        job.moved[part.positions][mask] = kept
        if damaged:
            log.warning("%d rows were damaged in host memory, and are forgotten", len(damaged))
            host.tier.discard(group, damaged)
        yield from ()

    def _load(self, part: JobPart) -> Story:
        """Rows to blocks: those that the host has, then those that come from below."""
        job = part.job
        if self._host is not None:
            yield from self._from_host(part)
        while self._below and (left := _missing(part)):
            keys = [job.keys[i] for i in left]
            present = select(keys, held_by_any(self._below, self._rows.group(job.group), keys))
            own, others = self._claim(job.group, present)
            try:
                lacking = [i for i in left if job.keys[i] in own]
                if self._host is not None:
                    lacking = yield from self._from_below(job, lacking, self._host)
                    if lacking:  # somebody may have brought them meanwhile
                        yield from self._from_host(part, is_counted=False)
                        lacking = [i for i in lacking if not job.moved[i]]
                yield from self._through_window(job, lacking)
            finally:
                self._unclaim(job.group, own)
            if not others:
                return
            for other in others:
                other.wait()
            if self._host is not None:
                yield from self._from_host(part, is_counted=False)

    def _from_host(self, part: JobPart, *, is_counted: bool = True) -> Story:
        """Rows that the host tier has to their blocks, unless they were damaged there."""
        host, job = self._host, part.job
        assert host is not None
        group, left = host.group(job.group), _missing(part)
        keys = [job.keys[i] for i in left]
        with host.tier.held(group, keys) as (mask, rows):
            there = select(left, mask)
            sums = yield from self._copied(job, host, job.ids[there], rows)
            good = np.ones(len(rows), bool)
            if self._checks is not None and sums is not None:
                good = self._checks.good(group, select(keys, mask), rows, sums)
            job.moved[there] = good
        damaged = select(select(keys, mask), ~good)
        if damaged:
            host.tier.discard(group, damaged)
            job.num_damaged += len(damaged)
        if is_counted:
            host.tier.count_load(group, len(keys), int(good.sum()))

    def _from_below(
        self, job: MoverJob, which: Sequence[int], host: HostRows
    ) -> Generator[PendingCopy, None, list[int]]:
        """Rows from the tier below to the host and on to their blocks, by position in the job;
        those for which the host has no room."""
        group = host.group(job.group)
        reservation = host.tier.reserve(group, [job.keys[i] for i in which])
        filled = np.zeros(len(reservation.ids), bool)
        try:
            if len(filled):
                rows = host.tier.views(group, reservation.ids)
                filled = load_from_first(self._below, group, reservation.keys, rows)
            numbers = reservation.ids[filled].tolist()
            row = dict(zip(select(reservation.keys, filled), numbers, strict=True))
            at = [i for i in which if job.keys[i] in row]
            ids, rows = job.ids[at], np.array([row[job.keys[i]] for i in at], np.int64)
            yield from self._copied(job, host, ids, rows, has_sums=False)
            job.moved[at] = True
        finally:
            if host is self._host:
                if self._checks is not None:
                    self._checks.forget(reservation)
                host.tier.keep(reservation, filled)
            else:
                host.tier.abandon(reservation)
        reserved = set(reservation.keys)
        return [i for i in which if job.keys[i] not in reserved]

    def _through_window(self, job: MoverJob, which: Sequence[int]) -> Story:
        """Rows from the tier below to their blocks, which the host keeps none of."""
        if which:
            window = self._window(job.kind)
            step = window.num_rows(job.group)
            with window.turn:
                for at in range(0, len(which), step):
                    yield from self._from_below(job, which[at : at + step], window)

    def _window(self, kind: JobKind) -> HostRows:
        """The window for one direction, made when it is first needed."""
        with self._lock:
            if kind not in self._windows:
                nbytes = max(WINDOW_BYTES, 4 * row_layout(self._layout).slab_bytes)
                self._windows[kind] = HostRows(self._arena, HostTier(self._layout, capacity=nbytes))
            return self._windows[kind]

    # ── each row fetched once ─────────────────────────────────────────────────────

    def _claim(self, group: int, keys: Sequence[bytes]) -> tuple[set[bytes], list[Event]]:
        """The keys whose rows nobody is bringing, which are the caller's to bring; and what to
        wait for, for the others."""
        arrived = Event()
        with self._lock:
            own = {key for key in keys if (group, key) not in self._fetches}
            others = {self._fetches[group, key] for key in keys if key not in own}
            self._fetches.update({(group, key): arrived for key in own})
        return own, list(others)

    def _unclaim(self, group: int, keys: set[bytes]) -> None:
        with self._lock:
            for arrived in {self._fetches.pop((group, key)) for key in keys}:
                arrived.set()


def _missing(part: JobPart) -> list[int]:
    """Positions of the rows that have not arrived."""
    return (part.positions.start + np.flatnonzero(~part.job.moved[part.positions])).tolist()


def _is_over(copying: PendingCopy) -> bool:
    try:
        return copying.over()
    except CopyError:  # its story learns it, too
        return True


def _named(part: JobPart, cause: BaseException) -> StoreError:
    """The error of a part, naming the blocks that it leaves undone."""
    ids = part.job.ids[part.positions].tolist()
    what = f"blocks {ids[:8]}{' …' if ids[8:] else ''}" if ids else f"{len(part.job.keys)} rows"
    return StoreError(
        f"{part.job.kind.name.lower()} of group {part.job.group}, {what}: {cause}",
        blocks=tuple((part.job.group, block) for block in ids),
    )
