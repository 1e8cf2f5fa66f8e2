"""The tiers of one rank: rows stored and loaded for its engine, and what is told of them.

On CUDA, rows between arena and host memory are submitted by the engine's own thread and polled:
neither a queue nor another thread's turn lies between. Disks, and copies between host arenas, have
the mover's threads.
"""

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Thread
from typing import TypeVar

import numpy as np

from kvstow.adapters.prefill import PrefillMeter
from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.protocol import (
    KeyedBlocks,
    KeyLevels,
    KeysPresent,
    LoadBlocks,
    LookUpKeys,
    StoreBlocks,
)
from kvstow.adapters.vllm.scheduler.stored import Level
from kvstow.errors import StoreError
from kvstow.memory.arena import Arena
from kvstow.memory.numa import node_of
from kvstow.observe import Telemetry
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.heartbeat import Heartbeat, watch_tiers
from kvstow.offload.host.processes import SharedTiers
from kvstow.offload.host.tier import HostTier
from kvstow.offload.mover.jobs import MoverJob
from kvstow.offload.mover.mover import Mover
from kvstow.offload.remote.tier import RemoteTier, loadable
from kvstow.offload.rows import matching_group
from kvstow.offload.tier import Tier, TierChain, chosen, log
from kvstow.offload.watch import TierChange, TierWatch

LOOK_SECONDS = 1.0
"""How often the disk is asked for rows that this or another process has stored."""

POLL_SECONDS = 0.0002


@dataclass(slots=True, eq=False)
class OffloadJob:
    """Rows on their way to or from the tiers: a part per group."""

    parts: list[MoverJob] = field(default_factory=list[MoverJob])
    error: StoreError | None = None

    @property
    def over(self) -> bool:
        return all(part.over for part in self.parts)

    @property
    def num_damaged(self) -> int:
        return sum(part.num_damaged for part in self.parts)

    @property
    def num_moved(self) -> int:
        return sum(int(part.moved.sum()) for part in self.parts)

    def end(self) -> None:
        """Note what went wrong in some part."""
        for part in self.parts:
            self.error = self.error or part.error


@dataclass(slots=True, eq=False)
class StoreJob(OffloadJob):
    number: int = 0


@dataclass(slots=True, eq=False)
class LoadJob(OffloadJob):
    """Complete when all rows have come."""

    order: LoadBlocks | None = None

    def end(self) -> None:
        super(LoadJob, self).end()
        lost = sum(len(part.keys) for part in self.parts) - self.num_moved
        if self.error is None and lost:
            damaged = self.num_damaged
            self.error = StoreError(
                f"{lost - damaged} rows were gone when they were fetched, {damaged} were damaged"
            )


AnyJob = TypeVar("AnyJob", bound=OffloadJob)


class KeptKeys:
    """Where rows are kept, and what of that was not told yet.

    `touch` may be called in any thread; everything else belongs to the engine's.
    """

    def __init__(self, groups: Sequence[int], host: HostTier | None = None) -> None:
        self.host = host
        self._group = {there: here for here, there in enumerate(groups)}
        self._there = tuple(groups)
        self._touched: deque[tuple[int, Sequence[bytes]]] = deque()
        self._told: tuple[dict[bytes, int], ...] = tuple({} for _ in groups)
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
            self._group[group]: changed
            for group, keys in touched.items()
            if (changed := self._changed(group, list(keys)))[0]
        }

    def _changed(self, group: int, keys: Sequence[bytes]) -> tuple[tuple[bytes, ...], bytes]:
        assert self.host is not None
        near, told = self.host.contains(group, keys), self._told[self._group[group]]
        news: dict[bytes, int] = {}
        for key, here in zip(keys, near.tolist(), strict=True):
            level = Level.HOST if here else Level(key in self.below[group])
            if level != told.get(key, Level.GONE):
                news[key] = level
        told.update(news)
        for key in [key for key, level in news.items() if level == Level.GONE]:
            del told[key]
        return tuple(news), bytes(news.values())


