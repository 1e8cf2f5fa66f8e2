"""Checkpoints: states of recurrent groups, copied aside at every `block_tokens` tokens.

A state is somewhere only after all its tokens and before the next one. So a checkpoint is
made when a request that stands at a multiple of `block_tokens` goes on: the engine copies
the running row first. One that the retention asks for is held by the request; one that
only later requests may start from is cached at once, and left out where there is no room.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvstow.blocks.copies import Copy
from kvstow.blocks.pool import Pool, Want
from kvstow.blocks.prefix import Prefixes
from kvstow.blocks.requests import Requests
from kvstow.blocks.states import States
from kvstow.errors import OutOfBlocks
from kvstow.plan.view import Ints


@dataclass(frozen=True, slots=True)
class Due:
    """A checkpoint to be made of a request's state in one group, the `index`-th."""

    group: int
    slot: int
    index: int


class Checkpoints:
    """Makes and gives up the checkpoints of all requests."""

    def __init__(
        self,
        pool: Pool,
        requests: Requests,
        states: Mapping[int, States],
        prefixes: Prefixes | None,
    ) -> None:
        self._pool = pool
        self._requests = requests
        self._states = states
        self._prefixes = prefixes

    def due(self, slots: Ints, num_tokens: Ints) -> tuple[tuple[Due, ...], tuple[Due, ...]]:
        """What requests that go on from `num_tokens` have to make, and what they may."""
        must: list[Due] = []
        may: list[Due] = []
        for g, states in self._states.items():
            step = states.block_tokens
            at = np.nonzero((num_tokens % step == 0) & (num_tokens > 0))[0]
            for slot, tokens in zip(slots[at].tolist(), num_tokens[at].tolist(), strict=True):
                made = Due(g, slot, tokens // step - 1)
                if states.checkpoints:
                    must.append(made)
                elif self._wanted(made, tokens):
                    may.append(made)
        return tuple(must), tuple(may)

    def _wanted(self, due: Due, num_tokens: int) -> bool:
        """Whether later requests could start from the checkpoint, and have no such yet."""
        if not self._prefixes or self._requests.known[due.slot] < num_tokens:
            return False
        return not self._prefixes.known(due.group, self._hash(due)).all()

    def make(self, must: Sequence[Due], ids: Sequence[Ints]) -> list[Copy]:
        """Enter checkpoints in rows that are held for them."""
        copies: list[Copy] = []
        for due, (row,) in zip(must, (part.tolist() for part in ids), strict=True):
            states = self._states[due.group]
            states.keep(due.slot, due.index, row)
            self._store(due, row)
            copies.append(Copy(due.group, int(states.running[due.slot]), row))
            self._pool.release(due.group, states.outdated(due.slot))
        return copies

    def offer(self, may: Sequence[Due]) -> list[Copy]:
        """Cache checkpoints for others, if there is room."""
        try:
            ids = self._pool.hold_all([Want(due.group, 1) for due in may])
        except OutOfBlocks:
            return []
        copies: list[Copy] = []
        for due, (row,) in zip(may, (part.tolist() for part in ids), strict=True):
            self._store(due, row)
            copies.append(Copy(due.group, int(self._states[due.group].running[due.slot]), row))
        for due, rows in zip(may, ids, strict=True):
            self._pool.release(due.group, rows)
        return copies

    def _hash(self, due: Due) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        prompt = self._requests.prompts[due.slot]
        assert prompt is not None
        return prompt.hash_after((due.index + 1) * self._states[due.group].block_tokens)

    def _store(self, due: Due, row: int) -> None:
        """Make a checkpoint known to others, where the tokens before it are."""
        number = self._requests.witness[due.slot]
        step = self._states[due.group].block_tokens
        if not self._prefixes or number is None:
            return
        if self._requests.known[due.slot] < (due.index + 1) * step:
            return
        rows = np.array([row])
        stored = self._prefixes.store(due.group, rows, self._hash(due), number, parent=0)
        self._pool.keep(due.group, stored)
