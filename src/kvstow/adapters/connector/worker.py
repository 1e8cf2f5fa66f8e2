"""The worker's side: one agent over the engine's own memory, pulls and leases under way.

A load is reported over only when nothing can write to its blocks any more, and failed when the
fence or anything else did not hold: then the engine must not use a single byte of it.
"""

import logging
import time
from collections import Counter, defaultdict
from dataclasses import dataclass

from kvstow.adapters.connector.counters import Counters
from kvstow.adapters.connector.messages import Card, Found, Offer, Pull, Results, Step
from kvstow.adapters.connector.scheduler import held
from kvstow.adapters.connector.settings import Settings
from kvstow.adapters.connector.shelf import Shelf
from kvstow.errors import KvstowError, TransferError
from kvstow.memory.arena import Arena
from kvstow.plan.manifest import fingerprint
from kvstow.route.blocks import Blocks
from kvstow.transfer.agent import Agent
from kvstow.transfer.lease import EndReason
from kvstow.transfer.pulling import Transfer
from kvstow.transfer.transport.base import Transport

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.002
"""An engine that only waits for us asks again and again: it may as well sleep this long."""

GRACE_SECONDS = 10.0
"""A ticket may be shown before the producer's worker has heard of it: ask again so long."""

RETRY_SECONDS = 0.1


@dataclass(slots=True, eq=False)
class Loading:
    """A pull under way. A transfer that has failed may still be written to for a while."""

    pull: Pull
    started: float
    transfer: Transfer | None = None
    again_at: float = 0.0


