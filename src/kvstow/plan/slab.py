"""How many rows of each group make a slab.

`slab_bytes = rows_per_slab[g] · row_stride[g]` must hold for all groups at once, with
strides that are multiples of what each group's kernels ask for. So a slab is a common
multiple of `rows_per_slab[g] · step[g]`, and the search is over the row counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import lcm

import numpy as np

from kvstow.errors import PlanError
from kvstow.plan.view import Ints, align_up

MAX_SLAB_BYTES = (1 << 30) // 12
"""A pool of 1 GiB has at least a dozen slabs, unless a single row is longer than that."""

USUAL_POOL_ROWS = 1 << 10
"""Where no budget was given, waste is minimised for a pool of so many of the longest rows."""

MAX_PADDING = 0.04
MAX_MEAN_PADDING = 0.025
"""Parts of a slab that one group, and groups on average, may lose to padding, where any
slab below the limit allows it."""

TOO_MUCH = 100.0
"""Costs more than any waste that keeps within those parts."""

MAX_CANDIDATES = 1 << 10


@dataclass(frozen=True, slots=True)
class Geometry:
    """A slab, and the rows of each group in it."""

    slab_bytes: int
    rows_per_slab: tuple[int, ...]


def slab_geometry(
    row_bytes: Sequence[int], steps: Sequence[int], *, pool_bytes: int | None = None
) -> Geometry:
    """The slab with the least expected waste.

    Waste is what rows are padded by, averaged over groups, plus the worst group's, plus
    two partly used slabs per group, as a part of the pool.
    """
    strides = [align_up(n, s) for n, s in zip(row_bytes, steps, strict=True)]
    longest = max(strides)
    if longest >> 62:
        raise PlanError(f"a row of {longest} bytes is not below 2^62")
    rows = np.array(strides, np.int64)
    if len(rows) == 1:
        return Geometry(longest, (1,))
    pool = pool_bytes or USUAL_POOL_ROWS * longest
    limit = max(longest, min(MAX_SLAB_BYTES, pool // (2 + len(rows))))
    counts = _candidates(rows, limit)
    slabs = _common_multiples(counts * np.array(steps), (counts * rows).max(axis=1), limit)
    padding = 1 - counts * np.array(row_bytes) / slabs[:, None]
    mean, worst = padding.mean(axis=1), padding.max(axis=1)
    cost = mean + worst + 2 * slabs * len(rows) / pool
    cost[(mean > MAX_MEAN_PADDING) | (worst > MAX_PADDING)] += TOO_MUCH
    cost[slabs > limit] = np.inf
    best = int(cost.argmin())
    if not np.isfinite(cost[best]):
        return _single_rows(rows, steps)
    return Geometry(int(slabs[best]), tuple(int(n) for n in counts[best]))


def _candidates(rows: Ints, limit: int) -> Ints:
    """Row counts worth trying: what fits into a slab that some group fills exactly, and
    one row fewer of any of the groups, for the sake of smaller common multiples."""
    exact: list[Ints] = [
        np.arange(r, limit + 1, r * max(1, limit // r // MAX_CANDIDATES), dtype=np.int64)
        for r in rows.tolist()
    ]
    targets = np.unique(np.concatenate(exact))
    fitting = targets[targets >= rows.max(), None] // rows
    choices = (0, 1) if len(rows) <= 6 else (0,)
    fewer = np.array(list(product(choices, repeat=len(rows))), np.int64)
    counts = (fitting[:, None, :] - fewer).reshape(-1, len(rows))
    return counts[(counts > 0).all(axis=1)]


def _common_multiples(factors: Ints, least: Ints, limit: int) -> Ints:
    """Per candidate, the smallest common multiple of its factors that is not below
    `least`; anything above the limit is just that: above."""
    multiple = np.ones(len(factors), np.int64)
    for factor in factors.T:
        multiple = np.where(multiple > limit, multiple, np.lcm(multiple, factor))
    return align_up(least, multiple)


def _single_rows(rows: Ints, steps: Sequence[int]) -> Geometry:
    step = lcm(*steps)
    if step >> 62:
        raise PlanError(f"alignments {list(steps)} have no common multiple below 2^62")
    return Geometry(align_up(int(rows.max()), step), (1,) * len(rows))
