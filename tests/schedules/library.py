"""What is equal in all schedules is computed once: manifests, fingerprints, routes, metrics.

`prepared` changes the library for as long as a block lasts: functions without state keep their
results, paths are measured with a few bytes, and nothing sleeps. What is checked stays the same.
"""

from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any

from kvstow.observe import Telemetry
from kvstow.plan import manifest
from kvstow.plan.identity import Identity
from kvstow.plan.layout import Layout
from kvstow.route.compare import differences
from kvstow.route.route import plan_route
from kvstow.route.sources import sources
from kvstow.transfer import serve, source
from kvstow.transfer.metrics import TransferMetrics
from kvstow.transfer.peers import endpoint, layouts, probe
from kvstow.transfer.transport import mapped
from schedules.remotes import threadless

TELEMETRY = Telemetry()
METRICS = TransferMetrics(TELEMETRY.registry)
PROBE_BYTES = 8
STEP_BYTES = 48
"""So that a copy out of mapped memory takes many turns."""
KNOWN = 4096


class ByLayout:
    """A function of layouts that keeps its results, by the layouts themselves and not by their
    content: to hash a layout takes as long as most that is asked about it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._known: dict[Any, tuple[Any, Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.items())
        key = tuple(map(_key, given))
        if key not in self._known:
            if len(self._known) > KNOWN:
                self._known.clear()
            self._known[key] = self._function(*args, **kwargs), given
        return self._known[key][0]


def _key(value: Any) -> Any:
    if isinstance(value, Layout):
        return id(value)
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return str(value) if isinstance(value, dict) else value


class Worker:
    """Counts digests when the schedule gives it a turn, instead of in another thread."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, call: Callable[..., Any], *args: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        self.waiting.append((future, lambda: call(*args)))
        return future

    def turn(self) -> None:
        """Do what was submitted."""
        waiting, self.waiting = self.waiting, []
        for future, call in waiting:
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        self.turn()


@contextmanager
def changed(where: Any, name: str, value: Any) -> Generator[None]:
    """Another value for an attribute, as long as the block lasts."""
    before = vars(where)[name]
    setattr(where, name, value)
    try:
        yield
    finally:
        setattr(where, name, before)


def _identified(known: ByLayout) -> Callable[[Layout, Identity], Layout]:
    def identified(self: Layout, identity: Identity) -> Layout:
        return self if self.identity is identity else known(self, identity)

    return identified


@contextmanager
def prepared() -> Generator[None]:
    """A library in which nothing is computed twice."""
    decode = lru_cache(maxsize=256)(manifest.decode)
    encode, fingerprint = ByLayout(manifest.encode), ByLayout(manifest.fingerprint)
    joined, shared_out = ByLayout(plan_route), ByLayout(sources)
    values = [
        (layouts, "decode", decode),
        (layouts, "fingerprint", fingerprint),
        (layouts, "differences", ByLayout(differences)),
        (endpoint, "fingerprint", fingerprint),
        (endpoint, "encode", encode),
        (endpoint, "TransferMetrics", lambda registry: METRICS),
        (endpoint, "ThreadPoolExecutor", lambda *args: Worker()),
        (endpoint, "PROBE_BYTES", PROBE_BYTES),
        (probe, "PROBE_BYTES", PROBE_BYTES),
        (mapped, "STEP_BYTES", STEP_BYTES),
        (source, "sources_of", shared_out),
        (serve, "sources", shared_out),
        (serve, "plan_route", joined),
        (Layout, "identified", _identified(ByLayout(Layout.identified))),
    ]
    with ExitStack() as stack:
        stack.enter_context(threadless())
        for where, name, value in values:
            stack.enter_context(changed(where, name, value))
        yield
