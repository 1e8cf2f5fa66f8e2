"""The tiers of one rank: rows stored and loaded for its engine, and what is told of them.

On CUDA, copies between arena and host memory are begun by the engine's own thread, which goes on
with them when it polls: no other thread's turn lies between. Disks, and copies between host arenas,
have the mover's threads.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

from kvstow.adapters.vllm.counts import Count
from kvstow.adapters.vllm.protocol import (
    KeyedBlocks,
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
from kvstow.adapters.vllm.worker.part import RankPart, RankState, Task, Tasks
from kvstow.errors import StoreError
from kvstow.memory.allocate import node_of
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
from kvstow.offload.tier import Tier, held_by_any, select
from kvstow.offload.watch import TierChange, TierWatch
from kvstow.threads import guarded_thread

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""How often the disk is asked for rows that this or another process has stored."""

POLL_SECONDS = 0.0002

FINISH_SECONDS = 10.0

STORE_SECONDS = 10.0
"""How long an engine that is stepped by hand waits for its rows to be stored."""


class KeptRows:
    """Where rows are: in host memory, which tells of every change, and on disk, where any process
    may bring rows or take them, and which a thread looks at again and again.

    `touch` may be called in any thread; `changes` belongs to the engine's.
    """

    def __init__(self, groups: Sequence[int]) -> None:
        self._groups = tuple(groups)
        self._touched: deque[tuple[int, Sequence[bytes]]] = deque()
        """What was not told yet: rows of a group of the tiers have come, moved or gone."""
        self._below: tuple[set[bytes], ...] = tuple(set[bytes]() for _ in groups)
        """Per group of the tiers, rows on disk."""
        self._listings: list[RowListing] = []
        self._end = Event()
        self._thread: Thread | None = None

    def touch(self, group: int, keys: Sequence[bytes]) -> None:
        self._touched.append((group, keys))

    def forget(self, group: int, keys: Sequence[bytes]) -> None:
        """Rows that were looked for are not there."""
        self._below[group].difference_update(keys)
        self.touch(group, keys)

    def changes(self, host: HostTier) -> KeyLevels:
        """By the engine's groups, where rows are now of which that was not told yet; told once."""
        touched: dict[int, dict[bytes, None]] = {}
        while self._touched:
            group, keys = self._touched.popleft()
            touched.setdefault(group, {}).update(dict.fromkeys(keys))
        levels: dict[int, tuple[tuple[bytes, ...], bytes]] = {}
        for group, each in touched.items():
            keys, below = tuple(each), self._below[group]
            here = host.contains(group, keys).tolist()
            near = [Level.HOST if h else Level(k in below) for k, h in zip(keys, here, strict=True)]
            levels[self._groups.index(group)] = keys, bytes(near)
        return levels

    def watch(self, disk: DiskTier) -> None:
        """Look for rows on disk, now and every second."""
        self._listings = [RowListing(disk.tree, g) for g in range(len(disk.layout.groups))]
        self._look()
        self._thread = guarded_thread("kvstow-disk-watch", self._work, on_broken=lambda _: None)
        self._thread.start()

    def _look(self) -> None:
        for group, listing in enumerate(self._listings):
            came, gone = listing.look()
            self._below[group].update(came)
            self.forget(group, gone)
            self.touch(group, came)

    def _work(self) -> None:
        while not self._end.wait(LOOK_SECONDS):
            try:
                self._look()
            except OSError as error:
                log.warning("disk tier: not looked at: %s", error)

    def close(self) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()


