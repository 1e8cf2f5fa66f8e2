"""The tiers of one rank: rows stored and loaded for its engine, and what is told of them.

On CUDA, copies between arena and host memory are begun by the engine's own thread, which goes on
with them when it polls: no other thread's turn lies between. Disks, and copies between host arenas,
have the mover's threads.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Generic, TypeVar

from kvstow.adapters.vllm.counts import Count, EngineCounts
from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.protocol import (
    KeyLevels,
    KeysPresent,
    LoadBlocks,
    LookUpKeys,
    StepOrders,
    StepResults,
    StoreBlocks,
)
from kvstow.adapters.vllm.scheduler.key_index import Level
from kvstow.adapters.vllm.worker.hints import RowHints
from kvstow.adapters.vllm.worker.part import RankPart
from kvstow.errors import StoreError
from kvstow.memory.allocate import node_of
from kvstow.memory.arena import Arena
from kvstow.observe import Telemetry
from kvstow.offload.copies.jobs import MoverJob
from kvstow.offload.copies.mover import Mover
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.disk.tree import RowListing
from kvstow.offload.host.shared import shared_tier, split_capacity
from kvstow.offload.host.tier import HostTier
from kvstow.offload.metrics import TierMetrics
from kvstow.offload.remote.tier import RemoteTier
from kvstow.offload.rows import matching_group
from kvstow.offload.tier import Tier, TierChain, held_by_any, select
from kvstow.offload.watch import TierChange, TierWatch
from kvstow.threads import guarded_thread

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""How often the disk is asked for rows that this or another process has stored."""

POLL_SECONDS = 0.0002

FINISH_SECONDS = 10.0

STORE_SECONDS = 10.0
"""How long an engine that is stepped by hand waits for its rows to be stored."""


Order = TypeVar("Order", StoreBlocks, LoadBlocks)


@dataclass(slots=True, eq=False)
class TierJob(Generic[Order]):
    """Rows on their way to or from the tiers: a part per group."""

    order: Order
    parts: list[MoverJob] = field(default_factory=list[MoverJob])
    error: StoreError | None = None
    begun: float = field(default_factory=time.monotonic)

    @property
    def is_over(self) -> bool:
        return all(part.over for part in self.parts)

    @property
    def num_damaged(self) -> int:
        return sum(part.num_damaged for part in self.parts)

    @property
    def num_moved(self) -> int:
        return sum(int(part.moved.sum()) for part in self.parts)

    @property
    def num_lost(self) -> int:
        return sum(len(part.keys) for part in self.parts) - self.num_moved

    @property
    def fault(self) -> StoreError | None:
        """What went wrong in some part."""
        return next((each for each in (self.error, *(p.error for p in self.parts)) if each), None)


class KeptKeys:
    """Where rows are kept, and what of that was not told yet.

    `touch` may be called in any thread; everything else belongs to the engine's.
    """

    def __init__(self, groups: Sequence[int], host: HostTier | None = None) -> None:
        self.host = host
        self._group = {there: here for here, there in enumerate(groups)}
        self._there = tuple(groups)
        self._touched: deque[tuple[int, Sequence[bytes]]] = deque()
        self.below: tuple[set[bytes], ...] = tuple(set[bytes]() for _ in groups)
        """Per group of the tiers, rows on disk, as far as they were looked up."""

    def touch(self, group: int, keys: Sequence[bytes]) -> None:
        """Rows of a group of the tiers have come, moved or gone."""
        self._touched.append((group, keys))

    def changes(self) -> KeyLevels:
        """What was not told yet; told once."""
        touched: dict[int, dict[bytes, None]] = {}
        while self._touched:
            group, keys = self._touched.popleft()
            touched.setdefault(group, {}).update(dict.fromkeys(keys))
        return {
            self._group[group]: (tuple(keys), self._levels(group, list(keys)))
            for group, keys in touched.items()
        }

    def _levels(self, group: int, keys: Sequence[bytes]) -> bytes:
        assert self.host is not None
        near, below = self.host.contains(group, keys).tolist(), self.below[group]
        return bytes(
            Level.HOST if here else Level(key in below)
            for key, here in zip(keys, near, strict=True)
        )


