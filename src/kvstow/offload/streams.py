"""Ordering against compute: a job's copies start after what its submitter's stream had then."""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import local
from typing import Protocol

import torch

from kvstow.memory.arena import Arena
from kvstow.offload.jobs import Job


class Fences(Protocol):
    """Remembers, per job, after which work its copies may start."""

    def record(self, job: Job) -> None:
        """The job comes after what the current stream has been given by now."""
        ...

    def after(self, job: Job) -> AbstractContextManager["torch.cuda.Stream | None"]:
        """A stream of the calling thread, its current one meanwhile, behind the job's fence."""
        ...

    def forget(self, job: Job) -> None:
        """The job is over."""
        ...


def fences(arena: Arena) -> Fences:
    """For a CUDA arena, events on streams; on the host, copies happen when they are called."""
    return CudaFences(arena.device) if arena.device.type == "cuda" else NoFences()


class NoFences:
    """Host memory: what the submitter wrote is there."""

    def record(self, job: Job) -> None:
        pass

    def after(self, job: Job) -> AbstractContextManager["torch.cuda.Stream | None"]:
        return nullcontext(None)

    def forget(self, job: Job) -> None:
        pass


class CudaFences:
    """One event per job, one stream per worker thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: dict[int, torch.cuda.Event] = {}
        self._mine = local()

    def record(self, job: Job) -> None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._events[id(job)] = event

    @contextmanager
    def after(self, job: Job) -> Generator["torch.cuda.Stream | None"]:
        if not hasattr(self._mine, "stream"):
            self._mine.stream = torch.cuda.Stream(self._device)
        stream: torch.cuda.Stream = self._mine.stream
        event = self._events.get(id(job))
        if event is not None:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            yield stream

    def forget(self, job: Job) -> None:
        self._events.pop(id(job), None)
