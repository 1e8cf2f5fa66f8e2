"""What a request asks for: tokens, and the blocks that either side lists for them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstow.errors import BlockError, RouteError, SpecError
from kvstow.plan.group import Group
from kvstow.plan.layout import NULL_SLABS, Layout
from kvstow.plan.retention import Encoder, State, first_seen_token
from kvstow.plan.view import Ints, ceil_div

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
