"""All pulls of an agent: begun, counted, and put into quarantine where they fail."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import numpy as np

from kvstow.errors import TransferError
from kvstow.plan.retention import Bools
from kvstow.transfer.loop import Loop, Task, bug
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

    The rows belong to the transfer until it is `quiet`, which may be later than its end if it
    failed: the agent keeps them from being reused until then. Rows are given back by
    `agent.settle`, which `poll` and `wait` call only in the thread of the blocks' owner.
    """

    def __init__(
        self,
        order: Order,
        started: float,
        settle: Callable[[], None],
        abort: "Callable[[Transfer], None]",
        on_quiet: Callable[[], None],
        when_late: Callable[[], str],
    ) -> None:
        self.order = order
        self.started = started
        self.error: TransferError | None = None
        self.stats: Stats | None = None
        self._settle = settle
        self._abort = abort
        self._on_quiet = on_quiet
        self._when_late = when_late
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
        self._settle()
        if self.error is not None:
            raise self.error
        return True

    def wait(self, seconds: float | None = None) -> Stats:
        """The outcome. Raises TransferError if it failed, TimeoutError if it has not ended."""
        if not self._ended.wait(seconds):
            raise TimeoutError(f"transfer has not ended within {seconds} s{self._when_late()}")
        self.poll()
        assert self.stats is not None
        return self.stats

    def wait_quiet(self, seconds: float | None = None) -> bool:
        """Whether nothing writes to the rows any more; waits for it at most so long."""
        is_quiet = self._quiet.wait(seconds)
        self._settle()
        return is_quiet

    def abort(self) -> None:
        """Give up; ends as a TransferError of kind `aborted` unless it has ended already."""
        self._abort(self)

    # ── for the agent ─────────────────────────────────────────────────────────────

    def end(self, stats: Stats | None, error: TransferError | None) -> None:
        """It was accepted, or has failed."""
        self.stats, self.error = stats, error
        self._ended.set()

    def fail(self, error: Exception) -> None:
        """It was accepted, and what that means for its rows could not be done."""
        self.stats, self.error = None, bug("accepting a pull", error)

    def mark_quiet(self) -> None:
        """Nothing writes to the rows any more."""
        self._quiet.set()
        try:
            self._on_quiet()
        except Exception:
            log.exception("on_quiet of a pull")


