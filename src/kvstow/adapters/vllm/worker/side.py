"""The worker's side: one agent over the engine's own memory, and the parts that use it.

A load is reported over only when nothing can write to its blocks any more, or they are held, and
failed when the fence or anything else did not hold: then the engine must not use a single byte of
it.
"""

import logging
import threading
from time import monotonic
from typing import Any

from kvstow.adapters.vllm.mail import Inbox
from kvstow.adapters.vllm.options import ConnectorOptions, rank_address
from kvstow.adapters.vllm.protocol import (
    EarlyPull,
    OfferBlocks,
    StepOrders,
    StepResults,
    WorkerEndpoint,
)
from kvstow.adapters.vllm.worker.offers import LeasedGenerations, RankOffers
from kvstow.adapters.vllm.worker.part import RankPart, RankState
from kvstow.adapters.vllm.worker.peers import PeerClient, RowServer
from kvstow.adapters.vllm.worker.pulls import RankPulls
from kvstow.adapters.vllm.worker.tiers import POLL_SECONDS, WorkerTiers
from kvstow.errors import KvstowError
from kvstow.memory.arena import Arena
from kvstow.plan.manifest import fingerprint
from kvstow.threads import guarded_thread
from kvstow.transfer.agent import Agent
from kvstow.transfer.transport.base import Transport

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.002
"""An engine that only waits for us asks again and again: it may as well sleep this long."""

PULL_SECONDS = 0.006
"""How long an idle engine waits for a pull to end, so that the step in which it waits can tell."""


class Listener(RankPart):
    """Hears, in a thread of its own, what the scheduler's side tells between steps. It holds `lock`
    while it acts: then no step does."""

    def __init__(self, lock: threading.RLock, offers: RankOffers, pulls: RankPulls) -> None:
        self._lock, self._offers, self._pulls = lock, offers, pulls
        self._inbox = Inbox()
        self._is_open = True
        self.address = self._inbox.address
        guarded_thread(
            "kvstow-mail",
            self._listen,
            on_broken=lambda error: self._inbox.close(),  # nobody can write to it and wait
        ).start()

    def wake(self) -> None:
        """Something has come of a pull."""
        self.address.wake()

    def _listen(self) -> None:
        while True:
            message = self._inbox.receive(None if self._is_open else 0)
            with self._lock:
                if not self._is_open and message is None:
                    return self._inbox.close()
                try:
                    self._hear(message)
                except KvstowError:
                    log.exception("mail of the scheduler's")

    def _hear(self, message: object) -> None:
        match message:
            case OfferBlocks():
                self._offers.hear(message)
            case EarlyPull():
                self._pulls.hear(message)
            case _:
                self._pulls.resume()

    def close(self) -> None:
        """Hear nothing any more; the thread ends soon."""
        self._is_open = False
        self.wake()


