"""Ordering against compute: a job's copies start after what its submitter's stream had then.

Each direction has one stream, on which its copies stand one behind the other: the next part is
there before the last one is over, and never behind a copy of the other direction.
"""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
from typing import Protocol

import torch

from kvstow.memory.arena import Arena
from kvstow.offload.mover.jobs import MoverJob


class StreamOrder(Protocol):
    """Remembers, per job, after which work its copies may start."""

    def record(self, job: MoverJob) -> None:
        """The job comes after what the current stream has been given by now."""
        ...

    def after(self, job: MoverJob) -> AbstractContextManager["torch.cuda.Stream | None"]:
        """The stream of the job's direction, the thread's current one meanwhile, behind the
        job's fence. Submit inside, wait outside: others of the direction submit after it."""
        ...

    def wait(self, job: MoverJob) -> None:
        """Return when what the job comes after is over."""
        ...

    def forget(self, job: MoverJob) -> None:
        """The job is over."""
        ...


def fences(arena: Arena) -> StreamOrder:
    """For a CUDA arena, events on streams; on the host, copies happen when they are called."""
    return CudaFences(arena.device) if arena.device.type == "cuda" else NoFences()


class NoFences:
    """Host memory: what the submitter wrote is there."""

    def record(self, job: MoverJob) -> None:
        pass

    def after(self, job: MoverJob) -> AbstractContextManager["torch.cuda.Stream | None"]:
        return nullcontext(None)

    def wait(self, job: MoverJob) -> None:
        pass

    def forget(self, job: MoverJob) -> None:
        pass


class CudaFences:
    """One event per job, one stream per direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: dict[int, torch.cuda.Event] = {}
        self._streams = {inward: torch.cuda.Stream(device) for inward in (True, False)}
        self._turns = {inward: Lock() for inward in (True, False)}

    def record(self, job: MoverJob) -> None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._events[id(job)] = event

    @contextmanager
    def after(self, job: MoverJob) -> Generator["torch.cuda.Stream | None"]:
        stream, event = self._streams[job.kind.inward], self._events.get(id(job))
        with self._turns[job.kind.inward]:
            if event is not None:
                stream.wait_event(event)
            with torch.cuda.stream(stream):
                yield stream

    def wait(self, job: MoverJob) -> None:
        event = self._events.get(id(job))
        if event is not None:
            event.synchronize()

    def forget(self, job: MoverJob) -> None:
        self._events.pop(id(job), None)
