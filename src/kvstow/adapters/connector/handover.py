"""What travels with a request from prefill to decode, inside the engine's own envelope.

    {"do_remote_decode": true}                         to the prefill instance
    {"do_remote_prefill": true, "kvstow": {…}}         its answer, and what decode is given

`kvstow` holds one ticket per producer rank, how many tokens they cover, and a digest of those
tokens: the consumer takes the blocks only for the very same prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from kvstow.errors import TransferError
from kvstow.transfer.ticket import Ticket

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
