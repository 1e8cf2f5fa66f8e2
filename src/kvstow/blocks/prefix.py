"""Prefixes: which rows hold the beginning of a prompt, by group, and how long a hit is.

A hit of `n` tokens needs, of every group, the blocks that a token at `n` sees
(`kvstow.plan.retention.seen_blocks`): all of them, those of the last window, a checkpoint at
exactly `n`. Rows are found by the hash of the prefix that they end (`PrefixIndex`), and then
confirmed: the tokens they were computed from are compared (`Prompt.agrees`), so that two
prompts with one hash never share rows.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from math import lcm
from operator import eq
from typing import Literal, NamedTuple

import numpy as np

from kvstow.blocks.prompt import Hashes, Prompt
from kvstow.blocks.rows import NONE
from kvstow.plan.group import Group
from kvstow.plan.retention import Bools, Encoder, longest_prefix, seen_blocks
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class PromptSource:
    """What some rows were computed from: their request's prompt, with all its tokens by now."""

    prompt: Prompt


class PrefixIndex:
    """Rows of one group by the hash of the prefix that each ends; 0 is no hash."""

    def __init__(self, num_rows: int) -> None:
        self._row: dict[int, int] = {}
        self._hash = np.zeros(num_rows, np.uint64)
        self.source = np.full(num_rows, None, object)

    def find(self, hashes: Hashes) -> Ints:
        """The row of each hash, -1 where there is none."""
        return np.array(list(map(self._row.get, hashes.tolist(), repeat(-1))), np.int64)

    def has(self, rows: Ints) -> Bools:
        """Which rows have a hash."""
        return self._hash[rows] != 0

    def rows(self) -> Ints:
        """All rows that have a hash."""
        return self._hash.nonzero()[0]

    def add(self, rows: Ints, hashes: Hashes, source: PromptSource) -> Bools:
        """Make rows known by hashes; which of them are, by now: neither the row nor the hash
        was in the index."""
        new = ~self.has(rows)
        ids, keys = rows[new].tolist(), hashes[new].tolist()
        new[new] = list(map(eq, map(self._row.setdefault, keys, ids), ids))
        self._hash[rows[new]] = hashes[new]
        self.source[rows[new]] = source
        return new

    def remove(self, rows: Ints) -> Hashes:
        """Forget rows that have a hash; their hashes."""
        hashes = self._hash[rows]
        for key in hashes.tolist():
            del self._row[key]
        self._hash[rows] = 0
        self.source[rows] = None
        return hashes


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The first `num_tokens` tokens of a prompt are in these blocks, by group."""

    num_tokens: int
    blocks: Mapping[int, Blocks]


MISS = PrefixHit(0, {})


class BlockEvent(NamedTuple):
    """Blocks of one group that can be found by their hashes from now on, or no longer."""

    kind: Literal["stored", "removed"]
    group: int
    hashes: Hashes


class PrefixCache:
    """What every group has cached, by hash, with the tokens to confirm it.

    Whoever is in `on_change` is called, in the thread that changes it, with every change. What one
    of them raises is logged: what is cached does not depend on who listens.
    """

    def __init__(self, groups: Sequence[Group], num_rows: Sequence[int]) -> None:
        self.on_change: list[Callable[[BlockEvent], None]] = []
        self._groups = tuple(groups)
        self._step = [group.block_tokens for group in groups]
        self._tokenwise = [
            (g, group) for g, group in enumerate(groups) if not isinstance(group.retention, Encoder)
        ]
        self._index = {g: PrefixIndex(num_rows[g]) for g, _ in self._tokenwise}
        self._unit = lcm(*(group.block_tokens for _, group in self._tokenwise))

    # ── questions ─────────────────────────────────────────────────────────────────

    def hit(self, prompt: Prompt) -> PrefixHit:
        """The longest beginning of the prompt, short of all of it, that every group has all
        blocks of that a token behind it sees; confirmed token by token."""
        rows: dict[int, Ints] = {}

        def holds(g: int, num_blocks: int) -> Bools:
            if g not in rows:
                rows[g] = self._index[g].find(prompt.hashes(self._step[g])[:num_blocks])
            return rows[g] >= 0

        num_tokens = len(prompt) - 1
        while num_tokens := longest_prefix(self._tokenwise, num_tokens, holds, unit=self._unit):
            blocks = {g: self._shared(g, ids, num_tokens) for g, ids in rows.items()}
            mismatched = self._mismatched(prompt, blocks)
            if not mismatched:
                return PrefixHit(num_tokens, blocks)
            for g, ids in rows.items():
                wrong = [source in mismatched for source in self._index[g].source[ids]]
                ids[np.array(wrong, np.bool_)] = -1
        return MISS

    def _shared(self, g: int, rows: Ints, num_tokens: int) -> Blocks:
        """Of the rows of a prompt's blocks those that a token at `num_tokens` sees."""
        seen = seen_blocks(self._groups[g].retention, num_tokens, self._step[g])
        return Blocks(rows[seen.start : seen.stop], np.arange(seen.start, seen.stop))

    def _mismatched(self, prompt: Prompt, blocks: Mapping[int, Blocks]) -> set[PromptSource]:
        """Sources of the rows that were computed from other tokens than the prompt's."""
        ends: dict[PromptSource, int] = {}
        for g, part in blocks.items():
            sources = self._index[g].source[part.ids].tolist()
            for source, k in dict(zip(sources, part.index.tolist(), strict=True)).items():
                ends[source] = max(ends.get(source, 0), (k + 1) * self._step[g])
        return {source for source, end in ends.items() if not source.prompt.agrees(prompt, end)}

    def has(self, g: int, hashes: Hashes) -> Bools:
        """Which hashes the group has a row for."""
        return self._index[g].find(hashes) >= 0

    def rows(self, g: int) -> Ints:
        """The rows of a group that can be found."""
        return self._index[g].rows() if g in self._index else NONE

    # ── changes ───────────────────────────────────────────────────────────────────

    def store(self, g: int, rows: Ints, hashes: Hashes, source: PromptSource) -> Ints:
        """Make rows known by hashes; those that are known by this call."""
        added = self._index[g].add(rows, hashes, source)
        if added.any():
            self._tell(BlockEvent("stored", g, hashes[added]))
        return rows[added]

    def remove(self, g: int, rows: Ints) -> None:
        """Forget rows; those that are not known are passed over."""
        if g not in self._index:
            return
        index = self._index[g]
        rows = rows[index.has(rows)]
        if len(rows):
            self._tell(BlockEvent("removed", g, index.remove(rows)))

    def _tell(self, event: BlockEvent) -> None:
        for listener in self.on_change:
            try:
                listener(event)
            except Exception:
                log.exception("prefixes: a listener missed %d blocks", len(event.hashes))
