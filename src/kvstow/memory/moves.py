"""Which bytes go where inside one machine: three arrays, nothing else."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstow.errors import BlockError, CopyError
from kvstow.plan.layout import Layout
from kvstow.plan.view import Ints, Run
from kvstow.route.copies import Copies


class Spans(NamedTuple):
    """Copies whose arrays have been checked against each other."""

    source: Ints
    destination: Ints
    nbytes: Ints


def row_moves(
    layout: Layout, group: int, source_ids: npt.ArrayLike, destination_ids: npt.ArrayLike
) -> Spans:
    """Copies of whole blocks between two arenas of one layout, as the fewest runs."""
    sources = np.atleast_1d(np.asarray(source_ids, np.int64))
    destinations = np.atleast_1d(np.asarray(destination_ids, np.int64))
    if sources.shape != destinations.shape:
        raise BlockError(f"{sources.size} source blocks, {destinations.size} destination blocks")
    count = layout.num_blocks(group)
    for ids in (sources, destinations):
        wrong = ids[(ids < 0) | (ids >= count)]
        if wrong.size:
            raise BlockError(f"group {group}: blocks {wrong[:8].tolist()} are not in [0, {count})")
    strips = layout.footprints[group].strips
    return merged(
        Spans(
            np.concatenate([strip.offset + sources * strip.stride for strip in strips]),
            np.concatenate([strip.offset + destinations * strip.stride for strip in strips]),
            np.repeat([strip.nbytes for strip in strips], len(sources)),
        )
    )


def spans(moves: Copies | Spans) -> Spans:
    """The moves as int64 arrays of one length, empty ones left out."""
    columns = (moves.source, moves.destination, moves.nbytes)
    arrays = [np.array(column, ndmin=1, copy=None) for column in columns]
    for array in arrays:
        if array.ndim != 1 or array.shape != arrays[0].shape or array.dtype.kind not in "iu":
            raise CopyError(
                f"moves need three arrays of whole numbers of one length, not "
                f"{[(a.shape, str(a.dtype)) for a in arrays]}"
            )
    source, destination, nbytes = (array.astype(np.int64, copy=False) for array in arrays)
    least = int(nbytes.min(initial=1))
    if least < 0:
        raise CopyError(f"move {int(np.argmax(nbytes < 0))} has {least} bytes")
    if least:
        return Spans(source, destination, nbytes)
    some = nbytes > 0
    return Spans(source[some], destination[some], nbytes[some])


def merged(moves: Spans, *, along: int = 0) -> Spans:
    """The same moves in ascending order of source, or `along` 1 of destination, neighbours on
    both sides joined."""
    source, destination, nbytes = moves
    if (moves[along][1:] < moves[along][:-1]).any():
        order = np.argsort(moves[along])
        source, destination, nbytes = (array[order] for array in moves)
    apart = source[1:] != source[:-1] + nbytes[:-1]
    apart |= destination[1:] != destination[:-1] + nbytes[:-1]
    if apart.all():
        return Spans(source, destination, nbytes)
    starts = np.concatenate([[0], np.flatnonzero(apart) + 1])
    return Spans(source[starts], destination[starts], np.add.reduceat(nbytes, starts))


def cut(nbytes: Ints, most: int) -> tuple[Ints, Ints, Ints]:
    """Lengths in pieces of at most `most` bytes: which one each piece is of, where it starts in
    that, and how long it is."""
    counts = -(-nbytes // most)
    which = np.repeat(np.arange(len(counts)), counts)
    start = (np.arange(len(which)) - np.repeat(counts.cumsum() - counts, counts)) * most
    return which, start, np.minimum(nbytes[which] - start, most)


def check_inside(offsets: Ints, nbytes: Ints, regions: tuple[Run, ...], what: str) -> None:
    """Refuses ranges that are not each inside one region."""
    ordered = sorted(regions)
    starts = np.array([run.offset for run in ordered], np.int64)
    ends = np.array([run.end for run in ordered], np.int64)
    at = np.searchsorted(starts, offsets, side="right") - 1 if len(ordered) > 1 else 0
    bad = (offsets < starts[at]) | (nbytes > ends[at] - offsets)
    if bad.any():
        i = int(np.argmax(bad))
        raise CopyError(
            f"move {i}: {what} bytes [{offsets[i]}, {offsets[i] + nbytes[i]}) are not inside the "
            f"arena's {[(run.offset, run.end) for run in ordered][:4]}"
        )


def check_apart(offsets: Ints, nbytes: Ints, what: str) -> None:
    """Refuses ranges that share bytes."""
    if (offsets[1:] < offsets[:-1]).any():
        order = np.argsort(offsets)
        offsets, nbytes = offsets[order], nbytes[order]
    bad = offsets[1:] - offsets[:-1] < nbytes[:-1]
    if bad.any():
        i = int(np.argmax(bad))
        first, second = (f"[{offsets[k]}, {offsets[k] + nbytes[k]})" for k in (i, i + 1))
        raise CopyError(f"{what} bytes {first} and {second} overlap")


def check_unread(sources: Ints, destinations: Ints, nbytes: Ints) -> None:
    """Refuses destinations that share bytes with some source; both are addresses here."""
    order = np.argsort(sources, kind="stable")
    starts = sources[order]
    reach = np.maximum.accumulate((sources + nbytes)[order])
    before = np.searchsorted(starts, destinations + nbytes, side="left") - 1
    bad = (before >= 0) & (reach[before] > destinations)
    if bad.any():
        i = int(np.argmax(bad))
        raise CopyError(
            f"move {i} writes {nbytes[i]} bytes at address {destinations[i]}, which the same copy "
            f"reads\n\nhint: copy in two steps, through rows that are free"
        )