class DiskWatch:
    """Looks for rows that any process has brought to the disk tier, in a thread of its own."""

    def __init__(self, disk: DiskTier, kept: KeptKeys) -> None:
        self._disk, self._kept = disk, kept
        self._seen = [0] * len(disk.layout.groups)
        self._end = Event()
        self.look()
        self._thread = Thread(target=self._work, name="kvstow-disk-watch", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Enter rows that are new, and find out which are gone where many are."""
        known = 0
        for group, below in enumerate(self._kept.below):
            while True:
                keys, self._seen[group] = self._disk.keys_since(group, self._seen[group])
                if not keys:
                    break
                below.update(keys)
                self._kept.touch(group, keys)
            known += len(below)
        if known > 1024 + 1.25 * self._disk.usage.rows:
            self._forget_the_gone()

    def _forget_the_gone(self) -> None:
        for group, below in enumerate(self._kept.below):
            gone = below.difference(self._disk.keys(group))
            below.difference_update(gone)
            self._kept.touch(group, tuple(gone))

    def _work(self) -> None:
        while not self._end.wait(LOOK_SECONDS):
            try:
                self.look()
            except StoreError as error:
                log.warning("disk tier: not looked at: %s", error)

    def close(self) -> None:
        self._end.set()
        self._thread.join()


class WorkerTiers:
    """A host tier; below it a disk tier where a path is set, and a remote one where a URL is."""

    def __init__(
        self, arena: Arena, options: ConnectorOptions, *, after_steps: bool = False
    ) -> None:
        """With `after_steps` rows come back behind what the engine has been given to compute:
        one of those steps may still write to the blocks."""
        layout = arena.layout
        self._disk: DiskTier | None = None
        if options.disk_path:
            ranks = f"tp{layout.tp[0]}of{layout.tp[1]}-pp{layout.pp[0]}of{layout.pp[1]}"
            self._disk = DiskTier(
                Path(options.disk_path) / ranks, layout, capacity=options.disk_bytes
            )
        rows = self._disk.layout if self._disk else layout
        self._groups = [matching_group(layout, g, rows) for g in range(len(layout.groups))]
        self._kept = KeptKeys(self._groups)
        self._host = HostTier(
            rows,
            capacity=options.host_bytes,
            numa_node=node_of(arena.device),
            shared=options.host_shared or None,
            on_change=self._kept.touch,
        )
        self._kept.host = self._host
        self._near = SharedTiers(self._host, self._disk) if options.host_shared else None
        self._remote = RemoteTier(options.remote, rows) if options.remote else None
        self._heartbeat = (
            Heartbeat(self._disk, (self._host, self._remote)) if self._disk is not None else None
        )
        lower: tuple[Tier | None, ...] = (self._near or self._disk, self._remote)
        self._lower = [tier for tier in lower if tier is not None]
        below = TierChain(self._lower) if self._lower else None
        self.prefill: PrefillMeter | None = None
        if self._remote is not None:
            self.prefill = PrefillMeter(self._remote.prefill_rate.note, arena.device)
        self._mover = Mover(arena, self._host, below, checked=True)
        self._watch = DiskWatch(self._disk, self._kept) if self._disk else None
        self._events: TierWatch | None = None
        if options.events and layout.tp[0] == layout.pp[0] == 0:
            tiers: dict[str, Tier] = {"host": self._host}
            tiers |= {"disk": self._disk} if self._disk else {}
            tiers |= {"remote": self._remote} if self._remote else {}
            self._events = TierWatch(tiers)
            self._events.start()
        self._direct = arena.device.type == "cuda"
        self._after_steps = after_steps
        self._stores: list[StoreJob] = []
        self._loads: list[LoadJob] = []
        self._asker = ThreadPoolExecutor(1, "kvstow-look-up") if self._remote else None
        self._answers: deque[KeysPresent] = deque()
        self._reasons: Counter[str] = Counter()

    def look_up(self, lookup: LookUpKeys) -> None:
        """Find out which rows are in one of the tiers now, for `answers`. A remote store is asked
        in another thread: no step waits for it."""
        if self._asker is None:
            self._ask(lookup)
        else:
            self._asker.submit(self._ask, lookup)

    def _ask(self, lookup: LookUpKeys) -> None:
        """A look-up that fails finds nothing, but it has an answer: a request waits for it."""
        nothing = tuple((False,) * len(keys) for keys in lookup.keys)
        answer = KeysPresent(request=lookup.request, present=nothing)
        try:
            answer = self._found(lookup)
        except Exception as error:
            log.warning("request %s: not looked up: %s", lookup.request, error)
        self._answers.append(answer)

    @property
    def host(self) -> HostTier:
        """The rows in host memory."""
        return self._host

    def watch(self, telemetry: Telemetry) -> None:
        """Show the numbers of all tiers in a telemetry."""
        watch_tiers(telemetry, (self._host, self._disk, self._remote))

    @property
    def has_answers(self) -> bool:
        return bool(self._answers)

    def answers(self) -> list[KeysPresent]:
        """Look-ups that are over since the last time."""
        return [self._answers.popleft() for _ in range(len(self._answers))]

    def _found(self, lookup: LookUpKeys) -> KeysPresent:
        present: list[tuple[bool, ...]] = []
        for keys, g in zip(lookup.keys, self._groups, strict=True):
            self._note(g, keys)
            here = self._host.contains(g, keys)
            if self._lower and not here.all():
                here[~here] = loadable(self._lower, g, chosen(keys, ~here))
                self._gone(g, chosen(keys, ~here))
            present.append(tuple(bool(found) for found in here))
        return KeysPresent(request=lookup.request, present=tuple(present))

    def _note(self, group: int, keys: Sequence[bytes]) -> None:
        """Keys of whose rows events may tell."""
        if self._events is not None:
            self._events.note(group, keys)

    def _gone(self, group: int, keys: Sequence[bytes]) -> None:
        """Rows that were looked for and not found."""
        self._kept.below[group].difference_update(keys)
        self._kept.touch(group, keys)

    def reasons(self) -> Counter[str]:
        """Rows that went no further than host memory since the last time, rows that the remote
        store took, and those that it did not give or take, by reason."""
        before, self._reasons = self._reasons, Counter({"dropped rows": self._mover.dropped_rows})
        if self._remote is not None:
            for what, by in self._remote.reasons.items():
                self._reasons |= {f"remote {what}: {why}": int(n) for why, n in by.items()}
            self._reasons["remote stored rows"] = self._remote.counts.stored_rows
        return self._reasons - before

    def kept(self) -> KeyLevels:
        """Where rows are kept now, as far as it was not told yet."""
        return self._kept.changes()

    def changes(self) -> tuple[TierChange, ...]:
        """Rows that came to a tier or went since the last time, by the engine's groups, for
        events."""
        if self._events is None:
            return ()
        return tuple(
            replace(change, group=self._groups.index(change.group))
            for change in self._events.take()
        )

    # ── jobs ──────────────────────────────────────────────────────────────────────

    def store(self, order: StoreBlocks) -> None:
        """Begin to keep rows, after what the engine has been given to compute. The blocks must
        stay as they are until the job is over."""
        job = StoreJob(number=order.job)
        for group, (keys, ids) in _filled(order.rows):
            self._note(self._groups[group], keys)
            try:
                if self._direct:
                    job.parts.append(self._mover.direct.store(group, np.array(ids), keys))
                else:
                    job.parts.append(self._mover.store(group, ids, keys))
            except StoreError as error:
                job.error = error
        self._stores.append(job)

    def load(self, order: LoadBlocks) -> None:
        """Begin to bring rows back, beside what the engine computes."""
        job = LoadJob(order=order)
        for group, (keys, ids) in _filled(order.rows):
            try:
                job.parts.append(self._load(group, keys, np.array(ids)))
            except StoreError as error:
                job.error = error
        self._loads.append(job)

    def _load(self, group: int, keys: Sequence[bytes], ids: np.ndarray) -> MoverJob:
        is_near = self._host.contains(self._groups[group], keys).all()
        if self._direct and not self._after_steps and is_near:
            return self._mover.direct.load(group, keys, ids)
        return self._mover.load(group, keys, ids, after_stream=self._after_steps)

    def stored(self) -> list[StoreJob]:
        """Stores that are over since the last time."""
        self._poll()
        ended, self._stores = _parted(self._stores)
        for job in ended:
            job.end()
        return ended

    def loaded(self) -> list[LoadJob]:
        """Loads that are over since the last time."""
        self._poll()
        ended, self._loads = _parted(self._loads)
        for job in ended:
            job.end()
            for part in job.parts:
                self._gone(self._groups[part.group], chosen(part.keys, ~part.moved))
        return ended

    @property
    def is_loading(self) -> bool:
        return bool(self._loads)

    def await_load(self, seconds: float, news: Event) -> None:
        """Return when some load is over, when there is other news, or after so many seconds."""
        until = time.monotonic() + seconds
        while not any(job.over for job in self._loads):
            if time.monotonic() > until or news.wait(POLL_SECONDS):
                return
            self._poll()

    def _poll(self) -> None:
        self._mover.direct.poll()
        self._mover.reap()

    def close(self) -> None:
        """Finish what has begun; what is on disk, or shared, stays there."""
        for thread in (self._watch, self._heartbeat):
            if thread is not None:
                thread.close()
        if self._events is not None:
            self._events.close()
        self._mover.direct.wait()
        self._mover.drain(10.0)
        self._mover.close()
        if self._near is not None:
            self._near.close()
        self._host.close()
        if self._asker is not None:
            self._asker.shutdown(cancel_futures=True)
        for tier in (self._disk, self._remote):
            if tier is not None:
                tier.close()


def _parted(jobs: Sequence[AnyJob]) -> tuple[list[AnyJob], list[AnyJob]]:
    """Jobs that are over, and the others; each is asked once, for it may end meanwhile."""
    over = [job.over for job in jobs]
    ended = [job for job, is_over in zip(jobs, over, strict=True) if is_over]
    return ended, [job for job, is_over in zip(jobs, over, strict=True) if not is_over]


def _filled(rows: Mapping[int, KeyedBlocks]) -> list[tuple[int, KeyedBlocks]]:
    return [(group, listed) for group, listed in rows.items() if listed[0]]