class WorkerSide:
    """One rank: its arena, its agent, its open business."""

    def __init__(
        self, arena: Arena, settings: Settings, *, transport: Transport, name: str
    ) -> None:
        self.arena = arena
        self._settings = settings
        self._owner = Counters(arena.layout)
        self.agent = Agent(
            arena,
            self._owner,
            transport=transport,
            name=name,
            listen=settings.listen,
            keys=settings.keys(),
            options=settings.agent,
        )
        keys = settings.keys()
        self.card = Card(
            agent=name,
            start=transport.name,
            address=self.agent.address,
            key=keys.public if keys else "",
            fingerprint=fingerprint(arena.layout),
        )
        self._loading: dict[str, Loading] = {}
        self._shelf = Shelf(arena, settings) if settings.offloads else None
        self._staying: Counter[str] = Counter()
        """Per request, leases and stores that still need its blocks."""
        self._sent: set[str] = set()
        self._found: list[Found] = []
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._counts: defaultdict[str, float] = defaultdict(float)
        self.agent.start()
        self._introduce()

    def _introduce(self) -> None:
        layout = self.arena.layout
        rows = [
            f"{rows.group.name}: {layout.row_bytes(g)} bytes in {len(layout.runs(g, 0))} runs"
            for g, rows in enumerate(layout.groups)
        ]
        log.info("kvstow: %d bytes at %#x, order %s, %d blocks (%s), agent %s at %s",
                 layout.nbytes, self.arena.address, layout.order, layout.num_blocks(0),
                 "; ".join(rows), self.card.agent, self.card.address)  # fmt: skip

    # ── a step ────────────────────────────────────────────────────────────────────

    def promise(self, step: Step) -> None:
        """What needs no memory, at once, before the engine computes: somebody may show a
        ticket already that the scheduler's side has just given out."""
        for store in step.stores:
            self._staying[store.request] += 1
        for offer in step.offers:
            self._honour(offer)
        for ticket in step.keeps:
            self.agent.keep(ticket)
        for ticket in step.drops:
            self.agent.drop(ticket)
        if self._shelf is not None:
            self._found += [self._shelf.look_up(lookup) for lookup in step.lookups]

    def begin(self, step: Step) -> None:
        """Start to move what the scheduler's side has decided; `promise` comes first."""
        for pull in step.pulls:
            loading = Loading(pull, time.monotonic())
            self._loading[pull.request] = loading
            self._try(loading)
        if self._shelf is not None:
            for restore in step.restores:
                self._shelf.restore(restore)
            for store in step.stores:
                self._shelf.store(store)

    def results(self, *, idle: bool) -> Results:
        """What has ended since the last call."""
        if idle and not self._found:
            time.sleep(IDLE_SECONDS)
        self.agent.tend()
        for loading in tuple(self._loading.values()):
            self._follow(loading)
        if self._shelf is not None:
            self._settle(self._shelf)
        found = Results(
            sent=frozenset(self._sent),
            received=frozenset(self._received),
            failed=frozenset(self._failed),
            found=tuple(self._found),
            counts=dict(self._counts),
        )
        for told in (self._sent, self._received, self._failed, self._found, self._counts):
            told.clear()
        return found

    def _settle(self, shelf: Shelf) -> None:
        for errand in shelf.stored():
            rows = sum(int(job.moved.sum()) for job in errand.jobs)
            self._counts["stored rows"] += rows
            self._counts["store failed"] += int(errand.error is not None)
            self._let_go(errand.request)
        for errand in shelf.restored():
            self._received.add(errand.request)
            if errand.error is None:
                self._counts["restored tokens"] += errand.num_tokens
            else:
                log.warning("request %s: restore failed: %s", errand.request, errand.error)
                self._counts["restore failed"] += 1
                self._failed.add(errand.request)

    def _let_go(self, request: str) -> None:
        """One lease or store less; the last one frees the request's blocks."""
        self._staying[request] -= 1
        if self._staying[request] == 0:
            del self._staying[request]
            self._sent.add(request)

    # ── leases ────────────────────────────────────────────────────────────────────

    def _honour(self, offer: Offer) -> None:
        mine = next((t for t in offer.tickets if t.agent == self.card.agent), None)
        if mine is None:
            raise TransferError(f"request {offer.request}: none of {len(offer.tickets)} tickets is "
                                f"of agent {self.card.agent!r}", kind="ticket")  # fmt: skip
        for group, blocks in mine.blocks.items():
            self._owner.set(group, blocks.ids, mine.generations[group])
        self._staying[offer.request] += 1

        def ended(reason: EndReason) -> None:
            self._let_go(offer.request)
            self._counts[f"lease {reason}"] += 1

        self.agent.honour(mine, readers=self._settings.consumer_ranks, on_end=ended)

    # ── pulls ─────────────────────────────────────────────────────────────────────

    def _try(self, loading: Loading) -> None:
        pull = loading.pull
        try:
            loading.transfer = self.agent.pull(
                pull.tickets,
                into=self._blocks(pull),
                start_token=pull.start_token,
                num_tokens=pull.num_tokens,
            )
        except KvstowError as error:
            self._over(loading, error)

    def _blocks(self, pull: Pull) -> dict[int, Blocks]:
        groups = self.arena.layout.groups
        return {
            g: held(ids, pull.start_token, pull.num_tokens, groups[g].group.block_tokens)
            for g, ids in enumerate(pull.ids)
        }

    def _follow(self, loading: Loading) -> None:
        now = time.monotonic()
        transfer = loading.transfer
        if transfer is None:
            if now >= loading.again_at:
                self._try(loading)
            return
        if not transfer.done or not transfer.wait_quiet(0):
            return
        if transfer.error is None:
            self._counts["pulled tokens"] += loading.pull.num_tokens - loading.pull.start_token
            self._note(transfer)
            self._over(loading, None)
        elif transfer.error.kind == "ticket" and now - loading.started < GRACE_SECONDS:
            loading.transfer, loading.again_at = None, now + RETRY_SECONDS
        else:
            self._over(loading, transfer.error)

    def _note(self, transfer: Transfer) -> None:
        stats = transfer.stats
        assert stats is not None
        self._counts["pulled bytes"] += stats.nbytes
        self._counts["descriptors"] += stats.descriptors
        self._counts["pull seconds"] += stats.seconds
        log.info("pulled %d bytes in %d descriptors, %.3f s, fence %s, digest %s",
                 stats.nbytes, stats.descriptors, stats.seconds, stats.fence,
                 stats.digest)  # fmt: skip

    def _over(self, loading: Loading, error: KvstowError | None) -> None:
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

    # ── its end ───────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """End leases and pulls, let go of sockets and of the engine's memory."""
        self.agent.close()
        if self._shelf is not None:
            self._shelf.close()
        self.arena.close()
