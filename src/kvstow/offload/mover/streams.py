"""Ordering against compute: a job's copies start after what its submitter's stream had then.

Each direction has one stream, on which its copies stand one behind the other: the next part is
there before the last one is over, and never behind a copy of the other direction.
"""

from collections.abc import Generator
from contextlib import contextmanager
from threading import Lock

import torch

from kvstow.offload.mover.jobs import MoverJob


class StreamOrder:
    """One event per job, one stream per direction, for an arena on that device.

    On the host, copies happen when they are called, and what the submitter wrote is there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        directions = (True, False) if self._is_cuda else ()
        self._streams = {inward: torch.cuda.Stream(device) for inward in directions}
        self._turns = {inward: Lock() for inward in directions}

    def record(self, job: MoverJob) -> None:
        """The job comes after what the current stream has been given by now."""
        if self._is_cuda:
            job.fence = torch.cuda.Event()
            job.fence.record(torch.cuda.current_stream(self._device))

    @contextmanager
    def after(self, job: MoverJob) -> Generator[torch.cuda.Stream | None]:
        """The stream of the job's direction, the thread's current one meanwhile, behind the
        job's fence. Submit inside, wait outside: others of the direction submit after it."""
        if not self._is_cuda:
            yield None
            return
        stream = self._streams[job.kind.inward]
        with self._turns[job.kind.inward]:
            if job.fence is not None:
                stream.wait_event(job.fence)
            with torch.cuda.stream(stream):
                yield stream

    def wait(self, job: MoverJob) -> None:
        """Return when what the job comes after is over."""
        if job.fence is not None:
            job.fence.synchronize()
