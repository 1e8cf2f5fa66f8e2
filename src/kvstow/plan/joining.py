"""Moves of pairs that lie next to each other, made one where they follow on both sides.

Neighbours of one kind have been run together already; what is left are lanes that another
lane continues, and pairs of another kind or of the same block.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvstow.plan.blocklist import Ints
from kvstow.plan.lanes import Flags, Lanes, merged
from kvstow.plan.pairing import Pairs
from kvstow.plan.territory import Pieces

AT_ONCE = 1 << 14
"""Pairs whose neighbours are looked for together: few enough for a cache."""


class Links(NamedTuple):
    """Pair `after[i]` has the block of pair `before[i]` on one side and the next one on the
    other, or the next one on both. `straight[i]`: on both, it is the pair after `before[i]`,
    and of the same kind."""

    before: Ints
    after: Ints
    straight: Flags

    def some(self, which: Flags) -> "Links":
        return Links(self.before[which], self.after[which], self.straight[which])


def links(pairs: Pairs, kinds: Sequence[Lanes]) -> Links:
    """All pairs next to each other, if any two lanes can be one; those of a destination block
    and the next lie together."""
    found: list[tuple[Ints, Ints]] = []
    ends, starts = (any(lanes.any_ends_open for lanes in kinds),
                    any(lanes.any_starts_open for lanes in kinds))  # fmt: skip
    if ends and starts:
        for start in range(0, len(pairs), AT_ONCE):
            for apart in range(1, 2 * pairs.most):
                found += _neighbours(pairs, start, apart)
    if not found:
        none = np.empty(0, np.int64)
        return Links(none, none, np.empty(0, np.bool_))
    here, there = map(np.concatenate, zip(*found, strict=True))
    straight = (pairs.source[here] != pairs.source[there]) & (there - here == 1)
    straight &= pairs.destination[here] != pairs.destination[there]
    straight &= pairs.kind[here] == pairs.kind[there]
    return Links(here, there, straight)


def _neighbours(pairs: Pairs, start: int, apart: int) -> Iterator[tuple[Ints, Ints]]:
    """From the pair `start` on, pairs so far apart in the list that one of them has the block
    of the other and the next one, or the next ones."""
    end = start + AT_ONCE
    step = pairs.source[start + apart : end + apart]
    step = step - pairs.source[start : start + len(step)]
    other = pairs.destination[start + apart : end + apart]
    other = other - pairs.destination[start : start + len(other)]
    if apart < pairs.most:
        back = np.flatnonzero((step == -1) & (other == 0))
        if len(back):
            yield back + start + apart, back + start
    other |= step  # 1 where each is 0 or 1: for no two pairs are both 0
    ahead = np.flatnonzero(other == 1)
    if len(ahead):
        yield ahead + start, ahead + start + apart


class _Near(NamedTuple):
    """Whether there is a pair that each pair might continue, and one that might continue it."""

    before: Flags
    after: Flags


class _Open(NamedTuple):
    """Moves that might be joined with a neighbour's: their places, by lane and pair, and
    which lane each is."""

    places: Ints
    lane: Ints
    lanes: Lanes


def joined(
    moves: Pieces,
    pairs: Pairs,
    kinds: Sequence[Lanes],
    near: Links,
    continues: Flags,
    starts: Ints,
) -> Pieces:
    """The moves with those of different neighbouring pairs joined where they follow.

    The moves of pair `i` start at `starts[i]`; one that `continues` has none for the lanes
    that repeat.
    """
    found = list(_candidates(pairs, kinds, near, continues, starts))
    if sum(len(part.places) for part in found) < 2:
        return moves
    at = np.concatenate([part.places for part in found])
    # Each part's places ascend almost everywhere: merging them beats sorting them.
    order = np.argsort(moves.destination[at], kind="stable")
    at = at[order]
    chosen = Pieces(*(column[at] for column in moves))
    step = chosen.source[1:] - chosen.source[:-1]
    likely = np.flatnonzero(
        (step == chosen.destination[1:] - chosen.destination[:-1]) & (step >= chosen.nbytes[:-1])
    )
    if not len(likely):
        return moves
    continued = np.zeros(len(step), np.bool_)
    continued[likely] = _fits(found, order, likely, step[likely] - chosen.nbytes[likely])
    whole, first, _ = merged(chosen, continued)
    moves.nbytes[at[first]] = whole.nbytes
    return _without(moves, np.sort(at[1:][continued]))


def _candidates(
    pairs: Pairs, kinds: Sequence[Lanes], near: Links, continues: Flags, starts: Ints
) -> Iterator[_Open]:
    """Moves that might continue a neighbour's or be continued.

    A lane that repeats starts with the first pair of its run and ends with the last; it is
    a move of the first.
    """
    heads = np.flatnonzero(~continues)
    tails = near.before[~np.append(continues[1:], False)[near.before]]
    of_runs = _Near(
        _flags(len(pairs), near.after[~continues[near.after]]),
        _flags(len(pairs), heads[np.searchsorted(heads, tails, "right") - 1]),
    )
    of_pairs = _Near(_flags(len(pairs), near.after), _flags(len(pairs), near.before))
    run = np.flatnonzero(of_runs.before | of_runs.after)
    rows = np.flatnonzero(of_pairs.before | of_pairs.after)
    first, other = rows[~continues[rows]], rows[continues[rows]]
    for k, lanes in enumerate(kinds):
        repeats, single = np.flatnonzero(lanes.repeats), np.flatnonzero(~lanes.repeats)
        for which, lane, place, beside in (
            (run, repeats, repeats, of_runs),
            (first, single, single, of_pairs),
            (other, single, np.arange(len(single)), of_pairs),
        ):
            mine = which[pairs.kind[which] == k]
            if len(mine) and len(lane):
                yield _open(lanes, lane, place, starts[mine], _Near(*(x[mine] for x in beside)))


def _flags(count: int, which: Ints) -> Flags:
    found = np.zeros(count, np.bool_)
    found[which] = True
    return found


def _open(lanes: Lanes, lane: Ints, place: Ints, starts: Ints, near: _Near) -> _Open:
    """Those of some lanes that are open towards a pair that is there."""
    wanted = np.logical_and.outer(lanes.starts_open[lane], near.before)
    wanted |= np.logical_and.outer(lanes.ends_open[lane], near.after)
    i, j = np.nonzero(wanted)
    return _Open(starts[j] + place[i], lane[i], lanes)


def _fits(found: list[_Open], order: Ints, which: Ints, gap: Ints) -> Flags:
    """Whether the gaps after some of the candidates are free on both sides."""
    ends = np.cumsum([len(part.places) for part in found])
    before, after = order[which], order[which + 1]

    def room(candidates: Ints, number: int) -> Ints:
        lot = np.searchsorted(ends, candidates, "right")
        free = np.empty(len(candidates), np.int64)
        for k, (places, lane, lanes) in enumerate(found):
            mine = np.flatnonzero(lot == k)
            inside = candidates[mine] - (ends[k] - len(places))
            free[mine] = lanes.room[number][lane[inside]]
        return free

    source_room = room(before, 0) + room(after, 2)
    destination_room = room(before, 1) + room(after, 3)
    return gap <= np.minimum(source_room, destination_room)


def _without(moves: Pieces, gone: Ints) -> Pieces:
    """The moves but for some, given in ascending order."""
    if len(gone) * 64 > len(moves.nbytes):
        keep = np.ones(len(moves.nbytes), np.bool_)
        keep[gone] = False
        return Pieces(*(column[keep] for column in moves))
    return Pieces(*(
        np.concatenate([part[1:] if i else part for i, part in enumerate(np.split(column, gone))])
        for column in moves
    ))  # fmt: skip
