"""A file layer that fails on purpose: errors, silent tears, flipped bits, power cuts."""

import errno
import os
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np

from kvstow.offload.disk.files import BLOCK, Bytes, Files, aligned, behind
from kvstow.plan.view import align_up


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


class Unsynced:
    """What a power cut may take back: bytes and names since they were last synced.

    Several `FaultyFiles` may share one, as processes share a disk.
    """

    def __init__(self) -> None:
        self._written: dict[int, int] = {}
        """Files by inode that are not on the medium, and how long they are."""
        self._names: list[tuple[str, int | None, bytes]] = []
        """Names that have changed, and what they stood for before: an inode and its bytes."""
        self._lock = Lock()

    def written(self, path: str) -> None:
        """A file has new bytes."""
        facts = os.stat(path)
        with self._lock:
            self._written[facts.st_ino] = facts.st_size

    def renamed(self, path: str) -> None:
        """A name is about to stand for something else, or for nothing."""
        with suppress(OSError), self._lock:
            number = os.stat(path).st_ino if os.path.exists(path) else None
            self._names.append((path, number, Path(path).read_bytes() if number else b""))

    def synced(self, paths: Sequence[str]) -> None:
        """What was written to one file, or with several to any, is on the medium; of one file
        that is not said of its name."""
        with self._lock:
            if len(paths) == 1:
                self._written.pop(os.stat(paths[0]).st_ino, None)
            else:
                self._written.clear()
                self._names.clear()

    def cut(self, seed: int) -> int:
        """Take back any part of it, at random; how many sectors, lengths and names that were.

        Nobody may use the files meanwhile, nor those that have them open afterwards.
        """
        dice = random.Random(seed)
        lost = 0
        files: dict[int, str] = {}
        for path, number, content in reversed(self._names):
            if os.path.exists(path):
                files[os.stat(path).st_ino] = path
            if dice.random() < 0.5 and Path(path).parent.is_dir():
                lost += 1
                with suppress(FileNotFoundError):
                    os.unlink(path)
                if number is not None:
                    Path(path).touch(mode=0o600)
                    Path(path).write_bytes(content)
        for number in self._written:
            path = files.get(number, "")
            if os.path.exists(path) and os.stat(path).st_ino == number:
                lost += _unwritten(path, dice)
        self._written.clear()
        self._names.clear()
        return lost


def _unwritten(path: str, dice: random.Random) -> int:
    """Sectors that never reached the medium are zeros, or the file ends before them."""
    data = bytearray(Path(path).read_bytes())
    starts = [at for at in range(0, len(data), BLOCK) if dice.random() < 0.5]
    for at in starts:
        data[at : at + BLOCK] = bytes(len(data[at : at + BLOCK]))
    if dice.random() < 0.3:
        del data[dice.randrange(len(data) + 1) :]
    Path(path).write_bytes(data)
    return len(starts)


class FaultyFiles(Files):
    """Real files; `fault(operation, count)` says what goes wrong with the n-th operation.

    Operations are "open", "create", "read", "write", "touch", "sync", "link", "rename", "remove".
    With `keep_unsynced`, `cut()` does what a power cut may do: any sector and any name written
    since the last sync may be as before. Give `unsynced` where several share a disk.
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
        self._paths: dict[int, str] = {}
        self._lock = Lock()

    def _next(self, operation: str) -> Fault | None:
        with self._lock:
            count = self.counts.get(operation, 0)
            self.counts[operation] = count + 1
        fault = self.fault(operation, count)
        if isinstance(fault, Fails) and operation != "write":
            raise OSError(fault.number, os.strerror(fault.number))
        return fault

    def open(self, path: str, *, direct: bool) -> int:
        self._next("open")
        fd = super().open(path, direct=direct)
        self._paths[fd] = path
        return fd

    def create(self, path: str) -> int:
        self._next("create")
        fd = super().create(path)
        self._paths[fd] = path
        if self.unsynced is not None:
            self.unsynced.written(path)
        return fd

    def read(self, fd: int, parts: Sequence[Bytes], offset: int) -> int:
        fault = self._next("read")
        count = super().read(fd, parts, offset)
        match fault:
            case Flips(bit):
                _flip(parts, bit)
                return count
            case Tears(done):
                return min(done, count)
            case _:
                return count

    def write(self, fd: int, parts: Sequence[Bytes]) -> None:
        fault = self._next("write")
        memory = aligned(align_up(sum(len(part) for part in parts), BLOCK))
        memory[: sum(len(part) for part in parts)] = np.concatenate(parts)
        match fault:
            case Fails(_, done) | Tears(done):
                memory = memory[: done // BLOCK * BLOCK]
            case Flips(bit):
                _flip([memory], bit)
            case None:
                pass
        super().write(fd, [memory])
        if self.unsynced is not None:
            self.unsynced.written(self._paths[fd])
        if isinstance(fault, Fails):
            raise OSError(fault.number, os.strerror(fault.number))

    def touch(self, fd: int, nanoseconds: int) -> None:
        self._next("touch")
        super().touch(fd, nanoseconds)

    def sync(self, paths: Sequence[str]) -> None:
        self._next("sync")
        super().sync(paths)
        if self.unsynced is not None:
            self.unsynced.synced(paths)

    def link(self, source: str, target: str) -> None:
        self._next("link")
        self._keep_name(target)
        super().link(source, target)

    def rename(self, source: str, target: str) -> None:
        self._next("rename")
        self._keep_name(target)
        super().rename(source, target)

    def remove(self, path: str) -> None:
        self._next("remove")
        self._keep_name(path)
        super().remove(path)

    def _keep_name(self, path: str) -> None:
        if self.unsynced is not None:
            self.unsynced.renamed(path)

    def close(self, fd: int) -> None:
        self._paths.pop(fd, None)
        super().close(fd)

    def cut(self, seed: int) -> int:
        """Lose what is not synced, at random; how many sectors and names were lost."""
        return self.unsynced.cut(seed) if self.unsynced is not None else 0


def _flip(parts: Sequence[Bytes], bit: int) -> None:
    """Turn over one bit of the parts, counted from their start, modulo their length."""
    byte = bit // 8 % sum(len(part) for part in parts)
    behind(parts, byte)[0][0] ^= 1 << bit % 8
