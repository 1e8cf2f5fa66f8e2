"""The command line, run inside this process."""

import json
from typing import Any

from typer.testing import CliRunner, Result

from kvstow.cli import app


def invoke(*arguments: str, stdin: bytes | None = None) -> Result:
    """What a command says; it may end early, but not by an error of ours."""
    result = CliRunner().invoke(app, list(arguments), input=stdin)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def document(*arguments: str, code: int = 0) -> Any:
    """What it says to programs, ending with that code."""
    result = invoke(*arguments, "--json")
    assert result.exit_code == code, result.stderr
    return json.loads(result.stdout)
