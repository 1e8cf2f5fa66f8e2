"""Mooncake Store: the only module that imports it.

Rows lie in the memory of many machines and go over RDMA or TCP. It is a cache and nothing else:
a master that is started again knows no keys, and for some seconds after the owner of a copy has
died a put of the same key is answered with success, and so is a put of a key that somebody else is
writing at that moment. All of these are misses to us, since what counts is what a read returns.

Mooncake answers a batch with a number per object. Those below are about that object; every other
negative one is about the store.
"""

import ctypes
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, cast

import numpy as np

from kvstow.errors import BackendMissing
from kvstow.offload.remote.clients.base import (
    BUSY,
    NO_ROOM,
    Blob,
    Range,
    Refused,
    StoreUnreachable,
)
from kvstow.offload.tier import Bools, Bytes

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

STAGE_BYTES = 64 << 20
"""Registered memory that reads and writes go through."""


@dataclass(slots=True, eq=False)
class _Stage:
    """Registered memory that one call at a time uses."""

    memory: Bytes
    address: int
    lock: Lock = field(default_factory=Lock)


class MooncakeClient:
    """Objects whose names begin with one prefix, on the segments that a master knows."""

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
        self._out, self._in = (self._registered(stage_bytes // 2) for _ in range(2))

    def _registered(self, nbytes: int) -> "_Stage":
        memory: Bytes = np.zeros(nbytes, np.uint8)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory.data))
        if status := self._store.register_buffer(address, nbytes):
            raise StoreUnreachable(f"{self.where}: {nbytes} bytes not registered: {status}")
        return _Stage(memory, address)

    def put(self, blobs: Sequence[Blob]) -> Refused:
        answers: list[int] = []
        with self._out.lock:
            for lot in _lots([blob.data.nbytes for blob in blobs], self._out.memory.nbytes):
                names, places, sizes = self._placed([blobs[i] for i in lot])
                answers += self._store.batch_put_from(names, places, sizes)
        return self._refused([blob.name for blob in blobs], answers, NOT_MADE)

    def _placed(self, blobs: Sequence[Blob]) -> tuple[list[str], list[int], list[int]]:
        """Blobs copied into the stage: their names, addresses and sizes."""
        at, places = 0, list[int]()
        for blob in blobs:
            self._out.memory[at : at + blob.data.nbytes] = blob.data
            places.append(self._out.address + at)
            at += blob.data.nbytes
        names = [self._prefix + blob.name for blob in blobs]
        return names, places, [blob.data.nbytes for blob in blobs]

    def get(self, names: Sequence[str], most: int) -> list[Bytes | None]:
        found: list[Bytes | None] = []
        with self._in.lock:
            for lot in _lots([most] * len(names), self._in.memory.nbytes):
                keys = [self._prefix + names[i] for i in lot]
                starts = [i * most for i in range(len(keys))]
                places = [self._in.address + start for start in starts]
                answers = self._store.batch_get_into(keys, places, [most] * len(keys))
                got = self._in.memory[: most * len(keys)].copy()
                found += [
                    got[start : start + answer] if answer >= 0 else None
                    for start, answer in zip(starts, self._checked(answers, NOT_READ), strict=True)
                ]
        return found

    def get_ranges(self, wanted: Sequence[tuple[str, Sequence[Range]]]) -> list[list[Bytes] | None]:
        sizes = [sum(end - start for start, end in ranges) for _, ranges in wanted]
        found: list[list[Bytes] | None] = []
        with self._in.lock:
            for lot in _lots(sizes, self._in.memory.nbytes):
                found += self._ranges_of([wanted[i] for i in lot])
        return found

    def _ranges_of(self, wanted: Sequence[tuple[str, Sequence[Range]]]) -> list[list[Bytes] | None]:
        at, places = 0, list[list[int]]()
        for _, ranges in wanted:
            places.append([])
            for start, end in ranges:
                places[-1].append(at)
                at += end - start
        answers = self._store.get_into_ranges(
            [self._in.address],
            [[self._prefix + name for name, _ in wanted]],
            [places],
            [[[start for start, _ in ranges] for _, ranges in wanted]],
            [[[end - start for start, end in ranges] for _, ranges in wanted]],
        )[0]
        got = self._in.memory[:at].copy()
        found: list[list[Bytes] | None] = []
        for starts, sizes in zip(places, answers, strict=True):
            missing = any(
                size < 0 and size != OTHER_SIZE for size in self._checked(sizes, NOT_READ)
            )
            parts = [
                got[start : start + max(size, 0)] for start, size in zip(starts, sizes, strict=True)
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
        with self._in.lock, self._out.lock:
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
