"""Data files of a store: opened when needed, checked, read and written by several threads."""

import errno
import os
import queue
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from threading import Lock, Semaphore
from typing import ParamSpec, TypeVar

import numpy as np

from kvstow.offload.disk.files import BLOCK, Bytes, Files, aligned, is_aligned
from kvstow.offload.disk.format import (
    RECORD_BYTES,
    SegmentHeader,
    SlotRecord,
    checksum,
    decode_header,
    decode_record,
    segment_file,
    segment_numbers,
    slot_bytes,
)
from kvstow.offload.disk.index import SLOT_BITS
from kvstow.plan.layout import Layout
from kvstow.plan.view import align_up

CHUNK_BYTES = 4 << 20
"""Adjacent slots are read and written together up to this length."""

INDEX_RESERVE = 16 << 20

GROW_BYTES = 4 << 20
"""A data file grows in steps of so many bytes, up to `segment_bytes`."""

_T = TypeVar("_T")
_P = ParamSpec("_P")


@dataclass(frozen=True, slots=True)
class SlotRow:
    """A row and the place it goes to or comes from, with what its record must say."""

    place: int
    record: SlotRecord
    row: Bytes


@dataclass(frozen=True, slots=True)
class PendingWrite:
    """Rows on their way to the medium."""

    rows: tuple[SlotRow, ...]
    futures: tuple[Future[list[SlotRecord | OSError]], ...]


