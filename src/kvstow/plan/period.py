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
import numpy.typing as npt

from kvstow.plan.blocklist import Ints
from kvstow.plan.lanes import Overlap
from kvstow.plan.overlap import Interval

Kinds = npt.NDArray[np.int32]


class Side(NamedTuple):
    """One side of a period: tokens per block, blocks in the period, and which of them each
    pair has."""

    span: int
    num_blocks: int
    blocks: tuple[int, ...]

    def block(self, number: int) -> int:
        """The logical block of a pair."""
        turn, i = divmod(number, len(self.blocks))
        return turn * self.num_blocks + self.blocks[i]

    def logical(self, numbers: range) -> Ints:
        """The logical blocks of pairs."""
        return _repeated(self.blocks, numbers, self.num_blocks)


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

    def kinds(
        self, numbers: range, tokens: Interval, *, exact: bool
    ) -> tuple[tuple[Overlap, ...], Kinds]:
        """How pairs overlap within some tokens, and which way each does. Only blocks that the
        first or the last token cuts do not overlap as in every period."""
        last = min(tokens[1] - tokens[1] % side.span for side in (self.source, self.destination))
        tail = range(max(numbers.start + 1, self.number(last)), numbers.stop)
        whole = range(numbers.start + 1, tail.start)
        phases = {number % len(self.begin): i for i, number in enumerate(whole[: len(self.begin)])}
        kinds = {self.overlaps[phase]: i for phase, i in phases.items()}
        kind = np.zeros(len(numbers), np.int32)
        if len(phases) > 1:
            phase = [phases.get(phase, 0) for phase in range(len(self.begin))]
            kind[:] = _repeated(phase, numbers, 0)
        for number in (numbers.start, *tail):
            overlap = self.overlap(number, tokens, exact=exact)
            kind[number - numbers.start] = kinds.setdefault(overlap, len(kinds))
        return tuple(kinds), kind


def _repeated(values: Sequence[int], numbers: range, step: int) -> Ints:
    """For each number, `values` at its remainder, plus `step` times the quotient."""
    first, end = numbers.start // len(values), -(-numbers.stop // len(values))
    turns = np.arange(first, end)
    turns *= step
    skip = first * len(values)
    found = np.add.outer(turns, np.array(values, np.int64)).ravel()
    return found[numbers.start - skip : numbers.stop - skip]


period = lru_cache(maxsize=1024)(Period)
"""The period of two block sizes."""
