"""NIXL that knows how much time it took: for measurements."""

import time
from collections.abc import Callable
from typing import Any

from kvstow.transfer.nixl import NixlTransport

ENGINE = ("transfer", "check_xfer_state", "get_new_notifs", "add_remote_agent")
"""Calls in which NIXL moves bytes, makes progress or connects. Lists of descriptors and
handles are made for one pull, and count as its own time."""


class TimedNixl(NixlTransport):
    """`seconds` is the processor time inside the engine, `starts` how many transfers it was
    given. `connecting` is the wall time in which it loaded peers, and in which the first
    transfer ran: NIXL connects only then."""

    def __init__(self, *, num_threads: int = 0) -> None:
        super().__init__(num_threads=num_threads)
        self.bare: Any = self._agent
        self.seconds = 0.0
        self.connecting = 0.0
        self.starts = 0
        self.beside: list[TimedNixl] = []
        self._first_started: float | None = None
        self._is_connected = False
        self._agent = _TimedAgent(self.bare, self._took)

    @property
    def another(self) -> "Callable[[], TimedNixl]":
        return self._made

    def _made(self) -> "TimedNixl":
        self.beside.append(TimedNixl())
        return self.beside[-1]

    def _took(self, call: str, busy: float, started: float, result: Any) -> None:
        self.seconds += busy
        now = time.perf_counter()
        if call == "add_remote_agent":
            self.connecting += now - started
        elif call == "transfer":
            self.starts += 1
            self._first_started = self._first_started or started
        if result == "DONE" and not self._is_connected and self._first_started is not None:
            self._is_connected = True
            self.connecting += now - self._first_started


Took = Callable[[str, float, float, Any], None]


class _TimedAgent:
    """The calls of `inner`; those of the engine are timed."""

    def __init__(self, inner: Any, took: Took) -> None:
        for name in dir(inner):
            call = getattr(inner, name)
            if callable(call) and not name.startswith("_"):
                setattr(self, name, _timed(name, call, took) if name in ENGINE else call)


def _timed(name: str, call: Callable[..., Any], took: Took) -> Callable[..., Any]:
    def timed(*args: Any) -> Any:
        started, busy = time.perf_counter(), time.thread_time()
        result = None
        try:
            result = call(*args)
            return result
        finally:
            took(name, time.thread_time() - busy, started, result)

    return timed
