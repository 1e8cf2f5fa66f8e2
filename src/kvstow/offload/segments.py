"""Data files of a store: a header, then slots of one size.

    segment-000003.kv
    ┌────────┬────────┬────────┬────────┬─
    │ header │ slot 0 │ slot 1 │ slot 2 │ …
    └────────┴────────┴────────┴────────┴─
     4096     slot_bytes each

    header, little endian, zeros after it
      0  magic          8   "kvstowS1"
      8  segment_bytes  8
     16  slot_bytes     8
     24  group          4
     28  slots          4
     32  fingerprint   32   of the store's layout
     64  own            8   XXH3-64 of bytes [0, 64)

All files of a store are equally long, so one can pass from a group to another.
"""

import errno
import os
import queue
import struct
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from threading import Lock, Semaphore

import numpy as np

from kvstow.offload.files import BLOCK, Bytes, Files, aligned, is_aligned
from kvstow.offload.index import SLOT_BITS
from kvstow.offload.record import RECORD_BYTES, Record, checksum, decode, slot_bytes
from kvstow.plan.layout import Layout

MAGIC = b"kvstowS1"
CHUNK_BYTES = 4 << 20
"""Adjacent slots are read and written together up to this length."""

INDEX_RESERVE = 16 << 20

_HEADER = struct.Struct("<8sQQII32s")
_OWN = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class Header:
    """What a data file says of itself."""

    segment_bytes: int
    slot_bytes: int
    group: int
    slots: int
    fingerprint: bytes

    def encode(self) -> bytes:
        body = _HEADER.pack(
            MAGIC, self.segment_bytes, self.slot_bytes, self.group, self.slots, self.fingerprint
        )
        return (body + _OWN.pack(checksum(body))).ljust(BLOCK, b"\0")


def decode_header(data: bytes) -> Header | None:
    """The header, or None where the bytes are not one."""
    body = data[: _HEADER.size]
    end = _HEADER.size + _OWN.size
    if len(data) < end or checksum(body) != _OWN.unpack(data[_HEADER.size : end])[0]:
        return None
    magic, *fields = _HEADER.unpack(body)
    return Header(*fields) if magic == MAGIC else None


@dataclass(frozen=True, slots=True)
class Slotted:
    """A row and the place it goes to or comes from, with what its record must say."""

    place: int
    record: Record
    row: Bytes


@dataclass(frozen=True, slots=True)
class Writing:
    """Rows on their way to the medium."""

    rows: tuple[Slotted, ...]
    futures: tuple[Future[list[Record | OSError]], ...]


