"""The producer's half, from top to bottom: begin, then write, stage or nothing, digests, end.

A consumer that reads needs nothing of us but that the lease runs and the engine works. It may end
the transfer at any time: it hears `stopped` when nothing of ours can reach its rows any more.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from kvstow.errors import KvstowError, TransferError
from kvstow.plan.layout import Layout
from kvstow.route.blocks import Blocks
from kvstow.route.copies import Copies
from kvstow.route.route import Claims, Route, plan_route
from kvstow.route.sources import sources
from kvstow.transfer.channel.messages import (
    AnyMessage,
    Begin,
    Begun,
    Card,
    Claim,
    End,
    Failed,
    Stopped,
    TellDigest,
    Write,
    Written,
)
from kvstow.transfer.digests import digests, in_worker, unpacked_claims
from kvstow.transfer.loop import AT_ONCE, NOW_AND_THEN, Conversation, Routine, Task, bug, together
from kvstow.transfer.peers.endpoint import Endpoint
from kvstow.transfer.peers.flight import Flight, chunk_bytes, move_copies
from kvstow.transfer.slots import pieces, stage_pieces
from kvstow.transfer.tickets.ticket import Ticket, check_blocks, unpacked_ints

if TYPE_CHECKING:
    from kvstow.transfer.server import Server

log = logging.getLogger(__name__)

EARLY_SECONDS = 2.0
ENDED = "ended by its consumer"


MOST_SHARES = 16
"""Sets of claims that are remembered for one agent, which chooses them."""


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """What we bring to a peer: on which route, and what of it counts for digests."""

    route: Route
    claims: Claims


@dataclass(slots=True, eq=False)
class Incoming:
    """An agent that dialled us, from its hello until it is silent for long or dials again on its
    `line`."""

    endpoint: Endpoint
    card: Card
    line: int
    layout: Layout
    send: Callable[[AnyMessage], None]
    heard_at: float
    write_rate: float = 0.0
    moved_bytes: int = 0
    share: Callable[[tuple[Claim, ...] | None], Share] = field(init=False)
    """What we bring, computed once for each set of claims. Raises RouteError."""

    def __post_init__(self) -> None:
        self.share = lru_cache(MOST_SHARES)(self._share)

    def _share(self, claims: tuple[Claim, ...] | None) -> Share:
        own = self.endpoint.layout
        if claims is None:
            alone = sources([own], self.layout)[0]
            return Share(alone.route, alone.claims)
        parts = unpacked_claims(claims)
        return Share(plan_route(own, self.layout, claims=parts), parts)

    def attach(self) -> None:
        """Make sure that our engine can reach it. Raises TransferError."""
        self.endpoint.attach(self.card, self)

    def detach(self) -> None:
        """Our engine need not reach it any more."""
        self.endpoint.detach(self.card.engine, self)


class Serving(Conversation):
    """One consumer's transfer, as its routine and the server know it."""

    def __init__(self, peer: Incoming, begin: Begin) -> None:
        super().__init__(Task[None](f"serve {peer.card.agent}"))
        self.peer = peer
        self.begin = begin
        self.flights: list[Flight] = []

    @property
    def is_quiet(self) -> bool:
        """Whether nothing of ours can reach the consumer's rows any more."""
        return all(flight.is_quiet for flight in self.flights)

    def count_served(self, nbytes: int) -> None:
        """Count what the consumer has got of us."""
        endpoint = self.peer.endpoint
        endpoint.count(endpoint.metrics.served_bytes, self.begin.way, nbytes)
        self.peer.moved_bytes += nbytes


def serve(server: "Server", serving: Serving) -> Routine[None]:
    """Serve one transfer until its consumer has ended it, or something else has."""
    begin, accepted = serving.begin, False
    try:
        yield from lease_granted(server, serving)
        ticket = server.leases.open(
            begin.lease,
            begin.signature,
            begin.transfer,
            now=server.endpoint.clock(),
            ranks=serving.peer.layout.tp[1] * serving.peer.layout.pp[1],
        ).ticket
        work = ordered_work(server.endpoint, serving, ticket)
        serving.peer.send(Begun(begin.transfer))
        yield from together(*work)
        if begin.way != "mapped":
            server.loop.expect_work()  # the consumer reads its fence now
            while not serving.mailbox.has(End):
                yield server.loop.pace
        end = yield from serving.mailbox.wait(End)
        if end.outcome != "accepted":
            raise TransferError(ENDED, kind="aborted")
        serving.count_served(end.nbytes)
        accepted = True
    except Exception as error:
        yield from stopped(server, serving, error)
    finally:
        server.leases.shut(begin.lease, begin.transfer, accepted=accepted)


def lease_granted(server: "Server", serving: Serving) -> Routine[None]:
    """Wait a moment for a lease that is not known: a scheduler may have written the ticket, and the
    agent hear of it later than the consumer."""
    until = server.endpoint.clock() + EARLY_SECONDS
    while server.leases.is_early(serving.begin.lease) and server.endpoint.clock() < until:
        yield NOW_AND_THEN


