"""Rows of other layouts: which bands of which objects make a row of ours.

A row of the reader is tokens `[first, end)` of a prompt. Writers with other tp, pp, order or tokens
per block have these tokens in other objects. Routes say which of their bytes go where; here they
become, per object, the bands to read and the copies to make:

    writer, tp rank 0, blocks of 2    │ 0..1 │ 2..3 │       four objects, named by writer, group
    writer, tp rank 1                 │ 0..1 │ 2..3 │       and the key at the end of each block
    reader, tp 1, blocks of 4         │     0..3    │       one row

Blocks of other sizes end at other tokens and have other keys, which are hashes of tokens: the
prompt must be known (`PromptKeys`). Without it only writers with the reader's block size are read.

A row holds, for certain, what the token behind it sees. Of a window that is shorter than the block
it may hold no more: whoever wrote it may have loaded it. So a smaller block is read out of a larger
one only as far as that goes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import lcm

import numpy as np

from kvstow.errors import RouteError
from kvstow.offload.keys import PromptKeys
from kvstow.offload.remote.directory import WriterLayout
from kvstow.offload.remote.objects import RowObjects
from kvstow.offload.rows import same_rows, stacked
from kvstow.offload.tier import Bytes
from kvstow.plan.group import Group
from kvstow.plan.layout import NULL_SLABS, Layout
from kvstow.plan.retention import State, first_seen_token, short_name
from kvstow.plan.view import Ints, ceil_div
from kvstow.route.blocks import Blocks, Tokens
from kvstow.route.copies import Copies, cut
from kvstow.route.route import GroupPair
from kvstow.route.sources import SourceRoute, sources

MOST_KINDS = 64
"""Kinds of rows whose pieces are kept."""


@dataclass(frozen=True, eq=False)
class RowPiece:
    """What a row takes from one object: bands of it, and the copies between the two rows.

    `block` counts the writer's blocks from the common block boundary before the row. None as
    `bands`: all of them, and the row is the object's.
    """

    objects: RowObjects
    block: int
    bands: Ints | None
    copies: Copies

    def bring(self, source: Bytes, row: Bytes) -> None:
        """Copy what the row takes from a row of the writer's."""
        if self.bands is None:
            row[:] = source
        else:
            unit, here, there = self._units
            _cut(row, unit)[there] = _cut(source, unit)[here]

    @cached_property
    def _units(self) -> tuple[int, Ints, Ints]:
        """The copies in pieces of one length that all places are multiples of."""
        copies = self.copies
        unit = int(
            np.gcd.reduce(np.concatenate([copies.source, copies.destination, copies.nbytes]))
        )
        small = cut(copies, unit)
        return unit, small.source // unit, small.destination // unit


