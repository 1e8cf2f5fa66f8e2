"""Leases of one rank: blocks that stay for somebody with a ticket, and which a pull has filled."""

from collections import Counter, defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvstow.adapters.vllm.protocol import OfferBlocks
from kvstow.errors import TransferError
from kvstow.plan.layout import Layout
from kvstow.plan.retention import Bools
from kvstow.plan.view import Ints
from kvstow.transfer.agent import Agent
from kvstow.transfer.tickets.generations import Generations
from kvstow.transfer.tickets.lease import EndReason
from kvstow.transfer.tickets.ticket import Ticket


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

    def distrust(self, group: int, ids: Ints) -> None:
        self._unfilled[group][ids] = True

    def trust(self, group: int, ids: Ints, whole: Bools | None = None) -> None:
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


@dataclass(slots=True, eq=False)
class AdoptedLease:
    """A lease of one request's blocks. `ordered`: the engine's step has named it too, so that its
    blocks are counted as kept for the request."""

    lease: int
    request: str
    ordered: bool = False
    ended: bool = False


class RankLeases:
    """Leases that the scheduler's side has given out on this rank's blocks.

    `counts` is told how they end.
    """

    def __init__(
        self, agent: Agent, blocks: LeasedGenerations, counts: defaultdict[str, float]
    ) -> None:
        self._agent = agent
        self._blocks = blocks
        self._counts = counts
        self._adopted: dict[int, AdoptedLease] = {}
        self._staying: Counter[str] = Counter()
        """Per request, leases that still need its blocks."""
        self._sent: set[str] = set()

    def adopt(self, offer: OfferBlocks) -> AdoptedLease:
        """Keep what the ticket of this rank promises, from now on; an offer twice is one.

        A scheduler in this process and thread calls it before the ticket leaves; the next step
        orders the same offer again. Until then the lease may be read and end, yet the request's
        blocks are not reported as sent: what else needs them comes with that step.
        """
        mine = self._ticket(offer)
        adopted = self._adopted.get(mine.lease)
        if adopted is not None:
            return adopted
        adopted = self._adopted[mine.lease] = AdoptedLease(mine.lease, offer.request)

        def ended(reason: EndReason) -> None:
            adopted.ended = True
            self._counts[f"lease {reason}"] += 1
            self._let_go_if_over(adopted)

        with self._blocks.unretired(mine):
            self._agent.adopt(mine, readers=None, on_end=ended)  # all ranks of a decode instance
        return adopted

    def hear(self, offer: OfferBlocks) -> None:
        """Adopt an offer that was told between two steps, unless a step was faster: its lease may
        be over by now."""
        if not self._agent.server.leases.has_ended(self._ticket(offer).lease):
            self.adopt(offer)

    def order(self, offer: OfferBlocks) -> None:
        """A step has named the offer: its request's blocks stay until the lease is over."""
        adopted = self.adopt(offer)
        adopted.ordered = True
        self._staying[adopted.request] += 1
        self._let_go_if_over(adopted)

    def _let_go_if_over(self, adopted: AdoptedLease) -> None:
        """One lease less; the last one frees the request's blocks."""
        if not (adopted.ordered and adopted.ended):
            return
        del self._adopted[adopted.lease]
        self._staying[adopted.request] -= 1
        if self._staying[adopted.request] == 0:
            del self._staying[adopted.request]
            self._sent.add(adopted.request)

    def take(self) -> set[str]:
        """Requests whose last lease is over; told once."""
        sent, self._sent = self._sent, set()
        return sent

    def _ticket(self, offer: OfferBlocks) -> Ticket:
        for ticket in offer.tickets:
            if ticket.agent == self._agent.name:
                return ticket
        raise TransferError(
            f"request {offer.request}: none of {len(offer.tickets)} tickets is of agent "
            f"{self._agent.name!r}",
            kind="ticket",
        )
