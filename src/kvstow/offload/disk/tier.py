"""The disk tier: one file per row, or per few small ones, named by what it holds.

    store   write a file without a name → make it durable → give it the names of its rows
    load    open the name → header and checksum must match → used

What `store` calls kept has its name, so that it is there when the process is killed; after a power
cut a name may be missing, and a row never wrong. Several processes may use one directory, and
none waits for another (see `tree`).
"""

import errno
import logging
import os
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, local
from typing import TypeVar

import numpy as np

from kvstow.errors import StoreError
from kvstow.offload.disk.files import (
    BLOCK,
    LOST,
    Files,
    aligned,
    is_aligned,
    store_errors,
)
from kvstow.offload.disk.format import (
    MAX_ROWS,
    ChainLink,
    Header,
    RowEntry,
    checksum,
    decode_header,
    file_bytes,
)
from kvstow.offload.disk.opening import open_directory
from kvstow.offload.disk.tree import BLOCK_NANOSECONDS, RowFile, RowTree, Writers, keys_in
from kvstow.offload.tier import (
    Bools,
    Bytes,
    Counts,
    Tallies,
    Usage,
    check_process,
    checked_keys,
    checked_rows,
    first_positions,
    known_identity,
    note_unverified,
    select,
)
from kvstow.plan.identity import Identity
from kvstow.plan.layout import Layout
from kvstow.plan.manifest import fingerprint
from kvstow.plan.view import align_up, parse_size

log = logging.getLogger("kvstow.offload")

FILE_BYTES = 2 << 20
"""Rows of one call share a file up to this length."""

BATCH_BYTES = 128 << 20
"""Files of a call are synced together up to this length."""

FULL = (errno.ENOSPC, errno.EDQUOT)

_T = TypeVar("_T")
_R = TypeVar("_R")