# ── what was ordered ──────────────────────────────────────────────────────────────────


def ordered_work(endpoint: Endpoint, serving: Serving, ticket: Ticket) -> list[Routine[None]]:
    """What is to be done while the consumer waits: a write into its rows, or pieces in our slots;
    and digests. Raises before anything begins if that cannot be."""
    peer, begin = serving.peer, serving.begin
    tokens = [(sample.start_token, sample.stop_token) for sample in begin.samples]
    if begin.write is not None:
        tokens.append((begin.write.start_token, begin.write.num_tokens))
    for first, end in tokens:
        if not 0 <= first <= end <= ticket.num_tokens:
            raise TransferError(
                f"tokens [{first}, {end}) are not among the {ticket.num_tokens} of the ticket",
                kind="ticket",
            )
    work: list[Routine[None]] = []
    if begin.samples:
        peer.share(begin.claims)
        work.append(tell_digests(endpoint, serving, ticket))
    if begin.write is None:
        return work
    copies = ordered_copies(serving, ticket, begin.write)
    if begin.way != "slots":
        peer.attach()
        return [*work, written(endpoint, serving, copies)]
    if not 0 < begin.slot_bytes <= endpoint.stage.slot_bytes:
        raise TransferError(
            f"slots have {endpoint.stage.slot_bytes} bytes, not {begin.slot_bytes}", kind="refused"
        )
    return [*work, staged(endpoint, serving, copies)]


def ordered_copies(serving: Serving, ticket: Ticket, order: Write) -> Copies:
    """Which bytes of our arena go where in the consumer's, whose rows are checked."""
    peer = serving.peer
    into = {
        part.group: Blocks(unpacked_ints(part.ids), unpacked_ints(part.index))
        for part in order.blocks
    }
    check_blocks(peer.layout, into, whose=f"order of {peer.card.agent!r}")
    route, offered = peer.share(serving.begin.claims).route, ticket.blocks_of(order.num_tokens)
    return route.copies(offered, into, order.num_tokens, start_token=order.start_token)


def written(endpoint: Endpoint, serving: Serving, copies: Copies) -> Routine[None]:
    """Write into the consumer's rows."""
    peer, card = serving.peer, serving.peer.card
    kinds, copies = endpoint.kinds(card), copies.moved(endpoint.card.base, card.base)
    chunk = chunk_bytes(peer.write_rate, kinds)
    yield from move_copies(
        endpoint, "write", card.engine, kinds, copies, flights=serving.flights, chunk=chunk
    )
    serving.peer.send(Written(serving.begin.transfer, copies.total, len(copies)))


def staged(endpoint: Endpoint, serving: Serving, copies: Copies) -> Routine[None]:
    """Put the rows into our slots, piece by piece."""
    parts = pieces(copies, serving.begin.slot_bytes)
    yield from stage_pieces(endpoint, parts, serving)
    nbytes = sum(part.copies.total for part in parts)
    serving.peer.send(Written(serving.begin.transfer, nbytes, len(parts)))


def tell_digests(endpoint: Endpoint, serving: Serving, ticket: Ticket) -> Routine[None]:
    """Count the digests that the consumer wants, and tell them."""
    begin, claims = serving.begin, serving.peer.share(serving.begin.claims).claims
    if endpoint.kind == "DRAM":
        yield AT_ONCE  # counting keeps the interpreter busy: what moves begins before
    count = partial(digests, endpoint.arena, ticket.blocks, begin.samples, claims)
    try:
        values = yield from in_worker(endpoint, count)
    except KvstowError as error:
        raise TransferError(f"no digest: {error}", kind="digest") from error
    serving.peer.send(TellDigest(begin.transfer, values))


# ── the end ───────────────────────────────────────────────────────────────────────────


def stopped(server: "Server", serving: Serving, error: Exception) -> Routine[None]:
    """Tell the consumer why, and, when that is certain, that nothing of ours writes any more.

    Until then the transfer stays known: whoever asks about it must not hear that it is over.
    """
    serving.task.shield()
    transfer, fault = serving.begin.transfer, _fault(error)
    serving.peer.send(Failed(transfer, fault.kind, str(fault)))
    if serving.peer.card.engine in server.endpoint.broken:
        serving.peer.detach()
    with server.quarantine.case(serving.flights):
        while not serving.is_quiet:
            yield NOW_AND_THEN
    serving.peer.send(Stopped(transfer))


def _fault(error: Exception) -> TransferError:
    if isinstance(error, TransferError):
        return error
    if not isinstance(error, KvstowError | ValueError | ArithmeticError | LookupError):
        log.exception("a transfer that was served ended by a bug")
        return bug("serve", error)
    return TransferError(str(error), kind="ticket")
