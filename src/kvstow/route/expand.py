"""From the blocks of a request to copies.

Tokens are cut where either side's blocks end. The lanes of each such pair of blocks are put
in their places, sorted by destination, and made one where nothing but free bytes lies between:

    source        │ 0       │ 1       │ 2       │      16 tokens per block
    destination   │ 0             │ 1             │    24
    pairs           0·0        1·0  1·1    2·1

Where both sides have the same rows, a block is one copy, and neighbours are one:

    source        row 7   row 2   row 3   row 9        ids of logical blocks 0, 1, 2, 3
    destination   row 4   row 5   row 6   row 1
    copies        9 ▶ 1 │ 7 ▶ 4 │ 2, 3 ▶ 5, 6
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks, Tokens
from kvstow.route.copies import Copies, joined
from kvstow.route.lanes import Flags, FreeAround, Lanes, Overlap, chained, continued

LanesOf = Callable[[Overlap], Lanes]


def cut_tokens(tokens: Tokens, s_span: int, d_span: int) -> tuple[Ints, Ints]:
    """Starts and ends of the stretches that lie in one block of either side each."""
    first, end = tokens.first, tokens.end
    if first >= end:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    ends = [np.arange((first // span + 1) * span, end, span) for span in {s_span, d_span}]
    start = _distinct(np.concatenate([[first], *ends]))
    return start, np.append(start[1:], end)


def _distinct(numbers: Ints) -> Ints:
    """The numbers in ascending order, each once; faster than numpy's own for many."""
    ordered = np.sort(numbers)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]


class BlockPairs(NamedTuple):
    """Blocks with tokens in common, by destination id and token: pair `i` is blocks
    `source[i]` and `destination[i]`, which overlap like `overlaps[kind[i]]`."""

    source: Ints
    destination: Ints
    kind: Ints
    overlaps: tuple[Overlap, ...]


