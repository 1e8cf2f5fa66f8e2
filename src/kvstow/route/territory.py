"""Whose the bytes of a block are: taken by a field, padding of the row, or somebody else's.

    domain of one strip            ├──────────────────────────────────────────┤
    block b   ┃ k v ┊ k v ┊ ·· ┊ k v ┊ ······ unfilled ······ ┃ padding to b+1 ┃
                taken        free                                free, if nobody else's

A move may run over free bytes of its own row, never over anything else.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstow.plan.layout import Layout, Placement
from kvstow.plan.retention import State
from kvstow.plan.sharing import Strip, collision, foreign_collision
from kvstow.plan.spec import LayerSpec
from kvstow.plan.view import Ints

Flags = npt.NDArray[np.bool_]


class Stride(NamedTuple):
    """An axis of cells: how many, and how far apart on either side."""

    num: int
    source: int
    destination: int


class Pieces(NamedTuple):
    """Copies: `nbytes[i]` from `source[i]` to `destination[i]`."""

    source: Ints
    destination: Ints
    nbytes: Ints


def spread(pieces: Pieces, axes: tuple[Stride, ...]) -> Pieces:
    """The pieces once for every place of the axes; one piece where they follow each other."""
    source, destination, nbytes = pieces
    left = sorted((axis for axis in axes if axis.num != 1), key=lambda axis: axis.source)
    while len(nbytes) == 1:
        dense = [axis for axis in left if axis.source == axis.destination == nbytes[0]]
        if not dense:
            break
        nbytes = nbytes * dense[0].num
        left.remove(dense[0])
    for count, s_stride, d_stride in left:
        steps = np.arange(count, dtype=np.int64)[:, None]
        source = (steps * s_stride + source).ravel()
        destination = (steps * d_stride + destination).ravel()
        nbytes = np.tile(nbytes, count)
    return Pieces(source, destination, nbytes)


def state_tokens(spec: LayerSpec) -> int:
    """Tokens per state; 1 for a summary, whose block counts as one token."""
    return 1 if isinstance(spec.retention, State) else spec.tokens_per_state


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pages:
    """Layers whose pages differ in their offset only."""

    offsets: Ints
    cell: Pieces
    heads: Stride
    token_stride: int
    state_tokens: int

    def taken(self, first_token: int, end_token: int) -> tuple[Ints, Ints]:
        """Offset and length of the bytes that fields have in the slots of those tokens."""
        first, end = first_token // self.state_tokens, -(-end_token // self.state_tokens)
        tokens = Stride(end - first, self.token_stride, self.token_stride)
        runs = spread(self.cell, (self.heads, tokens))
        start = self.offsets + first * self.token_stride
        return (start[:, None] + runs.source).ravel(), np.tile(runs.nbytes, len(start))


class Taken(NamedTuple):
    """Runs that fields have, ascending and apart."""

    starts: Ints
    ends: Ints

    def holds(self, offsets: Ints) -> Flags:
        """Whether each byte is one of a field's."""
        before = np.searchsorted(self.starts, offsets, "right") - 1
        return (before >= 0) & (offsets < self.ends[np.maximum(before, 0)])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Territory:
    """The bytes of block 0 of a group: domains that are its own, and what fields take."""

    starts: Ints
    ends: Ints
    pages: tuple[Pages, ...]

    def taken(self, first_token: int, end_token: int) -> Taken:
        """What fields take in the slots of those tokens, in all pages."""
        if first_token >= end_token:
            return Taken(np.empty(0, np.int64), np.empty(0, np.int64))
        found = [pages.taken(first_token, end_token) for pages in self.pages]
        starts = np.concatenate([starts for starts, _ in found])
        nbytes = np.concatenate([nbytes for _, nbytes in found])
        order = np.argsort(starts)
        return Taken(starts[order], (starts + nbytes)[order])

    def room_after(self, taken: Taken, ends: Ints) -> tuple[Ints, Ints, Flags]:
        """Free bytes after each run that ends there; where they end; and whether that is
        with the domain rather than at a taken byte."""
        domain = np.searchsorted(self.starts, ends - 1, "right") - 1
        after = np.searchsorted(taken.ends, ends, "right")
        limit = np.append(taken.starts, np.iinfo(np.int64).max)[after]
        limit = np.clip(limit, ends, self.ends[domain])
        return limit - ends, limit, limit == self.ends[domain]

    def room_before(self, taken: Taken, starts: Ints) -> tuple[Ints, Ints, Flags]:
        """The same before each run that starts there."""
        domain = np.searchsorted(self.starts, starts, "right") - 1
        before = np.searchsorted(taken.starts, starts)
        limit = np.concatenate([[np.iinfo(np.int64).min], taken.ends])[before]
        limit = np.clip(limit, self.starts[domain], starts)
        return starts - limit, limit, limit == self.starts[domain]


