"""Metrics for Prometheus, and events for people.

Nothing here is global: make a `Telemetry` and hand it to the parts to watch. Each part has a
`metrics` module of its own and counts in that telemetry's registry, so two agents in one process
share a counter only if they share a telemetry.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvstow.threads import broken_threads

Fact = str | int | float | bool
"""What an event may carry: plain values, never keys, never contents of rows."""

DURATIONS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
"""Bounds of a histogram's buckets, in seconds."""

RECENT_EVENTS = 1024


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in one part, with the facts that matter."""

    at: float
    part: str
    what: str
    facts: Mapping[str, Fact]

    def as_json(self) -> str:
        """One line: `at`, `part`, `what`, then the facts."""
        return json.dumps(
            {"at": round(self.at, 6), "part": self.part, "what": self.what, **self.facts}
        )


class Events:
    """The latest events, and whoever listens to them.

    A listener runs in the thread that emits; one that raises is removed and reported as
    an event, so that watching never breaks what is watched.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._recent: deque[Event] = deque(maxlen=RECENT_EVENTS)
        self._listeners: tuple[Callable[[Event], None], ...] = ()

    def emit(self, part: str, what: str, facts: Mapping[str, Fact] | None = None) -> None:
        """Remember an event and tell the listeners."""
        event = Event(self._clock(), part, what, dict(facts or {}))
        with self._lock:
            self._recent.append(event)
            listeners = self._listeners
        for listener in listeners:
            try:
                listener(event)
            except Exception as error:
                self.ignore(listener)
                self.emit("observe", "listener-failed", {"error": repr(error)})

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Call `listener` with every event from now on."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

    def ignore(self, listener: Callable[[Event], None]) -> None:
        """Stop calling `listener`."""
        with self._lock:
            self._listeners = tuple(each for each in self._listeners if each != listener)

    def recent(self, part: str | None = None) -> tuple[Event, ...]:
        """The latest events, oldest first, of one part or of all."""
        with self._lock:
            return tuple(event for event in self._recent if part in (None, event.part))


class BrokenThreads(Collector):
    """Guarded threads of the process that ended with an error, by name; nothing while all live."""

    def describe(self) -> Iterable[GaugeMetricFamily]:
        text = "Threads that ended with an error"
        return [GaugeMetricFamily("kvstow_broken_threads", text, labels=["thread"])]

    def collect(self) -> Iterable[Metric]:
        (gauge,) = self.describe()
        for name, count in broken_threads().items():
            gauge.add_metric([name], count)
        return [gauge] if gauge.samples else []


@dataclass(frozen=True, slots=True)
class Telemetry:
    """A registry of metrics and a stream of events, for one or several parts."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    events: Events = field(default_factory=Events)

    def __post_init__(self) -> None:
        self.registry.register(BrokenThreads())

    def exposition(self) -> bytes:
        """All metrics in the text format that Prometheus reads."""
        return generate_latest(self.registry)
