"""Nodes in processes of their own: the same calls, answered there.

    zygote = Zygote()                          has imported everything
    process = zygote.process(env)              forked from it
    node = process.node(manifest, "name")      calls go there

A process that is gone says so with the last words on its stderr.
"""

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from kvstow.plan.manifest import decode
from transfer_node import Node
from waiting import stop

TESTS = Path(__file__).parent

PATIENCE = 60.0
"""Seconds for a process to start, and for its address to come free."""


class Ended(AssertionError):
    """A process that is no longer there, with the last words on its stderr."""

    def __init__(self, who: str, words: Path) -> None:
        text = words.read_text(errors="replace")[-4000:] if words.exists() else ""
        super().__init__(f"{who} has ended; its stderr:\n{text or '(empty)'}")


class Zygote:
    """A process that has imported everything and forks nodes' processes on demand.

    `prefix` is put before its command line, to start it in a network namespace, say.
    """

    def __init__(self, *prefix: str) -> None:
        path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
        self._folder = Path(tempfile.mkdtemp(prefix="kvstow-test-"))
        self._words = self._folder / "zygote.stderr"
        self._count = 0
        with self._words.open("w") as words:
            self._child = subprocess.Popen(
                [*prefix, sys.executable, str(TESTS / "transfer_process.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            )

    @property
    def pid(self) -> int:
        return self._child.pid

    def process(self, env: dict[str, str] | None = None) -> "Process":
        """A new process, with this environment on top of ours; Ended if there is none."""
        self._count += 1
        path = self._folder / str(self._count)
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(path))
            door.listen(1)
            door.settimeout(PATIENCE)
            pid = self._forked(path, env or {})
            words = path.with_suffix(".stderr")
            try:
                line, _ = door.accept()
            except TimeoutError:
                raise Ended(f"process {pid}, before it had connected,", words) from None
        line.setblocking(True)
        return Process(pid, line, words)

    def _forked(self, path: Path, env: dict[str, str]) -> int:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            print(json.dumps([str(path), env]), file=self._child.stdin, flush=True)
            return int(self._child.stdout.readline())
        except (OSError, ValueError):  # nobody reads, or what it says is no number
            raise Ended(f"the zygote ({self._child.poll()})", self._words) from None

    def close(self) -> None:
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            with suppress(OSError):  # it may have ended
                pipe.close()
        self._child.wait(20)
        shutil.rmtree(self._folder)


class Process:
    """A process that holds nodes, at the other end of a socket."""

    def __init__(self, pid: int, line: socket.socket, words: Path) -> None:
        self.pid = pid
        self._line = line
        self._words = words
        self._file = line.makefile("rw")
        self._lock = threading.Lock()

    def call(self, node: str, what: str, *args: Any, **kwargs: Any) -> Any:
        """What the node answers; RuntimeError if it raised, Ended if it is not there."""
        with self._lock:
            try:
                print(json.dumps([node, what, args, kwargs]), file=self._file, flush=True)
                line = self._file.readline()
            except OSError:
                line = ""
        if not line:
            raise Ended(f"process {self.pid}, asked to {what!r},", self._words)
        answer = json.loads(line)
        if "raised" in answer:
            raise RuntimeError(answer["raised"])
        return answer["value"]

    def node(self, manifest: bytes, name: str, **how: Any) -> "Remote":
        """A new node. An address that a killed process had is not free at once."""
        limit = time.monotonic() + PATIENCE
        while True:
            try:
                return Remote(self, manifest, name, how)
            except RuntimeError as error:
                if "cannot listen" not in str(error) or time.monotonic() > limit:
                    raise
                time.sleep(0.1)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Nothing of it moves from here on."""
        stop(self.pid)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """Let it end; what it has said on stderr is said here, for whoever looks at a test."""
        with suppress(ProcessLookupError):
            self.resume()
        with suppress(OSError):
            self._file.close()
        self._line.close()
        if self._words.exists():
            sys.stderr.write(self._words.read_text(errors="replace")[-4000:])


class Remote:
    """A node in a process: calls go there."""

    def __init__(self, process: Process, manifest: bytes, name: str, how: dict[str, Any]) -> None:
        self.process = process
        self.name = name
        self.layout = decode(manifest)
        text = base64.b64encode(manifest).decode()
        self.address = process.call(name, "new", text, **how)

    def __getattr__(self, what: str) -> Any:
        return lambda *args, **kwargs: self.process.call(self.name, what, *args, **kwargs)


def serve(line: socket.socket) -> None:
    """Answer calls until the line is closed."""
    nodes: dict[str, Node] = {}
    file = line.makefile("rw")
    for text in file:
        name, what, args, kwargs = json.loads(text)
        try:
            if what == "new":
                nodes[name] = Node(base64.b64decode(args[0]), name=name, **kwargs)
                answer: Any = nodes[name].address
            elif what == "close":
                answer = nodes.pop(name).close()
            else:
                answer = getattr(nodes[name], what)(*args, **kwargs)
            print(json.dumps({"value": answer}), file=file, flush=True)
        except Exception as error:
            print(json.dumps({"raised": f"{type(error).__name__}: {error}"}), file=file, flush=True)
    for node in nodes.values():
        node.close()


def fork() -> None:
    """Fork one process per line on stdin; say its id on stdout."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for text in sys.stdin:
        path, env = json.loads(text)
        pid = os.fork()
        if pid == 0:
            _live(path, env)
        print(pid, flush=True)


def _live(path: str, env: dict[str, str]) -> NoReturn:
    """The life of a forked process; what it says on stderr stays beside its socket."""
    status = 1
    try:
        with open(path + ".stderr", "w") as words:
            os.dup2(words.fileno(), 2)
        os.environ.update(env)
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(path)
            serve(line)
        status = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:  # never back into the zygote's loop
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    fork()