class Segments:
    """The data files of one store, opened when first used.

    At most `threads` reads and writes are under way at a time. As many threads again see to
    checksums meanwhile, so that the medium does not wait for them. Without threads, everything
    happens in the caller's.
    """

    def __init__(
        self,
        path: Path,
        layout: Layout,
        segment_bytes: int,
        fingerprint: str,
        *,
        files: Files,
        threads: int,
    ) -> None:
        self.path = path
        self.segment_bytes = segment_bytes
        self.slot_bytes = tuple(slot_bytes(layout.row_bytes(g)) for g in range(len(layout.groups)))
        self.slots = tuple((segment_bytes - BLOCK) // n for n in self.slot_bytes)
        self.fingerprint = bytes.fromhex(fingerprint)
        self._files = files
        self._open: dict[int, int] = {}
        self._gone: list[int] = []
        self._closed = False
        self._lock = Lock()
        self._turns = Semaphore(max(1, threads))
        self._threads = (
            ThreadPoolExecutor(2 * threads, thread_name_prefix="kvstow-disk")
            if threads
            else _CallerThread()
        )
        self._buffers: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
        chunk = max(CHUNK_BYTES, *self.slot_bytes)
        for _ in range(max(1, 2 * threads)):
            self._buffers.put(aligned(chunk))

    # ── files ─────────────────────────────────────────────────────────────────────

    def file(self, segment: int) -> Path:
        return segment_file(self.path, segment)

    def numbers(self) -> set[int]:
        """The data files that are there."""
        return set(segment_numbers(self.path))

    def nbytes(self, segment: int) -> int | None:
        """Bytes of a data file; None where it is missing."""
        return self._files.size(self.file(segment))

    def create(self, segment: int, group: int) -> None:
        """A new data file with space for its first rows. Raises OSError, having left nothing.

        Its name is durable before anybody knows of it: another process may be the first to enter
        a row that lies in it.
        """
        path = self.file(segment)
        fd = self._files.open(path, create=True)
        try:
            self._grow(fd, BLOCK + self.slot_bytes[group])
            self._write_header(fd, group)
            self._files.sync_directory(self.path)
        except BaseException:
            self._files.close(fd)
            self._files.remove(path)
            raise
        with self._lock:
            self._open[segment] = fd

    def make_durable(self, segments: Sequence[int]) -> None:
        """Data files that were found stay, with all that is in them: whoever made them may have
        died before their names and bytes were on the medium. Raises OSError."""
        for segment in segments:
            self._files.sync(self._fd(segment))
        self._files.sync_directory(self.path)

    def set_aside(self, group: int, places: Sequence[int]) -> list[int]:
        """Those of the ascending places for which there is disk space, set aside if it was not.

        Raises OSError, but not for want of space.
        """
        found: list[int] = []
        for segment, part in groupby(places, lambda place: place >> SLOT_BITS):
            ends = [(place, self._end(group, place)) for place in part]
            fd = self._fd(segment)
            try:
                self._grow(fd, ends[-1][1])
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
            size = os.fstat(fd).st_size
            found += [place for place, end in ends if end <= size]
        return found

    def _grow(self, fd: int, nbytes: int) -> None:
        """Make the file so long, or somewhat longer. Raises OSError.

        The last of the disk is left to the index: a store that cannot write it is of no use.
        """
        size = os.fstat(fd).st_size
        if nbytes <= size:
            return
        nbytes = min(align_up(nbytes, GROW_BYTES), self.segment_bytes)
        reserve = min(INDEX_RESERVE, 4 * self.segment_bytes)
        if self._files.free(self.path) < nbytes - size + reserve:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._files.allocate(fd, size, nbytes - size)

    def keep_only(self, segment: int, group: int, places: Sequence[int]) -> None:
        """Give back the disk space of all slots of a data file but these, ascending.

        Raises OSError (EOPNOTSUPP) where the file system cannot.
        """
        fd, start = self._fd(segment), BLOCK
        for place in places:
            end = self._end(group, place)
            if end - self.slot_bytes[group] > start:
                self._files.deallocate(fd, start, end - self.slot_bytes[group] - start)
            start = end
        if os.fstat(fd).st_size > start:
            self._files.truncate(fd, start)

    def used(self, segment: int) -> int:
        """Disk space of a data file."""
        return self._files.used(self.file(segment))

    def restore(self, segment: int, group: int) -> None:
        """A data file has its header again."""
        fd = self._files.open(self.file(segment))
        try:
            self._write_header(fd, group)
            self._files.sync(fd)
        finally:
            self._files.close(fd)

    def hand_over(self, segment: int, group: int) -> None:
        """The data file belongs to another group; nothing in it is a row any more."""
        fd = self._fd(segment)
        self._write_header(fd, group)
        self._files.sync(fd)

    def header(self, segment: int) -> SegmentHeader | None:
        """What the file says of itself; None where that is unreadable. Raises OSError."""
        fd = self._files.open(self.file(segment))
        try:
            return self._header_in(fd)
        finally:
            self._files.close(fd)

    def _header_in(self, fd: int) -> SegmentHeader | None:
        buffer = aligned(BLOCK)
        if self._files.read(fd, [buffer], 0) < BLOCK:
            return None
        return decode_header(buffer.tobytes())

    def owns(self, header: SegmentHeader) -> bool:
        """Whether a header is what this store would write for that group."""
        return header.group < len(self.slots) and header == self._header(header.group)

    def remove(self, segment: int) -> None:
        """The data file is gone."""
        with self._lock:
            if segment in self._open:
                self._gone.append(self._open.pop(segment))
        self._files.remove(self.file(segment))

    def close(self) -> None:
        """End what is under way and let go of the files; using them is an error from now on."""
        self._threads.shutdown(wait=True)
        with self._lock:
            self._closed = True
            for fd in (*self._open.values(), *self._gone):
                self._files.close(fd)
            self._open.clear()
            self._gone.clear()

    def _write_header(self, fd: int, group: int) -> None:
        buffer = aligned(BLOCK)
        buffer[:] = np.frombuffer(self._header(group).encode(), np.uint8)
        self._files.write(fd, [buffer], 0)

    def _header(self, group: int) -> SegmentHeader:
        return SegmentHeader(
            self.segment_bytes,
            self.slot_bytes[group],
            group,
            self.slots[group],
            self.fingerprint,
        )

    def _fd(self, segment: int) -> int:
        """A descriptor of the file that has that name now: another process may have removed
        the one we knew, and made a new one. OSError if it is not a data file of this store."""
        with self._lock:
            if self._closed:
                raise OSError(errno.EBADF, "the store is closed")
            fd = self._open.get(segment)
            if fd is not None and os.fstat(fd).st_nlink == 0:
                self._gone.append(self._open.pop(segment))
            if segment not in self._open:
                self._open[segment] = self._opened(segment)
            return self._open[segment]

    def _opened(self, segment: int) -> int:
        fd = self._files.open(self.file(segment))
        try:
            header = self._header_in(fd)
            if header is None or header.fingerprint != self.fingerprint:
                what = "no header" if header is None else "the header of another layout"
                raise OSError(errno.EBADMSG, f"{self.file(segment).name} has {what}")
        except BaseException:
            self._files.close(fd)
            raise
        return fd

    # ── rows ──────────────────────────────────────────────────────────────────────

    def start(self, group: int, rows: Sequence[SlotRow]) -> PendingWrite:
        """Begin to write rows, ascending by place; end it by `finish`."""
        chunks = self._chunks(group, rows)
        futures = [self._threads.submit(self._write_chunk, group, chunk) for chunk in chunks]
        return PendingWrite(tuple(rows), tuple(futures))

    def finish(self, writing: PendingWrite) -> list[SlotRecord | OSError]:
        """Wait until the rows are on the medium.

        Per row: its record, completed by the checksum, or why it is not there.
        """
        results = [result for future in writing.futures for result in future.result()]
        segments = {row.place >> SLOT_BITS for row in writing.rows}
        failed = self._threads.submit(self._synced, segments).result()
        return [
            failed.get(row.place >> SLOT_BITS, result)
            for row, result in zip(writing.rows, results, strict=True)
        ]

    def read(self, group: int, rows: Sequence[SlotRow]) -> list[bool | OSError]:
        """Read rows, ascending by place, into `row.row`.

        Per row: whether its bytes are those of its record, or why they could not be read. Nothing
        writes to the rows any more when this ends, however it does.
        """
        chunks = self._chunks(group, rows)
        reads = [self._threads.submit(self._read_chunk, group, chunk) for chunk in chunks]
        try:
            return [result for read in reads for result in read.result()]
        finally:
            for read in reads:
                read.cancel()
            wait(reads)

    def records(self, segment: int, group: int) -> list[SlotRecord | None]:
        """The record of every slot of a data file, whatever the index says. Raises OSError."""
        buffer = aligned(BLOCK)
        step = self.slot_bytes[group]
        fd = self._files.open(self.file(segment))
        try:
            records: list[SlotRecord | None] = []
            for slot in range(self.slots[group]):
                count = self._files.read(fd, [buffer], (slot + 1) * step)
                whole = count == BLOCK
                records.append(decode_record(buffer[-RECORD_BYTES:].tobytes()) if whole else None)
            return records
        finally:
            self._files.close(fd)

    def _chunks(self, group: int, rows: Sequence[SlotRow]) -> list[list[SlotRow]]:
        """Rows in adjacent slots together, as many as fit into a buffer."""
        most = max(1, CHUNK_BYTES // self.slot_bytes[group])
        chunks: list[list[SlotRow]] = []
        for row in rows:
            near = chunks and chunks[-1][-1].place + 1 == row.place
            if near and len(chunks[-1]) < most:
                chunks[-1].append(row)
            else:
                chunks.append([row])
        return chunks

    @contextmanager
    def _buffer(self, nbytes: int) -> Generator[Bytes]:
        buffer = self._buffers.get()
        try:
            yield buffer[:nbytes]
        finally:
            self._buffers.put(buffer)

    def _where(self, group: int, at: int) -> tuple[int, int]:
        """The descriptor and the offset of a place."""
        return self._fd(at >> SLOT_BITS), self._end(group, at) - self.slot_bytes[group]

    def _end(self, group: int, at: int) -> int:
        """Where a slot ends in its data file."""
        slot = at & ((1 << SLOT_BITS) - 1)
        return BLOCK + (slot + 1) * self.slot_bytes[group]

    def _write_chunk(self, group: int, rows: Sequence[SlotRow]) -> list[SlotRecord | OSError]:
        step = self.slot_bytes[group]
        try:
            with self._buffer(len(rows) * step) as buffer:
                slots = [
                    _Slot.over(buffer[i * step : (i + 1) * step], row) for i, row in enumerate(rows)
                ]
                records = [slot.fill(row) for slot, row in zip(slots, rows, strict=True)]
                fd, offset = self._where(group, rows[0].place)
                parts = [part for slot in slots for part in slot.parts]
                with self._turns:
                    self._files.write(fd, parts, offset)
        except OSError as error:
            return [error] * len(rows)
        return list(records)

    def _read_chunk(self, group: int, rows: Sequence[SlotRow]) -> list[bool | OSError]:
        step = self.slot_bytes[group]
        try:
            with self._buffer(len(rows) * step) as buffer:
                slots = [
                    _Slot.over(buffer[i * step : (i + 1) * step], row) for i, row in enumerate(rows)
                ]
                fd, offset = self._where(group, rows[0].place)
                parts = [part for slot in slots for part in slot.parts]
                with self._turns:
                    count = self._files.read(fd, parts, offset)
                return [
                    count >= (i + 1) * step and slot.take(row)
                    for i, (slot, row) in enumerate(zip(slots, rows, strict=True))
                ]
        except OSError as error:
            return [error] * len(rows)

    def _synced(self, segments: set[int]) -> dict[int, OSError]:
        """Make data files durable; those for which that failed."""
        failed: dict[int, OSError] = {}
        for segment in segments:
            try:
                self._files.sync(self._fd(segment))
            except OSError as error:
                failed[segment] = error
        return failed


class _CallerThread(Executor):
    """What a pool of threads does, without threads."""

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        done: Future[_T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:
            done.set_exception(error)
        return done


@dataclass(frozen=True, slots=True)
class _Slot:
    """A slot in memory: one buffer, or the row itself where direct I/O can use it, and a
    buffer for the rest."""

    row: Bytes
    rest: Bytes
    parts: tuple[Bytes, ...]

    @staticmethod
    def over(buffer: Bytes, slotted: SlotRow) -> "_Slot":
        nbytes = len(slotted.row)
        if is_aligned(slotted.row):
            return _Slot(slotted.row, buffer[nbytes:], (slotted.row, buffer[nbytes:]))
        return _Slot(buffer[:nbytes], buffer[nbytes:], (buffer,))

    def fill(self, slotted: SlotRow) -> SlotRecord:
        """Put a row and its record into the slot."""
        if self.row is not slotted.row:
            self.row[:] = slotted.row
        record = replace(slotted.record, checksum=checksum(self.row))
        self.rest[-RECORD_BYTES:] = np.frombuffer(record.encode(), np.uint8)
        return record

    def take(self, slotted: SlotRow) -> bool:
        """Take the row out of the slot, if it holds the one that its record says."""
        if not slotted.record.names(self.rest[-RECORD_BYTES:].tobytes()):
            return False
        if checksum(self.row) != slotted.record.checksum:
            return False
        if self.row is not slotted.row:
            slotted.row[:] = self.row
        return True
