"""How commands speak: data on stdout, talk on stderr, one exit code of three.

0   success
1   the answer is no: a broken law, a budget too small
2   bad usage: an unknown option, model, split or size, a file that cannot be read
"""

import errno
import json as json_format
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import update_wrapper
from inspect import Parameter, Signature, signature
from math import inf
from pathlib import Path
from shlex import join
from textwrap import fill
from typing import Annotated, Any, NoReturn, Protocol, cast

import typer
from typer.core import TyperGroup

from kvstow.errors import BackendMissing, KvstowError, ModelError

WIDTH = 80
HINT = "\n\nhint: "
STDOUT = Path("-")

FAILED = 1
MISUSED = 2
INTERRUPTED = 130

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

EXTRAS = {
    "aiohttp": "router",
    "safetensors": "demo",
    "tokenizers": "transformers",
    "torch": "torch",
    "transformers": "transformers",
}
"""Modules that are not always there, and the extra that installs each."""


# ── commands ──────────────────────────────────────────────────────────────────────────


METAVARS: dict[object, str] = {int: "N", float: "X", str: "TEXT"}
"""What stands for an option's value in the help, unless the option says so itself."""


class CommandGroup(TyperGroup):
    """Commands that print their help where none is named."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for command in self.commands.values():
            for each in command.params:
                kind = getattr(getattr(each, "type_descriptor", None), "annotation", None)
                if each.param_type_name == "option" and each.metavar is None:
                    each.metavar = METAVARS.get(kind)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta.setdefault(__name__, list(args))
        return super().parse_args(ctx, args or ["--help"])


class Commands(CommandGroup):
    """The commands; what kvstow raises on purpose ends as a message, not as a traceback."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The commands of each section, with what they do."""
        width = max(map(len, self.commands))
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            section: str = getattr(command, "rich_help_panel", "")
            line = name.ljust(width), command.get_short_help_str(formatter.width - width)
            sections.setdefault(section, []).append(line)
        for section, lines in sections.items():
            with formatter.section(section):
                formatter.write_dl(lines)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KvstowError as error:
            refuse(str(error), code=MISUSED if isinstance(error, ModelError) else FAILED)
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


def command_line(context: typer.Context) -> str:
    """What was typed, as a shell takes it; pages show it."""
    return join(["kvstow", *context.meta[__name__]])


# ── reports ───────────────────────────────────────────────────────────────────────────


class Report(Protocol):
    """The answer to one question: for programs, and, as `str` of it, for people.

    If it has a `failure` that is not None, stderr gets that, and the command ends with 1.
    """

    def as_json(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """A report whose text is written at once: few facts, few lines."""

    facts: object
    text: str
    failure: str | None = None

    def as_json(self) -> object:
        return self.facts

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Document:
    """What `OPTION -` writes to stdout in place of a report."""

    option: str
    content: bytes


def reporting(command: Callable[..., Report | Document]) -> Callable[..., None]:
    """The command with --json: it prints the report that it makes."""

    def run(*, json: bool, **options: Any) -> None:
        NOTES.set([])
        report = command(**options)
        show(report, json=json, notes=NOTES.get())
        failure: str | None = getattr(report, "failure", None)
        if failure is not None:
            refuse(failure, code=FAILED)

    option = Parameter("json", Parameter.KEYWORD_ONLY, default=False, annotation=Json)
    return with_options(run, command, {**signature(command).parameters, "json": option})


def with_options(
    run: Callable[..., Any], command: Callable[..., Any], options: Mapping[str, Parameter]
) -> Callable[..., Any]:
    """`run` under the command's name, with these options."""
    update_wrapper(run, command)
    parameters = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in options.values()]
    run.__signature__ = Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    run.__annotations__ = {name: each.annotation for name, each in options.items()}
    return run


def show(report: Report | Document, *, json: bool, notes: Sequence[str] | None = None) -> None:
    """The report on stdout: its JSON document, with `notes` in it, or its text."""
    if not isinstance(report, Document):
        document = report.as_json() if json else None
        if json and notes is not None:
            document = _noted(document, notes)
        typer.echo(json_format.dumps(document, indent=2) if json else str(report))
    elif json:
        refuse(
            f"{report.option} - and --json both write a document to stdout{HINT}give one of them"
        )
    else:
        typer.get_binary_stream("stdout").write(report.content)


def _noted(document: object, notes: Sequence[str]) -> object:
    """The document, or each of a list of them, with what was noted about the answer."""
    if isinstance(document, list):
        return [_noted(each, notes) for each in cast(list[object], document)]
    facts = cast(dict[str, Any], document)
    return {**facts, "notes": [*notes, *facts.get("notes", ())]}


# ── talk ──────────────────────────────────────────────────────────────────────────────

NOTES: ContextVar[list[str]] = ContextVar("notes")
"""What a command has noted about its answer."""


def refuse(message: str, *, code: int = MISUSED) -> NoReturn:
    """Say on stderr what is wrong, and end with `code`."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)


@contextmanager
def usage(*errors: type[KvstowError], about: object = None) -> Generator[None]:
    """Ends with 2 on one of these errors: it is about what the user wrote."""
    try:
        yield
    except errors as error:
        refuse(str(error) if about is None else f"{about}: {error}")


def say(message: str) -> None:
    """One line of talk."""
    typer.echo(f"note: {message}", err=True)


def note(message: str) -> None:
    """One line about the answer, said once: it is among the `notes` of its JSON document, too."""
    notes = NOTES.get()
    if message not in notes:
        notes.append(message)
        say(message)


def write_file(file: Path, content: str | bytes, what: str) -> None:
    """Write a file that was asked for, and say so; ends with 2 and its name where that fails, and
    for `-`: stdout is the report's."""
    if file == STDOUT:
        refuse(f"stdout has the report, and cannot have the {what} too{HINT}name a file")
    try:
        file.write_bytes(
            content if isinstance(content, bytes) else content.encode(errors="replace")
        )
    except OSError as error:
        refuse(f"{file}: cannot be written: {error.strerror}")
    say(f"{what} written to {file}")


def slow_progress(what: str, *, every: float = 2.0) -> Callable[[int, int | None], None]:
    """Says on stderr, if that is a terminal, how far something is, every so many seconds."""
    last = time.monotonic() if sys.stderr.isatty() else inf

    def progress(done: int, total: int | None) -> None:
        nonlocal last
        if time.monotonic() - last > every:
            last = time.monotonic()
            say(f"{done:,} {what}" if total is None else f"{done:,} of {total:,} {what}")

    return progress


def wrapped(text: str, *, indent: str = "  ") -> str:
    """The text in lines of at most 80 columns, all but the first indented."""
    return fill(text, WIDTH, subsequent_indent=indent)