def _cut(row: Bytes, unit: int) -> Bytes:
    return row[: len(row) // unit * unit].reshape(-1, unit)


@dataclass(frozen=True, slots=True, eq=False)
class ObjectPart:
    """A piece, and the key of the object that has it."""

    piece: RowPiece
    key: bytes

    @property
    def name(self) -> str:
        """What the object is called."""
        return self.piece.objects.name(self.key)


class GroupReader:
    """Rows of one group of a reader's layout, out of the objects of one deployment's ranks."""

    def __init__(self, writers: Sequence[WriterLayout], layout: Layout, group: int) -> None:
        self._writers = writers
        self._group = layout.groups[group].group
        self._target = stacked(layout, group, 1)
        self._recurrent = isinstance(self._group.retention, State)
        self._whole = self._equal(layout, group)
        self._pieces = lru_cache(MOST_KINDS)(self._routed)

    def _equal(self, layout: Layout, group: int) -> tuple[RowPiece, ...]:
        """The piece that is the whole row, where a writer has the same rows."""
        for writer in self._writers:
            for g in range(len(writer.layout.groups)):
                if same_rows(writer.layout, g, layout, group):
                    return (RowPiece(writer.objects(g), 0, None, Copies.none()),)
        return ()

    @cached_property
    def _sources(self) -> tuple[SourceRoute, ...]:
        """The routes from those writers that are needed; empty where they lack something."""
        try:
            return sources([writer.layout for writer in self._writers], self._target)
        except RouteError:
            return ()

    @cached_property
    def block_sizes(self) -> frozenset[int]:
        """Tokens per block of the objects that rows are made of."""
        if self._whole or self._recurrent:
            return frozenset({self._group.block_tokens})
        return frozenset(
            pair.source.block_tokens for source in self._sources for pair in source.route.pairs
        )

    @cached_property
    def needs_prompt(self) -> bool:
        """Whether rows are made of blocks of other sizes, which have other keys."""
        return not self.block_sizes <= {self._group.block_tokens}

    def parts(self, key: bytes, prompt: PromptKeys | None) -> list[ObjectPart] | None:
        """The objects that make the row of a key; None where that cannot be said."""
        if self._whole:
            return [ObjectPart(self._whole[0], key)]
        if not self._sources:
            return None
        if not self.needs_prompt:
            whole = self._pieces(0, 0, self._group.block_tokens)
            return [ObjectPart(piece, key) for piece in whole]
        end = None if prompt is None else prompt.end_of(key)
        if prompt is None or end is None:
            return None
        size = self._group.block_tokens
        first = (end - 1) // size * size
        phase = first % lcm(size, *self.block_sizes)
        parts: list[ObjectPart] = []
        for piece in self._pieces(phase, self._unseen(first, end), end - first):
            group = piece.objects.layout.groups[piece.objects.group].group
            start = ((first - phase) // group.block_tokens + piece.block) * group.block_tokens
            named = min(start + group.block_tokens, prompt.num_tokens)
            name = prompt.key_at(named)
            if name is None or not self._holds(group, max(start, first), end, named):
                return None
            parts.append(ObjectPart(piece, name))
        return parts

    def _holds(self, group: Group, first: int, end: int, named: int) -> bool:
        """Whether a writer's row, named by its first `named` tokens, surely has those of tokens
        `[first, end)` that the token at `end` sees. A row has what the token at `named` sees; its
        writer may never have had what is before that."""
        first = max(first, first_seen_token(self._group.retention, end))
        return first >= min(end, named) or first >= first_seen_token(group.retention, named)

    def _unseen(self, first: int, end: int) -> int:
        """Tokens at the beginning of a block that no token after it sees: a writer may have
        forgotten them, and they are not brought."""
        unseen = first_seen_token(self._group.retention, end) - first
        return min(max(unseen, 0), end - first - 1)

    def _routed(self, phase: int, skipped: int, num_tokens: int) -> tuple[RowPiece, ...]:
        """The pieces of a row that begins `phase` tokens behind a common block boundary, less
        its first tokens."""
        tokens = Tokens(phase + skipped, phase + num_tokens)
        index = 0 if self._recurrent else phase // self._group.block_tokens
        ours = Blocks(np.array([NULL_SLABS]), np.array([index]))
        return tuple(
            piece
            for source in self._sources
            for pair in source.route.pairs
            for piece in _pieces(self._writers[source.index], pair, ours, tokens)
        )


def _pieces(
    writer: WriterLayout, pair: GroupPair, ours: Blocks, tokens: Tokens
) -> Iterator[RowPiece]:
    """What a row takes from the writer's rows of one group, by row; places count from the start
    of either row. The writer's ids are two apart, so that no copy spans two of its rows."""
    first_tokens, span = tokens.of(pair.source), pair.spans[0]
    index = np.arange(first_tokens.first // span, ceil_div(first_tokens.end, span))
    rows_there = Blocks(NULL_SLABS + 2 * np.arange(len(index)), index)
    count = int(rows_there.ids[-1]) + 1
    whole = pair.layouts[0]
    rows = replace(whole, num_slabs=count, nbytes=count * whole.slab_bytes)
    wide = replace(pair, layouts=(rows, pair.layouts[1]))
    copies = wide.copies(rows_there, ours, tokens)
    strip, target = rows.footprints[pair.groups[0]].strips[0], pair.layouts[1]
    row = (copies.source - strip.offset) // strip.stride
    objects = writer.objects(pair.groups[0])
    for block, id in zip(index.tolist(), rows_there.ids.tolist(), strict=True):
        part = copies.take(np.flatnonzero(row == id))
        part = part.moved(
            -(strip.offset + id * strip.stride), -target.runs(0, NULL_SLABS)[0].offset
        )
        if len(part):
            bands = objects.touched(part.source, part.nbytes)
            yield RowPiece(objects, block, bands, part)


# ── deployments ───────────────────────────────────────────────────────────────────────


def deployments(writers: Sequence[WriterLayout], own: str) -> list[tuple[WriterLayout, ...]]:
    """Writers whose rows belong together: the ranks of one way to serve the model.

    The one with the fingerprint `own` comes first. Ranks that differ in order or in the tokens
    per block of a retention are never one deployment.
    """
    kinds: list[tuple[object, dict[str, int], list[WriterLayout]]] = []
    for writer in writers:
        layout = writer.layout
        kind = (layout.tp[1], layout.pp[1], layout.order)
        sizes = {short_name(r.group.retention): r.group.block_tokens for r in layout.groups}
        for other, block_sizes, members in kinds:
            if other == kind and all(
                block_sizes.get(name, size) == size for name, size in sizes.items()
            ):
                block_sizes.update(sizes)
                members.append(writer)
                break
        else:
            kinds.append((kind, sizes, [writer]))
    ranked = [tuple(members) for _, _, members in kinds]
    return sorted(ranked, key=lambda members: own not in {each.fingerprint for each in members})
