"""The file layer: whole operations on plain files, direct where the file system allows it.

Everything that a disk tier does to data files goes through one `Files`, so that faults can be
injected underneath (`kvstow.testing.faulty`).
"""

import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

BLOCK = 4096
"""Offsets, lengths and memory of direct I/O are multiples of it."""

Bytes = npt.NDArray[np.uint8]


def aligned(nbytes: int) -> Bytes:
    """Zeroed memory that direct I/O accepts: it starts on a page."""
    return np.frombuffer(mmap.mmap(-1, max(1, nbytes)), np.uint8)[:nbytes]


def is_aligned(memory: Bytes) -> bool:
    """Whether direct I/O accepts this memory."""
    return len(memory) % BLOCK == 0 and memory.__array_interface__["data"][0] % BLOCK == 0


def behind(parts: Sequence[Bytes], nbytes: int) -> list[Bytes]:
    """What is left of the parts after their first `nbytes` bytes."""
    if not nbytes:
        return list(parts)
    left: list[Bytes] = []
    for part in parts:
        if nbytes < len(part):
            left.append(part[nbytes:])
        nbytes = max(0, nbytes - len(part))
    return left


class Files:
    """Data files of a store."""

    def open(self, path: Path, *, create: bool = False) -> int:
        """A descriptor for reading and writing, past the page cache where that works."""
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        try:
            return os.open(path, flags | os.O_DIRECT, 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        # A file system without direct I/O refuses only after it has created the file.
        return os.open(path, flags & ~os.O_EXCL, 0o644)

    def allocate(self, fd: int, nbytes: int) -> None:
        """Set disk space aside; raises `OSError` (ENOSPC) where there is not enough."""
        os.posix_fallocate(fd, 0, nbytes)

    def read(self, fd: int, parts: Sequence[Bytes], offset: int) -> int:
        """Fill the parts, one after the other; how many bytes there were before the end."""
        total = sum(len(part) for part in parts)
        done = 0
        while done < total:
            count = os.preadv(fd, [part.data for part in behind(parts, done)], offset + done)
            if count == 0:
                break
            done += count
        return done

    def write(self, fd: int, parts: Sequence[Bytes], offset: int) -> None:
        """Write the parts, one after the other, all of them."""
        total = sum(len(part) for part in parts)
        done = 0
        while done < total:
            done += os.pwritev(fd, [part.data for part in behind(parts, done)], offset + done)

    def sync(self, fd: int) -> None:
        """What was written is on the medium when this returns."""
        os.fdatasync(fd)

    def sync_directory(self, path: Path) -> None:
        """Names in the directory are on the medium when this returns."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def free(self, path: Path) -> int:
        """Bytes that the file system of a directory has left for us."""
        left = os.statvfs(path)
        return left.f_bavail * left.f_frsize

    def size(self, path: Path) -> int | None:
        """Bytes of the file; None where there is no such file."""
        try:
            return path.stat().st_size
        except FileNotFoundError:
            return None

    def remove(self, path: Path) -> None:
        """The file is gone, whether it was there or not."""
        path.unlink(missing_ok=True)

    def close(self, fd: int) -> None:
        os.close(fd)
