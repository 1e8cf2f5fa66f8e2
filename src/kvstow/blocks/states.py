"""States of recurrent groups: the running row of every request, and checkpoints of it.

A state is somewhere only after all its tokens and before the next one. So a checkpoint is
made when a request that stands at a multiple of `block_tokens` goes on: the engine copies
the running row first. Only later requests may start from it: it is cached at once, and left
out where there is no room.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvstow.blocks.placement import RowDemand
from kvstow.blocks.pool import Pool
from kvstow.blocks.prefix import PrefixCache
from kvstow.blocks.prompt import Hashes
from kvstow.blocks.requests import Requests
from kvstow.blocks.table import RowCopy
from kvstow.errors import OutOfBlocks
from kvstow.plan.group import Group
from kvstow.plan.retention import State
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks


class StateTable:
    """One running row per request."""

    def __init__(self, group: Group) -> None:
        assert isinstance(group.retention, State)
        self.block_tokens = group.block_tokens
        self.running = np.zeros(0, np.int64)

    def reserve(self, num_slots: int) -> None:
        """Make room for so many requests."""
        more = num_slots - len(self.running)
        self.running = np.concatenate((self.running, np.zeros(more, np.int64)))

    def open(self, slot: int, row: int) -> None:
        """Begin a request with a running row of its own."""
        self.running[slot] = row

    def all_ids(self, slot: int) -> Ints:
        """The running row."""
        return self.running[slot : slot + 1].copy()

    def blocks(self, slot: int) -> Blocks:
        return Blocks(self.all_ids(slot), np.zeros(1, np.int64))


@dataclass(frozen=True, slots=True)
class DueCheckpoint:
    """A checkpoint to be made of a request's state in one group, the one after
    `(index + 1) · block_tokens` tokens."""

    group: int
    slot: int
    index: int


class Checkpoints:
    """Makes the checkpoints of all requests."""

    def __init__(
        self,
        pool: Pool,
        requests: Requests,
        states: Mapping[int, StateTable],
        prefixes: PrefixCache | None,
    ) -> None:
        self._pool = pool
        self._requests = requests
        self._states = states
        self._prefixes = prefixes

    def due(self, slots: Ints, num_tokens: Ints) -> list[DueCheckpoint]:
        """What requests that go on from `num_tokens` may make for others."""
        due: list[DueCheckpoint] = []
        for g, states in self._states.items():
            step = states.block_tokens
            at = np.nonzero((num_tokens % step == 0) & (num_tokens > 0))[0]
            for slot, tokens in zip(slots[at].tolist(), num_tokens[at].tolist(), strict=True):
                made = DueCheckpoint(g, slot, tokens // step - 1)
                if self._is_useful(made, tokens):
                    due.append(made)
        return due

    def _is_useful(self, due: DueCheckpoint, num_tokens: int) -> bool:
        """Whether later requests could start from the checkpoint, and have no such yet."""
        if not self._prefixes or self._requests.num_known[due.slot] < num_tokens:
            return False
        if self._is_suspect(due):
            return False
        return not self._prefixes.known(due.group, self._hash(due)).all()

    def offer(self, checkpoints: Sequence[DueCheckpoint]) -> list[RowCopy]:
        """Cache checkpoints for others, if there is room."""
        try:
            ids = self._pool.hold_all([RowDemand(due.group, 1) for due in checkpoints])
        except OutOfBlocks:
            return []
        copies: list[RowCopy] = []
        for due, rows in zip(checkpoints, ids, strict=True):
            row = int(rows[0])
            self._store(due, row)
            copies.append(RowCopy(due.group, int(self._states[due.group].running[due.slot]), row))
        for due, rows in zip(checkpoints, ids, strict=True):
            self._pool.release(due.group, rows)
        return copies

    def _is_suspect(self, due: DueCheckpoint) -> bool:
        """Whether the running row was quarantined: its content must not be shared."""
        if not self._pool.num_suspect(due.group):
            return False
        return bool(self._pool.suspect(due.group, self._states[due.group].running[due.slot]))

    def _hash(self, due: DueCheckpoint) -> Hashes:
        prompt = self._requests.prompts[due.slot]
        assert prompt is not None
        return prompt.hash_after((due.index + 1) * self._states[due.group].block_tokens)

    def _store(self, due: DueCheckpoint, row: int) -> None:
        """Make a checkpoint known to others, where the tokens before it are."""
        number = self._requests.sources[due.slot]
        step = self._states[due.group].block_tokens
        if not self._prefixes or number is None:
            return
        if self._requests.num_known[due.slot] < (due.index + 1) * step or self._is_suspect(due):
            return
        rows = np.array([row])
        stored = self._prefixes.store(due.group, rows, self._hash(due), number)
        self._pool.keep(due.group, stored)
