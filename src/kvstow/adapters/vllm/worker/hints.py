"""Rows that a request asks to keep, or to move out of the way (`kv_hints`), in one rank's tiers.

    retain     as if they had been used just now
    pin        not given up for so many seconds, while a quarter of host memory has room for them
    demote     given up in host memory, once a tier below has them

`prefetch` needs nothing here: a request that carries it is loaded like any other, and what it
loads from below is in host memory from then on.
"""

from collections.abc import Sequence
from time import monotonic

import numpy as np

from kvstow.adapters.vllm.protocol import HintedRows, StepOrders, StepResults
from kvstow.adapters.vllm.worker.part import RankPart, Task, Tasks
from kvstow.offload.host.tier import HostTier
from kvstow.offload.tier import Tier, held_by_any, select

LOOK_SECONDS = 0.5
"""How often rows that are on their way are looked for."""

DEMOTE_SECONDS = 60.0
"""Rows that no tier below has by then stay."""

PINNED_PART = 4


class RowHints(RankPart):
    """Hints of requests that have ended; each is a task until there is nothing left to do."""

    def __init__(self, host: HostTier, groups: Sequence[int], lower: Sequence[Tier]) -> None:
        self._host, self._groups, self._lower = host, groups, lower
        self._tasks = Tasks()
        self._pinned_bytes = 0
        self._next_look = 0.0

    def save(self, step: StepOrders) -> None:
        for hint in step.hints:
            match hint.action:
                case "pin":
                    self._tasks.begin(self._pin(hint))
                case "demote":
                    self._tasks.begin(self._demote(hint))
                case _:
                    self._tasks.begin(self._retain(hint))

    def report(self, results: StepResults) -> None:
        if self._tasks and monotonic() >= self._next_look:
            self._next_look = monotonic() + LOOK_SECONDS
            self._tasks.resume()

    def close(self) -> None:
        self._tasks.end()

    def _retain(self, hint: HintedRows) -> Task:
        for group, keys in zip(self._groups, hint.keys, strict=True):
            with self._host.held(group, keys):
                pass  # a row that was read is the last to go
        yield

    def _pin(self, hint: HintedRows) -> Task:
        until, pinned = monotonic() + hint.seconds, [set[int]() for _ in self._groups]
        try:
            while monotonic() < until:
                for group, keys, own in zip(self._groups, hint.keys, pinned, strict=True):
                    own.update(self._pin_some(group, keys, own))
                yield
        finally:
            for group, own in zip(self._groups, pinned, strict=True):
                self._host.unpin(group, np.array(sorted(own), np.int64))
                self._pinned_bytes -= len(own) * self._host.layout.row_bytes(group)

    def _pin_some(self, group: int, keys: Sequence[bytes], own: set[int]) -> list[int]:
        """Pin rows of those keys that are here and not pinned, as far as there is room."""
        nbytes = self._host.layout.row_bytes(group)
        room = (self._host.layout.nbytes // PINNED_PART - self._pinned_bytes) // nbytes
        with self._host.still():
            here = self._host.ids(group, keys)
            new = [id for id in here[here >= 0].tolist() if id not in own][: max(room, 0)]
            self._host.pin(group, np.array(new, np.int64))
        self._pinned_bytes += len(new) * nbytes
        return new

    def _demote(self, hint: HintedRows) -> Task:
        until, left = monotonic() + DEMOTE_SECONDS, [list(keys) for keys in hint.keys]
        while self._lower and any(left) and monotonic() < until:
            for g, group in enumerate(self._groups):
                if left[g]:
                    is_below = held_by_any(self._lower, group, left[g])
                    self._host.evict(group, select(left[g], is_below))
                    left[g] = select(left[g], ~is_below)
            yield
