"""Beginnings of prompts in a store: rows of whole blocks, by keys that name model and tokens.

A prompt that begins like a stored one is loaded as far as every group can serve it. What was
computed is stored when the sequences end. A store that fails costs nothing but time: its errors
are logged, and the tokens are computed.
"""

import logging

import numpy as np

from kvstow.adapters.transformers.memory import ModelMemory
from kvstow.blocks.prompt import Prompt
from kvstow.errors import StoreError
from kvstow.offload.keys import PromptRows, block_keys, links
from kvstow.offload.rows import matching_group
from kvstow.offload.store import Store
from kvstow.plan.retention import State
from kvstow.route.blocks import Blocks

log = logging.getLogger(__name__)


class PrefixStore:
    """A store, for the prompts of one memory. Refuses a store of another computation."""

    def __init__(self, memory: ModelMemory, store: Store) -> None:
        layout = memory.layout
        self._memory = memory
        self._store = store.bind(layout)
        self._identity = store.identity
        self._groups = [matching_group(layout, g, store.layout) for g in range(len(layout.groups))]

    def num_tokens(self, prompt: Prompt) -> int:
        """The longest beginning of the prompt that every group could be loaded for.

        At most all tokens but the last, which is computed anew.
        """
        try:
            return self._store.stored_tokens(prompt, most=len(prompt) - 1)
        except StoreError as error:
            log.warning("a prompt of %d tokens was not looked for: %s", len(prompt), error)
            return 0

    def load(self, prompt: Prompt, request: int, start_token: int, num_tokens: int) -> bool:
        """Bring tokens `[start_token, num_tokens)` into the request's rows; whether all came."""
        held = self._memory.ledger.blocks(request)
        rows = PromptRows(self._memory.layout, self._identity, prompt)
        for g, keyed in rows.seen(num_tokens).items():
            group = self._memory.ledger.groups[g]
            missing = keyed.index >= start_token // group.block_tokens
            keys = [key for key, lacks in zip(keyed.keys, missing, strict=True) if lacks]
            ids = held[g].ids
            if not isinstance(group.retention, State):
                ids = ids[np.searchsorted(held[g].index, keyed.index[missing])]
            try:
                if not self._store.load_rows(self._memory.arena, g, keys, ids).all():
                    return False
            except StoreError as error:
                log.warning("a prompt of %d tokens was not loaded: %s", len(prompt), error)
                return False
        return True

    def save(self, prompt: Prompt, request: int, num_tokens: int, *, is_running: bool) -> None:
        """Keep whole blocks of the first `num_tokens` tokens, as far as the request holds them.

        `is_running` says that recurrent states are those after just these tokens.
        """
        try:
            for g in range(len(self._memory.ledger.groups)):
                self._save_group(prompt, request, g, num_tokens, is_running=is_running)
        except StoreError as error:
            log.warning("a prompt of %d tokens was not stored: %s", len(prompt), error)
            return
        extra = [each for each in prompt.extra if each[0] < num_tokens]
        stored = Prompt.of(prompt.tokens[:num_tokens], salt=prompt.salt, extra=extra)
        self._store.note(stored, self._identity)

    def _save_group(
        self, prompt: Prompt, request: int, g: int, num_tokens: int, *, is_running: bool
    ) -> None:
        block_tokens = self._memory.ledger.groups[g].block_tokens
        keys = block_keys(self._identity, prompt, block_tokens)[: num_tokens // block_tokens]
        rows = self._rows(request, g, num_tokens, is_running=is_running)
        chained = links(keys)
        there = self._store.contains(self._groups[g], keys).tolist()
        ids: list[int] = rows.ids.tolist()
        index: list[int] = rows.index.tolist()
        new = [(id, k) for id, k in zip(ids, index, strict=True) if k < len(keys) and not there[k]]
        self._store.save_rows(
            self._memory.arena,
            g,
            [id for id, _ in new],
            [keys[k] for _, k in new],
            [chained[k] for _, k in new],
        )

    def _rows(self, request: int, g: int, num_tokens: int, *, is_running: bool) -> Blocks:
        """The request's rows of a group, each with the block that it ends."""
        ledger = self._memory.ledger
        group = ledger.groups[g]
        if not isinstance(group.retention, State):
            return ledger.blocks(request)[g].whole
        if not is_running or not num_tokens or num_tokens % group.block_tokens:
            return Blocks.first([])
        last = num_tokens // group.block_tokens - 1
        return Blocks(ledger.blocks(request)[g].ids, np.array([last]))