class DiskTier:
    """Rows of one layout in a directory, within `capacity` bytes of row files.

    `layout` may be that of any arena whose rows are to be kept; the tier's own is the layout
    that the directory states, and `layout=None` asks for just that. The computation that makes
    the rows is `identity`, or the layout's. With `threads=0` nothing happens outside the caller's
    thread; `files` and `clock` are what a simulation replaces.
    """

    def __init__(
        self,
        path: str | Path,
        layout: Layout | None = None,
        *,
        identity: Identity | None = None,
        capacity: int | str | None = None,
        files: Files | None = None,
        threads: int = 4,
        clock: Callable[[], float] = time.time,
        name: str = "disk",
    ) -> None:
        self.path, self.name = Path(path), name
        if layout is not None:
            layout = layout.identified(known_identity(layout, identity, f"store {path}"))
        most = parse_size(capacity) if isinstance(capacity, str) else capacity
        self._files, self._clock = files or Files(), clock
        writers = Writers(self.path, self._files)
        with ExitStack() as undo:
            undo.callback(writers.close)
            self.layout, self.capacity = open_directory(self.path, layout, most, writers)
            if layout is not None:
                note_unverified(self.layout.identity, f"store {path}")
            elif identity is not None:
                known_identity(self.layout, identity, f"store {path}")
            with store_errors(self.path):
                writers.sweep()
            undo.pop_all()
        self._fingerprint = bytes.fromhex(fingerprint(self.layout))
        self._tallies = Tallies()
        name = self._fingerprint.hex()
        self.tree = RowTree(self.path, name, self._files, self.capacity, self._tallies, writers)
        self._threads = ThreadPoolExecutor(threads, "kvstow-disk") if threads else None
        self._own = local()
        self._opener = os.getpid()
        self._state = Condition()
        self._num_uses = 0
        self._is_closed = False
        self._said_full = False

    def close(self) -> None:
        """Wait for what is under way, and let go of threads and files; once is enough. A process
        that was forked meanwhile lets go of nothing."""
        if os.getpid() != self._opener:
            return
        with self._state:
            was_closed, self._is_closed = self._is_closed, True
            self._state.wait_for(lambda: not self._num_uses)
        if not was_closed:
            if self._threads is not None:
                self._threads.shutdown()
            self.tree.writers.close()

    # ── questions ─────────────────────────────────────────────────────────────────

    @property
    def counts(self) -> Counts:
        return Counts(**self._tallies.now)

    @property
    def usage(self) -> Usage:
        with self._using():
            return self.tree.usage

    def contains(self, group: int, keys: Sequence[bytes]) -> Bools:
        checked_keys(self.layout, group, keys)
        with self._using():
            return self.tree.has(group, keys)

    def keys(self, group: int) -> list[bytes]:
        """The keys of all rows of a group."""
        with self._using():
            directories = self.tree.directories(group)
            return [key for directory in directories for key in keys_in(directory.path)]

    def row_files(self) -> list[RowFile]:
        """The files of all rows, those used longest ago first."""
        with self._using():
            return self.tree.own_files()

    def links(self, file: RowFile) -> list[tuple[bytes, ChainLink]]:
        """Where the rows of a file stand in their sequences; nothing where it cannot be read."""
        page, keys = aligned(BLOCK), set(file.keys)
        with self._using(), suppress(OSError):
            fd = self._files.open(file.names[0], direct=False)
            try:
                self._files.read(fd, [page], 0)
            finally:
                self._files.close(fd)
        header = decode_header(page.tobytes())
        entries = header.entries if header is not None else ()
        return [(entry.key, entry.link) for entry in entries if entry.key in keys]

    # ── store ─────────────────────────────────────────────────────────────────────

    def store(
        self,
        group: int,
        keys: Sequence[bytes],
        rows: Sequence[Bytes],
        links: Sequence[ChainLink] = (),
    ) -> Bools:
        """Keep rows; which of them are kept now.

        Rows for which there is no room are not kept. Raises StoreError when the medium fails;
        rows that have their names by then stay.
        """
        checked_rows(self.layout, group, checked_keys(self.layout, group, keys), rows)
        step = self._rows_per_file(group)
        with self._using():
            lacking = set(select(keys, ~self.tree.has(group, keys)))
            missing = [i for key, i in first_positions(keys).items() if key in lacking]
            files: list[_NewFile] = []
            for part in (missing[lo : lo + step] for lo in range(0, len(missing), step)):
                entries = [(keys[i], rows[i], links[i] if links else ChainLink()) for i in part]
                files.append(_NewFile(group, entries, self.layout.row_bytes(group)))
            self._store(files)
            return self.tree.has(group, keys)

    def _rows_per_file(self, group: int) -> int:
        most = min(FILE_BYTES, self.capacity // 32)  # files go as a whole
        return max(1, min(MAX_ROWS, most // self.layout.row_bytes(group)))

    def _store(self, files: Sequence["_NewFile"]) -> None:
        """Write files; where the disk is full though the capacity allows more, others go first."""
        failed = self._write(files)
        if any(file.error.errno in FULL for file in failed if file.error):
            self._note_full(failed[0])
            self.tree.evict(2 * sum(file.nbytes for file in failed))
            failed = self._write(failed)
            failed = [file for file in failed if file.error and file.error.errno not in FULL]
        if failed:
            reason = failed[0].error
            lost, total = (sum(len(file.rows) for file in each) for each in (failed, files))
            self._tallies.add("failures", lost)
            raise StoreError(
                f"{self.path}: {lost} of {total} rows were not written: {_reason(reason)}"
            ) from reason

    def _write(self, files: Sequence["_NewFile"]) -> list["_NewFile"]:
        """Write files and give them their names, a batch at a time; those that failed."""
        step = max(1, BATCH_BYTES // max((file.nbytes for file in files), default=1))
        for lo in range(0, len(files), step):
            self._write_batch(files[lo : lo + step])
        return [file for file in files if file.error is not None]

    def _write_batch(self, files: Sequence["_NewFile"]) -> None:
        """Write files, sync them as one, and give them their names."""
        try:
            self._each(self._write_file, files)
            written = [file for file in files if file.name and file.error is None]
            with _errors_of(written):
                if written:
                    self._files.sync([file.name for file in written])
            for file in written:
                if file.error is None:
                    self._publish(file)
        finally:
            for file in files:
                if file.name:  # it has got no other
                    self.tree.give_back(file.nbytes)
                    with suppress(OSError):
                        self._files.remove(file.name)
                    file.name = ""

    def _publish(self, file: "_NewFile") -> None:
        with _errors_of([file]):
            keys = [key for key, _, _ in file.rows]
            self.tree.publish(file.name, file.group, keys, file.nbytes)
            file.name = ""
            self._tallies.add_rows("stored", len(keys), file.row_bytes)

    def _write_file(self, file: "_NewFile") -> None:
        """Write a file that has no name in the tree yet, if there is room for it."""
        file.error = None
        with _errors_of([file]):
            name = self.tree.writers.next_file()
            if self.tree.reserve(file.nbytes):
                file.name = name
                self._write_bytes(file)

    def _write_bytes(self, file: "_NewFile") -> None:
        """Write a file past the page cache: what is synced is on its way by then."""
        entries = tuple(RowEntry(key, checksum(row), link) for key, row, link in file.rows)
        header = Header(self._fingerprint, file.group, file.row_bytes, entries)
        first = file.rows[0][1]
        if len(file.rows) == 1 and is_aligned(first):
            parts = [self._scratch(BLOCK), first]
        else:
            parts = [self._scratch(file.nbytes)]
            end = header.offset(len(file.rows))
            places = parts[0][BLOCK:end].reshape(-1, file.row_bytes)
            for place, (_, row, _) in zip(places, file.rows, strict=True):
                place[:] = row
            parts[0][end:] = 0
        parts[0][:BLOCK] = np.frombuffer(header.encode(), np.uint8)
        fd = self._files.create(file.name)
        try:
            self._files.write(fd, parts)
            self._files.touch(fd, self._now(entries[0].link))
        finally:
            self._files.close(fd)

    def _is_alone(self, group: int) -> bool:
        """Whether rows of a group have files of their own, which are read past the page cache."""
        return 2 * self.layout.row_bytes(group) > FILE_BYTES

    def _now(self, link: ChainLink) -> int:
        return int(self._clock() * 1e9) - link.block * BLOCK_NANOSECONDS

    def _note_full(self, file: "_NewFile") -> None:
        """Say that rows find no room although the capacity allows it: once in the log."""
        if not self._said_full:
            log.warning(
                "store %s: %s, though %d bytes are allowed; rows are dropped for others",
                self.path,
                _reason(file.error),
                self.capacity,
            )
        self._said_full = True

    # ── load ──────────────────────────────────────────────────────────────────────

    def load(self, group: int, keys: Sequence[bytes], rows: Sequence[Bytes]) -> Bools:
        """Copy rows out; which of them were here, and whole.

        A row whose bytes are not what they were is dropped and counted as a failure; the caller
        sees a miss. Nothing writes to the rows any more when this ends, however it does.
        """
        checked_rows(self.layout, group, checked_keys(self.layout, group, keys), rows)
        step = self._rows_per_file(group)
        with self._using():
            results = self._each(
                lambda lo: self._load(group, keys[lo : lo + step], rows[lo : lo + step]),
                range(0, len(keys), step),
            )
        mask = np.array([is_good for part in results for is_good in part], bool)
        self._tallies.add_load(len(keys), int(mask.sum()), self.layout.row_bytes(group))
        return mask

    def _load(self, group: int, keys: Sequence[bytes], rows: Sequence[Bytes]) -> list[bool]:
        """Rows of a part of a call, file by file; which of them were there."""
        there = self.tree.has(group, keys)
        left = dict(zip(select(keys, there), select(rows, there), strict=True))
        good: set[bytes] = set()
        while left:
            first = next(iter(left))
            good |= self._load_file(group, first, left)
            left.pop(first, None)
            for key in good:
                left.pop(key, None)
        last = dict(zip(keys, rows, strict=True))
        for key, row in zip(keys, rows, strict=True):
            if key in good and row is not last[key]:
                row[:] = last[key]
        return [key in good for key in keys]

    def _load_file(self, group: int, key: bytes, left: dict[bytes, Bytes]) -> set[bytes]:
        """What one file holds of the rows that are left; at least it is tried for that key."""
        name = self.tree.name(group, key)
        try:
            fd = self._files.open(name, direct=self._is_alone(group))
            try:
                header = self._header(fd, group, key, left)
                if header is None:
                    self._drop(name, key, fd, "is not what was written")
                    return set()
                good = self._read_rows(fd, header, left)
                if good:
                    with suppress(OSError):  # a medium that is read only, say
                        self._files.touch(fd, self._now(header.entries[0].link))
                return good
            finally:
                self._files.close(fd)
        except FileNotFoundError:
            return set()
        except OSError as error:
            if error.errno in LOST or error.errno == errno.EPERM:
                self._drop(name, key, None, f"cannot be read ({error.strerror})")
            else:
                log.warning("store %s: a row was not read: %s", self.path, error)
            return set()

    def _header(self, fd: int, group: int, key: bytes, left: dict[bytes, Bytes]) -> Header | None:
        """What a file says of itself, if it holds that row of this layout; a row with a file of
        its own is read with it."""
        row = left[key]
        parts = [self._scratch(BLOCK)]
        if self._is_alone(group) and is_aligned(row):
            parts.append(row)
        elif self._is_alone(group):
            parts = [self._scratch(BLOCK + align_up(len(row), BLOCK))]
        count = self._files.read(fd, parts, 0)
        header = decode_header(parts[0][:BLOCK].tobytes()) if count >= BLOCK else None
        if header is None or header.fingerprint != self._fingerprint or header.group != group:
            return None
        if header.row_bytes != len(row) or key not in (each.key for each in header.entries):
            return None
        if len(parts[0]) > BLOCK:
            row[:] = parts[0][BLOCK : BLOCK + len(row)]
        return header

    def _scratch(self, nbytes: int) -> Bytes:
        """Memory that direct I/O accepts, of this thread's own, until it wants some again."""
        if getattr(self._own, "nbytes", -1) < nbytes:
            self._own.memory, self._own.nbytes = aligned(nbytes), nbytes
        return self._own.memory[:nbytes]

    def _read_rows(self, fd: int, header: Header, left: dict[bytes, Bytes]) -> set[bytes]:
        """Read the rows of a file that are left; those that have their checksums."""
        here = [k for k, entry in enumerate(header.entries) if entry.key in left]
        if not self._is_alone(header.group):
            for run in neighbours(here):
                rows = [left[header.entries[k].key] for k in run]
                self._files.read(fd, rows, header.offset(run[0]))
        good: set[bytes] = set()
        for entry in (header.entries[k] for k in here):
            if checksum(left[entry.key]) == entry.checksum:
                good.add(entry.key)
            else:
                lost = self.tree.name(header.group, entry.key)
                self._drop(lost, entry.key, fd, "is not what was written")
        return good

    def _drop(self, name: str, key: bytes, fd: int | None, why: str) -> None:
        """Take the name of a damaged row away, unless it is another file's by now."""
        log.warning("store %s: row %s %s", self.path, key.hex(), why)
        self._tallies.add("failures")
        with suppress(OSError):
            if fd is None or os.lstat(name).st_ino == os.fstat(fd).st_ino:
                self.tree.remove(name)

    # ── evict ─────────────────────────────────────────────────────────────────────

    def evict(self, group: int, keys: Sequence[bytes]) -> int:
        checked_keys(self.layout, group, keys)
        with self._using():
            count = sum(self.tree.remove(self.tree.name(group, key)) for key in keys)
        self._tallies.add("evicted_rows", count)
        return count

    def prune(self, nbytes: int) -> int:
        """Drop rows, those used longest ago first, until the rest takes at most `nbytes`."""
        with self._using():
            return self.tree.prune(nbytes)

    # ── threads ───────────────────────────────────────────────────────────────────

    @contextmanager
    def _using(self) -> Generator[None]:
        """StoreError once the tier is closed, and in a process that was forked meanwhile."""
        check_process(self._opener, f"store {self.path}")
        with self._state:
            if self._is_closed:
                raise StoreError(f"store {self.path} is closed")
            self._num_uses += 1
        try:
            with store_errors(self.path):
                yield
        finally:
            with self._state:
                self._num_uses -= 1
                self._state.notify_all()

    def _each(self, work: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
        """Do something with each item, side by side; nothing goes on when this ends."""
        if self._threads is None or len(items) == 1:
            return [work(item) for item in items]
        futures: list[Future[_R]] = []
        try:
            for item in items:
                futures.append(self._threads.submit(work, item))
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            wait(futures)


@dataclass(slots=True, eq=False)
class _NewFile:
    """Rows that will share a file: keys, bytes and links."""

    group: int
    rows: Sequence[tuple[bytes, Bytes, ChainLink]]
    row_bytes: int
    name: str = ""
    """What it is called until it has the names of its rows."""
    error: OSError | None = None

    @property
    def nbytes(self) -> int:
        return file_bytes(self.row_bytes, len(self.rows))


@contextmanager
def _errors_of(files: Sequence[_NewFile]) -> Generator[None]:
    """What the system refuses is the error of these files."""
    try:
        yield
    except OSError as error:
        for file in files:
            file.error = error


def _reason(error: OSError | None) -> str:
    return "" if error is None else error.strerror or str(error)


def neighbours(numbers: Sequence[int]) -> list[list[int]]:
    """Ascending numbers in runs without gaps."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs
