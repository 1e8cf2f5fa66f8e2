"""The producer's half, from top to bottom: begin, then write, stage or nothing, digests, end.

A consumer that reads needs nothing of us but that the lease runs and the engine works. One
that has us write, or stage, may ask us to stop at any time: it hears `stopped` when nothing of
ours can reach its rows any more.
"""

import logging
from collections.abc import Callable

from kvstow.errors import FaultKind, KvstowError, RouteError, TransferError
from kvstow.route.blocks import Blocks
from kvstow.transfer.channel.base import Channel, Line
from kvstow.transfer.channel.messages import (
    NOT_YET,
    Alive,
    AnyMessage,
    AskPrefix,
    AskProbe,
    AskStatus,
    Begin,
    Begun,
    Card,
    End,
    Failed,
    Fetched,
    Hello,
    Moved,
    Refused,
    Renew,
    Stop,
    Stopped,
    Stranger,
    TellDigest,
    TellStatus,
    Welcome,
    Why,
    Write,
    Written,
)
from kvstow.transfer.channel.status import CachedStatus
from kvstow.transfer.digests import digests
from kvstow.transfer.lease import EndReason, Lease, Leases
from kvstow.transfer.loop import (
    IDLE,
    NOW_AND_THEN,
    Loop,
    Mailbox,
    Story,
    Task,
    result_of,
    together,
)
from kvstow.transfer.move.copies import chunk_bytes
from kvstow.transfer.move.gather import Writes, ready_to_gather
from kvstow.transfer.move.staged import gathered, pieces
from kvstow.transfer.peers.endpoint import Endpoint, Flight, check_blocks
from kvstow.transfer.peers.incoming import Incoming
from kvstow.transfer.peers.probe import written_probe
from kvstow.transfer.quarantine import Quarantine
from kvstow.transfer.ticket import Ticket, unpacked_ints

log = logging.getLogger(__name__)

AWAKE_AFTER_HELLO = 0.5
"""A new consumer measures how fast it can read: that takes our help, and is not announced."""

SILENT_BEATS = 30
"""A consumer that was silent for so many heartbeats is forgotten."""


# ── the story ─────────────────────────────────────────────────────────────────────────


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
        yield from together(bringing, telling)  # bytes first: digests keep the interpreter busy
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
        counting = endpoint.worker.submit(digests, endpoint.arena, ticket.blocks, wanted, claims)
        counting.add_done_callback(lambda _: endpoint.wake())
        try:
            values = yield from result_of(counting)
        except KvstowError as error:
            raise TransferError(f"no digest: {error}", kind="digest") from error
        serving.send(TellDigest(serving.transfer, values))

    return tell()


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


def _no_prefix(peer: Incoming, asked: AskPrefix) -> None:
    """Nothing is registered here."""
    peer.tell_miss(asked.question, "absent")


class Ended(TransferError):
    """The consumer wants no more, or may have no more: no fault of ours."""


def _fault(error: Exception) -> tuple[FaultKind, tuple[str, ...]]:
    if isinstance(error, TransferError):
        return error.kind, (str(error),)
    if not isinstance(error, KvstowError | ValueError | ArithmeticError | LookupError):
        log.exception("a transfer that was served ended by a bug")
        return "transport", (repr(error),)
    return "ticket", (str(error),)


# ── who is served ─────────────────────────────────────────────────────────────────────


