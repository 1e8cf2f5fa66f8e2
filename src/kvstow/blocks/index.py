"""Index: from the hash of a prefix to the row that holds its last block.

Buckets of eight, two for every hash; a row whose two buckets are full is simply not
found. A hash is kept at its usual place, in its first bucket, unless that was taken; how
many of a bucket's hashes are elsewhere is counted, so that nearly every question is
answered by one look. All operations are on arrays of hashes.

    keys    [bucket, 8]   0 where nothing is
    rows    [bucket · 8]
    astray  [bucket]      hashes of this first bucket that are not at their usual place
    place   [row]         where the row's key is, -1 without one
"""

import numpy as np
import numpy.typing as npt

from kvstow.blocks.prompt import Hashes
from kvstow.blocks.runs import span_of_any
from kvstow.plan.blocklist import Ints

_WIDTH_BITS = 3
WIDTH = 1 << _WIDTH_BITS
_WIDTH = np.uint64(_WIDTH_BITS)
_TOP = np.uint64(64 - _WIDTH_BITS)
_SECOND = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)

Bools = npt.NDArray[np.bool_]


class Index:
    """Rows of one group by the hash of what they end."""

    def __init__(self, num_rows: int) -> None:
        num_buckets = 1 << max(2, (num_rows // 2).bit_length())
        self._mask = np.uint64(num_buckets - 1)
        self._keys = np.zeros((num_buckets, WIDTH), np.uint64)
        self._flat = self._keys.reshape(-1)
        self._rows = np.zeros(num_buckets * WIDTH, np.int64)
        self._astray = np.zeros(num_buckets, np.int32)
        self._place = np.full(num_rows, -1, np.int64)
        self.witness = np.full(num_rows, -1, np.int64)

    # ── questions ─────────────────────────────────────────────────────────────────

    def find(self, hashes: Hashes) -> Ints:
        """The row of each hash, -1 where there is none."""
        places = self._usual(hashes)
        rows = self._rows.take(places)
        other = self._flat.take(places) != hashes
        if np.count_nonzero(other):
            rows[other] = -1
            other &= self._astray.take(places >> _WIDTH_BITS) > 0
            if np.count_nonzero(other):
                rows[other] = self._search(hashes[other])
        return rows

    def has(self, rows: Ints) -> Bools:
        """Which rows have a key."""
        return self._place[rows] >= 0

    def _search(self, hashes: Hashes) -> Ints:
        """The row of each hash, in whichever place of its two buckets."""
        rows = np.full(len(hashes), -1, np.int64)
        for buckets in (self._first(hashes), self._second(hashes)):
            found = (self._keys.take(buckets, axis=0) == hashes[:, None]).reshape(-1).nonzero()[0]
            which = found >> _WIDTH_BITS
            rows[which] = self._rows.take(buckets[which] * WIDTH + (found & (WIDTH - 1)))
        return rows

    def _usual(self, hashes: Hashes) -> Ints:
        """The place in the first bucket where a hash is, unless that was taken."""
        return (((hashes & self._mask) << _WIDTH) | (hashes >> _TOP)).view(np.int64)

    def _first(self, hashes: Hashes) -> Ints:
        return (hashes & self._mask).view(np.int64)

    def _second(self, hashes: Hashes) -> Ints:
        return (((hashes * _SECOND) >> _HALF) & self._mask).view(np.int64)

    # ── changes ───────────────────────────────────────────────────────────────────

    def add(self, rows: Ints, hashes: Hashes, witness: int) -> Bools:
        """Make rows that have no key known by hashes that are not known; which of them
        were such, and found room."""
        where = span_of_any(rows)
        places = self._usual(hashes)
        added = self._place[where] < 0
        added &= self._flat.take(places) == 0
        added &= self._astray.take(places >> _WIDTH_BITS) == 0
        if np.count_nonzero(added) == len(rows):
            odd = self._write(places, rows, hashes)
        else:
            plain = added.nonzero()[0]
            odd = plain[self._write(places[plain], rows[plain], hashes[plain])]
            rest = (~added).nonzero()[0]
            new = (self.find(hashes[rest]) < 0) & ~self.has(rows[rest])
            odd = np.concatenate((odd, rest[new]))
        if len(odd):
            added[odd] = self._add_odd(rows[odd], hashes[odd])
            where = rows[added]
        elif np.count_nonzero(added) < len(rows):
            where = rows[added]
        self.witness[where] = witness
        return added

    def remove(self, rows: Ints) -> Hashes:
        """Forget rows that have a key; their hashes."""
        places = self._place[rows]
        hashes = self._flat[places]
        self._flat[places] = 0
        self._place[rows] = -1
        self.witness[rows] = -1
        usual = self._usual(hashes)
        if np.count_nonzero(astray := usual != places):
            np.subtract.at(self._astray, usual[astray] >> _WIDTH_BITS, 1)
        return hashes

    def _add_odd(self, rows: Ints, hashes: Hashes) -> Bools:
        """Add what cannot simply be written to its usual place: there if it is empty by
        now, else anywhere in the first bucket, else in the second one."""
        usual = self._usual(hashes)
        left = np.arange(len(rows))
        empty = self._flat.take(usual) == 0
        lost = self._write(usual[empty], rows[empty], hashes[empty])
        left = np.concatenate((left[~empty], left[empty][lost]))
        first = self._add_to(self._first(hashes), rows, hashes, left)
        second = self._add_to(self._second(hashes), rows, hashes, first)
        moved = np.zeros(len(rows), np.bool_)
        moved[left] = True
        moved[second] = False
        np.add.at(self._astray, usual[moved] >> _WIDTH_BITS, 1)
        added = np.ones(len(rows), np.bool_)
        added[second] = False
        return added

    def _add_to(self, buckets: Ints, rows: Ints, hashes: Hashes, left: Ints) -> Ints:
        """Try one bucket for each that is left, in any of its places; those that found it
        full."""
        full: list[Ints] = []
        while len(left):
            empty = self._keys.take(buckets[left], axis=0) == 0
            none = np.count_nonzero(empty, axis=1) == 0
            if np.count_nonzero(none):
                full.append(left[none])
                left, empty = left[~none], empty[~none]
            places = buckets[left] * WIDTH + empty.argmax(axis=1)
            left = left[self._write(places, rows[left], hashes[left])]
        return np.concatenate(full) if full else left

    def _write(self, places: Ints, rows: Ints, hashes: Hashes) -> Ints:
        """Write keys to empty places; positions of those that another one wrote over: of
        several that meet in one place the last one stays."""
        self._flat[places] = hashes
        self._rows[places] = rows
        self._place[rows] = places
        lost = (self._rows.take(places) != rows).nonzero()[0]
        if len(lost):
            self._place[rows[lost]] = -1
        return lost
