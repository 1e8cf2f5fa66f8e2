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

import numpy as np
import numpy.typing as npt

from kvstow.blocks.events import Events
from kvstow.blocks.index import Index
from kvstow.blocks.prompt import Hashes, Prompt
from kvstow.blocks.table import first_seen, sink_blocks
from kvstow.blocks.witness import Witness
from kvstow.plan.blocklist import Blocks, Ints
from kvstow.plan.group import Group
from kvstow.plan.spec import Encoder, Full, State

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Hit:
    """The first `num_tokens` tokens of a prompt are in these blocks, by group."""

    num_tokens: int
    blocks: Mapping[int, Blocks]
    witness: Witness | None


MISS = Hit(0, {}, None)

FEW = 8
"""Blocks that are looked for before the others, since most prompts differ early or late."""


def blocks_seen(group: Group, num_tokens: int) -> Ints:
    """The logical blocks before `num_tokens`, a whole number of them, that a token there
    sees; of a recurrent group the checkpoint."""
    end = num_tokens // group.block_tokens
    if isinstance(group.retention, State):
        return np.arange(max(0, end - 1), end)
    at = np.array([num_tokens])
    first = int(first_seen(group.retention, at, group.block_tokens)[0])
    sinks = min(sink_blocks(group.retention, group.block_tokens), first)
    return np.concatenate((np.arange(sinks), np.arange(first, end))) if sinks else np.arange(
        first, end
    )  # fmt: skip


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
        self._order = sorted(tokenwise, key=lambda g: not isinstance(groups[g].retention, Full))
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
        if limit <= 0 or not self._order:
            return MISS
        found: dict[int, Ints] = {}
        lengths = np.arange(0, limit + 1, self._unit)
        for g in self._order:
            group = self._groups[g]
            hashes = prompt.hashes(group.block_tokens)[: limit // group.block_tokens]
            found[g] = self._found(g, hashes)
            lengths = self._served(g, found[g], lengths)
            limit = int(lengths[-1])
            if limit == 0:
                return MISS
        return self._confirmed(prompt, found, lengths)

    def _served(self, g: int, rows: Ints, lengths: Ints) -> Ints:
        """Those of the ascending lengths, 0 among them, that a group can serve."""
        group = self._groups[g]
        if not isinstance(group.retention, Full):
            return lengths[served(group, rows >= 0, lengths)]
        absent = (rows < 0).nonzero()[0]
        if not len(absent):
            return lengths
        limit = int(absent[0]) * group.block_tokens
        return lengths[: int(np.searchsorted(lengths, limit, side="right"))]

    def _found(self, g: int, hashes: Hashes) -> Ints:
        """The row of each block; of full attention up to the first that is not there, and
        perhaps some further."""
        index = self._index[g]
        if len(hashes) <= FEW or not isinstance(self._groups[g].retention, Full):
            return index.find(hashes)
        rows = np.full(len(hashes), -1, np.int64)
        rows[:FEW] = index.find(hashes[:FEW])
        if rows[:FEW].min() >= 0:
            rows[FEW:] = index.find(hashes[FEW:])
        return rows

    def _confirmed(self, prompt: Prompt, found: dict[int, Ints], lengths: Ints) -> Hit:
        """The longest of the lengths whose rows hold what the prompt says.

        Rows of a witness that says otherwise are none of ours, and the rest is tried.
        """
        while (num_tokens := int(lengths[-1])) > 0:
            blocks = {g: self._blocks(g, rows, num_tokens) for g, rows in found.items()}
            liars = self._liars(prompt, blocks)
            if not liars:
                return Hit(num_tokens, blocks, self._deepest(blocks))
            for g, rows in found.items():
                rows[np.isin(self._index[g].witness[rows], list(liars))] = -1
                lengths = self._served(g, rows, lengths)
        return MISS

    def _blocks(self, g: int, rows: Ints, num_tokens: int) -> Blocks:
        logical = blocks_seen(self._groups[g], num_tokens)
        return Blocks(rows[logical], logical)

    def _liars(self, prompt: Prompt, blocks: Mapping[int, Blocks]) -> set[int]:
        upto: dict[int, int] = {}
        for g, part in blocks.items():
            step = self._groups[g].block_tokens
            numbers = self._index[g].witness[part.ids]
            last = np.nonzero(numbers[1:] != numbers[:-1])[0].tolist()
            for i in (*last, len(numbers) - 1) if len(numbers) else ():
                number, end = int(numbers[i]), (int(part.index[i]) + 1) * step
                upto[number] = max(upto.get(number, 0), end)
        return {n for n, end in upto.items() if not self._witnesses[n].confirms(prompt, end)}

    def _deepest(self, blocks: Mapping[int, Blocks]) -> Witness | None:
        for g, part in blocks.items():
            if len(part):
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
        index = self._index[g]
        new = (index.find(hashes) < 0) & ~index.has(rows)
        if np.count_nonzero(new) < len(rows):
            rows, hashes = rows[new], hashes[new]
        if not len(rows):
            return rows
        added = index.add(rows, hashes, number)
        if np.count_nonzero(added) < len(rows):
            rows, hashes = rows[added], hashes[added]
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
