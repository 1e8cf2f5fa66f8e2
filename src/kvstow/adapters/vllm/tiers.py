"""The tiers of one rank: rows stored and loaded for its engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.protocol import (
    KeyedBlocks,
    KeysPresent,
    LoadBlocks,
    LookUpKeys,
    StoreBlocks,
)
from kvstow.errors import StoreError
from kvstow.memory.arena import Arena
from kvstow.memory.numa import node_of
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.host.processes import SharedTiers
from kvstow.offload.host.tier import HostTier
from kvstow.offload.mover.jobs import MoverJob
from kvstow.offload.mover.mover import Mover
from kvstow.offload.rows import matching_group
from kvstow.offload.tier import Tier
from kvstow.offload.watch import TierChange, TierWatch


@dataclass(slots=True, eq=False)
class OffloadJob:
    """Rows of one request on their way to or from the tiers: a part per group."""

    request: str
    parts: list[MoverJob] = field(default_factory=list[MoverJob])
    num_tokens: int = 0
    error: StoreError | None = None

    @property
    def over(self) -> bool:
        return all(part.over for part in self.parts)


class OffloadJobs:
    """A host tier, and below it a disk tier where a path is set."""

    def __init__(self, arena: Arena, options: ConnectorOptions) -> None:
        layout = arena.layout
        self._disk: DiskTier | None = None
        if options.disk_path:
            ranks = f"tp{layout.tp[0]}of{layout.tp[1]}-pp{layout.pp[0]}of{layout.pp[1]}"
            self._disk = DiskTier(
                Path(options.disk_path) / ranks, layout, capacity=options.disk_bytes
            )
        kept = self._disk.layout if self._disk else layout
        self._host = HostTier(
            kept,
            capacity=options.host_bytes,
            numa_node=node_of(arena.device),
            shared=options.host_shared or None,
        )
        self._near = SharedTiers(self._host, self._disk) if options.host_shared else None
        self._below: Tier | None = self._near or self._disk
        self._groups = [
            matching_group(layout, g, self._host.layout) for g in range(len(layout.groups))
        ]
        self._mover = Mover(arena, self._host, self._below)
        self._watch: TierWatch | None = None
        if options.events and layout.tp[0] == layout.pp[0] == 0:
            tiers: dict[str, Tier] = {"host": self._host}
            tiers |= {"disk": self._disk} if self._disk else {}
            self._watch = TierWatch(tiers)
            self._watch.start()
        self._stores: list[OffloadJob] = []
        self._loads: list[OffloadJob] = []

    def __len__(self) -> int:
        """Jobs under way."""
        return len(self._stores) + len(self._loads)

    def look_up(self, lookup: LookUpKeys) -> KeysPresent:
        """Which rows are in one of the tiers now."""
        present: list[tuple[bool, ...]] = []
        for keys, g in zip(lookup.keys, self._groups, strict=True):
            if self._watch is not None:
                self._watch.note(g, keys)
            here = self._host.contains(g, keys)
            if self._below is not None and not here.all():
                here = here | self._below.contains(g, keys)
            present.append(tuple(bool(found) for found in here))
        return KeysPresent(request=lookup.request, present=tuple(present))

    def store(self, order: StoreBlocks) -> None:
        """Begin to keep rows. The blocks must stay as they are until the job is over."""
        if self._watch is not None:
            for group, (keys, _) in order.rows.items():
                self._watch.note(self._groups[group], keys)
        self._stores.append(self._begin(order.request, order.rows, loads=False))

    def load(self, order: LoadBlocks) -> None:
        """Begin to bring rows back."""
        job = self._begin(order.request, order.rows, loads=True)
        job.num_tokens = order.num_tokens
        self._loads.append(job)

    def _begin(self, request: str, rows: Mapping[int, KeyedBlocks], *, loads: bool) -> OffloadJob:
        job = OffloadJob(request)
        for group, (keys, ids) in rows.items():
            if not keys:
                continue
            try:
                part = (
                    self._mover.load(group, keys, ids)
                    if loads
                    else self._mover.store(group, ids, keys)
                )
                job.parts.append(part)
            except StoreError as error:
                job.error = error
        return job

    def stored(self) -> list[OffloadJob]:
        """Stores that are over since the last time."""
        return self._ended(self._stores)

    def loaded(self) -> list[OffloadJob]:
        """Loads that are over since the last time; `error` says that not all rows came."""
        ended = self._ended(self._loads)
        for job in ended:
            failed = next((part.error for part in job.parts if part.error is not None), None)
            lost = sum(int((~part.moved).sum()) for part in job.parts)
            if job.error is None and failed is not None:
                job.error = failed
            elif job.error is None and lost:
                job.error = StoreError(f"{lost} rows were gone when they were fetched")
        return ended

    def changes(self) -> tuple[TierChange, ...]:
        """Rows that came to a tier or went since the last time, by the engine's groups."""
        if self._watch is None:
            return ()
        return tuple(
            replace(change, group=self._groups.index(change.group)) for change in self._watch.take()
        )

    def _ended(self, jobs: list[OffloadJob]) -> list[OffloadJob]:
        self._mover.reap()
        ended = [job for job in jobs if job.over]
        jobs[:] = [job for job in jobs if not job.over]
        return ended

    def close(self) -> None:
        """Finish what has begun; what is on disk, or shared, stays there."""
        if self._watch is not None:
            self._watch.close()
        self._mover.drain(10.0)
        self._mover.close()
        if self._near is not None:
            self._near.close()
        self._host.close()
        if self._disk is not None:
            self._disk.close()
