"""Retention: how long a layer needs a token, and what follows from it.

    kind      the token at position n sees, of those before it        rows of one request
    Full      all                                                     grow with its tokens
    Window    the last `tokens - 1`                                   bounded
    Chunk     those since the last multiple of `tokens`               bounded
    Sink      the first `sink_tokens`, and the last `tokens - 1`      bounded
    State     a summary of all                                        1 + checkpoints
    Encoder   the encoder's `tokens` positions, none of its own       fixed

This is the only place that knows these rules. Everything else asks the functions below.
`first_seen_token`, `first_seen_block` and `can_hit` take whole arrays of lengths.
"""

from dataclasses import dataclass
from typing import cast, get_args, overload

import numpy as np
import numpy.typing as npt

from kvstow.errors import SpecError
from kvstow.plan.view import Ints

Bools = npt.NDArray[np.bool_]
"""Yes or no for each of several: the one boolean array type."""

MAX_TOKENS = 1 << 40
"""No retention counts more tokens than that."""


@dataclass(frozen=True, slots=True)
class Full:
    """Every token, as long as the request lives."""


@dataclass(frozen=True, slots=True)
class Window:
    """The last `tokens` tokens, the one that looks included."""

    tokens: int

    def __post_init__(self) -> None:
        _check_count("Window", "tokens", self.tokens, hint="Full() keeps every token")


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of the current chunk of `tokens`: position `p` sees `[p - p % tokens, p]`."""

    tokens: int

    def __post_init__(self) -> None:
        _check_count("Chunk", "tokens", self.tokens, hint="Full() keeps every token")


@dataclass(frozen=True, slots=True)
class Sink:
    """The first `sink_tokens` tokens for good, and the last `tokens`."""

    sink_tokens: int
    tokens: int

    def __post_init__(self) -> None:
        _check_count("Sink", "sink_tokens", self.sink_tokens, hint="Window(tokens) has no sink")
        _check_count("Sink", "tokens", self.tokens, hint="the last token always sees itself")


@dataclass(frozen=True, slots=True)
class State:
    """A summary of the whole sequence: one running row, and `checkpoints` kept behind it.

    Such a group's block is one summary; its `block_tokens` says how many tokens lie
    between two checkpoints that a later request may start from.
    """

    checkpoints: int = 0

    def __post_init__(self) -> None:
        hint = "State() keeps the running summary alone"
        _check_count("State", "checkpoints", self.checkpoints, least=0, hint=hint)


@dataclass(frozen=True, slots=True)
class Encoder:
    """The encoder's `tokens` positions, written once (cross-attention)."""

    tokens: int

    def __post_init__(self) -> None:
        hint = "give the most positions that the encoder may have"
        _check_count("Encoder", "tokens", self.tokens, hint=hint)


Retention = Full | Window | Chunk | Sink | State | Encoder


def _check_count(kind: str, what: str, value: object, *, least: int = 1, hint: str) -> None:
    if type(value) is not int or not least <= value <= MAX_TOKENS:
        raise SpecError(
            f"{kind}: {what} is {value!r}, not a whole number from {least} to {MAX_TOKENS}"
            f"\n\nhint: {hint}"
        )


def check_retention(where: str, value: object) -> None:
    """Raises SpecError for anything that is not a retention; `where` begins the message."""
    if not isinstance(value, get_args(Retention)):
        given = getattr(value, "__name__", repr(value)) if isinstance(value, type) else repr(value)
        names = ", ".join(cast(type, kind).__name__ for kind in get_args(Retention))
        raise SpecError(
            f"{where}: retention is {given}, not one of {names}"
            "\n\nhint: for example Full() or Window(4096)"
        )


# ── what the next token sees ──────────────────────────────────────────────────────────


def forgets(retention: Retention) -> bool:
    """Whether there comes a time when tokens are no longer seen."""
    return isinstance(retention, Window | Chunk | Sink)


@overload
def first_seen_token(retention: Retention, num_tokens: int) -> int: ...
@overload
def first_seen_token(retention: Retention, num_tokens: Ints) -> Ints: ...
def first_seen_token(retention: Retention, num_tokens: int | Ints) -> int | Ints:
    """The first token, sinks apart, that a token at `num_tokens` or later sees.

    Of one request, or of each of several. It is `num_tokens` itself where the next token
    sees nothing before it.
    """
    match retention:
        case Window(tokens) | Sink(_, tokens):
            return (num_tokens - tokens + 1) * (num_tokens >= tokens)
        case Chunk(tokens):
            return num_tokens - num_tokens % tokens
        case Full() | Encoder() | State():
            return 0 * num_tokens


@overload
def first_seen_block(retention: Retention, num_tokens: int, block_tokens: int) -> int: ...
@overload
def first_seen_block(retention: Retention, num_tokens: Ints, block_tokens: int) -> Ints: ...
def first_seen_block(retention: Retention, num_tokens: int | Ints, block_tokens: int) -> int | Ints:
    """The block of `first_seen_token`: blocks before it, sinks apart, may be given back."""
    return first_seen_token(retention, num_tokens) // block_tokens