class WorkerTiers(RankPart):
    """A host tier; below it a disk tier where a path is set, and a remote one where a URL is."""

    def __init__(self, rank: RankState) -> None:
        self._rank, self._counts = rank, rank.counts
        options, layout = rank.options, rank.arena.layout
        self._disk: DiskTier | None = None
        if options.disk_path:
            ranks = f"tp{layout.tp[0]}of{layout.tp[1]}-pp{layout.pp[0]}of{layout.pp[1]}"
            self._disk = DiskTier(
                Path(options.disk_path) / ranks, layout, capacity=options.disk_bytes
            )
        rows = self._disk.layout if self._disk else layout
        self._groups = [matching_group(layout, g, rows) for g in range(len(layout.groups))]
        self._kept = KeptRows(self._groups)
        host_bytes = options.host_bytes
        shared: DiskTier | None = None
        if options.host_shared:
            host_bytes, shared_bytes = split_capacity(host_bytes)
            shared = shared_tier(options.host_shared, rows, capacity=shared_bytes)
        self.host = HostTier(
            rows,
            capacity=host_bytes,
            numa_node=node_of(rank.arena.device),
            on_change=self._kept.touch,
        )
        self._remote = RemoteTier(options.remote, rows) if options.remote else None
        lower: tuple[Tier | None, ...] = (shared, self._disk, self._remote)
        self._lower = [tier for tier in lower if tier is not None]
        self._mover = Mover(rank.arena, self.host, *self._lower, checked=True)
        if self._disk is not None:
            self._kept.watch(self._disk)
        self._events: TierWatch | None = None
        if options.events and layout.tp[0] == layout.pp[0] == 0:
            tiers: list[Tier] = [self.host, *(tier for tier in self._lower if tier is not shared)]
            self._events = TierWatch(tiers)
            self._events.start()
        self._is_here = rank.arena.device.type == "cuda"
        self._tasks = Tasks()
        self._storing: set[int] = set()
        """Jobs of stores that are not over."""
        self._look_ups = ThreadPoolExecutor(1, "kvstow-look-up") if self._remote else None
        self._answers: deque[KeysPresent] = deque()
        self._reasons: Counter[str] = Counter()
        self._results = StepResults()
        """What was not told yet."""

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
            self._tasks.begin(self._load(order))

    def save(self, step: StepOrders) -> None:
        """Begin to keep rows, after what the engine has been given to compute. The blocks must
        stay as they are until the job is over. An engine that is stepped by hand waits for them,
        so that it gets its blocks back."""
        if step.store is not None:
            for group, (keys, _) in step.store.rows.items():
                self._note(self._groups[group], keys)
            self._tasks.begin(self._store(step.store))
        until = time.monotonic() + STORE_SECONDS
        while self._rank.by_hand and self._storing and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
            self._resume()

    def has_news(self) -> bool:
        """Whether a load is over, or a look-up. Copies on CUDA are polled for."""
        self._resume()
        return bool(self._answers or self._results.received)

    def report(self, results: StepResults) -> None:
        """What has come of jobs and look-ups since the last time, and where rows are now."""
        self._resume()
        self._note_reasons()
        results.join(self._results)
        self._results = StepResults()
        results.changes += self._changes()
        for _ in range(len(self._answers)):
            answer = self._answers.popleft()
            results.present[answer.request] = answer
        self.report_kept(results)

    def report_kept(self, results: StepResults) -> None:
        """Where rows are kept, as far as it was not told yet."""
        kept = self._kept.changes(self.host)
        if kept:
            results.kept[self._rank.name] = kept

    def finish(self) -> None:
        """Wait for all that has begun, however long it takes: nothing of it reads or writes the
        arena any more. What goes on from host memory to other tiers is waited for a while."""
        self._mover.drain(FINISH_SECONDS)
        self._resume()
        while len(self._tasks):
            time.sleep(POLL_SECONDS)
            self._resume()

    def close(self) -> None:
        """Finish what has begun; what is on disk, or shared, stays there."""
        if self._look_ups is not None:
            self._look_ups.shutdown(cancel_futures=True)
        self._kept.close()
        if self._events is not None:
            self._events.close()
        self._mover.drain(FINISH_SECONDS)
        self._mover.close()
        for tier in (self.host, *self._lower):
            tier.close()

    def _resume(self) -> None:
        self._mover.reap()
        self._tasks.resume()

    # ── jobs ──────────────────────────────────────────────────────────────────────

    def _store(self, order: StoreBlocks) -> Task:
        def store(group: int, keys: Sequence[bytes], ids: Sequence[int]) -> MoverJob:
            return self._mover.store(group, ids, keys, here=self._is_here)

        self._storing.add(order.job)
        jobs, error = yield from _moved(order.rows, store)
        self._storing.discard(order.job)
        self._counts[Count.STORED_ROWS] += sum(int(job.moved.sum()) for job in jobs)
        if error is not None:
            log.warning("store failed: %s", error)
            self._counts[Count.STORE_FAILURES] += 1
        self._results.stored[order.job] += 1

    def _load(self, order: LoadBlocks) -> Task:
        """A load from its order to its end; it has failed unless all rows have come."""

        def load(group: int, keys: Sequence[bytes], ids: Sequence[int]) -> MoverJob:
            behind = self._rank.after_steps
            here = self._is_here and not behind
            return self._mover.load(group, keys, ids, after_stream=behind, here=here)

        began = time.monotonic()
        jobs, error = yield from _moved(order.rows, load)
        num_lost = sum(int((~job.moved).sum()) for job in jobs)
        num_damaged = sum(job.num_damaged for job in jobs)
        for job in jobs:
            self._kept.forget(self._groups[job.group], select(job.keys, ~job.moved))
        if num_damaged:
            self._counts[Count.DAMAGED_ROWS] += num_damaged
        self._results.received.add(order.request)
        if error is None and not num_lost:
            self._counts[Count.RESTORED_TOKENS] += order.num_tokens
            self._counts.seconds[Count.LOAD_SECONDS].append(time.monotonic() - began)
            return
        why = f"{num_lost - num_damaged} rows were gone, {num_damaged} were damaged"
        log.warning("request %s: restore failed: %s", order.request, error or why)
        self._results.failed.add(order.request)
        self._counts[Count.RESTORE_FAILURES] += 1

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
        self._rank.wake()

    def _present(self, lookup: LookUpKeys) -> KeysPresent:
        present: list[tuple[bool, ...]] = []
        for keys, g in zip(lookup.keys, self._groups, strict=True):
            self._note(g, keys)
            here = held_by_any([self.host, *self._lower], g, keys)
            self._kept.forget(g, select(keys, ~here))
            present.append(tuple(here.tolist()))
        return KeysPresent(request=lookup.request, present=tuple(present))

    def _note(self, group: int, keys: Sequence[bytes]) -> None:
        """Keys of whose rows events may tell."""
        if self._events is not None:
            self._events.note(group, keys)

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


def _moved(
    rows: Mapping[int, KeyedBlocks],
    move: Callable[[int, Sequence[bytes], Sequence[int]], MoverJob],
) -> Generator[None, None, tuple[list[MoverJob], StoreError | None]]:
    """Rows on their way, a job per group, until nothing of them moves any more; and an error."""
    jobs: list[MoverJob] = []
    errors: list[StoreError | None] = []
    for group, (keys, ids) in rows.items():
        try:
            if keys:
                jobs.append(move(group, keys, ids))
        except StoreError as error:
            errors.append(error)
    while not all(job.over for job in jobs):
        yield
    errors += [job.error for job in jobs]
    return jobs, next((error for error in errors if error is not None), None)
