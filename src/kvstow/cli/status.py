"""`kvstow status`: running agents and engines, their peers, tiers and counters."""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstow.cli import options
from kvstow.cli.output import FAILED, Json, refuse, show, usage
from kvstow.errors import SpecError, TransferError
from kvstow.text import human, plural, table

if TYPE_CHECKING:
    from kvstow.transfer.channel.status import StatusClient

MAX_METRICS_BYTES = 8 << 20
SECONDS = 2.0
"""How long to wait for an answer."""

LONG_SILENCE = 5.0
NOTHING = "no peers, no tiers, nothing counted yet"

Addresses = Annotated[
    list[str],
    typer.Argument(
        metavar="ADDRESS",
        help="Agents (tcp://HOST:PORT, dns://NAME:PORT) or Prometheus endpoints "
        "(http://HOST:PORT/metrics).",
    ),
]
Watch = Annotated[
    float | None,
    typer.Option(min=0.1, max=86_400, metavar="SECONDS", help="Refresh every SECONDS, with rates."),
]
KeysFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Key file; needed if the agents use keys.")
]

MISSES = {
    "miss": "not held",
    "absent": "not held",
    "evicted": "no longer held",
    "step": "for shorter blocks than are held",
    "error": "failed",
    "identity": "for another computation",
    "states": "for recurrent states, which are not lent",
    "busy": "while too many others were served",
}
"""Why requests for a prefix got no ticket."""


def status(
    addresses: Addresses,
    watch: Watch = None,
    keys_file: KeysFile = None,
    json: Json = False,
) -> None:
    """Show the status of running agents and engines.

    An agent shows its peers, tiers and counters; a Prometheus endpoint, such as vLLM's, its tiers
    and counters. A vLLM worker logs the address of its agent at start. Exits with 1 if an address
    does not answer.
    """
    from kvstow.transfer.channel.curve import Keys
    from kvstow.transfer.channel.status import StatusClient

    with usage(SpecError):
        keys = Keys.read(keys_file) if keys_file is not None else None
    agents = [agent for address in addresses for agent in _agents(address)]
    client, report = StatusClient(keys), Status([])
    try:
        while True:
            report = Status.read(client, agents, before=report)
            if watch is not None and sys.stdout.isatty() and not json:
                typer.echo("\033[2J\033[H", nl=False)
            show(report, json=json)
            if watch is None:
                break
            time.sleep(watch)
    except KeyboardInterrupt:
        return
    finally:
        client.close()
    silent = sum(bool(each.error) for each in report.processes)
    if silent:
        refuse(f"{silent} of {len(agents)} addresses did not answer", code=FAILED)


def _agents(address: str) -> Sequence[str]:
    """The addresses behind an argument; ends with 2 if it is none."""
    from kvstow.transfer.channel.address import check_dialled
    from kvstow.transfer.discovery import find_agents

    scheme = address.partition("://")[0]
    if scheme in ("http", "https"):
        options.check_url(address)
        return (address,)
    with usage(TransferError):
        if scheme == "dns":
            return find_agents(address)
        check_dialled(address)
    return (address,)