def block_pairs(
    source: Blocks,
    destination: Blocks,
    tokens: Tokens,
    spans: tuple[int, int],
    last_ids: tuple[int, int],
    *,
    exact: bool,
) -> BlockPairs:
    """The pairs for some tokens, as far as both sides list them; neither list is empty.

    Slots from `tokens.end` on are not filled, or with `exact` to be treated as if they were.
    """
    s_span, d_span = spans
    first, last = (int(destination.index[i]) * d_span for i in (0, -1))
    held = Tokens(max(tokens.first, first), min(tokens.end, last + d_span))
    start, stop = cut_tokens(held, s_span, d_span)
    s_place, s_listed = source.places(start // s_span)
    d_place, d_listed = destination.places(start // d_span)
    keep = np.flatnonzero(s_listed & d_listed)
    keep = keep[np.argsort(destination.ids[d_place[keep]], kind="stable")]
    s_id, d_id = source.ids[s_place[keep]], destination.ids[d_place[keep]]
    start, stop = start[keep], stop[keep]
    ends = s_id == last_ids[0], d_id == last_ids[1]
    kind, example = _kinds(start, spans, tokens.end, ends)
    columns = (x[example].tolist() for x in (start, stop, *ends))
    overlaps = (
        Overlap(
            source_token=lo % s_span,
            destination_token=lo % d_span,
            tokens=hi - lo,
            source_filled=s_span if exact else min(s_span, tokens.end - lo + lo % s_span),
            destination_filled=d_span if exact else min(d_span, tokens.end - lo + lo % d_span),
            source_is_last=s_last,
            destination_is_last=d_last,
        )
        for lo, hi, s_last, d_last in zip(*columns, strict=True)
    )
    return BlockPairs(s_id, d_id, kind, tuple(overlaps))


def _kinds(
    start: Ints, spans: tuple[int, int], end: int, ends: tuple[Flags, Flags]
) -> tuple[Ints, Ints]:
    """The kind of each pair, and one pair of each kind.

    Where a pair starts in its blocks, and whether these are full, says how long it is: one
    that `end` cuts is the only pair of two blocks that are not.
    """
    s_token, d_token = start % spans[0], start % spans[1]
    code = s_token * spans[1] + d_token
    for flag in (start - s_token + spans[0] > end, start - d_token + spans[1] > end, *ends):
        code = 2 * code + flag
    codes = _distinct(code)
    kind, example = np.searchsorted(codes, code), np.empty(len(codes), np.int64)
    example[kind] = np.arange(len(kind))
    return kind, example


def expanded(pairs: BlockPairs, kinds: Sequence[Lanes]) -> Copies:
    """The lanes of all pairs, by destination, those that follow each other made one."""
    if not len(pairs.kind):
        return Copies.none()
    table = joined([lanes.copies for lanes in kinds])
    s_stride = np.concatenate([lanes.source_stride for lanes in kinds])
    d_stride = np.concatenate([lanes.destination_stride for lanes in kinds])
    free = FreeAround(*map(np.concatenate, zip(*(lanes.free for lanes in kinds), strict=True)))
    sizes = np.array([len(lanes) for lanes in kinds])
    counts = sizes[pairs.kind]
    before = (np.cumsum(sizes) - sizes)[pairs.kind] - (np.cumsum(counts) - counts)
    lane = np.repeat(before, counts)
    lane += np.arange(len(lane))
    source = _places(pairs.source, counts, lane, s_stride, table.source)
    destination = _places(pairs.destination, counts, lane, d_stride, table.destination)
    if (destination[1:] < destination[:-1]).any():
        order = np.argsort(destination, kind="stable")
        lane, source, destination = lane[order], source[order], destination[order]
    copies = Copies(source, destination, table.nbytes[lane])
    return chained(copies, continued(copies, lane, free))[0]


def _places(blocks: Ints, counts: Ints, lane: Ints, strides: Ints, offsets: Ints) -> Ints:
    """Where the lanes of each block lie; in place, because fresh memory costs as much as sums."""
    if (strides == strides[0]).all():
        places = np.repeat(blocks * strides[0], counts)
    else:
        places = np.repeat(blocks, counts)
        places *= strides[lane]
    places += offsets[lane]
    return places


# ── equal rows ────────────────────────────────────────────────────────────────────────

_ABOVE = 32
_BELOW = (1 << _ABOVE) - 1
_NEXT = (1 << _ABOVE) + 1


class EqualRows(NamedTuple):
    """Blocks of `span` tokens that are one copy each: `nbytes` from `source + id · stride` to
    `destination + id · stride`. Copies of neighbouring rows are one."""

    span: int
    stride: int
    full: Lanes
    lanes_of: LanesOf

    @staticmethod
    def of(
        lanes_of: LanesOf, spans: tuple[int, int], last_ids: tuple[int, int]
    ) -> "EqualRows | None":
        """The rows, if both sides have the same ones."""
        span = spans[0]
        if span != spans[1] or max(last_ids) >= _BELOW >> 1:
            return None
        full = lanes_of(Overlap(0, 0, span, span, span))
        stride = int(full.source_stride[0])
        if len(full) > 1 or stride != full.destination_stride[0] or not _meet(full, full, stride):
            return None
        return EqualRows(span, stride, full, lanes_of)

    def copies(
        self, source: Blocks, destination: Blocks, tokens: Tokens, *, exact: bool
    ) -> Copies | None:
        """The copies of one request; None where blocks between are not listed or the first is
        cut. Neither list is empty."""
        span, index = self.span, destination.index
        first = max(tokens.first // span, int(index[0]))
        end = min(-(-tokens.end // span), int(index[-1]) + 1)
        if tokens.first > first * span:
            return None
        here, there = source.between(first, end), destination.between(first, end)
        if not end - first == here.stop - here.start == there.stop - there.start > 0:
            return None
        filled = min(span, tokens.end - (end - 1) * span)
        tail = self.full if filled == span else self._tail(filled, exact=exact)
        if tail is None:
            return None
        nbytes = int(self.full.copies.nbytes[0]), int(tail.copies.nbytes[0])
        return self._runs(source.ids[here], destination.ids[there], *nbytes)

    def _tail(self, filled: int, *, exact: bool) -> Lanes | None:
        """The last block's copy, if it is one that starts like the others."""
        slots = self.span if exact else filled
        tail, full = self.lanes_of(Overlap(0, 0, filled, slots, slots)), self.full.copies
        alike = (
            len(tail) == 1
            and tail.copies.source[0] == full.source[0]
            and tail.copies.destination[0] == full.destination[0]
            and _meet(tail, self.full, self.stride)
        )
        return tail if alike else None

    def _runs(self, source: Ints, destination: Ints, nbytes: int, tail_bytes: int) -> Copies:
        """Rows by destination, those that follow each other on both sides as one.

        A pair is one number, the destination's id above the source's: so they are sorted,
        and compared, together.
        """
        both = destination << _ABOVE
        both += source
        tail = both[-1]
        both.sort()
        first = np.append(0, np.flatnonzero(both[1:] - both[:-1] != _NEXT) + 1)
        counts = np.append(first[1:], len(both)) - first
        starts = both[first]
        lengths = (counts - 1) * self.stride + nbytes
        if tail_bytes != nbytes:
            lengths[starts + (counts - 1) * _NEXT == tail] -= nbytes - tail_bytes
        places = self.full.copies
        return Copies(
            (starts & _BELOW) * self.stride + places.source,
            (starts >> _ABOVE) * self.stride + places.destination,
            lengths,
        )


def _meet(one: Lanes, next_one: Lanes, stride: int) -> bool:
    """Whether two single copies of neighbouring rows, which start alike, are one."""
    gap = stride - int(one.copies.nbytes[0])
    free, after = one.free, next_one.free
    return bool(
        gap <= free.source_after[0] + after.source_before[0]
        and gap <= free.destination_after[0] + after.destination_before[0]
    )
