"""The worker's tiers: rows of the engine's memory in host memory and on disk, moved behind it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvstow.adapters.connector.messages import Found, Keyed, Lookup, Restore, Store
from kvstow.adapters.connector.settings import Settings
from kvstow.errors import StoreError
from kvstow.memory.arena import Arena
from kvstow.memory.numa import node_of
from kvstow.offload.bridge import matching_group
from kvstow.offload.disk import DiskTier
from kvstow.offload.host import HostTier
from kvstow.offload.jobs import Job
from kvstow.offload.mover import Mover
from kvstow.offload.neighbours import Neighbours
from kvstow.offload.tier import Tier


@dataclass(slots=True, eq=False)
class Errand:
    """The jobs of one request, one per group."""

    request: str
    jobs: list[Job] = field(default_factory=list[Job])
    num_tokens: int = 0
    error: StoreError | None = None

    @property
    def over(self) -> bool:
        return all(job.over for job in self.jobs)


class Shelf:
    """A host tier, and below it a disk tier where a path is set."""

    def __init__(self, arena: Arena, settings: Settings) -> None:
        layout = arena.layout
        self._disk: DiskTier | None = None
        if settings.disk_path:
            ranks = f"tp{layout.tp[0]}of{layout.tp[1]}-pp{layout.pp[0]}of{layout.pp[1]}"
            self._disk = DiskTier(
                Path(settings.disk_path) / ranks, layout, capacity=settings.disk_bytes
            )
        kept = self._disk.layout if self._disk else layout
        self._host = HostTier(
            kept, capacity=settings.host_bytes, numa_node=node_of(arena.device),
            shared=settings.host_shared or None,
        )  # fmt: skip
        self._near = Neighbours(self._host, self._disk) if settings.host_shared else None
        self._below: Tier | None = self._near or self._disk
        self._groups = [
            matching_group(layout, g, self._host.layout) for g in range(len(layout.groups))
        ]
        self._mover = Mover(arena, self._host, self._below)
        self._stores: list[Errand] = []
        self._restores: list[Errand] = []

    def __len__(self) -> int:
        """Errands under way."""
        return len(self._stores) + len(self._restores)

    def look_up(self, lookup: Lookup) -> Found:
        """Which rows are in one of the tiers now."""
        present: list[tuple[bool, ...]] = []
        for keys, g in zip(lookup.keys, self._groups, strict=True):
            here = self._host.contains(g, keys)
            if self._below is not None and not here.all():
                here = here | self._below.contains(g, keys)
            present.append(tuple(bool(found) for found in here))
        return Found(request=lookup.request, present=tuple(present))

    def store(self, order: Store) -> None:
        """Begin to keep rows. The blocks must stay as they are until the errand is over."""
        self._stores.append(self._errand(order.request, order.rows, loads=False))

    def restore(self, order: Restore) -> None:
        """Begin to bring rows back."""
        errand = self._errand(order.request, order.rows, loads=True)
        errand.num_tokens = order.num_tokens
        self._restores.append(errand)

    def _errand(self, request: str, rows: Mapping[int, Keyed], *, loads: bool) -> Errand:
        errand = Errand(request)
        for group, (keys, ids) in rows.items():
            if not keys:
                continue
            try:
                move = self._mover.load(group, keys, ids) if loads else self._mover.store(
                    group, ids, keys
                )  # fmt: skip
                errand.jobs.append(move)
            except StoreError as error:
                errand.error = error
        return errand

    def stored(self) -> list[Errand]:
        """Stores that are over since the last time."""
        return self._ended(self._stores)

    def restored(self) -> list[Errand]:
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

    def _ended(self, errands: list[Errand]) -> list[Errand]:
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