class Pulls:
    """The pulls that run, and those that have failed and are not quiet yet.

    Everything but `abort` is for the loop's thread.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        loop: Loop,
        peers: Peers,
        quarantine: Quarantine,
        owner: OwnerQueue,
    ) -> None:
        self._endpoint = endpoint
        self._loop = loop
        self._peers = peers
        self._quarantine = quarantine
        self._owner = owner
        self._plans = SourcePlans(endpoint.layout)
        self._running: dict[Transfer, Task[Stats]] = {}
        self._unquiet: set[Transfer] = set()

    def __len__(self) -> int:
        return len(self._running)

    @property
    def are_quiet(self) -> bool:
        """Whether none runs and nothing writes to the rows of any."""
        return not self._running and not self._unquiet

    # ── beginning ─────────────────────────────────────────────────────────────────

    def begin(self, transfer: Transfer, tickets: Sequence[Ticket], deadline: float) -> None:
        """Start the routine of a pull whose rows are shared already."""

        def interrupt(error: TransferError) -> None:
            self._interrupt(transfer, error)

        def wake() -> None:
            if transfer in self._running:
                self._running[transfer].wake()

        sources = [
            Source(self._endpoint, self._peers.at(t.address, t.key), t, interrupt, wake)
            for t in tickets
        ]
        routine = pull(self._endpoint, transfer.order, sources, self._plans)
        task = self._running[transfer] = self._loop.start("pull", routine)
        seconds = deadline - transfer.started
        task.deadline = deadline
        task.late = lambda: TransferError(f"no end within {seconds:.3g} s", kind="timeout")
        task.on_end = lambda: self._ended(transfer, sources)

    def abort(self, transfer: Transfer) -> None:
        """Give up a transfer, unless it has ended; from any thread."""
        error = TransferError("transfer was aborted here", kind="aborted")
        with suppress(TransferError):  # once the agent is closed, all transfers have ended
            self._loop.submit(lambda: self._interrupt(transfer, error))

    def interrupt_all(self, error: TransferError) -> None:
        """End every pull that runs."""
        for transfer in tuple(self._running):
            self._interrupt(transfer, error)

    def _interrupt(self, transfer: Transfer, error: TransferError) -> None:
        if transfer in self._running:
            self._running[transfer].interrupt(error)

    # ── ending ────────────────────────────────────────────────────────────────────

    def _ended(self, transfer: Transfer, sources: Sequence[Source]) -> None:
        """A pull was accepted, or its rows go into quarantine."""
        task = self._running.pop(transfer)
        self._count(transfer, task, sources)
        if task.error is None:
            filled = _filled(transfer.order, sources)
            self._owner.defer(lambda: self._accept(transfer.order, filled), transfer.fail)
            transfer.end(task.result, None)
            transfer.mark_quiet()
            return
        self._owner.defer(lambda: self._put_aside(transfer.order))
        self._unquiet.add(transfer)
        transfer.end(None, task.error)
        routine = self._quarantine.quiesced(sources, transfer.order.num_rows)
        quiet = self._loop.start("quarantine of a pull", routine)
        quiet.on_end = lambda: self._take_back(transfer) if quiet.error is None else None

    def refuse(self, transfer: Transfer, error: TransferError) -> None:
        """A pull could not begin: nothing has written to its rows."""
        order = transfer.order
        self._owner.defer(lambda: self._end_writing(order))
        transfer.end(None, error)
        transfer.mark_quiet()

    def mark_quiet(self) -> None:
        """The engine was closed: nothing writes any more."""
        for transfer in tuple(self._unquiet):
            self._take_back(transfer)

    def _take_back(self, transfer: Transfer) -> None:
        """Nothing writes to a failed pull's rows any more."""
        self._unquiet.discard(transfer)
        self._owner.defer(lambda: self._end_quarantine(transfer.order))
        transfer.mark_quiet()

    def _count(self, transfer: Transfer, task: Task[Stats], sources: Sequence[Source]) -> None:
        endpoint, metrics = self._endpoint, self._endpoint.metrics
        outcome = "accepted" if task.error is None else task.error.kind
        seconds = endpoint.clock() - transfer.started
        endpoint.count(metrics.transfers, outcome)
        for source in sources:
            endpoint.count(metrics.bytes, source.direction, source.nbytes)
            endpoint.count(metrics.descriptors, source.direction, source.descriptors)
            source.peer.moved_bytes += source.nbytes
            source.peer.moved_seconds += seconds
        if task.error is None:
            metrics.seconds.observe(seconds)
        endpoint.note(
            "transfer",
            {
                "outcome": outcome,
                "seconds": seconds,
                "sources": len(sources),
                "peers": ", ".join(source.peer.name for source in sources),
                "bytes": sum(source.nbytes for source in sources),
                "descriptors": sum(source.descriptors for source in sources),
            },
        )

    # ── in the owner's thread ─────────────────────────────────────────────────────

    def _accept(self, order: Order, filled: Mapping[int, Bools]) -> None:
        for g, ids in order.written_ids.items():
            self._endpoint.owner.trust(g, ids, filled[g][order.written[g]])
        self._end_writing(order)

    def _end_writing(self, order: Order) -> None:
        self._owner.end_writing(order.written_ids)
        self._owner.release(order.into)

    def _put_aside(self, order: Order) -> None:
        for g, ids in order.written_ids.items():
            self._endpoint.owner.quarantine(g, ids)
        self._owner.release(order.into)

    def _end_quarantine(self, order: Order) -> None:
        self._owner.end_writing(order.written_ids)
        for g, ids in order.written_ids.items():
            self._endpoint.owner.unquarantine(g, ids)


def _filled(order: Order, sources: Sequence[Source]) -> dict[int, Bools]:
    """By group, which rows of an order all sources together have filled."""
    filled = {g: np.ones(len(listed), bool) for g, listed in order.into.items()}
    for source in sources:
        if source.route is not None:
            whole = {g: listed.whole for g, listed in source.ticket.blocks.items()}
            brought = source.route.filled(
                whole, order.into, order.num_tokens, start_token=order.start_token
            )
            for g, part in brought.items():
                filled[g] &= part
    return filled


def checked_tokens(tickets: Sequence[Ticket], start_token: int, num_tokens: int | None) -> int:
    """How many tokens a pull wants; TransferError where the tickets do not have them."""
    if not all(isinstance(ticket, Ticket) for ticket in tickets):  # pyright: ignore[reportUnnecessaryIsInstance]
        kinds = sorted({type(ticket).__name__ for ticket in tickets})
        raise TransferError(
            f"tickets are {', '.join(kinds)}\n\nhint: kvstow.Ticket.parse(text)", kind="ticket"
        )
    lengths = {ticket.num_tokens for ticket in tickets}
    if not tickets:
        raise TransferError("there is no ticket to pull with", kind="ticket")
    if len(lengths) != 1:
        raise TransferError(
            f"tickets of {sorted(lengths)} tokens are not of one request", kind="ticket"
        )
    offered = lengths.pop()
    wanted = offered if num_tokens is None else num_tokens
    if wanted > offered:
        raise TransferError(
            f"{wanted} tokens are wanted, the ticket is for {offered}", kind="ticket"
        )
    if not 0 <= start_token < wanted:
        raise TransferError(
            f"tokens [{start_token}, {wanted}) are none\n\nhint: start_token is at least 0 and "
            f"below num_tokens",
            kind="refused",
        )
    return wanted
