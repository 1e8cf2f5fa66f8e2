"""Mooncake Store: the only module that imports it.

Rows lie in the memory of many machines and go over RDMA or TCP. It is a cache and nothing else:
a master that is started again knows no keys, and for some seconds after the owner of a copy has
died a put of the same key is answered with success, and so is a put of a key that somebody else is
writing at that moment. All of these are misses to us, since what counts is what a read returns.

Mooncake answers a batch with a number per object. Those below are about that object; every other
negative one is about the store.
"""

import logging
from collections import deque
from collections.abc import Container, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from queue import Empty, LifoQueue
from threading import Lock
from time import monotonic
from typing import Any, cast
from weakref import finalize

import numpy as np

from kvstow.errors import BackendMissing
from kvstow.offload.remote.client import (
    BUSY,
    NO_ROOM,
    Answer,
    Blob,
    Range,
    Refused,
    StoreUnreachable,
)
from kvstow.offload.tier import Bools, Bytes

log = logging.getLogger("kvstow.offload")

try:
    from mooncake.store import (  # pyright: ignore[reportMissingImports]
        MooncakeDistributedStore,  # pyright: ignore[reportUnknownVariableType]
    )
except ImportError as error:
    if isinstance(error, ModuleNotFoundError):
        raise BackendMissing("mooncake", "mooncake") from None
    raise BackendMissing(
        f"mooncake ({error})", install="and: apt install libibverbs1 libnl-3-200 libnl-route-3-200"
    ) from None

NOT_MADE = {-101: NO_ROOM, -200: NO_ROOM, -800: "not sent"}
"""Answers to a put: there is no machine with memory; none with room; the one that was to have the
object does not take it."""

NOT_REMOVED = {-703: BUSY, -706: BUSY, -714: BUSY}
"""Answers to a removal: being written; promised to a reader; being read."""

OTHER_SIZE, NOT_FOUND = -600, -704

NOT_READ = {OTHER_SIZE, NOT_FOUND, -703, -707, -712, -800, -801}
"""Answers to a read: larger than was asked for; no such object; being written; no longer promised
when it came; its machine is gone; its machine does not answer; other bytes than were written."""

STAGE_BYTES = 128 << 20
"""Registered memory that all bytes go through."""

STAGES = 4
"""As many calls use a part of it each."""

CLOSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class _Registered:
    """Memory that the store reads from and writes to."""

    memory: Bytes
    address: int


class _Copies:
    """Copies of stages, in memory that is used again when the last array on a copy is gone.

    A stage itself is never handed out: a read that Mooncake gave up may still write to it, after
    its bytes were verified. Memory that nobody has touched yet costs more than the copy.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._free: deque[Bytes] = deque(maxlen=STAGES)

    def copied(self, data: Bytes) -> Bytes:
        """A copy of at most `nbytes` bytes."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = np.empty(self._nbytes, np.uint8)
        # Through a memoryview, so that arrays on the copy refer to it and not to the memory.
        copy: Bytes = np.frombuffer(memory.data, np.uint8, data.nbytes)
        copy[:] = data
        finalize(copy, self._free.append, memory).atexit = False
        return copy


