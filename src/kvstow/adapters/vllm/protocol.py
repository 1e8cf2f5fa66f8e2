"""What scheduler, workers and other instances tell each other.

Inside an instance vLLM carries it: `WorkerEndpoint` once, `StepOrders` down and `StepResults` up
in every step. From prefill to decode it travels with the request, in vLLM's own envelope:

    {"do_remote_decode": true}                         to the prefill instance
    {"do_remote_prefill": true, "kvstow": {…}}         its answer, and what decode is given

`kvstow` holds one ticket per producer rank, how many tokens they cover, and a digest of those
tokens: the consumer takes the blocks only for the very same prompt. Whoever may send requests may
write these parameters, so they are bounded by the prompt before anything is unpacked.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from struct import pack
from typing import Annotated, Any, Literal, get_args

import msgspec
import numpy as np

from kvstow.adapters.vllm.engine import Request
from kvstow.adapters.vllm.identity import AdapterNames
from kvstow.adapters.vllm.mail import NOWHERE, MailAddress
from kvstow.errors import TransferError
from kvstow.offload.watch import TierChange
from kvstow.route.blocks import Blocks
from kvstow.transfer.tickets.ticket import MAX_BODY_BYTES, Ticket

log = logging.getLogger(__name__)

BlockIds = tuple[tuple[int, ...], ...]
"""Per group, the ids of a request's blocks by position; 0 where there is none."""

KeyedBlocks = tuple[tuple[bytes, ...], tuple[int, ...]]
"""Keys of rows, and the blocks that hold them or are to hold them."""

Hold = tuple[str, int]
"""A rank, and the number of a pull of its that has failed and may still be written to."""

KeyLevels = Mapping[int, tuple[tuple[bytes, ...], bytes]]
"""Per group, keys whose rows have come, moved or gone, and where each is now: a `Level` in a byte
per key."""


