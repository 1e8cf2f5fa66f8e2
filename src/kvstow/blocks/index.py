"""Index: from the hash of a prefix to the row that holds its last block.

Buckets of eight, two for every hash; a row whose two buckets are full is simply not
found. All operations are on arrays of hashes.

    keys    [bucket, 8]   0 where nothing is
    rows    [bucket · 8]
    place   [row]         where the row's key is, -1 without one
"""

import numpy as np
import numpy.typing as npt

from kvstow.blocks.prompt import Hashes
from kvstow.plan.blocklist import Ints

_WIDTH_BITS = 3
WIDTH = 1 << _WIDTH_BITS
_TOP = np.uint64(64 - _WIDTH_BITS)
_SECOND = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


class Index:
    """Rows of one group by the hash of what they end."""

    def __init__(self, num_rows: int) -> None:
        num_buckets = 1 << max(2, (num_rows // 2).bit_length())
        self._mask = np.uint64(num_buckets - 1)
        self._keys = np.zeros((num_buckets, WIDTH), np.uint64)
        self._flat = self._keys.reshape(-1)
        self._rows = np.zeros(num_buckets * WIDTH, np.int64)
        self._place = np.full(num_rows, -1, np.int64)
        self.witness = np.full(num_rows, -1, np.int64)

    def find(self, hashes: Hashes) -> Ints:
        """The row of each hash, -1 where there is none."""
        rows = np.full(len(hashes), -1, np.int64)
        if self._find_in(self._first(hashes), hashes, rows) < len(rows):
            rest = np.nonzero(rows < 0)[0]
            keys = hashes[rest]
            more = rows[rest]
            if self._find_in(self._second(keys), keys, more):
                rows[rest] = more
        return rows

    def add(self, rows: Ints, hashes: Hashes, witness: int) -> npt.NDArray[np.bool_]:
        """Make rows, which have no key yet, known by hashes that are not; which ones
        found room."""
        self.witness[rows] = witness
        added = np.ones(len(rows), np.bool_)
        left = self._add_to(self._first(hashes), rows, hashes, np.arange(len(rows)))
        if len(left):
            left = self._add_to(self._second(hashes), rows, hashes, left)
            self.witness[rows[left]] = -1
            added[left] = False
        return added

    def remove(self, rows: Ints) -> Hashes:
        """Forget rows that have a key; their hashes."""
        places = self._place[rows]
        hashes = self._flat[places]
        self._flat[places] = 0
        self._place[rows] = -1
        self.witness[rows] = -1
        return hashes

    def has(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Which rows have a key."""
        return self._place[rows] >= 0

    def _first(self, hashes: Hashes) -> Ints:
        return (hashes & self._mask).view(np.int64)

    def _second(self, hashes: Hashes) -> Ints:
        return (((hashes * _SECOND) >> _HALF) & self._mask).view(np.int64)

    def _find_in(self, buckets: Ints, hashes: Hashes, rows: Ints) -> int:
        """Fill in the rows that one bucket per hash knows; how many."""
        same = self._keys.take(buckets, axis=0) == hashes[:, None]
        found = same.reshape(-1).nonzero()[0]
        which = found >> _WIDTH_BITS
        rows[which] = self._rows.take(buckets[which] * WIDTH + (found & (WIDTH - 1)))
        return len(found)

    def _add_to(self, buckets: Ints, rows: Ints, hashes: Hashes, left: Ints) -> Ints:
        """Try one bucket per row; positions of those that found it full.

        Rows that meet in one bucket write to the same place; the last one stays, the
        others try again.
        """
        column = (hashes >> _TOP).view(np.int64)
        places = buckets * WIDTH + column
        room = self._flat.take(places[left]) == 0
        taken = left[~room]
        left = left[room]
        left = np.concatenate((taken, self._write(places[left], rows, hashes, left)))
        full: list[Ints] = []
        while len(left):
            empty = self._keys.take(buckets[left], axis=0) == 0
            none = np.count_nonzero(empty, axis=1) == 0
            if np.count_nonzero(none):
                full.append(left[none])
                left, empty = left[~none], empty[~none]
            left = self._write(buckets[left] * WIDTH + empty.argmax(axis=1), rows, hashes, left)
        return np.concatenate(full) if full else left

    def _write(self, places: Ints, rows: Ints, hashes: Hashes, which: Ints) -> Ints:
        """Write keys to empty places; those that another one wrote over."""
        mine = rows[which]
        self._flat[places] = hashes[which]
        self._rows[places] = mine
        self._place[mine] = places
        lost = which[self._rows.take(places) != mine]
        self._place[rows[lost]] = -1
        return lost
