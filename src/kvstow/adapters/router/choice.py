"""Which instance a request goes to.

    cost  =  tokens of the prompt that the instance does not hold
          +  tokens of the requests that it is busy with

The instance of least cost comes first; equal ones take turns. One that failed is left out until
its health has been asked for, in the background: no request waits for an instance that is known
to be down.

    closed ──failure──▶ open ──rest is over──▶ probing ──healthy──▶ closed
                          ▲───────────────unhealthy: rest twice as long──┘
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

FAULTS_TO_OPEN = 3
"""So many answers of 5xx in a row open an instance's circuit. One that cannot be reached, or
hangs, is open at once: 5xx may be the request's own fault."""

MOST_DOUBLINGS = 5


@dataclass(slots=True, eq=False)
class Instance:
    """One server, what it is busy with, and whether it may be asked."""

    url: str
    faults: int = 0
    times_opened: int = 0
    open_until: float | None = None
    is_probed: bool = False
    requests: int = 0
    tokens: int = 0

    @property
    def is_open(self) -> bool:
        """Whether it failed, and nobody has found it healthy since."""
        return self.open_until is not None

    @contextmanager
    def busy_with(self, num_tokens: int) -> Generator[None]:
        """Count a request while it is there."""
        self.requests += 1
        self.tokens += num_tokens
        try:
            yield
        finally:
            self.requests -= 1
            self.tokens -= num_tokens


class Instances:
    """Instances of one kind."""

    def __init__(self, urls: Sequence[str], *, rest: float, clock: Callable[[], float]) -> None:
        self.all = tuple(Instance(url) for url in dict.fromkeys(url.rstrip("/") for url in urls))
        self._rest = rest
        self._clock = clock
        self._turn = 0

    def ordered(
        self, num_tokens: int | None = None, held: Mapping[str, int] | None = None
    ) -> list[Instance]:
        """Those that may be asked, the best first; in turn where a prompt's length is not known.

        `held` says how many of the prompt's tokens each instance holds.
        """
        turn, self._turn = self._turn, (self._turn + 1) % max(1, len(self.all))
        closed = [each for each in self.all[turn:] + self.all[:turn] if not each.is_open]
        if num_tokens is None or held is None:
            return closed
        return sorted(closed, key=lambda each: num_tokens - held.get(each.url, 0) + each.tokens)

    def idlest(self) -> Instance | None:
        """The one with the fewest requests of those that may be asked. Turns stay as they are."""
        closed = (each for each in self.all if not each.is_open)
        return min(closed, key=lambda each: each.requests, default=None)

    def last_resort(self) -> list[Instance]:
        """All of them, for when none may be asked: those that failed longest ago first."""
        return sorted(self.all, key=lambda each: each.open_until or 0.0)

    def failed(self, instance: Instance, *, at_once: bool) -> None:
        """It did not answer, or (unless `at_once`) answered that it is at fault."""
        instance.faults += FAULTS_TO_OPEN if at_once else 1
        if instance.faults >= FAULTS_TO_OPEN:
            rest = self._rest * 2 ** min(instance.times_opened, MOST_DOUBLINGS)
            instance.times_opened += 1
            instance.open_until = self._clock() + rest
            instance.faults = 0

    def works(self, instance: Instance) -> None:
        """It has answered a request."""
        instance.faults = instance.times_opened = 0
        instance.open_until = None

    def healthy(self, instance: Instance) -> None:
        """It is healthy again. If it fails once more, it is left out for longer."""
        instance.open_until = None

    def to_probe(self) -> list[Instance]:
        """Those that have been left out long enough and are not being probed yet."""
        now = self._clock()
        return [
            each
            for each in self.all
            if each.open_until is not None and each.open_until <= now and not each.is_probed
        ]
