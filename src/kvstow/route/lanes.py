"""Lanes: the copies of one pair of blocks, as few as the two byte orders allow.

Where a source block and a destination block have tokens in common, every byte that both
hold goes from `source + source block · source_stride` to `destination + destination
block · destination_stride`. Two copies are one when they follow each other at the same
distance on both sides and everything between them is free on both sides:

    source        ┃ a a a ┊ · · ┊ b b b ┃        · free: padding, or an unfilled slot
    destination   ┃ a a a ┊ · · ┊ b b b ┃        one copy of eight bytes

Free are bytes of the block's own row that no field has, and the padding up to the next row
where nobody else may use it:

    block b   ┃ k v ┊ k v ┊ ·· ┊ k v ┊ ······ unfilled ······ ┃ padding to b+1 ┃
                taken        free                                free, if nobody else's
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstow.plan.layout import Layout, Placement, placed_sections
from kvstow.plan.retention import State
from kvstow.plan.sharing import Strip, collision, foreign_collision
from kvstow.plan.spec import LayerSpec
from kvstow.plan.view import Ints, Run
from kvstow.plan.view import joined as joined_runs
from kvstow.route.copies import Copies, joined
from kvstow.route.overlap import Shared

Flags = npt.NDArray[np.bool_]


class Overlap(NamedTuple):
    """How two blocks overlap: where in each the common tokens start, and how many they are.

    Slots from `source_filled` and `destination_filled` on hold nothing yet. After a group's
    last block comes no other, so what lies there is not the block's padding.
    """

    source_token: int
    destination_token: int
    tokens: int
    source_filled: int
    destination_filled: int
    source_is_last: bool = False
    destination_is_last: bool = False


class FreeAround(NamedTuple):
    """Free bytes after and before each copy, on either side."""

    source_after: Ints
    source_before: Ints
    destination_after: Ints
    destination_before: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lanes:
    """The copies of one kind of block pair, by destination; places are those in blocks 0."""

    tokens: int
    copies: Copies
    source_stride: Ints
    destination_stride: Ints
    free: FreeAround

    def __len__(self) -> int:
        return len(self.copies)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerSet:
    """Layers that differ only in where their pages start, and what both sides hold of them.

    Of pages of several sections, it is one section on either side.
    """

    source_offsets: Ints
    destination_offsets: Ints
    source: Placement
    destination: Placement
    shared: tuple[Shared, ...]
    state_tokens: int

    def copies(self, overlap: Overlap) -> Iterable[Copies]:
        """The copies of one pair of blocks, in block 0 of either side."""
        first = overlap.source_token // self.state_tokens
        end = -(-(overlap.source_token + overlap.tokens) // self.state_tokens)
        source = self.source_offsets + first * self.source.token_stride
        there = overlap.destination_token // self.state_tokens
        destination = self.destination_offsets + there * self.destination.token_stride
        tokens = Stride(end - first, self.source.token_stride, self.destination.token_stride)
        for part in self.shared:
            content = Copies(*np.array(part.content, np.int64).T)
            for s_head, d_head, num_heads in part.heads:
                heads = Stride(num_heads, self.source.head_stride, self.destination.head_stride)
                inner = spread(content, (tokens, heads))
                s_page = source + s_head * self.source.head_stride
                d_page = destination + d_head * self.destination.head_stride
                yield Copies(
                    (s_page[:, None] + inner.source).ravel(),
                    (d_page[:, None] + inner.destination).ravel(),
                    np.tile(inner.nbytes, len(source)),
                )


def lanes(
    layer_sets: Sequence[LayerSet], source: "FreeBytes", destination: "FreeBytes", overlap: Overlap
) -> Lanes:
    """The fewest copies for one kind of block pair."""
    copies, s_stride, d_stride = _abutting(layer_sets, overlap)
    free = FreeAround(
        *source.around(
            copies.source, copies.nbytes, overlap.source_filled, is_last=overlap.source_is_last
        ),
        *destination.around(
            copies.destination,
            copies.nbytes,
            overlap.destination_filled,
            is_last=overlap.destination_is_last,
        ),
    )
    follows = continued(copies, np.arange(len(copies)), free)
    follows &= _same(s_stride) & _same(d_stride)
    whole, first, last = chained(copies, follows)
    return Lanes(
        tokens=overlap.tokens,
        copies=whole,
        source_stride=s_stride[first],
        destination_stride=d_stride[first],
        free=FreeAround(
            free.source_after[last],
            free.source_before[first],
            free.destination_after[last],
            free.destination_before[first],
        ),
    )


def continued(copies: Copies, which: Ints, free: FreeAround) -> Flags:
    """For each copy but the first, whether it can be one with the copy before it.

    Around copy `i` the bytes `free[which[i]]` are free.
    """
    gap = copies.source[1:] - copies.source[:-1]
    found = gap == copies.destination[1:] - copies.destination[:-1]
    gap -= copies.nbytes[:-1]
    found &= gap >= 0
    near = np.flatnonzero(found)
    one, next_one, gap = which[near], which[near + 1], gap[near]
    fits = gap <= free.source_after[one] + free.source_before[next_one]
    fits &= gap <= free.destination_after[one] + free.destination_before[next_one]
    found[near] = fits
    return found


def chained(copies: Copies, continues: Flags) -> tuple[Copies, Ints, Ints]:
    """Every chain of continued copies as one; and which copies begin and end the chains."""
    if not continues.any():
        each = np.arange(len(copies))
        return copies, each, each
    first = np.flatnonzero(np.append(True, ~continues))
    last = np.append(first[1:] - 1, len(copies) - 1)
    nbytes = copies.source[last] + copies.nbytes[last] - copies.source[first]
    return Copies(copies.source[first], copies.destination[first], nbytes), first, last


def _abutting(layer_sets: Sequence[LayerSet], overlap: Overlap) -> tuple[Copies, Ints, Ints]:
    """All copies by stride and destination, those without a gap between them made one."""
    found = [(part, layers) for layers in layer_sets for part in layers.copies(overlap)]
    counts = [len(part) for part, _ in found]
    s_stride = np.repeat([layers.source.block_stride for _, layers in found], counts)
    d_stride = np.repeat([layers.destination.block_stride for _, layers in found], counts)
    copies = joined([part for part, _ in found])
    order = np.lexsort((copies.destination, d_stride, s_stride))
    copies, s_stride, d_stride = copies.take(order), s_stride[order], d_stride[order]
    none = np.zeros(len(order), np.int64)
    follows = continued(copies, np.arange(len(order)), FreeAround(none, none, none, none))
    copies, first, _ = chained(copies, follows & _same(s_stride) & _same(d_stride))
    return copies, s_stride[first], d_stride[first]


def _same(strides: Ints) -> Flags:
    return strides[1:] == strides[:-1]


class Stride(NamedTuple):
    """An axis of cells: how many, and how far apart on either side."""

    num: int
    source: int
    destination: int


def spread(copies: Copies, axes: tuple[Stride, ...]) -> Copies:
    """The copies once for every place of the axes; one copy where they follow each other."""
    source, destination, nbytes = copies.source, copies.destination, copies.nbytes
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
    return Copies(source, destination, nbytes)


# ── free bytes ────────────────────────────────────────────────────────────────────────


def state_tokens(spec: LayerSpec) -> int:
    """Tokens per state; 1 for a summary, whose block counts as one token."""
    return 1 if isinstance(spec.retention, State) else spec.tokens_per_state


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AlikePages:
    """Layers whose pages, or sections of them, differ in their offset only."""

    offsets: Ints
    cell: Copies
    heads: Stride
    token_stride: int
    state_tokens: int

    def taken(self, end_token: int) -> tuple[Ints, Ints]:
        """Start and end of the bytes that fields have in the slots before that token."""
        states = -(-end_token // self.state_tokens)
        runs = spread(self.cell, (self.heads, Stride(states, self.token_stride, self.token_stride)))
        starts = np.add.outer(self.offsets, runs.source)
        return starts.ravel(), (starts + runs.nbytes).ravel()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FreeBytes:
    """The bytes of block 0 of a group that a copy may run over.

    They lie between `starts[i]` and `ends[i]`, where the row itself ends at `row_ends[i]`
    and padding follows, and are those that no page's field takes.
    """

    starts: Ints
    row_ends: Ints
    ends: Ints
    pages: tuple[AlikePages, ...]

    def around(
        self, offsets: Ints, nbytes: Ints, filled: int, *, is_last: bool
    ) -> tuple[Ints, Ints]:
        """Free bytes after and before each run of field bytes; `filled` slots are taken."""
        found = [pages.taken(filled) for pages in self.pages]
        starts = np.sort(np.concatenate([starts for starts, _ in found]))
        ends = np.sort(np.concatenate([ends for _, ends in found]))
        stop = offsets + nbytes
        row = np.searchsorted(self.starts, offsets, "right") - 1
        next_taken = np.append(starts, np.iinfo(np.int64).max)[np.searchsorted(ends, stop, "right")]
        limits = self.row_ends if is_last else self.ends
        after = np.clip(next_taken, stop, limits[row]) - stop
        last_taken = np.append(np.iinfo(np.int64).min, ends)[np.searchsorted(starts, offsets)]
        return after, offsets - np.clip(last_taken, self.starts[row], offsets)


def free_bytes(layout: Layout, group: int) -> FreeBytes:
    """What copies may run over in a group's block 0."""
    strips = sorted(layout.footprints[group].strips, key=lambda strip: strip.offset)
    starts, nbytes, strides = (
        np.array([getattr(strip, name) for strip in strips], np.int64)
        for name in ("offset", "nbytes", "stride")
    )
    everybody = _Strips(layout)
    padded = np.array([everybody.leave_padding(group, strip) for strip in strips])
    return FreeBytes(
        starts=starts,
        row_ends=starts + nbytes,
        ends=starts + np.where(padded, strides, nbytes),
        pages=_alike_pages(layout, group),
    )


