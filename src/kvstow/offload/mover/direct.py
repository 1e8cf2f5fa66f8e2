"""Copies between an arena and the host tier that the caller submits, and asks about later.

    store    reserve rows → submit ······ poll: all bytes there → rows are kept
    load     hold rows    → submit ······ poll: all bytes there → sums agree, rows are let go

No queue and no thread stand between: on CUDA a submission takes about a microsecond per row, and
the copies run on the stream of their direction. Between host arenas a copy is over when it was
submitted.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from kvstow.errors import CopyError, StoreError
from kvstow.memory.arena import Arena
from kvstow.memory.copy import CopyHandle, copy
from kvstow.offload.host.tier import HostTier
from kvstow.offload.mover.checks import PendingSums, RowChecks, Sums
from kvstow.offload.mover.jobs import JobKind, MoverJob
from kvstow.offload.mover.streams import StreamOrder
from kvstow.offload.rows import RowMapping
from kvstow.offload.tier import chosen
from kvstow.plan.view import Ints
from kvstow.route.copies import Copies


@dataclass(frozen=True, slots=True, eq=False)
class SubmittedCopy:
    """A copy under way; `finish` is told the sums of the rows when it has succeeded, None when
    it has not."""

    job: MoverJob
    handle: CopyHandle
    sums: PendingSums
    finish: Callable[[Sums | None], None]

    def over(self) -> bool:
        return self.handle.poll() and self.sums.over()


class DirectCopies:
    """Rows of one arena and one host tier. Call from one thread."""

    def __init__(
        self,
        arena: Arena,
        host: HostTier,
        *,
        host_group: Sequence[int],
        mappings: Sequence[RowMapping],
        order: StreamOrder,
        checks: RowChecks,
        on_stored: Callable[[MoverJob, slice], None],
    ) -> None:
        self._arena, self._host = arena, host
        self._host_group, self._mappings = host_group, mappings
        self._order = order
        self._checks = checks
        self._on_stored = on_stored
        self._submitted: list[SubmittedCopy] = []

    def __len__(self) -> int:
        """Copies under way."""
        return len(self._submitted)

    def store(self, group: int, ids: Ints, keys: Sequence[bytes]) -> MoverJob:
        """Copy blocks to the host tier, after what the current stream has been given.

        Nobody may write to the blocks until the job is over. Rows for which the tier has no room
        are not kept.
        """
        job = _begun(JobKind.STORE, group, keys, ids)
        there = self._host_group[group]
        reservation = self._host.reserve(there, keys)
        place = dict(zip(keys, ids.tolist(), strict=True))
        sources = np.array([place[key] for key in reservation.keys], np.int64)
        moves = self._mappings[group].out(sources, reservation.ids)

        def finish(sums: Sums | None) -> None:
            if sums is None:
                self._host.abandon(reservation)
                return
            self._checks.note(reservation, sums)
            self._host.keep(reservation)
            job.moved[:] = self._host.contains(there, job.keys)
            self._on_stored(job, slice(0, len(job.keys)))

        self._order.record(job)
        self._submit(job, moves, reservation.ids, finish)
        return job

    def load(self, group: int, keys: Sequence[bytes], ids: Ints) -> MoverJob:
        """Copy rows that the host tier has to blocks that nothing else reads or writes."""
        job = _begun(JobKind.LOAD, group, keys, ids)
        there = self._host_group[group]
        holding = ExitStack()
        mask, rows = holding.enter_context(self._host.held(there, keys))
        moves = self._mappings[group].back(rows, ids[mask])

        def finish(sums: Sums | None) -> None:
            if sums is not None:
                job.moved[mask] = self._checks.good(there, chosen(keys, mask), rows, sums)
            holding.close()
            if sums is not None:
                self._discard(job, there, chosen(keys, mask & ~job.moved))
            self._host.count_load(there, len(keys), int(job.moved.sum()))

        self._submit(job, moves, rows, finish)
        return job

    def _discard(self, job: MoverJob, group: int, damaged: Sequence[bytes]) -> None:
        job.num_damaged = len(damaged)
        if damaged:
            self._host.discard(group, damaged)

    def _submit(
        self, job: MoverJob, moves: Copies, rows: Ints, finish: Callable[[Sums | None], None]
    ) -> None:
        outward = not job.kind.inward
        ends = (self._arena, self._host.arena) if outward else (self._host.arena, self._arena)
        here, there = moves.source, moves.destination
        if not outward:
            here, there = there, here
        try:
            with self._order.after(job) as stream:
                handle = copy(ends[0], ends[1], moves, stream=stream)
                group = self._host_group[job.group]
                sums = self._checks.begin(group, rows, here, there, moves.nbytes)
        except Exception as error:
            self._end(job, finish, None, error)
            return
        self._submitted.append(SubmittedCopy(job, handle, sums, finish))
        if handle.work is None:
            self.poll()

    def poll(self) -> None:
        """End the jobs whose bytes have arrived."""
        left: list[SubmittedCopy] = []
        for each in self._submitted:
            try:
                if not each.over():
                    left.append(each)
                    continue
                self._end(each.job, each.finish, each.sums.result(), None)
            except CopyError as error:
                self._end(each.job, each.finish, None, error)
        self._submitted = left

    def wait(self) -> None:
        """Return when everything is over."""
        for each in self._submitted:
            try:
                each.handle.wait()
                each.sums.result()
            except CopyError:
                continue  # `poll` finds it again and ends its job
        self.poll()

    def _end(
        self,
        job: MoverJob,
        finish: Callable[[Sums | None], None],
        sums: Sums | None,
        cause: Exception | None,
    ) -> None:
        finish(sums)
        what = f"{job.kind.name.lower()} of group {job.group}, {len(job.keys)} rows: {cause}"
        error = None if cause is None else StoreError(what, blocks=job.blocks)
        job.ended(ran=True, error=error)


def _begun(kind: JobKind, group: int, keys: Sequence[bytes], ids: Ints) -> MoverJob:
    job = MoverJob(kind, group, keys, ids)
    job.planned(1)
    job.begun()
    return job
