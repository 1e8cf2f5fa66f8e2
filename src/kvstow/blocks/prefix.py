"""PrefixCache: which rows hold the beginning of a prompt, by group, and for how long a hit.

A hit of `n` tokens needs, of every group, what a token at `n` will see:

    full      all blocks before n
    window    the blocks of the last window before n       sink: and those of the sink
    chunk     the blocks of n's chunk before n
    state     a checkpoint at exactly n
    encoder   nothing: its rows are written anew
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

import numpy as np

from kvstow.blocks.events import BlockEvents
from kvstow.blocks.prompt import Extra, Hashes, Prompt, Tokens
from kvstow.blocks.runs import Bools, span_of_any
from kvstow.blocks.table import first_seen, sink_blocks
from kvstow.plan.group import Group
from kvstow.plan.retention import Encoder, Full, State
from kvstow.plan.view import Ints

MAX_DEPTH = 8
"""A longer line of witnesses is written out, so that confirming stays a few comparisons."""


@dataclass(frozen=True, slots=True, eq=False)
class SourceTokens:
    """`tokens` from `start` on; what comes before is the parent's."""

    parent: "SourceTokens | None"
    start: int
    tokens: Tokens
    salt: bytes
    extra: Extra
    depth: int

    @staticmethod
    def of(prompt: Prompt, parent: "SourceTokens | None" = None, start: int = 0) -> "SourceTokens":
        """A witness of the prompt, the first `start` tokens of which the parent confirms."""
        if parent is None or parent.depth >= MAX_DEPTH:
            parent, start = None, 0
        depth = 0 if parent is None else parent.depth + 1
        tokens = prompt.tokens[start:].copy() if start else prompt.tokens
        return SourceTokens(parent, start, tokens, prompt.salt, prompt.extra, depth)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def confirms(self, prompt: Prompt, num_tokens: int) -> bool:
        """Whether the first `num_tokens` tokens of the prompt, and all else that their
        content depends on, are what it says."""
        if self.end < num_tokens or len(prompt) < num_tokens or self.salt != prompt.salt:
            return False
        if (self.extra or prompt.extra) and (
            [i for i in self.extra if i[0] < num_tokens]
            != [i for i in prompt.extra if i[0] < num_tokens]
        ):
            return False
        witness, upto = self, num_tokens
        while True:
            lo = witness.start
            if lo < upto:
                if np.count_nonzero(witness.tokens[: upto - lo] != prompt.tokens[lo:upto]):
                    return False
                upto = lo
            if witness.parent is None:
                return True
            witness = witness.parent


_WIDTH_BITS = 3
WIDTH = 1 << _WIDTH_BITS
_WIDTH = np.uint64(_WIDTH_BITS)
_TOP = np.uint64(64 - _WIDTH_BITS)
_SECOND = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)
_COLUMNS = np.arange(WIDTH)


class PrefixIndex:
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


