"""Shared host arenas: parts of one name, each with rows of one layout and one writer at a time.

    /dev/shm/NAME.0.rows  NAME.0.index     rank 0
    /dev/shm/NAME.1.rows  NAME.1.index     rank 1
    …

Whoever writes a part holds an exclusive `flock` on its index. The system ends it with the
process, however that ends, so a part whose writer died is there for the next process of the same
layout, with all rows that were whole.

    NAME.0.rows    the arena
    NAME.0.index   header · manifest · one record per row · log

    header, little endian                       record, 64 bytes
      0  magic           8   "kvstowB1"           0  seq        8   even: the row is as stated
      8  num_records     8                        8  stamp      8   grows with every row kept
     16  log_size        8                       16  key_bytes  8   0: no row
     24  manifest_bytes  8                       24  key       32   zeros after key_bytes
     32  records_at      8                       56  zeros      8
     40  log_at          8
     64  head            8   records changed so far; the last `log_size` of them are in the log
     72  clock           8   stamps given so far
   4096  manifest            of the arena's layout

One process writes an index, many read it without a lock. A record whose seq is odd is being
changed, or names no row: the writer makes it odd before the row's bytes may change, and even after
they have. A reader compares seq and key before it uses the bytes, and seq again after. This leans
on stores becoming visible in their order, which x86-64 promises.
"""

import fcntl
import logging
import mmap
import os
import platform
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstow.errors import ArenaError, KvstowError, StoreError
from kvstow.memory.allocate import check_ours, open_shared, shared_path
from kvstow.memory.arena import Arena
from kvstow.offload.tier import MAX_KEY_BYTES
from kvstow.plan.layout import Layout
from kvstow.plan.manifest import decode, encode
from kvstow.plan.view import Ints, align_up

log = logging.getLogger("kvstow.offload")

MAGIC = b"kvstowB1"
HEADER_BYTES = 4096
_FIELDS = struct.Struct("<8sQQQQQ")
_HEAD, _CLOCK = 64, 72

RECORD = np.dtype(
    {
        "names": ["seq", "stamp", "key_bytes", "key"],
        "formats": ["<u8", "<u8", "<u8", ("u1", MAX_KEY_BYTES)],
        "offsets": [0, 8, 16, 24],
        "itemsize": 64,
    }
)

Records = npt.NDArray[np.void]


class UnfinishedIndex(ValueError):
    """A file that a process made, and died before it was a shared index."""


