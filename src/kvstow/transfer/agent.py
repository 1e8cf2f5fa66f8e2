"""The agent: one per process and arena. It offers blocks, pulls blocks, and keeps its word.

A thread of its own does all the talking and moving; callers wait on events. The blocks'
owner (a pool, say) is only touched in the callers' thread: see `Agent.tend`.
"""

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from kvstow.errors import KvstowError, TransferError
from kvstow.memory.arena import Arena
from kvstow.observe import Telemetry
from kvstow.plan.blocklist import Blocks
from kvstow.transfer.channel import Channel, Keys, Line
from kvstow.transfer.contact import Contact
from kvstow.transfer.generations import Owner, ids_of
from kvstow.transfer.home import Home
from kvstow.transfer.lease import EndReason, Lease, Leases
from kvstow.transfer.leg import Goal, Leg
from kvstow.transfer.options import DEFAULTS, DigestPolicy, Options
from kvstow.transfer.path import Path
from kvstow.transfer.pulling import Plans, Transfer
from kvstow.transfer.serving import SILENT_BEATS, Serving
from kvstow.transfer.status import status_document
from kvstow.transfer.ticket import Ticket
from kvstow.transfer.transport import Direction, Transport
from kvstow.transfer.wire import DropReason, End

log = logging.getLogger(__name__)

IDLE_MS = 20
BUSY_SLEEP = 20e-6