def blocks_with_tokens(
    ids: Sequence[int], start_token: int, num_tokens: int, block_tokens: int
) -> Blocks:
    """The blocks with some of tokens `[start_token, num_tokens)`; id 0 stands for none."""
    array = np.asarray(ids, np.int64)
    index = np.arange(len(array), dtype=np.int64)
    inside = (index >= start_token // block_tokens) & (index * block_tokens < num_tokens)
    which = inside & (array > 0)
    return Blocks(array[which], index[which])


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEndpoint:
    """One worker's agent, for the tickets that the scheduler's side writes in its name.

    At `inbox` the worker hears what cannot wait for a step. `ticket_key` signs what is written in
    the agent's name.
    """

    agent: str
    start: str
    address: str
    key: str
    fingerprint: str
    ticket_key: bytes = field(default=b"", repr=False)
    inbox: MailAddress = NOWHERE


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferBlocks:
    """Keep these blocks for whoever shows one of the tickets; one per rank, by agent."""

    request: str
    tickets: tuple[Ticket, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PullBlocks:
    """Bring tokens `[start_token, num_tokens)` into these blocks, within `seconds` where a peer
    was asked for them. `may_hold`: should it fail, the scheduler's side keeps the blocks from
    being given to others, so that the request need not wait until nobody writes to them. Blocks of
    an early pull are given back when it has ended."""

    request: str
    tickets: tuple[Ticket, ...]
    ids: BlockIds
    start_token: int
    num_tokens: int
    seconds: float | None = None
    may_hold: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyPull:
    """Pull at once, if that is a copy out of mapped memory, and tell `answer_to` how it went: the
    engine does not plan the request before."""

    number: int
    pull: PullBlocks
    answer_to: MailAddress


EarlyOutcome = Literal["accepted", "declined", "failed"]


@dataclass(frozen=True, slots=True)
class EarlyAnswer:
    """How a rank's early pull went. One that was declined has touched nothing."""

    number: int
    outcome: EarlyOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class AskPeers:
    """Does some peer hold this beginning of a prompt? Its keys, one after every `step` tokens.
    `first` is the address of one that the request names."""

    request: str
    keys: tuple[bytes, ...]
    step: int
    first: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PeersAnswer:
    """The answer: tickets of all ranks of one instance, or none."""

    request: str
    tickets: tuple[Ticket, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LookUpKeys:
    """Which of these rows are kept outside the arena? Per group, the keys of a request."""

    request: str
    keys: tuple[tuple[bytes, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysPresent:
    """The answer: per group and key, whether the row was there, for so many ranks."""

    request: str
    present: tuple[tuple[bool, ...], ...]
    ranks: int = 1

    def both(self, other: "KeysPresent") -> "KeysPresent":
        """What two ranks have alike."""
        pairs = zip(self.present, other.present, strict=True)
        return KeysPresent(
            request=self.request,
            present=tuple(tuple(a and b for a, b in zip(x, y, strict=True)) for x, y in pairs),
            ranks=self.ranks + other.ranks,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBlocks:
    """Keep these blocks outside the arena. They stay as they are until all ranks have told that
    the job is over."""

    job: int
    rows: Mapping[int, KeyedBlocks]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBlocks:
    """Bring rows back into these blocks; `num_tokens` tokens are waiting for it."""

    request: str
    rows: Mapping[int, KeyedBlocks]
    num_tokens: int


HintAction = Literal["retain", "pin", "prefetch", "demote"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HintedRows:
    """Rows of a request that has ended, and what it asks for them; per group, their keys."""

    action: HintAction
    seconds: float
    keys: tuple[tuple[bytes, ...], ...]


@dataclass(slots=True, kw_only=True)
class StepOrders:
    """What the workers are to do in one step; collected until the engine takes the step.

    `idle`: the engine computes nothing in it, nor in the one before, which may still run.
    """

    offers: list[OfferBlocks] = field(default_factory=list[OfferBlocks])
    keeps: list[Ticket] = field(default_factory=list[Ticket])
    drops: list[Ticket] = field(default_factory=list[Ticket])
    pulls: list[PullBlocks] = field(default_factory=list[PullBlocks])
    store: StoreBlocks | None = None
    loads: list[LoadBlocks] = field(default_factory=list[LoadBlocks])
    lookups: list[LookUpKeys] = field(default_factory=list[LookUpKeys])
    asks: list[AskPeers] = field(default_factory=list[AskPeers])
    hints: list[HintedRows] = field(default_factory=list[HintedRows])
    idle: bool = False


@dataclass(slots=True, kw_only=True)
class StepResults:
    """What came of a step: in one rank, whose parts add to it, or in several.

    By request `sent`, `received` and `failed`: blocks that are no longer needed here, loads that
    are over, and those that failed; vLLM carries these itself. By request `present`: what look-ups
    have found. By rank `kept`: where rows are kept now, as far as that has changed. `stored` counts
    the ranks that have ended a job of stores. `peers` is what they have said. `held` are the blocks
    of failed pulls that somebody may still write to; `released` are pulls of which that is over.
    """

    sent: set[str] = field(default_factory=set[str])
    received: set[str] = field(default_factory=set[str])
    failed: set[str] = field(default_factory=set[str])
    present: dict[str, KeysPresent] = field(default_factory=dict[str, KeysPresent])
    kept: dict[str, KeyLevels] = field(default_factory=dict[str, KeyLevels])
    stored: Counter[int] = field(default_factory=Counter[int])
    changes: list[TierChange] = field(default_factory=list[TierChange])
    peers: list[PeersAnswer] = field(default_factory=list[PeersAnswer])
    held: dict[Hold, tuple[int, ...]] = field(default_factory=dict[Hold, tuple[int, ...]])
    released: list[Hold] = field(default_factory=list[Hold])

    def __bool__(self) -> bool:
        return any(getattr(self, each.name) for each in fields(self))

    def join(self, other: "StepResults") -> None:
        """Add what another rank tells; of look-ups, what both have stays."""
        for request, answer in other.present.items():
            own = self.present.get(request)
            self.present[request] = own.both(answer) if own else answer
        for name in ("sent", "received", "failed", "kept", "stored", "held"):
            getattr(self, name).update(getattr(other, name))
        for name in ("changes", "peers", "released"):
            getattr(self, name).extend(getattr(other, name))


# ── requests ──────────────────────────────────────────────────────────────────────────

Extra = tuple[tuple[int, bytes], ...]
"""Digests of images and the like, each with the position of the first token it stands for."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineRequest:
    """A request as the engine knows it.

    `adapter`, `salt` and `extra` are what its cache depends on besides the tokens and the model.
    One that is not `shareable` depends on something that has no name: prompt embeddings, inputs
    that a session adds while it runs, an adapter whose weights are not known. Its blocks are
    neither handed over nor stored, and never taken from elsewhere. `hashes` are the engine's own,
    of its whole blocks; `adapter_name` is what clients call the adapter. `kv_hints` are as they
    came.
    """

    id: str
    tokens: Sequence[int]
    params: Mapping[str, Any] | None = None
    adapter: str = ""
    salt: str = ""
    extra: Extra = ()
    shareable: bool = True
    hashes: Sequence[bytes] = ()
    adapter_name: str = ""
    kv_hints: object = None

    def extra_before(self, num_tokens: int) -> Extra:
        """What begins among the first tokens."""
        return tuple((at, digest) for at, digest in self.extra if at < num_tokens)

    @property
    def asks_for_tickets(self) -> bool:
        return bool(self.params and self.params.get(ASKS_FOR_TICKETS))

    @property
    def load_limits(self) -> "LoadLimits":
        """What of it may be loaded; no limits where they are not written as vLLM writes them."""
        try:
            return msgspec.convert(dict(self.params or {}), LoadLimits)
        except msgspec.ValidationError as error:
            log.warning("request %s: its limits on loads are ignored: %s", self.id, error)
            return LoadLimits()

    @property
    def hints(self) -> "tuple[tuple[HintAction | None, float], ...]":
        """What it asks for its rows, and for how many seconds; None for what is asked of other
        components. Nothing where that is not written as vLLM and Dynamo do."""
        hints = self.kv_hints or (self.params or {}).get("kv_hint")
        if hints is None:
            return ()
        hinted: list[tuple[HintAction | None, float]] = []
        try:
            for hint in msgspec.convert(hints, Hints, from_attributes=True).actions:
                action = HINT_ACTIONS.get(hint.action_type)
                payload = msgspec.convert(hint.payload if action else {}, HintPayload)
                hinted.append((action, payload.ttl_seconds))
        except msgspec.ValidationError as error:
            log.warning("request %s: its hints are ignored: %s", self.id, error)
            return ()
        return tuple(hinted)


HINT_ACTIONS: Mapping[str, HintAction] = {f"kv.{action}": action for action in get_args(HintAction)}


class HintPayload(msgspec.Struct, frozen=True):
    """For how long rows are to be pinned."""

    ttl_seconds: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 60.0


class Hint(msgspec.Struct, frozen=True):
    """One action of vLLM's `KvHintsEnvelope`."""

    action_type: str
    payload: Any = msgspec.field(default_factory=dict[str, Any])


class Hints(msgspec.Struct, frozen=True):
    actions: tuple[Hint, ...]


Medium = Literal["cpu", "storage"]
Locality = Literal["local", "remote"]


class TierName(msgspec.Struct, frozen=True):
    """Tiers as requests name them; one that is left out stands for both."""

    medium: Medium | None = None
    locality: Locality | None = None


class PeerName(msgspec.Struct, frozen=True):
    """A peer as vLLM's routers name one."""

    remote_host: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:-]{1,253}$")]
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class LoadLimits(msgspec.Struct, frozen=True):
    """Parameters of vLLM's own offloading that a request may carry: at most so many tokens are
    loaded, from these tiers, and a peer is asked."""

    max_load_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    kv_load_tiers: tuple[TierName, ...] | None = None
    remote_kv_source: PeerName | None = None

    def allows(self, medium: Medium, locality: Locality) -> bool:
        """Whether rows may come from such a tier."""
        return self.kv_load_tiers is None or any(
            tier.medium in (None, medium) and tier.locality in (None, locality)
            for tier in self.kv_load_tiers
        )

    def up_to(self, num_tokens: int, num_computed: int) -> int:
        """At most so many of the first tokens, with those that are computed."""
        if self.max_load_tokens is None:
            return num_tokens
        return min(num_tokens, num_computed + self.max_load_tokens)

    @property
    def peer(self) -> str:
        """The address of the peer to ask, if one is named."""
        named = self.remote_kv_source
        if named is None:
            return ""
        host = f"[{named.remote_host}]" if ":" in named.remote_host else named.remote_host
        return f"tcp://{host}:{named.remote_port}"


def request_of(request: Request, adapters: AdapterNames | None = None) -> EngineRequest:
    """A request of vLLM's, as a plain value. `adapters` are those that its engine has used."""
    adapter = request.lora_request
    name = (adapters or AdapterNames()).name(adapter) if adapter else ""
    return EngineRequest(
        id=request.request_id,
        tokens=request.all_token_ids,
        params=request.kv_transfer_params,
        adapter=name or "",
        salt=request.cache_salt or "",
        extra=tuple(
            (part.mm_position.offset, str(part.identifier).encode())
            for part in request.mm_features or ()
        ),
        shareable=request.prompt_embeds is None and not request.resumable and name is not None,
        hashes=request.block_hashes,
        adapter_name=adapter.lora_name if adapter else "",
        kv_hints=request.kv_hints,
    )


def prompt_digest(request: EngineRequest, num_tokens: int) -> str:
    """A digest of the first tokens, and of whatever else their cache depends on."""
    about = (request.adapter, request.salt, request.extra_before(num_tokens))
    hashed = blake2b(repr(about).encode(), digest_size=16, key=b"kvstow prompt")
    hashed.update(pack(f"<{num_tokens}q", *request.tokens[:num_tokens]))
    return hashed.hexdigest()


# ── from prefill to decode ────────────────────────────────────────────────────────────

ASKS_FOR_TICKETS = "do_remote_decode"
CARRIES_TICKETS = "do_remote_prefill"
OURS = "kvstow"

MAX_TICKETS = 256
"""One per rank of the producer."""

MAX_GROUPS = 64
_BLOCK_BYTES = 3 * 8
_HEAD_BYTES = 4096
MAX_HANDOVER_BYTES = 64 << 20
"""All tickets of a request together, inflated."""


class _Carried(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tickets: list[str]
    num_tokens: int
    prompt: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Handover:
    """Tickets for the first `num_tokens` tokens of a prompt, and the digest of those. `from_peer`:
    a peer has given them for our keys."""

    tickets: tuple[Ticket, ...]
    num_tokens: int
    prompt: str
    from_peer: bool = False

    @property
    def leases(self) -> frozenset[tuple[str, int]]:
        """What the tickets stand for: requests that carry the same ones share it."""
        return frozenset((ticket.agent, ticket.lease) for ticket in self.tickets)

    def params(self) -> dict[str, Any]:
        """For the consumer's request."""
        tickets = [str(ticket) for ticket in self.tickets]
        carried = _Carried(tickets, self.num_tokens, self.prompt)
        return {CARRIES_TICKETS: True, OURS: msgspec.to_builtins(carried)}


class OtherPrompt(TransferError):
    """Tickets of another prompt, which may be longer. A call with a list of prompts becomes one
    request per prompt, and all of them carry the tickets of one: whose they are may still come."""


def handover_in(request: EngineRequest) -> Handover | None:
    """What a request carries; None where it carries nothing, TransferError where it is bad.

    The prompt is compared first, then the tickets are unpacked, within what a prompt of that
    length can need.
    """
    if not request.params or not request.params.get(CARRIES_TICKETS):
        return None
    try:
        carried = msgspec.convert(request.params.get(OURS), _Carried)
    except (msgspec.ValidationError, ValueError) as error:
        raise _refused(f"the transfer parameter {OURS!r}: {error}") from None
    _check_prompt(request, carried)
    tickets = _unpacked(carried)
    if {ticket.num_tokens for ticket in tickets} != {carried.num_tokens}:
        raise _refused(f"tickets are not all for {carried.num_tokens} tokens")
    if len({ticket.agent for ticket in tickets}) < len(tickets):
        raise _refused(f"{len(tickets)} tickets, some of them of the same agent")
    return Handover(tickets=tickets, num_tokens=carried.num_tokens, prompt=carried.prompt)


def tickets_to_drop(request: EngineRequest, *, max_tokens: int) -> tuple[Ticket, ...]:
    """The tickets of a request that will not be pulled; none where they cannot be read.

    The prompt does not bound them: vLLM gives a request that it has rejected an empty one.
    """
    try:
        carried = msgspec.convert((request.params or {}).get(OURS), _Carried)
        return _unpacked(carried) if 1 <= carried.num_tokens <= max_tokens else ()
    except (msgspec.ValidationError, ValueError, TransferError):
        return ()


def _check_prompt(request: EngineRequest, carried: _Carried) -> None:
    if not request.shareable:
        raise _refused("the request has inputs that tickets cannot name, such as embeddings")
    if not 1 <= carried.num_tokens <= len(request.tokens):
        why = f"tickets cover {carried.num_tokens} tokens, the request has {len(request.tokens)}"
        is_rejected = list(request.tokens[:2]) == [0]  # vLLM's, in place of the prompt
        if carried.num_tokens < 1 or is_rejected:
            raise _refused(why)
        raise OtherPrompt(why, kind="ticket")
    if prompt_digest(request, carried.num_tokens) != carried.prompt:
        raise OtherPrompt(
            f"the request's first {carried.num_tokens} tokens are not those of the tickets\n\n"
            "hint: send decode the same prompt, under the same adapter and cache salt",
            kind="ticket",
        )


def _unpacked(carried: _Carried) -> tuple[Ticket, ...]:
    if not 1 <= len(carried.tickets) <= MAX_TICKETS:
        raise _refused(f"{len(carried.tickets)} tickets, not 1 to {MAX_TICKETS}")
    per_ticket = _HEAD_BYTES + MAX_GROUPS * carried.num_tokens * _BLOCK_BYTES
    left = MAX_HANDOVER_BYTES
    tickets: list[Ticket] = []
    for text in carried.tickets:
        tickets.append(Ticket.parse(text, max_body_bytes=min(per_ticket, left, MAX_BODY_BYTES)))
        left -= len(tickets[-1].body)
        if left <= 0:
            raise _refused(f"tickets inflate to more than {MAX_HANDOVER_BYTES} bytes")
    return tuple(tickets)


def _refused(why: str) -> TransferError:
    return TransferError(why, kind="ticket")