class SharedIndex:
    """The records and the log of one shared arena, mapped into this process."""

    def __init__(self, fd: int, *, writable: bool) -> None:
        """Map a shared index; ValueError where the file is none, UnfinishedIndex where not yet."""
        size = os.fstat(fd).st_size
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        if size < HEADER_BYTES:
            raise UnfinishedIndex(f"{size} bytes are no shared index")
        memory = mmap.mmap(fd, size, access=access)
        magic, count, log_size, manifest_bytes, records_at, log_at = _FIELDS.unpack_from(memory)
        if magic == bytes(8):
            raise UnfinishedIndex("the shared index has no header yet")
        if magic != MAGIC or log_at + 4 * log_size > size or not log_size:
            raise ValueError(f"a file that begins with {magic!r} is no shared index")
        self.manifest = memory[HEADER_BYTES : HEADER_BYTES + manifest_bytes]
        try:
            self.layout: Layout = decode(self.manifest)
        except KvstowError as error:
            raise ValueError(f"the manifest in the shared index: {error}") from error
        self._starts = starts(self.layout)
        if count != self._starts[-1]:
            raise ValueError(f"{count} records for {self._starts[-1]} rows")
        self.records: Records = np.frombuffer(memory, RECORD, count, records_at)
        self.seq: npt.NDArray[np.uint64] = self.records["seq"]
        self._counts = np.frombuffer(memory, "<u8", 2, _HEAD)
        self._log = np.frombuffer(memory, "<u4", log_size, log_at)

    @staticmethod
    def write_new(fd: int, layout: Layout) -> None:
        """Turn an empty file into a shared index without rows."""
        manifest = encode(layout)
        count = starts(layout)[-1]
        log_size = max(1024, 4 * count)
        records_at = align_up(HEADER_BYTES + len(manifest), HEADER_BYTES)
        log_at = records_at + count * RECORD.itemsize
        os.posix_fallocate(fd, 0, log_at + 4 * log_size)
        os.pwrite(fd, manifest, HEADER_BYTES)
        os.pwrite(
            fd, _FIELDS.pack(MAGIC, count, log_size, len(manifest), records_at, log_at), 0
        )  # last: before it, the file is no shared index

    @property
    def head(self) -> int:
        return int(self._counts[0])

    def numbers(self, group: int, rows: Ints) -> Ints:
        """The records of rows of a group."""
        return self._starts[group] + rows

    def located(self, number: int) -> tuple[int, int]:
        """Group and row of a record."""
        group = int(np.searchsorted(self._starts, number, side="right")) - 1
        return group, number - int(self._starts[group])

    # ── reading ───────────────────────────────────────────────────────────────────

    def changes(self, seen: int) -> Ints | None:
        """Records changed since the head was `seen`; None where nobody knows any more."""
        head, size = self.head, len(self._log)
        if head - seen > size:
            return None
        found = self._log[np.arange(seen, head) % size].astype(np.int64)
        return None if self.head - seen > size else np.unique(found)  # overwritten meanwhile

    def stated(self, numbers: Ints) -> tuple[list[bytes], Ints]:
        """The keys of those records that name a row now, and which they are."""
        seq = self.seq[numbers]  # before anything else of a record is looked at
        found = self.records[numbers]
        steady = (seq == self.seq[numbers]) & (seq % 2 == 0)
        named = steady & (found["key_bytes"] > 0) & (found["key_bytes"] <= MAX_KEY_BYTES)
        return keys_in(found[named]), numbers[named]

    # ── writing ───────────────────────────────────────────────────────────────────

    def publish(self, group: int, rows: Ints, keys: Sequence[bytes]) -> None:
        """Rows hold, from now on, what these keys name."""
        if not len(rows):
            return
        numbers = self.numbers(group, rows)
        self.seq[numbers] |= np.uint64(1)
        first = int(self._counts[1]) + 1
        self._counts[1] += len(rows)
        self.records["stamp"][numbers] = np.arange(first, first + len(rows))
        self.records["key"][numbers] = key_table(keys)
        self.records["key_bytes"][numbers] = [len(key) for key in keys]
        self.seq[numbers] += np.uint64(1)
        self._note(numbers)

    def withdraw(self, group: int, rows: Ints) -> None:
        """Rows hold nothing, from now on; their bytes may change when this returns."""
        if not len(rows):
            return
        numbers = self.numbers(group, rows)
        self.seq[numbers] |= np.uint64(1)
        self.records["key_bytes"][numbers] = 0
        self._note(numbers)

    def take_over(self) -> list[tuple[list[bytes], Ints]]:
        """Per group, the keys and rows that a writer before us left, the oldest first.

        Records that it left half-way name no row, and readers look at all records again.
        """
        every = np.arange(len(self.records))
        half_way = (self.seq % 2 == 1) & (self.records["key_bytes"] > 0)
        self.records["key_bytes"][half_way] = 0
        keys, numbers = self.stated(every)
        order = np.argsort(self.records["stamp"][numbers], kind="stable")
        group = np.searchsorted(self._starts, numbers, side="right") - 1
        self._counts[0] += len(self._log) + 1
        found: list[tuple[list[bytes], Ints]] = []
        for g in range(len(self.layout.groups)):
            mine = order[group[order] == g]
            found.append(([keys[i] for i in mine.tolist()], numbers[mine] - self._starts[g]))
        return found

    def _note(self, numbers: Ints) -> None:
        head = self.head
        self._log[np.arange(head, head + len(numbers)) % len(self._log)] = numbers
        self._counts[0] = head + len(numbers)


def starts(layout: Layout) -> Ints:
    """The first record of every group, and how many there are in all."""
    sizes = [layout.num_blocks(g) for g in range(len(layout.groups))]
    return np.cumsum([0, *sizes])


def key_table(keys: Sequence[bytes]) -> npt.NDArray[np.uint8]:
    """Keys as records have them, one per line."""
    padded = b"".join(key.ljust(MAX_KEY_BYTES, b"\0") for key in keys)
    return np.frombuffer(padded, np.uint8).reshape(-1, MAX_KEY_BYTES)


def keys_in(found: Records) -> list[bytes]:
    """The keys of a copy of records."""
    raw, lengths = found["key"].tobytes(), found["key_bytes"].tolist()
    return [
        raw[at : at + n] for at, n in zip(range(0, len(raw), MAX_KEY_BYTES), lengths, strict=True)
    ]


def check_order(machine: str) -> None:
    """Refuses machines that may show stores in another order than they were made in."""
    if machine not in ("x86_64", "AMD64"):
        raise StoreError(
            f"a shared host tier needs the memory order of x86-64, this is {machine}\n\n"
            "hint: leave it unshared, or share a disk tier in /dev/shm"
        )


