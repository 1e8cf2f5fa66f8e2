"""One source of a transfer: its rows moved, its fence passed.

    waiting ─▶ met ─▶ moving ─▶ fencing ─▶ clean
       └────────┴────────┴─────────┴──▶ failed, and later quiet

A leg is *quiet* when nothing can write to its destination rows any more: its own posts
have ended or its peer was disconnected; a producer that writes has said that it stopped,
or is certainly dead.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kvstow.errors import FaultKind, RouteError, TransferError
from kvstow.route.blocks import Blocks
from kvstow.route.copies import Copies
from kvstow.route.route import Route
from kvstow.transfer.channel.messages import (
    AnyMessage,
    Begin,
    Begun,
    Card,
    Claim,
    End,
    Failed,
    Fetched,
    Ids,
    Refused,
    Sample,
    Staged,
    Stop,
    Stopped,
    TellDigest,
    Write,
    Written,
)
from kvstow.transfer.contact import Contact
from kvstow.transfer.fencing import Fence
from kvstow.transfer.fetching import Fetching
from kvstow.transfer.home import Home, check_known
from kvstow.transfer.lease import Leases
from kvstow.transfer.mirror import MirrorFence
from kvstow.transfer.mover import Mover, chunk_bytes
from kvstow.transfer.options import DigestPolicy
from kvstow.transfer.path import Way
from kvstow.transfer.staging import SLOTS, pieces
from kvstow.transfer.straight import Ways
from kvstow.transfer.ticket import Ticket, packed_ints
from kvstow.transfer.transport.base import lost

LegState = Literal["waiting", "met", "moving", "fencing", "clean", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Goal:
    """What a transfer wants: tokens `[start_token, num_tokens)` of a request, in these rows."""

    into: Mapping[int, Blocks]
    start_token: int
    num_tokens: int
    direction: Way | None
    digest: DigestPolicy


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What one source brings: nothing without ways, everything without claims."""

    ways: Ways | None
    claims: tuple[Claim, ...] | None


