"""What the scheduler's side and the workers' sides of a connector tell each other.

The engine carries these: a `Card` once, a `Step` down and `Results` up in every step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstow.transfer.ticket import Ticket

Ids = tuple[tuple[int, ...], ...]
"""Per group, the ids of a request's blocks by position; 0 where there is none."""

Keyed = tuple[tuple[bytes, ...], tuple[int, ...]]
"""Keys of rows, and the blocks that hold them or are to hold them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One worker's agent, for the tickets that the scheduler's side writes in its name."""

    agent: str
    start: str
    address: str
    key: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Keep these blocks for whoever shows one of the tickets; one per rank, by agent."""

    request: str
    tickets: tuple[Ticket, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Bring tokens `[start_token, num_tokens)` into these blocks."""

    request: str
    tickets: tuple[Ticket, ...]
    ids: Ids
    start_token: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """Which of these rows are kept outside the arena? Per group, the keys of a request."""

    request: str
    keys: tuple[tuple[bytes, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The answer: per group and key, whether the row was there."""

    request: str
    present: tuple[tuple[bool, ...], ...]

    def both(self, other: "Found") -> "Found":
        """What two ranks have alike."""
        pairs = zip(self.present, other.present, strict=True)
        return Found(
            request=self.request,
            present=tuple(tuple(a and b for a, b in zip(x, y, strict=True)) for x, y in pairs),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Keep these blocks outside the arena."""

    request: str
    rows: Mapping[int, Keyed]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Bring rows back into these blocks; `num_tokens` tokens are waiting for it."""

    request: str
    rows: Mapping[int, Keyed]
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the workers are to do in one step. `idle`: the engine computes nothing in it."""

    offers: tuple[Offer, ...] = ()
    keeps: tuple[Ticket, ...] = ()
    drops: tuple[Ticket, ...] = ()
    pulls: tuple[Pull, ...] = ()
    stores: tuple[Store, ...] = ()
    restores: tuple[Restore, ...] = ()
    lookups: tuple[Lookup, ...] = ()
    idle: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What came of it, by request: blocks no longer needed here, loads over, loads failed."""

    sent: frozenset[str] = frozenset()
    received: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    found: tuple[Found, ...] = ()
    counts: Mapping[str, float] = field(default_factory=dict[str, float])
