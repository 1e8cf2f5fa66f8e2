"""Offers: blocks that stay for somebody with a ticket, from the first word of it to its end.

The scheduler's side writes a ticket when a request ends, and tells every worker of it twice: by
mail at once, and in the engine's next step. Either makes the lease; an engine that is driven by
hand (`LLM.generate`) takes no step once its last request has ended. Mail that does not arrive costs
nothing: the next step tells, and a consumer that was faster waits a moment.
"""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

import numpy as np

from kvstow.adapters.vllm.counts import Count
from kvstow.adapters.vllm.protocol import OfferBlocks, StepOrders, StepResults
from kvstow.adapters.vllm.worker.part import RankPart, RankState
from kvstow.errors import TransferError
from kvstow.plan.layout import Layout
from kvstow.plan.retention import Bools
from kvstow.plan.view import Ints
from kvstow.transfer.agent import Agent
from kvstow.transfer.tickets.lease import EndReason
from kvstow.transfer.tickets.owner import Generations
from kvstow.transfer.tickets.ticket import Ticket

log = logging.getLogger(__name__)


class LeasedGenerations(Generations):
    """The workers' generations: counters that peers read, set by the scheduler's leases.

        lease A given out at generation 7      counter 7
        lease A over, nobody else              counter 8    tickets of A are refused from now on
        lease B of the same unbroken time      counter 7    its bytes are the ones that A covered
        next time                              counter 8 … never 7 again

    The scheduler's side never reuses a generation (see `PinnedBlocks`), so a counter that equals
    a ticket's generation always means that the bytes are still those of the ticket.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._unfilled = tuple(np.zeros(len(table), bool) for table in self.generations)

    def quarantine(self, group: int, ids: Ints) -> None:
        super().quarantine(group, ids)
        self._unfilled[group][ids] = True

    def trust(self, group: int, ids: Ints, whole: Bools | None = None) -> None:
        super().trust(group, ids, whole)
        self._unfilled[group][ids if whole is None else ids[whole]] = False

    def unfilled(self, group: int, ids: Ints) -> Ints:
        """Those of a pull's blocks that it has not filled, though it was accepted."""
        return ids[self._unfilled[group][ids]]

    @contextmanager
    def unretired(self, ticket: Ticket) -> Generator[None]:
        """The ticket's blocks are of its generations, and stay so as long as the block lasts: an
        earlier lease of them that ends meanwhile does not begin a new one."""
        for group, blocks in ticket.blocks.items():
            self.share(group, blocks.ids)
            self.generations[group][blocks.ids] = ticket.generations[group]
        try:
            yield
        finally:
            for group, blocks in ticket.blocks.items():
                self.release(group, blocks.ids)


class RankOffers(RankPart):
    """Leases that the scheduler's side has given out on this rank's blocks.

    A lease may be read and end before a step has named it, yet its request's blocks are not
    reported as sent before: what else needs them comes with that step.
    """

    def __init__(self, rank: RankState, agent: Agent, blocks: LeasedGenerations) -> None:
        self._agent = agent
        self._blocks = blocks
        self._counts = rank.counts
        self._running: set[int] = set()
        """Leases that somebody may still read."""
        self._heard: set[int] = set()
        """Leases that no step has named yet."""
        self._requests: dict[int, str] = {}
        """By lease that a step has named, the request whose blocks stay."""

    # ── what the rank does in a step ──────────────────────────────────────────────

    def begin(self, step: StepOrders) -> None:
        """Somebody may show a ticket already that the scheduler's side has just given out."""
        for offer in step.offers:
            ticket = self._ticket(offer)
            if ticket.lease in self._heard:
                self._heard.discard(ticket.lease)
            elif ticket.start == self._agent.endpoint.start:  # not of before the engine slept
                try:
                    self._adopt(ticket)
                except TransferError as error:  # its thread has ended: the lease is over
                    log.warning("request %s: not offered: %s", offer.request, error)
            self._requests[ticket.lease] = offer.request

    def report(self, results: StepResults) -> None:
        """Requests whose leases are over since the last time."""
        over = [lease for lease in self._requests if lease not in self._running]
        results.sent.update(self._requests.pop(lease) for lease in over)

    # ── offers ────────────────────────────────────────────────────────────────────

    def _adopt(self, ticket: Ticket) -> None:
        """Keep what a ticket promises, from now on."""
        with self._blocks.unretired(ticket):
            self._agent.adopt(  # for all ranks of a decode instance
                ticket, readers=None, on_end=partial(self._end, ticket.lease)
            )
        self._running.add(ticket.lease)

    def _end(self, lease: int, reason: EndReason) -> None:
        self._running.discard(lease)
        self._counts[f"{Count.LEASE_ENDS} {reason}"] += 1

    def _ticket(self, offer: OfferBlocks) -> Ticket:
        return next(ticket for ticket in offer.tickets if ticket.agent == self._agent.name)

    def hear(self, offer: OfferBlocks) -> None:
        """Adopt an offer that was told between two steps, unless a step was faster: its lease may
        be over by now."""
        ticket = self._ticket(offer)
        lease = ticket.lease
        if lease not in self._requests and not self._agent.server.leases.has_ended(lease):
            self._adopt(ticket)
            self._heard.add(lease)