class Server:
    """The agents that dialled us, our leases, and what is being served under them."""

    def __init__(
        self,
        endpoint: Endpoint,
        channel: Channel,
        loop: Loop,
        quarantine: Quarantine,
        status: Callable[[], bytes],
    ) -> None:
        self.endpoint = endpoint
        self.loop = loop
        self.quarantine = quarantine
        self.leases = Leases()
        self.incoming: dict[int, Incoming] = {}
        self.servings: dict[int, Serving] = {}
        self._channel = channel
        self._status = CachedStatus(status, endpoint.clock)
        self.on_question: Callable[[Incoming, AskPrefix], None] = _no_prefix
        self._lines: dict[int, Line] = {}
        self._tickets: dict[int, Ticket] = {}
        self._probed: list[Incoming] = []
        self._awake_until = 0.0

    def has_forgotten(self, peer: Incoming) -> bool:
        """Whether that agent was silent for too long."""
        return all(known is not peer for known in self.incoming.values())

    # ── leases ────────────────────────────────────────────────────────────────────

    def grant(self, lease: Lease, ticket: Ticket) -> None:
        """Let consumers come with this ticket."""
        self._tickets[lease.id] = ticket
        self.leases.grant(lease)
        self.endpoint.metrics.leases.inc()

    def opened(self, serving: Serving) -> Ticket:
        """The ticket under which a transfer begins; TransferError if it may not."""
        begin, layout = serving.begin, serving.peer.layout
        self.leases.open(
            begin.lease,
            begin.digest,
            begin.transfer,
            now=self.endpoint.clock(),
            ranks=layout.tp[1] * layout.pp[1],
        )
        return self._tickets[begin.lease]

    def lease_ended(self, ticket: Ticket, reason: EndReason) -> None:
        """Tell those who read under this lease, and stop what is written for them."""
        endpoint = self.endpoint
        del self._tickets[ticket.lease]
        endpoint.metrics.leases.dec()
        endpoint.metrics.lease_ends.labels(reason).inc()
        endpoint.note("lease-ended", {"lease": ticket.lease, "reason": reason})
        if reason == "read":
            return
        for serving in tuple(self.servings.values()):
            if serving.begin.lease == ticket.lease:
                serving.send(Alive((ticket.lease,)))
                serving.interrupt(Ended(f"lease ended: {reason}", kind="expired"))

    # ── messages ──────────────────────────────────────────────────────────────────

    def hear(self, line: Line, message: AnyMessage) -> None:
        """Take in a message of somebody who dialled us."""
        if isinstance(message, Hello):
            self._greet(line, message.card)
            return
        if isinstance(message, AskStatus):
            self._channel.send(line, TellStatus(self._status.document()))
            return
        peer = self.incoming.get(line.session)
        if peer is None:
            return
        peer.heard_at = self.endpoint.clock()
        match message:
            case Begin():
                self._begin(peer, message)
            case End():
                self._end(message)
            case Stop():
                self._stop(peer, message)
            case Fetched(transfer) | Moved(transfer):
                if transfer in self.servings:
                    self.servings[transfer].mailbox.put(message)
            case Renew(leases):
                self._renew(peer, leases)
            case AskProbe(nbytes):
                self._probe(peer, nbytes)
            case AskPrefix():
                self.on_question(peer, message)
            case _:
                pass

    def _greet(self, line: Line, card: Card) -> None:
        try:
            layout = self.endpoint.layouts.target(card.manifest).layout
        except RouteError as error:
            self.endpoint.note("refused", {"peer": card.agent, "why": str(error)})
            self._channel.send(line, Refused(0, "refused", tuple(str(error).splitlines())))
            self._channel.hang_up(line)
            return

        def send(message: AnyMessage) -> None:
            self._channel.send(line, message)

        now = self.endpoint.clock()
        self._lines[line.session] = line
        self.incoming[line.session] = Incoming(self.endpoint, card, layout, send, now)
        self.stay_awake(AWAKE_AFTER_HELLO)
        send(Welcome(self.endpoint.card))
        if self.endpoint.kind == "VRAM" or self.endpoint.gathers:
            self.loop.start(f"get ready for {card.agent}", ready_to_gather(self.endpoint, layout))

    def _begin(self, peer: Incoming, begin: Begin) -> None:
        if begin.transfer in self.servings:
            return
        serving = self.servings[begin.transfer] = Serving(peer, begin)
        serving.task = self.loop.start(f"serve {peer.card.agent}", serve(self, serving))
        serving.task.on_end = lambda: self._over(begin.transfer)

    def _over(self, transfer: int) -> None:
        self.servings.pop(transfer, None)

    def _end(self, end: End) -> None:
        if end.outcome == "aborted":
            self.leases.end(end.lease, "aborted")
        if end.transfer in self.servings:
            self.servings[end.transfer].mailbox.put(end)

    def _stop(self, peer: Incoming, stop: Stop) -> None:
        """Stop a transfer; the answer goes to the line on which it was asked last."""
        serving = self.servings.get(stop.transfer)
        if serving is None or serving.task is None:
            peer.send(Stopped(stop.transfer))
            return
        serving.peer = peer
        serving.mailbox.put(stop)
        serving.interrupt(Ended("stopped by its consumer", kind="aborted"))

    def _probe(self, peer: Incoming, nbytes: int) -> None:
        if any(probed is peer for probed in self._probed):
            return
        self._probed.append(peer)
        task = self.loop.start("probe", written_probe(self.endpoint, peer, nbytes))
        task.deadline = self.endpoint.clock() + self.endpoint.options.contact_seconds
        task.on_end = lambda: self._probed.remove(peer)

    def _renew(self, peer: Incoming, leases: tuple[int, ...]) -> None:
        for lease in leases:
            self.leases.renew(lease, now=self.endpoint.clock())
        peer.send(Alive(tuple(lease for lease in leases if self.leases.has_ended(lease))))

    # ── staying there ─────────────────────────────────────────────────────────────

    def stay_awake(self, seconds: float) -> None:
        """Let the engine work without pause for so long: some engines' targets have to."""
        self._awake_until = max(self._awake_until, self.endpoint.clock() + seconds)

    def upkeep(self) -> Story[None]:
        """Let leases run out, and forget consumers that are silent."""
        silent = SILENT_BEATS * self.endpoint.options.heartbeat_seconds
        while True:
            now = self.endpoint.clock()
            self.leases.expire(now=now)
            for session, peer in tuple(self.incoming.items()):
                if now - peer.heard_at > silent:
                    self.endpoint.note("guest-silent", {"peer": peer.card.agent})
                    self._forget(session)
            yield self.loop.pace if now < self._awake_until else IDLE

    def _forget(self, session: int) -> None:
        peer = self.incoming.pop(session)
        for serving in tuple(self.servings.values()):
            if serving.peer is peer:
                serving.interrupt(Ended("its consumer is gone", kind="peer"))
        peer.detach()
        self._channel.hang_up(self._lines.pop(session))

    def forget_all(self) -> None:
        """Have everybody say hello again."""
        for session, peer in tuple(self.incoming.items()):
            peer.send(Stranger())
            self._forget(session)
