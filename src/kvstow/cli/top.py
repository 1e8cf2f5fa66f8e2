"""`kvstow top`: tiers and transfers of running processes, live."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstow.cli import options
from kvstow.cli.output import FAILED, WIDTH, emit_json, human, table
from kvstow.cli.peers import KeysFile, read_keys
from kvstow.cli.sources import Ask, Sources, places, reading, tiers_in, transfers_in

SHOWS = "peers of an agent: kvstow peers; all of it as a page: kvstow dash"

RATES = ("hits", "misses", "stored_bytes", "loaded_bytes", "evicted_rows", "failures")

TRANSFER_RATES = ("pulls", "pulled_bytes", "served_bytes")

LESS_WANTED = ("gone/s", "of", "pid", "rows", "failed", "idle")
"""Columns that are left out of a narrow terminal, one after the other."""

LESS_WANTED_OF_TRANSFERS = ("agent", "leases", "quarantined", "served", "pulled", "pulls")

GAP = 3

_Column = Callable[[dict[str, Any]], str]
"""What a line shows in a column."""

NOBODY = """no running process has told of its tiers here yet

hint: a process without a store on disk is found by the address of its agent
      (tcp://HOST:PORT, which vLLM logs at its start)
      or of its metrics (http://HOST:PORT/metrics)"""

Every = Annotated[
    float,
    typer.Option(
        "--every", min=0.1, max=options.MAX_WAIT, metavar="SECONDS", help="Refresh interval."
    ),
]
Once = Annotated[bool, typer.Option("--once", help="Print once and exit.")]


def top(
    sources: Sources,
    every: Every = 2.0,
    once: Once = False,
    keys_file: KeysFile = None,
    json: options.Json = False,
) -> None:
    """Show the tiers and transfers of running processes, live.

    Shows rows, bytes, hits, rates, evictions, failures, and how long a process has been idle.
    A store on disk knows the processes that have it open, and all their tiers. For a process
    without one, name its agent or its Prometheus endpoint, which also tell of its transfers. For a
    remote store, rows and bytes are those that the process has written. Exits with 1 if a source
    does not answer.
    """
    from kvstow.transfer.channel.status import Asker

    asked = [place for source in sources for place in places(source)]
    for place in asked:
        if "://" not in place:
            options.check_store(Path(place))
    asker = Asker(read_keys(keys_file))
    try:
        before = _sample(asked, asker.ask)
        time.sleep(every)
        if once or json:
            _show_once(before, _sample(asked, asker.ask), json=json)
        else:
            _watch(asked, asker.ask, before, every)
    finally:
        asker.close()


def _show_once(before: "_Sample", now: "_Sample", *, json: bool) -> None:
    if json:
        lines = _lines(before, now)
        moves = _transfers(before, now)
        emit_json({"tiers": lines, "transfers": moves, "errors": now.errors})
    else:
        typer.echo(_screen(before, now, _width()))
    if now.errors:
        raise typer.Exit(FAILED)


def _watch(asked: list[str], ask: Ask, before: "_Sample", every: float) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                now = _sample(asked, ask)
                shown = _screen(before, now, console.width)
                live.update(Text(shown, no_wrap=True), refresh=True)
                before = now
                time.sleep(every)
        except KeyboardInterrupt:
            return


class _Sample:
    """Counts of every tier of every living process, and when they were told.

    A process tells a store within a second of what it does, and nothing while it does nothing;
    one that is asked itself tells at once.
    """

    def __init__(self) -> None:
        self.at = time.time()
        self.tiers: dict[tuple[str, int, str], tuple[float, dict[str, Any]]] = {}
        """By store or address, process (0 where it is not known) and tier."""
        self.transfers: dict[str, tuple[float, dict[str, Any]]] = {}
        """By address."""
        self.errors: dict[str, str] = {}
        """Addresses that did not answer, and why."""
        self.without_any: list[str] = []

    @property
    def silent(self) -> list[str]:
        """Addresses of which nothing can be shown, each with the reason."""
        unanswered = [f"{address}: {why}" for address, why in self.errors.items()]
        nothing = "tells of no tiers and no transfers"
        return unanswered + [f"{address}: {nothing}" for address in self.without_any]


def _sample(asked: Iterable[str], ask: Ask) -> _Sample:
    sample = _Sample()
    for place in asked:
        if "://" in place:
            _add_process(sample, place, reading(ask, place))
        else:
            _add_store(sample, Path(place))
    return sample


def _add_store(sample: _Sample, directory: Path) -> None:
    """The tiers of all processes that have a store open, as they have told it."""
    from kvstow.offload.disk.inspect import survey

    found = survey(directory)
    on_disk = {"rows": found["rows"], "nbytes": found["data_bytes"]}
    for owner in found["owners"]:
        told: list[dict[str, Any]] = owner["tiers"] if owner["alive"] else []
        for tier in told:
            if tier["tier"] == "disk":  # all processes share it; what one told may be old
                tier |= on_disk
            sample.tiers[str(directory), owner["pid"], tier["tier"]] = owner["beat"], tier


def _add_process(sample: _Sample, address: str, said: dict[str, Any]) -> None:
    """Tiers and transfers of one process, which has answered itself, or not."""
    if "error" in said:
        sample.errors[address] = said["error"]
        return
    tiers = tiers_in(said["metrics"])
    for name, facts in tiers.items():
        sample.tiers[address, 0, name] = said["at"], {"tier": name, **facts}
    moved = transfers_in(said["metrics"])
    if moved is not None:
        agent = None if said["agent"] == address else said["agent"]
        sample.transfers[address] = said["at"], {"agent": agent, **moved}
    elif not tiers:
        sample.without_any.append(address)


def _lines(before: _Sample, now: _Sample) -> list[dict[str, Any]]:
    from kvstow.offload.disk.tier import BEAT_SECONDS

    lines: list[dict[str, Any]] = []
    between = max(now.at - before.at, BEAT_SECONDS)
    for name, (beat, tier) in sorted(now.tiers.items(), key=lambda item: item[0]):
        then, old = before.tiers.get(name, (beat, tier))
        seconds = min(beat - then, between)  # one that was idle has not told for longer
        rates = {
            f"{key}_per_s": (tier[key] - old[key]) / seconds if seconds > 0 else 0.0
            for key in RATES
        }
        asked = tier["hits"] + tier["misses"]
        hit_rate = tier["hits"] / asked if asked else None
        idle = max(0.0, now.at - beat)
        about = {"store": name[0], "pid": name[1] or None, **tier, "hit_rate": hit_rate, **rates}
        lines.append({**about, "idle_seconds": idle})
    return lines


def _transfers(before: _Sample, now: _Sample) -> list[dict[str, Any]]:
    """What each process moves; null for what its endpoint does not tell."""
    lines: list[dict[str, Any]] = []
    for address, (at, moved) in sorted(now.transfers.items()):
        then, old = before.transfers.get(address, (at, moved))
        rates = {
            f"{fact}_per_s": None
            if moved[fact] is None
            else _rate(moved[fact], old[fact], at - then)
            for fact in TRANSFER_RATES
        }
        lines.append({"address": address, **moved, **rates})
    return lines


def _rate(now: float, before: float, seconds: float) -> float:
    return (now - before) / seconds if seconds > 0 else 0.0


def _width() -> int:
    """Columns of the terminal; 80 where there is none and COLUMNS says nothing."""
    from shutil import get_terminal_size

    return get_terminal_size((WIDTH, 24)).columns


def _screen(before: _Sample, now: _Sample, width: int) -> str:
    """The tables, below them what could not be shown, and where there is more if that fits."""
    tiers, transfers = _lines(before, now), _transfers(before, now)
    parts = [_shown(tiers, width)] if tiers else []
    parts += [_shown_transfers(transfers, width)] if transfers else []
    parts += now.silent
    return "\n\n".join((parts or [NOBODY]) + [SHOWS] * (len(SHOWS) <= width))


def _shown(lines: list[dict[str, Any]], width: int) -> str:
    columns: dict[str, _Column] = {
        "store": lambda line: _short(line["store"]),
        "pid": lambda line: str(line["pid"] or "–"),
        "tier": lambda line: line["tier"],
        "rows": lambda line: f"{line['rows']:,}",
        "bytes": lambda line: human(line["nbytes"]),
        "of": lambda line: human(line["capacity"]) if line["capacity"] else "–",
        "hits": lambda line: "–" if line["hit_rate"] is None else f"{line['hit_rate']:.0%}",
        "in/s": lambda line: human(round(line["stored_bytes_per_s"])),
        "out/s": lambda line: human(round(line["loaded_bytes_per_s"])),
        "gone/s": lambda line: f"{line['evicted_rows_per_s']:,.0f}",
        "failed": lambda line: f"{line['failures']:,}",
        "idle": lambda line: _duration(line["idle_seconds"]),
    }
    return _fitting(columns, lines, LESS_WANTED, width)


def _shown_transfers(lines: list[dict[str, Any]], width: int) -> str:
    columns: dict[str, _Column] = {
        "transfers of": lambda line: _short(line["address"]),
        "agent": lambda line: line["agent"] or "–",
        "pulls": lambda line: _count(line["pulls"]),
        "pulled": lambda line: _size(line["pulled_bytes"]),
        "in/s": lambda line: _size(line["pulled_bytes_per_s"]),
        "served": lambda line: _size(line["served_bytes"]),
        "out/s": lambda line: _size(line["served_bytes_per_s"]),
        "leases": lambda line: _count(line["leases"]),
        "quarantined": lambda line: _count(line["quarantined_rows"]),
        "failed": lambda line: _count(line["failures"]),
    }
    return _fitting(columns, lines, LESS_WANTED_OF_TRANSFERS, width)


def _fitting(
    columns: dict[str, _Column],
    lines: list[dict[str, Any]],
    less_wanted: Iterable[str],
    width: int,
) -> str:
    """The table, without as many of the less wanted columns as do not fit."""
    cells = {name: [of(line) for line in lines] for name, of in columns.items()}
    for name in less_wanted:
        widths = [max(map(len, (name, *column))) for name, column in cells.items()]
        if sum(widths) + GAP * (len(widths) - 1) > width:
            del cells[name]
    return table(list(cells), zip(*cells.values(), strict=True), width=width)


def _count(number: int | None) -> str:
    return "–" if number is None else f"{number:,}"


def _size(nbytes: float | None) -> str:
    return "–" if nbytes is None else human(round(nbytes))


def _short(store: str) -> str:
    """The last part of a path, the host and port of an address."""
    return store.partition("://")[2] or Path(store).name


def _duration(seconds: float) -> str:
    """In the largest unit of which there is one; nothing where figures are as new as can be."""
    if seconds < 2:
        return "–"
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    unit, length = next(each for each in units if seconds >= each[1])
    return f"{seconds // length:.0f} {unit}"
