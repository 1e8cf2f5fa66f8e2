"""An agent that we dial: hello, the measured path, and renewals until it is lost.

idle ─▶ greeting ─▶ probing ─▶ ready
          └────────────┴─────────┴──▶ broken ─▶ (the next who needs it) greeting
"""

from collections import Counter
from logging import getLogger
from threading import Lock
from typing import Literal

from kvstow.errors import NotShared, RouteError, TransferError
from kvstow.plan.layout import Layout
from kvstow.route.ways import LONG_BYTES, Path
from kvstow.transfer.channel.framing import Session
from kvstow.transfer.channel.messages import (
    Alive,
    AnyMessage,
    Begun,
    Card,
    End,
    Failed,
    Hello,
    Refused,
    Renew,
    Staged,
    Stopped,
    TellDigest,
    TellPrefix,
    TellProbe,
    UnknownSession,
    Welcome,
    Written,
)
from kvstow.transfer.loop import (
    AFTER_ERROR,
    IDLE,
    NOW_AND_THEN,
    Conversation,
    Loop,
    Mailbox,
    Routine,
    Task,
)
from kvstow.transfer.options import SILENT_BEATS
from kvstow.transfer.peers.endpoint import Endpoint
from kvstow.transfer.peers.probe import UNMEASURED, measure_path
from kvstow.transfer.tickets.ticket import Ticket
from kvstow.transfer.transport.base import lost
from kvstow.transfer.transport.mapped import MappedPeer

log = getLogger(__name__)

MOST_PEERS = 1024
"""Agents that are remembered although nobody needs them: tickets name any address."""

WATCH_SECONDS = 0.1
"""How often we look whether the process of a mapped peer lives: a dead one's memory stays allocated
until we let go of it."""


