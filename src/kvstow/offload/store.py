"""A store on disk and the rows of an arena: save and load, synchronously.

For rows to come and go in the background, through host memory, use `mover.Mover`.
"""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvstow.errors import StoreError
from kvstow.memory.arena import Arena
from kvstow.offload.disk.files import Files
from kvstow.offload.disk.format import ChainLink
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.eviction.policies import PolicyName
from kvstow.offload.rows import check_joinable
from kvstow.offload.staging import RowStage
from kvstow.offload.tier import Bools, checked_keys
from kvstow.plan.layout import Layout


class Store:
    """Rows on disk by key, for arenas of `layout` or of any layout that a route can join.

    Threads must not save and load through one store at once; several stores may share a
    directory, in one process or in many.
    """

    def __init__(self, tier: DiskTier, layout: Layout) -> None:
        check_joinable(layout, tier.layout)
        self.tier = tier
        self.layout = layout
        self._windows: dict[tuple[int, int], tuple[Arena, RowStage]] = {}

    @classmethod
    def open(
        cls,
        path: str | Path,
        layout: Layout | None = None,
        *,
        capacity: int | None = None,
        policy: PolicyName = "lru",
        files: Files | None = None,
    ) -> Self:
        """Open the store in a directory, or make one for rows of `layout`.

        A new store needs `layout` and `capacity` (bytes of data files at most). One that is
        there keeps its own layout; another one of the same model is joined to it by a route,
        anything else is refused. What a crash had damaged is in `dropped`.
        """
        tier = DiskTier(Path(path), layout, capacity=capacity, policy=policy, files=files)
        try:
            return cls(tier, tier.layout if layout is None else layout)
        except BaseException:
            tier.close()
            raise

    @property
    def dropped(self) -> tuple[str, ...]:
        """What was lost when the store was opened, in words."""
        return tuple(str(dropped) for dropped in self.tier.dropped)

    def contains(self, group: int, keys: Sequence[bytes]) -> Bools:
        """Which rows of the store's group are there."""
        return self.tier.contains(group, keys)

    def save(
        self,
        arena: Arena,
        group: int,
        ids: npt.ArrayLike,
        keys: Sequence[bytes],
        links: Sequence[ChainLink] = (),
    ) -> Bools:
        """Keep blocks of an arena on disk; which of them are there now.

        `links` say where the blocks stand in their sequences, for `kvstow store convert`.
        Nobody may write to them meanwhile. Raises StoreError, naming the blocks, when the
        medium fails.
        """
        blocks, window = self._window(arena, group, ids, keys)
        kept = np.zeros(len(blocks), bool)
        for lo in range(0, len(blocks), window.num_rows):
            part = slice(lo, min(lo + window.num_rows, len(blocks)))
            rows = window.fetch(blocks[part])
            try:
                kept[part] = self.tier.store(window.tier_group, keys[part], rows, links[part])
            except StoreError as error:
                named = tuple((group, int(block)) for block in blocks[part])
                raise StoreError(str(error), blocks=named) from error
        return kept

    def load(self, arena: Arena, group: int, keys: Sequence[bytes], ids: npt.ArrayLike) -> Bools:
        """Bring rows into blocks of an arena; which of them were there.

        The bytes of the other blocks are unspecified.
        """
        blocks, window = self._window(arena, group, ids, keys)
        found = np.zeros(len(blocks), bool)
        for lo in range(0, len(blocks), window.num_rows):
            part = slice(lo, min(lo + window.num_rows, len(blocks)))
            rows = window.room(blocks[part])
            found[part] = self.tier.load(window.tier_group, keys[part], rows)
            window.deliver(blocks[part], found[part])
        return found

    def close(self) -> None:
        self._windows.clear()
        self.tier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _window(
        self, arena: Arena, group: int, ids: npt.ArrayLike, keys: Sequence[bytes]
    ) -> tuple[npt.NDArray[np.int64], RowStage]:
        blocks = arena.checked(group, ids)
        if len(blocks) != len(keys):
            raise StoreError(f"{len(keys)} keys for {len(blocks)} blocks")
        known = self._windows.get((id(arena), group))
        if known is None:  # the arena is kept with its window, so its id stays its own
            known = arena, RowStage(arena, group, self.tier.layout)
            self._windows[id(arena), group] = known
        checked_keys(self.tier.layout, known[1].tier_group, keys)
        return blocks, known[1]
