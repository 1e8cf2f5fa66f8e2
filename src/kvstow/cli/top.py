"""`kvstow top`: tiers of the processes that have stores open, live."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstow.cli import options
from kvstow.cli.output import WIDTH, emit_json, human, table

RATES = ("hits", "misses", "stored_bytes", "loaded_bytes", "evicted_rows", "failures")

Directories = Annotated[
    list[Path], typer.Argument(metavar="DIR…", help="Stores.", show_default=False)
]
Every = Annotated[float, typer.Option("--every", min=0.1, metavar="SECONDS", help="Look again.")]
Once = Annotated[bool, typer.Option("--once", help="One look, after one interval, and end.")]


def top(
    directories: Directories, every: Every = 2.0, once: Once = False, json: options.Json = False
) -> None:
    """Show the tiers of stores live, by process.

    Rows, bytes, hits, rates, evictions, failures.
    A process tells at most once a second what it has done, when it stores or loads.
    """
    before = _sample(directories)
    time.sleep(every)
    if once or json:
        lines = _lines(before, _sample(directories))
        emit_json({"tiers": lines}) if json else typer.echo(_shown(lines))
        return
    _watch(directories, before, every)


def _watch(directories: list[Path], before: "_Sample", every: float) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                now = _sample(directories)
                shown = _shown(_lines(before, now), width=console.width)
                live.update(Text(shown, no_wrap=True), refresh=True)
                before = now
                time.sleep(every)
        except KeyboardInterrupt:
            return


class _Sample:
    """Counts of every tier of every living process, and when they were told."""

    def __init__(self) -> None:
        self.tiers: dict[tuple[str, int, str], tuple[float, dict[str, Any]]] = {}


def _sample(directories: list[Path]) -> _Sample:
    from kvstow.offload.disk.inspect import survey

    sample = _Sample()
    for directory in directories:
        for owner in survey(directory)["owners"]:
            told: list[dict[str, Any]] = owner["tiers"] if owner["alive"] else []
            for tier in told:
                sample.tiers[str(directory), owner["pid"], tier["tier"]] = owner["beat"], tier
    return sample


def _lines(before: _Sample, now: _Sample) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for name, (beat, tier) in sorted(now.tiers.items()):
        then, old = before.tiers.get(name, (beat, tier))
        seconds = beat - then
        rates = {
            f"{key}_per_s": (tier[key] - old[key]) / seconds if seconds > 0 else 0.0
            for key in RATES
        }
        asked = tier["hits"] + tier["misses"]
        hit_rate = tier["hits"] / asked if asked else None
        lines.append({"store": name[0], "pid": name[1], **tier, "hit_rate": hit_rate, **rates})
    return lines


def _shown(lines: list[dict[str, Any]], *, width: int = WIDTH) -> str:
    if not lines:
        return "no living process has told anything yet"
    return table(
        [
            "store",
            "pid",
            "tier",
            "rows",
            "bytes",
            "of",
            "hit",
            "in/s",
            "out/s",
            "evicted/s",
            "failures",
        ],
        [
            [
                Path(line["store"]).name,
                str(line["pid"]),
                line["tier"],
                f"{line['rows']:,}",
                human(line["nbytes"]),
                human(line["capacity"]),
                "–" if line["hit_rate"] is None else f"{line['hit_rate']:.0%}",
                human(round(line["stored_bytes_per_s"])),
                human(round(line["loaded_bytes_per_s"])),
                f"{line['evicted_rows_per_s']:,.0f}",
                f"{line['failures']:,}",
            ]
            for line in lines
        ],
        width=width,
    )
