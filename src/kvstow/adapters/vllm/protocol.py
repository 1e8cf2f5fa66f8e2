"""What the scheduler's side and the workers' sides of a connector tell each other.

The engine carries these: `WorkerEndpoint` once, `StepOrders` down and `StepResults` up every step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from kvstow.errors import TransferError
from kvstow.transfer.ticket import Ticket

BlockIds = tuple[tuple[int, ...], ...]
"""Per group, the ids of a request's blocks by position; 0 where there is none."""

KeyedBlocks = tuple[tuple[bytes, ...], tuple[int, ...]]
"""Keys of rows, and the blocks that hold them or are to hold them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEndpoint:
    """One worker's agent, for the tickets that the scheduler's side writes in its name."""

    agent: str
    start: str
    address: str
    key: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferBlocks:
    """Keep these blocks for whoever shows one of the tickets; one per rank, by agent."""

    request: str
    tickets: tuple[Ticket, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PullBlocks:
    """Bring tokens `[start_token, num_tokens)` into these blocks."""

    request: str
    tickets: tuple[Ticket, ...]
    ids: BlockIds
    start_token: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LookUpKeys:
    """Which of these rows are kept outside the arena? Per group, the keys of a request."""

    request: str
    keys: tuple[tuple[bytes, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysPresent:
    """The answer: per group and key, whether the row was there."""

    request: str
    present: tuple[tuple[bool, ...], ...]

    def both(self, other: "KeysPresent") -> "KeysPresent":
        """What two ranks have alike."""
        pairs = zip(self.present, other.present, strict=True)
        return KeysPresent(
            request=self.request,
            present=tuple(tuple(a and b for a, b in zip(x, y, strict=True)) for x, y in pairs),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBlocks:
    """Keep these blocks outside the arena."""

    request: str
    rows: Mapping[int, KeyedBlocks]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBlocks:
    """Bring rows back into these blocks; `num_tokens` tokens are waiting for it."""

    request: str
    rows: Mapping[int, KeyedBlocks]
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrders:
    """What the workers are to do in one step. `idle`: the engine computes nothing in it."""

    offers: tuple[OfferBlocks, ...] = ()
    keeps: tuple[Ticket, ...] = ()
    drops: tuple[Ticket, ...] = ()
    pulls: tuple[PullBlocks, ...] = ()
    stores: tuple[StoreBlocks, ...] = ()
    restores: tuple[LoadBlocks, ...] = ()
    lookups: tuple[LookUpKeys, ...] = ()
    idle: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResults:
    """What came of it, by request: blocks no longer needed here, loads over, loads failed."""

    sent: frozenset[str] = frozenset()
    received: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    found: tuple[KeysPresent, ...] = ()
    counts: Mapping[str, float] = field(default_factory=dict[str, float])


ASKS_FOR_TICKETS = "do_remote_decode"
CARRIES_TICKETS = "do_remote_prefill"
OURS = "kvstow"
MAX_RANKS = 1024


class _Carried(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tickets: list[str]
    num_tokens: int
    prompt: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Handover:
    """Tickets for the first `num_tokens` tokens of a prompt, and the digest of those."""

    tickets: tuple[Ticket, ...]
    num_tokens: int
    prompt: str

    def params(self) -> dict[str, Any]:
        """For the consumer's request."""
        carried = {
            "tickets": [str(ticket) for ticket in self.tickets],
            "num_tokens": self.num_tokens,
            "prompt": self.prompt,
        }
        return {CARRIES_TICKETS: True, OURS: carried}

    def check(self, tokens: Sequence[int], salt: bytes) -> None:
        """TransferError unless the request begins with the tokens that the tickets are for."""
        if len(tokens) < self.num_tokens:
            raise TransferError(
                f"tickets cover {self.num_tokens} tokens, the request has {len(tokens)}",
                kind="ticket",
            )
        if prompt_digest(tokens[: self.num_tokens], salt) != self.prompt:
            raise TransferError(
                f"the request's first {self.num_tokens} tokens are not those of the tickets\n\n"
                "hint: send decode the same prompt, under the same model and adapter",
                kind="ticket",
            )


def handover_in(params: Mapping[str, Any] | None) -> Handover | None:
    """What a request carries; None where it carries nothing, TransferError where it is bad."""
    if not params or not params.get(CARRIES_TICKETS):
        return None
    if OURS not in params:
        raise TransferError(f"the request's transfer parameters have no {OURS!r}", kind="ticket")
    try:
        found = msgspec.convert(params[OURS], _Carried)
    except msgspec.ValidationError as error:
        raise TransferError(f"transfer parameters: {error}", kind="ticket") from None
    if not 1 <= len(found.tickets) <= MAX_RANKS or found.num_tokens < 1:
        raise TransferError(
            f"{len(found.tickets)} tickets for {found.num_tokens} tokens", kind="ticket"
        )
    tickets = tuple(Ticket.parse(text) for text in found.tickets)
    if {ticket.num_tokens for ticket in tickets} != {found.num_tokens}:
        raise TransferError(f"tickets are not all for {found.num_tokens} tokens", kind="ticket")
    return Handover(tickets=tickets, num_tokens=found.num_tokens, prompt=found.prompt)


def prompt_digest(tokens: Sequence[int], salt: bytes) -> str:
    """A digest of token ids, and of whatever else the cache depends on."""
    hashed = blake2b(salt, digest_size=16, key=b"kvstow prompt")
    hashed.update(np.asarray(tokens, "<i8").tobytes())
    return hashed.hexdigest()
