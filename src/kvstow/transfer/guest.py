"""A guest: an agent that dialled us, and what we bring to it."""

from dataclasses import dataclass

from kvstow.plan.layout import Layout
from kvstow.route.route import Claims, route
from kvstow.route.sources import sources
from kvstow.transfer.channel.base import Line
from kvstow.transfer.channel.messages import Card, Claim
from kvstow.transfer.digesting import unpacked_claims
from kvstow.transfer.straight import Ways


class Guest:
    """An agent that dialled us."""

    def __init__(self, line: Line, card: Card, layout: Layout) -> None:
        self.line = line
        self.card = card
        self.layout = layout
        self._errands: dict[tuple[Claim, ...] | None, Errand] = {}
        self.heard_at = 0.0
        self.write_rate = 0.0
        self.reading: dict[int, int] = {}

    def errand(self, mine: Layout, packed: tuple[Claim, ...] | None) -> "Errand":
        """What we bring to this guest, computed once for each set of claims."""
        if packed not in self._errands:
            if packed is None:
                alone = sources([mine], self.layout)[0]
                made = Errand(Ways(alone.route), alone.claims)
            else:
                claims = unpacked_claims(packed)
                made = Errand(Ways(route(mine, self.layout, claims=claims)), claims)
            self._errands[packed] = made
        return self._errands[packed]


@dataclass(frozen=True, slots=True, eq=False)
class Errand:
    """The ways to a guest, and what counts for digests on them."""

    ways: Ways
    claims: Claims