class Outgoing:
    """One dialled agent. Stays the same object when the agent there is restarted.

    `mapped` is its memory, where it is on this node and may be mapped, `unmapped` why it is not.
    `misses` are our questions for prefixes that got no ticket, by the reason that it told.
    """

    def __init__(self, endpoint: Endpoint, loop: Loop, address: str, key: str) -> None:
        self.address = address
        self.key = key
        self.state: Literal["idle", "greeting", "probing", "ready", "broken"] = "idle"
        self.error: TransferError | None = None
        self.card: Card | None = None
        self.layout: Layout | None = None
        self.fingerprint = ""
        self.path: Path | None = None
        self.ticket_key = b""
        self.mapped: MappedPeer | None = None
        self.unmapped = ""
        self._task: Task[None] = Task(address)
        self.mailbox = Mailbox(self._task.wake)
        self.readers: dict[int, Conversation] = {}
        self.misses: Counter[str] = Counter()
        self.kept: set[int] = set()
        self.heard_at = 0.0
        self.unanswered = 0
        self.moved_bytes = 0
        self.moved_seconds = 0.0
        self.line: Session | None = None
        self._endpoint = endpoint
        self._loop = loop
        self._number = endpoint.random.getrandbits(62)

    @property
    def name(self) -> str:
        return self.card.agent if self.card else self.address

    @property
    def is_idle(self) -> bool:
        """Whether nobody reads from it, asks it or keeps a lease of it."""
        return not (self.readers or self.kept)

    # ── meeting ───────────────────────────────────────────────────────────────────

    def met(self) -> Routine[None]:
        """Wait until the agent is ready; greet it if nobody has. Raises TransferError."""
        while self._endpoint.is_draining and self.state in ("idle", "broken"):
            yield NOW_AND_THEN  # it would have to be greeted again
        self.greet()
        while self.state in ("greeting", "probing"):
            yield IDLE
        if self.state != "ready":
            raise self.error or lost(self.name, "no answer")

    def greet(self) -> None:
        """Say hello, unless that has begun or is done, or our engine is about to be replaced."""
        if self.state in ("idle", "broken") and not self._endpoint.is_draining:
            self.state, self.error, self.unanswered = "greeting", None, 0
            self._task = task = Task[None](f"peer at {self.address}")
            self.mailbox = Mailbox(task.wake)
            seconds = self._endpoint.options.contact_seconds
            self._loop.begin(task, self._connection())
            task.deadline = self._endpoint.clock() + seconds
            task.late = lambda: TransferError(
                f"peer at {self.address} did not answer within {seconds} s",
                kind="timeout",
                peer=self.name,
            )

    def ping(self) -> Routine[None]:
        """Ask for a sign of life; wait until the agent has given one, or was lost."""
        asked_at, line = self._endpoint.clock(), self.line
        self.send(Renew(self._leases()))
        until = asked_at + self._endpoint.options.contact_seconds
        while self.line is line and self.heard_at <= asked_at and self._endpoint.clock() < until:
            yield IDLE

    def lose(self, error: TransferError) -> None:
        """Give the agent up; whoever needs it greets it again."""
        self._task.interrupt(error)

    def _connection(self) -> Routine[None]:
        """Say hello, measure the path, then renew leases until the agent is lost."""
        endpoint = self._endpoint
        card: Card | None = None
        try:
            self.line = self._loop.channel.dial(self.address, self.key)
            self.send(Hello(endpoint.card, self._number))
            welcome = yield from self.mailbox.wait(Welcome)
            self._check(welcome.card)
            self.card = card = welcome.card
            self.ticket_key = welcome.ticket_key
            self.state = "probing"
            self.path = UNMEASURED
            if not self._map(welcome):
                endpoint.attach(card, self)
                self.path = yield from measure_path(endpoint, self, card)
            self._ready(self.path)
            while self.unanswered < SILENT_BEATS:
                self.unanswered += 1
                self.send(Renew(self._leases()))
                until = endpoint.clock() + endpoint.options.heartbeat_seconds
                while endpoint.clock() < until:
                    yield max(IDLE, until - endpoint.clock())
            raise lost(self.name, f"it has left {self.unanswered} heartbeats unanswered")
        except TransferError as error:
            self.error = error
            raise
        except Exception as error:
            self.error = TransferError(f"peer {self.name!r}: {error!r}", kind="transport")
            raise
        finally:
            self._end(card)

    def _map(self, welcome: Welcome) -> bool:
        """Map the agent's memory, if it and we may."""
        endpoint = self._endpoint
        assert self.layout is not None
        try:
            self.mapped, self.unmapped = endpoint.map(welcome, self.layout), ""
        except NotShared as error:
            self.unmapped = error.reason
            log.info("peer %s is not mapped: %s", welcome.card.agent, error)
        endpoint.count(endpoint.metrics.contacts, self.unmapped or "mapped")
        return self.mapped is not None

    def _unmap(self) -> None:
        """Its memory is not used any more, but by copies that run."""
        mapped, self.mapped = self.mapped, None
        if mapped is not None:
            mapped.release()

    def keep(self, lease: int, seconds: float) -> Routine[None]:
        """Renew a lease until it is kept no more. The agent may be lost and met again; where
        nobody answers for `seconds`, the lease has run out. Raises TransferError."""
        endpoint = self._endpoint
        self.kept.add(lease)
        until = endpoint.clock() + seconds
        while lease in self.kept:
            try:
                yield from self.met()
                until = endpoint.clock() + seconds
            except TransferError:
                if endpoint.clock() > until:
                    self.kept.discard(lease)
                    raise
            yield endpoint.options.heartbeat_seconds

    def _leases(self) -> tuple[int, ...]:
        return tuple(self.kept | {each.lease for each in self.readers.values() if each.lease})

    def _check(self, card: Card) -> None:
        """TransferError unless what the agent says of itself fits us."""
        try:
            self.layout, self.fingerprint = self._endpoint.layouts.source(card.manifest)
            groups = len(self.layout.groups)
            if len(card.tables) != groups:
                raise RouteError((f"{len(card.tables)} tables of generations for {groups} groups",))
        except RouteError as error:
            raise TransferError(
                f"peer {card.agent!r} does not fit:\n{error}", kind="refused", peer=card.agent
            ) from None

    def _ready(self, path: Path) -> None:
        self._task.deadline = float("inf")
        self.state = "ready"
        self._loop.wake_all()
        self._endpoint.metrics.peers.inc()
        self._endpoint.note("connected", {"peer": self.name, "address": self.address} | self.way())

    def way(self) -> dict[str, str | float]:
        """How bytes come from it, and what was measured."""
        path, forced = self.path or UNMEASURED, self._endpoint.options.direction
        return {
            "direction": "mapped" if self.mapped else forced or path.way_of(LONG_BYTES),
            "unmapped": self.unmapped,
            "read_rate": path.read.long,
            "write_rate": path.write.long,
            "slots_rate": path.slots,
        }

    def _end(self, card: Card | None) -> None:
        """The agent is lost: hang up, and tell those who read from it."""
        if self.state == "ready":
            self._endpoint.metrics.peers.dec()
        self.state = "broken"
        if self.line is not None:
            self._loop.channel.hang_up(self.line)
            self.line = None
        if card is not None:
            self._endpoint.detach(card.engine, self)
        error = self.error or lost(self.name, "closed here")
        self._endpoint.note(
            "disconnected", {"peer": self.name, "address": self.address, "why": str(error)}
        )
        for reader in tuple(self.readers.values()):
            reader.lose(error)
        self._loop.wake_all()
        self._unmap()

    # ── messages ──────────────────────────────────────────────────────────────────

    def send(self, message: AnyMessage) -> None:
        """Send, if we have met: what is sent into nothing is not missed. Before the agent knows
        us, anything but a hello would make it call us a stranger."""
        if self.line is not None and (self.state != "greeting" or isinstance(message, Hello)):
            self._loop.channel.send(self.line, message)

    def hear(self, message: AnyMessage) -> None:
        """Take in a message of this agent."""
        self.heard_at, self.unanswered = self._endpoint.clock(), 0
        match message:
            case Welcome() | TellProbe():
                self.mailbox.put(message)
            case Refused(kind, reasons):
                text = "\n".join(reasons)
                self.lose(
                    TransferError(f"peer {self.name!r} refused: {text}", kind=kind, peer=self.name)
                )
            case UnknownSession():
                self.lose(lost(self.name, "it was started again and does not know us"))
            case Alive(ended):
                self.kept.difference_update(ended)
            case TellPrefix(question, ticket) if question not in self.readers:
                if ticket:  # nobody waits for it any more
                    self.send(End(0, Ticket.from_bytes(ticket).lease, "aborted"))
            case TellPrefix(number) | Begun(number) | Written(number):
                self._pass_on(number, message)
            case Staged(number) | Failed(number) | Stopped(number) | TellDigest(number):
                self._pass_on(number, message)
            case _:
                pass

    def _pass_on(self, reader: int, message: AnyMessage) -> None:
        if reader in self.readers:
            self.readers[reader].hear(message)


