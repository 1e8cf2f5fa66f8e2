"""Rows of a rank's host tier, lent to other engines by an agent of its own."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from kvstow.adapters.vllm.options import ConnectorOptions, rank_address
from kvstow.adapters.vllm.worker.part import RankPart
from kvstow.offload.host.tier import HostTier
from kvstow.plan.view import Ints
from kvstow.transfer.agent import Agent
from kvstow.transfer.tickets.owner import Generations
from kvstow.transfer.transport.base import Transport

log = logging.getLogger(__name__)

LEASE_SECONDS = 10.0
"""How long lent rows are kept for somebody who has asked and is not heard from."""

LENT = "-lent"


def instance_of(agent: str) -> str:
    """The engine of an agent that is called ENGINE-PP-TP, or ENGINE-PP-TP-lent."""
    return agent.removesuffix(LENT).rsplit("-", 2)[0]


class LentRows(Generations):
    """Rows of a host tier as blocks of an agent: shared ones are pinned, and a row's generation
    ends with its last lease, before the tier may give the row up.

    Rows of recurrent states are like others: a copy of the state after a block's last token, which
    nobody overwrites in place.
    """

    def __init__(self, tier: HostTier) -> None:
        super().__init__(tier.layout)
        self._tier = tier

    def __len__(self) -> int:
        return self._tier.usage.rows

    def ids(self, group: int, keys: Sequence[bytes]) -> Ints:
        return self._tier.ids(group, keys)

    def still(self) -> AbstractContextManager[object]:
        return self._tier.still()

    def share(self, group: int, ids: Ints) -> None:
        self._tier.pin(group, ids)
        super().share(group, ids)

    def release(self, group: int, ids: Ints) -> None:
        super().release(group, ids)
        self._tier.unpin(group, ids)


class RowServer(RankPart):
    """An agent over a rank's host tier."""

    def __init__(
        self, tier: HostTier, options: ConnectorOptions, *, transport: Transport, name: str
    ) -> None:
        rows = LentRows(tier)
        agent = options.agent
        self.agent = Agent(
            tier.arena,
            rows,
            transport=transport,
            name=name + LENT,
            listen=rank_address(options.lend, tier.layout),
            keys=options.keys(),
            options=replace(agent, lease_seconds=min(LEASE_SECONDS, agent.lease_seconds)),
        )
        self.agent.lend(rows)
        self.agent.start()
        log.info("kvstow: peers may ask for rows of %s at %s", name, self.agent.address)

    def close(self) -> None:
        """End all leases; before the tier is closed."""
        self.agent.close()
