"""Index: from the hash of a prefix to the row that holds its last block.

Buckets of eight, two for every hash; a row whose two buckets are full is simply not
found. A hash is kept at its usual place, in its first bucket, unless that was taken; how
many are elsewhere is counted at their usual place, so that nearly every question is
answered by one look. All operations are on arrays of hashes.

    keys    [bucket · 8]  0 where nothing is
    rows    [bucket · 8]
    astray  [bucket · 8]  hashes whose usual place this is and that are elsewhere
    place   [row]         where the row's key is, -1 without one
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvstow.blocks.prompt import Hashes
from kvstow.blocks.runs import span_of_any
from kvstow.plan.view import Ints

_WIDTH_BITS = 3
WIDTH = 1 << _WIDTH_BITS
_WIDTH = np.uint64(_WIDTH_BITS)
_TOP = np.uint64(64 - _WIDTH_BITS)
_SECOND = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)
_COLUMNS = np.arange(WIDTH)

Bools = npt.NDArray[np.bool_]


class Index:
    """Rows of one group by the hash of what they end."""

    def __init__(self, num_rows: int) -> None:
        num_buckets = 1 << max(2, (num_rows // 2).bit_length())
        self._mask = np.uint64(num_buckets - 1)
        self._keys = np.zeros(num_buckets * WIDTH, np.uint64)
        self._rows = np.zeros(num_buckets * WIDTH, np.int64)
        self._astray = np.zeros(num_buckets * WIDTH, np.int32)
        self._num_spilled = 0
        self._place = np.full(num_rows, -1, np.int64)
        self.witness = np.full(num_rows, -1, np.int64)

    # ── questions ─────────────────────────────────────────────────────────────────

    def find(self, hashes: Hashes) -> Ints:
        """The row of each hash, -1 where there is none."""
        places = self._usual(hashes)
        rows = self._rows.take(places)
        other = self._keys.take(places) != hashes
        if np.count_nonzero(other):
            rows[other] = -1
            other &= self._astray.take(places) > 0
            if np.count_nonzero(other):
                rows[other] = self._search(hashes[other])
        return rows

    def has(self, rows: Ints) -> Bools:
        """Which rows have a key."""
        return self._place[rows] >= 0

    def _search(self, hashes: Hashes) -> Ints:
        """The row of each hash, in whichever place of its two buckets."""
        rows = np.full(len(hashes), -1, np.int64)
        for bucket in self._buckets(hashes):
            found = (self._keys.take(bucket) == hashes[:, None]).nonzero()
            rows[found[0]] = self._rows.take(bucket[found])
        return rows

    def _buckets(self, hashes: Hashes) -> Iterator[Ints]:
        """All places of the first bucket of each hash, the usual one first; then those of
        the second, where there is any hash in its second bucket."""
        yield _around(self._usual(hashes))
        if self._num_spilled:
            yield _around(self._second(hashes))

    def _usual(self, hashes: Hashes) -> Ints:
        """The place in the first bucket where a hash is, unless that was taken."""
        return (((hashes & self._mask) << _WIDTH) | (hashes >> _TOP)).view(np.int64)

    def _second(self, hashes: Hashes) -> Ints:
        """A place in the second bucket."""
        bucket = ((hashes * _SECOND) >> _HALF) & self._mask
        return ((bucket << _WIDTH) | (hashes >> _TOP)).view(np.int64)

    # ── changes ───────────────────────────────────────────────────────────────────

    def add(self, rows: Ints, hashes: Hashes, witness: int) -> Bools:
        """Make rows that have no key known by hashes that are not known; which of them
        were such, and found room."""
        places = self._usual(hashes)
        there = self._keys.take(places)
        new = (there != hashes) & (self._place[span_of_any(rows)] < 0)
        astray = new & (self._astray.take(places) > 0)
        if np.count_nonzero(astray):
            new[astray] = self._search(hashes[astray]) < 0
        plain = new & (there == 0)
        num_new, num_plain = np.count_nonzero(new), np.count_nonzero(plain)
        if num_plain == len(rows):
            odd = self._write(places, rows, hashes)
        else:
            which = plain.nonzero()[0]
            odd = which[self._write(places[which], rows[which], hashes[which])]
        if num_plain < num_new:
            odd = np.concatenate((odd, (new & ~plain).nonzero()[0]))
        if len(odd):
            new[odd] = self._add_odd(places[odd], rows[odd], hashes[odd])
            num_new = np.count_nonzero(new)
        self.witness[rows if num_new == len(rows) else rows[new]] = witness
        return new

    def remove(self, rows: Ints) -> Hashes:
        """Forget rows that have a key; their hashes."""
        places = self._place[rows]
        hashes = self._keys[places]
        self._keys[places] = 0
        self._place[rows] = -1
        self.witness[rows] = -1
        usual = self._usual(hashes)
        if np.count_nonzero(astray := usual != places):
            self._stray(usual[astray], places[astray], -1)
        return hashes

    def _add_odd(self, usual: Ints, rows: Ints, hashes: Hashes) -> Bools:
        """Add what finds its usual place taken: elsewhere in its first bucket, or in the
        second one."""
        added = np.ones(len(rows), np.bool_)
        left = self._add_to(_around(usual), rows, hashes)
        if len(left):
            second = _around(self._second(hashes[left]))
            left = left[self._add_to(second, rows[left], hashes[left])]
            added[left] = False
            usual, rows = usual[added], rows[added]
        self._stray(usual, self._place[rows], 1)
        return added

    def _add_to(self, places: Ints, rows: Ints, hashes: Hashes) -> Ints:
        """Write each to the first of its places that is empty; positions of those that
        found none."""
        empty = (self._keys.take(places) == 0).argmax(axis=1)
        chosen = places[np.arange(len(places)), empty]
        taken = self._keys.take(chosen) != 0
        if np.count_nonzero(taken):
            room = (~taken).nonzero()[0]
            left = room[self._write(chosen[room], rows[room], hashes[room])]
        else:
            room, left = None, self._write(chosen, rows, hashes)
        if len(left):
            left = left[self._add_to(places[left], rows[left], hashes[left])]
        return left if room is None else np.concatenate((taken.nonzero()[0], left))

    def _stray(self, usual: Ints, places: Ints, sign: int) -> None:
        """Count hashes that are, or are no longer, elsewhere than usual."""
        np.add.at(self._astray, usual, sign)
        spilled = np.count_nonzero((usual ^ places) >> _WIDTH_BITS)
        self._num_spilled += sign * int(spilled)

    def _write(self, places: Ints, rows: Ints, hashes: Hashes) -> Ints:
        """Write keys to empty places; positions of those that another one wrote over: of
        several that meet in one place the last one stays."""
        self._keys[places] = hashes
        self._rows[places] = rows
        self._place[rows] = places
        lost = (self._rows.take(places) != rows).nonzero()[0]
        if len(lost):
            self._place[rows[lost]] = -1
        return lost


def _around(places: Ints) -> Ints:
    """All places of the bucket of each place, in a line that begins with it."""
    column = places[:, None]
    return (column & ~(WIDTH - 1)) | ((column + _COLUMNS) & (WIDTH - 1))
