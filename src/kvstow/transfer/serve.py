"""The producer's half, from top to bottom: begin, then write, stage or nothing, digests, end.

A consumer that reads needs nothing of us but that the lease runs and the engine works. One
that has us write, or stage, may ask us to stop at any time: it hears `stopped` when nothing of
ours can reach its rows any more.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from kvstow.errors import FaultKind, KvstowError, TransferError
from kvstow.memory.digest import copied
from kvstow.memory.digest_cells import MOST_COPIES
from kvstow.route.blocks import Blocks
from kvstow.route.route import Claims
from kvstow.transfer.channel.messages import (
    NOT_YET,
    AnyMessage,
    Begin,
    Begun,
    End,
    Failed,
    Moved,
    Refused,
    Sample,
    Stop,
    Stopped,
    TellDigest,
    Why,
    Write,
    Written,
)
from kvstow.transfer.digests import asked, digests, num_cells
from kvstow.transfer.loop import (
    AT_ONCE,
    NOW_AND_THEN,
    SOON,
    Mailbox,
    Story,
    Task,
    result_of,
    together,
)
from kvstow.transfer.move.copies import chunk_bytes
from kvstow.transfer.move.gather import Writes
from kvstow.transfer.move.staged import gathered, pieces
from kvstow.transfer.peers.blocks import check_blocks
from kvstow.transfer.peers.endpoint import Endpoint
from kvstow.transfer.peers.flight import Flight
from kvstow.transfer.peers.incoming import Incoming
from kvstow.transfer.tickets.ticket import Ticket, unpacked_ints

if TYPE_CHECKING:
    from kvstow.transfer.server import Server

log = logging.getLogger(__name__)


class Serving:
    """One consumer's transfer, as its story and the server know it."""

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

    def count_moved(self) -> None:
        """Count what the consumer has said that it got of us, if it has."""
        if not self.mailbox.has(Moved):
            return
        told, endpoint, begin = self.mailbox.take(Moved), self.peer.endpoint, self.begin
        way = "read" if begin.write is None else "staged" if begin.slot_bytes else "write"
        endpoint.count(endpoint.metrics.served_bytes, way, told.nbytes)
        self.peer.moved_bytes += told.nbytes

    def send(self, message: AnyMessage) -> None:
        self.peer.send(message)


def serve(server: "Server", serving: Serving) -> Story[None]:
    """Serve one transfer until its consumer has ended it, or something else has."""
    try:
        ticket = server.opened(serving)
        check_tokens(serving.begin, ticket)
        bringing = brought(server.endpoint, serving, ticket)
        telling = told_digests(server.endpoint, serving, ticket)
    except Exception as error:
        server.leases.shut(serving.begin.lease, serving.transfer, accepted=False)
        if isinstance(error, TransferError) and error.is_early:
            serving.send(Why(serving.transfer, NOT_YET))
        serving.send(Refused(serving.transfer, *_fault(error)))
        return
    serving.send(Begun(serving.transfer))
    accepted = False
    try:
        yield from together(telling, bringing)
        server.loop.expect_work()  # the consumer reads its fence now
        while not serving.mailbox.has(End):
            yield server.loop.pace
        accepted = serving.mailbox.take(End).outcome == "accepted"
        if accepted:
            serving.count_moved()
    except Exception as error:
        yield from stopped(server, serving, error)
    finally:
        server.leases.shut(serving.begin.lease, serving.transfer, accepted=accepted)


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


def brought(endpoint: Endpoint, serving: Serving, ticket: Ticket) -> Story[None]:
    """The story of bringing what was ordered: a write into the consumer's rows, pieces in our
    slots, or nothing where the consumer reads. Raises before it begins if that cannot be."""
    order = serving.begin.write
    if order is None:
        return nothing()
    if serving.begin.slot_bytes:
        return staged(endpoint, serving, ticket, order)
    return written(endpoint, serving, ticket, order)


def nothing() -> Story[None]:
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


def written(endpoint: Endpoint, serving: Serving, ticket: Ticket, order: Write) -> Story[None]:
    """Write into the consumer's rows."""
    peer, card = serving.peer, serving.peer.card
    route = peer.share(serving.begin.claims).route
    offered, into = ticket.blocks_of(order.num_tokens), _into(serving, order)
    copies = route.copies(offered, into, order.num_tokens, start_token=order.start_token)
    peer.attach()

    def write() -> Story[None]:
        chunk = chunk_bytes(peer.write_rate, endpoint.kinds(card))
        count = yield from Writes(endpoint, card, serving.flights, chunk).all(copies)
        serving.send(Written(serving.transfer, copies.total, count))

    return write()


def staged(endpoint: Endpoint, serving: Serving, ticket: Ticket, order: Write) -> Story[None]:
    """Put the rows into our slots, piece by piece."""
    slot_bytes = serving.begin.slot_bytes
    if endpoint.stage is None or not 0 < slot_bytes <= endpoint.stage.slot_bytes:
        raise TransferError(f"slots of {slot_bytes} bytes are not to be had", kind="refused")
    route = serving.peer.share(serving.begin.claims).route
    tokens = order.start_token, order.num_tokens
    offered = ticket.blocks_of(order.num_tokens)
    cut = pieces(route, offered, _into(serving, order), tokens, slot_bytes)

    def stage() -> Story[None]:
        yield from gathered(endpoint, cut, serving.mailbox, serving.send, serving.transfer)
        nbytes = sum(piece.copies.total for piece in cut)
        serving.send(Written(serving.transfer, nbytes, sum(len(p.copies) for p in cut)))

    return stage()


def told_digests(endpoint: Endpoint, serving: Serving, ticket: Ticket) -> Story[None]:
    """The story of counting the digests that the consumer wants, and telling them."""
    wanted = serving.begin.samples
    if not wanted:
        return nothing()
    claims = serving.peer.share(serving.begin.claims).claims

    def tell() -> Story[None]:
        try:
            values = yield from counted(endpoint, ticket.blocks, wanted, claims)
        except KvstowError as error:
            raise TransferError(f"no digest: {error}", kind="digest") from error
        serving.send(TellDigest(serving.transfer, values))

    return tell()


def counted(
    endpoint: Endpoint,
    blocks: Mapping[int, Blocks],
    wanted: Sequence[Sample],
    claims: Claims | None,
) -> Story[tuple[int, ...]]:
    """Digests of our rows: of a few cells of a device here, of anything else in another thread.

    A device counts many cells while it copies rows, if it is told to first. Anything else keeps
    the interpreter busy, and begins when the bytes are on their way.
    """
    are_few = num_cells(endpoint.layout, wanted) <= MOST_COPIES
    if are_few or endpoint.kind == "DRAM":
        yield AT_ONCE
    what = endpoint.arena, blocks, wanted, claims
    cells = copied(what[0], asked(*what)) if are_few else None
    if cells is not None:
        with closing(cells):
            while not cells.are_there():
                yield SOON
            return cells.counted()
    counting = endpoint.worker.submit(digests, *what)
    counting.add_done_callback(lambda _: endpoint.wake())
    return (yield from result_of(counting))


def stopped(server: "Server", serving: Serving, error: Exception) -> Story[None]:
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
