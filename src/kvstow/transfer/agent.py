"""The agent: one per process and arena. It offers blocks, pulls blocks, and keeps its word."""

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from kvstow.blocks.ledger import Ledger
from kvstow.errors import KvstowError, TransferError
from kvstow.memory.arena import Arena
from kvstow.observe import Telemetry
from kvstow.route.blocks import Blocks
from kvstow.transfer.channel.curve import Keys
from kvstow.transfer.channel.framing import DropReason
from kvstow.transfer.channel.sockets import SocketChannel
from kvstow.transfer.contact import Contact
from kvstow.transfer.generations import Owner
from kvstow.transfer.home import Home
from kvstow.transfer.lease import EndReason, Lease, Leases
from kvstow.transfer.leg import Goal, Leg
from kvstow.transfer.options import DEFAULTS, DigestPolicy, Options
from kvstow.transfer.path import Way
from kvstow.transfer.peer import Peer
from kvstow.transfer.pulling import Transfer
from kvstow.transfer.receiving import Arrival, Push
from kvstow.transfer.service import Service
from kvstow.transfer.ticket import Ticket
from kvstow.transfer.transport.base import Transport
from kvstow.transfer.transport.parallel import parallel


class Agent:
    """Moves rows between this arena and those of other agents.

    `owner` hands out the arena's block ids: a `Pool`, or `Generations` where an engine does
    it; it is only ever touched in the caller's thread (see `tend`). `listen` is a ZeroMQ
    address; anything but loopback needs `keys`. Entering the agent starts its thread.
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
        self._home = Home(self.name, arena, owner, parallel(transport, options.engines),
                          self.telemetry, clock,
                          options.slot_bytes)  # fmt: skip
        self._channel = SocketChannel(listen, keys, self._dropped)
        self.service = Service(self._home, self._channel, options)
        self._open: list[Transfer] = []
        self._tending = threading.RLock()

    @property
    def address(self) -> str:
        """Where other agents find this one."""
        return self._channel.address

    def _dropped(self, reason: DropReason, detail: str) -> None:
        self._home.metrics.messages.labels(reason).inc()
        self._home.note("message-dropped", {"reason": reason, "detail": detail})

    # ── offering ──────────────────────────────────────────────────────────────────

    def offer(
        self,
        ledger: Ledger,
        request: int,
        *,
        num_tokens: int | None = None,
        readers: int = 1,
        lease_seconds: float | None = None,
        on_end: Callable[[EndReason], None] | None = None,
    ) -> Ticket:
        """Let consumers pull a request's blocks; the request itself may end meanwhile."""
        tokens = ledger.num_tokens(request) if num_tokens is None else num_tokens
        blocks = ledger.blocks(request)
        return self.offer_blocks(
            blocks, tokens, readers=readers, lease_seconds=lease_seconds, on_end=on_end
        )

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
        ticket, lease = self._promised(blocks, num_tokens, readers, lease_seconds, on_end)
        self.service.submit(lambda: self.service.grant(lease, ticket))
        return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """Take a ticket back: its readers fail, its blocks are given back."""
        self.service.submit(lambda: self.service.leases.end(ticket.lease, "withdrawn"))

    def honour(
        self,
        ticket: Ticket,
        *,
        readers: int = 1,
        on_end: Callable[[EndReason], None] | None = None,
    ) -> None:
        """Keep what a ticket promises that somebody else has written in this agent's name.

        Its blocks must have the generations that it states: see `Owner`.
        """
        self.tend()
        home = self._home
        mine = (self.name, home.transport.name, home.fingerprint)
        if (ticket.agent, ticket.start, ticket.fingerprint) != mine:
            raise TransferError(f"ticket is of agent {ticket.agent!r}, start {ticket.start!r}, not "
                                f"of {mine[0]!r}, {mine[1]!r}", kind="ticket")  # fmt: skip
        home.checked(ticket.blocks)
        self._share(ticket.blocks)
        lease = self._lease(ticket, readers, on_end)
        self.service.submit(lambda: self.service.grant(lease, ticket))

    def _promised(
        self,
        blocks: Mapping[int, Blocks],
        num_tokens: int,
        readers: int,
        lease_seconds: float | None,
        on_end: Callable[[EndReason], None] | None,
    ) -> tuple[Ticket, Lease]:
        home = self._home
        home.checked(blocks)
        self._share(blocks)
        ticket = Ticket(
            agent=self.name,
            start=home.transport.name,
            address=self.address,
            key=self._key,
            lease=Leases.fresh_id(),
            lease_seconds=lease_seconds or self.options.lease_seconds,
            fingerprint=home.fingerprint,
            num_tokens=num_tokens,
            blocks=dict(blocks),
            generations=home.generations(blocks),
        )
        return ticket, self._lease(ticket, readers, on_end)

    def _lease(
        self, ticket: Ticket, readers: int, on_end: Callable[[EndReason], None] | None
    ) -> Lease:
        """The lease of a ticket whose blocks are shared already."""
        tell = on_end

        def ended(reason: EndReason) -> None:
            self.service.lease_ended(ticket, reason)
            self.service.owed.append(lambda: self._release(ticket.blocks))
            if tell is not None:
                self.service.owed.append(partial(tell, reason))

        return Lease(
            id=ticket.lease,
            digest=ticket.digest,
            seconds=ticket.lease_seconds,
            readers=readers,
            deadline=self._home.clock() + ticket.lease_seconds,
            on_end=ended,
        )

    # ── pulling ───────────────────────────────────────────────────────────────────

    def connect(self, address: str, *, key: str = "", seconds: float | None = None) -> Peer:
        """Meet the agent at an address; TransferError if it refuses or does not answer."""
        greeted = threading.Event()
        contact = self.service.contact(address, key)

        def greet() -> None:
            contact.greet(self._home.clock())
            greeted.set()

        self.service.submit(greet)
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
        direction: Way | None = None,
        digest: DigestPolicy | None = None,
    ) -> Transfer:
        """Bring tokens `[start_token, num_tokens)` of a request into these rows.

        `tickets` are one per source rank; together they must hold all that this rank
        holds. The rows must be held by the caller. `deadline` is in seconds from now.
        """
        self.tend()
        self._home.checked(into)
        listed = (tickets,) if isinstance(tickets, Ticket) else tuple(tickets)
        lengths = {ticket.num_tokens for ticket in listed}
        if len(lengths) != 1:
            raise TransferError(f"tickets of {sorted(lengths)} tokens are not of one request",
                                kind="ticket")  # fmt: skip
        goal = self._goal(into, start_token, num_tokens or lengths.pop(), direction, digest)
        sources = [(t, self.service.contact(t.address, t.key)) for t in listed]
        self._share(into)
        transfer = self._transfer(goal, sources, deadline)
        self.service.submit(lambda: self.service.transfers.append(transfer))
        return transfer

    def expect(
        self,
        into: Mapping[int, Blocks],
        num_tokens: int,
        *,
        start_token: int = 0,
        deadline: float | None = None,
        direction: Way | None = None,
        digest: DigestPolicy | None = None,
    ) -> Arrival:
        """Wait for somebody to push a request into these rows; hand them `.ticket`."""
        self.tend()
        goal = self._goal(into, start_token, num_tokens, direction, digest)
        ticket, lease = self._promised(into, num_tokens, 1, deadline, None)
        self._share(into)
        lease_over = lease.on_end

        def start(sources: Sequence[tuple[Ticket, Contact]]) -> Transfer:
            return self._transfer(goal, sources, deadline)

        def ended(reason: EndReason) -> None:
            if self.service.arrivals.pop(ticket.lease, None) is not None:
                arrival.cancel(TransferError(f"nobody pushed: {reason}", kind="expired"))
                self.service.owed.append(lambda: self._release(into))
            lease_over(reason)

        lease.on_end = ended
        arrival = Arrival(ticket, start)
        self.service.submit(lambda: self.service.expect(arrival, lease))
        return arrival

    def push(self, blocks: Mapping[int, Blocks], *, to: Ticket) -> Push:
        """Have the agent that expects `to` pull these blocks of ours."""
        push = Push(self.offer_blocks(blocks, to.num_tokens), to)
        self.service.submit(lambda: self.service.push(push))
        return push

    def keep(self, ticket: Ticket) -> None:
        """Keep a ticket's lease alive until it is pulled or dropped."""
        self.service.submit(lambda: self.service.keep(ticket))

    def drop(self, ticket: Ticket) -> None:
        """Tell the producer that nobody here will pull this ticket: it ends the lease."""
        self.service.submit(lambda: self.service.drop(ticket))

    def _goal(
        self,
        into: Mapping[int, Blocks],
        start_token: int,
        num_tokens: int,
        direction: Way | None,
        digest: DigestPolicy | None,
    ) -> Goal:
        return Goal(
            into=dict(into),
            start_token=start_token,
            num_tokens=num_tokens,
            direction=direction or self.options.direction,
            digest=digest or self.options.digest,
        )

    def _transfer(
        self, goal: Goal, sources: Sequence[tuple[Ticket, Contact]], deadline: float | None
    ) -> Transfer:
        """A transfer whose rows are shared already."""
        home = self._home
        until = home.clock() + (deadline or self.options.transfer_seconds)
        legs = [Leg(home, contact, ticket, goal) for ticket, contact in sources]
        transfer = Transfer(home, goal, legs, until, self.service.plans, self.tend)
        with self._tending:
            self._open.append(transfer)
        return transfer

    # ── the owner's blocks ────────────────────────────────────────────────────────

    def tend(self) -> None:
        """Settle what is owed to the blocks' owner, in the caller's thread.

        Every other call does this first. Call it now and then where nothing else is
        called, so that blocks of leases and transfers that have ended come free.
        """
        with self._tending:
            while self.service.owed:
                self.service.owed.popleft()()
            for transfer in tuple(self._open):
                self._settle(transfer)

    def _settle(self, transfer: Transfer) -> None:
        into = transfer.goal.into
        if transfer.quiet:
            if transfer.quarantined:
                for g, blocks in into.items():
                    self._home.owner.unquarantine(g, blocks.ids)
            else:
                self._release(into)
            self._open.remove(transfer)
        elif transfer.done and transfer.error is not None and not transfer.quarantined:
            for g, blocks in into.items():
                self._home.owner.quarantine(g, blocks.ids)
            self._release(transfer.goal.into)
            transfer.quarantined = True

    def _share(self, blocks: Mapping[int, Blocks]) -> None:
        """All blocks, or none and the owner's error."""
        shared: list[int] = []
        try:
            for g, listed in blocks.items():
                self._home.owner.share(g, listed.ids)
                shared.append(g)
        except KvstowError:
            self._release({g: blocks[g] for g in shared})
            raise

    def _release(self, blocks: Mapping[int, Blocks]) -> None:
        for g, listed in blocks.items():
            self._home.owner.release(g, listed.ids)

    # ── its life ──────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start the agent's thread."""
        self.service.start()

    def close(self) -> None:
        """Stop, end all leases and transfers, let go of engine and sockets."""
        self.service.close()
        self.tend()

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
