"""A contact: an agent that we have dialled, from hello to the measured path.

    idle ─▶ greeting ─▶ probing ─▶ ready
              │            │         │
              └────────────┴─────────┴──▶ broken ─▶ (the next pull) greeting

Everything here runs in the agent's own thread.
"""

from typing import TYPE_CHECKING, Literal

from kvstow.errors import ManifestError, RouteError, TransferError
from kvstow.plan.layout import Layout
from kvstow.plan.manifest import decode, fingerprint
from kvstow.route.compare import differences
from kvstow.route.copies import Copies
from kvstow.transfer.channel.base import Channel, Line
from kvstow.transfer.channel.messages import (
    Alive,
    AnyMessage,
    AskProbe,
    Begun,
    Card,
    Failed,
    Hello,
    Refused,
    Renew,
    Staged,
    Stopped,
    Stranger,
    TellDigest,
    TellProbe,
    Welcome,
    Written,
)
from kvstow.transfer.fencing import Fence
from kvstow.transfer.home import PROBE_BYTES, Home
from kvstow.transfer.mirror import Mirror, MirrorFence, is_worth
from kvstow.transfer.mover import Mover
from kvstow.transfer.options import Options
from kvstow.transfer.path import Path, chosen
from kvstow.transfer.ticket import Ticket
from kvstow.transfer.transport.base import Kinds, lost

if TYPE_CHECKING:
    from kvstow.transfer.leg import Leg

ContactState = Literal["idle", "greeting", "probing", "ready", "broken"]
PROBES = 5
"""The first one also connects, so it never counts alone."""

STAGED_SHARE = 0.7
"""What is left of the rate between two hosts' memories when rows are copied on both ends."""


