"""The worker's side: one agent over the engine's own memory, pulls and leases under way.

A load is reported over only when nothing can write to its blocks any more, or they are held, and
failed when the fence or anything else did not hold: then the engine must not use a single byte of
it.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Sequence
from secrets import token_bytes

from kvstow.adapters.vllm.options import ConnectorOptions, rank_address
from kvstow.adapters.vllm.peers.asking import PeerAsker
from kvstow.adapters.vllm.peers.lending import RowLender
from kvstow.adapters.vllm.protocol import (
    KeyLevels,
    LeaseNumbers,
    OfferBlocks,
    PeersAnswer,
    RanksReport,
    StepOrders,
    StepResults,
    StoreBlocks,
    WorkerEndpoint,
)
from kvstow.adapters.vllm.worker.leases import LeasedGenerations, RankLeases
from kvstow.adapters.vllm.worker.offers import OfferInbox
from kvstow.adapters.vllm.worker.pulls import EndedPulls, RankPulls
from kvstow.adapters.vllm.worker.tiers import WorkerTiers
from kvstow.memory.arena import Arena
from kvstow.plan.manifest import fingerprint
from kvstow.transfer.agent import Agent
from kvstow.transfer.tickets.ticket import Ticket
from kvstow.transfer.transport.base import Transport

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.002
"""An engine that only waits for us asks again and again: it may as well sleep this long."""

PULL_SECONDS = 0.006
"""How long an idle engine waits for a pull to end, so that the step in which it waits can tell."""


class WorkerSide:
    """One rank: its arena, its agent, its open business."""

    def __init__(
        self,
        arena: Arena,
        options: ConnectorOptions,
        *,
        transport: Transport,
        name: str,
        after_steps: bool = False,
    ) -> None:
        """With `after_steps`, steps that the engine has begun may still write to blocks that it
        gives for a load: those are waited for."""
        self.arena = arena
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._news = threading.Event()
        """A pull has ended, or a peer has answered."""
        self._was_news = False
        """The engine looks at what it was told one step later: that step does not wait."""
        self._lock = threading.RLock()
        """Offers come in a thread of their own."""
        blocks = LeasedGenerations(arena.layout)
        self.agent = Agent(
            arena,
            blocks,
            transport=transport,
            name=name,
            listen=rank_address(options.listen, arena.layout),
            keys=options.keys(),
            options=options.agent,
        )
        self._leases = RankLeases(self.agent, blocks, self._counts)
        self.pulls = RankPulls(
            self.agent, arena, blocks, self._counts, wake=self._news.set, after_steps=after_steps
        )
        self._listen(options, transport)
        self._offload = (
            WorkerTiers(arena, options, after_steps=after_steps) if options.offloads else None
        )
        if self._offload is not None:
            self._offload.watch(self.agent.telemetry)
        self._step = StepOrders()
        """The step that has begun, until its loads have."""
        self._beside_steps = arena.device.type != "cpu"
        """Whether the device computes a step while the engine's thread goes on."""
        self._unsaved: StoreBlocks | None = None
        """What the last step stores, until it has computed."""
        self._lender = self._lending(options, transport)
        self.agent.start()
        self._asker = self._asking(options)
        self._introduce()

    def _listen(self, options: ConnectorOptions, transport: Transport) -> None:
        """Be there for the scheduler's side, and believe nobody else."""
        keys, secret = options.keys(), token_bytes(16)
        self._inbox = OfferInbox(secret, self.hear)
        self.endpoint = WorkerEndpoint(
            agent=self.agent.name,
            start=transport.name,
            address=self.agent.address,
            key=keys.public if keys else "",
            fingerprint=fingerprint(self.arena.layout),
            secret=secret,
            inbox=self._inbox.address,
        )
        self.agent.server.leases.may_come = LeaseNumbers(secret).is_ours

    def _lending(self, options: ConnectorOptions, transport: Transport) -> RowLender | None:
        """Who lends rows of host memory to other engines."""
        if self._offload is None or not options.lend:
            return None
        host, own = self._offload.host, transport.fresh()
        return RowLender(host, options, transport=own, name=self.agent.name)

    def _asking(self, options: ConnectorOptions) -> PeerAsker | None:
        """Who asks other engines: the first rank, for all."""
        layout = self.arena.layout
        if not options.peers or (layout.tp[0], layout.pp[0]) != (0, 0):
            return None
        return PeerAsker(self.agent, options, self._news.set)

    def _introduce(self) -> None:
        layout = self.arena.layout
        rows = [
            f"{rows.group.name}: {layout.row_bytes(g)} bytes in {len(layout.runs(g, 0))} runs"
            for g, rows in enumerate(layout.groups)
        ]
        log.info(
            "kvstow: %d bytes at %#x, order %s, %d blocks (%s), agent %s at %s",
            layout.nbytes,
            self.arena.address,
            layout.order,
            layout.num_blocks(0),
            "; ".join(rows),
            self.endpoint.agent,
            self.endpoint.address,
        )

    # ── a step ────────────────────────────────────────────────────────────────────

    def begin(self, step: StepOrders) -> None:
        """What cannot wait for the engine to start its computation: somebody may show a ticket
        already that the scheduler's side has just given out. On a CPU the computation is over
        before the engine calls `load`, so loads begin here.

        What is left of the step before is done first. With speculative decoding vLLM never calls
        `wait_for_save` on pipeline ranks that are not the last.
        """
        self.load()
        self._store_unsaved()
        self._step, self._unsaved = step, step.store
        with self._lock:
            for offer in step.offers:
                self._leases.order(offer)
            pulled = {ticket.lease for pull in step.pulls for ticket in pull.tickets}
            for ticket in step.keeps:
                if ticket.lease not in pulled:  # a pull keeps its lease alive itself
                    self.agent.keep(ticket)
            for ticket in step.drops:
                self.agent.drop(ticket)
        if self._offload is not None and self._offload.prefill is not None:
            self._offload.prefill.begin(step.prompt_tokens)
        if not self._beside_steps:
            self.load()

    def load(self) -> None:
        """Start what writes to blocks that nothing else uses, or asks for something. An accelerator
        has been given the step's computation by now, so nobody waits for the agent's thread."""
        step, self._step = self._step, StepOrders()
        with self._lock:
            for pull in step.pulls:
                self.pulls.begin(pull)
        if self._offload is not None:
            for lookup in step.lookups:
                self._offload.look_up(lookup)
            for load in step.loads:
                self._offload.load(load)
        if self._asker is not None:
            for ask in step.asks:
                self._asker.ask(ask)

    def save(self) -> None:
        """Start to store what the scheduler's side has decided, after the engine's computation."""
        if self._offload is not None and self._offload.prefill is not None:
            self._offload.prefill.mark()
        self._store_unsaved()

    def _store_unsaved(self) -> None:
        store, self._unsaved = self._unsaved, None
        if self._offload is not None and store is not None:
            self._offload.store(store)

    def kept(self) -> KeyLevels:
        """Where rows are kept, as far as no step's results have told."""
        return self._offload.kept() if self._offload else {}

    def results(self, *, idle: bool) -> StepResults:
        """What has ended since the last call."""
        if idle and not self._has_answers and not self._was_news:
            self._rest()
        with self._lock:
            return self._results()

    def _results(self) -> StepResults:
        self._news.clear()
        self.agent.settle()
        self.pulls.follow()
        pulls = self.pulls.take()
        restored, lost = self._loaded()
        report = self._report(pulls)
        results = StepResults(
            sent=frozenset(self._leases.take()),
            received=frozenset(pulls.received | restored),
            failed=frozenset(pulls.failed | lost),
            counts=dict(self._counts),
            report=report,
        )
        self._counts.clear()
        self._was_news = bool(results.received)
        return results

    def _report(self, pulls: EndedPulls) -> RanksReport:
        found = self._found(pulls.peers_failed)
        if self._offload is None:
            return RanksReport(found=found, held=pulls.held, released=tuple(pulls.released))
        stored, kept = self._stored(self._offload), self.kept()
        return RanksReport(
            present={answer.request: answer for answer in self._offload.answers()},
            kept={self.endpoint.agent: kept} if kept else {},
            stored=dict.fromkeys(stored, 1),
            changes=self._offload.changes(),
            found=found,
            held=pulls.held,
            released=tuple(pulls.released),
        )

    @property
    def _has_answers(self) -> bool:
        """Whether a request that waits for an answer can be told something."""
        tiers = self._offload is not None and self._offload.has_answers
        return tiers or (self._asker is not None and self._asker.has_answers)

    def _found(self, failed: Sequence[Ticket]) -> tuple[PeersAnswer, ...]:
        """What peers have said since the last time. Those that did not deliver are left alone."""
        if self._asker is None:
            return ()
        self._asker.failed(failed)
        answers = tuple(self._asker.answers())
        for answer in answers:
            self._counts["peers asked"] += 1
            self._counts["peers had it"] += bool(answer.tickets)
        return answers

    def _rest(self) -> None:
        if self._offload is not None and self._offload.is_loading:
            self._offload.await_load(IDLE_SECONDS, self._news)
        else:
            self._news.wait(PULL_SECONDS if len(self.pulls) else IDLE_SECONDS)

    def _stored(self, offload: WorkerTiers) -> list[int]:
        """Jobs of stores that are over."""
        jobs = offload.stored()
        for job in jobs:
            self._counts["stored rows"] += job.num_moved
            if job.error is not None:
                log.warning("store failed: %s", job.error)
                self._counts["store failed"] += 1
        for what, count in offload.reasons().items():
            self._counts[what] += count
        return [job.number for job in jobs]

    def _loaded(self) -> tuple[set[str], set[str]]:
        """Requests whose rows have come from the tiers, or could not; and the latter."""
        restored, lost = set[str](), set[str]()
        for job in self._offload.loaded() if self._offload is not None else ():
            assert job.order is not None
            restored.add(job.order.request)
            if job.num_damaged:
                self._counts["damaged rows"] += job.num_damaged
            if job.error is None:
                self._counts["restored tokens"] += job.order.num_tokens
                continue
            log.warning("request %s: restore failed: %s", job.order.request, job.error)
            self._counts["restore failed"] += 1
            lost.add(job.order.request)
        return restored, lost

    # ── leases ────────────────────────────────────────────────────────────────────

    def adopt(self, offer: OfferBlocks, texts: Sequence[str]) -> None:
        """Keep what a ticket of this rank promises; called by a scheduler in this very thread,
        which needs no text for it."""
        self._leases.adopt(offer)

    def hear(self, offer: OfferBlocks) -> None:
        """The same, told between two steps, in a thread of its own."""
        with self._lock:
            self._leases.hear(offer)

    # ── its end ───────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """End leases and pulls, let go of sockets and of the engine's memory."""
        self._inbox.close()
        if self._asker is not None:
            self._asker.close()
        if self._lender is not None:
            self._lender.close()
        self.agent.close()
        if self._offload is not None:
            self._offload.close()
        self.arena.close()
