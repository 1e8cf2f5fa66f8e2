"""The record that ends every slot of a data file: which row the slot holds, and its checksum.

    slot                                                       slot_bytes, a multiple of 4096
    ┌──────────────────────────────┬─────────┬──────────┐
    │ row                          │ padding │ record   │
    └──────────────────────────────┴─────────┴──────────┘
     row_bytes                                 160 bytes

    record, little endian
      0  magic         8   "kvstowR1"
      8  generation    8   unique to this write of this slot, over the life of the store
     16  row_bytes     8
     24  checksum      8   XXH3-64 of the row's bytes
     32  group         4
     36  block         4   logical number of the block in its sequence
     40  key_bytes     2
     42  parent_bytes  2
     44  zeros         4
     48  key          32   zeros after key_bytes
     80  parent       32   the key of the block before, zeros for the first
    112  zeros        40
    152  own           8   XXH3-64 of bytes [0, 152) of the record

A write that was torn, or a slot that was written again, shows: the record's generation or the
row's checksum is not the one that the index (or the record itself) states.
"""

import struct
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from kvstow.offload.files import BLOCK, Bytes
from kvstow.plan.view import align_up

MAGIC = b"kvstowR1"
RECORD_BYTES = 160
_FIELDS = struct.Struct("<8sQQqIIHH4x32s32s40x")
_HEAD = struct.Struct("<8sQQqI")
_OWN = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class Link:
    """Where a block stands in its sequence: its number, and the key of the block before it."""

    block: int = 0
    parent: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a slot says of itself."""

    generation: int
    group: int
    key: bytes
    row_bytes: int
    checksum: int
    link: Link

    def names(self, data: bytes) -> bool:
        """Whether a slot's record is of the same write of the same row, wherever that stands
        in its sequence. Cheaper than to decode it: what must agree is compared as bytes."""
        head = _HEAD.pack(MAGIC, self.generation, self.row_bytes, self.checksum, self.group)
        return (
            data[: _HEAD.size] == head
            and data[40:42] == len(self.key).to_bytes(2, "little")
            and data[48:80] == self.key.ljust(32, b"\0")
            and data[_FIELDS.size :] == _OWN.pack(checksum(data[: _FIELDS.size]))
        )

    def encode(self) -> bytes:
        """The record's bytes."""
        body = _FIELDS.pack(
            MAGIC, self.generation, self.row_bytes, self.checksum, self.group, self.link.block,
            len(self.key), len(self.link.parent), self.key, self.link.parent,
        )  # fmt: skip
        return body + _OWN.pack(checksum(body))


def decode(data: bytes) -> Record | None:
    """The record, or None where the bytes are not one: never written, or torn."""
    body = data[: _FIELDS.size]
    if len(data) != RECORD_BYTES or checksum(body) != _OWN.unpack(data[_FIELDS.size :])[0]:
        return None
    magic, generation, row_bytes, row_sum, group, block, key_bytes, parent_bytes, key, parent = (
        _FIELDS.unpack(body)
    )
    if magic != MAGIC:
        return None
    return Record(
        generation=generation, group=group, key=key[:key_bytes], row_bytes=row_bytes,
        checksum=row_sum, link=Link(block, parent[:parent_bytes]),
    )  # fmt: skip


def slot_bytes(row_bytes: int) -> int:
    """Bytes of the slot for a row: row, padding, record."""
    return align_up(row_bytes + RECORD_BYTES, BLOCK)


def checksum(data: Bytes | bytes) -> int:
    """XXH3-64 of the bytes, seed 0, as a signed number (SQLite has no other)."""
    digest = xxh3_64_intdigest(data if isinstance(data, bytes) else data.data)
    return digest - (digest >> 63 << 64)
