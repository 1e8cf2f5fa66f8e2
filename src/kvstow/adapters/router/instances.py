"""Instances take turns. One that failed is left out until it is healthy again.

    closed ──failure──▶ open ──rest is over──▶ probing ──healthy──▶ closed
                          ▲───────────────unhealthy: rest twice as long──┘

Its health is checked in the background: no request waits for an instance that is known to be down.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

FAULTS_TO_OPEN = 3
"""So many answers of 5xx in a row open an instance's circuit. One that cannot be reached, or
hangs, is open at once: 5xx may be the request's own fault."""

MOST_DOUBLINGS = 5


@dataclass(slots=True, eq=False)
class Instance:
    """One server, and whether it gets requests: not while it has failed since it was healthy."""

    url: str
    faults: int = 0
    times_opened: int = 0
    open_until: float | None = None
    is_probed: bool = False


class Instances:
    """Instances of one kind."""

    def __init__(self, urls: Sequence[str], *, rest: float, clock: Callable[[], float]) -> None:
        self.all = tuple(Instance(url) for url in dict.fromkeys(url.rstrip("/") for url in urls))
        self._rest = rest
        self._clock = clock
        self._turn = 0

    def in_turn(self) -> list[Instance]:
        """Those that get requests, the one whose turn it is first."""
        turn, self._turn = self._turn, (self._turn + 1) % max(1, len(self.all))
        return [each for each in self.all[turn:] + self.all[:turn] if each.open_until is None]

    def last_resort(self) -> list[Instance]:
        """All of them, for when every one has failed: the one that failed longest ago first."""
        return sorted(self.all, key=lambda each: each.open_until or 0.0)

    def fail(self, instance: Instance, *, at_once: bool) -> None:
        """It did not answer, or (unless `at_once`) answered that it is at fault."""
        instance.faults += FAULTS_TO_OPEN if at_once else 1
        if instance.faults >= FAULTS_TO_OPEN:
            rest = self._rest * 2 ** min(instance.times_opened, MOST_DOUBLINGS)
            instance.times_opened += 1
            instance.open_until = self._clock() + rest
            instance.faults = 0

    def succeed(self, instance: Instance) -> None:
        """It has answered a request."""
        instance.faults = instance.times_opened = 0
        instance.open_until = None

    def to_probe(self) -> list[Instance]:
        """Those that have been left out long enough and are not being probed yet."""
        now = self._clock()
        return [
            each
            for each in self.all
            if each.open_until is not None and each.open_until <= now and not each.is_probed
        ]
