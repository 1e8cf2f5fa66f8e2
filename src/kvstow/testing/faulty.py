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
class _Write:
    path: Path
    offset: int
    before: Bytes


class Unsynced:
    """What a power cut may take back: writes, lengths and names since they were last synced.

    Several `FaultyFiles` may share one, as processes share a disk.
    """

    def __init__(self) -> None:
        self._writes: list[_Write] = []
        self._lengths: dict[Path, int] = {}
        self._made: set[Path] = set()
        self._removed: dict[Path, bytes] = {}
        self._lock = Lock()

    def written(self, path: Path, offset: int, before: Bytes) -> None:
        """Bytes were written where these were before."""
        with self._lock:
            self._writes.append(_Write(path, offset, before))

    def lengthened(self, path: Path, before: int) -> None:
        """A file has become longer than it was before."""
        with self._lock:
            self._lengths.setdefault(path, before)

    def made(self, path: Path) -> None:
        """A file has a new name in its directory."""
        with self._lock:
            self._made.add(path)

    def removed(self, path: Path, content: bytes) -> None:
        """A file with this content has lost its name."""
        self.synced(path)
        with self._lock:
            if path in self._made:  # there was no such file on the medium
                self._made.discard(path)
            else:
                self._removed.setdefault(path, content)

    def synced(self, path: Path) -> None:
        """What the file holds is on the medium."""
        with self._lock:
            self._writes = [write for write in self._writes if write.path != path]
            self._lengths.pop(path, None)

    def names_synced(self, directory: Path) -> None:
        """Names in the directory are on the medium."""
        with self._lock:
            self._made = {path for path in self._made if path.parent != directory}
            self._removed = {p: c for p, c in self._removed.items() if p.parent != directory}

    def cut(self, seed: int) -> int:
        """Take back any part of it, at random; how many sectors, lengths and names that were.

        Nobody may use the files meanwhile, nor those that have them open afterwards.
        """
        dice = random.Random(seed)
        lost = sum(_undone(write, dice) for write in reversed(self._writes))
        for path, before in self._lengths.items():
            if path.exists() and dice.random() < 0.5:
                os.truncate(path, before)
                lost += 1
        for path in sorted(self._made):
            if path.exists() and dice.random() < 0.5:
                path.unlink()
                lost += 1
        for path, content in self._removed.items():
            if not path.exists() and dice.random() < 0.5:
                path.touch(mode=0o600)
                path.write_bytes(content)
                lost += 1
        for kept in (self._writes, self._lengths, self._made, self._removed):
            kept.clear()
        return lost


def _undone(write: _Write, dice: random.Random) -> int:
    """Give some sectors of a write their old bytes again; how many."""
    starts = range(0, len(write.before), BLOCK)
    lost = [start for start in starts if dice.random() < 0.5]
    if not write.path.exists():
        return 0
    with write.path.open("r+b", buffering=0) as file:
        for start in lost:
            file.seek(write.offset + start)
            file.write(write.before[start : start + BLOCK].tobytes())
    return len(lost)


class FaultyFiles(Files):
    """Real files; `fault(operation, count)` says what goes wrong with the n-th operation.

    Operations are "open", "allocate", "deallocate", "read", "write", "sync", "sync_directory",
    "remove". With `keep_unsynced`, `cut()` does what a power cut may do: any sector written, any
    length and any name since the last sync may be as before. Give `unsynced` where several share
    a disk.
    """

    def __init__(
        self,
        fault: Callable[[str, int], Fault | None] = lambda operation, count: None,
        *,
        keep_unsynced: bool = False,
        unsynced: Unsynced | None = None,
    ) -> None:
        self.fault = fault
        self.counts: dict[str, int] = {}
        self.unsynced = unsynced or (Unsynced() if keep_unsynced else None)
        self._paths: dict[int, Path] = {}
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
        fd = super().open(path, create=create)
        self._paths[fd] = path
        if create and self.unsynced is not None:
            self.unsynced.made(path)
        return fd

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        self._raise_if_failing("allocate")
        before = os.fstat(fd).st_size
        super().allocate(fd, offset, nbytes)
        if self.unsynced is not None and before < offset + nbytes:
            self.unsynced.lengthened(self._paths[fd], before)

    def deallocate(self, fd: int, offset: int, nbytes: int) -> None:
        self._raise_if_failing("deallocate")
        self._keep(fd, offset, nbytes)
        super().deallocate(fd, offset, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        self._keep(fd, nbytes, max(0, os.fstat(fd).st_size - nbytes))
        super().truncate(fd, nbytes)

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
        self._keep(fd, offset, len(memory))
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

    def _keep(self, fd: int, offset: int, nbytes: int) -> None:
        """Remember bytes that are about to change."""
        if self.unsynced is not None and nbytes:
            before = aligned(nbytes)
            count = super().read(fd, [before], offset)
            self.unsynced.written(self._paths[fd], offset, before[:count])

    def sync(self, fd: int) -> None:
        self._raise_if_failing("sync")
        super().sync(fd)
        if self.unsynced is not None:
            self.unsynced.synced(self._paths[fd])

    def sync_directory(self, path: Path) -> None:
        self._raise_if_failing("sync_directory")
        super().sync_directory(path)
        if self.unsynced is not None:
            self.unsynced.names_synced(path)

    def remove(self, path: Path) -> None:
        self._raise_if_failing("remove")
        if self.unsynced is not None and path.exists():
            self.unsynced.removed(path, path.read_bytes())
        super().remove(path)

    def close(self, fd: int) -> None:
        self._paths.pop(fd, None)
        super().close(fd)

    def cut(self, seed: int) -> int:
        """Lose what is not synced, at random; how many sectors, lengths and names were lost."""
        return self.unsynced.cut(seed) if self.unsynced is not None else 0


def _flip(parts: Sequence[Bytes], bit: int) -> None:
    """Turn over one bit of the parts, counted from their start, modulo their length."""
    byte = bit // 8 % sum(len(part) for part in parts)
    behind(parts, byte)[0][0] ^= 1 << bit % 8
