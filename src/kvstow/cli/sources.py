"""Where figures of running processes are read: agents, Prometheus endpoints, stores on disk."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstow.cli import options
from kvstow.cli.output import MISUSED, refuse
from kvstow.errors import KvstowError

SCHEMES = ("tcp", "http", "https")
MAX_METRICS_BYTES = 8 << 20
ASK_SECONDS = 2.0

Reading = dict[str, Any]
"""What a source said, or `error`: why it said nothing."""

Ask = Callable[..., Reading]
"""`Asker.ask`: the status document of the agent at an address."""

Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE",
        help="Addresses of agents (tcp://127.0.0.1:PORT), Prometheus endpoints (http://…), "
        "directories of stores.",
        show_default=False,
    ),
]


def places(source: str) -> list[str]:
    """The address, or the directory; in place of one with several stores, these.

    Ends with 2 on what is neither an address nor a directory.
    """
    scheme, _, rest = source.partition("://")
    if rest and scheme == "tcp":
        options.check_agent(source)
    if rest and scheme in SCHEMES:
        return [source]
    if rest:
        refuse(
            f"{source}: {scheme}:// addresses are not supported\n\n"
            "hint: tcp://127.0.0.1:PORT for an agent, http://… for a Prometheus endpoint, or the "
            "directory of a store",
            code=MISUSED,
        )
    if not source or not Path(source).is_dir():
        refuse(
            f"{source or repr('')}: no such directory\n\nhint: name the directory of a store",
            code=MISUSED,
        )
    return [str(store) for store in options.stores_of_ranks(Path(source))] or [source]


def reading(ask: Ask, source: str) -> Reading:
    """What a source says, or why it says nothing."""
    try:
        if source.startswith(("http://", "https://")):
            return {"at": time.time(), **read_endpoint(source)}
        if Path(source).is_dir():
            return {"at": time.time(), **read_store(Path(source))}
        document = ask(source, seconds=ASK_SECONDS)
        return {
            "at": time.time(),
            **document,
            "metrics": samples(document["metrics"]),
            "events": [
                {name: _plain(fact) for name, fact in event.items()} for event in document["events"]
            ],
        }
    except (KvstowError, OSError, ValueError) as error:
        return {"at": time.time(), "error": _why(error).partition("\n")[0]}


def _why(error: Exception) -> str:
    """What went wrong; of a server that cannot be reached, what the system says of it."""
    reason = getattr(error, "reason", None)
    return (reason.strerror or str(reason)) if isinstance(reason, OSError) else str(error)


def _plain(fact: Any) -> Any:
    """Numbers that a browser would round are told as text."""
    return str(fact) if isinstance(fact, int) and abs(fact) > 1 << 53 else fact


def samples(exposition: str) -> list[Reading]:
    """Prometheus text as plain values: name, labels, value; histogram buckets left out."""
    from prometheus_client.parser import text_string_to_metric_families

    return [
        {"name": sample.name, "labels": dict(sample.labels), "value": sample.value}
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    ]


def tiers_in(metrics: list[Reading]) -> dict[str, dict[str, int]]:
    """Counts and usage of the tiers in a process's metrics, by the tier's name."""
    from kvstow.observe import TIER_COUNTS, TIER_GAUGES, tier_metric

    facts = {f"{tier_metric(fact)}_total": fact for fact in TIER_COUNTS}
    facts |= {tier_metric(fact): fact for fact in TIER_GAUGES}
    tiers: dict[str, dict[str, int]] = {}
    for sample in metrics:
        if sample["name"] in facts and "tier" in sample["labels"]:
            nothing = dict.fromkeys(facts.values(), 0)
            tier = tiers.setdefault(sample["labels"]["tier"], nothing)
            tier[facts[sample["name"]]] += int(sample["value"])
    return tiers


TRANSFER_METRICS = (
    {
        "pulls": "kvstow_transfers_total",
        "pulled_bytes": "kvstow_transfer_bytes_total",
        "served_bytes": "kvstow_transfer_served_bytes_total",
        "leases": "kvstow_transfer_leases",
        "quarantined_rows": "kvstow_transfer_quarantined_rows",
    },
    {"pulls": "kvstow_vllm_pulls_total", "pulled_bytes": "kvstow_vllm_pulled_bytes_total"},
)
"""Where an agent, and vLLM's own endpoint, which knows less, tell of transfers."""


def transfers_in(metrics: list[Reading]) -> dict[str, int | None] | None:
    """What a process has moved, `failures` being pulls that were not accepted; None where its
    metrics tell nothing of transfers, and for a fact that they do not tell."""
    names = {sample["name"] for sample in metrics}
    for told in TRANSFER_METRICS:
        if names.isdisjoint(told.values()):
            continue
        pulls = [sample for sample in metrics if sample["name"] == told["pulls"]]
        facts: dict[str, int | None] = {
            fact: _sum_of(metrics, told[fact]) if fact in told else None
            for fact in TRANSFER_METRICS[0]
        }
        facts["failures"] = sum(
            int(sample["value"]) for sample in pulls if sample["labels"]["outcome"] != "accepted"
        )
        return facts
    return None


def _sum_of(metrics: list[Reading], name: str) -> int:
    return sum(int(sample["value"]) for sample in metrics if sample["name"] == name)


def read_endpoint(address: str) -> Reading:
    """What a Prometheus endpoint says now."""
    from urllib.request import urlopen

    with urlopen(address, timeout=ASK_SECONDS) as answer:
        text = answer.read(MAX_METRICS_BYTES).decode()
    return {"agent": address, "address": address, "metrics": samples(text)}


def read_store(directory: Path) -> Reading:
    """What a store holds, and what the processes that have it open last told about their tiers."""
    from kvstow.observe import tier_metric
    from kvstow.offload.disk.inspect import survey

    found = survey(directory)
    return {
        "agent": str(directory),
        "model": found["model"],
        "store": {
            "rows": found["rows"],
            "data_bytes": found["data_bytes"],
            "capacity": found["capacity"],
            "groups": found["groups"],
            "processes": sum(owner["alive"] for owner in found["owners"]),
        },
        "metrics": [
            {
                "name": tier_metric(name),
                "labels": {"tier": f"{tier['tier']}, process {owner['pid']}"},
                "value": value,
            }
            for owner in found["owners"]
            if owner["alive"]
            for tier in owner["tiers"]
            for name, value in tier.items()
            if isinstance(value, int | float)
        ],
        "events": [
            {
                "at": event["time"],
                "part": "store",
                "what": event["what"],
                "rows": event["rows"],
                "times": event["count"],
            }
            for event in reversed(found["events"])
        ],
    }
