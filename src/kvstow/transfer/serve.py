"""The producer's half, from top to bottom: begin, then write, stage or nothing, digests, end.

A consumer that reads needs nothing of us but that the lease runs and the engine works. One
that has us write, or stage, may ask us to stop at any time: it hears `stopped` when nothing of
ours can reach its rows any more.
"""

import logging
from typing import TYPE_CHECKING

from kvstow.errors import FaultKind, KvstowError, TransferError
from kvstow.route.blocks import Blocks
from kvstow.transfer.channel.messages import (
    AnyMessage,
    Begin,
    Begun,
    End,
    Failed,
    Refused,
    Stop,
    Stopped,
    TellDigest,
    Write,
    Written,
)
from kvstow.transfer.digests import digests
from kvstow.transfer.loop import (
    AT_ONCE,
    NOW_AND_THEN,
    Mailbox,
    Routine,
    Task,
    result_of,
    together,
)
from kvstow.transfer.move.copies import chunk_bytes, moved
from kvstow.transfer.move.slots import pieces, stage_pieces
from kvstow.transfer.peers.blocks import check_blocks
from kvstow.transfer.peers.endpoint import Endpoint
from kvstow.transfer.peers.flight import Flight
from kvstow.transfer.peers.incoming import Incoming
from kvstow.transfer.tickets.ticket import Ticket, unpacked_ints

if TYPE_CHECKING:
    from kvstow.transfer.server import Server

log = logging.getLogger(__name__)

EARLY_SECONDS = 1.0


class Serving:
    """One consumer's transfer, as its routine and the server know it."""

    def __init__(self, peer: Incoming, begin: Begin) -> None:
        self.peer = peer
        self.begin = begin
        self.task: Task[None] | None = None
        self.mailbox = Mailbox(self._wake)
        self.flights: list[Flight] = []
        self.is_stopping = False

    def interrupt(self, error: TransferError) -> None:
        """End what is being brought; not a second time, while its end is being waited for."""
        if self.task is not None and not self.is_stopping:
            self.task.interrupt(error)

    def _wake(self) -> None:
        if self.task is not None:
            self.task.wake()

    @property
    def transfer(self) -> int:
        return self.begin.transfer

    @property
    def is_quiet(self) -> bool:
        """Whether nothing of ours can reach the consumer's rows any more."""
        return all(flight.is_quiet for flight in self.flights)

    def count_served(self, nbytes: int) -> None:
        """Count what the consumer has got of us."""
        endpoint, begin = self.peer.endpoint, self.begin
        way = "slots" if begin.slot_bytes else "write" if begin.write else "read"
        way = "mapped" if begin.is_mapped else way
        endpoint.count(endpoint.metrics.served_bytes, way, nbytes)
        self.peer.moved_bytes += nbytes

    def send(self, message: AnyMessage) -> None:
        self.peer.send(message)


def serve(server: "Server", serving: Serving) -> Routine[None]:
    """Serve one transfer until its consumer has ended it, or something else has."""
    try:
        yield from lease_granted(server, serving)
        ticket = server.opened(serving)
        check_tokens(serving.begin, ticket)
        bringing = brought(server.endpoint, serving, ticket)
        telling = told_digests(server.endpoint, serving, ticket)
    except Exception as error:
        server.leases.shut(serving.begin.lease, serving.transfer, accepted=False)
        is_early = isinstance(error, TransferError) and error.is_early
        serving.send(Refused(serving.transfer, *_fault(error), is_early))
        return
    serving.send(Begun(serving.transfer))
    accepted = False
    try:
        yield from together(telling, bringing)
        server.loop.expect_work()  # the consumer reads its fence now
        while not serving.mailbox.has(End):
            yield server.loop.pace
        end = serving.mailbox.take(End)
        accepted = end.outcome == "accepted"
        if accepted:
            serving.count_served(end.nbytes)
    except Exception as error:
        yield from stopped(server, serving, error)
    finally:
        server.leases.shut(serving.begin.lease, serving.transfer, accepted=accepted)


def lease_granted(server: "Server", serving: Serving) -> Routine[None]:
    """Wait a moment for the lease of a consumer that waits for no answer: a scheduler may have
    written the ticket, and the agent hear of it later than the consumer."""
    until = server.endpoint.clock() + EARLY_SECONDS
    while (
        serving.begin.is_mapped
        and server.leases.is_early(serving.begin.lease)
        and server.endpoint.clock() < until
    ):
        yield NOW_AND_THEN


def check_tokens(begin: Begin, ticket: Ticket) -> None:
    """TransferError unless the ticket has every token that is ordered or compared."""
    wanted = [(sample.start_token, sample.stop_token) for sample in begin.samples]
    if begin.write is not None:
        wanted.append((begin.write.start_token, begin.write.num_tokens))
    for first, end in wanted:
        if not 0 <= first <= end <= ticket.num_tokens:
            raise TransferError(
                f"tokens [{first}, {end}) are not among the {ticket.num_tokens} of the ticket",
                kind="ticket",
            )


