"""What the connector counts: one name for each, here and, behind a prefix, on vLLM's /metrics.

A count with a label is called by its name, a space, and the label's value: `pulls accepted`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from prometheus_client.metrics_core import Metric

PREFIX = "kvstow_vllm_"


class Count(StrEnum):
    """What is counted: its name, its text on /metrics, and a label of its own or none."""

    text: str
    label: str

    def __new__(cls, name: str, text: str, label: str = "") -> "Count":
        made = str.__new__(cls, name)
        made._value_, made.text, made.label = name, text, label
        return made

    @property
    def family(self) -> str:
        """Its name in Prometheus, without `_total`."""
        return PREFIX + self

    @property
    def labels(self) -> list[str]:
        """Names of its own labels, beside vLLM's."""
        return [self.label] if self.label else []

    PULL_DESCRIPTORS = "pull_descriptors", "Descriptors of accepted pulls"
    PULLED_BYTES = "pulled_bytes", "Bytes of accepted pulls"
    PULLED_TOKENS = "pulled_tokens", "Tokens of accepted pulls"
    PULLS = "pulls", "Pulls that ended, by outcome", "outcome"
    PULL_PATHS = "pull_paths", "Producers of accepted pulls: mapped, or the reason why not", "path"
    EARLY_PULLS = (
        "early_pulls",
        "Pulls before their requests were planned, by outcome",
        "outcome",
    )
    HELD_BLOCKS = "held_blocks", "Blocks held because a failed pull might still write to them"
    RELEASED_BLOCKS = "released_blocks", "Held blocks that were released"
    OFFERED_REQUESTS = "offered_requests", "Requests that got tickets"
    NOT_OFFERED_REQUESTS = "not_offered_requests", "Requests that got no ticket"
    REFUSED_REQUESTS = "refused_requests", "Requests whose tickets were refused"
    LEASE_ENDS = "lease_ends", "Leases that ended, by reason", "reason"
    PEER_QUESTIONS = "peer_questions", "Requests whose prefix was requested from peers"
    PEER_TICKETS = "peer_tickets", "Requests whose prefix a peer had"
    STORED_ROWS = "stored_rows", "Rows stored in host memory"
    NOT_STORED_ROWS = "not_stored_rows", "Rows not stored for lack of time or room"
    DROPPED_ROWS = (
        "dropped_rows",
        "Rows kept in host memory only, because the queue to the next tier was full",
    )
    STORE_FAILURES = "store_failures", "Failed attempts to store rows"
    RESTORED_TOKENS = "restored_tokens", "Tokens loaded from tiers"
    RESTORE_FAILURES = "restore_failures", "Failed loads; their tokens were computed"
    DAMAGED_ROWS = "damaged_rows", "Rows found damaged in host memory"
    NOT_NOTED_PROMPTS = "not_noted_prompts", "Prompts that the journal missed"
    HINTS = "hints", "KV hints of requests, by action", "action"
    REMOTE_STORED_ROWS = "remote_stored_rows", "Rows written to a remote store"
    REMOTE_MISSED_ROWS = (
        "remote_missed_rows",
        "Rows not read from a remote store, by reason",
        "reason",
    )
    REMOTE_DROPPED_ROWS = (
        "remote_dropped_rows",
        "Rows not written to a remote store, by reason",
        "reason",
    )
    PULL_SECONDS = "pull_seconds", "Seconds from pull to acceptance"
    LOAD_SECONDS = "load_seconds", "Seconds that loads from tiers took"
    CONFIG_INFO = "config_info", "Options that the connector was started with", "option"


VLLM_INFO = Count.CONFIG_INFO

VLLM_HISTOGRAMS = (Count.PULL_SECONDS, Count.LOAD_SECONDS)
"""Durations that the connector notes, one by one."""

VLLM_COUNTERS = tuple(each for each in Count if each not in (*VLLM_HISTOGRAMS, VLLM_INFO))


class EngineCounts(Counter[str]):
    """What happened, by name, and how long it took, since it was last looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    def take(self) -> dict[str, Any]:
        """All of it, told once: a number for a count, a list for durations."""
        taken: dict[str, Any] = {str(name): count for name, count in self.items() if count}
        taken |= {str(name): durations for name, durations in self.seconds.items()}
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
