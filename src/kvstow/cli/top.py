"""`kvstow top`: tiers of the processes that have stores open, live."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstow.cli import options
from kvstow.cli.output import WIDTH, emit_json, human, table

SHOWS = "host, disk and remote tiers; transfers: kvstow peers, kvstow dash"

RATES = ("hits", "misses", "stored_bytes", "loaded_bytes", "evicted_rows", "failures")

LESS_WANTED = ("gone/s", "of", "pid", "rows", "failed", "idle")
"""Columns that are left out of a narrow terminal, one after the other."""

GAP = 3

Directories = Annotated[
    list[Path],
    typer.Argument(metavar="DIR", help="Stores, or directories of several.", show_default=False),
]
Every = Annotated[float, typer.Option("--every", min=0.1, metavar="SECONDS", help="Look again.")]
Once = Annotated[bool, typer.Option("--once", help="One look, after one interval, and end.")]


def top(
    directories: Directories, every: Every = 2.0, once: Once = False, json: options.Json = False
) -> None:
    """Show the tiers of stores live, by process.

    Rows, bytes, hits, rates, evictions, failures, and for how long a process has done nothing:
    the host, disk and remote tiers of processes that have a store on disk open. Of a remote store,
    rows and bytes are those that the process has written. Transfers are not among them: see
    `kvstow peers` and `kvstow dash`.
    """
    stores = [store for directory in directories for store in options.stores_in(directory)]
    before = _sample(stores)
    time.sleep(every)
    if once or json:
        lines = _lines(before, _sample(stores))
        emit_json({"tiers": lines}) if json else typer.echo(_screen(lines, _width()))
        return
    _watch(stores, before, every)


def _watch(directories: list[Path], before: "_Sample", every: float) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                now = _sample(directories)
                shown = _screen(_lines(before, now), console.width)
                live.update(Text(shown, no_wrap=True), refresh=True)
                before = now
                time.sleep(every)
        except KeyboardInterrupt:
            return


class _Sample:
    """Counts of every tier of every living process, and when they were told. A process tells them
    within a second of what it does, and nothing while it does nothing."""

    def __init__(self) -> None:
        self.at = time.time()
        self.tiers: dict[tuple[str, int, str], tuple[float, dict[str, Any]]] = {}


def _sample(directories: list[Path]) -> _Sample:
    from kvstow.offload.disk.inspect import survey

    sample = _Sample()
    for directory in directories:
        found = survey(directory)
        on_disk = {"rows": found["rows"], "nbytes": found["data_bytes"]}
        for owner in found["owners"]:
            told: list[dict[str, Any]] = owner["tiers"] if owner["alive"] else []
            for tier in told:
                if tier["tier"] == "disk":  # all processes share it; what one told may be old
                    tier |= on_disk
                sample.tiers[str(directory), owner["pid"], tier["tier"]] = owner["beat"], tier
    return sample


def _lines(before: _Sample, now: _Sample) -> list[dict[str, Any]]:
    from kvstow.offload.disk.tier import BEAT_SECONDS

    lines: list[dict[str, Any]] = []
    between = max(now.at - before.at, BEAT_SECONDS)
    for name, (beat, tier) in sorted(now.tiers.items()):
        then, old = before.tiers.get(name, (beat, tier))
        seconds = min(beat - then, between)  # one that was idle has not told for longer
        rates = {
            f"{key}_per_s": (tier[key] - old[key]) / seconds if seconds > 0 else 0.0
            for key in RATES
        }
        asked = tier["hits"] + tier["misses"]
        hit_rate = tier["hits"] / asked if asked else None
        idle = max(0.0, now.at - beat)
        about = {"store": name[0], "pid": name[1], **tier, "hit_rate": hit_rate, **rates}
        lines.append({**about, "idle_seconds": idle})
    return lines


def _width() -> int:
    """Columns of the terminal; 80 where there is none and COLUMNS says nothing."""
    from shutil import get_terminal_size

    return get_terminal_size((WIDTH, 24)).columns


def _screen(lines: list[dict[str, Any]], width: int) -> str:
    """The table, and below it what it is a table of, where there is room."""
    return _shown(lines, width) + (f"\n\n{SHOWS}" if len(SHOWS) <= width else "")


def _shown(lines: list[dict[str, Any]], width: int) -> str:
    if not lines:
        return "no running process has published its tiers here yet"
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "store": lambda line: Path(line["store"]).name,
        "pid": lambda line: str(line["pid"]),
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
    cells = {name: [of(line) for line in lines] for name, of in columns.items()}
    for name in LESS_WANTED:
        widths = [max(map(len, (name, *column))) for name, column in cells.items()]
        if sum(widths) + GAP * (len(widths) - 1) > width:
            del cells[name]
    return table(list(cells), zip(*cells.values(), strict=True), width=width)


def _duration(seconds: float) -> str:
    """In the largest unit of which there is one; nothing where figures are as new as can be."""
    if seconds < 2:
        return "–"
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    unit, length = next(each for each in units if seconds >= each[1])
    return f"{seconds // length:.0f} {unit}"
