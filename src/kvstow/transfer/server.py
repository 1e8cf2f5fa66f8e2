"""Who is served: the agents that dialled us, our leases, and the transfers under them."""

from collections.abc import Callable

from kvstow.errors import RouteError, TransferError
from kvstow.transfer.channel.framing import Session
from kvstow.transfer.channel.messages import (
    Alive,
    AnyMessage,
    AskPrefix,
    AskProbe,
    AskStatus,
    Begin,
    End,
    Fetched,
    Hello,
    Refused,
    Renew,
    Stopped,
    TellStatus,
    UnknownSession,
)
from kvstow.transfer.loop import AFTER_ERROR, IDLE, Loop, Routine
from kvstow.transfer.options import SILENT_BEATS
from kvstow.transfer.peers.endpoint import Endpoint
from kvstow.transfer.peers.probe import write_probe
from kvstow.transfer.quarantine import Quarantine
from kvstow.transfer.serve import ENDED, Incoming, Serving, serve
from kvstow.transfer.tickets.lease import EndReason, Leases
from kvstow.transfer.tickets.ticket import Ticket
from kvstow.transfer.transport.base import lost

AWAKE_AFTER_HELLO = 0.5
"""A new consumer measures how fast it can read: that takes our help, and is not announced."""

MAX_CLIENTS = 4096
"""Agents that are known at once; more are not let in until others have gone."""

FRESH_SECONDS = 0.2
"""So long whoever asks gets the same status document: making one takes milliseconds."""


class Server:
    """The agents that dialled us, our leases, and what is being served under them."""

    def __init__(
        self,
        endpoint: Endpoint,
        loop: Loop,
        quarantine: Quarantine,
        status: Callable[[], bytes],
    ) -> None:
        self.endpoint = endpoint
        self.loop = loop
        self.quarantine = quarantine
        self.leases = Leases()
        self.incoming: dict[Session, Incoming] = {}
        self.servings: dict[int, Serving] = {}
        self._make_status = status
        self._status = -FRESH_SECONDS, b""
        self.on_question: Callable[[Incoming, AskPrefix], None] = lambda peer, question: None
        self._probed: list[Incoming] = []
        self._awake_until = 0.0

    # ── leases ────────────────────────────────────────────────────────────────────

    def lease_ended(self, ticket: Ticket, reason: EndReason) -> None:
        """Tell those who read under this lease, and stop what is written for them."""
        endpoint = self.endpoint
        endpoint.metrics.leases.dec()
        endpoint.metrics.lease_ends.labels(reason).inc()
        endpoint.note("lease-ended", {"lease": ticket.lease, "reason": reason})
        if reason == "read":
            return
        for serving in tuple(self.servings.values()):
            if serving.begin.lease == ticket.lease:
                text = f"lease {ticket.lease} has ended: {reason}"
                serving.task.interrupt(TransferError(text, kind="expired"))

    # ── messages ──────────────────────────────────────────────────────────────────

    def hear(self, line: Session, message: AnyMessage) -> None:
        """Take in a message of somebody who dialled us."""
        match message:
            case Hello():
                self._greet(line, message)
            case AskStatus():
                self._tell_status(line)
            case Refused():  # a frame of another version
                self.loop.channel.send(line, message)
            case _ if line in self.incoming:
                self._hear(self.incoming[line], message)
            case _:
                self.endpoint.drop("session", f"{type(message).__name__} before any hello")
                self.loop.channel.send(line, UnknownSession())

    def _hear(self, peer: Incoming, message: AnyMessage) -> None:
        peer.heard_at = self.endpoint.clock()
        match message:
            case Begin():
                self._begin(peer, message)
            case End():
                self._end(peer, message)
            case Fetched(transfer):
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

    def _tell_status(self, line: Session) -> None:
        now = self.endpoint.clock()
        if now - self._status[0] >= FRESH_SECONDS:
            self._status = now, self._make_status()
        self.loop.channel.send(line, TellStatus(self._status[1]))

    def _end_earlier(self, hello: Hello) -> None:
        """The session that an agent had on this line is over: an order that comes there late must
        not begin after we have said that it has stopped."""
        for line, peer in tuple(self.incoming.items()):
            if (peer.card.start, peer.line) == (hello.card.start, hello.line):
                self._forget(line)

    def _greet(self, line: Session, hello: Hello) -> None:
        """Let an agent in. It says hello once: whoever wants another session dials again."""
        card = hello.card
        if line in self.incoming:
            self.endpoint.drop("session", "a second hello of the same client")
            return
        if len(self.incoming) >= MAX_CLIENTS:
            self.endpoint.drop("flood", f"{MAX_CLIENTS} clients are known already")
            return
        self._end_earlier(hello)
        try:
            layout = self.endpoint.layouts.target(card.manifest).layout
        except RouteError as error:
            self.endpoint.note("refused", {"peer": card.agent, "why": str(error)})
            self.loop.channel.send(line, Refused("refused", tuple(str(error).splitlines())))
            return

        def send(message: AnyMessage) -> None:
            self.loop.channel.send(line, message)

        now = self.endpoint.clock()
        self.incoming[line] = Incoming(self.endpoint, card, hello.line, layout, send, now)
        self.stay_awake(AWAKE_AFTER_HELLO)
        send(self.endpoint.welcome())

    def _begin(self, peer: Incoming, begin: Begin) -> None:
        if begin.transfer in self.servings:
            return
        serving = self.servings[begin.transfer] = Serving(peer, begin)
        self.loop.begin(serving.task, serve(self, serving))
        serving.task.on_end = lambda: self._over(begin.transfer)

    def _over(self, transfer: int) -> None:
        self.servings.pop(transfer, None)

    def _end(self, peer: Incoming, end: End) -> None:
        """A transfer is over for its consumer; unless it was accepted, `stopped` is the answer, to
        the line on which it was asked last."""
        if end.outcome == "aborted":
            self.leases.give_up(end.lease, end.transfer)
        serving = self.servings.get(end.transfer)
        if serving is not None:
            serving.mailbox.put(end)
        if end.outcome == "accepted":
            return
        if serving is None:
            peer.send(Stopped(end.transfer))
        else:
            serving.peer = peer
            serving.task.interrupt(TransferError(ENDED, kind="aborted"))

    def _probe(self, peer: Incoming, nbytes: int) -> None:
        if any(probed is peer for probed in self._probed):
            return
        self._probed.append(peer)
        task = self.loop.start("probe", write_probe(self.endpoint, peer, nbytes))
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

    def upkeep(self) -> Routine[None]:
        """Let leases run out, and forget consumers that are silent."""
        silent = SILENT_BEATS * self.endpoint.options.heartbeat_seconds
        while True:
            wait = AFTER_ERROR
            with self.endpoint.guard("server"):
                now = self.endpoint.clock()
                self.leases.expire(now=now)
                for line, peer in tuple(self.incoming.items()):
                    if now - peer.heard_at > silent:
                        self.endpoint.note("consumer-silent", {"peer": peer.card.agent})
                        self._forget(line)
                wait = self.loop.pace if now < self._awake_until else IDLE
            yield wait

    def _forget(self, line: Session) -> None:
        peer = self.incoming.pop(line)
        for serving in tuple(self.servings.values()):
            if serving.peer is peer:
                serving.task.interrupt(lost(peer.card.agent, "it is not heard any more"))
        peer.detach()

    def forget_all(self) -> None:
        """Have everybody say hello again."""
        for line, peer in tuple(self.incoming.items()):
            peer.send(UnknownSession())
            self._forget(line)
