"""Rows read whole and cut here: few long reads and many local copies, instead of many reads.

Each row is read from the first byte that is wanted of it to the last, into scratch memory. The
route's own copies then start there, and what they write is the same:

    source rows   │ a · b · c ·│     │ d · e · f ·│     six reads, or two
    scratch       │ a · b · c   d · e · f │
    destination   │ a d b e c f │                       six copies inside one memory
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvstow.plan.layout import Layout
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks
from kvstow.route.copies import Copies

PLACE_ALIGN = 64
"""Bytes keep their place in a cache line: a copy from scratch memory is aligned as it was."""


@dataclass(frozen=True, slots=True, eq=False)
class RowReads:
    """`reads` go from the source to scratch memory, `cuts` from there to the destination; both
    ascend in scratch memory."""

    reads: Copies
    cuts: Copies

    def pieces(self, nbytes: int) -> "list[RowReads]":
        """The same in pieces for so many bytes of scratch memory each, every one from 0 on; a
        piece of which nothing is wanted is left out."""
        reads, r_piece = _cut_at(self.reads.reversed(), nbytes)
        cuts, c_piece = _cut_at(self.cuts, nbytes)
        first = np.flatnonzero(np.diff(r_piece, prepend=-1))
        r_ends = (*first.tolist(), len(r_piece))
        c_starts = np.searchsorted(c_piece, r_piece[first]).tolist()
        c_ends = (*c_starts, len(c_piece))
        return [
            RowReads(reads.part(*r).reversed(), cuts.part(*c))
            for r, c in zip(pairwise(r_ends), pairwise(c_ends), strict=True)
            if c[0] < c[1]
        ]


def row_reads(layout: Layout, blocks: Mapping[int, Blocks], copies: Copies) -> RowReads:
    """The copies by way of whole rows: `layout` and `blocks` are the source's, and places of the
    copies are offsets in the two arenas.

    Reads nothing but rows of these blocks, and what the copies themselves run over.
    """
    copies = copies.take(np.argsort(copies.source, kind="stable"))
    first, nbytes = covered(row_starts(layout, blocks), copies)
    phase = first % PLACE_ALIGN
    room = -(-(phase + nbytes) // PLACE_ALIGN) * PLACE_ALIGN
    places = np.cumsum(room) - room + phase
    read = np.searchsorted(first, copies.source, side="right") - 1
    cuts = Copies(copies.source + (places - first)[read], copies.destination, copies.nbytes)
    return RowReads(Copies(first, places, nbytes), cuts)


def row_starts(layout: Layout, blocks: Mapping[int, Blocks]) -> Ints:
    """Where the contiguous pieces of these blocks' rows start, in order: one per block if rows
    are packed."""
    starts = [
        strip.offset + listed.ids * strip.stride
        for group, listed in blocks.items()
        for strip in layout.footprints[group].strips
    ]
    return np.sort(np.concatenate(starts)) if starts else np.empty(0, np.int64)


def covered(starts: Ints, copies: Copies) -> tuple[Ints, Ints]:
    """Starts and lengths of the reads that cover all copies, one per piece of a row, neighbours
    joined. Sources of the copies ascend, and each starts in some piece."""
    if not len(copies):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    piece = np.searchsorted(starts, copies.source, side="right")
    at = np.flatnonzero(np.diff(piece, prepend=-1))
    first = copies.source[at]
    reach = np.maximum.accumulate(np.maximum.reduceat(copies.source + copies.nbytes, at))
    apart = np.append(True, first[1:] > reach[:-1])
    ends = reach[np.append(apart[1:], True)]
    return first[apart], ends - first[apart]


def _cut_at(copies: Copies, nbytes: int) -> tuple[Copies, Ints]:
    """The copies, cut where their sources cross a multiple of `nbytes`, with sources counted
    from the last such multiple; and which multiple that is."""
    first = copies.source // nbytes
    counts = (copies.source + copies.nbytes - 1) // nbytes - first + 1
    which = np.repeat(np.arange(len(counts)), counts)
    piece = first[which] + np.arange(len(which)) - np.repeat(counts.cumsum() - counts, counts)
    whole = copies.take(which)
    start = np.maximum(whole.source, piece * nbytes)
    end = np.minimum(whole.source + whole.nbytes, (piece + 1) * nbytes)
    destination = whole.destination + start - whole.source
    return Copies(start - piece * nbytes, destination, end - start), piece
