"""How commands speak: data on stdout, talk on stderr, one exit code of three.

0   success
1   the answer is no: a broken law, a budget too small
2   bad usage: an unknown option, model or size, a file that cannot be read
"""

import errno
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from shlex import join
from typing import Any, NoReturn, Protocol

import typer
from typer.core import TyperGroup

from kvstow.errors import BackendMissing, KvstowError
from kvstow.text import human as human

WIDTH = 80
HINT = "\n\nhint: "

FAILED = 1
MISUSED = 2
INTERRUPTED = 130

EXTRAS = {
    "aiohttp": "router",
    "safetensors": "demo",
    "tokenizers": "transformers",
    "torch": "torch",
    "transformers": "transformers",
}
"""Modules that are not always there, and the extra that installs each."""


SECTIONS = {
    "Plan": ("models", "plan", "size", "compare", "check"),
    "Estimate": ("route", "simulate"),
    "Try and measure": ("demo", "bench"),
    "Operate": ("status", "store", "why", "route-requests"),
}
"""The commands as `kvstow --help` lists them."""


class CommandGroup(TyperGroup):
    """Commands that print their help where none is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["--help"])


class Commands(CommandGroup):
    """The commands; what kvstow raises on purpose ends as a message, not as a traceback."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The commands of each section, with what they do."""
        width = max(len(name) for names in SECTIONS.values() for name in names)
        for section, names in SECTIONS.items():
            known = {name: self.get_command(ctx, name) for name in names}
            with formatter.section(section):
                formatter.write_dl(
                    [
                        (name.ljust(width), command.get_short_help_str(formatter.width - width))
                        for name, command in known.items()
                        if command is not None
                    ]
                )

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KvstowError as error:
            refuse(str(error), code=FAILED)
        except ModuleNotFoundError as error:
            module = (error.name or "").partition(".")[0]
            if module not in EXTRAS:
                raise
            refuse(str(BackendMissing(module, EXTRAS[module])), code=FAILED)
        except MemoryError as error:
            refuse(f"this machine has not enough memory: {error}", code=FAILED)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # whoever read our output has left: typer ends quietly
            where = f"{error.filename}: " if error.filename else ""
            refuse(f"{where}{error.strerror or error}", code=FAILED)


def refuse(message: str, *, code: int) -> NoReturn:
    """Say on stderr what is wrong, and end with `code`."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)


def write_file(file: Path, text: str | bytes) -> None:
    """Write a file that was asked for; ends with 1 and its name where that fails.

    Ends with 2 for `-`: whoever asks for it wants stdout, where the report goes.
    """
    if file == Path("-"):
        refuse("stdout has the report, and cannot have this too\n\nhint: name a file", code=MISUSED)
    try:
        file.write_bytes(text.encode(errors="replace") if isinstance(text, str) else text)
    except OSError as error:
        refuse(f"{file}: cannot be written: {error.strerror}", code=FAILED)


def note(message: str) -> None:
    """One line of talk."""
    typer.echo(f"note: {message}", err=True)


class Report(Protocol):
    """The answer to one question."""

    def as_json(self) -> object: ...


def show(report: Report, *, json: bool) -> None:
    """The report on stdout: its JSON document, or its text."""
    if json:
        emit_json(report.as_json())
    else:
        typer.echo(str(report))


def command_line() -> str:
    """What was typed, as a shell takes it; pages show it."""
    return join(["kvstow", *sys.argv[1:]])


def is_terminal() -> bool:
    """Whether somebody watches stdout."""
    return sys.stdout.isatty()


def slow_progress(what: str, *, after: float = 2.0) -> Callable[[int, int], None]:
    """Says on stderr how far something is, a line every `after` seconds."""
    said = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal said
        if time.monotonic() - said > after:
            said = time.monotonic()
            note(f"{done:,} of {total:,} {what}")

    return progress


def emit_json(document: object) -> None:
    """The document on stdout, two spaces per level, in ASCII."""
    typer.echo(json.dumps(document, indent=2))


def emit_text(*parts: str) -> None:
    """Paragraphs on stdout, an empty line between them."""
    typer.echo("\n\n".join(parts))


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    num_left: int = 1,
    width: int = WIDTH,
) -> str:
    """Columns side by side: the first `num_left` start at the left, the others end at the
    right. Never wider than `width`: what does not fit is folded."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for i, name in enumerate(columns):
        made.add_column(name, justify="left" if i < num_left else "right", overflow="fold")
    for row in rows:
        made.add_row(*row)
    console = Console(width=width, color_system=None, markup=False, highlight=False, emoji=False)
    with console.capture() as capture:
        console.print(made)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def wrapped(text: str, *, indent: str = "  ") -> str:
    """The text in lines of at most 80 columns, all but the first indented."""
    from textwrap import fill

    return fill(text, WIDTH, subsequent_indent=indent)


def exact(nbytes: int | float) -> str:
    """`2,097,152 bytes (2 MiB)`."""
    text = f"{nbytes:,}" if isinstance(nbytes, int) else f"{nbytes:,.2f}"
    beside = f" ({human(nbytes)})" if nbytes >= 1024 else ""
    return f"{text} {'byte' if nbytes == 1 else 'bytes'}{beside}"


def duration(seconds: float) -> str:
    """`54.4 ms`: three digits."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
