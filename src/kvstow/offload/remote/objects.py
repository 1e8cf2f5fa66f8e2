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
from kvstow.offload.tier import Bools, Bytes
from kvstow.plan.layout import Layout, placed_sections
from kvstow.plan.view import Ints, align_up

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
    def _pages(self) -> tuple[tuple[int, tuple[int, int, int], tuple[int, int, int]], ...]:
        """Per layer and section of its page: where it begins in the row; heads, states, bytes of
        a cell; strides."""
        rows, start = self.layout.groups[self.group], self.layout.runs(self.group, 0)[0].offset
        return tuple(
            (
                place.offset - start,
                (spec.heads.size, spec.states, spec.cell_bytes),
                (place.head_stride, place.token_stride, 1),
            )
            for layer, at in zip(rows.group.layers, rows.placements, strict=True)
            for spec, place in placed_sections(layer, at)
        )

    @cached_property
    def num_bands(self) -> int:
        return sum(shape[0] for _, shape, _ in self._pages)

    @cached_property
    def _runs(self) -> tuple[Ints, Ints, Ints]:
        """The runs of all bands, ascending: starts, ends, and whose they are."""
        starts: list[Ints] = []
        nbytes: list[Ints] = []
        bands: list[Ints] = []
        first = 0
        for offset, (heads, states, cell), (head, token, _) in self._pages:
            whole = token == cell or states == 1
            steps = np.zeros(1, np.int64) if whole else np.arange(states) * token
            places = offset + np.arange(heads)[:, None] * head + steps
            starts.append(places.ravel())
            nbytes.append(np.full(places.size, states * cell if whole else cell))
            bands.append(np.repeat(np.arange(first, first + heads), len(steps)))
            first += heads
        start, size = np.concatenate(starts), np.concatenate(nbytes)
        order = np.argsort(start, kind="stable")
        return start[order], (start + size)[order], np.concatenate(bands)[order]

    @cached_property
    def _spans(self) -> list[Range]:
        """Per band where it lies in the row; empty where some band is not a single run."""
        if not all(n == 1 or token == cell for _, (_, n, cell), (_, token, _) in self._pages):
            return []
        return [
            (offset + h * head, offset + h * head + states * cell)
            for offset, (heads, states, cell), (head, _, _) in self._pages
            for h in range(heads)
        ]

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
        mine = np.isin(owners, bands)
        starts, ends = run_starts[mine], run_ends[mine]
        apart = np.flatnonzero(starts[1:] != ends[:-1]) + 1
        first, last = np.append(0, apart), np.append(apart, len(starts)) - 1
        return list(zip(starts[first].tolist(), ends[last].tolist(), strict=True))

    def checksums(self, row: Bytes, bands: Ints | None = None) -> Checksums:
        """The checksums of some bands of a row, or of all."""
        if self._spans:
            numbers: list[int] = [] if bands is None else np.sort(bands).tolist()
            which = self._spans if bands is None else [self._spans[b] for b in numbers]
            data = row.data
            return np.array([xxhash.xxh3_64_intdigest(data[lo:hi]) for lo, hi in which], "<u8")
        found: list[int] = []
        first = 0
        wanted = None if bands is None else np.sort(bands)
        for offset, (heads, states, cell), strides in self._pages:
            which = range(heads) if wanted is None else _between(wanted, first, heads)
            first += heads
            if not len(which):
                continue
            page = np.lib.stride_tricks.as_strided(
                row[offset:], (heads, states, cell), strides, writeable=False
            )
            found += [xxhash.xxh3_64_intdigest(np.ascontiguousarray(page[h]).data) for h in which]
        return np.array(found, "<u8")

    # ── objects ───────────────────────────────────────────────────────────────────

    def written(self, key: bytes, row: Bytes, into: Bytes | None = None) -> Bytes:
        """The object of a row, in memory of its own or `into` as many bytes."""
        blob = np.empty(self.nbytes, np.uint8) if into is None else into
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
        mine = (self.group, self.num_bands, self.row_bytes, self.fingerprint, key)
        if (group, bands, row_bytes, fingerprint, name[:length]) != mine:
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

    def wanted(self, bands: Ints) -> list[Range]:
        """The ranges of an object that hold its head and some bands."""
        found = [(0, self.row_start)]
        for start, end in self.ranges(bands):
            found.append((self.row_start + start, self.row_start + end))
        return found

    def read_parts(self, key: bytes, parts: Sequence[Bytes], bands: Ints) -> Bytes | BadObject:
        """A row of which these bands are as they were written, from the parts that are `wanted`.

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
        said = checksums if bands is None else checksums[np.sort(bands)]
        found: Bools = self.checksums(row, bands) == said
        return bool(found.all())


def _between(numbers: Ints, first: int, count: int) -> list[int]:
    """The numbers in `[first, first + count)`, counted from `first`; `numbers` ascend."""
    lo, hi = np.searchsorted(numbers, (first, first + count)).tolist()
    return (numbers[lo:hi] - first).tolist()
