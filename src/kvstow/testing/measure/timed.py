"""NIXL that knows how much time it took: for measurements."""

import time
from collections.abc import Callable
from typing import Any

from kvstow.transfer.transport.nixl import NixlTransport

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
        self.is_connected = False
        self._first_started: float | None = None
        self._agent = _TimedAgent(self.bare, self)

    def fresh(self) -> "TimedNixl":
        return TimedNixl()

    def close(self) -> None:
        super().close()
        self.bare.agent = None

    def took(self, call: str, started: float, result: Any) -> None:
        """A call has ended that may have connected."""
        now = time.perf_counter()
        if call == "add_remote_agent":
            self.connecting += now - started
        elif call == "transfer":
            self._first_started = self._first_started or started
        if result == "DONE" and not self.is_connected and self._first_started is not None:
            self.is_connected = True
            self.connecting += now - self._first_started


class _TimedAgent:
    """The calls of `inner`; those of the engine are timed."""

    def __init__(self, inner: Any, meter: TimedNixl) -> None:
        for name in dir(inner):
            call = getattr(inner, name)
            if callable(call) and not name.startswith("_"):
                setattr(self, name, _timed(name, call, meter) if name in ENGINE else call)


def _timed(name: str, call: Callable[..., Any], meter: TimedNixl) -> Callable[..., Any]:
    clock, starts = time.thread_time, name == "transfer"

    def timed(*args: Any) -> Any:
        started = 0.0 if meter.is_connected else time.perf_counter()
        meter.starts += starts
        busy, result = clock(), None
        try:
            result = call(*args)
            return result
        finally:
            meter.seconds += clock() - busy
            if started:
                meter.took(name, started, result)

    return timed
