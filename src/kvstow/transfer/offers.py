"""What an agent has offered: tickets, each with a lease that keeps its blocks."""

import logging
from collections.abc import Callable, Mapping
from functools import partial

from kvstow.errors import TransferError
from kvstow.route.blocks import Blocks
from kvstow.transfer.generations import OwnerQueue
from kvstow.transfer.lease import EndReason, Lease
from kvstow.transfer.loop import Loop
from kvstow.transfer.peers.blocks import check_blocks
from kvstow.transfer.peers.endpoint import Endpoint
from kvstow.transfer.server import Server
from kvstow.transfer.ticket import Ticket

log = logging.getLogger(__name__)

OnEnd = Callable[[EndReason], None]


class Offers:
    """Tickets and the leases behind them. For the thread of the blocks' owner."""

    def __init__(
        self,
        endpoint: Endpoint,
        loop: Loop,
        server: Server,
        owner: OwnerQueue,
        *,
        address: str,
        key: str,
    ) -> None:
        self._endpoint = endpoint
        self._loop = loop
        self._server = server
        self._owner = owner
        self._address = address
        self._key = key

    def offer(
        self,
        blocks: Mapping[int, Blocks],
        num_tokens: int,
        *,
        readers: int | None = None,
        lease_seconds: float | None = None,
        on_end: OnEnd | None = None,
    ) -> Ticket:
        """A ticket for blocks, which are kept from being reused until its lease ends."""
        endpoint = self._endpoint
        check_blocks(endpoint.layout, blocks, whose=endpoint.name)
        self._owner.share(blocks)  # from here on their generations stay
        ticket = Ticket(
            agent=endpoint.name,
            start=endpoint.start,
            address=self._address,
            key=self._key,
            lease=endpoint.random.getrandbits(63),
            lease_seconds=lease_seconds or endpoint.options.lease_seconds,
            fingerprint=endpoint.fingerprint,
            num_tokens=num_tokens,
            blocks=dict(blocks),
            generations=endpoint.generations(blocks),
            identity=endpoint.identity.digest,
        )
        self._grant(ticket, readers, on_end)
        return ticket

    def adopt(self, ticket: Ticket, *, readers: int | None, on_end: OnEnd | None) -> None:
        """Keep what a ticket promises that somebody else has written in this agent's name."""
        endpoint = self._endpoint
        mine = (endpoint.name, endpoint.start, endpoint.fingerprint)
        if (ticket.agent, ticket.start, ticket.fingerprint) != mine:
            raise TransferError(
                f"ticket is of agent {ticket.agent!r}, start {ticket.start!r}, layout "
                f"{ticket.fingerprint[:16]}, not of {mine[0]!r}, {mine[1]!r}, {mine[2][:16]}",
                kind="ticket",
            )
        check_blocks(endpoint.layout, ticket.blocks, whose=endpoint.name)
        self._owner.share(ticket.blocks)
        self._grant(ticket, readers, on_end)

    def withdraw(self, ticket: Ticket) -> None:
        """Take a ticket back; from any thread."""
        self._loop.submit(lambda: self._server.leases.end(ticket.lease, "withdrawn"))

    def _grant(self, ticket: Ticket, readers: int | None, on_end: OnEnd | None) -> None:
        """Let the lease of a ticket run whose blocks are shared already."""

        def ended(reason: EndReason) -> None:
            self._server.lease_ended(ticket, reason)
            self._owner.owe(lambda: self._owner.release(ticket.blocks))
            if on_end is not None:
                self._owner.owe(partial(self._tell_end, on_end, reason))

        lease = Lease(
            id=ticket.lease,
            digest=ticket.digest,
            seconds=ticket.lease_seconds,
            readers=readers,
            deadline=self._endpoint.clock() + ticket.lease_seconds,
            on_end=ended,
        )
        try:
            self._loop.submit(lambda: self._server.grant(lease, ticket))
        except TransferError:
            self._owner.release(ticket.blocks)
            raise

    def _tell_end(self, on_end: OnEnd, reason: EndReason) -> None:
        """Call back; an exception in the callback is logged and stops nothing else."""
        try:
            on_end(reason)
        except Exception:
            log.exception("agent %s: on_end of a lease", self._endpoint.name)
