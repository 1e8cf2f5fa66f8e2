"""Copies: so many bytes from here to there. Three arrays, no Python object per copy.

The one type for what is to be copied, wherever that is: between two arenas of one machine,
between a row and a file, between two machines.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from kvstow.plan.retention import Bools
from kvstow.plan.view import Ints, ceil_div

Side = Literal["source", "destination"]


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """`nbytes[i]` bytes from `source[i]` to `destination[i]`; the arrays are equally long.

    Places are byte offsets from the start of either side's arena, or addresses: whoever
    makes the copies says which.
    """

    source: Ints
    destination: Ints
    nbytes: Ints

    @staticmethod
    def none() -> "Copies":
        """Nothing to copy."""
        return Copies(*np.empty((3, 0), np.int64))

    @staticmethod
    def one(source: int, destination: int, nbytes: int) -> "Copies":
        """A single copy."""
        return Copies(*np.array([[source], [destination], [nbytes]], np.int64))

    @staticmethod
    def joined(parts: "Sequence[Copies]") -> "Copies":
        """The copies of all parts, one part after the other."""
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return Copies.none()
        return Copies(
            np.concatenate([part.source for part in parts]),
            np.concatenate([part.destination for part in parts]),
            np.concatenate([part.nbytes for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total(self) -> int:
        """Bytes of all copies."""
        return int(np.add.reduce(self.nbytes))

    def part(self, start: int, stop: int) -> "Copies":
        """Copies `[start, stop)`, as views."""
        return self.take(slice(start, stop))

    def take(self, which: slice | Ints | Bools) -> "Copies":
        """Some of the copies, in that order."""
        return Copies(self.source[which], self.destination[which], self.nbytes[which])

    def moved(self, source: int, destination: int) -> "Copies":
        """The same with so many bytes added to either side's places."""
        return Copies(self.source + source, self.destination + destination, self.nbytes)

    def reversed(self) -> "Copies":
        """The same in the other direction."""
        return Copies(self.destination, self.source, self.nbytes)

    def ascending(self, *, by: Side = "destination") -> "Copies":
        """The copies sorted by one side's places, unless they ascend already."""
        places = self.source if by == "source" else self.destination
        if (places[1:] < places[:-1]).any():
            return self.take(np.argsort(places, kind="stable"))
        return self

    def merged(self, *, by: Side = "destination") -> "Copies":
        """The same copies in the fewest pieces: neighbours on both sides become one.

        Sorted by one side's places, unless they ascend already.
        """
        if len(self) < 2:
            return self
        copies = self.ascending(by=by)
        apart = copies.source[1:] - copies.source[:-1] != copies.nbytes[:-1]
        apart |= copies.destination[1:] - copies.destination[:-1] != copies.nbytes[:-1]
        if apart.all():
            return copies
        first = np.concatenate(([0], np.flatnonzero(apart) + 1))
        nbytes = np.add.reduceat(copies.nbytes, first)
        return Copies(copies.source[first], copies.destination[first], nbytes)


def cut(copies: Copies, most: int) -> Copies:
    """The same copies in pieces of at most `most` bytes each."""
    if not (copies.nbytes > most).any():
        return copies
    counts = ceil_div(copies.nbytes, most)
    whole = copies.take(np.repeat(np.arange(len(counts)), counts))
    number = np.arange(len(whole)) - np.repeat(counts.cumsum() - counts, counts)
    start = number * most
    nbytes = np.minimum(whole.nbytes - start, most)
    return Copies(whole.source + start, whole.destination + start, nbytes)


def chunks(copies: Copies, nbytes: int) -> list[Copies]:
    """The copies in lots of about equal size, none of them empty.

    A lot has at most `nbytes` where copies are much shorter, at most twice as many
    otherwise. Longer copies are cut.
    """
    total = copies.total
    if not total:
        return []
    if total <= nbytes:
        return [copies]
    even = ceil_div(total, ceil_div(total, nbytes))
    copies = cut(copies, even)
    number = (copies.nbytes.cumsum() - copies.nbytes) // even
    ends = (np.flatnonzero(number[1:] != number[:-1]) + 1).tolist()
    return [copies.part(lo, hi) for lo, hi in pairwise([0, *ends, len(copies)]) if lo < hi]
