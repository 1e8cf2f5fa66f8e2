"""What an agent has offered: tickets, each with a lease that keeps its blocks."""

import logging
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from kvstow.errors import TransferError
from kvstow.plan.identity import Identity
from kvstow.route.blocks import Blocks
from kvstow.transfer.loop import Loop
from kvstow.transfer.peers.endpoint import Endpoint
from kvstow.transfer.server import Server
from kvstow.transfer.tickets.lease import EndReason, Lease
from kvstow.transfer.tickets.owner import OwnerQueue
from kvstow.transfer.tickets.ticket import MAX_LEASE_SECONDS, MAX_TOKENS, Ticket, check_blocks

log = logging.getLogger(__name__)

OnEnd = Callable[[EndReason], None]


class Offers:
    """Tickets and the leases behind them. For the thread of the blocks' owner."""

    def __init__(
        self, endpoint: Endpoint, loop: Loop, server: Server, owner: OwnerQueue, key: str
    ) -> None:
        self._endpoint = endpoint
        self._loop = loop
        self._server = server
        self._owner = owner
        self._key = key

    def offer(
        self,
        blocks: Mapping[int, Blocks],
        num_tokens: int,
        *,
        readers: int | None = None,
        lease_seconds: float | None = None,
        identity: Identity | None = None,
        on_end: OnEnd | None = None,
    ) -> Ticket:
        """A ticket for blocks, which are kept from being reused until its lease ends."""
        endpoint = self._endpoint
        seconds = endpoint.options.lease_seconds if lease_seconds is None else lease_seconds
        _check(num_tokens, readers, seconds)
        check_blocks(endpoint.layout, blocks, whose=endpoint.name)
        self._check_known(blocks)
        self._owner.share(blocks)  # from here on their generations stay
        ticket = Ticket(
            agent=endpoint.name,
            start=endpoint.start,
            address=self._loop.channel.address,
            key=self._key,
            lease=endpoint.random.getrandbits(62) + 1,  # 0 means no lease
            lease_seconds=float(seconds),
            fingerprint=endpoint.fingerprint,
            num_tokens=int(num_tokens),
            blocks=dict(blocks),
            generations=endpoint.generations(blocks),
            identity=(identity or endpoint.identity).digest,
        ).signed(endpoint.ticket_key)
        self._grant(ticket, readers, on_end)
        return ticket

    def _check_known(self, blocks: Mapping[int, Blocks]) -> None:
        """TransferError for blocks that a pull is writing to, or has failed to fill: whoever pulled
        them from here would get, and accept, what happens to be there."""
        endpoint = self._endpoint
        for g, listed in blocks.items():
            unknown = listed.ids[endpoint.owner.unknown(g, listed.ids)]
            if len(unknown):
                name = endpoint.layout.groups[g].group.name
                raise TransferError(
                    f"agent {endpoint.name!r}: group {name!r}: {len(unknown)} of {len(listed)} "
                    f"blocks hold nothing that may be used, {unknown[:8].tolist()} among them: a "
                    "pull is still writing to them, or has failed\n\n"
                    "hint: offer them after transfer.wait(); after a failed pull, fill them and "
                    "call trust(group, ids) of the blocks' owner, or take new blocks",
                    kind="refused",
                )

    def adopt(self, ticket: Ticket, *, readers: int | None, on_end: OnEnd | None) -> None:
        """Keep what a ticket promises that somebody else has written in this agent's name."""
        endpoint = self._endpoint
        own = (endpoint.name, endpoint.start, endpoint.fingerprint)
        if (ticket.agent, ticket.start, ticket.fingerprint) != own:
            raise TransferError(
                f"ticket is of agent {ticket.agent!r}, start {ticket.start!r}, layout "
                f"{ticket.fingerprint[:16]}, not of {own[0]!r}, {own[1]!r}, {own[2][:16]}",
                kind="ticket",
            )
        _check(ticket.num_tokens, readers, ticket.lease_seconds)
        check_blocks(endpoint.layout, ticket.blocks, whose=endpoint.name)
        self._owner.share(ticket.blocks)
        self._grant(ticket, readers, on_end)

    def _grant(self, ticket: Ticket, readers: int | None, on_end: OnEnd | None) -> None:
        """Let the lease of a ticket run whose blocks are shared already. One that runs already goes
        on, and these blocks are given back."""

        def release() -> None:
            self._owner.defer(lambda: self._owner.release(ticket.blocks))

        def ended(reason: EndReason) -> None:
            self._server.lease_ended(ticket, reason)
            release()
            if on_end is not None:
                self._owner.defer(partial(self._tell_end, on_end, reason))

        def grant() -> None:
            if ticket.lease in self._server.leases:
                release()
                return
            deadline = self._endpoint.clock() + ticket.lease_seconds
            self._server.leases.grant(Lease(ticket, readers, deadline, ended))
            self._endpoint.metrics.leases.inc()

        try:
            self._loop.submit(grant)
        except TransferError:
            self._owner.release(ticket.blocks)
            raise

    def _tell_end(self, on_end: OnEnd, reason: EndReason) -> None:
        """Call back; an exception in the callback is logged and stops nothing else."""
        try:
            on_end(reason)
        except Exception:
            log.exception("agent %s: on_end of a lease", self._endpoint.name)


def _check(num_tokens: int, readers: int | None, seconds: float) -> None:
    """TransferError for what no consumer could read in a ticket, or what nobody could end."""
    for what, value, least in (
        ("tokens", num_tokens, 0),
        ("readers", 1 if readers is None else readers, 1),
    ):
        whole = isinstance(value, int | np.integer)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not whole or not least <= value <= MAX_TOKENS:
            raise TransferError(f"{value} {what} cannot be offered", kind="refused")
    if not 0 < seconds <= MAX_LEASE_SECONDS:
        raise TransferError(
            f"a lease of {seconds} s, not above 0 and at most {MAX_LEASE_SECONDS:.0f}",
            kind="refused",
        )
