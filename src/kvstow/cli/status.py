"""`kvstow status`: running agents and engines, their peers, tiers and counters."""

import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
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

UNMAPPED = {
    "node": "it is on another node",
    "user": "it is of another user",
    "memory": "its memory and ours cannot be shared",
    "process": "its process is not found from here",
    "option": "an option forbids it",
}
"""Why the memory of a peer is not mapped."""


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
    client, report = StatusClient(keys), StatusReport([])
    try:
        while True:
            before = {each.address: each for each in report.processes}
            report = StatusReport(
                [ProcessStatus.read(client, each, before.get(each)) for each in agents]
            )
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
    from kvstow.transfer.channel.address import check_dialled, find_agents

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
class ProcessStatus:
    """What one process said at a moment, or why it said nothing."""

    address: str
    at: float
    document: Mapping[str, Any]
    """An agent's status document, without its metrics; empty for a Prometheus endpoint."""
    metrics: Mapping[str, float]
    """By name and labels: `kvstow_transfers_total{outcome="accepted"}`."""
    error: str = ""
    before: "ProcessStatus | None" = None

    @staticmethod
    def read(
        client: "StatusClient", address: str, before: "ProcessStatus | None"
    ) -> "ProcessStatus":
        document: dict[str, Any] = {}
        try:
            if address.startswith("tcp://"):
                document = client.ask(address, seconds=SECONDS)
                metrics = _metrics(document.pop("metrics"))
            else:
                metrics = _metrics(_exposition(address))
        except (TransferError, OSError, ValueError) as error:
            return ProcessStatus(address, time.time(), {}, {}, error=_reason(error))
        return ProcessStatus(address, time.time(), document, metrics, before=before)

    def as_json(self) -> dict[str, Any]:
        if self.error:
            return {"address": self.address, "error": self.error}
        return {"address": self.address, **self.document, "metrics": self.metrics}

    def __str__(self) -> str:
        if self.error:
            return f"{self.address}: {self.error}"
        head = [] if self.document else [self.address]
        parts = [*_agent(self.document), *_tiers(self.metrics), *self._counters()]
        return "\n\n".join([*head, *(parts or [NOTHING])])

    def _counters(self) -> Iterator[str]:
        """Everything but tiers that is not zero; with rates, from the second look on."""
        before, columns = self.before, ["counter", "value", "per second"]
        rows = [
            [_short_name(name), _figure(name, value), self._rate(name)]
            for name, value in self.metrics.items()
            if value and not name.startswith("kvstow_tier_")
        ]
        shown = 2 if before is None else 3
        if rows:
            yield table(columns[:shown], [row[:shown] for row in rows])

    def _rate(self, name: str) -> str:
        """Counts per second since the last look."""
        if self.before is None or not name.partition("{")[0].endswith("_total"):
            return ""
        seconds = max(self.at - self.before.at, 1e-3)
        return _figure(name, (self.metrics[name] - self.before.metrics.get(name, 0.0)) / seconds)


@dataclass(frozen=True, slots=True)
class StatusReport:
    """What the processes behind all addresses said."""

    processes: Sequence[ProcessStatus]

    def as_json(self) -> list[dict[str, Any]]:
        return [each.as_json() for each in self.processes]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.processes))


# ── what processes say ────────────────────────────────────────────────────────────────


def _exposition(url: str) -> str:
    from urllib.request import urlopen

    with urlopen(url, timeout=SECONDS) as answer:
        return answer.read(MAX_METRICS_BYTES).decode()


def _metrics(exposition: str) -> dict[str, float]:
    """kvstow's own counters and gauges; of a histogram, its sum and its count."""
    from prometheus_client.parser import text_string_to_metric_families

    metrics: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for name, labels, value, *_ in family.samples:
            if name.startswith("kvstow_") and not name.endswith(("_bucket", "_created")):
                inside = ",".join(f'{label}="{text}"' for label, text in labels.items())
                metrics[f"{name}{{{inside}}}" if inside else name] = value
    return metrics


def _reason(error: Exception) -> str:
    """What went wrong; of a server that cannot be reached, what the system says of it."""
    reason = getattr(error, "reason", None)
    return (reason.strerror or str(reason)) if isinstance(reason, OSError) else str(error)


# ── text ──────────────────────────────────────────────────────────────────────────────


def _agent(document: Mapping[str, Any]) -> Iterator[str]:
    """An agent in a sentence, a table of those it talks to, and why they had no ticket for it."""
    if not document:
        return
    yield (
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
    if rows:
        yield table(("peer", "state", "direction", "GB/s", "moved"), rows, num_left=3)
    for peer in document["peers"]:
        if peer["unmapped"]:
            why = UNMAPPED.get(peer["unmapped"], peer["unmapped"])
            yield f"{peer['name']} is not mapped: {why}"
        if peer["misses"]:
            requests = plural(sum(peer["misses"].values()), "request")
            yield f"{peer['name']} had no ticket for {requests}: {_reasons(peer['misses'])}"


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


def _tiers(metrics: Mapping[str, float]) -> Iterator[str]:
    """A line for each tier of the process."""
    from kvstow.offload.metrics import TIER_COUNTS, TIER_GAUGES, tier_metric

    names = {f"{tier_metric(fact)}_total": fact for fact in TIER_COUNTS}
    names |= {tier_metric(fact): fact for fact in TIER_GAUGES}
    tiers: dict[str, dict[str, int]] = {}
    for key, value in metrics.items():
        fact = names.get(key.partition("{")[0])
        if fact is not None:
            (name,) = re.findall(r'\btier="([^"]*)"', key)
            tier = tiers.setdefault(name, dict.fromkeys(names.values(), 0))
            tier[fact] += int(value)
    rows = [
        (
            name,
            f"{tier['rows']:,}",
            human(tier["nbytes"]),
            human(tier["capacity"]) if tier["capacity"] else "–",
            f"{tier['hits'] / looks:.0%}" if (looks := tier["hits"] + tier["misses"]) else "–",
            human(tier["stored_bytes"]),
            human(tier["loaded_bytes"]),
            f"{tier['evicted_rows']:,}",
            f"{tier['failures']:,}",
        )
        for name, tier in tiers.items()
    ]
    columns = ("tier", "rows", "bytes", "of", "hits", "stored", "loaded", "evicted", "failed")
    if rows:
        yield table(columns, rows)


def _short_name(metric: str) -> str:
    """`transfers accepted`, `transfer bytes read`: the name's words and the labels' values."""
    words = metric.partition("{")[0].removeprefix("kvstow_").removesuffix("_total").split("_")
    return " ".join([*words, *re.findall(r'="([^"]*)"', metric)])


def _figure(metric: str, value: float) -> str:
    is_bytes = metric.partition("{")[0].removesuffix("_total").endswith("_bytes")
    return human(round(value)) if is_bytes else f"{value:,.6g}"
