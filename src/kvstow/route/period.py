"""Pairs of blocks as numbers: which blocks of two sizes meet, and how.

source        │ 0       │ 1       │ 2       │ 3        16 tokens per block
destination   │ 0             │ 1             │ 2      24
pair          │ 0       │ 1   │ 2   │ 3     │ 4
              ╰────────── one period ───────╯
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from math import lcm
from typing import NamedTuple

import numpy as np

from kvstow.plan.view import Ints
from kvstow.route.lanes import Overlap
from kvstow.route.overlap import Interval


class Pattern(NamedTuple):
    """Integers for all numbers from 0 on: the values, then the same with `step` more, and so
    on."""

    values: Ints
    step: int

    @staticmethod
    def of(values: Sequence[int], step: int) -> "Pattern":
        """The shortest pattern of those integers."""
        num = len(values)
        for length in range(1, num):
            part, left = divmod(step * length, num)
            if num % length or left:
                continue
            if all(values[i] + part == values[i + length] for i in range(num - length)):
                return Pattern(np.array(values[:length], np.int64), part)
        return Pattern(np.array(values, np.int64), step)

    def at(self, numbers: Ints) -> Ints:
        """The integers of some numbers."""
        if len(self.values) == 1:  # and that is 0, as blocks and pairs are counted from there
            return numbers * self.step if self.step != 1 else numbers
        turns = numbers // len(self.values)
        found = self.values.take(numbers - turns * len(self.values))
        if self.step:
            turns *= self.step
            found += turns
        return found


class Side:
    """One side of a period: tokens per block, blocks in the period, and which of them each
    pair has."""

    def __init__(self, span: int, num_blocks: int, blocks: tuple[int, ...]) -> None:
        self.span, self.num_blocks, self.blocks = span, num_blocks, blocks
        self._blocks = Pattern.of(blocks, num_blocks)
        firsts = [blocks.index(block) for block in range(num_blocks)]
        self._firsts = Pattern.of(firsts, len(blocks))

    def block(self, number: int) -> int:
        """The logical block of a pair."""
        turn, i = divmod(number, len(self.blocks))
        return turn * self.num_blocks + self.blocks[i]

    def logical(self, numbers: Ints) -> Ints:
        """The logical blocks of pairs."""
        return self._blocks.at(numbers)

    def first(self, blocks: Ints) -> Ints:
        """The first pair of each logical block."""
        return self._firsts.at(blocks)


class Kinds(NamedTuple):
    """How pairs overlap: `overlaps[k]`, where `k` is what `phases` says of their place in the
    period, but for the pair `first` and those from `last` on, of which `edges` says it."""

    overlaps: tuple[Overlap, ...]
    phases: Pattern
    first: int
    last: int
    edges: Sequence[int]

    def of(self, numbers: Ints) -> Ints:
        """Which of the overlaps each of some pairs has."""
        if len(self.overlaps) == 1:
            return np.zeros(len(numbers), np.int64)
        found = self.phases.at(numbers)
        inside = (numbers - (self.first + 1)).view(np.uint64)  # of a number before it, huge
        for i in np.flatnonzero(inside >= self.last - self.first - 1).tolist():
            found[i] = self.edges[max(int(numbers[i]) - self.last + 1, 0)]
        return found


class Period:
    """The pairs of full blocks up to where block boundaries of both sides meet again, and so
    all pairs: they are numbered by token, from token 0 on."""

    def __init__(self, s_span: int, d_span: int) -> None:
        self.tokens = lcm(s_span, d_span)
        cuts = {*range(0, self.tokens, s_span), *range(0, self.tokens, d_span)}
        self.begin = tuple(sorted(cuts))
        self.source, self.destination = (
            Side(span, self.tokens // span, tuple(token // span for token in self.begin))
            for span in (s_span, d_span)
        )
        self.overlaps = tuple(
            self.overlap(number, (0, self.tokens), exact=True) for number in range(len(self.begin))
        )
        self.most = max(Counter(self.destination.blocks).values())

    def number(self, token: int) -> int:
        """The pair that has a token."""
        turn, inside = divmod(token, self.tokens)
        return turn * len(self.begin) + bisect_right(self.begin, inside) - 1

    def overlap(self, number: int, tokens: Interval, *, exact: bool) -> Overlap:
        """How a pair's blocks overlap within some tokens; unless `exact`, slots after these
        are not filled."""
        s_span, d_span, end = self.source.span, self.destination.span, tokens[1]
        s, d = self.source.block(number) * s_span, self.destination.block(number) * d_span
        first = max(s, d, tokens[0])
        return Overlap(
            source_token=first - s,
            destination_token=first - d,
            tokens=min(s + s_span, d + d_span, end) - first,
            source_filled=s_span if exact else min(s_span, end - s),
            destination_filled=d_span if exact else min(d_span, end - d),
        )

    def kinds(self, numbers: range, tokens: Interval, *, exact: bool) -> Kinds:
        """How pairs overlap within some tokens. Only blocks that the first or the last token
        cuts do not overlap as in every period."""
        last = min(tokens[1] - tokens[1] % side.span for side in (self.source, self.destination))
        tail = range(max(numbers.start + 1, self.number(last)), numbers.stop)
        whole = range(numbers.start + 1, tail.start)
        phases = {number % len(self.begin): i for i, number in enumerate(whole[: len(self.begin)])}
        kinds = {self.overlaps[phase]: i for phase, i in phases.items()}
        edges = [
            kinds.setdefault(self.overlap(number, tokens, exact=exact), len(kinds))
            for number in (numbers.start, *tail)
        ]
        return Kinds(
            overlaps=tuple(kinds),
            phases=Pattern.of([phases.get(phase, 0) for phase in range(len(self.begin))], 0),
            first=numbers.start,
            last=tail.start,
            edges=edges,
        )


period = lru_cache(maxsize=1024)(Period)
"""The period of two block sizes."""
