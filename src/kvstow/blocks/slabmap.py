"""Who owns which slab, as a string: one letter per slab, for pages and status documents.

A letter's code is 33 + 4 · (owner + 1) + fullness. Fullness counts rows that somebody holds:
0 none, 1 up to half of them, 2 more, 3 all. Of many slabs every second, third … is told.
The null slab is left out.
"""

from dataclasses import dataclass

import numpy as np

from kvstow.blocks.pool import Pool
from kvstow.plan.layout import NULL_SLABS

MAX_LETTERS = 960
FIRST = 33
LEVELS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabMap:
    """One letter for every `step`-th of `num_slabs` slabs; `groups` are names of the owners.

    There are no letters where no slabs pass between the groups.
    """

    groups: tuple[str, ...]
    num_slabs: int
    step: int
    letters: str


def slab_map(pool: Pool) -> SlabMap:
    """The slabs now. A group that is alone has one row per slab."""
    layout, owned = pool.layout, pool.ownership()
    names = tuple(rows.group.name for rows in layout.groups)
    if len(owned) != 1:
        return SlabMap(groups=names, num_slabs=0, step=1, letters="")
    total = len(owned[0].owner)
    null = total // layout.num_slabs * NULL_SLABS
    step = max(1, -(-(total - null) // MAX_LETTERS))
    owner, held = owned[0].owner[null::step], owned[0].held[null::step]
    is_alone = len(names) == 1
    per_slab = np.array([1 if is_alone else rows.rows_per_slab for rows in layout.groups], np.int64)
    rows = np.where(owner < 0, 1, per_slab[owner])
    level = np.where(held == 0, 0, np.where(held == rows, 3, 1 + (2 * held > rows)))
    codes = (FIRST + LEVELS * (owner + 1) + level).astype("<u4")
    letters = codes.tobytes().decode("utf-32-le")
    return SlabMap(groups=names, num_slabs=total - null, step=step, letters=letters)
