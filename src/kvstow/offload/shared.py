"""Shared host arenas: parts of one name, each with rows of one layout and one writer at a time.

    /dev/shm/NAME.0.rows  NAME.0.board     rank 0
    /dev/shm/NAME.1.rows  NAME.1.board     rank 1
    …

Whoever writes a part holds an exclusive `flock` on its board. The system ends it with the
process, however that ends, so a part whose writer died is there for the next process of the same
layout, with all rows that were whole.
"""

import fcntl
import mmap
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvstow.errors import StoreError
from kvstow.memory.allocate import shared_path
from kvstow.memory.arena import Arena
from kvstow.offload.board import Board, check_order
from kvstow.plan.layout import Layout
from kvstow.plan.manifest import encode
from kvstow.plan.view import align_up


@dataclass(frozen=True, slots=True)
class Part:
    """A part that this process writes, until `close`."""

    name: str
    """Of the part, as in NAME.0"""
    board: Board
    lock: int
    """The descriptor that holds the lock."""

    def arena(self, *, pinned: bool) -> Arena:
        return Arena.attach(self.board.layout, f"{self.name}.rows", pinned=pinned)

    def close(self) -> None:
        """Let another process write the part; what is in it stays."""
        _unlock(self.lock)


def opened(name: str, layout: Layout) -> Part:
    """A part of `name` for this layout: one that nobody writes any more, or a new one."""
    check_order(platform.machine())
    number = 0
    for number, path in parts(name):
        part = _taken(path, f"{name}.{number}", layout)
        if part is not None:
            return part
    while (part := _made(f"{name}.{number}", layout)) is None:
        number += 1
    return part


def parts(name: str) -> Iterator[tuple[int, Path]]:
    """The numbers and boards of all parts of a name, ascending."""
    folder = shared_path(f"{name}.0.board").parent
    pattern = re.compile(re.escape(name) + r"\.(\d+)\.board")
    found = [(int(match[1]), folder / match[0])
             for file in os.listdir(folder) if (match := pattern.fullmatch(file))]  # fmt: skip
    return iter(sorted(found))


def remove(name: str) -> int:
    """Remove the parts that nobody writes; how many. Who reads one keeps its memory."""
    count = 0
    for number, path in parts(name):
        lock = _locked(path)
        if lock is not None:
            _unlink(f"{name}.{number}")
            _unlock(lock)
            count += 1
    return count


def _unlink(part: str) -> None:
    for end in ("rows", "board"):
        shared_path(f"{part}.{end}").unlink(missing_ok=True)


def _unlock(fd: int) -> None:
    """Give the lock up, though a mapping may have the file open as well."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _locked(path: Path, *, create: bool = False) -> int | None:
    """A descriptor that holds the file's lock; None where somebody else does, or no file is."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_nlink:  # not removed since it was opened
            return fd
    except BlockingIOError:
        pass
    os.close(fd)
    return None


def _taken(path: Path, part: str, layout: Layout) -> Part | None:
    """The part that another process of this layout left; None where it is none."""
    lock = _locked(path)
    if lock is None:
        return None
    board = _board(lock)
    rows = shared_path(f"{part}.rows")
    if board is None or board.manifest != encode(layout) or not rows.exists():
        _unlock(lock)
        return None
    return Part(part, board, lock)


def _made(part: str, layout: Layout) -> Part | None:
    """A new part; None where there is one of that number."""
    path = shared_path(f"{part}.board")
    lock = _locked(path, create=True)
    if lock is None:
        return None
    if _board(lock) is not None:
        _unlock(lock)
        return None
    try:
        os.ftruncate(lock, 0)  # what a process left that died while it made one
        _make_rows(shared_path(f"{part}.rows"), align_up(layout.nbytes, mmap.PAGESIZE))
        Board.write_new(lock, layout)
    except OSError as error:
        _unlink(part)
        _unlock(lock)
        raise StoreError(
            f"shared host tier {part!r}: {layout.nbytes} bytes: {error.strerror}\n\n"
            f"hint: {path.parent} must have room for them (docker: --shm-size)"
        ) from error
    return Part(part, Board(lock, writable=True), lock)


def _make_rows(path: Path, nbytes: int) -> None:
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    finally:
        os.close(fd)


def _board(fd: int) -> Board | None:
    try:
        return Board(fd, writable=True)
    except ValueError:
        return None
