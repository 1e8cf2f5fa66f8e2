"""The command line: stdout is data, stderr is talk.

One module per command. Commands import what they need inside their functions, so that
`kvstow plan` never waits for torch, and `kvstow --help` waits for nothing.
"""

import typer

from kvstow.cli.output import Commands

app = typer.Typer(
    name="kvstow",
    cls=Commands,
    help="Plans, packs, pages, moves and keeps KV caches for LLM inference.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)


def main() -> None:
    """Entry point of the `kvstow` script and of `python -m kvstow`."""
    app()