def territory(layout: Layout, group: int) -> Territory:
    """The bytes of a group's block 0."""
    strips = sorted(layout.footprints[group].strips, key=lambda strip: strip.offset)
    others = _Others(layout)
    lengths = [strip.stride if _owns_padding(others, group, strip) else strip.nbytes
               for strip in strips]  # fmt: skip
    starts = np.array([strip.offset for strip in strips], np.int64)
    return Territory(
        starts=starts, ends=starts + np.array(lengths, np.int64), pages=_pages(layout, group)
    )


class _Others:
    """All strips of a layout, to be asked which of them a run may meet."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.strips = [(g, strip) for g, footprint in enumerate(layout.footprints)
                       for strip in footprint.strips]  # fmt: skip
        self._starts = np.array([strip.offset for _, strip in self.strips], np.int64)
        self._ends = np.array([strip.hull.end for _, strip in self.strips], np.int64)

    def near(self, strip: Strip) -> list[tuple[int, Strip]]:
        """Strips whose hull overlaps that of `strip`, with their groups."""
        hull = strip.hull
        found = np.flatnonzero((self._starts < hull.end) & (self._ends > hull.offset))
        return [self.strips[i] for i in found]


def _owns_padding(others: _Others, group: int, strip: Strip) -> bool:
    """Whether the bytes between two neighbouring runs of a strip are nobody else's.

    Groups that pass slabs around may have bytes there, but not while this one owns the
    slab.
    """
    if strip.count < 2 or strip.nbytes >= strip.stride:
        return False
    layout = others.layout
    padding = Strip(
        strip.offset + strip.nbytes, strip.stride - strip.nbytes, strip.stride, strip.count - 1
    )
    own = layout.footprints[group]
    partners = next(members for members in layout.sharing if group in members)
    for g, other in others.near(padding):
        if g != group and g in partners:
            theirs = layout.footprints[g]
            clash = foreign_collision(own, padding, theirs, other, layout.num_slabs)
        else:
            clash = collision(padding, other)
        if clash:
            return False
    return True


def _pages(layout: Layout, group: int) -> tuple[Pages, ...]:
    rows = layout.groups[group]
    alike: dict[tuple[object, ...], list[tuple[LayerSpec, Placement]]] = {}
    for spec, place in zip(rows.group.layers, rows.placements, strict=True):
        strides = (place.head_stride, place.token_stride)
        alike.setdefault((spec.heads.size, spec.fields, spec.states, *strides), []).append(
            (spec, place)
        )
    return tuple(
        Pages(
            offsets=np.array([place.offset for _, place in members], np.int64),
            cell=_cell(members[0][0]),
            heads=Stride(members[0][0].heads.size, *(members[0][1].head_stride,) * 2),
            token_stride=members[0][1].token_stride,
            state_tokens=state_tokens(members[0][0]),
        )
        for members in alike.values()
    )


def _cell(spec: LayerSpec) -> Pieces:
    """The runs that fields take in one cell."""
    runs: list[tuple[int, int]] = []
    for field in spec.fields:
        offset = spec.field_offsets[field.name]
        if runs and sum(runs[-1]) == offset:
            runs[-1] = (runs[-1][0], runs[-1][1] + field.nbytes)
        else:
            runs.append((offset, field.nbytes))
    starts = np.array([start for start, _ in runs], np.int64)
    return Pieces(starts, starts, np.array([nbytes for _, nbytes in runs], np.int64))
