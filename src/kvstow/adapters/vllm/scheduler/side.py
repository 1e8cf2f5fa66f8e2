"""The scheduler's side: which request hands over, takes over, is stored or comes back.

Nothing here touches memory. Questions (`matched`) change nothing that a second question could
see; what the workers have to do is collected and taken once per step.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvstow.adapters.vllm.counts import EngineCounts
from kvstow.adapters.vllm.engine import Request
from kvstow.adapters.vllm.identity import unshared
from kvstow.adapters.vllm.protocol import (
    BlockIds,
    EngineRequest,
    StepOrders,
    StepResults,
    WorkerEndpoint,
)
from kvstow.adapters.vllm.scheduler.events import TierEvents
from kvstow.adapters.vllm.scheduler.handovers import Handovers, PeerQuestions
from kvstow.adapters.vllm.scheduler.holds import HeldPulls
from kvstow.adapters.vllm.scheduler.key_index import RequestKeys
from kvstow.adapters.vllm.scheduler.offers import SchedulerOffers
from kvstow.adapters.vllm.scheduler.parts import BlockHolds, EngineState, Hits, PrefixSource
from kvstow.adapters.vllm.scheduler.recall import Recall


class Match(NamedTuple):
    """What the engine was told last of a request: how many tokens it had then, and which source
    has more."""

    num_computed: int
    source: PrefixSource | None


class SchedulerSide:
    """Bookkeeping of one engine."""

    def __init__(self, engine: EngineState, events: TierEvents | None = None) -> None:
        self._engine = engine
        self.held = HeldPulls(engine)
        self._offers = SchedulerOffers(engine)
        self._handovers = Handovers(engine)
        self._sources: list[PrefixSource] = [self._handovers]
        self._key_sizes = {group.block_tokens for group in engine.groups}
        self.recall: Recall | None = None
        if engine.options.offloads:
            self.recall = Recall(engine, events)
            self._sources.append(self.recall)
        if engine.takes_over:
            questions = PeerQuestions(engine, self._handovers)
            self._key_sizes.add(questions.step)
            self._sources.append(questions)
        self._matches: dict[str, Match] = {}
        self._loads: dict[str, Hits] = {}
        """Requests whose blocks are not yet what the engine counts as computed, and from where
        their tokens come."""
        self._computes = False
        """Whether the last step computes something; it may still run when the next one is made."""

    @property
    def counts(self) -> EngineCounts:
        return self._engine.counts

    def meet(self, workers: Sequence[WorkerEndpoint]) -> None:
        """The workers' agents, by rank. Those that were met before have closed."""
        self._engine.workers = tuple(workers)
        self._engine.num_ranks = max(self._engine.num_ranks, len(workers))
        self._handovers.early.fail_all()
        if self.recall is not None:
            self.recall.meet()

    def bind(self, pool: BlockHolds) -> None:
        """The engine's pool, whose blocks can be held."""
        self._engine.pool = pool

    # ── requests ──────────────────────────────────────────────────────────────────

    def arrived(self, request: EngineRequest, original: Request | None = None) -> None:
        """A request is queued; `original` is what the engine has of it."""
        self._handovers.take_in(request, original)
        identity, sizes = self._engine.weights.identity, self._key_sizes
        keys = RequestKeys(identity, request, sizes, ahead=self._engine.ahead)
        has_tickets = self._handovers.takes_over(request.id)
        for source in self._sources:
            source.arrived(request, keys, has_tickets=has_tickets)

    def matched(self, request: str, num_computed: int) -> int | None:
        """How many tokens beyond `num_computed` could be loaded; None: ask again later."""
        num_held, best = num_computed, None
        for source in self._sources:
            reach = source.reach(request, num_computed, num_held)
            if reach is None:
                self._matches[request] = Match(num_computed, None)
                return None
            if reach > num_held:
                num_held, best = reach, source
        self._matches[request] = Match(num_computed, best)
        return num_held - num_computed

    def allocated(self, request: str, ids: BlockIds, num_external: int) -> None:
        """The engine has given the request blocks, for `num_external` tokens to be loaded.

        With none to be loaded it goes on to compute, after a load too, failed or not, and even if
        it was to ask again. The engine may take fewer than it was told of: they are counted from
        what it had then. Steps may lie between its question and this: what was there then may
        have been given back, and the load fails.
        """
        start, source = self._matches.pop(request, Match(0, None))
        if num_external == 0:
            self._loads.pop(request, None)
            for each in self._sources:
                each.computes(request)
            return
        if source is None or not source.has(request):
            source = self._handovers
        self._loads[request] = source.load(request, ids, start, start + num_external)

    def hits(self, request: str, num_tokens: int) -> Hits:
        """Where so many tokens of a request come from that was just given its blocks."""
        hits = self._loads.get(request, {})
        return hits if sum(hits.values()) == num_tokens else {"external_unspecified": num_tokens}

    def finished(
        self, request: EngineRequest, ids: BlockIds, num_tokens: int
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request is over, with the cache of its first `num_tokens` tokens in these blocks.

        Whether its blocks must stay, and what its answer carries. One that ends while it is
        being loaded has nothing to give.
        """
        is_loading = self._loads.pop(request.id, None) is not None
        self._matches.pop(request.id, None)
        for source in self._sources:
            source.ended(request.id, ids, num_tokens if request.shareable and not is_loading else 0)
        if is_loading or not request.asks_for_tickets or num_tokens < 1:
            return False, None
        params = self._offers.make(request, ids, num_tokens)
        return params is not None, params

    @property
    def is_loading(self) -> bool:
        """Whether a request waits for its blocks to be filled."""
        return bool(self._loads) or len(self._handovers.early) > 0

    # ── steps ─────────────────────────────────────────────────────────────────────

    @property
    def waits_for_step(self) -> bool:
        """Whether held blocks wait for another step, though no request does."""
        return len(self.held) + len(self._handovers.early) > 0 or (
            self.recall is not None and len(self.recall.stores) > 0
        )

    def take_counts(self) -> dict[str, Any]:
        """What was counted since the last call."""
        return self._engine.counts.take()

    def take_step(self, *, computes: bool) -> StepOrders:
        """What the workers are to do now; told once."""
        for source in self._sources:
            source.plan()
        step = self._engine.take_step()
        step.idle = not computes and not self._computes
        self._computes = computes
        if computes:
            self._engine.weights.mark_used()
        return step

    def apply(self, results: StepResults, sent: Sequence[str] = ()) -> None:
        """What the workers have told in a step; leases of these requests are over."""
        self.held.apply(results)
        for source in self._sources:
            source.apply(results)
        for request in sent:
            self._offers.sent(request)

    # ── weights ───────────────────────────────────────────────────────────────────

    def reset(self) -> bool:
        """The engine's weights may have been changed in place. Nothing that was stored before is
        found any more, here or elsewhere, and requests are not handed over to or from other
        engines until the weights have a name. False while something is still being loaded: it was
        computed with the weights before.
        """
        self._engine.weights.change()
        self._begin_anew()
        return not self.is_loading

    def name_weights(self, name: str) -> None:
        """All engines with the changed weights call them by this name. Precondition: no block of
        this engine holds anything that was computed before the change."""
        self._engine.weights.name(name)
        self._begin_anew()

    def _begin_anew(self) -> None:
        for source in self._sources:
            source.reset(self._engine.weights.identity)

    def forget_stored(self) -> None:
        """The engine has computed with blocks that turned out to be invalid. What it stored
        meanwhile cannot be told from the rest, so nothing that is stored is found any more."""
        if self.recall is not None:
            self.recall.reset(unshared(self._engine.weights.identity))

    def close(self) -> None:
        """The engine ends."""
        for source in self._sources:
            source.close()
