"""All pulls of an agent: begun, counted, and put into quarantine where they fail."""

import logging
import threading
from collections.abc import Callable, Sequence

import numpy as np

from kvstow.errors import TransferError
from kvstow.plan.retention import Bools
from kvstow.transfer.loop import Loop, Routine, Task, bug
from kvstow.transfer.peers.endpoint import Endpoint
from kvstow.transfer.peers.outgoing import Peers
from kvstow.transfer.pull import Order, Stats, pull
from kvstow.transfer.quarantine import Quarantine
from kvstow.transfer.source import Source, SourcePlans
from kvstow.transfer.tickets.owner import OwnerQueue
from kvstow.transfer.tickets.ticket import Ticket

log = logging.getLogger(__name__)


class Transfer:
    """A pull on its way. `poll` and `wait` may be called from any thread.

    Its rows are in quarantine until it is `quiet`, which may be later than its end if it failed.
    They are given back by `agent.settle`, which `poll` and `wait` call only in the thread of the
    blocks' owner.
    """

    def __init__(
        self, order: Order, loop: Loop, owner: OwnerQueue, on_quiet: Callable[[], None]
    ) -> None:
        self.order = order
        self.started = loop.clock()
        self.error: TransferError | None = None
        self.stats: Stats | None = None
        self.task: Task[None] = Task("pull")
        """Its routine, which goes on until the rows are quiet."""
        self._loop = loop
        self._owner = owner
        self._on_quiet = on_quiet
        self._ended = threading.Event()
        self._quiet = threading.Event()

    @property
    def done(self) -> bool:
        """Whether it has been accepted, or has failed."""
        return self._ended.is_set()

    @property
    def quiet(self) -> bool:
        """Whether nothing writes to the rows any more."""
        return self._quiet.is_set()

    def poll(self) -> bool:
        """Whether the rows may be used; raises TransferError if they never may."""
        if not self.done:
            return False
        self._owner.settle_if_ours()
        if self.error is not None:
            raise self.error
        return True

    def wait(self, seconds: float | None = None) -> Stats:
        """The outcome. Raises TransferError if it failed, TimeoutError if it has not ended."""
        if not self._ended.wait(seconds):
            hint = "\n\nhint: this agent was not started: agent.start()"
            raise TimeoutError(
                f"transfer has not ended within {seconds} s{'' if self._loop.has_thread else hint}"
            )
        self.poll()
        assert self.stats is not None
        return self.stats

    def wait_quiet(self, seconds: float | None = None) -> bool:
        """Whether nothing writes to the rows any more; waits for it at most so long."""
        is_quiet = self._quiet.wait(seconds)
        self._owner.settle_if_ours()
        return is_quiet

    def abort(self) -> None:
        """Give up; ends as a TransferError of kind `aborted` unless it has ended already."""
        error = TransferError("transfer was aborted here", kind="aborted")
        self._loop.try_submit(lambda: self.task.interrupt(error))

    # ── for the loop ──────────────────────────────────────────────────────────────

    def end(self, stats: Stats | None, error: TransferError | None) -> None:
        """It was accepted, or has failed: no deadline and no interrupt ends it any more."""
        self.task.shield()
        self.stats, self.error = stats, error
        self._ended.set()

    def mark_quiet(self) -> None:
        """Nothing writes to the rows any more."""
        self._quiet.set()
        try:
            self._on_quiet()
        except Exception:
            log.exception("on_quiet of a pull")


