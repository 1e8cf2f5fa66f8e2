"""Stock: the rows of one group, free, held or cached. Arrays with one entry per row.

    free     nobody needs what is in it
    held     `refs` requests, leases or copies need it
    cached   nobody holds it, its content may be wanted again: in the queue, evictable

Rows that lie in slabs of other groups count as free here; who owns a slab is written
down once, in `Slabs`.
"""

import numpy as np
import numpy.typing as npt

from kvstow.blocks.queue import Queue
from kvstow.blocks.runs import Where, span_of_any
from kvstow.blocks.shelves import Shelves
from kvstow.errors import BlockError, PlanError
from kvstow.plan.view import Ints


class Stock:
    """`num_slabs` slabs of `rows_per_slab` rows; the first `num_null` rows are nobody's.

    Slabs with free rows lie on shelves, by the number of those: `1 … top`, and `top + 1 …
    2 · top` where all that is held in them is held briefly (`passing`).
    """

    def __init__(
        self,
        *,
        group: int,
        name: str,
        num_slabs: int,
        rows_per_slab: int,
        num_null: int,
        generations: Ints | None,
    ) -> None:
        self.group = group
        self.name = name
        self.rows_per_slab = rows_per_slab
        self.num_rows = num_slabs * rows_per_slab
        self.num_null = num_null
        self.refs = np.zeros(self.num_rows, np.int64)
        self.free = np.ones(self.num_rows, np.bool_)
        self.kept = np.zeros(self.num_rows, np.bool_)
        self.quarantined = np.zeros(self.num_rows, np.bool_)
        self.generations = _generations(name, self.num_rows, generations)
        self.queue = Queue(self.num_rows)
        self.idle = self.queue if rows_per_slab == 1 else Queue(num_slabs)
        self.top = rows_per_slab.bit_length()
        self.partial = Shelves(num_slabs, 2 * self.top)
        self.passing = np.zeros(num_slabs, np.int64)
        self.num_busy = 0
        self.num_held = 0
        self.num_quarantined = 0
        levels = [n.bit_length() for n in range(rows_per_slab + 1)]
        self._shelf = np.array([levels, [n and n + self.top for n in levels]], np.int64)

    @property
    def spare(self) -> int:
        """Rows that are not held, in slabs that have held ones."""
        return 0 if self.rows_per_slab == 1 else self.num_busy * self.rows_per_slab - self.num_held

    def shelves_of(self, slabs: Ints, free: Ints) -> Ints:
        """Where slabs with so many free rows belong."""
        return self._shelf[self.passing[slabs], free]

    def slabs_of(self, rows: Ints) -> Ints:
        return rows if self.rows_per_slab == 1 else rows // self.rows_per_slab

    def by_slab(self, rows: Where) -> tuple[Ints, Ints]:
        """The slabs that ascending rows lie in, and how many of the rows lie in each."""
        size = self.rows_per_slab
        if isinstance(rows, slice):
            slabs = np.arange(rows.start // size, -(-rows.stop // size))
            counts = np.full(len(slabs), size)
            counts[0] -= rows.start % size
            counts[-1] -= -rows.stop % size
            return slabs, counts
        slabs = rows // size
        edges = np.empty(len(slabs) + 1, np.bool_)
        edges[0] = edges[-1] = True
        np.not_equal(slabs[1:], slabs[:-1], out=edges[1:-1])
        starts = edges.nonzero()[0]
        return slabs[starts[:-1]], starts[1:] - starts[:-1]

    def rows_of(self, slabs: Ints) -> Ints:
        """All rows of the slabs, in their order."""
        if self.rows_per_slab == 1:
            return slabs
        within = np.arange(self.rows_per_slab)
        return (slabs[:, None] * self.rows_per_slab + within).ravel()

    def free_rows_of(self, slabs: Ints) -> Ints:
        """The free rows of slabs that the group owns."""
        rows = self.rows_of(slabs)
        return rows[self.free[rows]]

    def cached_rows_of(self, slabs: Ints) -> Ints:
        rows = self.rows_of(slabs)
        return rows[self.queue.place[rows] >= 0]

    def located(self, rows: npt.ArrayLike) -> tuple[Ints, Where]:
        """The rows as an array and, perhaps, as a slice, once it is certain that all exist."""
        array = np.asarray(rows, np.int64)
        where = span_of_any(array)
        if isinstance(where, slice):
            good = where.start >= 0 and where.stop <= self.num_rows
        else:
            words = array.view(np.uint64)
            good = not len(words) or words[words.argmax()] < self.num_rows
        if not good:
            wrong = array[(array < 0) | (array >= self.num_rows)]
            raise BlockError(
                f"group {self.name!r}: block {wrong[0]} is not among the {self.num_rows} there are"
            )
        return array, where

    def known(self, rows: npt.ArrayLike) -> Ints:
        """The rows as an array, once it is certain that all of them exist."""
        return self.located(rows)[0]

    def refuse(self, rows: Ints, wrong: npt.NDArray[np.bool_], what: str) -> None:
        """Raises if any row is wrong, naming the first of them."""
        if np.count_nonzero(wrong):
            first = int(rows[wrong][0])
            raise BlockError(
                f"group {self.name!r}: block {first} {what}: it has {int(self.refs[first])} holds "
                f"({int(wrong.sum())} of {len(rows)} blocks are such)"
            )


def _generations(name: str, num_rows: int, given: Ints | None) -> Ints:
    if given is None:
        return np.zeros(num_rows, np.int64)
    if given.shape != (num_rows,) or given.dtype != np.int64 or not given.flags.c_contiguous:
        raise PlanError(
            f"group {name!r}: generations are {given.dtype} {given.shape}, not contiguous int64 "
            f"({num_rows},)"
        )
    return given
