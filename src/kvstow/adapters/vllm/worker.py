"""The worker's side: one agent over the engine's own memory, pulls and leases under way.

A load is reported over only when nothing can write to its blocks any more, and failed when the
fence or anything else did not hold: then the engine must not use a single byte of it.
"""

import logging
import threading
import time
from collections import Counter, defaultdict
from secrets import token_bytes

import torch

from kvstow.adapters.vllm.generations import LeasedGenerations
from kvstow.adapters.vllm.offers import OfferInbox
from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.peers.asking import PeerAsker
from kvstow.adapters.vllm.peers.lending import RowLender
from kvstow.adapters.vllm.protocol import (
    KeyLevels,
    KeysPresent,
    LeaseNumbers,
    LoadBlocks,
    OfferBlocks,
    PeersAnswer,
    PullBlocks,
    StepOrders,
    StepResults,
    StoreBlocks,
    WorkerEndpoint,
)
from kvstow.adapters.vllm.scheduler import held
from kvstow.adapters.vllm.tiers import WorkerTiers
from kvstow.adapters.vllm.underway import RETRY_SECONDS, AdoptedLease, OpenPull, StepsBegun
from kvstow.errors import KvstowError, StoreError, TransferError
from kvstow.memory.arena import Arena
from kvstow.plan.manifest import fingerprint
from kvstow.route.blocks import Blocks
from kvstow.transfer.agent import Agent
from kvstow.transfer.lease import EndReason
from kvstow.transfer.pulls import Transfer
from kvstow.transfer.ticket import Ticket
from kvstow.transfer.transport.base import Transport

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.002
"""An engine that only waits for us asks again and again: it may as well sleep this long."""

