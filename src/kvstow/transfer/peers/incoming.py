"""An agent that dialled us: who it is, and what we bring to it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from kvstow.plan.layout import Layout
from kvstow.route.route import Claims, Route, plan_route
from kvstow.route.sources import sources
from kvstow.transfer.channel.messages import AnyMessage, Card, Claim
from kvstow.transfer.digests import unpacked_claims
from kvstow.transfer.peers.endpoint import Endpoint

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
