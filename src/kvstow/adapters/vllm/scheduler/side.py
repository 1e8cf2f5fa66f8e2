"""The scheduler's side: which request hands over, takes over, is stored or comes back.

Nothing here touches memory. Questions (`matched`) change nothing that a second question could
see; what the workers have to do is collected and taken once per step.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvstow.adapters.vllm.cache.pages import AFTER_LAST_TOKEN
from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.peers.questions import PeerQuestions
from kvstow.adapters.vllm.protocol import (
    OURS,
    BlockIds,
    EngineRequest,
    Handover,
    LeaseNumbers,
    OfferBlocks,
    PeersAnswer,
    PullBlocks,
    RanksReport,
    StepOrders,
    WorkerEndpoint,
    blocks_with_tokens,
    handover_in,
    prompt_digest,
    tickets_to_drop,
)
from kvstow.adapters.vllm.scheduler.events import TierEvents
from kvstow.adapters.vllm.scheduler.held import HeldBlocks
from kvstow.adapters.vllm.scheduler.recall import Recall
from kvstow.adapters.vllm.scheduler.stored import RequestKeys
from kvstow.adapters.vllm.scheduler.weights import EngineWeights, unshared
from kvstow.errors import BlockError, TransferError
from kvstow.plan.group import Group
from kvstow.plan.identity import Identity
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks
from kvstow.transfer.tickets.ticket import Ticket

log = logging.getLogger(__name__)

Adopt = Callable[[OfferBlocks, Sequence[str]], object]
"""Is told of an offer, and of its tickets as text."""


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
            if (self._leases[group][listed.ids] < 1).any():
                raise BlockError(
                    f"group {group}: some of blocks {listed.ids[:8].tolist()} are not pinned"
                )
            self._leases[group][listed.ids] -= 1
            over = listed.ids[self._leases[group][listed.ids] == 0]
            self._generations[group][over] += 1


class SchedulerSide:
    """Bookkeeping of one engine."""

    def __init__(
        self,
        groups: Sequence[Group],
        num_blocks: int,
        options: ConnectorOptions,
        *,
        identity: Identity,
        num_ranks: int = 1,
        takes_over: bool = True,
        events: TierEvents | None = None,
    ) -> None:
        """`num_ranks` workers compute together. Without `takes_over` nothing is pulled: the engine
        gives blocks away that a step under way still writes to."""
        self._groups = tuple(groups)
        self._takes_over = takes_over
        self._options = options
        self._weights = EngineWeights(identity)
        self.counts: Counter[str] = Counter()
        self.recall = (
            Recall(
                groups,
                identity,
                options,
                num_blocks=num_blocks,
                num_ranks=num_ranks,
                events=events,
                counts=self.counts,
            )
            if options.offloads
            else None
        )
        asks = takes_over and options.peers
        self._peers = PeerQuestions(groups, options) if asks else None
        self._key_sizes = {group.block_tokens for group in groups}
        self._key_sizes |= {self._peers.step} if self._peers is not None else set()
        self._pinned = PinnedBlocks(len(groups), num_blocks)
        self.held = HeldBlocks()
        self._max_tokens = num_blocks * max(group.block_tokens for group in groups)
        self._workers: tuple[WorkerEndpoint, ...] = ()
        self._numbers: tuple[LeaseNumbers, ...] = ()
        self._adopt: Adopt | None = None
        self._incoming: dict[str, Handover] = {}
        self._computed_when_asked: dict[str, int] = {}
        """Tokens that a request had when the engine was told last how many could be loaded."""
        self._loading: set[str] = set()
        """Requests whose blocks are not yet what the engine counts as computed."""
        self._outgoing: dict[str, Mapping[int, Blocks]] = {}
        self._step = StepOrders()
        """The step that the engine takes next."""
        self._computes = False
        """Whether the last step computes something; it may still run when the next one is made."""

    def meet(
        self,
        workers: Sequence[WorkerEndpoint],
        *,
        adopt: Adopt | None = None,
    ) -> None:
        """The workers' agents, by rank. `adopt` is told of an offer before its tickets leave: the
        only worker, where it runs in this very process and thread, or who tells the others."""
        self._workers = tuple(workers)
        self._numbers = tuple(LeaseNumbers(worker.secret) for worker in workers)
        self._adopt = adopt
        if self.recall is not None:
            self.recall.meet([worker.agent for worker in workers])

    # ── taking over ───────────────────────────────────────────────────────────────

    def arrived(self, request: EngineRequest) -> None:
        """A request is queued. Bad tickets are counted here and handed back: the engine computes
        such a request itself, or has rejected it."""
        self._carries(request)
        if self._peers is None and self.recall is None:
            return
        has_tickets = request.id in self._incoming
        keys = RequestKeys(self._weights.identity, request, self._key_sizes)
        if self._peers is not None and not has_tickets:
            self._peers.arrived(request, keys)
        if self.recall is not None:
            lookup = self.recall.arrived(request, keys, has_tickets=has_tickets)
            self._step.lookups += [lookup] if lookup else []

    def _carries(self, request: EngineRequest) -> None:
        """Tickets that came with the request, and may be used, are kept alive."""
        try:
            handover = handover_in(request)
            if handover is None:
                return
            self._check_role()
            self._check_identity(handover)
            handover = self._short_of_last(request, handover)
        except TransferError as error:
            log.warning("request %s: %s", request.id, error)
            self.counts["refused"] += 1
            self._step.drops += tickets_to_drop(request, max_tokens=self._max_tokens)
            return
        self._incoming[request.id] = handover
        self._step.keeps += handover.tickets

    def _check_role(self) -> None:
        if not self._takes_over:
            raise TransferError(
                "this engine was started as kv_producer, for which vLLM does not keep blocks from "
                'being written while they are loaded\n\nhint: "kv_role": "kv_both"',
                kind="refused",
            )

    def _check_identity(self, handover: Handover) -> None:
        """Refuse tickets of another computation. Those that name none are compared when met, by
        what both engines were started with."""
        own = self._weights.identity
        for ticket in handover.tickets:
            unnamed = ticket.identity == b"" and not self._weights.have_changed
            if ticket.identity != own.digest and not unnamed:
                raise TransferError(
                    f"agent {ticket.agent!r} computes otherwise than {own.model!r} "
                    "here: weights, configuration, cache dtype or kernels differ\n\n"
                    "hint: compare both instances' manifest_file with `kvstow route`; weights that "
                    "were changed in place need the same weight version in both",
                    kind="ticket",
                )

    def _short_of_last(self, request: EngineRequest, handover: Handover) -> Handover:
        """The same tickets, for all tokens but the request's last, which is computed anyway.

        vLLM gives blocks for what the token after the loaded ones sees. If the last token were
        loaded and then computed, its own window or chunk could reach back into a block that was
        not given. A state that has seen the last token cannot see it again.
        """
        most = len(request.tokens) - 1
        if handover.num_tokens <= most:
            return handover
        if any(group.retention == AFTER_LAST_TOKEN for group in self._groups):
            raise TransferError(
                f"tickets are for {handover.num_tokens} tokens, all of the request's: a recurrent "
                "state that has seen the last one cannot see it again\n\n"
                "hint: send decode the same prompt as prefill, which stops one token short",
                kind="ticket",
            )
        return replace(handover, num_tokens=most)

    def apply(self, report: RanksReport) -> None:
        """What the workers' tiers have done and found in a step, what peers have said, and which
        blocks are still written to."""
        if report.held:
            self.counts["held blocks"] += self.held.hold(report.held)
        if report.released:
            self.counts["released blocks"] += self.held.release(report.released)
        for answer in report.found:
            self._found(answer)
        if self.recall is None:
            return
        for answer in report.present.values():
            self.recall.answer(answer)
        for rank, kept in report.kept.items():
            self.recall.known.told(rank, kept)
        for job, ranks in report.stored.items():
            self.recall.stores.stored(job, ranks)

    def _found(self, answer: PeersAnswer) -> None:
        """Peers have been asked: their tickets are kept alive, or handed back."""
        assert self._peers is not None
        handover = self._peers.handover(answer)
        if handover is None:
            self._step.drops += answer.tickets
            return
        self._incoming[answer.request] = handover
        self._step.keeps += handover.tickets

    def matched(self, request: str, num_computed: int) -> int | None:
        """How many tokens beyond `num_computed` could be loaded; None: ask again later."""
        self._computed_when_asked[request] = num_computed
        handover = self._incoming.get(request)
        if handover is not None:
            return max(0, handover.num_tokens - num_computed)
        own = self.recall.matched(request, num_computed) if self.recall else 0
        if own is None or self._peers is None:
            return own
        return None if self._peers.waits(request, num_computed + own) else own

    def allocated(self, request: str, ids: BlockIds, num_external: int) -> None:
        """The engine has given the request blocks, for `num_external` tokens to be loaded.

        With none to be loaded it goes on to compute, after a load too, failed or not, and even if
        it was to ask again: what peers say comes too late then. The engine may take fewer than it
        was told of: they are counted from what it had then.
        """
        start = self._computed_when_asked.pop(request, 0)
        if num_external == 0:
            self._loading.discard(request)
            self._give_back(request)
            if self._peers is not None:
                self._peers.forget(request)
            return
        self._loading.add(request)
        handover = self._incoming.pop(request, None)
        if handover is None:
            assert self.recall is not None
            self._step.loads.append(self.recall.taken(request, ids, start, start + num_external))
            return
        self._step.pulls.append(
            PullBlocks(
                request=request,
                tickets=self._tickets_for(handover, start + num_external),
                ids=ids,
                start_token=start,
                num_tokens=start + num_external,
                seconds=self._options.peers_pull_seconds if handover.asked else None,
                may_hold=self.held.pool is not None,
            )
        )

    def _tickets_for(self, handover: Handover, num_tokens: int) -> tuple[Ticket, ...]:
        """The tickets, if so many tokens can be had of them; none, and the pull fails, if not. A
        recurrent state is that after all tokens of the tickets, and none before."""
        states = any(group.retention == AFTER_LAST_TOKEN for group in self._groups)
        if num_tokens <= handover.num_tokens and not (states and num_tokens < handover.num_tokens):
            return handover.tickets
        log.warning(
            "the engine wants %d tokens, the tickets are for %d: it computes them",
            num_tokens,
            handover.num_tokens,
        )
        self._step.drops += handover.tickets
        return ()

    @property
    def is_loading(self) -> bool:
        """Whether a request waits for its blocks to be filled."""
        return bool(self._loading)

    # ── handing over ──────────────────────────────────────────────────────────────

    def finished(
        self, request: EngineRequest, ids: BlockIds, num_tokens: int
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request is over, with the cache of its first `num_tokens` tokens in these blocks.

        Whether its blocks must stay, and what its answer carries. One that ends while it is
        being loaded has nothing to give.
        """
        loading = request.id in self._loading
        self._loading.discard(request.id)
        self._computed_when_asked.pop(request.id, None)
        self._give_back(request.id)
        if self._peers is not None:
            self._peers.forget(request.id)
        if self.recall is not None:
            is_stored = request.shareable and not loading
            self.recall.finished(request.id, num_tokens if is_stored else 0, ids)
        if loading or not request.asks_for_tickets or num_tokens < 1:
            return False, None
        if not request.shareable or not self._workers:
            self.counts["not offered"] += 1
            return False, None
        return True, self._offered(request, ids, num_tokens)

    def _offered(self, request: EngineRequest, ids: BlockIds, num_tokens: int) -> dict[str, Any]:
        """Tickets for the request's blocks, as its answer carries them.

        The blocks are pinned first, and a worker in this process keeps them before the tickets
        leave. Other workers hear of them in the engine's next step.
        """
        blocks = {
            g: blocks_with_tokens(group_ids, 0, num_tokens, self._groups[g].block_tokens)
            for g, group_ids in enumerate(ids)
        }
        tickets = self._tickets(blocks, num_tokens)
        offer = OfferBlocks(request=request.id, tickets=tickets)
        self._outgoing[request.id] = blocks
        self._step.offers.append(offer)
        self.counts["offered"] += 1
        digest = prompt_digest(request, num_tokens)
        params = Handover(tickets=tickets, num_tokens=num_tokens, prompt=digest).params()
        if self._adopt is not None:
            self._adopt(offer, params[OURS]["tickets"])
        return params

    def _tickets(self, blocks: Mapping[int, Blocks], num_tokens: int) -> tuple[Ticket, ...]:
        generations = self._pinned.pin(blocks)
        return tuple(
            Ticket(
                agent=worker.agent,
                start=worker.start,
                address=worker.address,
                key=worker.key,
                lease=numbers.take(),
                lease_seconds=self._options.lease_seconds,
                fingerprint=worker.fingerprint,
                num_tokens=num_tokens,
                blocks=blocks,
                generations=generations,
                identity=self._weights.identity.digest,
            )
            for worker, numbers in zip(self._workers, self._numbers, strict=True)
        )

    def sent(self, request: str) -> None:
        """The workers' leases of a request are over: the engine may reuse its blocks."""
        blocks = self._outgoing.pop(request, None)
        if blocks is not None:
            self._pinned.unpin(blocks)

    def _give_back(self, request: str) -> None:
        """Tickets that will not be pulled are dropped."""
        handover = self._incoming.pop(request, None)
        if handover is not None:
            self._step.drops += handover.tickets

    # ── steps ─────────────────────────────────────────────────────────────────────

    def take_step(self, *, computes: bool) -> StepOrders:
        """What the workers are to do now; told once."""
        step, self._step = self._step, StepOrders()
        if self.recall is not None:
            step.store = self.recall.stores.take()
            step.prompt_tokens = self.recall.prompt_tokens
        if self._peers is not None:
            step.asks = self._peers.take()
        step.idle = not computes and not self._computes
        self._computes = computes
        if computes:
            self._weights.mark_used()
        return step

    def reset(self) -> bool:
        """The engine's weights may have been changed in place. Nothing that was stored before is
        found any more, here or elsewhere, and requests are not handed over to or from other
        engines until the weights have a name. False while something is still being loaded: it was
        computed with the weights before.
        """
        self._weights.change()
        self._begin_anew()
        return not self.is_loading

    def name_weights(self, name: str) -> None:
        """All engines with the changed weights call them by this name. Precondition: no block of
        this engine holds anything that was computed before the change."""
        self._weights.name(name)
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Nothing that was computed before is taken over, found or stored."""
        for request in tuple(self._incoming):
            self._give_back(request)
        if self._peers is not None:
            self._peers.reset()
        if self.recall is not None:
            self.recall.reset(self._weights.identity)

    def forget_stored(self) -> None:
        """The engine has computed with blocks that turned out to be invalid. What it stored
        meanwhile cannot be told from the rest, so nothing that is stored is found any more."""
        if self.recall is not None:
            self.recall.reset(unshared(self._weights.identity))

    def close(self) -> None:
        """The engine ends."""
        if self.recall is not None:
            self.recall.close()
