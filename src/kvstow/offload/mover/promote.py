"""Rows from the tier below: into the host tier, or past it where it has no room."""

from collections.abc import Sequence
from threading import Event, Lock

import numpy as np

from kvstow.memory.arena import Arena
from kvstow.offload.host.tier import HostTier
from kvstow.offload.mover.checks import RowChecks
from kvstow.offload.mover.jobs import MoverJob
from kvstow.offload.mover.streams import StreamOrder
from kvstow.offload.staging import RowStage
from kvstow.offload.tier import Bools, Tier, chosen
from kvstow.plan.view import Ints


class Promoter:
    """Brings rows up for one arena. Call from any thread."""

    def __init__(
        self,
        arena: Arena,
        host: HostTier,
        below: Tier,
        order: StreamOrder,
        checks: RowChecks | None,
    ) -> None:
        self._arena, self._host, self._below = arena, host, below
        self._order, self._checks = order, checks
        self._lock = Lock()
        self._under_way: dict[tuple[int, bytes], Event] = {}
        self._window_lock = Lock()
        self._windows: dict[int, RowStage] = {}

    def promote(self, group: int, keys: Sequence[bytes]) -> None:
        """Bring rows of a group of the host tier to the host, as far as there is room.

        Those that another thread is bringing are waited for, not brought twice.
        """
        wanted = list(dict.fromkeys(keys))
        with self._lock:
            others = [
                self._under_way[group, key] for key in wanted if (group, key) in self._under_way
            ]
            mine = [key for key in wanted if (group, key) not in self._under_way]
            arrived = Event()
            self._under_way.update({(group, key): arrived for key in mine})
        try:
            self._promote_mine(group, mine)
        finally:
            with self._lock:
                for key in mine:
                    del self._under_way[group, key]
            arrived.set()
        for other in others:
            other.wait()

    def _promote_mine(self, group: int, keys: Sequence[bytes]) -> None:
        there = self._below.contains(group, keys)
        reservation = self._host.reserve(group, chosen(keys, there))
        filled = np.zeros(len(reservation.ids), bool)
        if self._checks is not None:
            self._checks.forget(reservation)
        try:
            rows = self._host.views(group, reservation.ids)
            filled = self._below.load(group, reservation.keys, rows)
        finally:
            self._host.keep(reservation, filled)

    def past_host(self, job: MoverJob, host_group: int, keys: Sequence[bytes], ids: Ints) -> Bools:
        """Bring rows to blocks of the arena past the host, which had no room for them; which."""
        found = np.zeros(len(keys), bool)
        if not self._below.contains(host_group, keys).any():
            return found
        with self._window_lock:
            window = self._windows.get(job.group)
            if window is None:
                window = RowStage(self._arena, job.group, self._host.layout)
                self._windows[job.group] = window
            for lo in range(0, len(keys), window.num_rows):
                part = slice(lo, min(lo + window.num_rows, len(keys)))
                rows = window.room(ids[part])
                found[part] = self._below.load(window.tier_group, keys[part], rows)
                self._order.wait(job)
                window.deliver(ids[part], found[part])
        return found
