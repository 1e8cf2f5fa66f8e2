"""Keys of the digest: which factor each byte of a cell is multiplied by, and who counts it.

A *word* is four bytes of a field, little-endian, cut along the field's last axis in the
coordinates of the whole model and filled up with zeros at the end of that axis. A rank that
holds some of a word's bytes counts those: the sum over ranks is the sum over whole words.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvstow.errors import SpecError
from kvstow.plan.retention import Full
from kvstow.plan.spec import Extent, Field, LayerSpec
from kvstow.plan.view import Ints, ceil_div
from kvstow.route.overlap import Box, Interval

Words = npt.NDArray[np.uint64]

WORD_BYTES = 4
VERSION = b"kvstow digest 1"
STEP = np.uint64(0x9E3779B97F4A7C15)


def mixed(x: Words) -> Words:
    """One odd number per x, without a visible pattern: a bijection of 64-bit words, made odd."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


def seed(*names: str) -> int:
    """64 bits that stand for a layer, or for a field."""
    text = b"\0".join([VERSION, *(name.encode() for name in names)])
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def state_keys(layer_seed: np.uint64, states: npt.NDArray[np.int64]) -> Words:
    """T(layer, state)."""
    return mixed(layer_seed + (states + 1).astype(np.uint64) * STEP)


@lru_cache(maxsize=4096)
def layer_seed(name: str) -> int:
    """64 bits that stand for a layer."""
    return seed("layer", name)


@dataclass(frozen=True, slots=True, eq=False)
class CellKeys:
    """P for every word of every head's cell, from the first head on of which something counts:
    `table[head, word]`; 0 where nothing counts.

    `unit` is 4 where all bytes of four in memory belong to one word, 1 otherwise.
    """

    table: Words
    unit: int
    first_head: int

    def in_words(self, unit: int) -> Words:
        """The keys for words of this length."""
        if unit == self.unit:
            return self.table
        shifts = np.arange(self.unit, dtype=np.uint64) * np.uint64(8)
        return (self.table[..., None] << shifts).reshape(len(self.table), -1)


def cell_keys(
    spec: LayerSpec, claimed: Mapping[str, Sequence[Box]] | None, heads: Interval | None
) -> CellKeys:
    """P over a layer's cells: of each field only the boxes that are claimed, of all only some of
    the model's heads, where those are given."""
    boxes = None
    if claimed is not None:
        boxes = tuple(tuple(claimed.get(field.name, ())) for field in spec.fields)
    return _keys_of_heads(spec.heads, spec.fields, boxes, heads)


@lru_cache(maxsize=4096)
def _keys_of_heads(
    heads: Extent,
    fields: tuple[Field, ...],
    claimed: tuple[tuple[Box, ...], ...] | None,
    some: Interval | None,
) -> CellKeys:
    """Some rows of the table of all heads: a sample is of another head each time."""
    every = _cell_keys(heads, fields, claimed)
    if some is None or not every.table.size:
        return every
    held = np.concatenate([np.arange(*piece) for piece in heads.pieces])
    inside = (held >= some[0]) & (held < some[1])
    first, end = int(inside.argmax()), len(held) - int(inside[::-1].argmax())
    table = every.table[first:end] * inside[first:end, None]
    return CellKeys(table if table.any() else table[:0], every.unit, first)


@lru_cache(maxsize=256)
def _cell_keys(
    heads: Extent, fields: tuple[Field, ...], claimed: tuple[tuple[Box, ...], ...] | None
) -> CellKeys:
    spec = LayerSpec(
        name="any", retention=Full(), block_tokens=1, states=1, heads=heads, fields=fields
    )
    held = _coordinates(heads.pieces)
    table = np.zeros((len(held), spec.cell_bytes), np.uint64)
    for number, field in enumerate(fields):
        keys = _field_keys(held, field, None if claimed is None else claimed[number])
        at = spec.field_offsets[field.name]
        table[:, at : at + field.nbytes] = keys.reshape(len(held), field.nbytes)
    return _in_words(table if table.any() else table[:0])


def _field_keys(heads: Ints, field: Field, claimed: tuple[Box, ...] | None) -> Words:
    """P for every byte of a field: `[head, …field's axes, last axis in bytes]`."""
    *leading, last = field.axes
    bits = field.dtype.bits
    boxes = [(*box[:-1], _in_bytes(field, box[-1])) for box in claimed or ()]
    pieces = [_in_bytes(field, piece) for piece in last.pieces]
    axes = [heads, *(_coordinates(axis.pieces) for axis in leading), _coordinates(pieces)]
    lines = heads
    for axis, coordinates in zip(leading, axes[1:-1], strict=True):
        lines = lines[..., None] * axis.total + coordinates
    words = lines[..., None] * ceil_div(last.total * bits, 8 * WORD_BYTES) + axes[-1] // WORD_BYTES
    keys = mixed(np.uint64(seed("field", field.name)) + (words + 1).astype(np.uint64) * STEP)
    keys <<= (8 * (axes[-1] % WORD_BYTES)).astype(np.uint64)
    if claimed is None:
        return keys
    counts = np.zeros(keys.shape, np.bool_)
    for box in boxes:
        inside = [(axis >= lo) & (axis < hi) for axis, (lo, hi) in zip(axes, box, strict=True)]
        counts[np.ix_(*inside)] = True
    return keys * counts


def _coordinates(pieces: Iterable[Interval]) -> Ints:
    """Where what a rank holds of an axis lies on the whole axis."""
    return np.concatenate([np.arange(*piece) for piece in pieces])


def _in_bytes(field: Field, interval: Interval) -> Interval:
    """An interval of the last axis in bytes."""
    bits = field.dtype.bits
    if any(bound * bits % 8 for bound in interval):
        raise SpecError(f"field {field.name!r}: {interval} of {field.dtype} are not whole bytes")
    return interval[0] * bits // 8, interval[1] * bits // 8


def _in_words(table: Words) -> CellKeys:
    """Keys per word of four bytes where memory is cut like the model's words; else per byte."""
    heads, nbytes = table.shape
    if nbytes % WORD_BYTES == 0:
        fours = table.reshape(heads, nbytes // WORD_BYTES, WORD_BYTES)
        shifts = np.arange(WORD_BYTES, dtype=np.uint64) * np.uint64(8)
        if (fours == fours[..., :1] << shifts).all():
            return CellKeys(np.ascontiguousarray(fours[..., 0]), WORD_BYTES, 0)
    return CellKeys(table, 1, 0)