class _Strips:
    """All strips of a layout, to be asked which of them use bytes between a group's rows."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._strips = [
            (g, strip)
            for g, footprint in enumerate(layout.footprints)
            for strip in footprint.strips
        ]
        self._starts = np.array([strip.offset for _, strip in self._strips], np.int64)
        self._ends = np.array([strip.hull.end for _, strip in self._strips], np.int64)

    def leave_padding(self, group: int, strip: Strip) -> bool:
        """Whether the bytes between two neighbouring runs of a strip are nobody else's.

        Groups that pass slabs around may have bytes there, but not while this one owns the
        slab.
        """
        if strip.count < 2 or strip.nbytes >= strip.stride:
            return False
        padding = Strip(
            strip.offset + strip.nbytes, strip.stride - strip.nbytes, strip.stride, strip.count - 1
        )
        layout = self._layout
        partners = next(members for members in layout.sharing if group in members)
        for g, other in self._near(padding):
            if g != group and g in partners:
                own, theirs = layout.footprints[group], layout.footprints[g]
                clash = foreign_collision(own, padding, theirs, other, layout.num_slabs)
            else:
                clash = collision(padding, other)
            if clash:
                return False
        return True

    def _near(self, strip: Strip) -> list[tuple[int, Strip]]:
        """Strips whose hull overlaps that of `strip`, with their groups."""
        hull = strip.hull
        found = np.flatnonzero((self._starts < hull.end) & (self._ends > hull.offset))
        return [self._strips[i] for i in found]


def _alike_pages(layout: Layout, group: int) -> tuple[AlikePages, ...]:
    rows = layout.groups[group]
    alike: dict[tuple[object, ...], list[tuple[LayerSpec, Placement]]] = {}
    for layer, page in zip(rows.group.layers, rows.placements, strict=True):
        for spec, place in placed_sections(layer, page):
            key = (spec.heads.size, spec.fields, spec.states, place.head_stride, place.token_stride)
            alike.setdefault(key, []).append((spec, place))
    return tuple(
        AlikePages(
            offsets=np.array([place.offset for _, place in members], np.int64),
            cell=_cell(spec),
            heads=Stride(spec.heads.size, place.head_stride, place.head_stride),
            token_stride=place.token_stride,
            state_tokens=state_tokens(spec),
        )
        for members in alike.values()
        for spec, place in members[:1]
    )


def _cell(spec: LayerSpec) -> Copies:
    """The runs that fields take in one cell, as copies onto themselves."""
    runs = joined_runs(Run(spec.field_offsets[field.name], field.nbytes) for field in spec.fields)
    starts = np.array([run.offset for run in runs], np.int64)
    return Copies(starts, starts, np.array([run.nbytes for run in runs], np.int64))
