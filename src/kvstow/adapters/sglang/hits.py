"""How many pages of a prefix can be restored, from what each pool has of it.

The pages of the KV pool count from the first on. Another pool must have

    all pages        every page of the prefix, as sparse indices do
    trailing pages   the last few pages of the prefix, as windows and recurrent states do

so a prefix may be restorable at 3 and 5 pages and not at 4.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvstow.offload.tier import Bools


@dataclass(frozen=True, slots=True, eq=False)
class PoolPresence:
    """Which pages of a prefix a pool has. `trailing` is how many of the last pages it must have;
    None for all."""

    present: Bools
    trailing: int | None = None

    def fits(self, most: int) -> Bools:
        """Whether prefixes of 1, 2, … `most` pages have what they need of this pool."""
        present = self.present[:most]
        if self.trailing is None:
            return np.logical_and.accumulate(present)
        absent = np.concatenate([[0], np.cumsum(~present)])
        ends = np.arange(1, most + 1)
        return absent[ends] == absent[np.maximum(0, ends - max(1, self.trailing))]


@dataclass(frozen=True, slots=True)
class RestorablePages:
    """`lengths` are the prefixes that every pool can restore, in pages, ascending; `by_pool` has
    the longest for each pool alone, where there is one."""

    lengths: list[int]
    by_pool: dict[str, int]

    @property
    def longest(self) -> int:
        return self.lengths[-1] if self.lengths else 0


def leading(present: Bools) -> int:
    """How many are there before the first that is not."""
    return len(present) if present.all() else int(np.argmin(present))


def restorable_pages(kv: Bools, others: Mapping[str, PoolPresence]) -> RestorablePages:
    """The prefixes that can be restored; the KV pool's own number is under `kv`."""
    most = leading(kv)
    by_pool = {"kv": most} if most else {}
    fits = np.ones(most, bool)
    for name, pool in others.items():
        own = pool.fits(most)
        if fits.any() and own.any():
            by_pool[name] = int(np.flatnonzero(own)[-1]) + 1
        fits &= own
    return RestorablePages((np.flatnonzero(fits) + 1).tolist(), by_pool)
