"""Data files of a store: a header, then slots of one size, each of which ends with a record.

    segment-000003.kv
    ┌────────┬────────┬────────┬────────┬─      slot       slot_bytes, a multiple of 4096
    │ header │ slot 0 │ slot 1 │ slot 2 │ …     ┌──────────────┬─────────┬──────────┐
    └────────┴────────┴────────┴────────┴─      │ row          │ padding │ record   │
     4096     slot_bytes each                   └──────────────┴─────────┴──────────┘
                                                 row_bytes                160 bytes
    header, little endian, zeros after it
      0  magic          8   "kvstowS1"
      8  segment_bytes  8
     16  slot_bytes     8
     24  group          4
     28  slots          4
     32  fingerprint   32   of the store's layout
     64  own            8   XXH3-64 of bytes [0, 64)

    record, little endian
      0  magic          8   "kvstowR1"
      8  generation     8   unique to this write of this slot, over the life of the store
     16  row_bytes      8
     24  checksum       8   XXH3-64 of the row's bytes
     32  group          4
     36  block          4   logical number of the block in its sequence
     40  key_bytes      2
     42  parent_bytes   2
     44  zeros          4
     48  key           32   zeros after key_bytes
     80  parent        32   the key of the block before, zeros for the first
    112  zeros         40
    152  own            8   XXH3-64 of bytes [0, 152) of the record

All files of a store are equally long, so one can pass from a group to another. A torn write, or a
slot that was written again, is detected: the record's generation or the row's checksum is not the
one that the index (or the record itself) states.
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
from xxhash import xxh3_64_intdigest

from kvstow.offload.disk.files import BLOCK, Bytes, Files, aligned, is_aligned
from kvstow.offload.disk.index import SLOT_BITS
from kvstow.plan.layout import Layout
from kvstow.plan.view import align_up

RECORD_MAGIC = b"kvstowR1"
RECORD_BYTES = 160
_RECORD_FIELDS = struct.Struct("<8sQQqIIHH4x32s32s40x")
_RECORD_HEAD = struct.Struct("<8sQQqI")
_RECORD_OWN = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class ChainLink:
    """Where a block stands in its sequence: its number, and the key of the block before it."""

    block: int = 0
    parent: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRecord:
    """What a slot says of itself."""

    generation: int
    group: int
    key: bytes
    row_bytes: int
    checksum: int
    link: ChainLink

    def names(self, data: bytes) -> bool:
        """Whether a slot's record is of the same write of the same row, wherever that stands
        in its sequence. Cheaper than to decode it: what must agree is compared as bytes."""
        head = _RECORD_HEAD.pack(
            RECORD_MAGIC, self.generation, self.row_bytes, self.checksum, self.group
        )
        return (
            data[: _RECORD_HEAD.size] == head
            and data[40:42] == len(self.key).to_bytes(2, "little")
            and data[48:80] == self.key.ljust(32, b"\0")
            and data[_RECORD_FIELDS.size :]
            == _RECORD_OWN.pack(checksum(data[: _RECORD_FIELDS.size]))
        )

    def encode(self) -> bytes:
        """The record's bytes."""
        body = _RECORD_FIELDS.pack(
            RECORD_MAGIC,
            self.generation,
            self.row_bytes,
            self.checksum,
            self.group,
            self.link.block,
            len(self.key),
            len(self.link.parent),
            self.key,
            self.link.parent,
        )
        return body + _RECORD_OWN.pack(checksum(body))


def decode_record(data: bytes) -> SlotRecord | None:
    """The record, or None where the bytes are not one: never written, or torn."""
    body = data[: _RECORD_FIELDS.size]
    if (
        len(data) != RECORD_BYTES
        or checksum(body) != _RECORD_OWN.unpack(data[_RECORD_FIELDS.size :])[0]
    ):
        return None
    magic, generation, row_bytes, row_sum, group, block, key_bytes, parent_bytes, key, parent = (
        _RECORD_FIELDS.unpack(body)
    )
    if magic != RECORD_MAGIC:
        return None
    return SlotRecord(
        generation=generation,
        group=group,
        key=key[:key_bytes],
        row_bytes=row_bytes,
        checksum=row_sum,
        link=ChainLink(block, parent[:parent_bytes]),
    )


