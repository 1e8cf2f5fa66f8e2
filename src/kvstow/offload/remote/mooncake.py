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
    Arrived,
    Blob,
    Range,
    RangesArrived,
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
"""Registered memory that reads go through, and objects that lie elsewhere when they are put."""

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
        self._lent: list[Bytes] = []
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

    def memory(self, nbytes: int) -> Bytes:
        self._lent.append(self._registered(nbytes).memory)
        return self._lent[-1]

    def put(self, blobs: Sequence[Blob]) -> Refused:
        near = [(blob, blob.data.ctypes.data) for blob in blobs if self._is_lent(blob.data)]
        far = [blob for blob in blobs if not self._is_lent(blob.data)]
        refused: Refused = {}
        with self._stage() as stage:
            if near:
                refused |= self._put(near)
            for lot in _lots([blob.data.nbytes for blob in far], self._stage_bytes):
                refused |= self._put(_copied([far[i] for i in lot], stage))
        return refused

    def _is_lent(self, memory: Bytes) -> bool:
        return any(memory.base is lent or memory is lent for lent in self._lent)

    def _put(self, placed: Sequence[tuple[Blob, int]]) -> Refused:
        """Send blobs from registered addresses."""
        names = [blob.name for blob, _ in placed]
        keys = [self._prefix + name for name in names]
        places, sizes = [at for _, at in placed], [blob.data.nbytes for blob, _ in placed]
        with self._putting:
            answers = self._store.batch_put_from(keys, places, sizes)
        return self._refused(names, answers, NOT_MADE)

    def get(self, names: Sequence[str], most: int, arrived: Arrived) -> None:
        for lot in _lots([most] * len(names), self._stage_bytes):
            keys = [self._prefix + names[i] for i in lot]
            starts = [i * most for i in range(len(keys))]
            with self._stage() as stage:
                places = [stage.address + start for start in starts]
                with self._getting:
                    answers = self._store.batch_get_into(keys, places, [most] * len(keys))
                got = self._copies.copied(stage.memory[: most * len(keys)])
            self._checked(answers, NOT_READ)
            for number, start, answer in zip(lot, starts, answers, strict=True):
                arrived(number, got[start : start + answer] if answer >= 0 else None)

    def get_ranges(
        self, wanted: Sequence[tuple[str, Sequence[Range]]], arrived: RangesArrived
    ) -> None:
        sizes = [sum(end - start for start, end in ranges) for _, ranges in wanted]
        for lot in _lots(sizes, self._stage_bytes):
            found = self._ranges_of([wanted[i] for i in lot])
            for number, parts in zip(lot, found, strict=True):
                arrived(number, parts)

    def _ranges_of(self, wanted: Sequence[tuple[str, Sequence[Range]]]) -> list[list[Bytes] | None]:
        at, places = 0, list[list[int]]()
        for _, ranges in wanted:
            places.append([])
            for start, end in ranges:
                places[-1].append(at)
                at += end - start
        keys = [self._prefix + name for name, _ in wanted]
        starts = [[start for start, _ in ranges] for _, ranges in wanted]
        sizes = [[end - start for start, end in ranges] for _, ranges in wanted]
        with self._stage() as stage:
            with self._getting:
                (answers,) = self._store.get_into_ranges(
                    [stage.address], [keys], [places], [starts], [sizes]
                )
            got = self._copies.copied(stage.memory[:at])
        found: list[list[Bytes] | None] = []
        for mine, answer in zip(places, answers, strict=True):
            missing = any(
                size < 0 and size != OTHER_SIZE for size in self._checked(answer, NOT_READ)
            )
            parts = [
                got[start : start + max(size, 0)] for start, size in zip(mine, answer, strict=True)
            ]
            found.append(None if missing else parts)
        return found

    def exists(self, names: Sequence[str]) -> Bools:
        answers = self._store.batch_is_exist([self._prefix + name for name in names])
        return np.array(self._checked(answers, NOT_READ), np.int64) == 1

    def delete(self, names: Sequence[str]) -> Refused:
        answers = self._store.batch_remove([self._prefix + name for name in names], True)
        known = [0 if answer == NOT_FOUND else answer for answer in answers]
        return self._refused(names, known, NOT_REMOVED)

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

    def _checked(self, answers: Sequence[int], known: Container[int]) -> Sequence[int]:
        """The answers; StoreUnreachable for a negative one that is not known."""
        for answer in answers:
            if answer < 0 and answer not in known:
                raise StoreUnreachable(f"{self.where}: error {answer}")
        return answers

    def _refused(
        self, names: Sequence[str], answers: Sequence[int], known: Mapping[int, str]
    ) -> Refused:
        """The objects with a negative answer, and what each means."""
        pairs = zip(names, self._checked(answers, known), strict=True)
        return {name: known[answer] for name, answer in pairs if answer < 0}


def _copied(blobs: Sequence[Blob], stage: _Registered) -> list[tuple[Blob, int]]:
    """Blobs with their addresses in a stage that they fit into."""
    at, placed = 0, list[tuple[Blob, int]]()
    for blob in blobs:
        stage.memory[at : at + blob.data.nbytes] = blob.data
        placed.append((blob, stage.address + at))
        at += blob.data.nbytes
    return placed


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
