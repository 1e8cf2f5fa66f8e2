"""Watching running systems: asked again and again, remembered for a while."""

import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from kvstow.errors import KvstowError

REMEMBERED = 600
"""Moments of which the totals are kept."""

MAX_METRICS_BYTES = 8 << 20
ASK_SECONDS = 2.0

Reading = dict[str, Any]


def samples(exposition: str) -> list[Reading]:
    """Prometheus text as plain values: name, labels, value; histogram buckets left out."""
    return [
        {"name": sample.name, "labels": dict(sample.labels), "value": sample.value}
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    ]


def read_endpoint(address: str) -> Reading:
    """What a Prometheus endpoint says now."""
    with urlopen(address, timeout=ASK_SECONDS) as answer:
        text = answer.read(MAX_METRICS_BYTES).decode()
    return {"agent": address, "address": address, "metrics": samples(text)}


def read_store(directory: Path) -> Reading:
    """What the processes that have a store open last told about their tiers."""
    from kvstow.offload.disk.inspect import survey

    found = survey(directory)
    return {
        "agent": str(directory),
        "address": f"{found['rows']:,} rows",
        "model": found["model"],
        "metrics": [
            {"name": f"kvstow_tier_{name}", "labels": {"tier": f"{tier['tier']}, process "
             f"{owner['pid']}"}, "value": value}
            for owner in found["owners"]
            if owner["alive"]
            for tier in owner["tiers"]
            for name, value in tier.items()
            if isinstance(value, int | float)
        ],
        "events": [
            {"at": event["time"], "part": "store", "what": event["what"], "rows": event["rows"]}
            for event in reversed(found["events"])
        ],
    }  # fmt: skip


class Watch:
    """Asks every source once a second, in a thread of its own.

    A source is an agent's address (`tcp://…`), a Prometheus endpoint (`http://…`) or the
    directory of a store.
    """

    def __init__(self, sources: Iterable[str], *, seconds: float = 1.0) -> None:
        self._sources = tuple(sources)
        self._seconds = seconds
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._latest: dict[str, Reading] = {}
        self._history: dict[str, deque[Reading]] = {
            source: deque(maxlen=REMEMBERED) for source in self._sources
        }
        self._thread = threading.Thread(target=self._run, name="kvstow-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=2 * ASK_SECONDS * max(1, len(self._sources)))

    def state(self, *, history: bool) -> Reading:
        """The latest reading of every source; with `history`, the totals so far."""
        with self._lock:
            return {
                "now": time.time(),
                "sources": [
                    {
                        "source": source,
                        **self._latest.get(source, {"error": "not asked yet"}),
                        "history": list(self._history[source]) if history else [],
                    }
                    for source in self._sources
                ],
            }

    def _run(self) -> None:
        from kvstow.transfer.channel.status import Asker

        asker = Asker()
        try:
            while not self._stop.is_set():
                for source in self._sources:
                    self._remember(source, _reading(asker.ask, source))
                self._stop.wait(self._seconds)
        finally:
            asker.close()

    def _remember(self, source: str, reading: Reading) -> None:
        with self._lock:
            self._latest[source] = reading
            if "metrics" in reading:
                self._history[source].append(totals(reading))


def _reading(ask: Any, source: str) -> Reading:
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
    except (KvstowError, URLError, OSError, ValueError) as error:
        return {"at": time.time(), "error": str(error).partition("\n")[0]}


def _plain(fact: Any) -> Any:
    """Numbers that a browser would round are told as text."""
    return str(fact) if isinstance(fact, int) and abs(fact) > 1 << 53 else fact


def totals(reading: Reading) -> Reading:
    """The few sums that are drawn over time."""

    def sum_of(name: str, *, without: str = "") -> float:
        return sum(
            sample["value"]
            for sample in reading["metrics"]
            if sample["name"] == name and (not without or without not in sample["labels"].values())
        )

    return {
        "at": reading["at"],
        "bytes": sum_of("kvstow_transfer_bytes_total"),
        "transfers": sum_of("kvstow_transfers_total"),
        "failures": sum_of("kvstow_transfers_total", without="accepted"),
        "leases": sum_of("kvstow_transfer_leases"),
        "quarantined": sum_of("kvstow_transfer_quarantined_rows"),
    }
