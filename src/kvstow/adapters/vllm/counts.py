"""What the connector counts, and what that is called on vLLM's own /metrics."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from prometheus_client.metrics_core import Metric


class EngineCounts(Counter[str]):
    """What happened, by name, and how long it took, since it was last looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    def take(self) -> dict[str, Any]:
        """All of it, told once: a number for a count, a list for durations."""
        taken = dict[str, Any](self) | self.seconds
        self.clear()
        self.seconds.clear()
        return taken


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
    VllmCounter("pull_descriptors", "Descriptors of accepted pulls", "descriptors"),
    VllmCounter("pulled_bytes", "Bytes of accepted pulls", "pulled bytes"),
    VllmCounter("pulled_tokens", "Tokens of accepted pulls", "pulled tokens"),
    VllmCounter("pulls", "Pulls that ended, by outcome", "pull ", "outcome"),
    VllmCounter(
        "held_blocks", "Blocks held because a failed pull might still write to them", "held blocks"
    ),
    VllmCounter("released_blocks", "Held blocks that were released", "released blocks"),
    VllmCounter("offered_requests", "Requests that got tickets", "offered"),
    VllmCounter("not_offered_requests", "Requests that got no ticket", "not offered"),
    VllmCounter("refused_requests", "Requests whose tickets were refused", "refused"),
    VllmCounter("lease_ends", "Leases that ended, by reason", "lease ", "reason"),
    VllmCounter("peer_questions", "Requests whose prefix peers were asked for", "peers asked"),
    VllmCounter("peer_tickets", "Requests whose prefix a peer had", "peers had it"),
    VllmCounter("stored_rows", "Rows stored in host memory", "stored rows"),
    VllmCounter("not_stored_rows", "Rows not stored for lack of time or room", "not stored rows"),
    VllmCounter(
        "dropped_rows",
        "Rows kept in host memory only, the queue to the next tier full",
        "dropped rows",
    ),
    VllmCounter("store_failures", "Failed attempts to store rows", "store failed"),
    VllmCounter("restored_tokens", "Tokens loaded from tiers", "restored tokens"),
    VllmCounter("restore_failures", "Failed loads; their tokens were computed", "restore failed"),
    VllmCounter("damaged_rows", "Rows found damaged in host memory", "damaged rows"),
    VllmCounter("not_noted_prompts", "Prompts that the journal missed", "not noted prompts"),
    VllmCounter("remote_stored_rows", "Rows written to a remote store", "remote stored rows"),
    VllmCounter(
        "remote_missed_rows",
        "Rows not read from a remote store, by reason",
        "remote missed_rows: ",
        "reason",
    ),
    VllmCounter(
        "remote_dropped_rows",
        "Rows not written to a remote store, by reason",
        "remote dropped_rows: ",
        "reason",
    ),
)
"""What the connector counts. Exact names come before beginnings that they share."""


VLLM_HISTOGRAMS = (
    VllmCounter("pull_seconds", "Seconds from pull to acceptance", "pull seconds"),
    VllmCounter("load_seconds", "Seconds from order to end of loads from tiers", "load seconds"),
)
"""Durations that the connector notes, one by one."""

VLLM_INFO = VllmCounter("config_info", "What the connector was started with", "", "option")


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
    seconds = {each.family + "_sum": each.what for each in VLLM_HISTOGRAMS}
    counts: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples):
        counter = known.get(sample.name)
        what = seconds.get(sample.name, "")
        if counter is not None:
            what = counter.what + sample.labels.get(counter.label, "")
        if what and sample.value:
            counts[what] = counts.get(what, 0.0) + sample.value
    return counts