class Leg:
    """Everything about one ticket of a transfer. Runs in the agent's thread."""

    def __init__(self, home: Home, contact: Contact, ticket: Ticket, goal: Goal) -> None:
        self.id = Leases.fresh_id()
        self.ticket = ticket
        self.contact = contact
        self.state: LegState = "waiting"
        self.error: TransferError | None = None
        self.direction: Way = "read"
        self.nbytes = 0
        self.descriptors = 0
        self.told: tuple[int, ...] | None = None
        self._home = home
        self._goal = goal
        self._mover: Mover | None = None
        self._fetching: Fetching | None = None
        self._begun = False
        self._arrived = False
        self._writer_quiet = True
        self._fence: Fence | MirrorFence | None = None
        self._slot_bytes = 0
        self._greeted = False
        self._drain_until = 0.0
        self._card: Card | None = None
        self._witness: Fence | None = None
        self._ask_at = 0.0

    @property
    def active(self) -> bool:
        return self.state in ("moving", "fencing", "clean")

    @property
    def quiet(self) -> bool:
        ours = (self._mover, self._fetching, self._fence)
        return self._writer_quiet and all(part is None or part.quiet for part in ours)

    # ── forward ───────────────────────────────────────────────────────────────────

    def advance(self, now: float) -> None:
        """Do the next thing that can be done."""
        match self.state:
            case "waiting":
                self._wait(now)
            case "moving":
                self._move(now)
            case "fencing":
                self._check_fence(now)
            case "met" | "clean":
                pass
            case "failed":
                self._settle(now)

    def _wait(self, now: float) -> None:
        contact = self.contact
        if contact.state == "ready":
            assert contact.card is not None
            if contact.card.start == self.ticket.start:
                self.state = "met"
            elif not self._greeted:
                self._greeted = True
                contact.again(now)
            else:
                self.fail(TransferError(
                    f"ticket of agent {self.ticket.agent!r} is from an earlier start of it",
                    kind="expired", peer=contact.name), now)  # fmt: skip
        elif contact.state == "broken" and self._greeted:
            self.fail(contact.error or lost(contact.name, "no answer"), now)
        elif contact.state in ("idle", "broken"):
            self._greeted = True
            contact.greet(now)

    def begin(self, plan: Plan, samples: tuple[Sample, ...], now: float) -> None:
        """Start to move what the plan says; nothing where other sources bring it all."""
        contact, goal, ticket = self.contact, self._goal, self.ticket
        assert contact.layout is not None
        assert contact.path is not None
        assert contact.card is not None
        contact.legs[self.id] = self
        self._card = contact.card
        self._ask_at = now + contact.heartbeat_seconds
        contact.kept.discard(ticket.lease)
        self.direction = goal.direction or contact.path.direction
        spans: Copies | None = None
        try:
            if ticket.fingerprint != contact.fingerprint:
                raise TransferError(
                    f"ticket is for layout {ticket.fingerprint[:16]}, agent {contact.name!r} has "
                    f"{contact.fingerprint[:16]}", kind="ticket", peer=contact.name)  # fmt: skip
            check_known(contact.layout, ticket.blocks, whose=f"ticket of {contact.name!r}")
            self._fence = contact.fence(ticket)
            if plan.ways is None:
                self.direction, self._arrived = "read", True
            elif self.direction == "read":
                spans = plan.ways.spans(ticket.blocks, goal.into,
                                        (goal.start_token, goal.num_tokens),
                                        (contact.card.base, self._home.card.base))  # fmt: skip
            elif self.direction == "staged":
                self._fetching = self._made_fetching(plan.ways.route)
        except RouteError as error:
            self.fail(TransferError(f"peer {contact.name!r}: {error}", kind="ticket",
                                    peer=contact.name), now)  # fmt: skip
            return
        except TransferError as error:
            self.fail(error, now)
            return
        self.state = "moving"
        if plan.ways is None:
            samples, self.told = (), tuple(0 for _ in samples)
        contact.send(Begin(self.id, ticket.lease, ticket.digest, plan.claims, self._write_order(),
                           self._slot_bytes, samples))  # fmt: skip
        if spans is not None:
            kinds = self._home.kinds(contact.card)
            size = chunk_bytes(contact.path.rate, kinds)
            self._mover = Mover(self._home, "read", contact.card.start, kinds, spans, size)
        self._fence.prepare()

    def _made_fetching(self, route: Route) -> Fetching:
        home, card, goal, path = self._home, self.contact.card, self._goal, self.contact.path
        assert card is not None
        assert path is not None
        sizes = [stage.nbytes // SLOTS for stage in (home.card.stage, card.stage) if stage]
        if not sizes:
            raise TransferError(f"neither {home.name!r} nor {self.contact.name!r} has a stage",
                                kind="refused", peer=self.contact.name)  # fmt: skip
        tokens = (goal.start_token, goal.num_tokens)
        cut = pieces(route, self.ticket.blocks, goal.into, tokens, min(sizes))
        self._slot_bytes = min(sizes) if card.stage else 0
        return Fetching(home, card, cut)

    def _write_order(self) -> Write | None:
        """Where the producer shall write, or what it shall stage; none where we just read."""
        if self.direction == "read" or (self.direction == "staged" and not self._slot_bytes):
            return None
        self._writer_quiet = self.direction == "staged"
        goal = self._goal
        return Write(
            blocks=tuple(
                Ids(g, packed_ints(blocks.ids), packed_ints(blocks.index))
                for g, blocks in goal.into.items()
            ),
            start_token=goal.start_token,
            num_tokens=goal.num_tokens,
        )

    def _move(self, now: float) -> None:
        if self._mover is not None and not self._arrived:
            self._arrived = self._mover.advance()
            if self._mover.error is not None:
                self._broken(self._mover.error, now)
                return
            if self._arrived:
                self.nbytes, self.descriptors = self._mover.nbytes, self._mover.descriptors
        elif self.contact.state == "broken":
            self.fail(self.contact.error or lost(self.contact.name, "gone"), now)
            return
        elif self._fetching is not None:
            self._fetch(self._fetching, now)
            if self.state == "failed":
                return
        elif not self._writer_quiet:
            self._watch_writer(now)
        if self._arrived and self._begun:
            self.state = "fencing"
            self._check_fence(now)

    def _fetch(self, fetching: Fetching, now: float) -> None:
        for piece in fetching.advance():
            if self._slot_bytes:
                self.contact.send(Fetched(self.id, piece))
        if fetching.error is not None:
            self._broken(fetching.error, now)
        elif fetching.done:
            self.nbytes, self.descriptors = fetching.nbytes, fetching.descriptors
            self._arrived = self._arrived or not self._slot_bytes

    def _check_fence(self, now: float) -> None:
        assert self._fence is not None
        if not self._fence.advance():
            if self._fence.error is not None:
                self._broken(self._fence.error, now)
            return
        changed = self._fence.changed
        if changed:
            layout = self.contact.layout
            assert layout is not None
            where = "; ".join(f"group {layout.groups[g].group.name!r}: {list(ids[:8])}"
                              for g, ids in changed.items())  # fmt: skip
            count = sum(len(ids) for ids in changed.values())
            self.fail(TransferError(
                f"peer {self.contact.name!r}: {count} source blocks were given to others before "
                f"the last byte had arrived: {where}", kind="fence", peer=self.contact.name,
            ), now)  # fmt: skip
            return
        self.state = "clean"

    # ── messages ──────────────────────────────────────────────────────────────────

    def hear(self, message: AnyMessage, now: float) -> None:
        """Take in what the producer says about this leg."""
        match message:
            case Begun():
                self._begun = True
            case Written(_, nbytes, descriptors):
                self._writer_quiet = self._arrived = True
                if self._fetching is None:
                    self.nbytes, self.descriptors = nbytes, descriptors
            case Staged(_, piece, slot):
                if self._fetching is not None:
                    self._fetching.staged(piece, slot)
            case Refused(_, kind, reasons):
                self._writer_quiet = True
                self._told(kind, "\n".join(reasons), now)
            case Failed(_, kind, reason):
                self._writer_quiet = True
                self._told(kind, reason, now)
            case Stopped():
                self._writer_quiet = True
            case TellDigest(_, values):
                self.told = values
            case _:
                pass

    def _told(self, kind: FaultKind, reason: str, now: float) -> None:
        self.fail(TransferError(f"peer {self.contact.name!r}: {reason}", kind=kind,
                                peer=self.contact.name), now)  # fmt: skip

    def lease_ended(self) -> None:
        """The producer no longer keeps the blocks."""
        self.fail(TransferError(f"peer {self.contact.name!r}: lease {self.ticket.lease} has ended",
                                kind="expired", peer=self.contact.name),
                  self._home.clock())  # fmt: skip

    # ── failing ───────────────────────────────────────────────────────────────────

    def _broken(self, error: TransferError, now: float) -> None:
        """The engine has lost the peer: nothing of ours is on its way any more."""
        if self.contact.state == "ready":
            self.contact.fail(error)
        self.fail(error, now)

    def fail(self, error: TransferError, now: float) -> None:
        """Give this leg up; ask a writing producer to stop."""
        if self.state in ("failed", "clean"):
            return
        self.state, self.error = "failed", error
        self._drain_until = now
        for part in (self._mover, self._fetching, self._fence):
            if part is not None:
                part.stop()
        if not self._writer_quiet or self._slot_bytes:
            self.contact.send(Stop(self.id))

    def end(self, outcome: Literal["accepted", "failed", "aborted"]) -> None:
        """Tell the producer how it went."""
        if self.id in self.contact.legs:
            self.contact.send(End(self.id, self.ticket.lease, outcome))

    def let_go(self) -> None:
        """Forget the leg; only once it is quiet."""
        self.contact.legs.pop(self.id, None)

    def _settle(self, now: float) -> None:
        """Come to rest after a failure."""
        drain = self.contact.drain_seconds
        for part in (self._mover, self._fetching, self._fence):
            if part is not None and not part.quiet:
                part.advance()
                if now > self._drain_until + drain:
                    part.sever()
                    if self.contact.state == "ready":
                        self.contact.fail(lost(self.contact.name, f"silent for {drain} s"))
        if not self._writer_quiet:
            self._watch_writer(now)

    def _watch_writer(self, now: float) -> None:
        """Find out, once per heartbeat, whether the producer still writes, or lives.

        One that was started again, or whose counters cannot be read because it is gone,
        writes no more. One that is only silent may.
        """
        card, contact = self._card, self.contact
        assert card is not None
        if contact.state == "ready" and contact.card is not None:
            if contact.card.start != card.start:
                self._writer_quiet = True
                return
            if self.state == "failed" and now >= self._ask_at:
                contact.send(Stop(self.id))
        elif self.state == "failed" and now >= self._ask_at:
            contact.greet(now)
        if self._witness is None and now >= self._ask_at:
            self._ask_at = now + contact.heartbeat_seconds
            if not self._home.is_attached(card.start):
                self._home.attach(card)
            self._witness = Fence(self._home, card, self.ticket)
        if self._witness is not None and (self._witness.advance() or self._witness.error):
            if self._witness.error is not None and self._witness.error.kind == "peer":
                self._writer_quiet = True
                self._broken(self._witness.error, now)
            self._witness = None
