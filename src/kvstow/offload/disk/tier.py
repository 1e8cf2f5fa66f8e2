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
from contextlib import contextmanager, suppress
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
    checksum,
    decode_header,
    entries_of,
    file_bytes,
)
from kvstow.offload.disk.opening import open_directory
from kvstow.offload.disk.tree import BLOCK_NANOSECONDS, RowFile, RowTree, keys_in
from kvstow.offload.tier import (
    Bools,
    Bytes,
    Counter,
    Counts,
    Usage,
    check_process,
    checked_keys,
    checked_rows,
    chosen,
    firsts,
    known_identity,
    loaded,
    note_unverified,
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
        self.layout, self.capacity = open_directory(self.path, layout, most)
        if layout is not None:
            note_unverified(self.layout.identity, f"store {path}")
        elif identity is not None:
            known_identity(self.layout, identity, f"store {path}")
        self._files, self._clock = files or Files(), clock
        self._fingerprint = bytes.fromhex(fingerprint(self.layout))
        self._counter = Counter()
        self.tree = RowTree(
            self.path, self._fingerprint.hex(), self._files, self.capacity, self._counter
        )
        with store_errors(self.path):
            self.tree.writers.sweep()
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
        return self._counter.now

    @property
    def usage(self) -> Usage:
        with self._using():
            tally = self.tree.usage
        return Usage(rows=tally.rows, nbytes=tally.nbytes, capacity=self.capacity)

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
        with self._using():
            missing = firsts(keys, ~self.tree.has(group, keys))
            step = self._rows_per_file(group)
            files = [
                _NewFile(
                    group,
                    [keys[i] for i in part],
                    [rows[i] for i in part],
                    [links[i] for i in part] if links else (),
                )
                for part in (missing[lo : lo + step] for lo in range(0, len(missing), step))
            ]
            if files:
                self._store(files)
            return self.tree.has(group, keys)

    def _rows_per_file(self, group: int) -> int:
        most = min(FILE_BYTES, self.capacity // 32)  # files go as a whole
        return max(1, min(MAX_ROWS, most // self.layout.row_bytes(group)))

    def _store(self, files: Sequence["_NewFile"]) -> None:
        """Write files; where the disk is full though the capacity allows more, others go first."""
        failures = self._write_all(files)
        if any(error.errno in FULL for _, error in failures):
            self._note_full(failures[0][1])
            self.tree.evict(2 * sum(self._nbytes(file) for file, _ in failures))
            failures = self._write_all([file for file, _ in failures])
            failures = [each for each in failures if each[1].errno not in FULL]
        if failures:
            lost = sum(len(file.keys) for file, _ in failures)
            total = sum(len(file.keys) for file in files)
            self._counter.add(Counts(failures=lost))
            reason = failures[0][1]
            raise StoreError(
                f"{self.path}: {lost} of {total} rows were not written: {reason.strerror or reason}"
            ) from reason

    def _write_all(self, files: Sequence["_NewFile"]) -> list[tuple["_NewFile", OSError]]:
        """Write files and give them their names; those for which that failed, and why."""
        results: list[OSError | None] = []
        step = max(1, BATCH_BYTES // max(map(self._nbytes, files)))
        for lo in range(0, len(files), step):
            results += self._write_part(files[lo : lo + step])
        both = zip(files, results, strict=True)
        return [(file, error) for file, error in both if error is not None]

    def _write_part(self, files: Sequence["_NewFile"]) -> list[OSError | None]:
        """Write files, sync them as one, and give them their names; per file what went wrong."""
        nameless: dict[str, int] = {}
        """What was written and has no name yet: its bytes."""
        try:
            written = self._each(lambda file: self._write(file, nameless), files)
            results = [each if isinstance(each, OSError) else None for each in written]
            names = {k: name for k, name in enumerate(written) if isinstance(name, str)}
            try:
                if names:
                    self._files.sync(list(names.values()))
            except OSError as error:
                return [error if k in names else result for k, result in enumerate(results)]
            for k, name in names.items():
                try:
                    self.tree.publish(name, files[k].group, files[k].keys, nameless[name])
                    del nameless[name]
                    nbytes = len(files[k].keys) * self.layout.row_bytes(files[k].group)
                    self._counter.add(Counts(stored_rows=len(files[k].keys), stored_bytes=nbytes))
                except OSError as error:
                    results[k] = error
            return results
        finally:
            for name, nbytes in nameless.items():
                self.tree.give_back(nbytes)
                with suppress(OSError):
                    self._files.remove(name)

    def _write(self, file: "_NewFile", nameless: dict[str, int]) -> str | OSError | None:
        """Write a file; its name, None where there is no room, or what went wrong."""
        try:
            name = self.tree.writers.next_file()
            if not self.tree.reserve(self._nbytes(file)):
                return None
            nameless[name] = self._nbytes(file)
            self._write_bytes(name, file)
            return name
        except OSError as error:
            return error

    def _write_bytes(self, name: str, file: "_NewFile") -> None:
        row_bytes = self.layout.row_bytes(file.group)
        entries = entries_of(file.keys, file.rows, file.links)
        header = Header(self._fingerprint, file.group, row_bytes, entries)
        is_direct = self._is_alone(file.group)
        parts = [self._scratch(BLOCK), *file.rows]
        if is_direct and not is_aligned(file.rows[0]):
            parts = [self._scratch(self._nbytes(file))]
            parts[0][BLOCK : BLOCK + row_bytes] = file.rows[0]
            parts[0][BLOCK + row_bytes :] = 0
        parts[0][:BLOCK] = np.frombuffer(header.encode(), np.uint8)
        padding = self._nbytes(file) - sum(map(len, parts))
        if padding:
            parts.append(np.zeros(padding, np.uint8))
        fd = self._files.create(name, direct=is_direct)
        try:
            self._files.write(fd, parts)
            self._files.touch(fd, self._now(entries[0].link))
        finally:
            self._files.close(fd)

    def _nbytes(self, file: "_NewFile") -> int:
        return file_bytes(self.layout.row_bytes(file.group), len(file.keys))

    def _is_alone(self, group: int) -> bool:
        """Whether rows of a group have files of their own, which go past the page cache."""
        return 2 * self.layout.row_bytes(group) > FILE_BYTES

    def _now(self, link: ChainLink) -> int:
        return int(self._clock() * 1e9) - link.block * BLOCK_NANOSECONDS

    def _note_full(self, error: OSError) -> None:
        """Say that rows find no room although the capacity allows it: once in the log."""
        if not self._said_full:
            log.warning(
                "store %s: %s, though %d bytes are allowed; rows are dropped for others",
                self.path,
                error.strerror,
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
        mask = np.array([found for part in results for found in part], bool)
        self._counter.add(loaded(len(keys), int(mask.sum()), self.layout.row_bytes(group)))
        return mask

    def _load(self, group: int, keys: Sequence[bytes], rows: Sequence[Bytes]) -> list[bool]:
        """Rows of a part of a call, file by file; which of them were there."""
        there = self.tree.has(group, keys)
        left = dict(zip(chosen(keys, there), chosen(rows, there), strict=True))
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
        self._counter.add(Counts(failures=1))
        with suppress(OSError):
            if fd is None or os.lstat(name).st_ino == os.fstat(fd).st_ino:
                self.tree.remove(name)

    # ── evict ─────────────────────────────────────────────────────────────────────

    def evict(self, group: int, keys: Sequence[bytes]) -> int:
        checked_keys(self.layout, group, keys)
        with self._using():
            count = sum(self.tree.remove(self.tree.name(group, key)) for key in keys)
        self._counter.add(Counts(evicted_rows=count))
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


@dataclass(frozen=True, slots=True, eq=False)
class _NewFile:
    """Rows that will share a file."""

    group: int
    keys: Sequence[bytes]
    rows: Sequence[Bytes]
    links: Sequence[ChainLink]


def neighbours(numbers: Sequence[int]) -> list[list[int]]:
    """Ascending numbers in runs without gaps."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs
