"""From the blocks of a request to copies.

Tokens are cut where either side's blocks end, and each such pair of blocks is copied like its
lanes:

    source        │ 0       │ 1       │ 2       │      16 tokens per block
    destination   │ 0             │ 1             │    24
    pairs           0·0        1·0  1·1    2·1

Where both sides have the same rows, a block is one copy, and neighbours are one:

    source        row 7   row 2   row 3   row 9        ids of logical blocks 0, 1, 2, 3
    destination   row 4   row 5   row 6   row 1
    copies        9 ▶ 1 │ 7 ▶ 4 │ 2, 3 ▶ 5, 6
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvstow.plan.view import Ints, align_up
from kvstow.route.blocks import Blocks, Tokens
from kvstow.route.copies import Copies, joined
from kvstow.route.lanes import Lanes, Overlap


def cut_tokens(tokens: Tokens, s_span: int, d_span: int) -> tuple[Ints, Ints]:
    """Starts and ends of the stretches that lie in one block of either side each."""
    first, end = tokens.first, tokens.end
    if first >= end:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    ends = [np.arange((first // span + 1) * span, end, span) for span in {s_span, d_span}]
    start = np.append(first, ends[0] if len(ends) == 1 else np.union1d(*ends))
    return start, np.append(start[1:], end)


class BlockPairs(NamedTuple):
    """Blocks that overlap alike: pair `i` is blocks `source[i]` and `destination[i]`."""

    overlap: Overlap
    source: Ints
    destination: Ints


def block_pairs(
    source: Blocks, destination: Blocks, tokens: Tokens, spans: tuple[int, int]
) -> Iterator[BlockPairs]:
    """The pairs for some tokens, as far as both sides list them, by destination; neither list
    is empty.

    The last tokens travel with what their blocks have beyond them: slots that hold nothing yet,
    on either side.
    """
    s_span, d_span = spans
    first, last = (int(destination.index[i]) * d_span for i in (0, -1))
    end = min(*(align_up(tokens.end, span) for span in spans), last + d_span)
    first = max(tokens.first, first)
    if s_span == d_span and not first % s_span and first < end:
        here, there = (
            side.between(first // s_span, end // s_span) for side in (source, destination)
        )
        if (here.stop - here.start, there.stop - there.start) == 2 * ((end - first) // s_span,):
            yield _by_destination(Overlap(0, 0, s_span), source.ids[here], destination.ids[there])
            return
    start, stop = cut_tokens(Tokens(first, end), s_span, d_span)
    s_block, s_token = np.divmod(start, s_span)
    d_block, d_token = (s_block, s_token) if s_span == d_span else np.divmod(start, d_span)
    s_place, s_listed = source.places(s_block)
    d_place, d_listed = destination.places(d_block)
    kind = s_token * d_span + d_token
    at = np.flatnonzero(s_listed & d_listed)
    while len(at):  # each kind, the first one first
        first, is_alike = at[0], kind[at] == kind[at[0]]
        alike, at = at[is_alike], at[~is_alike]
        yield _by_destination(
            Overlap(int(s_token[first]), int(d_token[first]), int(stop[first] - start[first])),
            source.ids[s_place[alike]],
            destination.ids[d_place[alike]],
        )


def _by_destination(overlap: Overlap, source: Ints, destination: Ints) -> BlockPairs:
    order = np.argsort(destination)
    return BlockPairs(overlap, source[order], destination[order])


def expanded(pairs: BlockPairs, lanes: Lanes) -> Copies:
    """The lanes of all pairs; those that go on in the next block's are one copy."""
    s_ids, d_ids = pairs.source, pairs.destination
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
    return joined(parts)


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