class DiskWatch:
    """Looks for rows that any process has brought to the disk tier, or that are gone from it, in a
    thread of its own."""

    def __init__(self, disk: DiskTier, kept: KeptKeys) -> None:
        self._kept = kept
        self._listings = [RowListing(disk.tree, g) for g in range(len(disk.layout.groups))]
        self._end = Event()
        self.look()
        self._thread = guarded_thread("kvstow-disk-watch", self._work, on_broken=lambda _: None)
        self._thread.start()

    def look(self) -> None:
        """Enter rows that have come, and forget those that have gone."""
        for group, listing in enumerate(self._listings):
            came, gone = listing.look()
            self._kept.below[group].update(came)
            self._kept.below[group].difference_update(gone)
            self._kept.touch(group, [*came, *gone])

    def _work(self) -> None:
        while not self._end.wait(LOOK_SECONDS):
            try:
                self.look()
            except OSError as error:
                log.warning("disk tier: not looked at: %s", error)

    def close(self) -> None:
        self._end.set()
        self._thread.join()


class WorkerTiers(RankPart):
    """A host tier; below it a disk tier where a path is set, and a remote one where a URL is.

    `counts` is told what comes and goes. With `after_steps` rows come back behind what the engine
    has been given to compute: one of those steps may still write to the blocks. `by_hand`: any
    step may be the last one for long, so each waits until its rows are stored, and their blocks
    are free.
    """

    def __init__(
        self,
        arena: Arena,
        options: ConnectorOptions,
        counts: EngineCounts,
        *,
        name: str = "",
        wake: Callable[[], None] = lambda: None,
        after_steps: bool = False,
        by_hand: bool = False,
    ) -> None:
        layout = arena.layout
        self._name, self._counts, self._wake = name, counts, wake
        self._disk: DiskTier | None = None
        if options.disk_path:
            ranks = f"tp{layout.tp[0]}of{layout.tp[1]}-pp{layout.pp[0]}of{layout.pp[1]}"
            self._disk = DiskTier(
                Path(options.disk_path) / ranks, layout, capacity=options.disk_bytes
            )
        rows = self._disk.layout if self._disk else layout
        self._groups = [matching_group(layout, g, rows) for g in range(len(layout.groups))]
        self._kept = KeptKeys(self._groups)
        host_bytes = options.host_bytes
        self._shared: DiskTier | None = None
        if options.host_shared:
            host_bytes, shared_bytes = split_capacity(host_bytes)
            self._shared = shared_tier(options.host_shared, rows, capacity=shared_bytes)
        self.host = HostTier(
            rows,
            capacity=host_bytes,
            numa_node=node_of(arena.device),
            on_change=self._kept.touch,
        )
        self._kept.host = self.host
        self._remote = RemoteTier(options.remote, rows) if options.remote else None
        lower: tuple[Tier | None, ...] = (self._shared, self._disk, self._remote)
        self._lower = [tier for tier in lower if tier is not None]
        below = TierChain(self._lower) if self._lower else None
        self._mover = Mover(arena, self.host, below, checked=True)
        self._watch = DiskWatch(self._disk, self._kept) if self._disk else None
        self._events: TierWatch | None = None
        if options.events and layout.tp[0] == layout.pp[0] == 0:
            tiers: dict[str, Tier] = {"host": self.host}
            tiers |= {"disk": self._disk} if self._disk else {}
            tiers |= {"remote": self._remote} if self._remote else {}
            self._events = TierWatch(tiers)
            self._events.start()
        self._is_here = arena.device.type == "cuda"
        self._after_steps = after_steps
        self._by_hand = by_hand
        self._stores: list[TierJob[StoreBlocks]] = []
        self._loads: list[TierJob[LoadBlocks]] = []
        self._look_ups = ThreadPoolExecutor(1, "kvstow-look-up") if self._remote else None
        self._answers: deque[KeysPresent] = deque()
        self._reasons: Counter[str] = Counter()

    @property
    def hints(self) -> RowHints:
        """What requests ask for their rows. A step waits for no remote store."""
        return RowHints(self.host, self._groups, [t for t in self._lower if t is not self._remote])

    def watch(self, telemetry: Telemetry) -> None:
        """Show the numbers of all tiers in a telemetry."""
        TierMetrics(telemetry.registry, [self.host, *self._lower])

    # ── what the rank does in a step ──────────────────────────────────────────────

    def load(self, step: StepOrders) -> None:
        """Begin to bring rows back, beside what the engine computes; find out which rows are in
        one of the tiers. A remote store is asked in another thread: no step waits for it."""
        for lookup in step.lookups:
            if self._look_ups is None:
                self._look_up(lookup)
            else:
                self._look_ups.submit(self._look_up, lookup)
        for order in step.loads:
            self._loads.append(self._begin(order, self._load))

    def save(self, step: StepOrders) -> None:
        """Begin to keep rows, after what the engine has been given to compute. The blocks must
        stay as they are until the job is over."""
        if step.store is not None:
            for group, (keys, _) in step.store.rows.items():
                self._note(self._groups[group], keys)
            self._stores.append(self._begin(step.store, self._store))
        if self._by_hand:
            self._await_stores()

    def has_news(self) -> bool:
        """Whether a load is over, or a look-up. Copies on CUDA are polled for."""
        self._poll()
        return bool(self._answers) or any(job.is_over for job in self._loads)

    def report(self, results: StepResults) -> None:
        """What has come of jobs and look-ups since the last time, and where rows are now."""
        self._poll()
        stored, self._stores = _parted(self._stores)
        for job in stored:
            self._note_store(job)
        loaded, self._loads = _parted(self._loads)
        lost = {job.order.request for job in loaded if not self._is_restored(job)}
        self._note_reasons()
        results.received |= {job.order.request for job in loaded}
        results.failed |= lost
        results.stored.update(job.order.job for job in stored)
        results.changes += self._changes()
        for _ in range(len(self._answers)):
            answer = self._answers.popleft()
            results.present[answer.request] = answer
        self.report_kept(results)

    def report_kept(self, results: StepResults) -> None:
        """Where rows are kept, as far as it was not told yet."""
        kept = self._kept.changes()
        if kept:
            results.kept[self._name] = kept

    def finish(self) -> None:
        """Wait for all that has begun: nothing of it reads or writes the arena any more."""
        self._mover.drain(FINISH_SECONDS)
        self._poll()

    def close(self) -> None:
        """Finish what has begun; what is on disk, or shared, stays there."""
        if self._look_ups is not None:
            self._look_ups.shutdown(cancel_futures=True)
        for watch in (self._watch, self._events):
            if watch is not None:
                watch.close()
        self.finish()
        self._mover.close()
        for tier in (self.host, self._shared, self._disk, self._remote):
            if tier is not None:
                tier.close()

    # ── jobs ──────────────────────────────────────────────────────────────────────

    def _begin(
        self,
        order: Order,
        move: Callable[[int, Sequence[bytes], Sequence[int]], MoverJob],
    ) -> TierJob[Order]:
        job = TierJob(order)
        for group, (keys, ids) in order.rows.items():
            try:
                if keys:
                    job.parts.append(move(group, keys, ids))
            except StoreError as error:
                job.error = error
        return job

    def _store(self, group: int, keys: Sequence[bytes], ids: Sequence[int]) -> MoverJob:
        return self._mover.store(group, ids, keys, here=self._is_here)

    def _load(self, group: int, keys: Sequence[bytes], ids: Sequence[int]) -> MoverJob:
        behind = self._after_steps
        here = self._is_here and not behind
        return self._mover.load(group, keys, ids, after_stream=behind, here=here)

    def _note_store(self, job: TierJob[StoreBlocks]) -> None:
        self._counts[Count.STORED_ROWS] += job.num_moved
        if job.fault is not None:
            log.warning("store failed: %s", job.fault)
            self._counts[Count.STORE_FAILURES] += 1

    def _is_restored(self, job: TierJob[LoadBlocks]) -> bool:
        """Whether all rows of a load have come."""
        for part in job.parts:
            self._forget(self._groups[part.group], select(part.keys, ~part.moved))
        if job.num_damaged:
            self._counts[Count.DAMAGED_ROWS] += job.num_damaged
        if job.fault is None and not job.num_lost:
            self._counts[Count.RESTORED_TOKENS] += job.order.num_tokens
            self._counts.seconds[Count.LOAD_SECONDS].append(time.monotonic() - job.begun)
            return True
        log.warning(
            "request %s: restore failed: %s",
            job.order.request,
            job.fault
            or f"{job.num_lost - job.num_damaged} rows were gone when they were fetched, "
            f"{job.num_damaged} were damaged",
        )
        self._counts[Count.RESTORE_FAILURES] += 1
        return False

    def _await_stores(self) -> None:
        until = time.monotonic() + STORE_SECONDS
        while not all(job.is_over for job in self._stores) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
            self._poll()

    def _poll(self) -> None:
        self._mover.reap()

    # ── what is where ─────────────────────────────────────────────────────────────

    def _look_up(self, lookup: LookUpKeys) -> None:
        """A look-up that fails finds nothing, but it has an answer: a request waits for it."""
        nothing = tuple((False,) * len(keys) for keys in lookup.keys)
        answer = KeysPresent(request=lookup.request, present=nothing)
        try:
            answer = self._present(lookup)
        except Exception as error:
            log.warning("request %s: not looked up: %s", lookup.request, error)
        self._answers.append(answer)
        self._wake()

    def _present(self, lookup: LookUpKeys) -> KeysPresent:
        present: list[tuple[bool, ...]] = []
        for keys, g in zip(lookup.keys, self._groups, strict=True):
            self._note(g, keys)
            here = self.host.contains(g, keys)
            if self._lower and not here.all():
                here[~here] = held_by_any(self._lower, g, select(keys, ~here))
                self._forget(g, select(keys, ~here))
            present.append(tuple(here.tolist()))
        return KeysPresent(request=lookup.request, present=tuple(present))

    def _note(self, group: int, keys: Sequence[bytes]) -> None:
        """Keys of whose rows events may tell."""
        if self._events is not None:
            self._events.note(group, keys)

    def _forget(self, group: int, keys: Sequence[bytes]) -> None:
        """Rows that were looked for and are not there."""
        self._kept.below[group].difference_update(keys)
        self._kept.touch(group, keys)

    def _note_reasons(self) -> None:
        """Count rows that went no further than host memory, rows that the remote store took, and
        those that it did not give or take, by reason."""
        before, self._reasons = self._reasons, Counter()
        self._reasons[Count.DROPPED_ROWS] = self._mover.dropped_rows
        if self._remote is not None:
            for what, by in self._remote.reasons.items():
                self._reasons |= {f"remote_{what} {why}": int(n) for why, n in by.items()}
            self._reasons[Count.REMOTE_STORED_ROWS] = self._remote.counts.stored_rows
        for what, count in (self._reasons - before).items():
            self._counts[what] += count

    def _changes(self) -> tuple[TierChange, ...]:
        """Rows that came to a tier or went since the last time, by the engine's groups, for
        events."""
        if self._events is None:
            return ()
        return tuple(
            replace(change, group=self._groups.index(change.group))
            for change in self._events.take()
        )


def _parted(
    jobs: Sequence[TierJob[Order]],
) -> tuple[list[TierJob[Order]], list[TierJob[Order]]]:
    """Jobs that are over, and the others; each is asked once, for it may end meanwhile."""
    over = [job.is_over for job in jobs]
    ended = [job for job, is_over in zip(jobs, over, strict=True) if is_over]
    return ended, [job for job, is_over in zip(jobs, over, strict=True) if not is_over]
