"""The workers' generations: counters that peers read, set by the scheduler's leases.

    lease A given out at generation 7      counter 7
    lease A over, nobody else              counter 8    tickets of A are refused from now on
    lease B of the same unbroken time      counter 7    its bytes are the ones that A covered
    next time                              counter 8 … never 7 again

The scheduler's side never reuses a generation (see `pins`), so a counter that equals a
ticket's generation always means that the bytes are still those of the ticket.
"""

from kvstow.plan.view import Ints
from kvstow.transfer.generations import Generations


class Counters(Generations):
    """Generations that a lease may set."""

    def set(self, group: int, ids: Ints, generations: Ints) -> None:
        """These blocks are, from now on, of these generations."""
        self.generations[group][ids] = generations
