"""Sums of rows in the host tier: taken in the arena when they leave and when they come back.

    store   arena → host; the sum of the row in the arena is noted
    load    host → arena; the sum of the row in the arena must be the noted one
    demote  host → disk; the sum of the row in host memory must be

So a row that was damaged in host memory, or on the way, is found before anybody uses it, and before
a disk gives it a checksum of its own. On CUDA a kernel sums weighted words where they lie;
elsewhere it is XXH3. Rows that came from a tier below were compared with their checksum there, and
have no sum here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from kvstow.memory.arena import Arena
from kvstow.offload.disk.format import checksum
from kvstow.offload.host.tier import HostTier, Reservation
from kvstow.offload.rows import starts
from kvstow.offload.tier import Bools, Bytes
from kvstow.plan.view import Ints

Sums = npt.NDArray[np.int64]

WORD = 8


@dataclass(frozen=True, slots=True, eq=False)
class PendingSums:
    """Sums that are being taken: `taken` gives them when `event` is over."""

    event: "torch.cuda.Event | None"
    taken: Callable[[], Sums]
    kept: tuple[torch.Tensor, ...] = ()
    """What the work needs until then."""

    def over(self) -> bool:
        return self.event is None or self.event.query()

    def result(self) -> Sums:
        """The sums; waits for them."""
        if self.event is not None:
            self.event.synchronize()
        return self.taken()


class RowChecks:
    """Sums of one host tier's rows, taken in one arena. Call from any thread.

    A row that is reserved belongs to whoever reserved it, so `note` and `forget` come before
    `HostTier.keep`.
    """

    def __init__(self, arena: Arena, host: HostTier) -> None:
        self._arena, self._host = arena, host
        groups = host.layout.groups
        self._sums: tuple[dict[int, tuple[bytes, int]], ...] = tuple({} for _ in groups)
        """Per group and row of the tier, the key that it had and the sum."""
        if arena.device.type == "cuda":
            self._on_device(np.zeros((4, 1), np.int64), 1).result()  # compiled before it is needed

    def begin(self, group: int, rows: Ints, here: Ints, there: Ints, nbytes: Ints) -> PendingSums:
        """Sums of rows of the tier as they lie in the arena, in the current stream.

        Bytes `[here, here + nbytes)` of the arena are bytes `[there, …)` of the tier, each run in
        one of the rows.
        """
        firsts = starts(self._host.layout, group, rows)
        order = np.argsort(firsts)
        row = order[np.searchsorted(firsts[order], there, side="right") - 1]
        table = np.stack([here, there - firsts[row], nbytes, row])
        if self._arena.device.type != "cuda":
            sums = self._on_host(table, len(rows))
            return PendingSums(None, lambda: sums)
        table[:3] //= WORD
        return self._on_device(table, len(rows))

    def _on_host(self, table: Ints, num_rows: int) -> Sums:
        memory: Bytes = self._arena.bytes.numpy()
        parts: list[list[Bytes]] = [[] for _ in range(num_rows)]
        for here, _, nbytes, row in table[:, np.lexsort((table[1], table[3]))].T.tolist():
            parts[int(row)].append(memory[here : here + nbytes])
        whole = [each[0] if len(each) == 1 else np.concatenate(each) for each in parts]
        return np.array([checksum(row) for row in whole], np.int64)

    def _on_device(self, table: Ints, num_rows: int) -> PendingSums:
        from kvstow.memory.kernels.sums import sum_rows

        device = self._arena.device
        on_device = torch.as_tensor(table).pin_memory().to(device, non_blocking=True)
        sums = torch.zeros(num_rows, dtype=torch.int64, device=device)
        sum_rows(self._arena.bytes, on_device, sums)
        here = torch.empty(num_rows, dtype=torch.int64, pin_memory=True)
        here.copy_(sums, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))

        def taken() -> Sums:
            return here.numpy().copy()

        return PendingSums(event, taken, (on_device, sums))

    def note(self, reserved: Reservation, sums: Sums) -> None:
        """Reserved rows were filled, and had these sums where they came from."""
        noted = zip(reserved.keys, sums.tolist(), strict=True)
        self._sums[reserved.group].update(zip(reserved.ids.tolist(), noted, strict=True))

    def forget(self, reserved: Reservation) -> None:
        """Reserved rows are filled from elsewhere, so nothing is known of their sums."""
        for row in reserved.ids.tolist():
            self._sums[reserved.group].pop(row, None)

    def good(self, group: int, keys: Sequence[bytes], rows: Ints, sums: Sums) -> Bools:
        """Which rows, held meanwhile, have come back as they left, as far as that is known."""
        pairs = zip(self._noted(group, keys, rows), sums.tolist(), strict=True)
        return np.array([left is None or left == back for left, back in pairs], bool)

    def unchanged(
        self, group: int, keys: Sequence[bytes], rows: Ints, runs: Sequence[tuple[int, int]]
    ) -> Bools:
        """Which rows, held meanwhile, lie in the tier as they left, as far as that is known. `runs`
        are the bytes of a row that count."""
        pairs = zip(self._noted(group, keys, rows), self._host.views(group, rows), strict=True)
        return np.array([left is None or left == self._sum(row, runs) for left, row in pairs], bool)

    def _noted(self, group: int, keys: Sequence[bytes], rows: Ints) -> list[int | None]:
        """The sum that each row left with; None where nothing is known."""
        noted = (self._sums[group].get(row, (b"", 0)) for row in rows.tolist())
        pairs = zip(keys, noted, strict=True)
        return [left if name == key else None for key, (name, left) in pairs]

    def _sum(self, row: Bytes, runs: Sequence[tuple[int, int]]) -> int:
        """The sum of a row where it lies in the tier."""
        if self._arena.device.type == "cuda":
            return weighted_sum(row, runs)
        parts = [row[a:b] for a, b in runs]
        return checksum(parts[0] if len(parts) == 1 else np.concatenate(parts))


def weighted_sum(row: Bytes, runs: Sequence[tuple[int, int]]) -> int:
    """What the kernel counts (`memory.kernels.sums`), of a row in host memory."""
    parts = (np.dot(row[a:b].view(np.uint64), _weights(a // WORD, b // WORD)) for a, b in runs)
    return int(np.array([*parts], np.uint64).sum(dtype=np.uint64).astype(np.int64))


@lru_cache(maxsize=8)
def _weights(first: int, end: int) -> npt.NDArray[np.uint64]:
    """A number for each place of a word in a row."""
    x = np.arange(first + 1, end + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)
