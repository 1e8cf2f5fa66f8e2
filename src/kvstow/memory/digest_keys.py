"""Keys of the digest: which factor each byte of a cell is multiplied by, and who counts it.

A *word* is four bytes of a field, little-endian, cut along the field's last axis in the
coordinates of the whole model and filled up with zeros at the end of that axis. A rank that
holds some of a word's bytes counts those: the sum over ranks is the sum over whole words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import product

import numpy as np
import numpy.typing as npt

from kvstow.errors import SpecError
from kvstow.plan.retention import Full
from kvstow.plan.spec import Extent, Field, LayerSpec
from kvstow.plan.view import ceil_div
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
    """P for every word of every head's cell: `table[head, word]`; 0 where nothing counts.

    `unit` is 4 where all bytes of four in memory belong to one word, 1 otherwise.
    """

    table: Words
    unit: int

    def in_words(self, unit: int) -> Words:
        """The keys for words of this length."""
        if unit == self.unit:
            return self.table
        shifts = np.arange(self.unit, dtype=np.uint64) * np.uint64(8)
        return (self.table[..., None] << shifts).reshape(len(self.table), -1)


def cell_keys(spec: LayerSpec, claimed: Mapping[str, Sequence[Box]] | None) -> CellKeys:
    """P over a layer's cells; of each field only those boxes, if some are claimed."""
    if claimed is None:
        return _cell_keys(spec.heads, spec.fields, None)
    boxes = tuple(tuple(claimed.get(field.name, ())) for field in spec.fields)
    return _cell_keys(spec.heads, spec.fields, boxes)


@lru_cache(maxsize=256)
def few_heads(keys: CellKeys, held: Extent, heads: Interval) -> tuple[int, CellKeys]:
    """The first head that is one of these, as it lies, and the keys from there to the last."""
    numbers = np.concatenate([np.arange(*piece) for piece in held.pieces])
    inside = (numbers >= heads[0]) & (numbers < heads[1])
    where = np.flatnonzero(inside) if inside.any() else np.zeros(1, np.int64)
    some = slice(where[0], where[-1] + 1)
    return int(where[0]), CellKeys(keys.table[some] * inside[some, None], keys.unit)


@lru_cache(maxsize=64)
def _cell_keys(
    heads: Extent, fields: tuple[Field, ...], claimed: tuple[tuple[Box, ...], ...] | None
) -> CellKeys:
    spec = LayerSpec(
        name="any", retention=Full(), block_tokens=1, states=1, heads=heads, fields=fields
    )
    table = np.zeros((heads.size, spec.cell_bytes), np.uint64)
    for number, field in enumerate(fields):
        boxes = held(spec, field)
        if claimed is not None:
            boxes = [
                part for box in boxes for other in claimed[number] for part in both(box, other)
            ]
        offset = spec.field_offsets[field.name]
        array = table[:, offset : offset + field.nbytes].reshape(heads.size, *_byte_shape(field))
        assert np.shares_memory(array, table)
        for box in boxes:
            _fill(array, heads, field, box)
    return _in_words(table)


def _fill(array: Words, heads: Extent, field: Field, box: Box) -> None:
    """Write the keys of one box; `array` is `[head, …field's axes, last axis in bytes]`."""
    bits = field.dtype.bits
    *leading, last = field.axes
    if any(bound * bits % 8 for bound in (*box[-1], *np.ravel(last.pieces).tolist())):
        raise SpecError(f"field {field.name!r}: {box[-1]} of {field.dtype} are not whole bytes")
    start, stop = box[-1][0] * bits // 8, box[-1][1] * bits // 8
    position = np.arange(start, stop, dtype=np.uint64)
    line_words = ceil_div(last.total * bits, 8 * WORD_BYTES)
    line = np.zeros((), np.uint64)
    for extent, (lo, hi) in zip((heads, *leading), box[:-1], strict=True):
        line = line[..., None] * np.uint64(extent.total) + np.arange(lo, hi, dtype=np.uint64)
    words = line[..., None] * np.uint64(line_words) + position // np.uint64(WORD_BYTES)
    keys = mixed(np.uint64(seed("field", field.name)) + (words + np.uint64(1)) * STEP)
    shifts = np.uint64(8) * (position % np.uint64(WORD_BYTES))
    places = [slice(*_local(e, b)) for e, b in zip((heads, *leading), box[:-1], strict=True)]
    lo, hi = _local(last, box[-1])
    array[(*places, slice(lo * bits // 8, hi * bits // 8))] = keys << shifts


def _local(extent: Extent, interval: Interval) -> Interval:
    """Where an interval of the whole axis lies among what a rank holds of it."""
    at = 0
    for lo, hi in extent.pieces:
        if lo <= interval[0] and interval[1] <= hi:
            return at + interval[0] - lo, at + interval[1] - lo
        at += hi - lo
    raise SpecError(f"axis {extent.name!r}: {interval} is not inside one of {extent.pieces}")


def _byte_shape(field: Field) -> tuple[int, ...]:
    return (*field.shape[:-1], field.shape[-1] * field.dtype.bits // 8)


def _in_words(table: Words) -> CellKeys:
    """Keys per word of four bytes where memory is cut like the model's words; else per byte."""
    heads, nbytes = table.shape
    if nbytes % WORD_BYTES == 0:
        fours = table.reshape(heads, -1, WORD_BYTES)
        shifts = np.arange(WORD_BYTES, dtype=np.uint64) * np.uint64(8)
        if (fours == fours[..., :1] << shifts).all():
            return CellKeys(np.ascontiguousarray(fours[..., 0]), WORD_BYTES)
    return CellKeys(table, 1)


def held(spec: LayerSpec, field: Field) -> tuple[Box, ...]:
    """All that a rank holds of a field, one box per combination of pieces."""
    return tuple(product(spec.heads.pieces, *(axis.pieces for axis in field.axes)))


def both(box: Box, other: Box) -> tuple[Box, ...]:
    """What two boxes have in common: one box, or none."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True))
    return (common,) if all(lo < hi for lo, hi in common) else ()
