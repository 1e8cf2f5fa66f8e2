"""How commands speak: data on stdout, talk on stderr, one exit code of three.

0   done, and the answer is yes where there was a question
1   understood, and the answer is no: a broken law, a budget too small
2   not understood: an unknown option, model or size, a file that cannot be read
"""

import errno
import json
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from kvstow.errors import KvstowError

FAILED = 1
MISUSED = 2


class Commands(TyperGroup):
    """The commands; what kvstow raises on purpose ends as a message, not as a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KvstowError as error:
            refuse(str(error), code=FAILED)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # whoever read our output has left: typer ends quietly
            where = f"{error.filename}: " if error.filename else ""
            refuse(f"{where}{error.strerror or error}", code=FAILED)


def refuse(message: str, *, code: int) -> NoReturn:
    """Say on stderr what is wrong, and end with `code`."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)


def note(message: str) -> None:
    """One line of talk."""
    typer.echo(f"note: {message}", err=True)


def emit_json(document: object) -> None:
    """The document on stdout, two spaces per level."""
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