class Peers:
    """All agents that we dial, by address and key."""

    def __init__(self, endpoint: Endpoint, loop: Loop) -> None:
        self.all: dict[tuple[str, str], Outgoing] = {}
        self._lock = Lock()
        self._endpoint = endpoint
        self._loop = loop

    def at(self, address: str, key: str) -> Outgoing:
        """The agent at an address, made when it is first needed; from any thread."""
        with self._lock:
            peer = self.all.pop((address, key), None)
            if peer is None:
                peer = Outgoing(self._endpoint, self._loop, address, key)
            self.all[address, key] = peer  # the latest comes last
        return peer

    def every(self) -> tuple[Outgoing, ...]:
        """All of them, now: another thread may be asking for one."""
        with self._lock:
            return tuple(self.all.values())

    def upkeep(self) -> Routine[None]:
        """Forget agents that nobody needs any more, while there are too many; let go of the memory
        of those whose process has ended."""
        while True:
            wait = AFTER_ERROR
            with self._endpoint.guard("peers"):
                self._look()
                wait = WATCH_SECONDS
            yield wait

    def _look(self) -> None:
        for peer in self.every():
            if peer.mapped is not None and peer.mapped.is_gone:
                peer.lose(lost(peer.name, "its process has ended"))
        with self._lock:
            excess = len(self.all) - MOST_PEERS
            idle = [key for key, peer in self.all.items() if peer.is_idle]
            forgotten = [self.all.pop(key) for key in idle[: max(0, excess)]]
        for peer in forgotten:
            peer.lose(lost(peer.name, "it is no longer needed"))

    def hear(self, line: Session, message: AnyMessage) -> None:
        """Pass a message on to the agent whose line it came on."""
        for peer in self.every():
            if peer.line == line:
                peer.hear(message)
