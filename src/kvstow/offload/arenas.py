"""Rows between arenas and the tiers of a store.

with host memory   arena ⇄ host ⇄ disk, remote   in the background, by a mover per arena
without            arena ⇄ stage ⇄ disk, remote  before the call returns
"""

import os
from collections.abc import Sequence
from threading import RLock

import numpy as np
import numpy.typing as npt

from kvstow.errors import StoreError
from kvstow.memory.arena import Arena
from kvstow.offload.disk.format import ChainLink
from kvstow.offload.disk.tier import DiskTier
from kvstow.offload.host.tier import HostTier
from kvstow.offload.mover.jobs import MoverJob
from kvstow.offload.mover.mover import Mover
from kvstow.offload.remote.tier import RemoteTier
from kvstow.offload.staging import RowStage
from kvstow.offload.tier import Bools, Tier, TierChain, check_process, checked_keys
from kvstow.plan.layout import Layout
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks, check_ids


class ArenaRows:
    """Saves and loads blocks of any number of arenas, which it keeps until it is closed.

    Threads take turns where there is no host memory: a stage is one piece of memory, and whoever
    uses it meanwhile would be given another thread's bytes. An arena that is closed is let go of
    when all that came from it has gone on.
    """

    def __init__(
        self, host: HostTier | None, disk: DiskTier | None, remote: RemoteTier | None
    ) -> None:
        self._host, self._disk, self._remote = host, disk, remote
        lower: list[Tier] = [tier for tier in (disk, remote) if tier is not None]
        self._below = TierChain(lower) if lower else None
        self._opener = os.getpid()
        self._lock = RLock()
        self._stages: dict[tuple[int, int], tuple[Arena, RowStage]] = {}
        self._movers: dict[int, tuple[Arena, Mover]] = {}

    def save(
        self,
        arena: Arena,
        group: int,
        ids: npt.ArrayLike,
        keys: Sequence[bytes],
        links: Sequence[ChainLink],
    ) -> Bools:
        """Keep blocks; which of them are there now. StoreError, with the blocks, where the medium
        fails."""
        check_process(self._opener, "the store")
        blocks = self._checked(arena, group, ids, keys)
        if links and len(links) != len(keys):
            raise StoreError(f"{len(links)} links for {len(keys)} keys")
        if self._host is not None:
            return _result(self._mover(arena, self._host).store(group, blocks, keys, links))
        with self._lock:
            stage = self._staged(arena, group)
            kept = np.zeros(len(blocks), bool)
            for part in _parts(len(blocks), stage.num_rows):
                try:
                    kept[part] = self._stored(stage, blocks[part], keys[part], links[part])
                except StoreError as error:
                    named = tuple((group, int(block)) for block in blocks[part])
                    raise StoreError(str(error), blocks=named) from error
            return kept

    def _stored(
        self, stage: RowStage, blocks: Ints, keys: Sequence[bytes], links: Sequence[ChainLink]
    ) -> Bools:
        rows = stage.fetch(blocks)
        kept = np.zeros(len(blocks), bool)
        if self._remote is not None:
            kept |= self._remote.store(stage.tier_group, keys, rows)
        if self._disk is not None:
            kept |= self._disk.store(stage.tier_group, keys, rows, links)
        return kept

    def load(self, arena: Arena, group: int, keys: Sequence[bytes], ids: npt.ArrayLike) -> Bools:
        """Bring rows into blocks; which of them were there."""
        check_process(self._opener, "the store")
        blocks = self._checked(arena, group, ids, keys)
        if self._host is not None:
            return _result(self._mover(arena, self._host).load(group, keys, blocks))
        assert self._below is not None
        with self._lock:
            stage = self._staged(arena, group)
            found = np.zeros(len(blocks), bool)
            for part in _parts(len(blocks), stage.num_rows):
                rows = stage.room(blocks[part])
                found[part] = self._below.load(stage.tier_group, keys[part], rows)
                stage.deliver(blocks[part], found[part])
            return found

    def flush(self, timeout: float) -> bool:
        """Whether what was saved has gone on from host memory, within so many seconds each."""
        with self._lock:
            movers = [mover for _, mover in self._movers.values()]
        drained = [mover.drain(timeout) for mover in movers]
        return all(drained)

    def close(self) -> None:
        """Give up what has not begun, and let go of all arenas."""
        with self._lock:
            for _, mover in self._movers.values():
                mover.close()
            self._movers.clear()
            self._stages.clear()

    def _mover(self, arena: Arena, host: HostTier) -> Mover:
        """The mover of an arena. The arena is kept with it, so its id stays its own."""
        with self._lock:
            self._let_go()
            if id(arena) not in self._movers:
                self._movers[id(arena)] = arena, Mover(arena, host, self._below)
            return self._movers[id(arena)][1]

    def _let_go(self) -> None:
        """End the movers of arenas that are closed and have nothing under way any more."""
        for known, (arena, mover) in tuple(self._movers.items()):
            mover.reap()
            if arena.is_closed and mover.drain(0):
                mover.close()
                del self._movers[known]

    def _checked(self, arena: Arena, group: int, ids: npt.ArrayLike, keys: Sequence[bytes]) -> Ints:
        """The blocks, once it is certain that each is one, is named once, and has a key: a block
        under two keys, or a null row under one, would be taken for what it is not."""
        blocks = arena.checked(group, ids)
        if len(blocks) != len(keys):
            raise StoreError(f"{len(keys)} keys for {len(blocks)} blocks")
        check_ids(arena.layout, group, Blocks.first(blocks), "arena")
        checked_keys(arena.layout, group, keys)
        return blocks

    def _staged(self, arena: Arena, group: int) -> RowStage:
        for known, (other, _) in tuple(self._stages.items()):
            if other.is_closed:
                del self._stages[known]
        if (id(arena), group) not in self._stages:
            self._stages[id(arena), group] = arena, RowStage(arena, group, self._layout)
        return self._stages[id(arena), group][1]

    @property
    def _layout(self) -> Layout:
        assert self._below is not None
        return self._below.layout


def _result(job: MoverJob) -> Bools:
    """What has become of a job, when nothing of it uses the blocks any more: whoever is interrupted
    while it waits may use them for something else at once."""
    try:
        return job.result()
    finally:
        job.cancel()
        job.wait()


def _parts(count: int, step: int) -> list[slice]:
    return [slice(lo, min(lo + step, count)) for lo in range(0, count, step)]
