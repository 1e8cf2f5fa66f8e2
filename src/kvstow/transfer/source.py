"""One source of a pull: a ticket, the agent that keeps it, and what they say to each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from kvstow.errors import FaultKind, RouteError, TransferError
from kvstow.plan.layout import Layout
from kvstow.route.route import Claims, Route
from kvstow.route.sources import sources as sources_of
from kvstow.transfer.channel.framing import Session
from kvstow.transfer.channel.messages import (
    AnyMessage,
    Begin,
    Card,
    Claim,
    End,
    Failed,
    Sample,
    Stopped,
    Write,
    Written,
)
from kvstow.transfer.digests import packed_claims
from kvstow.transfer.loop import Conversation, Task
from kvstow.transfer.options import Way
from kvstow.transfer.peers.endpoint import Endpoint
from kvstow.transfer.peers.flight import Flight
from kvstow.transfer.peers.outgoing import Outgoing
from kvstow.transfer.tickets.ticket import Ticket
from kvstow.transfer.transport.mapped import MappedPeer

MOST_PLANS = 64


class Source(Conversation):
    """Everything about one ticket of a pull.

    After `begin`, `flights` are our posts, and the producer may write to our rows unless
    `writer_is_quiet`. `line` is the one on which it has begun; `mapped` is the agent's memory,
    while we copy out of it and compare.
    """

    def __init__(self, endpoint: Endpoint, peer: Outgoing, ticket: Ticket, task: Task[Any]) -> None:
        super().__init__(task)
        self.id = endpoint.random.getrandbits(63)
        self.peer = peer
        self.ticket = ticket
        self.lease = ticket.lease
        self.flights: list[Flight] = []
        self.direction: Way = "read"
        self.route: Route | None = None
        self.claims: Claims | None = None
        self.mapped: MappedPeer | None = None
        self.line: Session | None = None
        self.nbytes = 0
        self.descriptors = 0
        self._endpoint = endpoint
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
        plan: "SourcePlan",
        write: Write | None,
        slot_bytes: int,
        samples: tuple[Sample, ...],
    ) -> None:
        """Tell the producer what we read, or what it shall write or put into slots.
        Raises TransferError."""
        self._card = card = self.peer.card
        assert card is not None
        self.route, self.claims, self.line = plan.route, plan.claims, self.peer.line
        if direction != "mapped":
            self._endpoint.attach(card, self.peer)  # a failed write may have disconnected it
        elif self.peer.mapped is None:
            why = self.peer.unmapped or "lost"
            raise self.fault(f"its memory is not mapped: {why}", "refused")
        else:
            self.peer.mapped.hold()
            self.mapped = self.peer.mapped
        self.direction = direction  # now: where nothing is ordered, there is nothing to wait for
        self.peer.readers[self.id] = self
        self.peer.kept.discard(self.lease)
        self._endpoint.moving.add(self.id)
        self.peer.send(
            Begin(
                self.id,
                self.lease,
                self.ticket.signature,
                direction,
                plan.packed,
                write,
                slot_bytes,
                samples if plan.route and direction != "mapped" else (),
            )
        )

    def stop(self, error: TransferError) -> None:
        """Give up: the producer shall write and stage no more. A peer to which a post has
        failed is lost, and greeted again by whoever needs it."""
        if self.id in self._endpoint.moving:
            self.end("aborted" if error.kind == "aborted" else "failed")
        if self._card is not None and self._card.engine in self._endpoint.broken:
            self.peer.lose(error)

    def end(self, outcome: Literal["accepted", "failed", "aborted"]) -> None:
        """Tell the producer how it went; its lease is not renewed any more."""
        mapped, self.mapped = self.mapped, None
        if mapped is not None:
            mapped.release()
        self._endpoint.moving.discard(self.id)
        self.peer.send(End(self.id, self.lease, outcome, self.nbytes))
        self.lease = 0

    def forget(self) -> None:
        """No more messages: nothing writes for this source any more."""
        self.peer.readers.pop(self.id, None)

    # ── what we hear ──────────────────────────────────────────────────────────────

    @property
    def writer_is_quiet(self) -> bool:
        """Whether the producer writes nothing, or has said that it writes no more."""
        return self.direction != "write" or any(map(self.mailbox.has, (Written, Stopped)))

    def hear(self, message: AnyMessage) -> None:
        """Take in what the producer says about this transfer. Where its memory is mapped, that is
        not waited for, and ends nothing: its counters say what holds."""
        super().hear(message)
        if isinstance(message, Failed) and self.mapped is None:
            self.task.interrupt(self.failure(message))

    def failure(self, message: Failed) -> TransferError:
        """The error of a producer that does not go on."""
        return self.fault(message.reason, message.kind)

    def lose(self, error: TransferError) -> None:
        """The peer is gone. Its memory stays, where it is mapped: the pull goes on."""
        if self.mapped is None:
            super().lose(error)


@dataclass(frozen=True, eq=False)
class SourcePlan:
    """What one source brings: nothing without a route. One of several `is_part`: it brings what it
    claims, and is told so."""

    route: Route | None = None
    claims: Claims | None = None
    is_part: bool = True

    @cached_property
    def packed(self) -> tuple[Claim, ...] | None:
        """The claims for a message."""
        return packed_claims(self.claims) if self.is_part and self.claims is not None else None


class SourcePlans:
    """Who brings what into this layout, for each set of sources computed once."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._plans: dict[tuple[str, ...], list[SourcePlan]] = {}

    def plans(self, sources: Sequence[Source]) -> list[SourcePlan]:
        """One plan per source; TransferError where they do not make a whole."""
        key = tuple(source.peer.fingerprint for source in sources)
        if key not in self._plans:
            try:
                parts = sources_of([source.layout for source in sources], self._layout)
            except RouteError as error:
                text = f"sources do not make a whole:\n{error}"
                raise TransferError(text, kind="refused") from None
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            plans = self._plans[key] = [SourcePlan() for _ in sources]
            for part in parts:
                plans[part.index] = SourcePlan(part.route, part.claims, len(sources) > 1)
        return self._plans[key]
