"""A worker's blocks: whose leases they are under, and which of them a pull has filled."""

import numpy as np

from kvstow.plan.layout import Layout
from kvstow.plan.view import Ints
from kvstow.transfer.generations import Generations


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

    def trust(self, group: int, ids: Ints) -> None:
        self._unfilled[group][ids] = False

    def unfilled(self, group: int, ids: Ints) -> Ints:
        """Those of a pull's blocks that it has not filled, though it was accepted."""
        return ids[self._unfilled[group][ids]]

    def set(self, group: int, ids: Ints, generations: Ints) -> None:
        """These blocks are, from now on, of these generations."""
        self.generations[group][ids] = generations
