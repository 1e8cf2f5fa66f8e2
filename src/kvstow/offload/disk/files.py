"""The file layer: whole operations on plain files.

Everything that a disk tier does to row files goes through one `Files`, so that faults can be
injected underneath (`tests/faulty.py`). Files of a store are this user's and closed to
others (0600, in a directory of 0700); anything else is refused, links are not followed.
"""

import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstow.errors import StoreError

BLOCK = 4096
"""Offsets, lengths and memory of direct I/O are multiples of it."""

Bytes = npt.NDArray[np.uint8]

_libc = ctypes.CDLL(None, use_errno=True)

LOST = frozenset(
    {
        errno.EIO,
        errno.ENOENT,
        errno.EBADMSG,
        errno.EUCLEAN,
        errno.EILSEQ,
        errno.ENODATA,
        errno.EREMOTEIO,
    }
)
"""Errors that say that bytes are gone. All others (no descriptors, no memory, no permission)
may pass: what could not be read for one of them is still there."""


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


@contextmanager
def store_errors(path: Path) -> Generator[None]:
    """What the system refuses becomes a StoreError that names the store."""
    try:
        yield
    except OSError as error:
        where = "" if error.filename is None else f" ({error.filename})"
        raise StoreError(f"store {path}: {error.strerror or error}{where}") from error


def make_directory(path: Path) -> None:
    """The directory of a store: made with mode 0700, or there, ours, and not open to writers.

    Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        facts = path.stat()
        if not stat.S_ISDIR(facts.st_mode):
            number = errno.ENOTDIR
            raise NotADirectoryError(number, os.strerror(number), str(path)) from None
        _check_owner(facts, path)
        if facts.st_mode & 0o022:
            mode = stat.S_IMODE(facts.st_mode)
            raise PermissionError(
                errno.EPERM, f"others may write to it (mode {mode:#o}); hint: chmod 700", str(path)
            ) from None


def open_own(path: str | Path, flags: int) -> int:
    """A descriptor of an ordinary file that is ours alone; one that is made has mode 0600.

    PermissionError, with the reason, for links, other users' files, and files that others may
    open. Never waits, whatever lies there.
    """
    more = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | more, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise PermissionError(errno.EPERM, "it is a link", str(path)) from None
    try:
        _check_file(os.fstat(fd), path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_file(facts: os.stat_result, path: str | Path) -> None:
    if not stat.S_ISREG(facts.st_mode):
        raise PermissionError(errno.EPERM, "it is no ordinary file", str(path))
    _check_owner(facts, path)
    if facts.st_mode & 0o077:
        mode = stat.S_IMODE(facts.st_mode)
        raise PermissionError(
            errno.EPERM, f"others may open it (mode {mode:#o}); hint: chmod 600", str(path)
        )


def _check_owner(facts: os.stat_result, path: str | Path) -> None:
    if facts.st_uid != os.geteuid():
        raise PermissionError(
            errno.EPERM, f"it belongs to user {facts.st_uid}, not {os.geteuid()}", str(path)
        )


class Files:
    """Row files of a store. Methods raise OSError."""

    def open(self, path: str, *, direct: bool) -> int:
        """A descriptor for reading, past the page cache where `direct` and that works."""
        return _open(path, os.O_RDONLY, direct=direct)

    def create(self, path: str) -> int:
        """A descriptor for writing a file that was not there, past the page cache where that
        works."""
        return _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, direct=True)

    def read(self, fd: int, parts: Sequence[Bytes], offset: int) -> int:
        """Fill the parts, one after the other; how many bytes there were before the end."""
        total = sum(map(len, parts))
        done = 0
        while done < total:
            count = os.preadv(fd, [part.data for part in behind(parts, done)], offset + done)
            if count == 0:
                break
            done += count
        return done

    def write(self, fd: int, parts: Sequence[Bytes]) -> None:
        """Write the parts from the file's start on, one after the other, all of them."""
        total = sum(map(len, parts))
        done = 0
        while done < total:
            done += os.pwritev(fd, [part.data for part in behind(parts, done)], done)

    def touch(self, fd: int, nanoseconds: int) -> None:
        """The file was used at that time."""
        os.utime(fd, ns=(nanoseconds, nanoseconds))

    def sync(self, paths: Sequence[str]) -> None:
        """What was written to these files, all of one file system, is on the medium when this
        returns. Several are synced as one: a file system commits once, not once per file."""
        fd = open_own(paths[0], os.O_RDONLY)
        try:
            if len(paths) == 1:
                os.fdatasync(fd)
            elif _libc.syncfs(fd):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
        finally:
            os.close(fd)

    def link(self, source: str, target: str) -> None:
        """One more name for a file."""
        os.link(source, target)

    def rename(self, source: str, target: str) -> None:
        """Another name for a file; what had it loses it, all in one step."""
        os.rename(source, target)

    def remove(self, path: str) -> None:
        """Take a name away. FileNotFoundError where it is not there."""
        os.unlink(path)

    def close(self, fd: int) -> None:
        os.close(fd)


class MemoryFiles(Files):
    """Row files in memory, which no power cut outlives: nothing is to be synced."""

    def sync(self, paths: Sequence[str]) -> None:
        """Nothing to wait for."""


def _open(path: str, flags: int, *, direct: bool) -> int:
    try:
        return open_own(path, flags | (os.O_DIRECT if direct else 0))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # A file system without direct I/O refuses only after it has created the file.
    return open_own(path, flags & ~os.O_EXCL)
