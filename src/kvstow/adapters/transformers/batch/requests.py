# pyright: reportMissingTypeArgument=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""The ledger's requests of one batch, one for each sequence: admitted, forked, grown, released.

Whatever changes the blocks of a request copies the rows that the ledger wants copied, and reads
the tables anew. All sequences change or none.
"""

from collections.abc import Sequence

import numpy as np
import torch

from kvstow.adapters.transformers.batch.rows import BatchTable, TokenRows
from kvstow.adapters.transformers.batch.states import RecurrentStates
from kvstow.adapters.transformers.memory import ModelMemory
from kvstow.adapters.transformers.prefixes import PrefixStore
from kvstow.blocks.ledger import Admission
from kvstow.blocks.prompt import Prompt
from kvstow.blocks.table import RowCopy
from kvstow.errors import BlockError
from kvstow.plan.retention import State


class BatchRequests:
    """Requests that hold `num_tokens` tokens each; `rows` and `running` say where these lie."""

    def __init__(self, memory: ModelMemory, ids: Sequence[int], num_tokens: int) -> None:
        self.memory = memory
        self.ids: list[int] = list(ids)
        """The ledger's name of each sequence."""
        self.grown_tokens = num_tokens
        """Tokens that have rows: more than the sequences have where some were taken back."""
        self.rows = TokenRows(memory.arena)
        self.running = RecurrentStates(memory)
        self._growing = [
            g
            for g, group in enumerate(memory.ledger.groups)
            if not isinstance(group.retention, State)
        ]
        self._check_lengths(num_tokens)
        if self.ids:
            self._refresh()

    def _check_lengths(self, num_tokens: int) -> None:
        for request in self.ids:
            held = self.memory.ledger.num_tokens(request)
            if held != num_tokens:
                raise BlockError(
                    f"request {request} holds {held} tokens, not {num_tokens}\n\n"
                    "hint: num_tokens is what the request was admitted with"
                )

    @property
    def token_layers(self) -> list[str]:
        """The layers that keep something of every token."""
        groups = self.memory.ledger.groups
        return [spec.name for g in self._growing for spec in groups[g].layers]

    def admit(self, wanted: Sequence[Prompt | int], *, num_tokens: int = 1) -> list[int]:
        """All sequences or none, with rows for so many tokens; how many of each are there."""
        ledger = self.memory.ledger
        admitted: list[Admission] = []
        try:
            for each in wanted:
                admitted.append(ledger.admit(each, num_tokens=num_tokens))
                self.memory.copy(admitted[-1].copies)
        except BaseException:
            for admission in admitted:
                ledger.release(admission.request, computed_tokens=admission.hit_tokens)
            raise
        self.ids = [admission.request for admission in admitted]
        self._refresh()
        return [admission.hit_tokens for admission in admitted]

    def load(self, prompts: Sequence[Prompt], store: PrefixStore, num_tokens: int) -> bool:
        """Admit prompts whose first tokens come from a store; whether all came, or none is
        admitted."""
        hits = self.admit(prompts, num_tokens=num_tokens)
        try:
            came = all(map(store.load, prompts, self.ids, hits, [num_tokens] * len(prompts)))
        except BaseException:
            self.release(hits)
            raise
        if not came:
            self.release(hits)
            return False
        self.memory.ledger.received(self.ids)
        self._refresh()
        return True

    def release(self, computed_tokens: int | Sequence[int]) -> None:
        """Give all rows back; the first `computed_tokens` of each may be found as a prefix."""
        self.memory.ledger.release(self.ids, computed_tokens=computed_tokens)
        self.ids = []

    def rearrange(self, origins: Sequence[int]) -> None:
        """Sequence `i` becomes what sequence `origins[i]` was; rows stay shared."""
        ledger = self.memory.ledger
        left = set(range(len(self.ids)))
        forked: list[int] = []
        try:
            for origin in origins:
                if origin in left:
                    left.remove(origin)
                    forked.append(self.ids[origin])
                else:
                    forked.append(self._fork(self.ids[origin]))
        except BaseException:
            for request in set(forked) - set(self.ids):
                ledger.release(request)
            raise
        for origin in left:
            ledger.release(self.ids[origin])
        self.ids = forked
        self.running.forget_before()
        self._refresh()

    def _fork(self, request: int) -> int:
        fork = self.memory.ledger.fork(request)
        self.memory.copy(fork.copies)
        return fork.request

    def grow(self, wanted: int, num_tokens: int) -> None:
        """Rows for `wanted` tokens of each; states that the ledger wants to keep are those after
        `num_tokens`."""
        copies: tuple[RowCopy, ...] = ()
        if wanted > max(1, self.grown_tokens):
            self.running.settle()
            copies = self.memory.ledger.grow(self.ids, wanted)
            self.running.copy(copies, num_tokens)
        self.grown_tokens = max(wanted, self.grown_tokens)
        if copies or not self.rows.have_room(self._growing, wanted):
            self._refresh()

    def _refresh(self) -> None:
        """Read the ledger's tables anew; lent states go back, their rows may be others."""
        device = self.memory.arena.device
        blocks = [self.memory.ledger.blocks(request) for request in self.ids]
        for g, group in enumerate(self.memory.ledger.groups):
            ids = np.stack([each[g].ids for each in blocks])
            placed = torch.from_numpy(ids).to(device)
            if isinstance(group.retention, State):
                self.running.set(g, placed[:, 0])
            else:
                first = int(blocks[0][g].index[0]) if ids.shape[1] else 0
                self.rows.set(g, BatchTable(placed, first, group.block_tokens))
