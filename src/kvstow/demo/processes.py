"""Child processes of the demo: started, sent messages, and ended in any case."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from multiprocessing import Pipe
from multiprocessing.connection import wait

from kvstow.demo.messages import ChildFailed, FromChild, ToChild, encode, from_child
from kvstow.errors import KvstowError

QUIET = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TQDM_DISABLE": "1",
    "PYTHONWARNINGS": "ignore",
    "NIXL_LOG_LEVEL": "ERROR",
    "UCX_LOG_LEVEL": "fatal",
}
"""Environment of the children: one thread each, no downloads, no output of libraries."""

END_SECONDS = 3.0
LOG_LINES = 12


class DemoError(KvstowError):
    """A process of the demo that failed, with the end of what it printed."""


class Children:
    """The processes of a demo. Used as a context: leaving it, however, ends every one."""

    def __init__(self) -> None:
        self._running: dict[str, Child] = {}

    def start(self, name: str) -> None:
        """A fresh process of that name."""
        self._running[name] = Child(name)

    def send(self, name: str, message: ToChild) -> None:
        """Say something to a process."""
        self._running[name].send(message)

    def next(self, timeout: float) -> tuple[str, FromChild] | None:
        """What was said next, and by whom; None after `timeout` seconds of silence."""
        heard = wait([child.pipe for child in self._running.values()], timeout)
        for name, child in self._running.items():
            if child.pipe in heard:
                return name, child.receive()
        return None

    def kill(self, name: str) -> None:
        """End a process as a crash would: at once."""
        self._running.pop(name).end(seconds=0)

    def __enter__(self) -> "Children":
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._running.values():
            child.pipe.close()
        for child in self._running.values():
            child.end(seconds=END_SECONDS)


class Child:
    """One process at the other end of `pipe`. What it prints goes to a file of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pipe, theirs = Pipe()
        self._log = tempfile.TemporaryFile(prefix=f"kvstow-{name}-")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvstow.demo.worker", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[theirs.fileno()],
            env={**os.environ, **QUIET},
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        theirs.close()

    def send(self, message: ToChild) -> None:
        """Say something to the process."""
        try:
            self.pipe.send_bytes(encode(message))
        except OSError:
            raise DemoError(self._last_words()) from None

    def receive(self) -> FromChild:
        """What the process said next."""
        try:
            return from_child(self.pipe.recv_bytes())
        except (EOFError, OSError):
            return ChildFailed(error=self._last_words())

    def _last_words(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        last = "\n".join(self._log.read().decode(errors="replace").splitlines()[-LOG_LINES:])
        return f"the {self.name} process ended with {code}" + (f"\n{last}" if last else "")

    def end(self, *, seconds: float) -> None:
        """Wait so long for its end, then insist."""
        self.pipe.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()
