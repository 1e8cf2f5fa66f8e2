"""Quarantine: rows of failed pulls stay unused until nothing can write to them any more.

That is certain only when

    our posts      have ended, or the engine that they were given to has been closed
    the producer   has said that it writes no more, or is dead and our engine has been closed
                   since, with whatever lay in its sockets

A producer that is only silent may go on much later. So when too many rows wait, or some wait
for too long, the engine is replaced by a fresh one: what moves may end first, peers meet us
again, and tickets stay valid.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvstow.errors import TransferError
from kvstow.transfer.channel.messages import End
from kvstow.transfer.fence import CounterRead
from kvstow.transfer.loop import AFTER_ERROR, IDLE, NOW_AND_THEN, Loop, Routine, Task, together
from kvstow.transfer.peers.endpoint import Endpoint, EngineReplaced
from kvstow.transfer.peers.flight import Flight
from kvstow.transfer.source import Source
from kvstow.transfer.transport.base import lost

HURRY = 3
"""Where rows or slots are scarce, the engine is replaced after a third of the time. Not at once:
reads over a cable that was cut for a moment end by themselves, and UCX may abort the process at the
other end when an engine is closed under replies that it is sending.
"""

MOST_FAILED = 256
"""So many failed posts may wait for a fresh engine, whether they concern rows or not: probes and
fences of a peer that fails again and again would be kept without end."""


@dataclass(slots=True, eq=False)
class Case:
    """Something that has waited to be quiet since a time; `rows` of ours with it. `dead_writers`
    counts dead producers whose last bytes our present engine may still receive."""

    rows: int
    since: float
    flights: Sequence[Flight] = ()
    dead_writers: int = 0

    @property
    def needs_engine(self) -> bool:
        """Whether closing our engine would help."""
        return self.dead_writers > 0 or not all(flight.is_quiet for flight in self.flights)


class Quarantine:
    """All that waits to be quiet. `is_moving` is asked whether something still moves, and
    `before_close` is called to end what moves all the same."""

    def __init__(
        self,
        endpoint: Endpoint,
        loop: Loop,
        *,
        is_moving: Callable[[], bool],
        before_close: Callable[[TransferError], None],
    ) -> None:
        self._endpoint = endpoint
        self._loop = loop
        self._is_moving = is_moving
        self._before_close = before_close
        self._cases: list[Case] = []

    @property
    def rows(self) -> int:
        """Rows that something may still write to."""
        return sum(case.rows for case in self._cases)

    @contextmanager
    def case(self, flights: Sequence[Flight], rows: int = 0) -> Generator[Case]:
        """Something that waits to be quiet, for as long as the block lasts."""
        made = Case(rows, self._endpoint.clock(), flights)
        self._cases.append(made)
        self._endpoint.metrics.quarantined.set(self.rows)
        try:
            yield made
        finally:
            self._cases.remove(made)
            self._endpoint.metrics.quarantined.set(self.rows)

    # ── waiting ───────────────────────────────────────────────────────────────────

    def quiesced(self, sources: Sequence[Source], rows: int) -> Routine[None]:
        """Return when nothing can write to the rows of a failed pull any more."""
        flights = [flight for source in sources for flight in source.flights]
        with self.case(flights, rows) as case:
            yield from together(
                self._landed(case, sources), *(self._silent(case, each) for each in sources)
            )
        for source in sources:
            source.forget()

    def _landed(self, case: Case, sources: Sequence[Source]) -> Routine[None]:
        """Wait for our own posts; a peer that is silent for long is given up."""
        options = self._endpoint.options
        while not all(flight.is_quiet for flight in case.flights):
            if self._endpoint.clock() > case.since + options.drain_seconds:
                for source in sources:
                    self._give_up_on(source)
            yield NOW_AND_THEN

    def _give_up_on(self, source: Source) -> None:
        peer = source.peer
        if peer.card is source.card and not all(flight.is_quiet for flight in source.flights):
            seconds = self._endpoint.options.drain_seconds
            peer.lose(lost(peer.name, f"silent for {seconds} s"))

    def _silent(self, case: Case, source: Source) -> Routine[None]:
        """Wait until the producer has said that it writes no more, or is dead."""
        endpoint, options = self._endpoint, self._endpoint.options
        liveness_read: Task[None] | None = None
        ask_at = look_at = endpoint.clock()
        while not source.writer_is_quiet:
            if self._is_dead(source):
                yield from self._engine_replaced(case)
                break
            if endpoint.clock() >= ask_at:
                ask_at = endpoint.clock() + options.heartbeat_seconds
                source.peer.greet()
                source.peer.send(End(source.id, 0, "failed"))
            if endpoint.clock() >= look_at and (liveness_read is None or liveness_read.is_over):
                look_at = endpoint.clock() + options.contact_seconds
                liveness_read = self._loop.start("liveness read", self._looked(source))
            yield NOW_AND_THEN
        if liveness_read is not None:
            liveness_read.interrupt(lost(source.peer.name, "its rows are no longer needed"))

    def _is_dead(self, source: Source) -> bool:
        """Whether the process that wrote is gone: another answers at its address, or its
        memory cannot be read because nobody is there."""
        peer = source.peer
        if peer.state == "ready" and peer.card is not None and peer.card.start != source.card.start:
            return True
        return source.card.engine in self._endpoint.gone

    def _looked(self, source: Source) -> Routine[None]:
        """Read some memory of the producer's: that it cannot be read tells that it is gone."""
        endpoint, card = self._endpoint, source.card
        endpoint.attach(card, source)
        try:
            yield from CounterRead(endpoint, card, source.ticket.blocks).generations()
        finally:
            endpoint.detach(card.engine, source)

    def _engine_replaced(self, case: Case) -> Routine[None]:
        number = self._endpoint.num_engines
        case.dead_writers += 1
        while self._endpoint.num_engines == number:
            yield NOW_AND_THEN
        case.dead_writers -= 1

    # ── the engine ────────────────────────────────────────────────────────────────

    def upkeep(self) -> Routine[None]:
        """Look at posts that were given up, and replace the engine when that is due."""
        while True:
            wait = AFTER_ERROR
            with self._endpoint.guard("quarantine"):
                self._endpoint.poll_flights()
                self._endpoint.disconnect_idle()
                if self._is_due():
                    yield from self._replaced()
                wait = NOW_AND_THEN if self._cases else IDLE
            yield wait

    def _is_due(self) -> bool:
        """Whether rows, too many posts or our engine's own fault have waited for too long."""
        options, now = self._endpoint.options, self._endpoint.clock()
        failed = sorted(f.failed_at for f in self._endpoint.flights if f.failed_at is not None)
        if len(failed) > MOST_FAILED:
            return now - failed[MOST_FAILED] > options.quarantine_seconds / HURRY
        waiting = [case for case in self._cases if case.needs_engine]
        faulty_since = self._endpoint.faulty_since
        since = [case.since for case in waiting] + ([] if faulty_since is None else [faulty_since])
        if not since:
            return False
        layout = self._endpoint.layout
        total = sum(layout.num_blocks(g) for g in range(len(layout.groups)))
        waited = now - min(since)
        is_scarce = (
            sum(case.rows for case in waiting) > options.quarantine_share * total
            or self._endpoint.stage.is_scarce
        )
        return waited > options.quarantine_seconds / (HURRY if is_scarce else 1)

    def _replaced(self) -> Routine[None]:
        """Let what moves end, for a while; then close the engine and go on with a fresh one."""
        endpoint = self._endpoint
        endpoint.is_draining = True
        try:
            until = endpoint.clock() + endpoint.options.drain_seconds
            while self._is_moving() and endpoint.clock() < until:
                yield NOW_AND_THEN
            name = endpoint.transport.name
            self._before_close(EngineReplaced(endpoint.name))
            yield NOW_AND_THEN
            endpoint.replace_engine()
            endpoint.note("engine-replaced", {"engine": name, "rows": self.rows})
        finally:
            endpoint.is_draining = False
