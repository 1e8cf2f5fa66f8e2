"""The worker's side: one agent over the engine's own memory, pulls and leases under way.

A load is reported over only when nothing can write to its blocks any more, and failed when the
fence or anything else did not hold: then the engine must not use a single byte of it.
"""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.protocol import (
    KeyedBlocks,
    KeysPresent,
    LoadBlocks,
    LookUpKeys,
    OfferBlocks,
    PullBlocks,
    StepOrders,
    StepResults,
    StoreBlocks,
    WorkerEndpoint,
)
from kvstow.adapters.vllm.scheduler import held
from kvstow.errors import KvstowError, StoreError, TransferError
from kvstow.memory.arena import Arena
from kvstow.memory.numa import node_of
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.host.processes import SharedTiers
from kvstow.offload.host.tier import HostTier
from kvstow.offload.mover.jobs import MoverJob
from kvstow.offload.mover.mover import Mover
from kvstow.offload.rows import matching_group
from kvstow.offload.tier import Tier
from kvstow.plan.manifest import fingerprint
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks
from kvstow.transfer.agent import Agent
from kvstow.transfer.generations import Generations
from kvstow.transfer.lease import EndReason
from kvstow.transfer.pulling import Transfer
from kvstow.transfer.transport.base import Transport


class LeasedGenerations(Generations):
    """Generations that a lease may set."""

    def set(self, group: int, ids: Ints, generations: Ints) -> None:
        """These blocks are, from now on, of these generations."""
        self.generations[group][ids] = generations


@dataclass(slots=True, eq=False)
class OffloadJob:
    """The jobs of one request, one per group."""

    request: str
    jobs: list[MoverJob] = field(default_factory=list[MoverJob])
    num_tokens: int = 0
    error: StoreError | None = None

    @property
    def over(self) -> bool:
        return all(job.over for job in self.jobs)


class OffloadJobs:
    """A host tier, and below it a disk tier where a path is set."""

    def __init__(self, arena: Arena, settings: ConnectorOptions) -> None:
        layout = arena.layout
        self._disk: DiskTier | None = None
        if settings.disk_path:
            ranks = f"tp{layout.tp[0]}of{layout.tp[1]}-pp{layout.pp[0]}of{layout.pp[1]}"
            self._disk = DiskTier(
                Path(settings.disk_path) / ranks, layout, capacity=settings.disk_bytes
            )
        kept = self._disk.layout if self._disk else layout
        self._host = HostTier(
            kept,
            capacity=settings.host_bytes,
            numa_node=node_of(arena.device),
            shared=settings.host_shared or None,
        )
        self._near = SharedTiers(self._host, self._disk) if settings.host_shared else None
        self._below: Tier | None = self._near or self._disk
        self._groups = [
            matching_group(layout, g, self._host.layout) for g in range(len(layout.groups))
        ]
        self._mover = Mover(arena, self._host, self._below)
        self._stores: list[OffloadJob] = []
        self._restores: list[OffloadJob] = []

    def __len__(self) -> int:
        """Errands under way."""
        return len(self._stores) + len(self._restores)

    def look_up(self, lookup: LookUpKeys) -> KeysPresent:
        """Which rows are in one of the tiers now."""
        present: list[tuple[bool, ...]] = []
        for keys, g in zip(lookup.keys, self._groups, strict=True):
            here = self._host.contains(g, keys)
            if self._below is not None and not here.all():
                here = here | self._below.contains(g, keys)
            present.append(tuple(bool(found) for found in here))
        return KeysPresent(request=lookup.request, present=tuple(present))

    def store(self, order: StoreBlocks) -> None:
        """Begin to keep rows. The blocks must stay as they are until the errand is over."""
        self._stores.append(self._errand(order.request, order.rows, loads=False))

    def restore(self, order: LoadBlocks) -> None:
        """Begin to bring rows back."""
        errand = self._errand(order.request, order.rows, loads=True)
        errand.num_tokens = order.num_tokens
        self._restores.append(errand)

    def _errand(self, request: str, rows: Mapping[int, KeyedBlocks], *, loads: bool) -> OffloadJob:
        errand = OffloadJob(request)
        for group, (keys, ids) in rows.items():
            if not keys:
                continue
            try:
                move = (
                    self._mover.load(group, keys, ids)
                    if loads
                    else self._mover.store(group, ids, keys)
                )
                errand.jobs.append(move)
            except StoreError as error:
                errand.error = error
        return errand

    def stored(self) -> list[OffloadJob]:
        """Stores that are over since the last time."""
        return self._ended(self._stores)

    def restored(self) -> list[OffloadJob]:
        """Restores that are over since the last time; `error` says that not all rows came."""
        ended = self._ended(self._restores)
        for errand in ended:
            failed = next((job.error for job in errand.jobs if job.error is not None), None)
            lost = sum(int((~job.moved).sum()) for job in errand.jobs)
            if errand.error is None and failed is not None:
                errand.error = failed
            elif errand.error is None and lost:
                errand.error = StoreError(f"{lost} rows were gone when they were fetched")
        return ended

    def _ended(self, errands: list[OffloadJob]) -> list[OffloadJob]:
        self._mover.reap()
        ended = [errand for errand in errands if errand.over]
        errands[:] = [errand for errand in errands if not errand.over]
        return ended

    def close(self) -> None:
        """Finish what has begun; what is on disk, or shared, stays there."""
        self._mover.drain(10.0)
        self._mover.close()
        if self._near is not None:
            self._near.close()
        self._host.close()
        if self._disk is not None:
            self._disk.close()


