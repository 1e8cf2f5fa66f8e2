"""A mover for every arena that a store is used with."""

import os
from collections.abc import Sequence
from threading import Lock

import numpy.typing as npt

from kvstow.memory.arena import Arena
from kvstow.offload.copies.jobs import MoverJob
from kvstow.offload.copies.mover import Mover
from kvstow.offload.disk.format import ChainLink
from kvstow.offload.host.tier import HostTier
from kvstow.offload.tier import Bools, Tier, check_process


class Movers:
    """Saves and loads blocks of any number of arenas, and waits until it is done. An arena that is
    closed is let go of when all that came from it has gone on."""

    def __init__(self, host: HostTier | None, below: Tier | None) -> None:
        self._host, self._below = host, below
        self._opener = os.getpid()
        self._lock = Lock()
        self._movers: dict[int, tuple[Arena, Mover]] = {}
        """By the arena's id: the arena is kept, so its id stays its own."""

    def __contains__(self, arena: Arena) -> bool:
        """Whether the arena has a mover."""
        return id(arena) in self._movers

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
        return _result(self._mover(arena).store(group, ids, keys, links))

    def load(self, arena: Arena, group: int, keys: Sequence[bytes], ids: npt.ArrayLike) -> Bools:
        """Bring rows into blocks; which of them were there."""
        return _result(self._mover(arena).load(group, keys, ids))

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

    def _mover(self, arena: Arena) -> Mover:
        check_process(self._opener, "the store")
        with self._lock:
            for number, (other, mover) in tuple(self._movers.items()):
                mover.reap()
                if other.is_closed and mover.drain(0):
                    mover.close()
                    del self._movers[number]
            if id(arena) not in self._movers:
                self._movers[id(arena)] = arena, Mover(arena, self._host, self._below)
            return self._movers[id(arena)][1]


def _result(job: MoverJob) -> Bools:
    """What has become of a job, when nothing of it uses the blocks any more: whoever is interrupted
    while it waits may use them for something else at once."""
    try:
        return job.result()
    finally:
        job.cancel()
        job.wait()