@dataclass(frozen=True, slots=True)
class SharedPart:
    """A part that this process writes, until `close`."""

    name: str
    """Of the part, as in NAME.0"""
    index: SharedIndex
    lock: int
    """The descriptor that holds the lock."""

    def arena(self, *, pinned: bool) -> Arena:
        return Arena.attach(self.index.layout, f"{self.name}.rows", pinned=pinned)

    def close(self) -> None:
        """Let another process write the part; what is in it stays."""
        _unlock(self.lock)


def opened(name: str, layout: Layout) -> SharedPart:
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
    """The numbers and index files of all parts of a name, ascending."""
    folder = shared_path(f"{name}.0.index").parent
    pattern = re.compile(re.escape(name) + r"\.(\d+)\.index")
    found = [
        (int(match[1]), folder / match[0])
        for file in os.listdir(folder)
        if (match := pattern.fullmatch(file))
    ]
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
    for end in ("rows", "index"):
        shared_path(f"{part}.{end}").unlink(missing_ok=True)


def _unlock(fd: int) -> None:
    """Give the lock up, though a mapping may have the file open as well."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _locked(path: Path, *, create: bool = False) -> int | None:
    """A descriptor that holds the file's lock; None where somebody else does, where there is no
    file, or one that is not ours alone. StoreError where one is to be made and cannot be."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | (os.O_CREAT if create else 0), 0o600)
    except OSError as error:
        is_there = os.path.lexists(path)
        if create and not is_there:
            raise StoreError(
                f"shared host tier: {path} cannot be made: {error.strerror}\n\n"
                f"hint: this process must be able to make files in {path.parent}"
            ) from error
        if is_there:
            log.warning("%s is not used: %s", path, error.strerror)
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_nlink:  # not removed since it was opened
            check_ours(fd, str(path))
            return fd
    except BlockingIOError:
        pass
    except ArenaError as error:
        log.warning("it is not used: %s", error)
    os.close(fd)
    return None


def _taken(path: Path, part: str, layout: Layout) -> SharedPart | None:
    """The part that another process of this layout left; None where it is none."""
    lock = _locked(path)
    if lock is None:
        return None
    try:
        index = SharedIndex(lock, writable=True)
        if index.manifest == encode(layout):
            _check_rows(part, layout.nbytes)
            return SharedPart(part, index, lock)
    except (ValueError, ArenaError) as error:
        log.info("shared host tier %s is not taken over: %s", part, error)
    _unlock(lock)
    return None


def _check_rows(part: str, nbytes: int) -> None:
    """ArenaError where the rows of a part are not there, not ours, or not as long as they were."""
    rows = open_shared(f"{part}.rows")
    try:
        size, wanted = os.fstat(rows).st_size, align_up(nbytes, mmap.PAGESIZE)
    finally:
        os.close(rows)
    if size != wanted:
        raise ArenaError(f"shared memory {part}.rows has {size} bytes, not {wanted}")


def _made(part: str, layout: Layout) -> SharedPart | None:
    """A new part; None where there is one of that number."""
    path = shared_path(f"{part}.index")
    lock = _new_file(path)
    if lock is None:
        return None
    try:
        _make_rows(shared_path(f"{part}.rows"), align_up(layout.nbytes, mmap.PAGESIZE))
        SharedIndex.write_new(lock, layout)
    except OSError as error:
        _unlink(part)
        _unlock(lock)
        raise StoreError(
            f"shared host tier {part!r}: {layout.nbytes} bytes: {error.strerror}\n\n"
            f"hint: {path.parent} must have room for them (docker: --shm-size)"
        ) from error
    return SharedPart(part, SharedIndex(lock, writable=True), lock)


def _new_file(path: Path) -> int | None:
    """An empty file, locked; None where there is a part, or somebody makes one.

    What a process left that died while it made one goes. It is not made shorter: whoever has just
    mapped it would be killed.
    """
    lock = _locked(path, create=True)
    if lock is None or not os.fstat(lock).st_size:
        return lock
    if _is_unfinished(lock):
        path.unlink(missing_ok=True)
        _unlock(lock)
        lock = _locked(path, create=True)
        if lock is None or not os.fstat(lock).st_size:
            return lock
    _unlock(lock)
    return None


def _make_rows(path: Path, nbytes: int) -> None:
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    finally:
        os.close(fd)


def _is_unfinished(fd: int) -> bool:
    """Whether a process died while it made the index, or nobody has begun to."""
    try:
        SharedIndex(fd, writable=True)
    except UnfinishedIndex:
        return True
    except ValueError:
        return False
    return False
