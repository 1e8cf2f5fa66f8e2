"""Bytes of a data file: a header, then slots of one size, each of which ends with a record.

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

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64_intdigest

from kvstow.offload.disk.files import BLOCK, Bytes
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
        in its sequence. Cheaper than to decode it."""
        head = (RECORD_MAGIC, self.generation, self.row_bytes, self.checksum, self.group)
        return (
            _RECORD_HEAD.unpack_from(data) == head
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


def segment_file(path: Path, segment: int) -> Path:
    """The data file of that number."""
    return path / f"segment-{segment:06}.kv"


def segment_numbers(path: Path) -> Iterator[int]:
    """The numbers of the data files that are there, ascending; other names are left alone."""
    numbers = (_NAME.fullmatch(file.name) for file in path.glob("segment-*.kv"))
    return iter(sorted(int(match[1]) for match in numbers if match))


_NAME = re.compile(r"segment-(\d{6}|[1-9]\d{6,8})\.kv")