PULL_SECONDS = 0.006
"""So long it waits for the end of a pull: between two steps it would not notice it."""


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
        self._after_steps = after_steps
        self._options = options
        self._owner = LeasedGenerations(arena.layout)
        self.agent = Agent(
            arena,
            self._owner,
            transport=transport,
            name=name,
            listen=options.listen,
            keys=options.keys(),
            options=options.agent,
        )
        keys, secret = options.keys(), token_bytes(16)
        self._lock = threading.RLock()
        """Offers come in a thread of their own."""
        self._inbox = OfferInbox(secret, self.hear)
        self.endpoint = WorkerEndpoint(
            agent=name,
            start=transport.name,
            address=self.agent.address,
            key=keys.public if keys else "",
            fingerprint=fingerprint(arena.layout),
            secret=secret,
            inbox=self._inbox.address,
        )
        self.agent.server.leases.may_come = LeaseNumbers(secret).is_ours
        self._loading: dict[str, OpenPull] = {}
        self._news = threading.Event()
        """A pull has ended."""
        self._was_news = False
        """The engine looks at what it was told one step later: that step does not wait."""
        self._offload: WorkerTiers | None = None
        if options.offloads:
            self._offload = WorkerTiers(arena, options, after_steps=after_steps)
        self._unsaved: tuple[StoreBlocks, ...] = ()
        """Stores of the last step, until it has computed."""
        self._lender: RowLender | None = None
        if self._offload is not None and options.lend:
            self._lender = RowLender(
                self._offload.host, options, transport=transport.fresh(), name=name
            )
        self._asker: PeerAsker | None = None
        self._adopted: dict[int, AdoptedLease] = {}
        self._staying: Counter[str] = Counter()
        """Per request, leases that still need its blocks."""
        self._sent: set[str] = set()
        self._present: list[KeysPresent] = []
        self._stored: list[int] = []
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._counts: defaultdict[str, float] = defaultdict(float)
        self.agent.start()
        if options.peers and arena.layout.tp[0] == arena.layout.pp[0] == 0:
            self._asker = PeerAsker(self.agent, options, self._news.set)
        self._introduce()

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
        """What does not wait for the engine to compute: somebody may show a ticket already that
        the scheduler's side has just given out, and pulls and loads write to blocks that nothing
        else uses.
        """
        self._store_unsaved()  # of a step whose end the engine has not told
        self._unsaved = step.stores
        with self._lock:
            for offer in step.offers:
                self._ordered(self.adopt(offer))
            for ticket in step.keeps:
                self.agent.keep(ticket)
            for ticket in step.drops:
                self.agent.drop(ticket)
            for pull in step.pulls:
                loading = OpenPull(pull, time.monotonic(), self._steps_begun())
                self._loading[pull.request] = loading
                if loading.may_write:
                    self._try(loading)
        if self._offload is not None:
            for lookup in step.lookups:
                self._offload.look_up(lookup)
            for load in step.loads:
                self._offload.load(load)
        if self._asker is not None:
            for ask in step.asks:
                self._asker.ask(ask)
        if self._offload is not None and self._offload.prefill is not None:
            self._offload.prefill.begin(step.prompt_tokens)

    def save(self) -> None:
        """Start to store what the scheduler's side has decided, after the engine's computation."""
        if self._offload is not None and self._offload.prefill is not None:
            self._offload.prefill.mark()
        self._store_unsaved()

    def _store_unsaved(self) -> None:
        stores, self._unsaved = self._unsaved, ()
        if self._offload is not None:
            for store in stores:
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
        for loading in tuple(self._loading.values()):
            self._follow(loading)
        if self._offload is not None:
            self._settle(self._offload)
            self._present += self._offload.answers()
            for what, count in self._offload.reasons().items():
                self._counts[what] += count
        found = self._found()
        results = StepResults(
            sent=frozenset(self._sent),
            received=frozenset(self._received),
            failed=frozenset(self._failed),
            present=tuple(self._present),
            stored=tuple(self._stored),
            kept=self._offload.kept() if self._offload else {},
            counts=dict(self._counts),
            changes=self._offload.changes() if self._offload is not None else (),
            found=found,
        )
        self._was_news = bool(results.received)
        for told in (self._sent, self._received, self._failed, self._counts):
            told.clear()
        for told in (self._present, self._stored):
            told.clear()
        return results

    @property
    def _has_answers(self) -> bool:
        """Whether a request that waits for an answer can be told something."""
        tiers = self._offload is not None and self._offload.has_answers
        return tiers or (self._asker is not None and self._asker.has_answers)

    def _found(self) -> tuple[PeersAnswer, ...]:
        """What peers have said since the last time."""
        answers = () if self._asker is None else tuple(self._asker.answers())
        for answer in answers:
            self._counts["peers asked"] += 1
            self._counts["peers had it"] += bool(answer.tickets)
        return answers

    def _rest(self) -> None:
        if self._offload is not None and self._offload.is_loading:
            self._offload.await_load(IDLE_SECONDS, self._news)
        else:
            self._news.wait(PULL_SECONDS if self._loading else IDLE_SECONDS)

    def _settle(self, offload: WorkerTiers) -> None:
        for job in offload.stored():
            self._stored.append(job.number)
            self._counts["stored rows"] += job.num_moved
            if job.error is not None:
                log.warning("store failed: %s", job.error)
                self._counts["store failed"] += 1
        for job in offload.loaded():
            assert job.order is not None
            self._loaded(job.order, job.error)
            if job.num_damaged:
                self._counts["damaged rows"] += job.num_damaged

    def _loaded(self, order: LoadBlocks, error: StoreError | None) -> None:
        self._received.add(order.request)
        if error is None:
            self._counts["restored tokens"] += order.num_tokens
            return
        log.warning("request %s: restore failed: %s", order.request, error)
        self._counts["restore failed"] += 1
        self._failed.add(order.request)

    def _let_go(self, request: str) -> None:
        """One lease less; the last one frees the request's blocks."""
        self._staying[request] -= 1
        if self._staying[request] == 0:
            del self._staying[request]
            self._sent.add(request)

    # ── leases ────────────────────────────────────────────────────────────────────

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
        for group, blocks in mine.blocks.items():
            self._owner.set(group, blocks.ids, mine.generations[group])

        def ended(reason: EndReason) -> None:
            adopted.ended = True
            self._counts[f"lease {reason}"] += 1
            self._let_go_if_over(adopted)

        self.agent.adopt(mine, readers=None, on_end=ended)  # all ranks of one decode instance
        return adopted

    def hear(self, offer: OfferBlocks) -> None:
        """Adopt an offer that was told between two steps, in a thread of its own, unless a step
        was faster: its lease may be over by now."""
        with self._lock:
            if not self.agent.server.leases.has_ended(self._ticket(offer).lease):
                self.adopt(offer)

    def _ordered(self, adopted: AdoptedLease) -> None:
        """A step has named the lease: its request's blocks stay until it is over."""
        adopted.ordered = True
        self._staying[adopted.request] += 1
        self._let_go_if_over(adopted)

    def _let_go_if_over(self, adopted: AdoptedLease) -> None:
        if adopted.ordered and adopted.ended:
            del self._adopted[adopted.lease]
            self._let_go(adopted.request)

    def _ticket(self, offer: OfferBlocks) -> Ticket:
        for ticket in offer.tickets:
            if ticket.agent == self.endpoint.agent:
                return ticket
        raise TransferError(
            f"request {offer.request}: none of {len(offer.tickets)} tickets is of agent "
            f"{self.endpoint.agent!r}",
            kind="ticket",
        )

    # ── pulls ─────────────────────────────────────────────────────────────────────

    def _steps_begun(self) -> StepsBegun | None:
        """The end of what the engine has given the device by now, where that counts."""
        if not self._after_steps or self.arena.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.arena.device))
        return event

    def _try(self, loading: OpenPull) -> None:
        pull = loading.pull
        try:
            loading.transfer = self.agent.pull(
                pull.tickets,
                into=self._blocks(pull),
                start_token=pull.start_token,
                num_tokens=pull.num_tokens,
                deadline=pull.seconds,
                on_quiet=self._news.set,
            )
        except KvstowError as error:
            self._over(loading, error)

    def _blocks(self, pull: PullBlocks) -> dict[int, Blocks]:
        groups = self.arena.layout.groups
        return {
            g: held(ids, pull.start_token, pull.num_tokens, groups[g].group.block_tokens)
            for g, ids in enumerate(pull.ids)
        }

    def _follow(self, loading: OpenPull) -> None:
        now = time.monotonic()
        transfer = loading.transfer
        if transfer is None:
            if now >= loading.again_at and loading.may_write:
                self._try(loading)
            return
        if not transfer.done or not transfer.wait_quiet(0):
            return
        if transfer.error is None:
            error = self._lacks_tokens(loading.pull)
            self._counts["pulled tokens"] += loading.pull.num_tokens - loading.pull.start_token
            self._note(transfer)
            self._over(loading, error)
        elif loading.may_retry(transfer.error, now):
            loading.transfer, loading.again_at = None, now + RETRY_SECONDS
        else:
            self._over(loading, transfer.error)

    def _lacks_tokens(self, pull: PullBlocks) -> TransferError | None:
        """Why an accepted pull's blocks may not be used, if some of them were not filled.

        A producer with fewer tokens per block may have let go of tokens behind a window of which
        a block here has a part. This request would not miss them; vLLM enters the block into its
        prefix cache as whole, and others would.
        """
        self.agent.settle()
        for group, blocks in self._blocks(pull).items():
            lacking = self._owner.unfilled(group, blocks.ids)
            if len(lacking):
                placed = self.arena.layout.groups[group].group
                return TransferError(
                    f"group {placed.name!r}: {len(lacking)} of {len(blocks)} blocks of "
                    f"{placed.block_tokens} tokens lack some that {pull.tickets[0].agent!r} no "
                    "longer keeps\n\nhint: --block-size of prefill should be a multiple of "
                    "decode's",
                    kind="refused",
                )
        return None

    def _note(self, transfer: Transfer) -> None:
        stats = transfer.stats
        assert stats is not None
        self._counts["pulled bytes"] += stats.nbytes
        self._counts["descriptors"] += stats.descriptors
        self._counts["pull seconds"] += stats.seconds
        log.info(
            "pulled %d bytes in %d descriptors, %.3f s, fence %s, digest %s",
            stats.nbytes,
            stats.descriptors,
            stats.seconds,
            stats.fence,
            stats.digest,
        )

    def _over(self, loading: OpenPull, error: KvstowError | None) -> None:
        request = loading.pull.request
        del self._loading[request]
        self._received.add(request)
        if error is None:
            self._counts["pull accepted"] += 1
            return
        kind = error.kind if isinstance(error, TransferError) else "refused"
        log.warning("request %s: pull failed (%s): %s", request, kind, error)
        self._counts[f"pull {kind}"] += 1
        self._failed.add(request)
        if self._asker is not None and loading.pull.seconds is not None:
            self._asker.failed(loading.pull.tickets)
        for ticket in loading.pull.tickets:  # the engine computes it: nobody will come again
            self.agent.drop(ticket)

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
