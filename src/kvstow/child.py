"""A process at the other end of a pipe: started, called, ended.

    with Child("prefill", "kvstow.demo.engine:DemoEngine", say=print) as child:
        child.call("load", model="smollm2")

The child makes an object of the class that is named, and does what it is called for: a method of
the object, with these arguments. In between it calls `turn`, if the object has that method. It ends
when its pipe does, so none outlives the parent.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Self

from kvstow.errors import KvstowError

SILENCE_SECONDS = 600.0
END_SECONDS = 3.0
LOG_LINES = 12

Say = Callable[[str], None]


def silent(text: str) -> None:
    """Say nothing."""


class ChildError(KvstowError):
    """A child that failed, with the end of what it printed."""


class Child:
    """One process at the other end of a pipe. What it prints goes to a file of its own.

    Used as a context: leaving it, however, ends the process. `kind` is `module:Class` of the object
    that the child makes, of a function that gives the parent its progress, which `say` gets, and
    `arguments`.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        *arguments: Any,
        say: Say = silent,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._name, self._say = name, say
        self._pipe, end = Pipe()
        self._log = tempfile.TemporaryFile(prefix=f"kvstow-{name}-")  # noqa: SIM115
        say(f"{name}: starting")
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(end.fileno()), kind],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[end.fileno()],
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        end.close()
        self._put(arguments)

    def send(self, verb: str, **arguments: Any) -> None:
        """Have the child's object do something."""
        self._put((verb, arguments))

    def _put(self, message: object) -> None:
        try:
            self._pipe.send(message)
        except OSError:
            raise ChildError(self._last_words()) from None

    def result(self) -> Any:
        """What came of it. Raises ChildError where the child failed, ended or hangs."""
        while self._pipe.poll(SILENCE_SECONDS):
            try:
                kind, content = self._pipe.recv()
            except (EOFError, OSError):
                raise ChildError(self._last_words()) from None
            if kind == "result":
                return content
            if kind == "error":
                raise ChildError(f"{self._name}: {content}")
            self._say(f"{self._name}: {content}")
        raise ChildError(f"nothing heard from {self._name} for {SILENCE_SECONDS:.0f} s")

    def call(self, verb: str, **arguments: Any) -> Any:
        """Have something done, and wait for what comes of it."""
        self.send(verb, **arguments)
        return self.result()

    def kill(self) -> None:
        """End the process as a crash would: at once."""
        self._say(f"{self._name}: killed")
        self._process.kill()
        self._process.wait()

    def _last_words(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        last = "\n".join(self._log.read().decode(errors="replace").splitlines()[-LOG_LINES:])
        return f"the {self._name} process ended with {code}" + (f"\n{last}" if last else "")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pipe.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()


# ── in the child ──────────────────────────────────────────────────────────────────────


def run_child() -> None:
    """Do what the parent says until the pipe ends."""
    pipe = Connection(int(sys.argv[1]))
    module, _, name = sys.argv[2].partition(":")
    kind = getattr(import_module(module), name)

    def say(text: str) -> None:
        pipe.send(("progress", text))

    try:
        target = kind(say, *pipe.recv())
        turn: Callable[[], None] | None = getattr(target, "turn", None)
        while True:
            while turn is not None and not pipe.poll():
                turn()
            verb, arguments = pipe.recv()
            pipe.send(_outcome(getattr(target, verb), arguments))
    except (EOFError, OSError):
        os._exit(0)


def _outcome(method: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[str, Any]:
    """What a call returns, or the text of what it raises."""
    try:
        return "result", method(**arguments)
    except KvstowError as error:
        return "error", str(error)
    except Exception:
        return "error", traceback.format_exc()


if __name__ == "__main__":
    run_child()
