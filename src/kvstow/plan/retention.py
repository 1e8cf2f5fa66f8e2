"""Retention: how long a layer needs a token."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Full:
    """Every token, as long as the request lives."""


@dataclass(frozen=True, slots=True)
class Window:
    """The last `tokens` tokens."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of the current chunk of `tokens`: position `p` sees `[p - p % tokens, p]`."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Sink:
    """The first `sink_tokens` tokens for good, and the last `tokens`."""

    sink_tokens: int
    tokens: int


@dataclass(frozen=True, slots=True)
class State:
    """A summary of the whole sequence: one running row, and `checkpoints` kept behind it.

    Such a group's block is one summary; its `block_tokens` says how many tokens lie
    between two checkpoints that a later request may start from.
    """

    checkpoints: int = 0


@dataclass(frozen=True, slots=True)
class Encoder:
    """The encoder's `tokens` positions, written once (cross-attention)."""

    tokens: int


Retention = Full | Window | Chunk | Sink | State | Encoder
