"""How many pages of a prefix can be restored, from what each pool has of it.

The pages of the KV pool count from the first on. What the prefix needs of another pool is a
retention whose tokens are pages: all of them (`Full`), as sparse indices do, or the last few
(`trailing`), as windows and recurrent states do. So a prefix may be restorable at 3 and 5 pages and
not at 4.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvstow.plan.retention import Bools, Retention, Window, can_hit


@dataclass(frozen=True, slots=True)
class RestorablePages:
    """`lengths` are the prefixes that every pool can restore, in pages, ascending; `by_pool` has
    the longest for each pool alone, where there is one."""

    lengths: list[int]
    by_pool: dict[str, int]

    @property
    def longest(self) -> int:
        return self.lengths[-1] if self.lengths else 0


def trailing(num_pages: int) -> Retention:
    """What needs so many of a prefix's last pages."""
    return Window(max(1, num_pages) + 1)


def leading(present: Bools) -> int:
    """How many are there before the first that is not."""
    return len(present) if present.all() else int(np.argmin(present))


def restorable_pages(kv: Bools, others: Mapping[str, tuple[Retention, Bools]]) -> RestorablePages:
    """The prefixes that can be restored, from what is needed of each pool and which pages are
    there; the KV pool's own number is under `kv`."""
    most = leading(kv)
    by_pool = {"kv": most} if most else {}
    lengths, fits = np.arange(1, most + 1), np.ones(most, bool)
    for name, (needs, present) in others.items():
        own = can_hit(needs, lengths, 1, present[:most])
        if fits.any() and own.any():
            by_pool[name] = int(lengths[own][-1])
        fits &= own
    return RestorablePages(lengths[fits].tolist(), by_pool)