class SharedBlocks(NamedTuple):
    """Rows of blocks `[0, num_sinks)` and of those from `first` on."""

    ids: Ints
    num_sinks: int
    first: int

    @property
    def logical(self) -> Ints:
        """Which blocks they are."""
        tail = np.arange(self.first, self.first + len(self.ids) - self.num_sinks)
        return np.concatenate((np.arange(self.num_sinks), tail)) if self.num_sinks else tail


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The first `num_tokens` tokens of a prompt are in these blocks, by group."""

    num_tokens: int
    blocks: Mapping[int, SharedBlocks]
    witness: SourceTokens | None


MISS = PrefixHit(0, {}, None)

MANY = 1 << 10
"""Blocks of full attention that are looked for at once, since prompts differ somewhere."""


def seen_from(group: Group, num_tokens: int) -> tuple[int, int]:
    """Of the blocks before `num_tokens`, a whole number of them, a token there sees the
    first so many, and those from there on; of a recurrent group the checkpoint."""
    end = num_tokens // group.block_tokens
    if isinstance(group.retention, State):
        return 0, max(0, end - 1)
    first = first_seen(group.retention, num_tokens, group.block_tokens)
    return min(sink_blocks(group.retention, group.block_tokens), first), first


def blocks_seen(group: Group, num_tokens: int) -> Ints:
    """The logical blocks of `seen_from`."""
    sinks, first = seen_from(group, num_tokens)
    tail = np.arange(first, num_tokens // group.block_tokens)
    return np.concatenate((np.arange(sinks), tail)) if sinks else tail


def served(group: Group, present: Bools, lengths: Ints) -> Bools:
    """For each length, whether all that a hit of it needs is present, block by block."""
    end = lengths // group.block_tokens
    if isinstance(group.retention, State):
        before = np.concatenate((np.ones(1, np.bool_), present))
        return before[end]
    absent = np.zeros(len(present) + 1, np.int64)
    np.cumsum(~present, out=absent[1:])
    first = first_seen(group.retention, lengths, group.block_tokens)
    found = absent[end] == absent[np.minimum(first, end)]
    sinks = sink_blocks(group.retention, group.block_tokens)
    return found & (absent[np.minimum(sinks, end)] == 0) if sinks else found


class PrefixCache:
    """What every group has cached, by hash, with witnesses to confirm it."""

    def __init__(self, groups: Sequence[Group], num_rows: Sequence[int]) -> None:
        self.events = BlockEvents()
        self._groups = tuple(groups)
        tokenwise = [
            g for g, group in enumerate(groups) if not isinstance(group.retention, Encoder)
        ]
        self._full = [g for g in tokenwise if isinstance(groups[g].retention, Full)]
        self._others = [g for g in tokenwise if g not in self._full]
        self._step = [group.block_tokens for group in groups]
        self._index = {g: PrefixIndex(num_rows[g]) for g in tokenwise}
        self._unit = lcm(*(groups[g].block_tokens for g in tokenwise))
        self._witnesses: dict[int, SourceTokens] = {}
        self._num_rows: dict[int, int] = {}  # one more while the prompt's request lives
        self._next = 0

    # ── questions ─────────────────────────────────────────────────────────────────

    def hit(self, prompt: Prompt) -> PrefixHit:
        """The longest beginning of the prompt, short of all of it, that every group can
        serve; confirmed token by token."""
        limit = (len(prompt) - 1) // self._unit * self._unit
        found: dict[int, Ints] = {}
        for g in self._full:
            if limit > 0:
                found[g] = self._leading(g, prompt, limit)
                limit = min(limit, len(found[g]) * self._step[g] // self._unit * self._unit)
        if limit <= 0 or not self._index:
            return MISS
        blocks = {
            g: SharedBlocks(rows[: limit // self._step[g]], 0, 0) for g, rows in found.items()
        }
        for g in self._others:
            shared = self._seen(g, prompt, limit)
            if shared is None:
                return self._shorter(prompt, found, limit)
            blocks[g] = shared
        if self._liars(prompt, blocks):
            return self._shorter(prompt, found, limit)
        return PrefixHit(limit, blocks, self._deepest(blocks))

    def _leading(self, g: int, prompt: Prompt, limit: int) -> Ints:
        """The rows of the prompt's blocks before `limit`, up to the first that is not there."""
        hashes = prompt.hashes(self._step[g])[: limit // self._step[g]]
        parts: list[Ints] = []
        for start in range(0, len(hashes), MANY):
            rows = self._index[g].find(hashes[start : start + MANY])
            least = rows.argmin()
            absent = rows[least] < 0
            parts.append(rows[:least] if absent else rows)
            if absent:
                break
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _seen(self, g: int, prompt: Prompt, num_tokens: int) -> SharedBlocks | None:
        """The rows of all that a token at `num_tokens` sees, if all of them are there."""
        sinks, first = seen_from(self._groups[g], num_tokens)
        hashes = prompt.hashes(self._step[g])
        tail = hashes[first : num_tokens // self._step[g]]
        rows = self._index[g].find(np.concatenate((hashes[:sinks], tail)) if sinks else tail)
        return (
            SharedBlocks(rows, sinks, first) if len(rows) == 0 or rows[rows.argmin()] >= 0 else None
        )

    def _shorter(self, prompt: Prompt, found: dict[int, Ints], limit: int) -> PrefixHit:
        """The longest beginning up to `limit` tokens, where that one itself does not serve
        in all groups, or has somebody else's rows.

        Rows of a witness that says otherwise are none of ours, and the rest is tried.
        """
        for g in self._others:
            hashes = prompt.hashes(self._step[g])[: limit // self._step[g]]
            found[g] = self._index[g].find(hashes)
        lengths = np.arange(0, limit + 1, self._unit)
        while True:
            for g, rows in found.items():
                lengths = self._served(g, rows, lengths)
            num_tokens = int(lengths[-1])
            if num_tokens == 0:
                return MISS
            blocks = {g: self._shared(g, rows, num_tokens) for g, rows in found.items()}
            liars = self._liars(prompt, blocks)
            if not liars:
                return PrefixHit(num_tokens, blocks, self._deepest(blocks))
            for g, rows in found.items():
                rows[np.isin(self._index[g].witness[rows], list(liars))] = -1

    def _served(self, g: int, rows: Ints, lengths: Ints) -> Ints:
        """Those of the ascending lengths, 0 among them, that a group can serve."""
        group = self._groups[g]
        if not isinstance(group.retention, Full):
            return lengths[served(group, rows >= 0, lengths)]
        absent = (rows < 0).nonzero()[0]
        limit = (int(absent[0]) if len(absent) else len(rows)) * group.block_tokens
        return lengths[: int(np.searchsorted(lengths, limit, side="right"))]

    def _shared(self, g: int, rows: Ints, num_tokens: int) -> SharedBlocks:
        sinks, first = seen_from(self._groups[g], num_tokens)
        tail = rows[first : num_tokens // self._step[g]]
        return SharedBlocks(np.concatenate((rows[:sinks], tail)) if sinks else tail, sinks, first)

    def _liars(self, prompt: Prompt, blocks: Mapping[int, SharedBlocks]) -> set[int]:
        """Witnesses of the rows that do not say what the prompt says."""
        upto: dict[int, int] = {}
        for g, part in blocks.items():
            if not len(part.ids):
                continue
            numbers = self._index[g].witness[part.ids]
            step, start = self._step[g], part.first - part.num_sinks
            last = len(numbers) - 1
            if np.count_nonzero(numbers != numbers[last]):
                for i in (numbers[1:] != numbers[:-1]).nonzero()[0].tolist():
                    block = i if i < part.num_sinks else i + start
                    number = int(numbers[i])
                    upto[number] = max(upto.get(number, 0), (block + 1) * step)
            number = int(numbers[last])
            block = last if last < part.num_sinks else last + start
            upto[number] = max(upto.get(number, 0), (block + 1) * step)
        return {n for n, end in upto.items() if not self._witnesses[n].confirms(prompt, end)}

    def _deepest(self, blocks: Mapping[int, SharedBlocks]) -> SourceTokens | None:
        for g, part in blocks.items():
            if len(part.ids):
                return self._witnesses[int(self._index[g].witness[part.ids[-1]])]
        return None

    def known(self, g: int, hashes: Hashes) -> Bools:
        """Which hashes the group has a row for."""
        return self._index[g].find(hashes) >= 0

    # ── changes ───────────────────────────────────────────────────────────────────

    def testify(self, prompt: Prompt, parent: SourceTokens | None, start: int) -> int:
        """Make a witness of a prompt, to be named when its rows are stored."""
        number, self._next = self._next, self._next + 1
        self._witnesses[number] = SourceTokens.of(prompt, parent, start)
        self._num_rows[number] = 1
        return number

    def witness(self, number: int) -> SourceTokens:
        return self._witnesses[number]

    def dismiss(self, number: int) -> None:
        """The prompt's request is over; its witness stays as long as rows need it."""
        self._leave(number, 1)

    def store(self, g: int, rows: Ints, hashes: Hashes, number: int, *, parent: int) -> Ints:
        """Make rows known by hashes; those that are, by now, are known by this call."""
        added = self._index[g].add(rows, hashes, number)
        if np.count_nonzero(added) < len(rows):
            rows, hashes = rows[added], hashes[added]
        if not len(rows):
            return rows
        self._num_rows[number] += len(rows)
        self.events.stored(g, self._groups[g].block_tokens, hashes, rows, parent=parent)
        return rows

    def remove(self, g: int, rows: Ints) -> None:
        """Forget rows; those that are not known are passed over."""
        if g not in self._index:
            return
        index = self._index[g]
        rows = rows[index.has(rows)]
        if not len(rows):
            return
        numbers = index.witness[rows]
        hashes = index.remove(rows)
        self.events.removed(g, self._groups[g].block_tokens, hashes, rows)
        if not np.count_nonzero(numbers != numbers[0]):
            self._leave(int(numbers[0]), len(rows))
            return
        for number, count in zip(*np.unique(numbers, return_counts=True), strict=True):
            self._leave(int(number), int(count))

    def _leave(self, number: int, count: int) -> None:
        self._num_rows[number] -= count
        if self._num_rows[number] == 0:
            del self._num_rows[number], self._witnesses[number]
