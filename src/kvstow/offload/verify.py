"""Every row of a store, read and compared with its checksum."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvstow.offload.disk import DiskTier
from kvstow.offload.files import aligned
from kvstow.plan.view import align_up

BATCH_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Verified:
    """What a full reading of a store found. Damaged rows are dropped when it is over."""

    rows: int
    nbytes: int
    damaged: tuple[tuple[int, bytes], ...]
    """Group and key of every row whose bytes were not what they should have been."""


def verify(tier: DiskTier, progress: Callable[[int], None] = lambda rows: None) -> Verified:
    """Read every row; those that are damaged are dropped, as on any load."""
    rows = nbytes = 0
    damaged: list[tuple[int, bytes]] = []
    for group in range(len(tier.layout.groups)):
        row_bytes = tier.layout.row_bytes(group)
        step = align_up(row_bytes, 4096)
        count = max(1, BATCH_BYTES // step)
        memory = aligned(count * step)
        into = [memory[i * step : i * step + row_bytes] for i in range(count)]
        keys = [key for (key,) in tier.index.ask(
            "SELECT key FROM rows WHERE grp = ? ORDER BY place", group)]  # fmt: skip
        for lo in range(0, len(keys), count):
            part = keys[lo : lo + count]
            found = tier.load(group, part, into[: len(part)])
            damaged += [(group, part[i]) for i in np.flatnonzero(~found).tolist()]
            rows += len(part)
            nbytes += len(part) * row_bytes
            progress(len(part))
    return Verified(rows, nbytes, tuple(damaged))
