"""The same bytes through NIXL alone: as one buffer, and as per-layer engines move them.

    raw        one contiguous buffer, one descriptor: the limit
    prepared   pieces of per-layer tensors; lists of all pieces of all blocks, here and there,
               were made when the engine started, and a request picks from them by index
    built      the same pieces; each request makes its own lists of descriptors

Engines do the one or the other. What an engine does once counts nowhere; what
it does per request counts: indices or descriptors, the handle, the notification at the end.
"""

import time
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstow.errors import TransferError
from kvstow.testing.measure.setting import SPARE, Setting
from kvstow.transfer.transport.base import Direction, Kinds
from kvstow.transfer.transport.nixl import OPERATIONS

Rows = npt.NDArray[np.uint64]
DONE = b"done"


class Baseline:
    """Posts straight to a NIXL agent that is connected to `peer`, and watches without pause."""

    def __init__(
        self,
        nixl: Any,
        peer: str,
        setting: Setting,
        bases: tuple[int, int],
        kinds: Kinds,
        direction: Direction,
    ) -> None:
        self._nixl = nixl
        self._peer = peer
        self._setting = setting
        self._bases = bases
        self._kinds = kinds
        self._operation = OPERATIONS[direction]
        self._regions = np.arange(2 * setting.layers) * (setting.rows + SPARE)

    def raw(self) -> float:
        """Seconds for one contiguous buffer."""
        started = time.perf_counter()
        return self._moved(self._described(np.zeros(1, np.int64), self._setting.nbytes), started)

    def built(self) -> float:
        """Seconds for a request whose lists are made for it."""
        started = time.perf_counter()
        return self._moved(self._described(None, self._setting.piece), started)

    def prepared(self) -> float:
        """Seconds for a request that picks from lists of all pieces."""
        lists = self._lists
        started = time.perf_counter()
        here, there = (self._pieces(seed).astype(np.int32) for seed in (2, 1))
        handle = self._nixl.make_prepped_xfer(
            self._operation, lists[0], here, lists[1], there, DONE
        )
        return self._moved(handle, started)

    def _pieces(self, seed: int) -> npt.NDArray[np.int64]:
        """Numbers of a request's pieces: region after region, its blocks in each."""
        return np.add.outer(self._regions, self._setting.scattered(seed).ids).ravel()

    @cached_property
    def _lists(self) -> tuple[Any, Any]:
        """Every piece there is, on both sides."""
        count = len(self._regions) * (self._setting.rows + SPARE)
        every = np.arange(count) * self._setting.piece
        sides = zip(("", self._peer), self._bases, self._memory, strict=True)
        here, there = (
            self._nixl.prep_xfer_dlist(
                owner, _rows(base + every, self._setting.piece, device), kind
            )
            for owner, base, (kind, device) in sides
        )
        return here, there

    @property
    def _memory(self) -> tuple[tuple[str, int], tuple[str, int]]:
        kinds = self._kinds
        return (kinds.local, kinds.local_device), (kinds.remote, kinds.remote_device)

    def _described(self, offsets: npt.NDArray[np.int64] | None, nbytes: int) -> Any:
        """A handle for copies of `nbytes`, at these offsets or at those of the pieces."""
        sides: list[Any] = []
        for base, seed, (kind, device) in zip(self._bases, (2, 1), self._memory, strict=True):
            at = self._pieces(seed) * nbytes if offsets is None else offsets
            sides.append(self._nixl.get_xfer_descs(_rows(base + at, nbytes, device), kind))
        return self._nixl.initialize_xfer(self._operation, *sides, self._peer, DONE)

    def _moved(self, handle: Any, started: float) -> float:
        state = self._nixl.transfer(handle)
        while state == "PROC":
            state = self._nixl.check_xfer_state(handle)
        seconds = time.perf_counter() - started
        handle.release()
        if state != "DONE":
            raise TransferError(f"nixl: transfer state {state!r}", kind="transport")
        return seconds


def _rows(addresses: npt.NDArray[np.int64], nbytes: int, device: int) -> Rows:
    rows: Rows = np.empty((len(addresses), 3), np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = addresses, nbytes, device
    return rows
