"""A process of the demo: started, called, ended.

The parent sends a verb and its arguments, the child answers with what its engine returns.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any, Self

from kvstow.errors import KvstowError

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""One thread each, no downloads."""

SILENCE_SECONDS = 600.0
END_SECONDS = 3.0
LOG_LINES = 12

Say = Callable[[str], None]


class DemoError(KvstowError):
    """A process of the demo that failed, with the end of what it printed."""


class Child:
    """One process at the other end of a pipe. What it prints goes to a file of its own.

    Used as a context: leaving it, however, ends the process. `say` gets the child's progress.
    """

    def __init__(self, name: str, say: Say) -> None:
        self._name, self._say = name, say
        self._pipe, end = Pipe()
        self._log = tempfile.TemporaryFile(prefix=f"kvstow-{name}-")  # noqa: SIM115
        say(f"{name}: starting")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvstow.demo.engine", str(end.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[end.fileno()],
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        end.close()

    def send(self, verb: str, **arguments: Any) -> None:
        """Have the child's engine do something."""
        try:
            self._pipe.send((verb, arguments))
        except OSError:
            raise DemoError(self._last_words()) from None

    def result(self) -> Any:
        """What came of it. Raises DemoError where the child failed, ended or hangs."""
        while self._pipe.poll(SILENCE_SECONDS):
            try:
                kind, content = self._pipe.recv()
            except (EOFError, OSError):
                raise DemoError(self._last_words()) from None
            if kind == "result":
                return content
            if kind == "error":
                raise DemoError(f"{self._name}: {content}")
            self._say(f"{self._name}: {content}")
        raise DemoError(f"nothing heard from {self._name} for {SILENCE_SECONDS:.0f} s")

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
