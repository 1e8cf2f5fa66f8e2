"""Moves that go on from pair to pair.

Which lanes of a pair continue its neighbours' lanes, and which are continued, are sets of
lanes. A move starts with a lane that continues none, and ends with one that is not continued:

    pairs         a       b       c
    lane        ┃ ·─·─· ┃ ·─·─· ┃ ·─·   ┃
    continues             yes     yes            not a move of b, nor of c
    continued     yes     yes                    it ends in c
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np

from kvstow.plan.view import Ints
from kvstow.route.lanes import Flags, Lanes
from kvstow.route.meeting import Pairs
from kvstow.route.seams import Seams


class Sets:
    """Sets of lanes of one kind as numbers: 0 is none, then those of joints, then unions."""

    def __init__(self, joints: Iterable[tuple[int, Flags]]) -> None:
        self._found: list[tuple[int, Flags]] = [(0, np.empty(0, np.bool_)), *joints]
        self._unions: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._found)

    @overload
    def __getitem__(self, which: int) -> tuple[int, Flags]: ...
    @overload
    def __getitem__(self, which: slice) -> list[tuple[int, Flags]]: ...
    def __getitem__(self, which: int | slice) -> object:
        """The kind that a set is of, and which of its lanes are in it."""
        return self._found[which]

    def add(self, sets: Ints, joints: Ints) -> None:
        """Adds the lanes of a joint to each of the sets."""
        both = np.flatnonzero(sets)
        both = both[joints[both] > 0]
        unions = [*map(self._union, sets[both].tolist(), joints[both].tolist())]
        sets += joints
        sets[both] = unions

    def _union(self, one: int, other: int) -> int:
        if (one, other) not in self._unions:
            (kind, flags), (_, more) = self[one], self[other]
            self._unions[one, other] = len(self)
            self._found.append((kind, flags | more))
        return self._unions[one, other]


class _Tips(NamedTuple):
    """Of pairs with the same sets, the lanes with which moves that go on start, the place of
    each among the pair's moves, and the lanes with which they end."""

    lanes: Lanes
    first: Ints
    inside: Ints
    last: Ints


class Joined:
    """Of pairs, the sets of lanes that continue a neighbour's and that are continued; and
    the moves that these are."""

    def __init__(self, kinds: Sequence[Lanes], seams: Seams) -> None:
        self.continuing = Sets((joint.kinds[1], joint.after) for joint in seams.joints)
        self._continued = Sets((joint.kinds[0], joint.before) for joint in seams.joints)
        self._kinds, self._seams = kinds, seams
        self._starts: list[tuple[Ints, Ints]] = []
        self._ends: list[Ints] = []
        self._known: dict[tuple[int, int], _Tips] = {}

    def of(self, pairs: Pairs, own: slice) -> Iterator[tuple[Pairs, tuple[Ints, Ints] | None]]:
        """A lot's own pairs in up to three parts, with both sets of every pair; without them
        where they are all empty."""
        found = [*self._neighbours(pairs)]
        if not found:
            yield pairs.some(own), None
            return
        continuing, continued = np.zeros((2, len(pairs)), np.int64)
        for before, after, joints in found:
            self._continued.add(continued[before], joints)
            self.continuing.add(continuing[after], joints)
        first = min(own.stop, *(max(part.start, own.start) for near in found for part in near[:2]))
        end = max(first, *(min(part.stop, own.stop) for near in found for part in near[:2]))
        some = slice(first, end)
        yield pairs.some(slice(own.start, first)), None
        yield pairs.some(some), (continuing[some], continued[some])
        yield pairs.some(slice(end, own.stop)), None

    def _neighbours(self, pairs: Pairs) -> Iterator[tuple[slice, slice, Ints]]:
        """Pairs, those so far from them, and the joint of each two, or 0."""
        for apart in range(1, min(self._seams.reach, len(pairs) - 1) + 1):
            s_step = pairs.source[apart:] - pairs.source[:-apart]
            d_step = pairs.destination[apart:] - pairs.destination[:-apart]
            # 1 where each step is 0 or 1: for no two pairs are both 0.
            ahead = (s_step | d_step) == 1
            for here in _hull(ahead):
                there = slice(here.start + apart, here.stop + apart)
                steps = (2 * s_step[here] + d_step[here]) * ahead[here]
                yield here, there, self._joints(pairs, here, there, steps)
            if 2 * apart > self._seams.reach:
                continue
            back = (s_step == -1) & (d_step == 0)
            for here in _hull(back):
                there = slice(here.start + apart, here.stop + apart)
                yield there, here, self._joints(pairs, there, here, 2 * back[here])

    def _joints(self, pairs: Pairs, before: slice, after: slice, steps: Ints) -> Ints:
        code = steps * len(self._kinds)
        code += pairs.kind[before]
        code *= len(self._kinds)
        code += pairs.kind[after]
        return self._seams.table.take(code)

    def note(
        self, pairs: Pairs, continuing: Ints, continued: Ints, places: Callable[[], Ints]
    ) -> None:
        """Remembers where moves of some pairs start and end; `places` are those of the first
        move of each pair."""
        some = np.flatnonzero(continuing | continued)
        code = continuing[some] * len(self._continued) + continued[some]
        for number in np.flatnonzero(np.bincount(code)).tolist():
            tips = self._tips(*divmod(number, len(self._continued)))
            if not len(tips.first) and not len(tips.last):
                continue
            rows = some[code == number]
            blocks, lanes = pairs.destination[rows], tips.lanes
            if len(tips.first):
                starts = _placed(lanes, tips.first, lanes.pieces.destination, blocks)
                before = places()[rows]
                self._starts.append((starts, np.add.outer(tips.inside, before).ravel()))
            if len(tips.last):
                ends = lanes.pieces.destination + lanes.pieces.nbytes
                self._ends.append(_placed(lanes, tips.last, ends, blocks))

    def _tips(self, continuing: int, continued: int) -> "_Tips":
        """Where moves start and end in pairs with such sets."""
        if (continuing, continued) not in self._known:
            kind = (self.continuing[continuing] if continuing else self._continued[continued])[0]
            none = np.zeros(len(self._kinds[kind]), np.bool_)
            after = self.continuing[continuing][1] if continuing else none
            before = self._continued[continued][1] if continued else none
            first, last = np.flatnonzero(before & ~after), np.flatnonzero(after & ~before)
            inside = np.cumsum(~after)[first] - 1
            self._known[continuing, continued] = _Tips(self._kinds[kind], first, inside, last)
        return self._known[continuing, continued]

    def lengthen(self, nbytes: Ints) -> None:
        """Writes how long the moves are that go on. No two moves meet in the destination, so
        the first of them to start is the first to end."""
        if not self._starts:
            return
        starts, places = map(np.concatenate, zip(*self._starts, strict=True))
        order = np.argsort(starts, kind="stable")
        ends = np.sort(np.concatenate(self._ends), kind="stable")
        nbytes[places[order]] = ends - starts[order]


def _hull(flags: Flags) -> Iterator[slice]:
    """From the first that is set to the last, if any is."""
    if np.count_nonzero(flags):
        yield slice(int(flags.argmax()), len(flags) - int(flags[::-1].argmax()))


def _placed(lanes: Lanes, which: Ints, offsets: Ints, blocks: Ints) -> Ints:
    """Destination offsets of some lanes in some blocks, by lane and block."""
    found = np.multiply.outer(lanes.destination_stride[which], blocks)
    found += offsets[which][:, None]
    return found.ravel()
