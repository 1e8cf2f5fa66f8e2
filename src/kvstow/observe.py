"""What happens, as numbers for Prometheus and as events for people.

Nothing here is global: whoever wants to watch makes a `Telemetry` and hands it to the
parts it wants to watch. Each part has its own set of metrics, made from that telemetry's
registry, so two agents in one process never share a counter unless they share a telemetry.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvstow.errors import StoreError

Fact = str | int | float | bool
"""What an event may carry: plain values, never keys, never contents of rows."""

DURATIONS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
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
            self._listeners = tuple(known for known in self._listeners if known != listener)

    def recent(self, part: str | None = None) -> tuple[Event, ...]:
        """The latest events, oldest first, of one part or of all."""
        with self._lock:
            return tuple(event for event in self._recent if part in (None, event.part))


@dataclass(frozen=True, slots=True)
class Telemetry:
    """A registry of metrics and a stream of events, for one or several parts."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    events: Events = field(default_factory=Events)

    def exposition(self) -> bytes:
        """All metrics in the text format that Prometheus reads."""
        return generate_latest(self.registry)


class TransferMetrics:
    """Numbers of one transfer agent."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.transfers = Counter(
            "kvstow_transfers",
            "Pulls that ended, by outcome (accepted, or the kind of fault)",
            ["outcome"],
            registry=registry,
        )
        self.bytes = Counter(
            "kvstow_transfer_bytes", "Bytes pulled", ["direction"], registry=registry
        )
        self.served_bytes = Counter(
            "kvstow_transfer_served_bytes",
            "Bytes that others pulled from here",
            ["direction"],
            registry=registry,
        )
        self.descriptors = Counter(
            "kvstow_transfer_descriptors",
            "Descriptors handed to the transport",
            ["direction"],
            registry=registry,
        )
        self.seconds = Histogram(
            "kvstow_transfer_seconds",
            "From pull to acceptance",
            registry=registry,
            buckets=DURATIONS,
        )
        self.messages = Counter(
            "kvstow_transfer_messages",
            "Side channel messages that were dropped, by reason",
            ["reason"],
            registry=registry,
        )
        self.leases = Gauge("kvstow_transfer_leases", "Leases running", registry=registry)
        self.lease_ends = Counter(
            "kvstow_transfer_lease_ends",
            "Leases that ended, by reason",
            ["reason"],
            registry=registry,
        )
        self.quarantined = Gauge(
            "kvstow_transfer_quarantined_rows",
            "Rows of failed transfers that something may still write to",
            registry=registry,
        )
        self.peers = Gauge("kvstow_transfer_peers", "Peers connected", registry=registry)


@dataclass(frozen=True, slots=True)
class VllmCounter:
    """A counter on vLLM's own /metrics; vLLM makes it, in its own registry.

    `what` is how the connector calls it inside. With a `label` it is a beginning, and the rest is
    the label's value.
    """

    name: str
    text: str
    what: str
    label: str = ""

    @property
    def family(self) -> str:
        """Its name in Prometheus, without `_total`."""
        return f"kvstow_vllm_{self.name}"

    @property
    def labels(self) -> list[str]:
        """Names of its own labels, beside vLLM's."""
        return [self.label] if self.label else []

    def value_in(self, what: str) -> str | None:
        """The label's value; "" where there is no label, None where another counter is meant."""
        if what == self.what:
            return ""
        return what.removeprefix(self.what) if self.label and what.startswith(self.what) else None


VLLM_COUNTERS = (
    VllmCounter("pull_seconds", "Seconds from pull to acceptance", "pull seconds"),
    VllmCounter("pull_descriptors", "Descriptors of accepted pulls", "descriptors"),
    VllmCounter("pulled_bytes", "Bytes of accepted pulls", "pulled bytes"),
    VllmCounter("pulled_tokens", "Tokens of accepted pulls", "pulled tokens"),
    VllmCounter("pulls", "Pulls that ended: accepted, or the kind of fault", "pull ", "outcome"),
    VllmCounter(
        "held_blocks", "Blocks of failed pulls that a peer might still write to", "held blocks"
    ),
    VllmCounter(
        "released_blocks", "Such blocks to which nobody writes any more", "released blocks"
    ),
    VllmCounter("offered_requests", "Requests whose answers carry tickets", "offered"),
    VllmCounter("not_offered_requests", "Requests that asked for tickets in vain", "not offered"),
    VllmCounter("refused_requests", "Requests whose tickets were refused", "refused"),
    VllmCounter("lease_ends", "Leases that ended, by reason", "lease ", "reason"),
    VllmCounter("peer_questions", "Requests for which peers were asked", "peers asked"),
    VllmCounter("peer_tickets", "Requests for which a peer had something", "peers had it"),
    VllmCounter("stored_rows", "Rows stored in host memory", "stored rows"),
    VllmCounter("not_stored_rows", "Rows for which there was no time or room", "not stored rows"),
    VllmCounter(
        "dropped_rows",
        "Rows that went no further than host memory: too many waited for the tier below",
        "dropped rows",
    ),
    VllmCounter("store_failures", "Jobs of rows that could not be stored", "store failed"),
    VllmCounter("restored_tokens", "Tokens loaded from tiers", "restored tokens"),
    VllmCounter("restore_failures", "Loads that failed, and were computed", "restore failed"),
    VllmCounter("damaged_rows", "Rows that were damaged in host memory", "damaged rows"),
    VllmCounter("not_noted_prompts", "Prompts that the journal missed", "not noted prompts"),
    VllmCounter("remote_stored_rows", "Rows written to a remote store", "remote stored rows"),
    VllmCounter(
        "remote_missed_rows",
        "Rows that a remote store did not give, by reason",
        "remote missed_rows: ",
        "reason",
    ),
    VllmCounter(
        "remote_dropped_rows",
        "Rows that a remote store was not given, by reason",
        "remote dropped_rows: ",
        "reason",
    ),
)
"""What the connector counts. Exact names come before beginnings that they share."""