class WorkerSide:
    """One rank: its arena, its agent, and parts that do the same verbs in every step."""

    def __init__(
        self,
        arena: Arena,
        options: ConnectorOptions,
        *,
        transport: Transport,
        name: str,
        after_steps: bool = False,
        by_hand: bool = False,
        results: StepResults | None = None,
    ) -> None:
        """For `after_steps` and `by_hand` see `RankState`. `results` are what another one, over the
        memory before, has not told yet."""
        self.rank = RankState(
            arena=arena,
            options=options,
            name=name,
            after_steps=after_steps,
            by_hand=by_hand,
        )
        self._transport = transport
        self._news = threading.Event()
        """A pull or a look-up has ended, or a peer has answered."""
        self._has_just_told = False
        """The engine looks at what it was told one step later: that step does not wait."""
        self._lock = threading.RLock()
        """Offers come in a thread of their own."""
        self._to_load = self._to_save = StepOrders()
        """The step that has begun, until its loads have, and until it has computed."""
        self._beside_steps = arena.device.type != "cpu"
        """Whether the device computes a step while the engine's thread goes on."""
        self._results = results or StepResults()
        """What the engine was not told yet."""
        self._keepers: list[RankPart] = []
        """Parts that hold rows outside of the arena."""
        self._tiers: WorkerTiers | None = None
        if options.offloads:
            self._tiers = WorkerTiers(self.rank)
            self._keepers += [self._tiers, self._tiers.hints]
            if options.lend:
                self._keepers.append(RowServer(self.rank, self._tiers.host, transport.fresh()))
        self._movers: list[RankPart] = []
        """Parts that move rows of the arena; none while the engine sleeps."""
        self._attach(transport)

    @property
    def parts(self) -> list[RankPart]:
        """All of them; they are closed from the last to the first."""
        return [*self._keepers, *self._movers]

    def _attach(self, transport: Transport) -> None:
        """Make an agent over the arena, and who uses it."""
        rank, options, layout = self.rank, self.rank.options, self.rank.arena.layout
        blocks, keys = LeasedGenerations(layout), options.keys()
        self.agent = agent = Agent(
            rank.arena,
            blocks,
            transport=transport,
            name=rank.name,
            listen=rank_address(options.listen, layout),
            keys=keys,
            options=options.agent,
        )
        if self._tiers is not None:
            self._tiers.watch(agent.telemetry)
        self.pulls = RankPulls(rank, agent, blocks)
        self.offers = RankOffers(rank, agent, blocks)
        agent.start()
        listener = Listener(self._lock, self.offers, self.pulls)

        def wake() -> None:
            self._news.set()
            listener.wake()

        rank.wake = wake
        self._movers = [listener, self.pulls, self.offers]
        if layout.tp[0] == layout.pp[0] == 0:  # the first rank asks peers for all
            self._movers.append(PeerClient(rank, agent, broken=self.pulls.broken_peers))
        self.endpoint = WorkerEndpoint(
            agent=agent.name,
            start=transport.name,
            address=agent.address,
            key=keys.public if keys else "",
            fingerprint=fingerprint(layout),
            ticket_key=agent.ticket_key,
            inbox=listener.address,
        )
        self._introduce()

    def kept(self) -> StepResults:
        """Where rows are kept, as far as it was not told yet."""
        results = StepResults()
        if self._tiers is not None:
            self._tiers.report_kept(results)
        return results

    def sleep(self) -> None:
        """The arena's memory goes away: offers are withdrawn, pulls end, rows elsewhere stay."""
        if self._movers:
            with self._lock:
                if self._tiers is not None:
                    self._tiers.finish()
                for part in reversed(self._movers):
                    part.report(self._results)
                    part.close()
                self.agent.settle()
                for part in self._movers:
                    part.report(self._results)
                self._movers = []

    def wake(self) -> None:
        """The arena's memory is there again, and holds nothing. Whoever was met before has to meet
        this rank anew: see `endpoint`."""
        if not self._movers:
            self._transport = self._transport.fresh()
            self._attach(self._transport)

    def _introduce(self) -> None:
        layout = self.rank.arena.layout
        rows = [
            f"{rows.group.name}: {layout.row_bytes(g)} bytes in {len(layout.runs(g, 0))} runs"
            for g, rows in enumerate(layout.groups)
        ]
        log.info(
            "kvstow: %d bytes at %#x, order %s, %d blocks (%s), agent %s at %s",
            layout.nbytes,
            self.rank.arena.address,
            layout.order,
            layout.num_blocks(0),
            "; ".join(rows),
            self.endpoint.agent,
            self.endpoint.address,
        )

    # ── a step ────────────────────────────────────────────────────────────────────

    def begin(self, step: StepOrders) -> None:
        """A step begins. On a CPU the computation is over before the engine calls `load`, so loads
        begin here.

        What is left of the step before is done first. With speculative decoding vLLM never calls
        `wait_for_save` on pipeline ranks that are not the last.
        """
        self.load()
        self.save()
        self._to_load = self._to_save = step
        with self._lock:
            for part in self.parts:
                part.begin(step)
        if not self._beside_steps:
            self.load()

    def load(self) -> None:
        """The device has been given the step's computation."""
        step, self._to_load = self._to_load, StepOrders()
        with self._lock:
            for part in self.parts:
                part.load(step)

    def save(self) -> None:
        """The step's computation has been given to the device, all of it."""
        step, self._to_save = self._to_save, StepOrders()
        for part in self.parts:
            part.save(step)

    def results(self, *, idle: bool = False) -> StepResults:
        """What has ended since the last call. An engine that is `idle` waits for it a moment."""
        if idle and not self._has_just_told:
            self._rest()
        with self._lock:
            self._news.clear()
            self.agent.settle()
            for part in self.parts:
                part.report(self._results)
            results, self._results = self._results, StepResults()
        self._has_just_told = bool(results.received)
        return results

    def _rest(self) -> None:
        until = monotonic() + (PULL_SECONDS if len(self.pulls) else IDLE_SECONDS)
        while not any(part.has_news() for part in self.parts) and monotonic() < until:
            if self._news.wait(POLL_SECONDS):
                return

    def take_counts(self) -> dict[str, Any]:
        """What was counted since the last call."""
        with self._lock:
            return self.rank.counts.take()

    def close(self) -> None:
        """End leases and pulls, let go of sockets and of the engine's memory."""
        with self._lock:  # mail may come
            for part in reversed(self.parts):
                part.close()
        self.rank.arena.close()
