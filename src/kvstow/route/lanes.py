"""Lanes: the copies of one pair of blocks, as few as the two byte orders allow.

Where a source block and a destination block have tokens in common, every byte that both
hold goes from `source + source block · source_stride` to `destination + destination
block · destination_stride`. Two rules make copies few. What follows each other on both sides is
one copy. And pieces of a row at one distance travel as one, with the padding between them, if
neither side has anything else there: rows that are equal inside travel whole.

    source        ┃ a a a ┊ · · ┊ b b b ┃        · padding
    destination   ┃ a a a ┊ · · ┊ b b b ┃        one copy of eight bytes

Copies of whole rows go on in the next block's, if the padding between the rows is nobody else's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from kvstow.plan.layout import Layout, Placement
from kvstow.plan.retention import Bools
from kvstow.plan.sharing import Strip, collision, foreign_collision
from kvstow.plan.view import Ints, ceil_div
from kvstow.route.blocks import Overlap, block_span
from kvstow.route.copies import Copies
from kvstow.route.overlap import Shared, shared


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lanes:
    """The copies of one kind of block pair, by destination; places are those in blocks 0.

    Where a copy `continues`, those of two blocks that are neighbours on both sides are one.
    """

    tokens: int
    copies: Copies
    source_stride: Ints
    destination_stride: Ints
    continues: Bools

    def __len__(self) -> int:
        return len(self.copies)

    def take(self, which: Ints | Bools) -> "Lanes":
        """Some of the lanes."""
        return Lanes(
            tokens=self.tokens,
            copies=self.copies.take(which),
            source_stride=self.source_stride[which],
            destination_stride=self.destination_stride[which],
            continues=self.continues[which],
        )


# ── what both sides hold ──────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerSet:
    """Layers that differ only in where their pages start, and what both sides hold of them.

    Offsets and places are the source's, then the destination's. Of pages of several sections,
    it is one section on either side.
    """

    offsets: tuple[Ints, Ints]
    places: tuple[Placement, Placement]
    shared: tuple[Shared, ...]
    state_tokens: int

    def copies(self, overlap: Overlap) -> Iterable[Copies]:
        """The copies of one pair of blocks, in block 0 of either side."""
        (here, there), each = self.places, self.state_tokens
        first = overlap.source_token // each
        num_states = ceil_div(overlap.source_token + overlap.tokens, each) - first
        source = self.offsets[0] + first * here.token_stride
        destination = self.offsets[1] + overlap.destination_token // each * there.token_stride
        tokens = Stride(num_states, here.token_stride, there.token_stride)
        for spans, content in self.shared:
            columns = spans.source.tolist(), spans.destination.tolist(), spans.nbytes.tolist()
            for s_head, d_head, num_heads in zip(*columns, strict=True):
                heads = Stride(num_heads, here.head_stride, there.head_stride)
                inner = spread(content, (tokens, heads))
                s_page = source + s_head * here.head_stride
                d_page = destination + d_head * there.head_stride
                yield Copies(
                    (s_page[:, None] + inner.source).ravel(),
                    (d_page[:, None] + inner.destination).ravel(),
                    np.tile(inner.nbytes, len(source)),
                )


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


# ── rows ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """A group's block 0: the pieces that its strips are, and what fields take of them.

    Where a strip has its padding for itself, nobody else has bytes between the pieces of two
    neighbouring blocks. Fields take `fields[1][i]` bytes before the place `fields[0][i]`, and
    every byte or none between two of those places.
    """

    starts: Ints
    ends: Ints
    strides: Ints
    own_padding: Bools
    fields: tuple[Ints, Ints]

    @staticmethod
    def of(layout: Layout, group: int) -> "Rows":
        """The rows of a group."""
        strips = sorted(layout.footprints[group].strips, key=lambda strip: strip.offset)
        numbers = [(strip.offset, strip.offset + strip.nbytes, strip.stride) for strip in strips]
        starts, ends, strides = np.array(numbers, np.int64).T
        block = Overlap(0, 0, block_span(layout.groups[group].group))
        cells = [
            LayerSet(
                offsets=(pages.offsets, pages.offsets),
                places=(pages.place, pages.place),
                shared=shared(pages.spec, pages.spec),
                state_tokens=pages.spec.tokens_per_state,
            ).copies(block)
            for pages in layout.page_sets[group]
        ]
        fields = Copies.joined([*chain(*cells)]).merged()
        after = np.cumsum(fields.nbytes)
        return Rows(
            starts=starts,
            ends=ends,
            strides=strides,
            own_padding=np.array([_leaves_padding(layout, group, strip) for strip in strips]),
            fields=(
                np.stack((fields.source, fields.source + fields.nbytes), 1).ravel(),
                np.stack((after - fields.nbytes, after), 1).ravel(),
            ),
        )

    def strip(self, offsets: Ints) -> Ints:
        """The strip that each of these bytes of fields is in."""
        return np.searchsorted(self.starts, offsets, "right") - 1

    def continues(self, strips: Ints, starts: Ints, nbytes: Ints) -> Bools:
        """Whether runs go on in the next block's: nothing lies between them, or only padding."""
        left = self.taken(self.starts, self.ends)[strips] - self.taken(starts, starts + nbytes)
        return (nbytes == self.strides[strips]) | (self.own_padding[strips] & (left == 0))

    def taken(self, starts: Ints, ends: Ints) -> Ints:
        """How many bytes fields take in each interval; exact, because slopes are 0 or 1."""
        return np.subtract(*(np.interp(places, *self.fields) for places in (ends, starts)))