def sink_blocks(retention: Retention, block_tokens: int) -> int:
    """Blocks at the beginning that are held for good although a window moves on."""
    return -(-retention.sink_tokens // block_tokens) if isinstance(retention, Sink) else 0


def seen_tokens(retention: Retention, num_tokens: int) -> tuple[range, range]:
    """Of the tokens before `num_tokens`, those that a token there sees: sinks, and the rest.

    The two do not overlap. A summary stands for all tokens, and so does an encoder's part.
    """
    first = first_seen_token(retention, num_tokens)
    sinks = retention.sink_tokens if isinstance(retention, Sink) else 0
    return range(min(sinks, first)), range(first, num_tokens)


def seen_blocks(retention: Retention, num_tokens: int, block_tokens: int) -> tuple[range, range]:
    """Of the whole blocks before `num_tokens`, those that a token there needs: those of the
    sink, and the rest. The two do not overlap.

    Of a summary that is the last one, the checkpoint at `num_tokens`; of an encoder's part
    nothing, its rows are written anew.
    """
    end = num_tokens // block_tokens
    if isinstance(retention, Encoder):
        return range(0), range(0)
    if isinstance(retention, State):
        return range(0), range(max(0, end - 1), end)
    first = first_seen_block(retention, num_tokens, block_tokens)
    return range(min(sink_blocks(retention, block_tokens), first)), range(first, end)


def can_hit(retention: Retention, lengths: Ints, block_tokens: int, present: Bools) -> Bools:
    """For each length, a whole number of blocks, whether all blocks that a token there
    needs are present. `present` says so of each block from the first one on."""
    end = lengths // block_tokens
    if isinstance(retention, Encoder):
        return np.ones(len(lengths), np.bool_)
    if isinstance(retention, State):
        return np.concatenate((np.ones(1, np.bool_), present))[end]
    absent = np.zeros(len(present) + 1, np.int64)
    np.cumsum(~present, out=absent[1:])
    first = first_seen_block(retention, lengths, block_tokens)
    complete = absent[end] == absent[np.minimum(first, end)]
    sinks = sink_blocks(retention, block_tokens)
    return complete & (absent[np.minimum(sinks, end)] == 0) if sinks else complete


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
            return -(-tokens // block_tokens)
        case State(checkpoints):
            return 1 + checkpoints
        case Chunk(tokens) if tokens % block_tokens == 0:
            return -(-(tokens - 1 + in_flight) // block_tokens)
        case Chunk(tokens) | Window(tokens) | Sink(_, tokens):
            span = tokens - 1 + in_flight
            # So many blocks can be touched by `span` consecutive tokens.
            touched = (span + block_tokens - 2) // block_tokens + 1
            return sink_blocks(retention, block_tokens) + touched


def rows_needed(
    retention: Retention, num_tokens: int, block_tokens: int, *, in_flight: int = 1
) -> int:
    """Rows a request of `num_tokens` holds at its fullest moment."""
    if isinstance(retention, State | Encoder):
        return rows_bound(retention, block_tokens, in_flight=in_flight) or 0
    rows = -(-num_tokens // block_tokens)
    in_flight = min(in_flight, max(1, num_tokens))
    bound = rows_bound(retention, block_tokens, in_flight=in_flight)
    return rows if bound is None else min(rows, bound)


# ── what to call it ───────────────────────────────────────────────────────────────────


def short_name(retention: Retention) -> str:
    """`full`, `window128`, `sink4+1020`, `state`, `state2`: another for every retention."""
    match retention:
        case Full():
            return "full"
        case Encoder(tokens):
            return f"encoder{tokens}"
        case Chunk(tokens):
            return f"chunk{tokens}"
        case Sink(sink_tokens, tokens):
            return f"sink{sink_tokens}+{tokens}"
        case Window(tokens):
            return f"window{tokens}"
        case State(checkpoints):
            return f"state{checkpoints}" if checkpoints else "state"


def in_words(retention: Retention) -> str:
    """For how long a token is kept, for people."""
    match retention:
        case Full():
            return "every token, as long as the request lives"
        case Window(tokens):
            return f"the last {tokens:,} tokens"
        case Chunk(tokens):
            return f"the current chunk of {tokens:,} tokens"
        case Sink(sink_tokens, tokens):
            return f"the first {sink_tokens:,} tokens and the last {tokens:,}"
        case State(checkpoints):
            kept = f", and {checkpoints:,} checkpoints" if checkpoints else ""
            return f"one running summary of the whole sequence{kept}"
        case Encoder(tokens):
            return f"the encoder's {tokens:,} positions"


def lasting_first(retention: Retention) -> tuple[int, int, int]:
    """A sort key: what is kept longest comes first."""
    match retention:
        case Full():
            return (0, 0, 0)
        case Encoder(tokens):
            return (1, -tokens, 0)
        case Chunk(tokens):
            return (2, -tokens, 0)
        case Sink(sink_tokens, tokens):
            return (3, -tokens, -sink_tokens)
        case Window(tokens):
            return (4, -tokens, 0)
        case State(checkpoints):
            return (5, 0, -checkpoints)