# ── the report ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Reading:
    """One counter or gauge of a process."""

    name: str
    labels: Mapping[str, str]
    value: float

    @property
    def key(self) -> str:
        """`kvstow_transfers_total{outcome="accepted"}`."""
        labels = ",".join(f'{name}="{value}"' for name, value in self.labels.items())
        return f"{self.name}{{{labels}}}" if labels else self.name

    @property
    def is_bytes(self) -> bool:
        return self.name.removesuffix("_total").endswith("_bytes")


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """What one process said at a moment, or why it said nothing."""

    address: str
    at: float
    document: Mapping[str, Any]
    """An agent's status document, without its metrics; empty for a Prometheus endpoint."""
    samples: Sequence[Reading] = ()
    error: str = ""
    before: "ProcessStatus | None" = None

    @staticmethod
    def read(
        client: "StatusClient", address: str, before: "ProcessStatus | None"
    ) -> "ProcessStatus":
        try:
            if address.startswith("tcp://"):
                document = client.ask(address, seconds=SECONDS)
                text = document.pop("metrics")
            else:
                document, text = dict[str, Any](), _exposition(address)
            samples = _samples(text)
        except (TransferError, OSError, ValueError) as error:
            return ProcessStatus(address, time.time(), {}, error=_reason(error))
        return ProcessStatus(address, time.time(), document, samples, before=before)

    def as_json(self) -> dict[str, Any]:
        if self.error:
            return {"address": self.address, "error": self.error}
        metrics = {sample.key: sample.value for sample in self.samples}
        return {"address": self.address, **self.document, "metrics": metrics}

    def __str__(self) -> str:
        if self.error:
            return f"{self.address}: {self.error}"
        parts = [
            *_agent(self.document),
            *_tiers([sample for sample in self.samples if "tier" in sample.labels]),
            *_counters([(sample, self._rate(sample)) for sample in self.samples]),
        ]
        head = [] if self.document else [self.address]
        return "\n\n".join([*head, *(parts or [NOTHING])])

    def _rate(self, sample: Reading) -> float | None:
        """Counts per second since the last look; None at the first."""
        if self.before is None or not sample.name.endswith("_total"):
            return None
        values = {each.key: each.value for each in self.before.samples}
        seconds = max(self.at - self.before.at, 1e-3)
        return (sample.value - values.get(sample.key, 0.0)) / seconds


@dataclass(frozen=True, slots=True)
class Status:
    """The processes that were asked."""

    processes: Sequence[ProcessStatus]

    @staticmethod
    def read(
        client: "StatusClient", addresses: Iterable[str], before: "Status | None" = None
    ) -> "Status":
        last = {each.address: each for each in before.processes} if before else {}
        return Status([ProcessStatus.read(client, each, last.get(each)) for each in addresses])

    def as_json(self) -> list[dict[str, Any]]:
        return [each.as_json() for each in self.processes]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.processes))


# ── what processes say ────────────────────────────────────────────────────────────────


def _exposition(url: str) -> str:
    from urllib.request import urlopen

    with urlopen(url, timeout=SECONDS) as answer:
        return answer.read(MAX_METRICS_BYTES).decode()


def _samples(exposition: str) -> list[Reading]:
    """kvstow's own counters and gauges; of a histogram, its sum and its count."""
    from prometheus_client.parser import text_string_to_metric_families

    return [
        Reading(sample.name, dict(sample.labels), sample.value)
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
        if sample.name.startswith("kvstow_") and not sample.name.endswith(("_bucket", "_created"))
    ]


def _reason(error: Exception) -> str:
    """What went wrong; of a server that cannot be reached, what the system says of it."""
    reason = getattr(error, "reason", None)
    return (reason.strerror or str(reason)) if isinstance(reason, OSError) else str(error)


# ── text ──────────────────────────────────────────────────────────────────────────────


def _agent(document: Mapping[str, Any]) -> list[str]:
    """An agent in a sentence, and a table of those it talks to."""
    if not document:
        return []
    head = (
        f"{document['agent']} at {document['address']}: {document['model'] or 'a model'} in "
        f"{human(document['arena_bytes'])} of {document['memory']}, "
        f"{plural(document['leases'], 'lease')}, {plural(document['transfers'], 'transfer')}, "
        f"{plural(document['quarantined_rows'], 'row')} in quarantine{_lent(document)}"
    )
    rows = [
        (peer["name"], _health(peer), peer["direction"] or "–", _speed(peer), _moved(peer))
        for peer in document["peers"]
    ]
    rows += [
        (guest["name"], "reading" if guest["reading"] else "guest", "–", "–", _moved(guest))
        for guest in document["guests"]
    ]
    if not rows:
        return [head]
    peers = table(("peer", "state", "direction", "GB/s", "moved"), rows, num_left=3)
    return [head, peers, *_missed(document["peers"])]


