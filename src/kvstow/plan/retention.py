"""Retention: how long a layer needs a token, and what follows from it.

    kind      the token at position n sees, of those before it        rows of one request
    Full      all                                                     grow with its tokens
    Window    the last `tokens - 1`                                   bounded
    Chunk     those since the last multiple of `tokens`               bounded
    State     a summary of all                                        1
    Encoder   the encoder's `tokens` positions, none of its own       fixed

This is the only place that knows these rules. Everything else asks the functions below: how
much of a prompt can be served is `longest_prefix`, and nobody else's question.
`first_seen_token`, `first_seen_block` and `can_hit` take whole arrays of lengths.
"""

from collections.abc import Callable, Iterable
from math import lcm
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from kvstow.plan.view import Ints, Whole, ceil_div, check_count

Bools = npt.NDArray[np.bool_]
"""Yes or no for each of several: the one boolean array type."""


class Kind(msgspec.Struct, frozen=True, tag_field="kind", tag=str.lower):
    """One of the five; documents say which by its name in small letters."""


class Full(Kind, frozen=True):
    """Every token, as long as the request lives."""


class Window(Kind, frozen=True):
    """The last `tokens` tokens, the current one included."""

    tokens: int

    def __post_init__(self) -> None:
        check_count("Window: tokens", self.tokens, hint="Full() keeps every token")


class Chunk(Kind, frozen=True):
    """The tokens of the current chunk of `tokens`: position `p` sees `[p - p % tokens, p]`."""

    tokens: int

    def __post_init__(self) -> None:
        check_count("Chunk: tokens", self.tokens, hint="Full() keeps every token")


class State(Kind, frozen=True):
    """A summary of the whole sequence, in one running row.

    Such a group's block is one summary; its `block_tokens` says how many tokens lie
    between two checkpoints that a later request may start from.
    """


class Encoder(Kind, frozen=True):
    """The encoder's `tokens` positions, written once (cross-attention)."""

    tokens: int

    def __post_init__(self) -> None:
        hint = "give the most positions that the encoder may have"
        check_count("Encoder: tokens", self.tokens, hint=hint)


Retention = Full | Window | Chunk | State | Encoder


# ── what the next token sees ──────────────────────────────────────────────────────────


def forgets(retention: Retention) -> bool:
    """Whether there comes a time when tokens are no longer seen."""
    return isinstance(retention, Window | Chunk)


def first_seen_token(retention: Retention, num_tokens: Whole) -> Whole:
    """The first token that a token at `num_tokens` or later sees.

    Of one request, or of each of several. It is `num_tokens` itself where the next token
    sees nothing before it.
    """
    match retention:
        case Window(tokens):
            return (num_tokens - tokens + 1) * (num_tokens >= tokens)
        case Chunk(tokens):
            return num_tokens - num_tokens % tokens
        case Full() | Encoder() | State():
            return 0 * num_tokens


def first_seen_block(retention: Retention, num_tokens: Whole, block_tokens: int) -> Whole:
    """The block of `first_seen_token`: blocks before it may be given back."""
    return first_seen_token(retention, num_tokens) // block_tokens


def seen_blocks(retention: Retention, num_tokens: int, block_tokens: int) -> range:
    """Of the whole blocks before `num_tokens`, those that a token there needs.

    Of a summary that is the last one, the checkpoint at `num_tokens`; of an encoder's part
    nothing, its rows are written anew.
    """
    end = num_tokens // block_tokens
    if isinstance(retention, Encoder):
        return range(0)
    if isinstance(retention, State):
        return range(max(0, end - 1), end)
    return range(first_seen_block(retention, num_tokens, block_tokens), end)


def can_hit(retention: Retention, lengths: Ints, block_tokens: int, present: Bools) -> Bools:
    """For each length, a whole number of blocks, whether all blocks that a token there
    needs are present. `present` says so of each block from the first one on."""
    end = lengths // block_tokens
    if isinstance(retention, Encoder):
        return np.ones(len(lengths), np.bool_)
    if isinstance(retention, State):
        return np.concatenate((np.ones(1, np.bool_), present))[end]
    if isinstance(retention, Full):
        return end <= (len(present) if present.all() else present.argmin())
    absent = np.zeros(len(present) + 1, np.int64)
    np.cumsum(~present, out=absent[1:])
    first = first_seen_block(retention, lengths, block_tokens)
    return absent[end] == absent[np.minimum(first, end)]


