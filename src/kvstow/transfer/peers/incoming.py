"""An agent that dialled us: who it is, and what we bring to it."""

from collections.abc import Callable
from dataclasses import dataclass, field

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
    """An agent that dialled us, from its hello until it is silent for long.

    Transfers that it has `stopped`, on another line, do not begin here any more.
    """

    endpoint: Endpoint
    card: Card
    layout: Layout
    send: Callable[[AnyMessage], None]
    heard_at: float
    write_rate: float = 0.0
    moved_bytes: int = 0
    stopped: set[int] = field(default_factory=set[int])
    _shares: dict[tuple[Claim, ...] | None, Share] = field(
        default_factory=dict[tuple[Claim, ...] | None, Share]
    )

    def share(self, claims: tuple[Claim, ...] | None) -> Share:
        """What we bring, computed once for each set of claims. Raises RouteError."""
        if claims not in self._shares:
            mine = self.endpoint.layout
            if claims is None:
                alone = sources([mine], self.layout)[0]
                made = Share(alone.route, alone.claims)
            else:
                wanted = unpacked_claims(claims)
                made = Share(plan_route(mine, self.layout, claims=wanted), wanted)
            self._shares[claims] = made
            if len(self._shares) > MOST_SHARES:
                del self._shares[next(iter(self._shares))]
            return made
        return self._shares[claims]

    def attach(self) -> None:
        """Make sure that our engine can reach it. Raises TransferError."""
        self.endpoint.attach(self.card, self)

    def detach(self) -> None:
        """Our engine need not reach it any more."""
        self.endpoint.detach(self.card.engine, self)