class Pulls:
    """The pulls that run, and those that have failed and are not quiet yet; for the loop's
    thread."""

    def __init__(
        self,
        endpoint: Endpoint,
        loop: Loop,
        peers: Peers,
        quarantine: Quarantine,
        owner: OwnerQueue,
    ) -> None:
        self.unquiet: dict[Transfer, None] = {}
        self._endpoint = endpoint
        self._loop = loop
        self._peers = peers
        self._quarantine = quarantine
        self._owner = owner
        self._plans = SourcePlans(endpoint.layout)

    @property
    def running(self) -> list[Transfer]:
        """Those that have neither been accepted nor failed."""
        return [transfer for transfer in tuple(self.unquiet) if not transfer.done]

    def begin(self, transfer: Transfer, tickets: Sequence[Ticket], seconds: float) -> None:
        """Start the routine of a pull whose rows are shared already."""
        peers = [self._peers.at(ticket.address, ticket.key) for ticket in tickets]
        sources = [
            Source(self._endpoint, peer, ticket, transfer.task)
            for peer, ticket in zip(peers, tickets, strict=True)
        ]
        task = self._loop.begin(transfer.task, self._followed(transfer, sources))
        task.deadline = transfer.started + seconds
        task.late = lambda: TransferError(f"no end within {seconds:.3g} s", kind="timeout")
        task.on_end = lambda: self._end_early(transfer, task)
        self.unquiet[transfer] = None

    def _end_early(self, transfer: Transfer, task: Task[None]) -> None:
        """The routine is over. Where that is a bug's fault, or the agent was closed, its rows wait
        until the agent is."""
        if not transfer.done:
            transfer.end(None, task.error)

    def refuse(self, transfer: Transfer, error: TransferError) -> None:
        """A pull could not begin: nothing has written to its rows."""
        transfer.end(None, error)
        self._end_quarantine(transfer)

    def _followed(self, transfer: Transfer, sources: Sequence[Source]) -> Routine[None]:
        """A pull to its end; and, where it has failed, until its rows are quiet."""
        order = transfer.order
        try:
            stats = yield from pull(self._endpoint, order, sources, self._plans)
        except TransferError as error:
            self._count(transfer, sources, error.kind)
            transfer.end(None, error)
            yield from self._quarantine.quiesced(sources, order.num_rows)
            self._end_quarantine(transfer)
            return
        try:
            self._accept(transfer, sources, stats)
        finally:
            for source in sources:  # whoever waits for the rows has them by now
                source.end("accepted")
                source.forget()

    def _accept(self, transfer: Transfer, sources: Sequence[Source], stats: Stats) -> None:
        """The rows may be used."""
        self._count(transfer, sources, "accepted")
        written, filled = transfer.order.written, _filled(transfer.order, sources)
        self._owner.defer(
            lambda: self._owner.unquarantine(written, filled),
            lambda error: transfer.end(None, bug("accepting a pull", error)),
        )
        del self.unquiet[transfer]
        transfer.end(stats, None)
        transfer.mark_quiet()

    def interrupt_all(self, error: TransferError) -> None:
        """End every pull that runs."""
        for transfer in self.running:
            transfer.task.interrupt(error)

    def mark_quiet(self) -> None:
        """The engine was closed: nothing writes any more."""
        for transfer in tuple(self.unquiet):
            self._end_quarantine(transfer)

    def _end_quarantine(self, transfer: Transfer) -> None:
        """Nothing writes to a failed pull's rows any more."""
        self.unquiet.pop(transfer, None)
        self._owner.defer(lambda: self._owner.unquarantine(transfer.order.written))
        transfer.mark_quiet()

    def _count(self, transfer: Transfer, sources: Sequence[Source], outcome: str) -> None:
        endpoint, metrics = self._endpoint, self._endpoint.metrics
        seconds = endpoint.clock() - transfer.started
        nbytes = descriptors = 0
        for source in sources:
            nbytes, descriptors = nbytes + source.nbytes, descriptors + source.descriptors
            endpoint.count(metrics.bytes, source.direction, source.nbytes)
            endpoint.count(metrics.descriptors, source.direction, source.descriptors)
            source.peer.moved_bytes += source.nbytes
            source.peer.moved_seconds += seconds
        endpoint.count(metrics.transfers, outcome)
        if outcome == "accepted":
            metrics.seconds.observe(seconds)
        facts = {
            "outcome": outcome,
            "seconds": seconds,
            "sources": len(sources),
            "peers": ", ".join([source.peer.name for source in sources]),
            "bytes": nbytes,
            "descriptors": descriptors,
        }
        endpoint.note("transfer", facts)


def _filled(order: Order, sources: Sequence[Source]) -> dict[int, Bools]:
    """By group, which of the written rows all sources together have filled."""
    filled = {g: np.ones(len(listed), bool) for g, listed in order.written.items()}
    for source in sources:
        if source.route is not None:
            whole = {g: listed.whole for g, listed in source.ticket.blocks.items()}
            brought = source.route.filled(
                whole, order.written, order.num_tokens, start_token=order.start_token
            )
            for g, part in brought.items():
                filled[g] &= part
    return filled
