"""Time limits and the circuit breaker: a dead store costs a few budgets, and then nothing.

    closed   every call goes out, and is waited for as long as its budget says
    open     no call goes out; every question is answered "not there" at once

Of the last calls it is known which failed or were late. When half of them did, and more than a
few, the breaker opens. From the first failure on it is in doubt, and its tier asks the store now
and again, on nobody's time; these questions count, and one that is answered closes the breaker.
"""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Event, Lock
from time import monotonic
from typing import Any, TypeVar

from kvstow.offload.remote.client import StoreUnreachable
from kvstow.threads import guarded_thread

log = logging.getLogger("kvstow.offload")

T = TypeVar("T")

WINDOW_CALLS, WINDOW_SECONDS = 8, 30.0
LEAST_FAILURES = 3
"""Of the last calls, not older than that, so many must have failed, and half of all, before the
breaker opens."""


class Breaker:
    """Whether a store is asked at all."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._lock = Lock()
        self._calls: deque[tuple[float, bool]] = deque(maxlen=WINDOW_CALLS)
        """Of the last calls, when each ended, and whether it failed."""
        self._since = 0.0
        self.reason = ""
        """Why the store is not asked; empty while it is."""
        self.in_doubt = Event()
        """A call has failed, and no probe was answered since."""
        self.times_opened = 0

    @property
    def is_open(self) -> bool:
        return bool(self.reason)

    def succeeded(self) -> None:
        """A call was answered in time."""
        with self._lock:
            self._note(failed=False)

    def failed(self, reason: str) -> None:
        """A call failed, or was late."""
        with self._lock:
            self._note(failed=True)
            failures = sum(failed for _, failed in self._calls)
            is_dead = failures >= LEAST_FAILURES and 2 * failures >= len(self._calls)
            if is_dead and not self.reason:
                self.reason, self._since = reason or "no reason given", monotonic()
                self.times_opened += 1
                log.warning("%s is not asked again until it responds: %s", self._where, reason)
        self.in_doubt.set()

    def _note(self, *, failed: bool) -> None:
        now = monotonic()
        self._calls.append((now, failed))
        while self._calls[0][0] < now - WINDOW_SECONDS:
            self._calls.popleft()

    def close(self) -> None:
        """A probe was answered: calls go out again."""
        with self._lock:
            was_open, self.reason = self.is_open, ""
            self._calls.clear()
            self.in_doubt.clear()
        if was_open:
            log.warning("%s answers again after %.1f s", self._where, monotonic() - self._since)


class Calls:
    """Calls on threads of their own, waited for within a budget.

    A call that is given up may still run: it writes to memory of its own only, and whoever made
    it never sees its result.
    """

    def __init__(self, breaker: Breaker, num_threads: int) -> None:
        self._breaker = breaker
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads = [
            guarded_thread(
                f"kvstow-remote-{i}",
                self._work,
                on_broken=lambda error: breaker.failed(repr(error)),
            )
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, function: Callable[[], T]) -> "Future[T]":
        """The call, begun as soon as a thread is free."""
        future: Future[T] = Future()
        self._queue.put((future, function))
        return future

    def result(self, future: "Future[T]", deadline: float) -> T:
        """The call's result. Raises StoreUnreachable, and tells the breaker, if it failed or there
        is none at the deadline, by `time.monotonic`."""
        budget = max(0.0, deadline - monotonic())
        try:
            result = future.result(budget)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, StoreUnreachable):
                reason = str(error)
            elif not future.done():
                future.cancel()
                reason = f"no answer within {budget:.2f} s"
            self._breaker.failed(reason)
            raise StoreUnreachable(reason) from error
        self._breaker.succeeded()
        return result

    def run(self, function: Callable[[], T], seconds: float) -> T:
        """The result of a call within so many seconds, as `result` gives it."""
        return self.result(self.start(function), monotonic() + seconds)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            future, function = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:
                future.set_exception(error)
                raise

    def close(self) -> None:
        """End the threads; one that hangs in a call is left behind."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(1.0)