log = logging.getLogger(__name__)

IDLE_SECONDS = 0.002
"""An engine that only waits for us asks again and again: it may as well sleep this long."""

GRACE_SECONDS = 10.0
"""A ticket may be shown before the producer's worker has heard of it: ask again so long."""

RETRY_SECONDS = 0.1


@dataclass(slots=True, eq=False)
class OpenPull:
    """A pull under way. A transfer that has failed may still be written to for a while."""

    pull: PullBlocks
    started: float
    transfer: Transfer | None = None
    again_at: float = 0.0


class WorkerSide:
    """One rank: its arena, its agent, its open business."""

    def __init__(
        self, arena: Arena, settings: ConnectorOptions, *, transport: Transport, name: str
    ) -> None:
        self.arena = arena
        self._settings = settings
        self._owner = LeasedGenerations(arena.layout)
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
        self.card = WorkerEndpoint(
            agent=name,
            start=transport.name,
            address=self.agent.address,
            key=keys.public if keys else "",
            fingerprint=fingerprint(arena.layout),
        )
        self._loading: dict[str, OpenPull] = {}
        self._shelf = OffloadJobs(arena, settings) if settings.offloads else None
        self._staying: Counter[str] = Counter()
        """Per request, leases and stores that still need its blocks."""
        self._sent: set[str] = set()
        self._found: list[KeysPresent] = []
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
        log.info(
            "kvstow: %d bytes at %#x, order %s, %d blocks (%s), agent %s at %s",
            layout.nbytes,
            self.arena.address,
            layout.order,
            layout.num_blocks(0),
            "; ".join(rows),
            self.card.agent,
            self.card.address,
        )

    # ── a step ────────────────────────────────────────────────────────────────────

    def promise(self, step: StepOrders) -> None:
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

    def begin(self, step: StepOrders) -> None:
        """Start to move what the scheduler's side has decided; `promise` comes first."""
        for pull in step.pulls:
            loading = OpenPull(pull, time.monotonic())
            self._loading[pull.request] = loading
            self._try(loading)
        if self._shelf is not None:
            for restore in step.restores:
                self._shelf.restore(restore)
            for store in step.stores:
                self._shelf.store(store)

    def results(self, *, idle: bool) -> StepResults:
        """What has ended since the last call."""
        if idle and not self._found:
            time.sleep(IDLE_SECONDS)
        self.agent.tend()
        for loading in tuple(self._loading.values()):
            self._follow(loading)
        if self._shelf is not None:
            self._settle(self._shelf)
        found = StepResults(
            sent=frozenset(self._sent),
            received=frozenset(self._received),
            failed=frozenset(self._failed),
            found=tuple(self._found),
            counts=dict(self._counts),
        )
        for told in (self._sent, self._received, self._failed, self._found, self._counts):
            told.clear()
        return found

    def _settle(self, shelf: OffloadJobs) -> None:
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

    def _honour(self, offer: OfferBlocks) -> None:
        mine = next((t for t in offer.tickets if t.agent == self.card.agent), None)
        if mine is None:
            raise TransferError(
                f"request {offer.request}: none of {len(offer.tickets)} tickets is "
                f"of agent {self.card.agent!r}",
                kind="ticket",
            )
        for group, blocks in mine.blocks.items():
            self._owner.set(group, blocks.ids, mine.generations[group])
        self._staying[offer.request] += 1

        def ended(reason: EndReason) -> None:
            self._let_go(offer.request)
            self._counts[f"lease {reason}"] += 1

        self.agent.honour(mine, readers=self._settings.consumer_ranks, on_end=ended)

    # ── pulls ─────────────────────────────────────────────────────────────────────

    def _try(self, loading: OpenPull) -> None:
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

    # ── its end ───────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """End leases and pulls, let go of sockets and of the engine's memory."""
        self.agent.close()
        if self._shelf is not None:
            self._shelf.close()
        self.arena.close()