def _leaves_padding(layout: Layout, group: int, strip: Strip) -> bool:
    """Whether the bytes between two neighbouring runs of a strip are nobody else's.

    Groups that pass slabs around may have bytes there, but not while this one owns the slab.
    """
    if strip.count < 2 or strip.nbytes >= strip.stride:
        return True
    padding = Strip(
        strip.offset + strip.nbytes, strip.stride - strip.nbytes, strip.stride, strip.count - 1
    )
    own, hull = layout.footprints[group], padding.hull
    partners = next(set(members) for members in layout.sharing if group in members) - {group}
    for g, footprint in enumerate(layout.footprints):
        for other in footprint.strips:
            if other.offset >= hull.end or other.hull.end <= hull.offset:
                continue
            if g in partners:
                clash = foreign_collision(own, padding, footprint, other, layout.num_slabs)
            else:
                clash = collision(padding, other)
            if clash:
                return False
    return True


# ── the copies of a pair of blocks ────────────────────────────────────────────────────


def lanes(
    layer_sets: Sequence[LayerSet], source: Rows, destination: Rows, overlap: Overlap
) -> Lanes:
    """The fewest copies for one kind of block pair."""
    parts = Copies.joined([part for layers in layer_sets for part in layers.copies(overlap)])
    keys = source.strip(parts.source), destination.strip(parts.destination)
    keys = *keys, parts.destination - parts.source
    order = np.lexsort((parts.source, *keys))
    parts, ends = parts.take(order), (parts.source + parts.nbytes)[order]
    is_apart = np.append(True, parts.source[1:] != ends[:-1])
    is_other = np.append(True, np.zeros(len(order) - 1, np.bool_))  # another row, or distance
    for key in keys:
        is_other[1:] |= key[order[1:]] != key[order[:-1]]
    rows, _ = _chains(parts, is_other)
    carried = np.add.reduceat(parts.nbytes, np.flatnonzero(is_other))
    is_equal = source.taken(rows.source, rows.source + rows.nbytes) == carried
    is_equal &= destination.taken(rows.destination, rows.destination + rows.nbytes) == carried
    copies, first = _chains(parts, is_other | is_apart & ~is_equal[np.cumsum(is_other) - 1])
    s_strip, d_strip = (key[order[first]] for key in keys[:2])
    s_stride, d_stride = source.strides[s_strip], destination.strides[d_strip]
    unsorted = Lanes(
        tokens=overlap.tokens,
        copies=copies,
        source_stride=s_stride,
        destination_stride=d_stride,
        continues=(s_stride == d_stride)
        & source.continues(s_strip, copies.source, copies.nbytes)
        & destination.continues(d_strip, copies.destination, copies.nbytes),
    )
    return unsorted.take(np.argsort(copies.destination))


def _chains(copies: Copies, begins: Bools) -> tuple[Copies, Ints]:
    """Each copy that begins a chain, long enough to be all of it; and which ones these are."""
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(copies)) - 1
    nbytes = copies.source[last] + copies.nbytes[last] - copies.source[first]
    return Copies(copies.source[first], copies.destination[first], nbytes), first


# ── the copies of many pairs ──────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """The lanes of many pairs of blocks: every lane of every pair is a copy, not written out."""

    lanes: Lanes
    source: Ints
    destination: Ints

    def __len__(self) -> int:
        return len(self.lanes) * len(self.source)

    @property
    def nbytes(self) -> int:
        return self.lanes.copies.total * len(self.source)

    def written_out(self) -> Copies:
        """All of them; those that go on in the next block's are one copy."""
        s_ids, d_ids, lanes = self.source, self.destination, self.lanes
        none = np.zeros_like(s_ids)
        if not lanes.continues.any():
            return _placed(s_ids, d_ids, none, lanes)
        follows = (s_ids[1:] == s_ids[:-1] + 1) & (d_ids[1:] == d_ids[:-1] + 1)
        ends = np.concatenate(([0], np.flatnonzero(~follows) + 1, [len(s_ids)]))
        first, more = ends[:-1], np.diff(ends) - 1
        parts: list[Copies] = []
        if not lanes.continues.all():
            parts.append(_placed(s_ids, d_ids, none, lanes.take(~lanes.continues)))
            lanes = lanes.take(lanes.continues)
        parts.append(_placed(s_ids[first], d_ids[first], more, lanes))
        return Copies.joined(parts)


def _placed(s_ids: Ints, d_ids: Ints, more: Ints, lanes: Lanes) -> Copies:
    """Every lane of every pair and of so many more behind it: block by block, or lane by lane
    where pages lie far apart."""
    if len(lanes) > 1:
        s_ids, d_ids, more = s_ids[:, None], d_ids[:, None], more[:, None]
    source = s_ids * lanes.source_stride + lanes.copies.source
    destination = d_ids * lanes.destination_stride + lanes.copies.destination
    nbytes = more * lanes.source_stride + lanes.copies.nbytes
    columns, places = (source, destination, nbytes), lanes.copies.destination
    if places[-1] - places[0] >= lanes.destination_stride[0]:
        columns = (column.T for column in columns)
    return Copies(*(column.ravel() for column in columns))
