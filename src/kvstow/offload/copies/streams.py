"""Ordering against compute: a job's copies start after what its submitter's stream had then.

Each direction has one stream, on which its copies stand one behind the other: the next part is
there before the last one is over, and never behind a copy of the other direction.
"""

from collections.abc import Generator
from contextlib import contextmanager
from threading import Lock

import torch

from kvstow.offload.copies.jobs import JobKind, MoverJob


class StreamOrder:
    """One event per job, one stream per direction, for an arena on that device.

    On the host, copies happen when they are called, and what the submitter wrote is there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[JobKind, tuple[torch.cuda.Stream, Lock]] = {}
        if device.type == "cuda":
            for kind in (JobKind.LOAD, JobKind.STORE):
                self._streams[kind] = torch.cuda.Stream(device), Lock()

    def record(self, job: MoverJob) -> None:
        """The job comes after what the current stream has been given by now."""
        if self._streams:
            job.fence = torch.cuda.Event()
            job.fence.record(torch.cuda.current_stream(self._device))

    @contextmanager
    def after(self, job: MoverJob) -> Generator[torch.cuda.Stream | None]:
        """The stream of the job's direction, the thread's current one meanwhile, behind the
        job's fence. Submit inside, wait outside: others of the direction submit after it."""
        if not self._streams:
            yield None
            return
        stream, turn = self._streams[job.kind]
        with turn:
            if job.fence is not None:
                stream.wait_event(job.fence)
            with torch.cuda.stream(stream):
                yield stream
