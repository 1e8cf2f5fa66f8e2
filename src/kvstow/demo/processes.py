"""Child processes of the demo: started, sent messages, and ended in any case."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator

import msgspec

from kvstow.demo.messages import ChildFailed, FromChild, ToChild, from_child, line
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
    "GLOO_SOCKET_IFNAME": "lo",
    "NIXL_LOG_LEVEL": "ERROR",
    "UCX_LOG_LEVEL": "fatal",
}
"""Environment of the children: one thread each, no downloads, no output of libraries."""

END_SECONDS = 3.0


class DemoError(KvstowError):
    """A process of the demo that failed, with the end of what it said."""


Event = tuple[str, FromChild]


class Children:
    """All processes of a demo and one queue of what they say.

    Used as a context: leaving it, however, ends every process.
    """

    def __init__(self) -> None:
        self.events: queue.Queue[Event] = queue.Queue()
        self._running: dict[str, Child] = {}

    def start(self, name: str) -> "Child":
        """A fresh process of that name."""
        child = Child(name, self.events.put)
        self._running[name] = child
        return child

    def __getitem__(self, name: str) -> "Child":
        return self._running[name]

    def next(self, timeout: float) -> Event | None:
        """What was said next, by whom; None after `timeout` seconds of silence."""
        try:
            return self.events.get(timeout=timeout)
        except queue.Empty:
            return None

    def __enter__(self) -> "Children":
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._running.values():
            child.hang_up()
        for child in self._running.values():
            child.end()


class Child:
    """One process; what it says arrives through `told`, its stderr in a file of its own."""

    def __init__(self, name: str, told: Callable[[Event], None]) -> None:
        self.name = name
        self._told = told
        self._quiet = False
        self._log = tempfile.TemporaryFile(prefix=f"kvstow-{name}-")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvstow.demo.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **QUIET},
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: ToChild) -> None:
        """Say something to the process."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line(message))
            self._process.stdin.flush()
        except BrokenPipeError:
            raise DemoError(self._gone()) from None

    def _lines(self) -> Iterator[bytes]:
        assert self._process.stdout is not None
        yield from self._process.stdout

    def _listen(self) -> None:
        for data in self._lines():
            try:
                self._told((self.name, from_child(data)))
            except msgspec.MsgspecError as error:
                self._told(
                    (self.name, ChildFailed(error=f"{self.name} said {data[:80]!r}: {error}"))
                )
        if not self._quiet:
            self._told((self.name, ChildFailed(error=self._gone())))

    def _gone(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        last = "\n".join(self._log.read().decode(errors="replace").splitlines()[-12:])
        return f"the {self.name} process ended with {code}" + (f"\n{last}" if last else "")

    def kill(self) -> None:
        """End it as a crash would: at once, and expected."""
        self._quiet = True
        self._process.kill()
        self._process.wait()

    def hang_up(self) -> None:
        """Close its standard input: it ends by itself."""
        self._quiet = True
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def end(self) -> None:
        """Wait a moment, then insist."""
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()
