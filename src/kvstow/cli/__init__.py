"""The command line: stdout is data, stderr is talk.

plan              known models, the layout of one, a manifest's laws
size, compare     how much fits, and which layout is best
route, simulate   what moving and serving would cost
demo, bench       prefill to decode for real; rates measured here
status, store     running agents, and stores
why               where reuse of a prompt ends in a store, and why
route_requests    a router between prefill and decode instances
options, output   what users write, and how commands speak

Commands import what they need inside their functions, so that
`kvstow plan` never waits for torch, and `kvstow --help` waits for nothing.
"""

import io
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from kvstow import __version__
from kvstow.cli.bench import bench
from kvstow.cli.compare import compare
from kvstow.cli.demo import demo
from kvstow.cli.output import Commands
from kvstow.cli.plan import check, models, plan
from kvstow.cli.route import route
from kvstow.cli.route_requests import route_requests
from kvstow.cli.simulate import simulate
from kvstow.cli.size import size
from kvstow.cli.status import status
from kvstow.cli.store import store
from kvstow.cli.why import why

app = typer.Typer(
    name="kvstow",
    cls=Commands,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def kvstow(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Plans, packs, pages, moves and keeps KV caches for LLM inference."""


SECTIONS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    "Plan": {"models": models, "plan": plan, "size": size, "compare": compare, "check": check},
    "Estimate": {"route": route, "simulate": simulate},
    "Try and measure": {"demo": demo, "bench": bench},
    "Operate": {"status": status, "store": store, "why": why, "route-requests": route_requests},
}
"""The commands as `kvstow --help` lists them."""

for section, commands in SECTIONS.items():
    for name, command in commands.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=section)
        else:
            app.command(name, rich_help_panel=section)(command)


def main() -> None:
    """Entry point of the `kvstow` script and of `python -m kvstow`.

    What a terminal cannot show, a box or a file's odd name, becomes a question mark.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    app()