def slot_bytes(row_bytes: int) -> int:
    """Bytes of the slot for a row: row, padding, record."""
    return align_up(row_bytes + RECORD_BYTES, BLOCK)


def checksum(data: Bytes | bytes) -> int:
    """XXH3-64 of the bytes, seed 0, as a signed number (SQLite has no other)."""
    digest = xxh3_64_intdigest(data if isinstance(data, bytes) else data.data)
    return digest - (digest >> 63 << 64)


HEADER_MAGIC = b"kvstowS1"
CHUNK_BYTES = 4 << 20
"""Adjacent slots are read and written together up to this length."""

INDEX_RESERVE = 16 << 20

_HEADER = struct.Struct("<8sQQII32s")
_HEADER_OWN = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What a data file says of itself."""

    segment_bytes: int
    slot_bytes: int
    group: int
    slots: int
    fingerprint: bytes

    def encode(self) -> bytes:
        body = _HEADER.pack(
            HEADER_MAGIC,
            self.segment_bytes,
            self.slot_bytes,
            self.group,
            self.slots,
            self.fingerprint,
        )
        return (body + _HEADER_OWN.pack(checksum(body))).ljust(BLOCK, b"\0")


def decode_header(data: bytes) -> SegmentHeader | None:
    """The header, or None where the bytes are not one."""
    body = data[: _HEADER.size]
    end = _HEADER.size + _HEADER_OWN.size
    if len(data) < end or checksum(body) != _HEADER_OWN.unpack(data[_HEADER.size : end])[0]:
        return None
    magic, *fields = _HEADER.unpack(body)
    return SegmentHeader(*fields) if magic == HEADER_MAGIC else None


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
    checksums meanwhile, so that the medium does not wait for them.
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

    def header(self, segment: int) -> SegmentHeader | None:
        """What the file says of itself; None where that is unreadable."""
        buffer = aligned(BLOCK)
        if self._files.read(self._fd(segment), [buffer], 0) < BLOCK:
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

    def _header(self, group: int) -> SegmentHeader:
        return SegmentHeader(
            self.segment_bytes,
            self.slot_bytes[group],
            group,
            self.slots[group],
            self._fingerprint,
        )

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
        failed = self._synced({row.place >> SLOT_BITS for row in writing.rows})
        return [
            failed.get(row.place >> SLOT_BITS, result)
            for row, result in zip(writing.rows, results, strict=True)
        ]

    def read(self, group: int, rows: Sequence[SlotRow]) -> list[bool | OSError]:
        """Read rows, ascending by place, into `row.row`.

        Per row: whether its bytes are those of its record, or why they could not be read.
        """
        chunks = self._chunks(group, rows)
        results = self._threads.map(self._read_chunk, repeat(group), chunks)
        return [result for chunk in results for result in chunk]

    def records(self, segment: int, group: int) -> list[SlotRecord | None]:
        """The record of every slot of a data file, whatever the index says."""
        found: list[SlotRecord | None] = []
        buffer = aligned(BLOCK)
        step = self.slot_bytes[group]
        for slot in range(self.slots[group]):
            end = BLOCK + (slot + 1) * step
            count = self._files.read(self._fd(segment), [buffer], end - BLOCK)
            whole = count == BLOCK
            found.append(decode_record(buffer[-RECORD_BYTES:].tobytes()) if whole else None)
        return found

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
        slot = at & ((1 << SLOT_BITS) - 1)
        return self._fd(at >> SLOT_BITS), BLOCK + slot * self.slot_bytes[group]

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
