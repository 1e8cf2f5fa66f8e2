"""Bytes of a row file: one page that says what it holds, then rows of one group, end to end.

    rows-3fa9c1…/0/a/ab12…ef
    ┌────────┬───────┬───────┬─   ─┬───────┐
    │ header │ row 0 │ row 1 │  …  │ zeros │      row k begins at 4096 + k · row_bytes
    └────────┴───────┴───────┴─   ─┴───────┘
     4096                           to a multiple of 4096

    header, little endian
      0  magic          8   "kvstowF1"
      8  row_bytes      8
     16  group          4
     20  rows           4   1 to 50
     24  fingerprint   32   of the store's layout
     56  zeros          8
     64  entries       80   each, one per row, in order
              0  checksum       8   XXH3-64 of the row's bytes
              8  block          4   logical number of the block in its sequence
             12  key_bytes      2
             14  parent_bytes   2
             16  key           32   zeros after key_bytes
             48  parent        32   the key of the block before, zeros for the first
   4064  zeros         24
   4088  own            8   XXH3-64 of bytes [0, 4088)

A file with several rows has one name per row, all of them hard links: the key of a row is always
the name of the file that holds it.
"""

import struct
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from kvstow.offload.disk.files import BLOCK, Bytes
from kvstow.plan.view import align_up

MAGIC = b"kvstowF1"
MAX_ROWS = 50
"""Rows that one header has room for."""

_HEAD = struct.Struct("<8sQII32s8x")
_ENTRY = struct.Struct("<qIHH32s32s")
_OWN = struct.Struct("<q")
_OWN_AT = BLOCK - _OWN.size


@dataclass(frozen=True, slots=True)
class ChainLink:
    """Where a block stands in its sequence: its number, and the key of the block before it."""

    block: int = 0
    parent: bytes = b""


@dataclass(frozen=True, slots=True)
class RowEntry:
    """What a header says of one row."""

    key: bytes
    checksum: int
    link: ChainLink


@dataclass(frozen=True, slots=True)
class Header:
    """What a row file says of itself."""

    fingerprint: bytes
    group: int
    row_bytes: int
    entries: tuple[RowEntry, ...]

    def encode(self) -> bytes:
        """The file's first page."""
        page = bytearray(BLOCK)
        head = (MAGIC, self.row_bytes, self.group, len(self.entries), self.fingerprint)
        _HEAD.pack_into(page, 0, *head)
        for k, entry in enumerate(self.entries):
            link = entry.link
            lengths = len(entry.key), len(link.parent)
            fields = (entry.checksum, link.block, *lengths, entry.key, link.parent)
            _ENTRY.pack_into(page, _HEAD.size + k * _ENTRY.size, *fields)
        _OWN.pack_into(page, _OWN_AT, checksum(bytes(page[:_OWN_AT])))
        return bytes(page)

    def offset(self, row: int) -> int:
        """Where a row begins in the file."""
        return BLOCK + row * self.row_bytes


def decode_header(page: bytes) -> Header | None:
    """The header, or None where the bytes are not one: never written, torn, or damaged."""
    if len(page) != BLOCK or _OWN.unpack_from(page, _OWN_AT)[0] != checksum(page[:_OWN_AT]):
        return None
    magic, row_bytes, group, rows, fingerprint = _HEAD.unpack_from(page)
    if magic != MAGIC or not 1 <= rows <= MAX_ROWS:
        return None
    entries: list[RowEntry] = []
    for k in range(rows):
        fields = _ENTRY.unpack_from(page, _HEAD.size + k * _ENTRY.size)
        row_sum, block, key_bytes, parent_bytes, key, parent = fields
        link = ChainLink(block, parent[:parent_bytes])
        entries.append(RowEntry(key[:key_bytes], row_sum, link))
    return Header(fingerprint, group, row_bytes, tuple(entries))


def file_bytes(row_bytes: int, rows: int) -> int:
    """Bytes of a file that holds so many rows."""
    return BLOCK + align_up(rows * row_bytes, BLOCK)


def checksum(data: Bytes | bytes) -> int:
    """XXH3-64 of the bytes, seed 0, as a signed number, as arrays of the mover keep them."""
    digest = xxh3_64_intdigest(data if isinstance(data, bytes) else data.data)
    return digest - (digest >> 63 << 64)
