"""The agent's own thread: it talks, moves, fences, and lets leases run out.

Callers hand it commands; it hands results back through events and `owed`, a queue of
things to do to the blocks' owner, which only callers may touch.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from kvstow.errors import KvstowError, TransferError
from kvstow.transfer.channel.base import Channel, Line
from kvstow.transfer.channel.messages import AnyMessage, Deliver, Delivered, End
from kvstow.transfer.channel.status import CachedStatus, status_document
from kvstow.transfer.contact import Contact
from kvstow.transfer.home import Home
from kvstow.transfer.lease import EndReason, Lease, Leases
from kvstow.transfer.options import Options
from kvstow.transfer.pulling import Plans, Transfer
from kvstow.transfer.receiving import Arrival, Push
from kvstow.transfer.serving import SILENT_BEATS, Serving
from kvstow.transfer.ticket import Ticket

log = logging.getLogger(__name__)

IDLE_MS = 20
DOZE_MS = 1
BUSY_SLEEP = 20e-6

DOZE_AFTER = 8
"""After so many turns in which a guest that reads needed nothing of us, we wait for messages
between turns: on one host it never does, and the processor is better used for its copies."""

WORK_SECONDS = 50e-6
"""Progress that took so long was for somebody."""


class Service:
    """Everything that happens between calls. `step` is one turn of it."""

    def __init__(self, home: Home, channel: Channel, options: Options) -> None:
        self.home = home
        self.channel = channel
        self.options = options
        self.leases = Leases()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.serving = Serving(home, channel, self.leases, self._ticket_of,
                               CachedStatus(lambda: status_document(self), home.clock).document,
                               self.wake,
                               SILENT_BEATS * options.heartbeat_seconds)  # fmt: skip
        self.contacts: dict[str, Contact] = {}
        self.transfers: list[Transfer] = []
        self.plans = Plans(home)
        self.owed: deque[Callable[[], None]] = deque()
        self.arrivals: dict[int, Arrival] = {}
        self._pushes: dict[int, Push] = {}
        self._tickets: dict[int, Ticket] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._any_quarantined = False
        self._idle_turns = 0
        channel.watch(self._wake)

    # ── the thread ────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start the thread, once."""
        if self._thread is None:
            name = f"kvstow-{self.home.name}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def submit(self, command: Callable[[], None]) -> None:
        """Have something done in the thread."""
        self._commands.append(command)
        self.wake()

    def wake(self) -> None:
        """End the wait for messages; from any thread."""
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        self.home.use_device()  # the engine copies in this thread
        busy = False
        while not self._closing.is_set():
            dozes = self._idle_turns >= DOZE_AFTER
            if busy and not dozes:
                self.pause()
            try:
                busy = self.step((DOZE_MS if dozes else 0) if busy else IDLE_MS)
            except Exception as error:  # nobody else would ever hear of it
                log.exception("agent %s: a turn failed", self.home.name)
                self._give_up(error)
                busy = True

    def pause(self) -> None:
        """Between two turns: nothing where the last one has waited already."""
        if not self.home.has_watched:
            time.sleep(BUSY_SLEEP)
        self.home.has_watched = False

    def _give_up(self, error: Exception) -> None:
        """Something went wrong that never should: end all transfers rather than hang."""
        self.home.note("turn-failed", {"error": repr(error)})
        fault = TransferError(f"agent {self.home.name!r}: {error!r}", kind="transport")
        for transfer in self.transfers:
            if not transfer.done:
                transfer.fail(fault, self.home.clock())

    def step(self, timeout_ms: int = 0) -> bool:
        """One turn of everything; whether something is under way."""
        self._idle_turns += 1
        for line, message in self.channel.heard(timeout_ms):
            self._idle_turns = 0
            self._obey()
            try:
                self._dispatch(line, message)
            except (KvstowError, ValueError, ArithmeticError, LookupError) as error:
                log.warning("agent %s: %s: %r", self.home.name, type(message).__name__, error)
                self.home.metrics.messages.labels("body").inc()
        self._obey()
        now = self.home.clock()
        self.home.transport.progress()
        if self.home.clock() - now > WORK_SECONDS:
            self._idle_turns = 0
        self.serving.advance(now)
        busy = False
        for contact in tuple(self.contacts.values()):
            contact.advance(now)
            busy = busy or contact.busy
        for transfer in self.transfers:
            transfer.advance(now)
        self._retire()
        self.leases.expire(now=now)
        if self.transfers or busy or self.serving.works:
            self._idle_turns = 0
            return True
        return self.serving.attends

    def _obey(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _dispatch(self, line: Line, message: AnyMessage) -> None:
        now = self.home.clock()
        if isinstance(message, Deliver):
            self._deliver(line, message)
        elif isinstance(message, Delivered):
            if message.transfer in self._pushes:
                self._pushes.pop(message.transfer).hear(message)
        elif line.is_incoming:
            self.serving.hear(line, message, now)
        else:
            for contact in tuple(self.contacts.values()):
                if contact.line is line:
                    contact.hear(message, now)

    def _retire(self) -> None:
        """Forget transfers that are over; count rows that are not at rest."""
        ended = [transfer for transfer in self.transfers if transfer.done]
        if not ended and not self._any_quarantined:
            return
        self.transfers = [transfer for transfer in self.transfers if not transfer.quiet]
        rows = self.quarantined_rows
        if rows or self._any_quarantined:
            self.home.metrics.quarantined.set(rows)
            self._any_quarantined = bool(rows)

    @property
    def quarantined_rows(self) -> int:
        """Rows of failed transfers that something may still write to."""
        return sum(len(b) for t in self.transfers if t.done for b in t.goal.into.values())

    # ── leases ────────────────────────────────────────────────────────────────────

    def grant(self, lease: Lease, ticket: Ticket) -> None:
        self._tickets[lease.id] = ticket
        self.leases.grant(lease)
        self.home.metrics.leases.inc()

    def _ticket_of(self, lease: int) -> Ticket:
        return self._tickets[lease]

    def lease_ended(self, ticket: Ticket, reason: EndReason) -> None:
        """Tell readers; owed to the owner is what the agent has put in the queue."""
        del self._tickets[ticket.lease]
        self.home.metrics.leases.dec()
        self.home.metrics.lease_ends.labels(reason).inc()
        self.home.note("lease-ended", {"lease": ticket.lease, "reason": reason})
        self.serving.lease_ended(ticket.lease, reason)

    def keep(self, ticket: Ticket) -> None:
        contact = self.contact(ticket.address, ticket.key)
        contact.kept.add(ticket.lease)
        contact.greet(self.home.clock())

    def drop(self, ticket: Ticket) -> None:
        contact = self.contact(ticket.address, ticket.key)
        contact.kept.discard(ticket.lease)
        contact.tell(End(0, ticket.lease, "aborted"), self.home.clock())

    def expect(self, arrival: Arrival, lease: Lease) -> None:
        """Let somebody push under this lease; when it ends, nobody may any more."""
        self.arrivals[arrival.ticket.lease] = arrival
        self.grant(lease, arrival.ticket)

    # ── peers ─────────────────────────────────────────────────────────────────────

    def contact(self, address: str, key: str) -> Contact:
        """The contact for an address, made when it is first asked for."""
        if address not in self.contacts:
            fresh = Contact(self.home, self.channel, self.options, address, key)
            self.contacts.setdefault(address, fresh)
        return self.contacts[address]

    def push(self, push: Push) -> None:
        """Ask the agent that expects something to pull what we offer."""
        self._pushes[push.id] = push
        target = push.target
        contact = self.contact(target.address, target.key)
        message = Deliver(push.id, target.lease, target.digest, push.source.to_bytes())
        contact.tell(message, self.home.clock())

    def _deliver(self, line: Line, message: Deliver) -> None:
        """Somebody offers what we expect: pull it."""
        try:
            source = Ticket.from_bytes(message.source)
            arrival = self.arrivals.get(message.target)
            if arrival is None or arrival.ticket.digest != message.target_digest:
                raise TransferError("nothing is expected under this ticket", kind="ticket")
            del self.arrivals[message.target]
            contact = self.contact(source.address, source.key)
        except TransferError as error:
            self.channel.send(line, Delivered(message.transfer, error.kind, str(error)))
            return

        def answer(error: TransferError | None) -> None:
            kind, reason = (error.kind, str(error)) if error else (None, "")
            self.channel.send(line, Delivered(message.transfer, kind, reason))

        transfer = arrival.begin(source, contact, answer)
        self.transfers.append(transfer)
        self.leases.end(message.target, "read")

    # ── its end ───────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Stop the thread; fail what has not ended; let go of engine and sockets."""
        if self._closing.is_set():
            return
        self._closing.set()
        self.wake()
        if self._thread is not None:
            self._thread.join()
        self._obey()
        closed = TransferError(f"agent {self.home.name!r} was closed", kind="aborted")
        for transfer in self.transfers:
            if not transfer.done:
                transfer.fail(closed, self.home.clock())
        for push in self._pushes.values():
            push.fail(closed)
        self.leases.close()
        for contact in self.contacts.values():
            contact.fail(closed)
        self.home.close()
        for transfer in self.transfers:
            transfer.rest()
        self.channel.close()
        os.close(self._wake)