class Agent:
    """Moves rows between this arena and those of other agents.

    `owner` hands out the arena's block ids: a `Pool`, or `Generations` where an engine does
    it. `listen` is a ZeroMQ address; anything but loopback needs `keys`.
    """

    def __init__(
        self,
        arena: Arena,
        owner: Owner,
        *,
        transport: Transport,
        name: str = "",
        listen: str = "tcp://127.0.0.1:*",
        keys: Keys | None = None,
        options: Options = DEFAULTS,
        telemetry: Telemetry | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name or f"agent-{secrets.token_hex(4)}"
        self.options = options
        self.telemetry = telemetry or Telemetry()
        self._key = keys.public if keys else ""
        self._channel = Channel(listen, keys, self._dropped)
        self._metered = False
        self.home = Home(self.name, arena, owner, transport, self.telemetry, clock)
        self.leases = Leases()
        self.serving = Serving(
            self.home, self._channel, self.leases, self._ticket_of,
            lambda: status_document(self), SILENT_BEATS * options.heartbeat_seconds,
        )  # fmt: skip
        self.contacts: dict[str, Contact] = {}
        self.transfers: list[Transfer] = []
        self._plans = Plans(self.home)
        self._tickets: dict[int, Ticket] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._owed: deque[Callable[[], None]] = deque()
        self._open: list[Transfer] = []
        self._tending = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._channel.watch(self._wake)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """Where other agents find this one."""
        return self._channel.address

    # ── offering ──────────────────────────────────────────────────────────────────

    def offer_blocks(
        self,
        blocks: Mapping[int, Blocks],
        num_tokens: int,
        *,
        readers: int = 1,
        lease_seconds: float | None = None,
        on_end: Callable[[EndReason], None] | None = None,
    ) -> Ticket:
        """Let `readers` consumers pull these blocks, each once, while the lease runs.

        The blocks are kept from being reused until the lease ends; then `on_end` is called
        with the reason, in the thread of whoever calls this agent next.
        """
        self.tend()
        home = self.home
        home.checked(blocks)
        self._share(blocks)
        seconds = lease_seconds or self.options.lease_seconds
        ticket = Ticket(
            agent=self.name,
            start=home.transport.name,
            address=self.address,
            key=self._key,
            lease=Leases.fresh_id(),
            lease_seconds=seconds,
            fingerprint=home.fingerprint,
            num_tokens=num_tokens,
            blocks=dict(blocks),
            generations=home.generations(blocks),
        )
        lease = Lease(
            id=ticket.lease,
            digest=ticket.digest,
            seconds=seconds,
            readers=readers,
            deadline=home.clock() + seconds,
            on_end=lambda reason: self._lease_ended(ticket, reason, on_end),
        )
        self._submit(lambda: self._grant(lease, ticket))
        return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """Take a ticket back: its readers fail, its blocks are given back."""
        self._submit(lambda: self.leases.end(ticket.lease, "withdrawn"))

    def _grant(self, lease: Lease, ticket: Ticket) -> None:
        self._tickets[lease.id] = ticket
        self.leases.grant(lease)
        self.home.metrics.leases.inc()

    def _ticket_of(self, lease: int) -> Ticket:
        return self._tickets[lease]

    def _lease_ended(
        self, ticket: Ticket, reason: EndReason, on_end: Callable[[EndReason], None] | None
    ) -> None:
        del self._tickets[ticket.lease]
        self.home.metrics.leases.dec()
        self.home.metrics.lease_ends.labels(reason).inc()
        self.home.note("lease-ended", {"lease": ticket.lease, "reason": reason})
        self.serving.lease_ended(ticket.lease, reason)
        self._owed.append(lambda: self._release(ticket.blocks))
        if on_end is not None:
            self._owed.append(lambda: on_end(reason))

    # ── pulling ───────────────────────────────────────────────────────────────────

    def connect(self, address: str, *, key: str = "", seconds: float | None = None) -> "Peer":
        """Meet the agent at an address; TransferError if it refuses or does not answer."""
        greeted = threading.Event()
        contact = self._contact(address, key)

        def greet() -> None:
            contact.greet(self.home.clock())
            greeted.set()

        self._submit(greet)
        limit = time.monotonic() + (seconds or self.options.contact_seconds)
        while time.monotonic() < limit:
            if greeted.wait(0.0005) and contact.state == "ready":
                return Peer(self, contact)
            if greeted.is_set() and contact.error is not None:
                raise contact.error
            time.sleep(0.0005)
        raise TransferError(f"peer at {address} did not answer", kind="timeout", peer=address)

    def pull(
        self,
        tickets: Ticket | Sequence[Ticket],
        *,
        into: Mapping[int, Blocks],
        start_token: int = 0,
        num_tokens: int | None = None,
        deadline: float | None = None,
        direction: Direction | None = None,
        digest: DigestPolicy | None = None,
    ) -> Transfer:
        """Bring tokens `[start_token, num_tokens)` of a request into these rows.

        `tickets` are one per source rank; together they must hold all that this rank
        holds. The rows must be held by the caller. `deadline` is in seconds from now.
        """
        self.tend()
        home = self.home
        home.checked(into)
        listed = (tickets,) if isinstance(tickets, Ticket) else tuple(tickets)
        lengths = {ticket.num_tokens for ticket in listed}
        if len(lengths) != 1:
            raise TransferError(f"tickets of {sorted(lengths)} tokens are not of one request",
                                kind="ticket")  # fmt: skip
        goal = Goal(
            into=dict(into),
            start_token=start_token,
            num_tokens=lengths.pop() if num_tokens is None else num_tokens,
            direction=direction or self.options.direction,
            digest=digest or self.options.digest,
        )
        self._share(into)
        until = home.clock() + (deadline or self.options.transfer_seconds)
        legs = [Leg(home, self._contact(t.address, t.key), t, goal) for t in listed]
        transfer = Transfer(home, goal, legs, until, self._plans, self.tend)
        with self._tending:
            self._open.append(transfer)
        self._submit(lambda: self.transfers.append(transfer))
        return transfer

    def keep(self, ticket: Ticket) -> None:
        """Keep a ticket's lease alive until it is pulled or dropped."""
        self._submit(lambda: self._keep(ticket))

    def drop(self, ticket: Ticket) -> None:
        """Tell the producer that nobody here will pull this ticket: it ends the lease."""
        self._submit(lambda: self._drop(ticket))

    def _keep(self, ticket: Ticket) -> None:
        contact = self._contact(ticket.address, ticket.key)
        contact.kept[ticket.lease] = self.home.clock()
        contact.greet(self.home.clock())

    def _drop(self, ticket: Ticket) -> None:
        contact = self._contact(ticket.address, ticket.key)
        contact.kept.pop(ticket.lease, None)
        contact.greet(self.home.clock())
        contact.send(End(0, ticket.lease, "aborted"))

    def _contact(self, address: str, key: str) -> Contact:
        if address not in self.contacts:
            fresh = Contact(self.home, self._channel, self.options, address, key)
            self.contacts.setdefault(address, fresh)
        return self.contacts[address]

    # ── the owner's blocks ────────────────────────────────────────────────────────

    def tend(self) -> None:
        """Settle what is owed to the blocks' owner, in the caller's thread.

        Every other call does this first. Call it now and then where nothing else is
        called, so that blocks of leases and transfers that have ended come free.
        """
        with self._tending:
            while self._owed:
                self._owed.popleft()()
            for transfer in tuple(self._open):
                self._settle(transfer)

    def _settle(self, transfer: Transfer) -> None:
        into = transfer.goal.into
        if transfer.quiet:
            for g, ids in ids_of(into).items():
                if transfer.quarantined:
                    self.home.owner.unquarantine(g, ids)
                else:
                    self.home.owner.release(g, ids)
            self._open.remove(transfer)
        elif transfer.done and not transfer.quarantined:
            for g, ids in ids_of(into).items():
                self.home.owner.quarantine(g, ids)
                self.home.owner.release(g, ids)
            transfer.quarantined = True

    def _share(self, blocks: Mapping[int, Blocks]) -> None:
        shared: list[int] = []
        try:
            for g, ids in ids_of(blocks).items():
                self.home.owner.share(g, ids)
                shared.append(g)
        except KvstowError:
            for g in shared:
                self.home.owner.release(g, blocks[g].ids)
            raise

    def _release(self, blocks: Mapping[int, Blocks]) -> None:
        for g, ids in ids_of(blocks).items():
            self.home.owner.release(g, ids)

    # ── the agent's own thread ────────────────────────────────────────────────────

    def start(self) -> None:
        """Start the thread."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name=f"kvstow-{self.name}", daemon=True
            )
            self._thread.start()

    def _submit(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        os.eventfd_write(self._wake, 1)

    def _serve(self) -> None:
        device = self.home.arena.device
        if device.type == "cuda":
            import torch

            torch.cuda.set_device(device)
            torch.cuda.synchronize(device)
        busy = False
        while not self._closing.is_set():
            if busy:
                time.sleep(BUSY_SLEEP)
            busy = self.step(0 if busy else IDLE_MS)

    def step(self, timeout_ms: int = 0) -> bool:
        """One turn of everything; whether something is under way. For the agent's thread,
        or for a caller that has not started one."""
        self._obey()
        for line, message in self._channel.heard(timeout_ms):
            self._obey()
            self._dispatch(line, message)
        now = self.home.clock()
        try:
            self.home.transport.progress()
        except TransferError as error:
            log.warning("progress: %s", error)
        self.serving.advance(now)
        for contact in tuple(self.contacts.values()):
            contact.advance(now)
        for transfer in self.transfers:
            transfer.advance(now)
        self._retire()
        self.leases.expire(now=now)
        return bool(
            self.transfers or self.serving.busy or any(c.busy for c in self.contacts.values())
        )

    def _obey(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._commands:
            self._commands.popleft()()

    def _dispatch(self, line: Line, message: object) -> None:
        now = self.home.clock()
        if line.socket is None:
            self.serving.hear(line, message, now)  # pyright: ignore[reportArgumentType]
            return
        for contact in self.contacts.values():
            if contact.line is line:
                contact.hear(message, now)  # pyright: ignore[reportArgumentType]
                return

    def _retire(self) -> None:
        if any(transfer.quiet for transfer in self.transfers):
            self.transfers = [t for t in self.transfers if not t.quiet]
        failed = [t for t in self.transfers if t.done]
        rows = sum(len(ids) for t in failed for ids in ids_of(t.goal.into).values())
        if rows or self._metered:
            self.home.metrics.quarantined.set(rows)
            self._metered = bool(rows)

    def _dropped(self, reason: DropReason, detail: str) -> None:
        self.home.metrics.messages.labels(reason).inc()
        self.home.note("message-dropped", {"reason": reason, "detail": detail})

    # ── its end ───────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Stop, end all leases and transfers, let go of engine and sockets."""
        if self._closing.is_set():
            return
        self._closing.set()
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join()
        now = self.home.clock()
        for transfer in self.transfers:
            if not transfer.done:
                transfer.fail(TransferError("the agent was closed", kind="aborted"), now)
        for contact in self.contacts.values():
            contact.fail(TransferError("the agent was closed", kind="aborted"))
        self.leases.close()
        self.home.transport.close()
        for transfer in self.transfers:
            transfer.rest()
        self.tend()
        self._channel.close()
        os.close(self._wake)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Peer:
    """An agent that we have met."""

    def __init__(self, agent: Agent, contact: Contact) -> None:
        self._agent = agent
        self._contact = contact

    @property
    def name(self) -> str:
        return self._contact.name

    @property
    def address(self) -> str:
        return self._contact.address

    @property
    def path(self) -> Path | None:
        """Which way bytes go between the two, and how that was decided."""
        return self._contact.path

    def pull(
        self,
        ticket: Ticket,
        *,
        into: Mapping[int, Blocks],
        start_token: int = 0,
        num_tokens: int | None = None,
        deadline: float | None = None,
        direction: Direction | None = None,
        digest: DigestPolicy | None = None,
    ) -> Transfer:
        """Pull one ticket of this peer: see `Agent.pull`."""
        if ticket.address != self.address:
            raise TransferError(f"ticket is of the agent at {ticket.address}, not of this one at "
                                f"{self.address}", kind="ticket", peer=self.name)  # fmt: skip
        return self._agent.pull(
            ticket,
            into=into,
            start_token=start_token,
            num_tokens=num_tokens,
            deadline=deadline,
            direction=direction,
            digest=digest,
        )
