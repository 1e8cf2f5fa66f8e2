"""The bytes of a row object: what its writer had in memory, and how a reader can trust it.

    ┌────────┬──────────────────────────┬────────┬─────────────────────┐
    │ header │ a checksum per band      │ digest │ the row             │
    └────────┴──────────────────────────┴────────┴─────────────────────┘
      128      8 each                     16       row_bytes, at a multiple of 64

A *band* is one head of one layer, in each section of its page. A reader that wants some heads or
layers reads the ranges of their bands, and the checksums say whether these are the bytes that were
written. The digest is of header and checksums. The header names the writer's layout by its
fingerprint, the group and the key: an object under a wrong name is not taken for a row. All
numbers are little endian.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from hashlib import blake2b
from struct import Struct

import numpy as np
import numpy.typing as npt
import xxhash

from kvstow.offload.remote.client import Range
from kvstow.offload.tier import Bytes
from kvstow.plan.layout import Layout, placed_sections
from kvstow.plan.view import Ints, align_up, merged

MAGIC = b"kvstow\x00r"
VERSION = 1
ALIGN = 64
_HEADER = Struct("<8sHHIQ32s32sB39x")  # magic, version, group, bands, row bytes, layout, key
_DIGEST = 16

Checksums = npt.NDArray[np.uint64]


class BadObject(StrEnum):
    """Why an object is not the row that its name says."""

    TRUNCATED = "truncated"
    FOREIGN = "foreign"
    """Not a row object, or one of another layout, group or key."""
    VERSION = "version"
    """Written by a version of kvstow whose objects are not read here."""
    DAMAGED = "damaged"
    """Bytes that are not those that were written."""


@dataclass(frozen=True, eq=False)
class RowObjects:
    """Row objects of one group of a writer's layout, which is a `row_layout`."""

    layout: Layout
    fingerprint: bytes
    group: int
    folder: str
    """Where the writer's objects lie in a store."""

    def name(self, key: bytes) -> str:
        """The name of the object of a row."""
        return f"{self.folder}/{self.group}/{key.hex()}"

    @cached_property
    def row_bytes(self) -> int:
        return self.layout.row_bytes(self.group)

    @cached_property
    def row_start(self) -> int:
        """Where the row begins in the object."""
        return align_up(_HEADER.size + 8 * self.num_bands + _DIGEST, ALIGN)

    @property
    def nbytes(self) -> int:
        """Bytes of an object."""
        return self.row_start + self.row_bytes

    @cached_property
    def _bands(self) -> list[tuple[int, int, int, int]]:
        """Per head, in each section of each layer's page, where it begins in the row; states, bytes
        between them, bytes of each. A band without gaps is one state."""
        rows, start = self.layout.groups[self.group], self.layout.runs(self.group, 0)[0].offset
        bands: list[tuple[int, int, int, int]] = []
        for layer, at in zip(rows.group.layers, rows.placements, strict=True):
            for spec, place in placed_sections(layer, at):
                states, step, cell = spec.states, place.token_stride, spec.cell_bytes
                if step == cell or states == 1:
                    states, step, cell = 1, 0, states * cell
                first = place.offset - start
                for head in range(spec.heads.size):
                    bands.append((first + head * place.head_stride, states, step, cell))
        return bands

    @property
    def num_bands(self) -> int:
        return len(self._bands)

    @cached_property
    def _runs(self) -> tuple[Ints, Ints, Ints]:
        """The runs of all bands, ascending: starts, ends, and whose they are."""
        first, states, step, cell = np.array(self._bands, np.int64).T
        owner = np.repeat(np.arange(len(first)), states)
        nth = np.arange(len(owner)) - np.repeat(np.cumsum(states) - states, states)
        start = first[owner] + nth * step[owner]
        order = np.argsort(start, kind="stable")
        return start[order], (start + cell[owner])[order], owner[order]

    # ── bands ─────────────────────────────────────────────────────────────────────

    def touched(self, starts: Ints, nbytes: Ints) -> Ints:
        """The bands that some bytes of the row belong to, ascending."""
        run_starts, run_ends, bands = self._runs
        first = np.searchsorted(run_ends, starts, "right")
        last = np.searchsorted(run_starts, starts + nbytes, "left")
        which = [bands[lo:hi] for lo, hi in zip(first.tolist(), last.tolist(), strict=True)]
        return np.unique(np.concatenate(which)) if which else np.empty(0, np.int64)

    def ranges(self, bands: Ints) -> list[Range]:
        """The bytes of bands in the row, in the fewest ranges."""
        run_starts, run_ends, owners = self._runs
        which = np.isin(owners, bands)
        starts, lengths = merged(run_starts[which], (run_ends - run_starts)[which])
        return list(zip(starts.tolist(), (starts + lengths).tolist(), strict=True))

    def checksums(self, row: Bytes, bands: Ints | None = None) -> Checksums:
        """The checksums of some bands of a row, or of all."""
        numbers: list[int] = [] if bands is None else np.sort(bands).tolist()
        which = self._bands if bands is None else [self._bands[b] for b in numbers]
        data = row.data
        sums = [
            xxhash.xxh3_64_intdigest(
                data[at : at + cell]
                if states == 1
                else np.ndarray((states, cell), np.uint8, data, at, (step, 1)).tobytes()
            )
            for at, states, step, cell in which
        ]
        return np.array(sums, "<u8")

    # ── objects ───────────────────────────────────────────────────────────────────

    def written(self, key: bytes, row: Bytes) -> Bytes:
        """The object of a row, in memory of its own."""
        blob = np.empty(self.nbytes, np.uint8)
        shape = (self.group, self.num_bands, self.row_bytes)
        head = _HEADER.pack(MAGIC, VERSION, *shape, self.fingerprint, key, len(key))
        head += self.checksums(row).tobytes()
        head += blake2b(head, digest_size=_DIGEST).digest()
        blob[: len(head)] = np.frombuffer(head, np.uint8)
        blob[len(head) : self.row_start] = 0
        blob[self.row_start :] = row
        return blob

    def read_head(self, key: bytes, head: Bytes) -> Checksums | BadObject:
        """The checksums in the first bytes of an object, if it is the row of that key."""
        if head[: len(MAGIC)].tobytes() != MAGIC:
            return BadObject.FOREIGN
        if len(head) < _HEADER.size:
            return BadObject.TRUNCATED
        _, version, group, bands, row_bytes, fingerprint, name, length = _HEADER.unpack(
            head[: _HEADER.size].tobytes()
        )
        if version != VERSION:
            return BadObject.VERSION
        own = (self.group, self.num_bands, self.row_bytes, self.fingerprint, key)
        if (group, bands, row_bytes, fingerprint, name[:length]) != own:
            return BadObject.FOREIGN
        end = _HEADER.size + 8 * self.num_bands
        if len(head) < end + _DIGEST:
            return BadObject.TRUNCATED
        digest = blake2b(head[:end].tobytes(), digest_size=_DIGEST).digest()
        if digest != head[end : end + _DIGEST].tobytes():
            return BadObject.DAMAGED
        return np.frombuffer(head[_HEADER.size : end].tobytes(), "<u8")

    def read(self, key: bytes, blob: Bytes) -> Bytes | BadObject:
        """The row in a whole object, if every byte of every band is as it was written."""
        checksums = self.read_head(key, blob[: self.row_start])
        if isinstance(checksums, BadObject):
            return checksums
        if len(blob) != self.nbytes:
            return BadObject.TRUNCATED if len(blob) < self.nbytes else BadObject.FOREIGN
        row = blob[self.row_start :]
        return row if self._agree(row, checksums, None) else BadObject.DAMAGED

    def ranges_with_head(self, bands: Ints) -> list[Range]:
        """The ranges of an object that hold its head and some bands."""
        at = self.row_start
        return [(0, at), *((at + start, at + end) for start, end in self.ranges(bands))]

    def read_parts(self, key: bytes, parts: Sequence[Bytes], bands: Ints) -> Bytes | BadObject:
        """A row of which these bands are as they were written, from the ranges `ranges_with_head`.

        All other bytes of it are zero.
        """
        checksums = self.read_head(key, parts[0])
        if isinstance(checksums, BadObject):
            return checksums
        row = np.zeros(self.row_bytes, np.uint8)
        for (start, end), part in zip(self.ranges(bands), parts[1:], strict=True):
            if len(part) != end - start:
                return BadObject.TRUNCATED
            row[start:end] = part
        return row if self._agree(row, checksums, bands) else BadObject.DAMAGED

    def _agree(self, row: Bytes, checksums: Checksums, bands: Ints | None) -> bool:
        expected = checksums if bands is None else checksums[np.sort(bands)]
        return np.array_equal(self.checksums(row, bands), expected)
