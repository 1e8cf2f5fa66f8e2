"""The file layer: whole operations on plain files, direct where the file system allows it.

Everything that a disk tier does to data files goes through one `Files`, so that faults can be
injected underneath (`kvstow.testing.faulty`). Files of a store are this user's, closed to others
(0600, in a directory of 0700), and have one name; anything else is refused, links are not
followed.
"""

import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstow.errors import StoreError

BLOCK = 4096
"""Offsets, lengths and memory of direct I/O are multiples of it."""

Bytes = npt.NDArray[np.uint8]

_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2

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


def open_own(path: Path, flags: int, *, create: bool = False) -> int:
    """A descriptor of an ordinary file that is ours alone; made with mode 0600 where asked for.

    PermissionError, with the reason, for links, other users' files, files that others may open
    or that have a second name. Never waits, whatever lies there.
    """
    more = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_CREAT if create else 0)
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


def check_own(path: Path, *, create: bool = False) -> None:
    """PermissionError, as `open_own` raises it, unless a file is ours alone.

    It is not opened, not even to make it: whoever closes a file gives up all locks that the process
    has on it, those of SQLite included, and others then take the index for abandoned.
    """
    if create:
        with suppress(FileExistsError):
            os.mknod(path, stat.S_IFREG | 0o600)
    _check_file(os.lstat(path), path)


def _check_file(facts: os.stat_result, path: Path) -> None:
    if stat.S_ISLNK(facts.st_mode):
        raise PermissionError(errno.EPERM, "it is a link", str(path))
    if not stat.S_ISREG(facts.st_mode):
        raise PermissionError(errno.EPERM, "it is no ordinary file", str(path))
    _check_owner(facts, path)
    if facts.st_mode & 0o077:
        mode = stat.S_IMODE(facts.st_mode)
        raise PermissionError(
            errno.EPERM, f"others may open it (mode {mode:#o}); hint: chmod 600", str(path)
        )
    if facts.st_nlink > 1:
        raise PermissionError(errno.EPERM, f"it has {facts.st_nlink} names", str(path))


def _check_owner(facts: os.stat_result, path: Path) -> None:
    if facts.st_uid != os.geteuid():
        raise PermissionError(
            errno.EPERM, f"it belongs to user {facts.st_uid}, not {os.geteuid()}", str(path)
        )


class Files:
    """Data files of a store. Methods raise OSError."""

    def open(self, path: Path, *, create: bool = False) -> int:
        """A descriptor for reading and writing, past the page cache where that works."""
        flags = os.O_RDWR | (os.O_EXCL if create else 0)
        try:
            return open_own(path, flags | os.O_DIRECT, create=create)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        # A file system without direct I/O refuses only after it has created the file.
        return open_own(path, flags & ~os.O_EXCL, create=create)

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Set disk space aside for these bytes; the file reaches their end at least.

        Raises `OSError` (ENOSPC) where there is not enough.
        """
        os.posix_fallocate(fd, offset, nbytes)

    def deallocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Give the disk space of these bytes back; they read as zeros. The length stays."""
        mode = _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.fallocate64(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(nbytes)):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def truncate(self, fd: int, nbytes: int) -> None:
        """The file ends after so many bytes."""
        os.ftruncate(fd, nbytes)

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
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def free(self, path: Path) -> int:
        """Bytes that the file system of a directory has left for us."""
        left = os.statvfs(path)
        return left.f_bavail * left.f_frsize

    def total(self, path: Path) -> int:
        """Bytes of the whole file system of a directory."""
        facts = os.statvfs(path)
        return facts.f_blocks * facts.f_frsize

    def size(self, path: Path) -> int | None:
        """Bytes of the file; None where there is no such file."""
        try:
            return path.lstat().st_size
        except FileNotFoundError:
            return None

    def used(self, path: Path) -> int:
        """Disk space of the file's bytes; none where there is no such file."""
        try:
            facts = path.lstat()
        except FileNotFoundError:
            return 0
        return min(facts.st_size, facts.st_blocks * 512)

    def remove(self, path: Path) -> None:
        """The file is gone, whether it was there or not."""
        path.unlink(missing_ok=True)

    def close(self, fd: int) -> None:
        os.close(fd)