def brought(endpoint: Endpoint, serving: Serving, ticket: Ticket) -> Routine[None]:
    """The routine of bringing what was ordered: a write into the consumer's rows, pieces in our
    slots, or nothing where the consumer reads. Raises before it begins if that cannot be."""
    order = serving.begin.write
    if order is None:
        return nothing()
    if serving.begin.slot_bytes:
        return staged(endpoint, serving, ticket, order)
    return written(endpoint, serving, ticket, order)


def nothing() -> Routine[None]:
    return
    yield


def _into(serving: Serving, order: Write) -> dict[int, Blocks]:
    """The consumer's rows, checked."""
    into = {
        part.group: Blocks(unpacked_ints(part.ids), unpacked_ints(part.index))
        for part in order.blocks
    }
    peer = serving.peer
    check_blocks(peer.layout, into, whose=f"order of {peer.card.agent!r}")
    return into


def written(endpoint: Endpoint, serving: Serving, ticket: Ticket, order: Write) -> Routine[None]:
    """Write into the consumer's rows."""
    peer, card = serving.peer, serving.peer.card
    route = peer.share(serving.begin.claims).route
    offered, into = ticket.blocks_of(order.num_tokens), _into(serving, order)
    copies = route.copies(offered, into, order.num_tokens, start_token=order.start_token)
    copies = copies.moved(endpoint.card.base, card.base)
    peer.attach()

    def write() -> Routine[None]:
        how = endpoint, "write", card.engine, endpoint.kinds(card), copies
        chunk = chunk_bytes(peer.write_rate, endpoint.kinds(card))
        yield from moved(*how, flights=serving.flights, chunk=chunk)
        serving.send(Written(serving.transfer, copies.total, len(copies)))

    return write()


def staged(endpoint: Endpoint, serving: Serving, ticket: Ticket, order: Write) -> Routine[None]:
    """Put the rows into our slots, piece by piece."""
    slot_bytes = serving.begin.slot_bytes
    if not 0 < slot_bytes <= endpoint.stage.slot_bytes:
        raise TransferError(
            f"slots have {endpoint.stage.slot_bytes} bytes, not {slot_bytes}", kind="refused"
        )
    route = serving.peer.share(serving.begin.claims).route
    tokens = order.start_token, order.num_tokens
    offered = ticket.blocks_of(order.num_tokens)
    parts = pieces(route, offered, _into(serving, order), tokens, slot_bytes)

    def stage() -> Routine[None]:
        yield from stage_pieces(endpoint, parts, serving.mailbox, serving.send, serving.transfer)
        nbytes = sum(part.copies.total for part in parts)
        serving.send(Written(serving.transfer, nbytes, len(parts)))

    return stage()


def told_digests(endpoint: Endpoint, serving: Serving, ticket: Ticket) -> Routine[None]:
    """The routine of counting the digests that the consumer wants, and telling them."""
    wanted = serving.begin.samples
    if not wanted:
        return nothing()
    claims = serving.peer.share(serving.begin.claims).claims

    def tell() -> Routine[None]:
        if endpoint.kind == "DRAM":
            yield AT_ONCE  # counting keeps the interpreter busy: what moves begins before
        counting = endpoint.worker.submit(digests, endpoint.arena, ticket.blocks, wanted, claims)
        counting.add_done_callback(lambda _: endpoint.wake())
        try:
            values = yield from result_of(counting)
        except KvstowError as error:
            raise TransferError(f"no digest: {error}", kind="digest") from error
        serving.send(TellDigest(serving.transfer, values))

    return tell()


def stopped(server: "Server", serving: Serving, error: Exception) -> Routine[None]:
    """Tell the consumer why, and, when that is certain, that nothing of ours writes any more.

    Until then the transfer stays known: whoever asks about it must not hear that it is over.
    """
    serving.is_stopping = True
    if serving.task is not None:
        serving.task.shield()
    if not isinstance(error, Ended):
        kind, reasons = _fault(error)
        serving.send(Failed(serving.transfer, kind, reasons[0]))
    if serving.peer.card.engine in server.endpoint.broken:
        serving.peer.detach()
    while not serving.is_quiet and not serving.mailbox.has(Stop):
        if server.has_forgotten(serving.peer):
            break
        yield NOW_AND_THEN
    with server.quarantine.case(serving.flights):  # it asks: if need be, we close the engine
        while not serving.is_quiet:
            yield NOW_AND_THEN
    serving.send(Stopped(serving.transfer))


class Ended(TransferError):
    """The consumer wants no more, or may have no more: no fault of ours."""


def _fault(error: Exception) -> tuple[FaultKind, tuple[str, ...]]:
    if isinstance(error, TransferError):
        return error.kind, (str(error),)
    if not isinstance(error, KvstowError | ValueError | ArithmeticError | LookupError):
        log.exception("a transfer that was served ended by a bug")
        return "transport", (repr(error),)
    return "ticket", (str(error),)
