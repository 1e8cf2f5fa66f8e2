"""One source of a pull: a ticket, the agent that keeps it, and what they say to each other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvstow.errors import FaultKind, RouteError, TransferError
from kvstow.plan.layout import Layout
from kvstow.route.route import Route
from kvstow.route.sources import sources as sources_of
from kvstow.route.ways import Way
from kvstow.transfer.channel.messages import (
    NOT_YET,
    Alive,
    AnyMessage,
    Begin,
    Card,
    Claim,
    End,
    Failed,
    Moved,
    Refused,
    Sample,
    Stop,
    Stopped,
    Why,
    Write,
    Written,
)
from kvstow.transfer.digests import packed_claims
from kvstow.transfer.loop import Mailbox
from kvstow.transfer.peers.endpoint import Endpoint
from kvstow.transfer.peers.flight import Flight
from kvstow.transfer.peers.outgoing import Outgoing
from kvstow.transfer.tickets.lease import UNKNOWN
from kvstow.transfer.tickets.ticket import Ticket

Outcome = Literal["accepted", "failed", "aborted"]


@dataclass(frozen=True, slots=True, eq=False)
class SourcePlan:
    """What one source brings: nothing without a route, everything without claims."""

    route: Route | None
    claims: tuple[Claim, ...] | None


class Source:
    """Everything about one ticket of a pull.

    `interrupt` ends the pull with an error. After `begin`, `flights` are our posts, and the
    producer may write to our rows unless `writer_is_quiet`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        peer: Outgoing,
        ticket: Ticket,
        interrupt: Callable[[TransferError], None],
        wake: Callable[[], None],
    ) -> None:
        self.id = endpoint.random.getrandbits(63)
        self.peer = peer
        self.ticket = ticket
        self.lease = ticket.lease
        self.mailbox = Mailbox(wake)
        self.flights: list[Flight] = []
        self.direction: Way = "read"
        self.route: Route | None = None
        self.nbytes = 0
        self.descriptors = 0
        self._endpoint = endpoint
        self._interrupt = interrupt
        self._card: Card | None = None

    @property
    def card(self) -> Card:
        """The card of the agent, as it was when the transfer began."""
        assert self._card is not None
        return self._card

    @property
    def engine(self) -> str:
        """The name of the agent's engine, once that is known."""
        card = self._card or self.peer.card
        return card.engine if card else ""

    @property
    def layout(self) -> Layout:
        assert self.peer.layout is not None
        return self.peer.layout

    def fault(self, what: str, kind: FaultKind) -> TransferError:
        """An error of this source."""
        return TransferError(f"peer {self.peer.name!r}: {what}", kind=kind, peer=self.peer.name)

    # ── what we say ───────────────────────────────────────────────────────────────

    def begin(
        self,
        direction: Way,
        plan: SourcePlan,
        write: Write | None,
        slot_bytes: int,
        samples: tuple[Sample, ...],
    ) -> None:
        """Tell the producer what we read, or what it shall write or stage. Raises TransferError."""
        self._card = card = self.peer.card
        assert card is not None
        self._endpoint.attach(card, self.peer)  # a failed write of ours may have disconnected it
        self.direction, self.route = direction, plan.route
        self.peer.readers[self.id] = self
        self.peer.kept.discard(self.lease)
        self._endpoint.moving.add(self.id)
        self.send(
            Begin(
                self.id,
                self.lease,
                self.ticket.digest,
                plan.claims,
                write,
                slot_bytes,
                samples if plan.route else (),
            )
        )

    def send(self, message: AnyMessage) -> None:
        """Say something to the producer."""
        self.peer.send(message)

    def stop(self, error: TransferError) -> None:
        """Give up: the producer shall write and stage no more. A peer to which a post has
        failed is lost, and greeted again by whoever needs it."""
        if self.id in self._endpoint.moving:
            if self.direction in ("write", "staged"):
                self.send(Stop(self.id))
            self.end("aborted" if error.kind == "aborted" else "failed")
        if self._card is not None and self._card.engine in self._endpoint.broken:
            self.peer.lose(error)

    def end(self, outcome: Outcome) -> None:
        """Tell the producer how it went; its lease is not renewed any more."""
        self._endpoint.moving.discard(self.id)
        if outcome == "accepted" and self.route is not None:
            self.send(Moved(self.id, self.nbytes, self.descriptors))
        self.send(End(self.id, self.lease, outcome))
        self.lease = 0

    def forget(self) -> None:
        """No more messages: nothing writes for this source any more."""
        self.peer.readers.pop(self.id, None)

    # ── what we hear ──────────────────────────────────────────────────────────────

    @property
    def writer_is_quiet(self) -> bool:
        """Whether the producer writes nothing, or has said that it writes no more."""
        return self.direction != "write" or self.mailbox.has(Written, Stopped, Refused)

    def hear(self, message: AnyMessage) -> None:
        """Take in what the producer says about this transfer."""
        self.mailbox.put(message)
        match message:
            case Refused(_, kind, reasons):
                fault = self.fault("\n".join(reasons), kind)
                fault.is_early = self._is_early(fault)
                self._interrupt(fault)
            case Failed(_, kind, reason):
                self._interrupt(self.fault(reason, kind))
            case Alive():
                self._interrupt(self.fault(f"lease {self.ticket.lease} has ended", "expired"))
            case _:
                pass

    def _is_early(self, refusal: TransferError) -> bool:
        """Whether the producer does not know the ticket yet; older ones say so in words only."""
        if self.mailbox.has(Why):
            return self.mailbox.first(Why).reason == NOT_YET
        return refusal.kind == "ticket" and UNKNOWN in str(refusal)

    def lose(self, error: TransferError) -> None:
        """The peer is gone."""
        self._interrupt(error)


class SourcePlans:
    """Who brings what into this layout, for each set of sources computed once."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._known: dict[tuple[str, ...], tuple[SourcePlan, ...]] = {}

    def plans(self, sources: Sequence[Source]) -> tuple[SourcePlan, ...]:
        """One plan per source; TransferError where they do not make a whole."""
        key = tuple(source.peer.fingerprint for source in sources)
        if key not in self._known:
            try:
                found = sources_of([source.layout for source in sources], self._layout)
            except RouteError as error:
                raise TransferError(
                    f"sources do not make a whole:\n{error}", kind="refused"
                ) from None
            by_index = {source.index: source for source in found}
            self._known[key] = tuple(
                SourcePlan(
                    by_index[i].route,
                    packed_claims(by_index[i].claims) if len(sources) > 1 else None,
                )
                if i in by_index
                else SourcePlan(None, None)
                for i in range(len(sources))
            )
        return self._known[key]
