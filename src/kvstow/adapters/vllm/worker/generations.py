"""Generations of one rank's blocks, as the scheduler's leases set them; which a pull has filled."""

from collections.abc import Generator
from contextlib import contextmanager

import numpy as np

from kvstow.plan.layout import Layout
from kvstow.plan.retention import Bools
from kvstow.plan.view import Ints
from kvstow.transfer.tickets.owner import Generations
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
