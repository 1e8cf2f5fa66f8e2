"""Prefixes: which rows hold the beginning of a prompt, by group, and for how long a hit.

A hit of `n` tokens needs, of every group, what a token at `n` will see:

    full      all blocks before n
    window    the blocks of the last window before n       sink: and those of the sink
    chunk     the blocks of n's chunk before n
    state     a checkpoint at exactly n
    encoder   nothing: its rows are written anew
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstow.blocks.events import Events
from kvstow.blocks.index import Index
from kvstow.blocks.prompt import Hashes, Prompt
from kvstow.blocks.table import first_seen, sink_blocks
from kvstow.blocks.witness import Witness
from kvstow.plan.group import Group
from kvstow.plan.retention import Encoder, Full, State
from kvstow.plan.view import Ints

Bools = npt.NDArray[np.bool_]


class Shared(NamedTuple):
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
class Hit:
    """The first `num_tokens` tokens of a prompt are in these blocks, by group."""

    num_tokens: int
    blocks: Mapping[int, Shared]
    witness: Witness | None


MISS = Hit(0, {}, None)

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


class Prefixes:
    """What every group has cached, by hash, with witnesses to confirm it."""

    def __init__(self, groups: Sequence[Group], num_rows: Sequence[int]) -> None:
        self.events = Events()
        self._groups = tuple(groups)
        tokenwise = [
            g for g, group in enumerate(groups) if not isinstance(group.retention, Encoder)
        ]
        self._full = [g for g in tokenwise if isinstance(groups[g].retention, Full)]
        self._others = [g for g in tokenwise if g not in self._full]
        self._step = [group.block_tokens for group in groups]
        self._index = {g: Index(num_rows[g]) for g in tokenwise}
        self._unit = lcm(*(groups[g].block_tokens for g in tokenwise))
        self._witnesses: dict[int, Witness] = {}
        self._num_rows: dict[int, int] = {}  # one more while the prompt's request lives
        self._next = 0

    # ── questions ─────────────────────────────────────────────────────────────────

    def hit(self, prompt: Prompt) -> Hit:
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
        blocks = {g: Shared(rows[: limit // self._step[g]], 0, 0) for g, rows in found.items()}
        for g in self._others:
            shared = self._seen(g, prompt, limit)
            if shared is None:
                return self._shorter(prompt, found, limit)
            blocks[g] = shared
        if self._liars(prompt, blocks):
            return self._shorter(prompt, found, limit)
        return Hit(limit, blocks, self._deepest(blocks))

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

    def _seen(self, g: int, prompt: Prompt, num_tokens: int) -> Shared | None:
        """The rows of all that a token at `num_tokens` sees, if all of them are there."""
        sinks, first = seen_from(self._groups[g], num_tokens)
        hashes = prompt.hashes(self._step[g])
        tail = hashes[first : num_tokens // self._step[g]]
        rows = self._index[g].find(np.concatenate((hashes[:sinks], tail)) if sinks else tail)
        return Shared(rows, sinks, first) if len(rows) == 0 or rows[rows.argmin()] >= 0 else None

    def _shorter(self, prompt: Prompt, found: dict[int, Ints], limit: int) -> Hit:
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
                return Hit(num_tokens, blocks, self._deepest(blocks))
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

    def _shared(self, g: int, rows: Ints, num_tokens: int) -> Shared:
        sinks, first = seen_from(self._groups[g], num_tokens)
        tail = rows[first : num_tokens // self._step[g]]
        return Shared(np.concatenate((rows[:sinks], tail)) if sinks else tail, sinks, first)

    def _liars(self, prompt: Prompt, blocks: Mapping[int, Shared]) -> set[int]:
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

    def _deepest(self, blocks: Mapping[int, Shared]) -> Witness | None:
        for g, part in blocks.items():
            if len(part.ids):
                return self._witnesses[int(self._index[g].witness[part.ids[-1]])]
        return None

    def known(self, g: int, hashes: Hashes) -> Bools:
        """Which hashes the group has a row for."""
        return self._index[g].find(hashes) >= 0

    # ── changes ───────────────────────────────────────────────────────────────────

    def testify(self, prompt: Prompt, parent: Witness | None, start: int) -> int:
        """Make a witness of a prompt, to be named when its rows are stored."""
        number, self._next = self._next, self._next + 1
        self._witnesses[number] = Witness.of(prompt, parent, start)
        self._num_rows[number] = 1
        return number

    def witness(self, number: int) -> Witness:
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
