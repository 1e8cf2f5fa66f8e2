"""What the connector counts: one name for each, here and, behind a prefix, on vLLM's /metrics.

A count with a label is called by its name, a space, and the label's value: `pulls accepted`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from prometheus_client.metrics_core import Metric

PREFIX = "kvstow_vllm_"

PULLS = "pulls"
PULL_PATHS = "pull_paths"
EARLY_PULLS = "early_pulls"
PULL_SECONDS = "pull_seconds"
PULL_DESCRIPTORS = "pull_descriptors"
PULLED_BYTES = "pulled_bytes"
PULLED_TOKENS = "pulled_tokens"
HELD_BLOCKS = "held_blocks"
RELEASED_BLOCKS = "released_blocks"
OFFERED_REQUESTS = "offered_requests"
NOT_OFFERED_REQUESTS = "not_offered_requests"
REFUSED_REQUESTS = "refused_requests"
LEASE_ENDS = "lease_ends"
PEER_QUESTIONS = "peer_questions"
PEER_TICKETS = "peer_tickets"
STORED_ROWS = "stored_rows"
NOT_STORED_ROWS = "not_stored_rows"
DROPPED_ROWS = "dropped_rows"
STORE_FAILURES = "store_failures"
LOAD_SECONDS = "load_seconds"
RESTORED_TOKENS = "restored_tokens"
RESTORE_FAILURES = "restore_failures"
DAMAGED_ROWS = "damaged_rows"
NOT_NOTED_PROMPTS = "not_noted_prompts"
HINTS = "hints"
REMOTE_STORED_ROWS = "remote_stored_rows"
REMOTE_MISSED_ROWS = "remote_missed_rows"
REMOTE_DROPPED_ROWS = "remote_dropped_rows"


@dataclass(frozen=True, slots=True)
class VllmMetric:
    """A metric on vLLM's own /metrics, with a label of its own or none."""

    name: str
    text: str
    label: str = ""

    @property
    def family(self) -> str:
        """Its name in Prometheus, without `_total`."""
        return PREFIX + self.name

    @property
    def labels(self) -> list[str]:
        """Names of its own labels, beside vLLM's."""
        return [self.label] if self.label else []


VLLM_COUNTERS = (
    VllmMetric(PULL_DESCRIPTORS, "Descriptors of accepted pulls"),
    VllmMetric(PULLED_BYTES, "Bytes of accepted pulls"),
    VllmMetric(PULLED_TOKENS, "Tokens of accepted pulls"),
    VllmMetric(PULLS, "Pulls that ended, by outcome", "outcome"),
    VllmMetric(PULL_PATHS, "Producers of accepted pulls: mapped, or the reason why not", "path"),
    VllmMetric(EARLY_PULLS, "Pulls for requests that were not planned yet, by outcome", "outcome"),
    VllmMetric(HELD_BLOCKS, "Blocks held because a failed pull might still write to them"),
    VllmMetric(RELEASED_BLOCKS, "Held blocks that were released"),
    VllmMetric(OFFERED_REQUESTS, "Requests that got tickets"),
    VllmMetric(NOT_OFFERED_REQUESTS, "Requests that got no ticket"),
    VllmMetric(REFUSED_REQUESTS, "Requests whose tickets were refused"),
    VllmMetric(LEASE_ENDS, "Leases that ended, by reason", "reason"),
    VllmMetric(PEER_QUESTIONS, "Requests whose prefix peers were asked for"),
    VllmMetric(PEER_TICKETS, "Requests whose prefix a peer had"),
    VllmMetric(STORED_ROWS, "Rows stored in host memory"),
    VllmMetric(NOT_STORED_ROWS, "Rows not stored for lack of time or room"),
    VllmMetric(DROPPED_ROWS, "Rows kept in host memory only, the queue to the next tier full"),
    VllmMetric(STORE_FAILURES, "Failed attempts to store rows"),
    VllmMetric(RESTORED_TOKENS, "Tokens loaded from tiers"),
    VllmMetric(RESTORE_FAILURES, "Failed loads; their tokens were computed"),
    VllmMetric(DAMAGED_ROWS, "Rows found damaged in host memory"),
    VllmMetric(NOT_NOTED_PROMPTS, "Prompts that the journal missed"),
    VllmMetric(HINTS, "KV hints of requests, by action", "action"),
    VllmMetric(REMOTE_STORED_ROWS, "Rows written to a remote store"),
    VllmMetric(REMOTE_MISSED_ROWS, "Rows not read from a remote store, by reason", "reason"),
    VllmMetric(REMOTE_DROPPED_ROWS, "Rows not written to a remote store, by reason", "reason"),
)

VLLM_HISTOGRAMS = (
    VllmMetric(PULL_SECONDS, "Seconds from pull to acceptance"),
    VllmMetric(LOAD_SECONDS, "Seconds from order to end of loads from tiers"),
)
"""Durations that the connector notes, one by one."""

SECONDS = {each.name for each in VLLM_HISTOGRAMS}

VLLM_INFO = VllmMetric("config_info", "What the connector was started with", "option")


class EngineCounts(Counter[str]):
    """What happened, by name, and how long it took, since it was last looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    def take(self) -> dict[str, Any]:
        """All of it, told once: a number for a count, a list for durations."""
        taken = {name: count for name, count in self.items() if count} | self.seconds
        self.clear()
        self.seconds.clear()
        return taken


def vllm_counts(families: Iterable[Metric]) -> dict[str, float]:
    """What the connectors of all engines have counted, and the sums of durations, by name."""
    labels = {each.family + "_total": each.label for each in VLLM_COUNTERS}
    labels |= {each.family + "_sum": "" for each in VLLM_HISTOGRAMS}
    counts: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples):
        if sample.name in labels and sample.value:
            name = sample.name.removeprefix(PREFIX).rpartition("_")[0]
            label = sample.labels.get(labels[sample.name])
            what = f"{name} {label}" if label else name
            counts[what] = counts.get(what, 0.0) + sample.value
    return counts
