"""Which blocks of one side meet which blocks of the other.

Logical block `k` holds tokens `[k · block_tokens, (k + 1) · block_tokens)`; sizes differ:

    source        │ 0       │ 1       │ 2       │      16 tokens per block
    destination   │ 0             │ 1             │    24
    pairs           0·0        1·0  1·1    2·1
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvstow.plan.view import Ints
from kvstow.route.pairing import Listed, Places, Tokens, ascending
from kvstow.route.period import Kinds, Period, period

AT_ONCE = 15_000
"""Pairs of blocks in a lot: few enough for a cache, and for memory that is used again."""

NONE = np.empty((3, 0), np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Pairs of blocks with common tokens, by destination id and slot: their numbers, blocks,
    and kinds."""

    number: Ints
    source: Ints
    destination: Ints
    kind: Ints

    def __len__(self) -> int:
        return len(self.number)

    def some(self, which: slice) -> "Pairs":
        """Some of the pairs."""
        return Pairs(
            self.number[which], self.source[which], self.destination[which], self.kind[which]
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Meeting:
    """The pairs of a request, in lots of few enough destination blocks for a cache."""

    cycle: Period
    tokens: Tokens
    numbers: range
    kinds: Kinds
    source: Listed
    destination: Listed

    @property
    def most(self) -> int:
        """There are not more pairs than that."""
        return min(len(self.numbers), len(self.destination.ids) * self.cycle.most)

    def lots(self) -> Iterator[tuple[Pairs, slice, Ints]]:
        """Pairs with those of the destination blocks before and after them; which of them are
        this lot's own; and `(destination logical block, first token, end token)` where the
        source lists no block for one of these."""
        ids, places = ascending(self.destination.ids, self.destination.end_id)
        step = max(1, AT_ONCE // self.cycle.most)
        for start in range(0, len(ids), step):
            end, near = min(len(ids), start + step), slice(max(0, start - 1), start + step + 1)
            number, there = self._numbers(ids[near], places[near])
            logical, missing = self.cycle.source.logical(number), NONE
            if not self._covered:
                lacking = self.source.lacks(logical)
                missing = _stretches(self.cycle, number[lacking], self.tokens)
                number, logical, there = (np.delete(x, lacking) for x in (number, logical, there))
            own = slice(*there.searchsorted((ids[start], ids[end - 1] + 1)).tolist())
            here, kind = self.source.of(logical), self.kinds.of(number)
            yield Pairs(number, here, there, kind), own, missing

    @cached_property
    def _covered(self) -> bool:
        """Whether there is a source block for every pair."""
        side = self.cycle.source
        return self.source.covers(side.block(self.numbers[0]), side.block(self.numbers[-1]))

    @cached_property
    def _cut(self) -> bool:
        """Whether not all pairs of the listed destination blocks are wanted."""
        side, index = self.cycle.destination, self.destination.index
        first, end = side.first(np.array([index[0], index[-1] + 1])).tolist()
        return first < self.numbers.start or end > self.numbers.stop

    def _numbers(self, ids: Ints, places: Places) -> tuple[Ints, Ints]:
        """The pairs of some destination blocks, and the id of each."""
        side = self.cycle.destination
        block = self.destination.logical(places)
        begin = side.first(block)
        if self.cycle.most == 1 and not self._cut:
            return begin, ids
        count = side.first(block + 1)
        if self._cut:
            for bound in (begin, count):
                np.maximum(bound, self.numbers.start, out=bound)
                np.minimum(bound, self.numbers.stop, out=bound)
        count -= begin
        return ranges(begin, count), ids.repeat(count)


def meeting(source: Listed, destination: Listed, tokens: Tokens, *, exact: bool) -> Meeting | None:
    """How listed blocks meet, if any have tokens in common."""
    cycle = period(source.span, destination.span)
    held = destination.tokens
    first, end = max(tokens.first, held.first), min(tokens.end, held.end)
    if first >= end:
        return None
    numbers = range(cycle.number(first), cycle.number(end - 1) + 1)
    return Meeting(
        cycle=cycle,
        tokens=tokens,
        numbers=numbers,
        kinds=cycle.kinds(numbers, (tokens.first, tokens.end), exact=exact),
        source=source,
        destination=destination,
    )


def _stretches(cycle: Period, numbers: Ints, tokens: Tokens) -> Ints:
    """Destination block, first and end token of some pairs."""
    s_span, d_span = cycle.source.span, cycle.destination.span
    s, d = (side.logical(numbers) for side in (cycle.source, cycle.destination))
    first = np.maximum(np.maximum(s * s_span, d * d_span), tokens.first)
    end = np.minimum(np.minimum((s + 1) * s_span, (d + 1) * d_span), tokens.end)
    return np.stack([d, first, end])


def ranges(starts: Ints, counts: Ints) -> Ints:
    """The numbers from each start on, so many of them, one after the other; changes `starts`."""
    starts += counts
    starts -= np.cumsum(counts)
    found = starts.repeat(counts)
    found += np.arange(len(found))
    return found