def _missed(peers: Iterable[Mapping[str, Any]]) -> list[str]:
    """Why this agent's own requests for a prefix got no ticket, a line for each peer."""
    return [
        f"{peer['name']} had no ticket for {plural(sum(peer['misses'].values()), 'request')}: "
        f"{_reasons(peer['misses'])}"
        for peer in peers
        if peer["misses"]
    ]


def _reasons(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n:,} {MISSES.get(kind, kind)}" for kind, n in counts.items())


def _lent(document: Mapping[str, Any]) -> str:
    """What it lends, and how requests for it were answered."""
    blocks, answers = document["lent_blocks"], document["answers"]
    if not blocks and not answers:
        return ""
    misses = {kind: n for kind, n in answers.items() if kind != "ticket"}
    return (
        f", {plural(blocks, 'block')} lent, {answers.get('ticket', 0):,} of "
        f"{plural(sum(answers.values()), 'request')} answered with a ticket"
        + (f" ({_reasons(misses)})" if misses else "")
    )


def _health(peer: Mapping[str, Any]) -> str:
    """Its state, or how long it has been silent if that is long."""
    silent = peer["silent_seconds"]
    if peer["state"] == "ready" and silent is not None and silent > LONG_SILENCE:
        return f"silent for {silent:.0f} s"
    return peer["state"]


def _speed(peer: Mapping[str, Any]) -> str:
    """What it moved per second of moving; what was measured at first contact otherwise."""
    if peer["moved_seconds"]:
        return f"{peer['moved_bytes'] / peer['moved_seconds'] / 1e9:.2f}"
    measured = peer[f"{peer['direction']}_rate"] if peer["direction"] else None
    return f"({measured / 1e9:.2f})" if measured else "–"


def _moved(peer: Mapping[str, Any]) -> str:
    return human(peer["moved_bytes"])


def _tiers(samples: Sequence[Reading]) -> list[str]:
    """A line for each tier of the process."""
    from kvstow.offload.metrics import TIER_COUNTS, TIER_GAUGES, tier_metric

    facts = {f"{tier_metric(fact)}_total": fact for fact in TIER_COUNTS}
    facts |= {tier_metric(fact): fact for fact in TIER_GAUGES}
    tiers: dict[str, dict[str, int]] = {}
    for sample in samples:
        if sample.name in facts:
            tier = tiers.setdefault(sample.labels["tier"], dict.fromkeys(facts.values(), 0))
            tier[facts[sample.name]] += int(sample.value)
    rows = [
        (
            name,
            f"{tier['rows']:,}",
            human(tier["nbytes"]),
            human(tier["capacity"]) if tier["capacity"] else "–",
            _percent(tier["hits"], tier["hits"] + tier["misses"]),
            human(tier["stored_bytes"]),
            human(tier["loaded_bytes"]),
            f"{tier['evicted_rows']:,}",
            f"{tier['failures']:,}",
        )
        for name, tier in tiers.items()
    ]
    columns = ("tier", "rows", "bytes", "of", "hits", "stored", "loaded", "evicted", "failed")
    return [table(columns, rows)] if rows else []


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "–"


def _counters(samples: Sequence[tuple[Reading, float | None]]) -> list[str]:
    """Everything else that is not zero, with rates from the second look on."""
    rows = [
        (_short_name(sample), _figure(sample, sample.value), _figure(sample, rate))
        for sample, rate in samples
        if sample.value and not sample.name.startswith("kvstow_tier_")
    ]
    if not rows:
        return []
    if all(rate is None for _, rate in samples):
        return [table(("counter", "value"), [row[:2] for row in rows])]
    return [table(("counter", "value", "per second"), rows)]


def _short_name(sample: Reading) -> str:
    """`transfers accepted`, `transfer bytes read`: the name's words and the labels' values."""
    words = sample.name.removeprefix("kvstow_").removesuffix("_total").split("_")
    return " ".join([*words, *sample.labels.values()])


def _figure(sample: Reading, value: float | None) -> str:
    if value is None:
        return ""
    return human(round(value)) if sample.is_bytes else f"{value:,.6g}"