def vllm_counter(what: str) -> tuple[VllmCounter, str]:
    """The counter of what the connector calls so, and its label's value; KeyError for none."""
    for counter in VLLM_COUNTERS:
        value = counter.value_in(what)
        if value is not None:
            return counter, value
    raise KeyError(what)


def vllm_counts(families: Iterable[Metric]) -> dict[str, float]:
    """What the connectors of all engines have counted, by what they call it."""
    known = {counter.family + "_total": counter for counter in VLLM_COUNTERS}
    found: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples):
        counter = known.get(sample.name)
        if counter is not None and sample.value:
            what = counter.what + sample.labels.get(counter.label, "")
            found[what] = found.get(what, 0.0) + sample.value
    return found


class RouterMetrics:
    """Numbers of the router."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "kvstow_router_requests",
            "Requests by what became of them: tickets, plain (decode computed all), failed",
            ["outcome"],
            registry=registry,
        )
        self.faults = Counter(
            "kvstow_router_faults",
            "Attempts that failed, by kind of instance",
            ["kind"],
            registry=registry,
        )
        self.tokens = Counter(
            "kvstow_router_prompt_tokens",
            "Tokens of prompts by prefix: held where the request was sent, or not",
            ["where"],
            registry=registry,
        )
        self.answers = Counter(
            "kvstow_router_answers",
            "Requests that an instance has answered, by what it was asked for and its URL",
            ["kind", "url"],
            registry=registry,
        )
        self.prefix_blocks = Gauge(
            "kvstow_router_prefix_blocks",
            "Blocks that an instance holds, as heard from its events",
            ["url", "tier"],
            registry=registry,
        )
        self.left_out = Gauge(
            "kvstow_router_left_out",
            "Instances that failed and are not asked",
            registry=registry,
        )


TIER_COUNTS = {
    "hits": "Rows asked for that were there",
    "misses": "Rows asked for that were not",
    "stored_rows": "Rows stored",
    "stored_bytes": "Bytes stored",
    "loaded_rows": "Rows loaded",
    "loaded_bytes": "Bytes loaded",
    "evicted_rows": "Rows given up for others",
    "failures": "Rows that could not be written, or were not what they should have been",
}
TIER_GAUGES = {
    "rows": "Rows kept",
    "nbytes": "Bytes set aside for rows",
    "capacity": "The most bytes there may be",
}
_NAMED_BY_UNIT = {"nbytes": "bytes", "capacity": "capacity_bytes"}


def tier_metric(fact: str) -> str:
    """The metric of a tier's fact, by Prometheus' rules: the unit at its end."""
    return f"kvstow_tier_{_NAMED_BY_UNIT.get(fact, fact)}"


TIER_REASONS = {
    "missed_rows": "Rows that a remote store did not give, by reason",
    "dropped_rows": "Rows that a remote store was not given, by reason",
}

Reasons = Mapping[str, Mapping[str, float]]
"""Numbers by reason, under the keys of TIER_REASONS."""

_NO_REASONS: Reasons = {}


class TierMetrics(Collector):
    """Numbers of offload tiers, read from them whenever somebody asks. One that cannot say how it
    is doing is left out."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tiers: dict[str, Callable[[], Mapping[str, float]]] = {}
        self._reasons: dict[str, Callable[[], Reasons]] = {}
        registry.register(self)

    def watch(
        self,
        tier: str,
        facts: Callable[[], Mapping[str, float]],
        reasons: Callable[[], Reasons] = lambda: _NO_REASONS,
    ) -> None:
        """Show a tier under that name; `facts` has the keys of TIER_COUNTS and TIER_GAUGES,
        `reasons` some of TIER_REASONS."""
        self._tiers[tier], self._reasons[tier] = facts, reasons

    def collect(self) -> Iterable[Metric]:
        known: dict[str, Mapping[str, float]] = {}
        for tier, facts in self._tiers.items():
            with suppress(StoreError):  # closed, or it cannot be asked now: others can
                known[tier] = facts()
        for name, text in TIER_COUNTS.items():
            counter = CounterMetricFamily(tier_metric(name), text, labels=["tier"])
            for tier, facts in known.items():
                counter.add_metric([tier], facts[name])
            yield counter
        told = {tier: reasons() for tier, reasons in self._reasons.items()}
        for name, text in TIER_REASONS.items():
            counter = CounterMetricFamily(tier_metric(name), text, labels=["tier", "reason"])
            for tier, reasons in told.items():
                for reason, count in reasons.get(name, {}).items():
                    counter.add_metric([tier, reason], count)
            yield counter
        for name, text in TIER_GAUGES.items():
            gauge = GaugeMetricFamily(tier_metric(name), text, labels=["tier"])
            for tier, facts in known.items():
                gauge.add_metric([tier], facts[name])
            yield gauge
