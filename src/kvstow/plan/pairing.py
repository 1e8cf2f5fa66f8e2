"""Which blocks of one side meet which blocks of the other.

Logical block `k` holds tokens `[k · block_tokens, (k + 1) · block_tokens)`; sizes differ:

    source        │ 0       │ 1       │ 2       │      16 tokens per block
    destination   │ 0             │ 1             │    24
    pairs           0·0        1·0  1·1    2·1
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvstow.errors import BlockError, RouteError
from kvstow.plan.blocklist import Blocks, Ints
from kvstow.plan.group import Group
from kvstow.plan.lanes import Flags, Overlap
from kvstow.plan.layout import NULL_SLABS, Layout
from kvstow.plan.spec import Chunk, Encoder, Full, Sink, State, Window


def block_span(group: Group) -> int:
    """Tokens per block; 1 for summaries, where block 0 is the running one."""
    return 1 if isinstance(group.retention, State) else group.block_tokens


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens `[first, end)` of a request that are to be moved."""

    first: int
    end: int

    def of(self, group: Group) -> "Tokens":
        """The same in the terms of a group: a summary or an encoding is moved whole."""
        match group.retention:
            case State():
                return Tokens(0, min(1, self.end))
            case Encoder(tokens):
                return Tokens(0, tokens if self.end else 0)
            case Full() | Window() | Chunk() | Sink():
                return self

    def needed(self, group: Group) -> tuple["Tokens", ...]:
        """Those of the group's tokens that the next token will look at."""
        mine = self.of(group)
        match group.retention:
            case Full() | State() | Encoder():
                return (mine,)
            case Window(tokens):
                return (Tokens(max(mine.first, mine.end - tokens + 1), mine.end),)
            case Chunk(tokens):
                return (Tokens(max(mine.first, mine.end - mine.end % tokens), mine.end),)
            case Sink(sink_tokens, tokens):
                return (
                    Tokens(mine.first, min(sink_tokens, mine.end)),
                    Tokens(max(mine.first, mine.end - tokens + 1), mine.end),
                )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pairs:
    """Pairs of blocks with common tokens, by destination id and slot."""

    source: Ints
    destination: Ints
    source_token: Ints
    destination_token: Ints
    tokens: Ints
    source_filled: Ints
    destination_filled: Ints

    def __len__(self) -> int:
        return len(self.source)

    def taken(self, which: Ints) -> "Pairs":
        """Some of the pairs, in that order."""
        return Pairs(**{name: getattr(self, name)[which] for name in self.__slots__})

    def kinds(self) -> Iterator[tuple[Overlap, Ints]]:
        """The pairs that overlap alike, and which they are."""
        columns = (self.source_token, self.destination_token, self.tokens,
                   self.source_filled, self.destination_filled)  # fmt: skip
        code = np.zeros(len(self), np.int64)
        for column in columns:
            if (column != column[0]).any():
                _, number = np.unique(column, return_inverse=True)
                code = code * (int(number.max()) + 1) + number
        left = np.arange(len(self))
        while len(left):
            alike = code[left] == code[left[0]]
            first = int(left[0])
            yield Overlap(*(int(column[first]) for column in columns)), left[alike]
            left = left[~alike]


def pairs(
    source: Blocks, destination: Blocks, spans: tuple[int, int], tokens: Tokens, *, exact: bool
) -> tuple[Pairs, Ints]:
    """Every pair of listed blocks with tokens in common; and the pairs `(destination
    logical block, first token, end token)` for which the source lists no block."""
    s_span, d_span = spans
    lo = np.maximum(destination.index * d_span, tokens.first)
    hi = np.minimum((destination.index + 1) * d_span, tokens.end)
    wanted = lo < hi
    lo, hi = lo[wanted], hi[wanted]
    first = lo // s_span
    counts = -(-hi // s_span) - first
    row = np.repeat(np.arange(len(lo)), counts)
    step = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    logical = first[row] + step
    d_logical = destination.index[wanted][row]
    begin = np.maximum(lo[row], logical * s_span)
    end = np.minimum(hi[row], (logical + 1) * s_span)
    at = np.searchsorted(source.index, logical)
    at = np.minimum(at, max(0, len(source) - 1))
    found = source.index[at] == logical if len(source) else np.zeros(len(row), np.bool_)
    missing = np.stack([d_logical, begin, end])[:, ~found]
    full = (np.full(len(row), s_span), np.full(len(row), d_span))
    pairs = Pairs(
        source=source.ids[at] if len(source) else logical,
        destination=destination.ids[wanted][row],
        source_token=begin - logical * s_span,
        destination_token=begin - d_logical * d_span,
        tokens=end - begin,
        source_filled=full[0] if exact else np.minimum(s_span, tokens.end - logical * s_span),
        destination_filled=full[1]
        if exact
        else np.minimum(d_span, tokens.end - d_logical * d_span),
    )
    which = np.flatnonzero(found)
    order = np.lexsort((pairs.destination_token[which], pairs.destination[which]))
    return pairs.taken(which[order]), missing


def next_to(pairs: Pairs) -> tuple[Flags, Flags]:
    """Whether some other pair's blocks follow those of each pair, or precede them: the
    same block or the next one on each side."""
    width = int(pairs.source.max(initial=0)) + 2
    key = pairs.destination * width + pairs.source
    keys = np.unique(key)
    steps = (1, width, width + 1)
    follows = np.zeros(len(key), np.bool_)
    precedes = np.zeros(len(key), np.bool_)
    for step in steps:
        follows |= _among(keys, key + step)
        precedes |= _among(keys, key - step)
    return follows, precedes


def _among(keys: Ints, wanted: Ints) -> Flags:
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return keys[at] == wanted


def check_ids(layout: Layout, group: int, blocks: Blocks, side: str) -> None:
    """Refuses ids that are no blocks of the group, null rows, and ids named twice."""
    name = layout.groups[group].group.name
    first = layout.groups[group].rows_per_slab * NULL_SLABS
    end = layout.num_blocks(group)
    wrong = blocks.ids[(blocks.ids < first) | (blocks.ids >= end)]
    if len(wrong):
        raise BlockError(
            f"{side} group {name!r}: blocks {_few(wrong)} are not among its {end} blocks "
            f"from {first} on"
        )
    ids, counts = np.unique(blocks.ids, return_counts=True)
    if (counts > 1).any():
        raise BlockError(f"{side} group {name!r}: blocks {_few(ids[counts > 1])} are named twice")


def check_covered(group: Group, missing: Ints, tokens: Tokens) -> None:
    """Refuses destination blocks that need tokens for which there is no source block."""
    bad: list[int] = []
    for needed in tokens.needed(group):
        bad += missing[0][(missing[1] < needed.end) & (missing[2] > needed.first)].tolist()
    if bad:
        few = _few(np.unique(np.array(bad, np.int64)))
        raise RouteError((
            f"group {group.name!r}: the destination wants logical blocks {few} "
            f"of tokens [{tokens.first}, {tokens.end}), and the source lists no block for them",
        ))  # fmt: skip


def _few(numbers: Ints) -> str:
    shown = ", ".join(map(str, numbers[:8].tolist()))
    return f"{shown} … ({len(numbers)} in all)" if len(numbers) > 8 else shown
