"""A file layer that fails on purpose: errors, silent tears, flipped bits, power cuts.

Ships with the library so that whoever embeds a store can see what it does when a disk dies.
"""

import errno
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np

from kvstow.offload.disk.files import BLOCK, Bytes, Files, aligned, behind


@dataclass(frozen=True, slots=True)
class Fails:
    """The operation raises `OSError` with this number, after doing `done` of its bytes."""

    number: int = errno.EIO
    done: int = 0


@dataclass(frozen=True, slots=True)
class Tears:
    """The write ends after `done` bytes and says that all went well."""

    done: int


@dataclass(frozen=True, slots=True)
class Flips:
    """The read returns this bit of its bytes turned over."""

    bit: int


Fault = Fails | Tears | Flips


@dataclass(slots=True)
class _Unsynced:
    fd: int
    offset: int
    before: Bytes


class FaultyFiles(Files):
    """Real files; `fault(operation, count)` says what goes wrong with the n-th operation.

    Operations are "open", "allocate", "deallocate", "read", "write", "sync". With
    `keep_unsynced`, `cut()` does what a power cut may do: any sector written since the last
    sync may have its old bytes again.
    """

    def __init__(
        self,
        fault: Callable[[str, int], Fault | None] = lambda operation, count: None,
        *,
        keep_unsynced: bool = False,
    ) -> None:
        self.fault = fault
        self.counts: dict[str, int] = {}
        self._keep = keep_unsynced
        self._unsynced: list[_Unsynced] = []
        self._lock = Lock()

    def _next(self, operation: str) -> Fault | None:
        with self._lock:
            count = self.counts.get(operation, 0)
            self.counts[operation] = count + 1
        return self.fault(operation, count)

    def _raise_if_failing(self, operation: str) -> None:
        fault = self._next(operation)
        if isinstance(fault, Fails):
            raise OSError(fault.number, os.strerror(fault.number))

    def open(self, path: Path, *, create: bool = False) -> int:
        self._raise_if_failing("open")
        return super().open(path, create=create)

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        self._raise_if_failing("allocate")
        super().allocate(fd, offset, nbytes)

    def deallocate(self, fd: int, offset: int, nbytes: int) -> None:
        self._raise_if_failing("deallocate")
        super().deallocate(fd, offset, nbytes)

    def read(self, fd: int, parts: Sequence[Bytes], offset: int) -> int:
        fault = self._next("read")
        if isinstance(fault, Fails):
            raise OSError(fault.number, os.strerror(fault.number))
        count = super().read(fd, parts, offset)
        match fault:
            case Flips(bit):
                _flip(parts, bit)
                return count
            case Tears(done):
                return min(done, count)
            case None:
                return count

    def write(self, fd: int, parts: Sequence[Bytes], offset: int) -> None:
        fault = self._next("write")
        memory = aligned(sum(len(part) for part in parts))
        memory[:] = np.concatenate(parts)
        if self._keep:
            before = aligned(len(memory))
            super().read(fd, [before], offset)
            with self._lock:
                self._unsynced.append(_Unsynced(fd, offset, before))
        match fault:
            case Fails(_, done) | Tears(done):
                memory = memory[: done // BLOCK * BLOCK]
            case Flips(bit):
                _flip([memory], bit)
            case None:
                pass
        super().write(fd, [memory], offset)
        if isinstance(fault, Fails):
            raise OSError(fault.number, os.strerror(fault.number))

    def sync(self, fd: int) -> None:
        self._raise_if_failing("sync")
        super().sync(fd)
        with self._lock:
            self._unsynced = [u for u in self._unsynced if u.fd != fd]

    def cut(self, seed: int) -> int:
        """Lose unsynced sectors at random; how many were lost."""
        dice = random.Random(seed)
        lost = 0
        for write in reversed(self._unsynced):
            for start in range(0, len(write.before), BLOCK):
                if dice.random() < 0.5:
                    sector = write.before[start : start + BLOCK]
                    super().write(write.fd, [sector], write.offset + start)
                    lost += 1
        self._unsynced.clear()
        return lost


def _flip(parts: Sequence[Bytes], bit: int) -> None:
    """Turn over one bit of the parts, counted from their start, modulo their length."""
    byte = bit // 8 % sum(len(part) for part in parts)
    behind(parts, byte)[0][0] ^= 1 << bit % 8