class MooncakeClient:
    """Objects whose names begin with one prefix, on the segments that a master knows."""

    puts_at_once = 2

    def __init__(
        self,
        master: str,
        prefix: str,
        *,
        metadata: str,
        local: str = "127.0.0.1",
        protocol: str = "tcp",
        device: str = "",
        stage_bytes: int = STAGE_BYTES,
    ) -> None:
        self.where = f"mooncake://{master}/{prefix}"
        self._prefix = f"{prefix}/" if prefix else ""
        self._store = cast("Any", MooncakeDistributedStore())
        status = self._store.setup(local, metadata, 0, 16 << 20, protocol, device, master)
        if status:
            raise StoreUnreachable(f"{self.where}: setup ended with {status}")
        self._putting, self._getting = Lock(), Lock()
        """One call at a time: Mooncake's polls until all its bytes have moved, and two take each
        other's processor. Copies and checksums go on meanwhile."""
        self._stages: LifoQueue[_Registered] = LifoQueue()
        self._stage_bytes = stage_bytes // STAGES
        self._copies = _Copies(self._stage_bytes)
        for _ in range(STAGES):
            self._stages.put(self._registered(self._stage_bytes))

    def _registered(self, nbytes: int) -> _Registered:
        memory: Bytes = np.empty(nbytes, np.uint8)
        address = memory.ctypes.data
        if status := self._store.register_buffer(address, nbytes):
            raise StoreUnreachable(f"{self.where}: {nbytes} bytes not registered: {status}")
        return _Registered(memory, address)

    @contextmanager
    def _stage(self) -> Generator[_Registered]:
        """A stage that nobody else uses meanwhile."""
        stage = self._stages.get()
        try:
            yield stage
        finally:
            self._stages.put(stage)

    def put(self, blobs: Sequence[Blob]) -> Refused:
        refused: Refused = {}
        for lot in _lots([blob.data.nbytes for blob in blobs], self._stage_bytes):
            with self._stage() as stage:
                refused |= self._put([blobs[i] for i in lot], stage)
        return refused

    def _put(self, blobs: Sequence[Blob], stage: _Registered) -> Refused:
        """Copy blobs into a stage that they fit into, and send them from there."""
        starts = _starts([blob.data.nbytes for blob in blobs])
        for blob, start in zip(blobs, starts, strict=True):
            stage.memory[start : start + blob.data.nbytes] = blob.data
        keys = [self._prefix + blob.name for blob in blobs]
        places = [stage.address + start for start in starts]
        with self._putting:
            sizes = [blob.data.nbytes for blob in blobs]
            answers = self._store.batch_put_from(keys, places, sizes)
        return self._refused([blob.name for blob in blobs], answers, NOT_MADE)

    def get(self, objects: Sequence[tuple[str, Sequence[Range]]]) -> list[Answer]:
        """A whole object, whose length nobody knows, is another question than ranges of one."""
        answers: list[Answer] = [None] * len(objects)
        is_whole = [len(ranges) == 1 and ranges[0][0] == 0 for _, ranges in objects]
        for ask, which in ((self._whole, True), (self._ranges, False)):
            numbers = [i for i, each in enumerate(is_whole) if each == which]
            sizes = [sum(end - start for start, end in objects[i][1]) for i in numbers]
            for lot in _lots(sizes, self._stage_bytes):
                some = [numbers[i] for i in lot]
                for i, parts in zip(some, ask([objects[i] for i in some]), strict=True):
                    answers[i] = parts
        return answers

    def _whole(self, objects: Sequence[tuple[str, Sequence[Range]]]) -> list[Answer]:
        sizes = [ranges[0][1] for _, ranges in objects]
        starts = _starts(sizes)
        keys = [self._prefix + name for name, _ in objects]
        with self._stage() as stage:
            with self._getting:
                places = [stage.address + start for start in starts]
                answers = self._store.batch_get_into(keys, places, sizes)
            got = self._copies.copied(stage.memory[: starts[-1] + sizes[-1]])
        both = zip(starts, self._checked(answers, NOT_READ), strict=True)
        return [[got[start : start + size]] if size >= 0 else None for start, size in both]

    def _ranges(self, objects: Sequence[tuple[str, Sequence[Range]]]) -> list[Answer]:
        sizes = [[end - start for start, end in ranges] for _, ranges in objects]
        at = iter(_starts([size for each in sizes for size in each]))
        places = [[next(at) for _ in each] for each in sizes]
        keys = [self._prefix + name for name, _ in objects]
        starts = [[start for start, _ in ranges] for _, ranges in objects]
        with self._stage() as stage:
            with self._getting:
                (answers,) = self._store.get_into_ranges(
                    [stage.address], [keys], [places], [starts], [sizes]
                )
            got = self._copies.copied(stage.memory[: places[-1][-1] + sizes[-1][-1]])
        results: list[Answer] = []
        for place, answer in zip(places, answers, strict=True):
            lengths = self._checked(answer, NOT_READ)
            parts = [got[at : at + max(n, 0)] for at, n in zip(place, lengths, strict=True)]
            is_missing = any(n < 0 and n != OTHER_SIZE for n in lengths)
            results.append(None if is_missing else parts)
        return results

    def exists(self, names: Sequence[str]) -> Bools:
        answers = self._store.batch_is_exist([self._prefix + name for name in names])
        return np.array(self._checked(answers, NOT_READ), np.int64) == 1

    def delete(self, names: Sequence[str]) -> Refused:
        answers = self._store.batch_remove([self._prefix + name for name in names], True)
        gone = [0 if answer == NOT_FOUND else answer for answer in answers]
        return self._refused(names, gone, NOT_REMOVED)

    def close(self) -> None:
        """Let go of the store when no call uses its memory any more. One that hangs for long has
        the memory for itself, and the store is not closed."""
        until = monotonic() + CLOSE_SECONDS
        for _ in range(STAGES):
            try:
                self._stages.get(timeout=max(0.0, until - monotonic()))
            except Empty:
                log.warning("%s: not closed: a call has not ended", self.where)
                return
        self._store.close()

    def _checked(self, answers: Sequence[int], meanings: Container[int]) -> Sequence[int]:
        """The answers; StoreUnreachable for a negative one that is not known."""
        for answer in answers:
            if answer < 0 and answer not in meanings:
                raise StoreUnreachable(f"{self.where}: error {answer}")
        return answers

    def _refused(
        self, names: Sequence[str], answers: Sequence[int], meanings: Mapping[int, str]
    ) -> Refused:
        """The objects with a negative answer, and what each means."""
        pairs = zip(names, self._checked(answers, meanings), strict=True)
        return {name: meanings[answer] for name, answer in pairs if answer < 0}


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where pieces of these sizes begin that lie end to end."""
    return [0, *accumulate(sizes)][:-1]


def _lots(sizes: Sequence[int], most: int) -> list[range]:
    """Neighbours that fit together into `most` bytes. Raises where one alone does not."""
    lots, first, total = list[range](), 0, 0
    for i, size in enumerate(sizes):
        if size > most:
            raise StoreUnreachable(
                f"an object of {size} bytes does not fit the {most} bytes that are registered"
                "\n\nhint: give the URL a larger stage=…"
            )
        if total + size > most:
            lots.append(range(first, i))
            first, total = i, 0
        total += size
    return [*lots, range(first, len(sizes))] if sizes else []