class Segments:
    """The data files of one store, opened when first used.

    At most `threads` reads and writes are under way at a time. As many threads again see to
    checksums meanwhile, so that the medium does not wait for them.
    """

    def __init__(
        self, path: Path, layout: Layout, segment_bytes: int, fingerprint: str, *, files: Files,
        threads: int,
    ) -> None:  # fmt: skip
        self.path = path
        self.segment_bytes = segment_bytes
        self.slot_bytes = tuple(slot_bytes(layout.row_bytes(g)) for g in range(len(layout.groups)))
        self.slots = tuple((segment_bytes - BLOCK) // n for n in self.slot_bytes)
        self._fingerprint = bytes.fromhex(fingerprint)
        self._files = files
        self._open: dict[int, int] = {}
        self._gone: list[int] = []
        self._unsynced_name = False
        self._lock = Lock()
        self._turns = Semaphore(threads)
        self._threads = ThreadPoolExecutor(2 * threads, thread_name_prefix="kvstow-disk")
        self._buffers: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
        chunk = max(CHUNK_BYTES, *self.slot_bytes)
        for _ in range(2 * threads):
            self._buffers.put(aligned(chunk))

    # ── files ─────────────────────────────────────────────────────────────────────

    def file(self, segment: int) -> Path:
        return self.path / f"segment-{segment:06}.kv"

    def numbers(self) -> set[int]:
        """The data files that are there."""
        return {int(file.stem.split("-")[1]) for file in self.path.glob("segment-*.kv")}

    def nbytes(self, segment: int) -> int | None:
        """Bytes of a data file; None where it is missing."""
        return self._files.size(self.file(segment))

    def create(self, segment: int, group: int) -> None:
        """A new data file, its space set aside. Raises OSError, having left nothing.

        The last of the disk is left to the index: a store that cannot write it is of no use.
        """
        reserve = min(INDEX_RESERVE, 4 * self.segment_bytes)
        if self._files.free(self.path) < self.segment_bytes + reserve:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path = self.file(segment)
        fd = self._files.open(path, create=True)
        try:
            self._files.allocate(fd, self.segment_bytes)
            self._write_header(fd, group)
        except BaseException:
            self._files.close(fd)
            self._files.remove(path)
            raise
        with self._lock:
            self._open[segment] = fd
            self._unsynced_name = True

    def restore(self, segment: int) -> None:
        """A data file that was cut short has its full length again."""
        self._files.allocate(self._fd(segment), self.segment_bytes)

    def hand_over(self, segment: int, group: int) -> None:
        """The data file belongs to another group; nothing in it is a row any more."""
        fd = self._fd(segment)
        self._write_header(fd, group)
        self._files.sync(fd)

    def header(self, segment: int) -> Header | None:
        """What the file says of itself; None where that is unreadable."""
        buffer = aligned(BLOCK)
        if self._files.read(self._fd(segment), [buffer], 0) < BLOCK:
            return None
        return decode_header(buffer.tobytes())

    def owns(self, header: Header) -> bool:
        """Whether a header is what this store would write for that group."""
        return header.group < len(self.slots) and header == self._header(header.group)

    def remove(self, segment: int) -> None:
        """The data file is gone."""
        with self._lock:
            if segment in self._open:
                self._gone.append(self._open.pop(segment))
        self._files.remove(self.file(segment))

    def close(self) -> None:
        self._threads.shutdown(wait=True)
        with self._lock:
            for fd in (*self._open.values(), *self._gone):
                self._files.close(fd)
            self._open.clear()
            self._gone.clear()

    def _write_header(self, fd: int, group: int) -> None:
        buffer = aligned(BLOCK)
        buffer[:] = np.frombuffer(self._header(group).encode(), np.uint8)
        self._files.write(fd, [buffer], 0)

    def _header(self, group: int) -> Header:
        return Header(
            self.segment_bytes, self.slot_bytes[group], group, self.slots[group],
            self._fingerprint,
        )  # fmt: skip

    def _fd(self, segment: int) -> int:
        """A descriptor of the file that has that name now: another process may have removed
        the one we knew, and made a new one."""
        with self._lock:
            fd = self._open.get(segment)
            if fd is not None and os.fstat(fd).st_nlink == 0:
                self._gone.append(self._open.pop(segment))
            if segment not in self._open:
                self._open[segment] = self._files.open(self.file(segment))
            return self._open[segment]

    # ── rows ──────────────────────────────────────────────────────────────────────

    def start(self, group: int, rows: Sequence[Slotted]) -> Writing:
        """Begin to write rows, ascending by place; end it by `finish`."""
        chunks = self._chunks(group, rows)
        futures = [self._threads.submit(self._write_chunk, group, chunk) for chunk in chunks]
        return Writing(tuple(rows), tuple(futures))

    def finish(self, writing: Writing) -> list[Record | OSError]:
        """Wait until the rows are on the medium.

        Per row: its record, completed by the checksum, or why it is not there.
        """
        results = [result for future in writing.futures for result in future.result()]
        failed = self._synced({row.place >> SLOT_BITS for row in writing.rows})
        return [
            failed.get(row.place >> SLOT_BITS, result)
            for row, result in zip(writing.rows, results, strict=True)
        ]

    def read(self, group: int, rows: Sequence[Slotted]) -> list[bool | OSError]:
        """Read rows, ascending by place, into `row.row`.

        Per row: whether its bytes are those of its record, or why they could not be read.
        """
        chunks = self._chunks(group, rows)
        results = self._threads.map(self._read_chunk, repeat(group), chunks)
        return [result for chunk in results for result in chunk]

    def records(self, segment: int, group: int) -> list[Record | None]:
        """The record of every slot of a data file, whatever the index says."""
        found: list[Record | None] = []
        buffer = aligned(BLOCK)
        step = self.slot_bytes[group]
        for slot in range(self.slots[group]):
            end = BLOCK + (slot + 1) * step
            count = self._files.read(self._fd(segment), [buffer], end - BLOCK)
            whole = count == BLOCK
            found.append(decode(buffer[-RECORD_BYTES:].tobytes()) if whole else None)
        return found

    def _chunks(self, group: int, rows: Sequence[Slotted]) -> list[list[Slotted]]:
        """Rows in adjacent slots together, as many as fit into a buffer."""
        most = max(1, CHUNK_BYTES // self.slot_bytes[group])
        chunks: list[list[Slotted]] = []
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
        slot = at & ((1 << SLOT_BITS) - 1)
        return self._fd(at >> SLOT_BITS), BLOCK + slot * self.slot_bytes[group]

    def _write_chunk(self, group: int, rows: Sequence[Slotted]) -> list[Record | OSError]:
        step = self.slot_bytes[group]
        try:
            with self._buffer(len(rows) * step) as buffer:
                slots = [_Slot.over(buffer[i * step : (i + 1) * step], row)
                         for i, row in enumerate(rows)]  # fmt: skip
                records = [slot.fill(row) for slot, row in zip(slots, rows, strict=True)]
                fd, offset = self._where(group, rows[0].place)
                parts = [part for slot in slots for part in slot.parts]
                with self._turns:
                    self._files.write(fd, parts, offset)
        except OSError as error:
            return [error] * len(rows)
        return list(records)

    def _read_chunk(self, group: int, rows: Sequence[Slotted]) -> list[bool | OSError]:
        step = self.slot_bytes[group]
        try:
            with self._buffer(len(rows) * step) as buffer:
                slots = [_Slot.over(buffer[i * step : (i + 1) * step], row)
                         for i, row in enumerate(rows)]  # fmt: skip
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
        """Make the files, and the names of new ones, durable; those for which that failed."""
        failed: dict[int, OSError] = {}
        if self._unsynced_name:
            self._unsynced_name = False
            self._files.sync_directory(self.path)
        for segment in segments:
            try:
                self._files.sync(self._fd(segment))
            except OSError as error:
                failed[segment] = error
        return failed


@dataclass(frozen=True, slots=True)
class _Slot:
    """A slot in memory: one buffer, or the row itself where direct I/O can use it, and a
    buffer for the rest."""

    row: Bytes
    rest: Bytes
    parts: tuple[Bytes, ...]

    @staticmethod
    def over(buffer: Bytes, slotted: Slotted) -> "_Slot":
        nbytes = len(slotted.row)
        if is_aligned(slotted.row):
            return _Slot(slotted.row, buffer[nbytes:], (slotted.row, buffer[nbytes:]))
        return _Slot(buffer[:nbytes], buffer[nbytes:], (buffer,))

    def fill(self, slotted: Slotted) -> Record:
        """Put a row and its record into the slot."""
        if self.row is not slotted.row:
            self.row[:] = slotted.row
        record = replace(slotted.record, checksum=checksum(self.row))
        self.rest[-RECORD_BYTES:] = np.frombuffer(record.encode(), np.uint8)
        return record

    def take(self, slotted: Slotted) -> bool:
        """Take the row out of the slot, if it holds the one that its record says."""
        if not slotted.record.names(self.rest[-RECORD_BYTES:].tobytes()):
            return False
        if checksum(self.row) != slotted.record.checksum:
            return False
        if self.row is not slotted.row:
            slotted.row[:] = self.row
        return True
