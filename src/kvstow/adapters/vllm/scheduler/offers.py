"""Requests that have ended, offered to others: tickets, and the generations of their blocks."""

from collections.abc import Mapping
from secrets import randbits
from typing import Any

import numpy as np

from kvstow.adapters.vllm.counts import Count
from kvstow.adapters.vllm.protocol import (
    BlockIds,
    EngineRequest,
    Handover,
    OfferBlocks,
    blocks_with_tokens,
    prompt_digest,
)
from kvstow.adapters.vllm.scheduler.parts import EngineState
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks
from kvstow.transfer.tickets.ticket import Ticket

LEASE_BITS = 62


class PinnedBlocks:
    """Generations and leases of every block, by group.

    The scheduler's side writes the generations, because it alone knows who holds a block. A
    block's generation names one unbroken time in which some lease has kept it. It grows when the
    last lease on the block is known to be over, before the engine may reuse the block. A worker
    that has ended its lease already counts one further on its own, and is set back only by a new
    lease within that same unbroken time: see `LeasedGenerations`.
    """

    def __init__(self, num_groups: int, num_blocks: int) -> None:
        self._generations = np.ones((num_groups, num_blocks), np.int64)
        self._leases = np.zeros((num_groups, num_blocks), np.int64)

    def pin(self, blocks: Mapping[int, Blocks]) -> dict[int, Ints]:
        """Note a lease on these blocks; their generations under it."""
        for group, listed in blocks.items():
            self._leases[group][listed.ids] += 1
        return {group: self._generations[group][b.ids].copy() for group, b in blocks.items()}

    def unpin(self, blocks: Mapping[int, Blocks]) -> None:
        """A lease is over; blocks that no other lease keeps begin a new generation."""
        for group, listed in blocks.items():
            self._leases[group][listed.ids] -= 1
            over = listed.ids[self._leases[group][listed.ids] == 0]
            self._generations[group][over] += 1


class SchedulerOffers:
    """Offers of one engine, in the name of its workers."""

    def __init__(self, engine: EngineState) -> None:
        self._engine = engine
        self._pinned = PinnedBlocks(len(engine.groups), engine.num_blocks)
        self._blocks: dict[str, Mapping[int, Blocks]] = {}
        """By request, blocks that a lease keeps."""

    def make(self, request: EngineRequest, ids: BlockIds, num_tokens: int) -> dict[str, Any] | None:
        """Tickets for the request's blocks, as its answer carries them; None where it cannot be
        offered. The blocks are pinned first; workers are told at once, and in the next step."""
        if not request.shareable or not self._engine.workers:
            self._engine.counts[Count.NOT_OFFERED_REQUESTS] += 1
            return None
        blocks = {
            g: blocks_with_tokens(group_ids, 0, num_tokens, self._engine.groups[g].block_tokens)
            for g, group_ids in enumerate(ids)
        }
        tickets = self._tickets(blocks, num_tokens)
        offer = OfferBlocks(request=request.id, tickets=tickets)
        self._blocks[request.id] = blocks
        self._engine.step.offers.append(offer)
        self._engine.counts[Count.OFFERED_REQUESTS] += 1
        digest = prompt_digest(request, num_tokens)
        for worker, ticket in zip(self._engine.workers, tickets, strict=True):
            worker.inbox.send(OfferBlocks(request=request.id, tickets=(ticket,)))
        return Handover(tickets=tickets, num_tokens=num_tokens, prompt=digest).params()

    def _tickets(self, blocks: Mapping[int, Blocks], num_tokens: int) -> tuple[Ticket, ...]:
        generations = self._pinned.pin(blocks)
        return tuple(
            Ticket(
                agent=worker.agent,
                start=worker.start,
                address=worker.address,
                key=worker.key,
                lease=randbits(LEASE_BITS) + 1,
                lease_seconds=self._engine.options.lease_seconds,
                fingerprint=worker.fingerprint,
                num_tokens=num_tokens,
                blocks=blocks,
                generations=generations,
                identity=self._engine.weights.identity.digest,
            ).signed(worker.ticket_key)
            for worker in self._engine.workers
        )

    def sent(self, request: str) -> None:
        """The workers' leases of a request are over: the engine may reuse its blocks."""
        blocks = self._blocks.pop(request, None)
        if blocks is not None:
            self._pinned.unpin(blocks)
