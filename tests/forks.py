"""Programs that need not import torch: forked from a process that has, once for all tests."""

import multiprocessing
import os
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["kvstow.offload.host.tier"])


class Program:
    """A program as for `python -c`; what it prints, errors too, can be read line by line."""

    def __init__(self, code: str, *arguments: object) -> None:
        said, says = FORKS.Pipe(duplex=False)
        words = [str(each) for each in arguments]
        self._process: BaseProcess = FORKS.Process(target=_run, args=(code, words, says))
        self._process.start()
        says.close()
        with said:
            self.stdout = os.fdopen(os.dup(said.fileno()))

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        """Returns when it is gone, with all locks that it held."""
        self._process.join()

    def close(self) -> None:
        """Kill it if it lives, and wait."""
        with suppress(ValueError):  # closed before
            self.kill()
            self.wait()
            self._process.close()
        self.stdout.close()


def _run(code: str, arguments: list[str], says: Connection) -> None:
    for stream in (1, 2):
        os.dup2(says.fileno(), stream)
    sys.argv = ["-c", *arguments]
    exec(code, {"__name__": "__main__"})