class Contact:
    """One dialled agent, and the legs of transfers that go to it."""

    def __init__(
        self, home: Home, channel: Channel, options: Options, address: str, key: str
    ) -> None:
        self.address = address
        self.key = key
        self.state: ContactState = "idle"
        self.error: TransferError | None = None
        self.card: Card | None = None
        self.layout: Layout | None = None
        self.fingerprint = ""
        self.path: Path | None = None
        self.legs: dict[int, Leg] = {}
        self.kept: set[int] = set()
        self.heard_at = 0.0
        self.moved_bytes = 0
        self.moved_seconds = 0.0
        self._unsent: list[AnyMessage] = []
        self._home = home
        self._channel = channel
        self._options = options
        self._line: Line | None = None
        self._deadline = 0.0
        self._beat_at = 0.0
        self._probes: list[tuple[str, Mover]] = []
        self._probe_started = 0.0
        self._rates: dict[str, float] = {}
        self._mirror: Mirror | None = None

    @property
    def name(self) -> str:
        return self.card.agent if self.card else self.address

    @property
    def drain_seconds(self) -> float:
        return self._options.drain_seconds

    @property
    def heartbeat_seconds(self) -> float:
        return self._options.heartbeat_seconds

    @property
    def line(self) -> Line | None:
        return self._line

    # ── hello ─────────────────────────────────────────────────────────────────────

    def greet(self, now: float) -> None:
        """Say hello on a new line, unless that has begun or is done."""
        if self.state not in ("idle", "broken"):
            return
        self.state, self.error = "greeting", None
        self._deadline = now + self._options.contact_seconds
        try:
            self._line = self._channel.dial(self.address, self.key)
        except TransferError as error:
            self.fail(error)
            return
        self._channel.send(self._line, Hello(self._home.card))

    def again(self, now: float) -> None:
        """Say hello again: the agent there is not the one we knew."""
        self.fail(lost(self.name, "it was started again"))
        self.greet(now)

    def send(self, message: AnyMessage) -> None:
        if self._line is not None:
            self._channel.send(self._line, message)

    def tell(self, message: AnyMessage, now: float) -> None:
        """Send now, or as soon as we have met."""
        if self.state == "ready":
            self.send(message)
        else:
            self._unsent.append(message)
            self.greet(now)

    def hear(self, message: AnyMessage, now: float) -> None:
        """Take in a message from this agent."""
        self.heard_at = now
        match message:
            case Welcome(card):
                if self.state == "greeting":
                    self._welcomed(card, now)
            case Refused(0, kind, reasons):
                text = "\n".join(reasons)
                self.fail(TransferError(f"peer {self.name!r} refused: {text}", kind=kind,
                                        peer=self.name))  # fmt: skip
            case Stranger():
                self.fail(lost(self.name, "it was started again and does not know us"))
            case TellProbe(nbytes, seconds):
                self._written(nbytes, seconds)
            case Alive(ended):
                for leg in list(self.legs.values()):
                    if leg.ticket.lease in ended:
                        leg.lease_ended()
            case Begun() | Refused() | Written() | Staged() | Failed() | Stopped() | TellDigest():
                if message.transfer in self.legs:
                    self.legs[message.transfer].hear(message, now)
            case _:
                pass

    def _welcomed(self, card: Card, now: float) -> None:
        try:
            self.layout = decode(card.manifest)
            found = differences(self.layout, self._home.layout)
            if found:
                raise RouteError(found)
            if len(card.tables) != len(self.layout.groups):
                raise RouteError((f"{len(card.tables)} tables of generations for "
                                  f"{len(self.layout.groups)} groups",))  # fmt: skip
            self._home.attach(card)
        except (ManifestError, RouteError) as error:
            self.fail(TransferError(f"peer {card.agent!r} does not fit:\n{error}", kind="refused",
                                    peer=card.agent))  # fmt: skip
            return
        except TransferError as error:
            self.fail(error)
            return
        self.card = card
        self.fingerprint = fingerprint(self.layout)
        self._probe(now)

    # ── probing ───────────────────────────────────────────────────────────────────

    def _probe(self, now: float) -> None:
        """Read a few megabytes twice (the first time connects), then have as much written."""
        self.state = "probing"
        self._rates = {"read": 0.0, "staged": 0.0}
        forced = self._options.direction
        if forced is not None:
            self._ready(chosen(0.0, 0.0, forced=forced))
            return
        assert self.card is not None
        card, home = self.card, self._home
        ours, theirs = home.probe.data_ptr(), card.probe.address
        self._probes = [("read", self._reading(home.kinds(card), ours, theirs))
                        for _ in range(PROBES)]  # fmt: skip
        if "VRAM" in home.kinds(card):
            ours = home.stage.arena.address if home.stage else ours
            theirs = card.stage.address if card.stage else theirs
            self._probes += [("staged", self._reading(Kinds(), ours, theirs))
                             for _ in range(PROBES)]  # fmt: skip
        self._probe_started = now

    def _reading(self, kinds: Kinds, ours: int, theirs: int) -> Mover:
        assert self.card is not None
        size = min(PROBE_BYTES, self.card.probe.nbytes)
        one = Copies.one(theirs, ours, size)
        return Mover(self._home, "read", self.card.start, kinds, one, PROBE_BYTES)

    def _advance_probe(self) -> None:
        if not self._probes:
            return
        way, probe = self._probes[0]
        if not probe.advance():
            if probe.error is not None:
                self.fail(probe.error)
            return
        now = self._home.clock()
        rate = probe.nbytes / max(now - self._probe_started, 1e-9)
        self._rates[way] = max(self._rates[way], rate)
        self._probe_started = now
        del self._probes[0]
        if not self._probes:
            self.send(AskProbe(PROBE_BYTES))

    def _written(self, nbytes: int, seconds: float) -> None:
        if self.state == "probing":
            write_rate = nbytes / seconds if seconds > 0 else 0.0
            staged_rate = STAGED_SHARE * self._rates["staged"]
            self._ready(chosen(self._rates["read"], write_rate, staged_rate))

    def _ready(self, path: Path) -> None:
        self.path = path
        self.state = "ready"
        for message in self._unsent:
            self.send(message)
        self._unsent.clear()
        self._home.metrics.peers.inc()
        self._home.note("connected", {
            "peer": self.name, "address": self.address, "direction": path.direction,
            "read_rate": path.read_rate, "write_rate": path.write_rate,
            "staged_rate": path.staged_rate, "forced": path.forced,
        })  # fmt: skip

    # ── fences ────────────────────────────────────────────────────────────────────

    def fence(self, ticket: Ticket) -> Fence | MirrorFence:
        """What reads the counters of a ticket's blocks again. Raises TransferError."""
        assert self.card is not None
        assert self.layout is not None
        if not is_worth(self.layout, ticket):
            return Fence(self._home, self.card, ticket)
        if self._mirror is None:
            self._mirror = Mirror(self._home, self.card, self.layout)
        return MirrorFence(self._mirror, ticket)

    # ── staying in touch ──────────────────────────────────────────────────────────

    def advance(self, now: float) -> None:
        """Do what is due: deadlines, probes, heartbeats."""
        if self.state in ("greeting", "probing"):
            if now > self._deadline:
                limit = self._options.contact_seconds
                self.fail(TransferError(f"peer at {self.address} did not answer within {limit} s",
                                        kind="timeout", peer=self.name))  # fmt: skip
            elif self.state == "probing":
                self._advance_probe()
        elif self.state == "ready" and now >= self._beat_at:
            self._beat_at = now + self._options.heartbeat_seconds
            leases = {leg.ticket.lease for leg in self.legs.values() if leg.active}
            self.send(Renew(tuple(leases | self.kept)))

    @property
    def busy(self) -> bool:
        return self.state in ("greeting", "probing")

    def fail(self, error: TransferError) -> None:
        """Give the agent up; whoever needs it greets it again."""
        was_ready = self.state == "ready"
        self.state, self.error = "broken", error
        self._probes.clear()
        self._unsent.clear()
        if self._line is not None:
            self._channel.hang_up(self._line)
            self._line = None
        if self.card is not None:
            self._home.sever(self.card.start)
        if self._mirror is not None:
            self._mirror.close()
            self._mirror = None
        if was_ready:
            self._home.metrics.peers.dec()
        self._home.note("disconnected", {"peer": self.name, "address": self.address,
                                         "why": str(error)})  # fmt: skip