# ── the prefix law ────────────────────────────────────────────────────────────────────


class Blockwise(Protocol):
    """What is kept in blocks of so many tokens; a `Group` is one."""

    @property
    def retention(self) -> Retention: ...
    @property
    def block_tokens(self) -> int: ...


Holds = Callable[[int, int], Bools]
"""`holds(g, num_blocks)`: which of the first blocks, or checkpoints, of a group are there."""


def longest_prefix(
    groups: Iterable[tuple[int, Blockwise]],
    num_tokens: int,
    holds: Holds,
    *,
    unit: int | None = None,
) -> int:
    """The most tokens, at most `num_tokens`, at which every group can serve.

        longest_prefix(enumerate(groups), len(prompt) - 1, lambda g, n: present(g, keys[g][:n]))

    `holds` is asked once per group, full ones first, and only for blocks that the groups before
    it leave possible; where its answer is shorter than `num_blocks`, the rest is not there.
    An encoder's part is written anew, so nobody asks for it. The answer is a multiple of all
    groups' `block_tokens`, or of `unit` where it is given, itself such a multiple.
    """
    tokenwise = [pair for pair in groups if not isinstance(pair[1].retention, Encoder)]
    tokenwise.sort(key=lambda pair: not isinstance(pair[1].retention, Full))
    unit = unit or lcm(*(group.block_tokens for _, group in tokenwise))
    lengths: Ints = np.arange(0, max(0, num_tokens) + 1, unit)
    for g, group in tokenwise:
        num_blocks = int(lengths[-1]) // group.block_tokens
        if not num_blocks:
            break
        present = np.zeros(num_blocks, np.bool_)
        answer = holds(g, num_blocks)[:num_blocks]
        present[: len(answer)] = answer
        lengths = lengths[can_hit(group.retention, lengths, group.block_tokens, present)]
    return int(lengths[-1])


# ── how many rows a request holds ─────────────────────────────────────────────────────


def rows_bound(retention: Retention, block_tokens: int, *, in_flight: int) -> int | None:
    """The most rows one request can hold, for any length; None where it grows for good.

    `in_flight` tokens are computed in one step: a window must still reach back from the
    first of them while the last of them is written.
    """
    match retention:
        case Full():
            return None
        case Encoder(tokens):
            return ceil_div(tokens, block_tokens)
        case State():
            return 1
        case Chunk(tokens) if tokens % block_tokens == 0:
            return ceil_div(tokens - 1 + in_flight, block_tokens)
        case Chunk(tokens) | Window(tokens):
            span = tokens - 1 + in_flight
            # So many blocks can be touched by `span` consecutive tokens.
            return (span + block_tokens - 2) // block_tokens + 1


def rows_needed(
    retention: Retention, num_tokens: int, block_tokens: int, *, in_flight: int = 1
) -> int:
    """Rows a request of `num_tokens` holds at its fullest moment."""
    if isinstance(retention, State | Encoder):
        return rows_bound(retention, block_tokens, in_flight=in_flight) or 0
    rows = ceil_div(num_tokens, block_tokens)
    in_flight = min(in_flight, max(1, num_tokens))
    bound = rows_bound(retention, block_tokens, in_flight=in_flight)
    return rows if bound is None else min(rows, bound)


# ── what to call it ───────────────────────────────────────────────────────────────────


def short_name(retention: Retention) -> str:
    """`full`, `window128`, `chunk8192`, `state`: another for every retention."""
    return f"{type(retention).__name__.lower()}{getattr(retention, 'tokens', '')}"


def in_words(retention: Retention) -> str:
    """For how long a token is kept, for people."""
    match retention:
        case Full():
            return "every token, as long as the request lives"
        case Window(tokens):
            return f"the last {tokens:,} tokens"
        case Chunk(tokens):
            return f"the current chunk of {tokens:,} tokens"
        case State():
            return "one running summary of the whole sequence"
        case Encoder(tokens):
            return f"the encoder's {tokens:,} positions"


_LASTING = (Full, Encoder, Chunk, Window, State)


def lasting_first(retention: Retention) -> tuple[int, int]:
    """A sort key: what is kept longest comes first."""
    return _LASTING.index(type(retention)), -getattr(retention, "tokens", 0)
