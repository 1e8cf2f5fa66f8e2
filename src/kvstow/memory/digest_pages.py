"""Pages as the digest counts them: like ones together, some of their heads and states."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from kvstow.memory.arena import Arena
from kvstow.memory.digest_keys import CellKeys, Words, cell_keys, seed
from kvstow.plan.layout import PlacedGroup, placed_sections
from kvstow.plan.spec import Extent, LayerSpec
from kvstow.plan.view import Ints
from kvstow.route.overlap import Interval
from kvstow.route.route import Claims

Intervals = tuple[Interval, Interval]
"""States that count: two half-open intervals, the second one empty but for sinks."""


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """Layers whose pages, or sections of them, differ only in where they start, one `offset`
    and `seed` for each.

    Block `b` starts at `offset + b · block_stride` and holds `states` states. `spec` is the
    first layer's.
    """

    spec: LayerSpec
    keys: CellKeys
    states: int
    block_stride: int
    head_stride: int
    token_stride: int
    offsets: Ints
    seeds: Words

    @property
    def heads_outside(self) -> bool:
        return self.head_stride > self.token_stride

    def all_multiples(self, number: int) -> bool:
        """Whether every cell starts at a multiple of this many bytes from the arena's base."""
        strides = self.block_stride, self.head_stride, self.token_stride
        return not any(stride % number for stride in strides) and not (self.offsets % number).any()


class CountedBlocks(NamedTuple):
    """Blocks that count in a digest, of like pages: ids, logical indices, which states count."""

    pages: Pages
    ids: Ints
    logical: Ints
    intervals: Intervals

    @property
    def nbytes(self) -> int:
        keys = self.pages.keys
        cells = len(self.pages.offsets) * len(self.ids) * self.pages.states
        return cells * keys.table.size * keys.unit


_known: WeakKeyDictionary[Arena, dict[tuple[int, tuple[str, ...]], list[Pages]]] = (
    WeakKeyDictionary()
)
"""The pages of whole groups, and of single layers by name: an arena's never change, large models
have many layers, and a sample counts one of them."""


def pages_of(
    arena: Arena,
    group: int,
    layers: Collection[str] | None,
    claims: Claims | None,
    heads: Interval | None,
) -> list[Pages]:
    """A group's layers, or some of them, or some of their heads; those with like pages together."""
    placed = arena.layout.groups[group]
    if claims is not None or (layers is not None and len(layers) != 1):
        alike = _alike(placed, layers, claims)
    else:
        known, what = _known.setdefault(arena, {}), (group, tuple(layers or ()))
        alike = known.get(what) or known.setdefault(what, _alike(placed, layers, None))
    if heads is None:
        return alike
    return [few for pages in alike if (few := _with_heads(pages, heads)) is not None]


def _alike(
    placed: PlacedGroup, layers: Collection[str] | None, claims: Claims | None
) -> list[Pages]:
    kinds: dict[tuple[CellKeys, tuple[int, ...]], list[tuple[LayerSpec, int]]] = {}
    for layer, layer_place in zip(placed.group.layers, placed.placements, strict=True):
        if layers is not None and layer.name not in layers:
            continue
        for spec, place in placed_sections(layer, layer_place):
            numbers = spec.states, place.block_stride, place.head_stride, place.token_stride
            kind = cell_keys(spec, claims), numbers
            kinds.setdefault(kind, []).append((spec, place.offset))
    return [
        Pages(
            members[0][0],
            keys,
            *numbers,
            offsets=np.array([offset for _, offset in members]),
            seeds=np.array([seed("layer", spec.name) for spec, _ in members], np.uint64),
        )
        for (keys, numbers), members in kinds.items()
    ]


def _with_heads(pages: Pages, heads: Interval) -> Pages | None:
    """The part of the pages that some heads are, if they hold any of them."""
    some = _few_heads(pages.keys, pages.spec.heads, heads)
    if some is None:
        return None
    first, keys = some
    return replace(pages, keys=keys, offsets=pages.offsets + first * pages.head_stride)


@lru_cache(maxsize=256)
def _few_heads(keys: CellKeys, held: Extent, heads: Interval) -> tuple[int, CellKeys] | None:
    """The first head that is one of these, as it lies, and the keys from there to the last."""
    numbers = np.concatenate([np.arange(*piece) for piece in held.pieces])
    inside = (numbers >= heads[0]) & (numbers < heads[1])
    if not inside.any():
        return None
    where = np.flatnonzero(inside)
    some = slice(where[0], where[-1] + 1)
    return int(where[0]), replace(keys, table=keys.table[some] * inside[some, None])


def picked(part: CountedBlocks, every: int, phase: int) -> CountedBlocks:
    """The states that leave `phase`, each as a block of its own that holds one state."""
    pages = part.pages
    one, other = (np.arange(lo + (phase - lo) % every, hi, every) for lo, hi in part.intervals)
    states = np.union1d(one, other) if len(other) else one
    rows = part.ids[np.searchsorted(part.logical, states // pages.states)]
    unit = gcd(pages.block_stride, pages.token_stride)
    starts = rows * pages.block_stride + states % pages.states * pages.token_stride
    single = replace(pages, states=1, block_stride=unit)
    return CountedBlocks(single, starts // unit, states, part.intervals)


def unit_of(pages: Pages) -> int:
    """The length of words; single bytes where cells do not start at words' multiples."""
    return pages.keys.unit if pages.all_multiples(pages.keys.unit) else 1


def keys_in(keys: CellKeys, unit: int) -> Words:
    """The keys for words of this length."""
    if unit == keys.unit:
        return keys.table
    shifts = np.arange(keys.unit, dtype=np.uint64) * np.uint64(8)
    return (keys.table[..., None] << shifts).reshape(keys.table.shape[0], -1)
