"""What a request asks for: tokens, the blocks that either side lists for them, and their pairs.

Tokens are cut where either side's blocks end, and each such pair of blocks is copied like its
lanes:

    source        │ 0       │ 1       │ 2       │      16 tokens per block
    destination   │ 0             │ 1             │    24
    pairs           0·0        1·0  1·1    2·1
    copies        9 ▶ 1 │ 7 ▶ 4 │ 2, 3 ▶ 5, 6
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstow.errors import BlockError, RouteError, SpecError
from kvstow.plan.group import Group
from kvstow.plan.layout import NULL_SLABS, Layout
from kvstow.plan.retention import Encoder, State, first_seen_token
from kvstow.plan.view import Ints, align_up, ceil_div

FEW = 8
"""So many blocks are named in an error."""


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Logical block `index[i]` of a request has id `ids[i]`; `index` ascends.

    Logical block `k` holds tokens `[k · block_tokens, (k + 1) · block_tokens)`. A window
    group lists only what it still holds. In a recurrent group index 0 is the running state.
    `partial` are the logical blocks that lack tokens which no later token of this request sees:
    it can go on with them, and nobody else may be given them.
    """

    ids: Ints
    index: Ints
    partial: Ints | None = None

    @property
    def whole(self) -> "Blocks":
        """Those that lack nothing."""
        if self.partial is None or not len(self.partial):
            return self
        at = ~np.isin(self.index, self.partial)
        return Blocks(self.ids[at], self.index[at])

    def since(self, first: int) -> "Blocks":
        """The logical blocks from `first` on."""
        at = slice(int(np.searchsorted(self.index, first)), None)
        return Blocks(self.ids[at], self.index[at], self.partial)

    @staticmethod
    def first(ids: npt.ArrayLike) -> "Blocks":
        """Ids of the request's blocks from the first on."""
        array = np.ascontiguousarray(ids, np.int64)
        return Blocks(array, np.arange(len(array), dtype=np.int64))

    def __post_init__(self) -> None:
        for numbers in (self.ids, self.index):
            if not isinstance(numbers, np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise SpecError(
                    f"ids and logical blocks are arrays, not {type(numbers).__name__}\n\n"
                    "hint: Blocks.first(ids), or np.array(ids)"
                )
        if self.ids.shape != self.index.shape or self.ids.ndim != 1:
            raise SpecError(f"{self.ids.shape} ids for {self.index.shape} logical blocks")
        if len(self.index) and (self.index[0] < 0 or (self.index[1:] <= self.index[:-1]).any()):
            raise SpecError(f"logical blocks {self.index.tolist()} do not ascend from 0 or later")

    def __len__(self) -> int:
        return len(self.ids)

    def between(self, first: int, end: int) -> slice:
        """Where the logical blocks `[first, end)` are in the list, as far as they are listed."""
        return slice(*np.searchsorted(self.index, (first, end)).tolist())

    def places(self, logical: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Where logical blocks are in the list; and whether each of them is listed."""
        at = np.minimum(np.searchsorted(self.index, logical), len(self.index) - 1)
        return at, self.index[at] == logical


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
            case _:
                return self

    def needed(self, group: Group) -> "Tokens":
        """Those of the group's tokens that the next token will look at."""
        if isinstance(group.retention, State | Encoder):
            return self.of(group)
        return Tokens(max(self.first, first_seen_token(group.retention, self.end)), self.end)


def block_span(group: Group) -> int:
    """Tokens per block; 1 for summaries, where block 0 is the running one."""
    return 1 if isinstance(group.retention, State) else group.block_tokens


def check_ids(layout: Layout, group: int, blocks: Blocks, side: str) -> None:
    """Refuses ids that are no blocks of the group, null rows, and ids named twice."""
    if not len(blocks):
        return
    rows = layout.groups[group]
    first, end = rows.rows_per_slab * NULL_SLABS, layout.num_blocks(group)
    ids = np.sort(blocks.ids)
    if ids[0] < first or ids[-1] >= end:
        raise BlockError(
            f"{side} group {rows.group.name!r}: blocks {_few(ids[(ids < first) | (ids >= end)])} "
            f"are not among its {end} blocks from {first} on"
        )
    twice = ids[1:] == ids[:-1]
    if twice.any():
        raise BlockError(
            f"{side} group {rows.group.name!r}: blocks {_few(np.unique(ids[1:][twice]))} are "
            "named twice"
        )


def check_held(group: Group, blocks: Blocks, tokens: Tokens, side: str) -> None:
    """Refuses a list that lacks blocks which the next token needs.

    `tokens` are the request's; `group` says which of them the token after the last looks at.
    """
    span, needed = block_span(group), tokens.needed(group)
    if needed.first >= needed.end:
        return
    first, end = needed.first // span, ceil_div(needed.end, span)
    listed = blocks.between(first, end)
    count = end - first - (listed.stop - listed.start)
    if count:
        missing = first_missing(blocks.index[listed], first, end)
        lacking = (
            f"{side} group {group.name!r}: no block is listed for logical blocks "
            f"{_few(missing, count)} "
            f"({span} tokens each), which the token after {tokens.end} tokens needs"
        )
        raise RouteError((lacking,))


def first_missing(listed: Ints, first: int, end: int) -> Ints:
    """The first few numbers of `[first, end)` that are not listed: the range itself may be so long
    that it fits no memory."""
    end = min(end, first + len(listed) + FEW)
    return np.setdiff1d(np.arange(first, end), listed)[:FEW]


def _few(numbers: Ints, count: int | None = None) -> str:
    """The first of these numbers, of which there are so many."""
    count = len(numbers) if count is None else count
    shown = ", ".join(map(str, numbers[:FEW].tolist()))
    return f"{shown} … ({count} in all)" if count > FEW else shown


# ── pairs of blocks ───────────────────────────────────────────────────────────────────


class Overlap(NamedTuple):
    """How two blocks overlap: where in each the common tokens start, and how many they are."""

    source_token: int
    destination_token: int
    tokens: int


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
