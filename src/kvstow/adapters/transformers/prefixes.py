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
from kvstow.offload.keys import PromptRows
from kvstow.offload.store import Store
from kvstow.plan.retention import State

log = logging.getLogger(__name__)


class PrefixStore:
    """A store, for the prompts of one memory. Refuses a store of another computation."""

    def __init__(self, memory: ModelMemory, store: Store) -> None:
        self._memory = memory
        self._store = store.bind(memory.layout)
        self._identity = store.identity

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
        """Keep whole blocks of the first `num_tokens` tokens, as far as the request holds them and
        the store lacks them.

        `is_running` says that recurrent states are those after just these tokens.
        """
        memory, end = self._memory, self._memory.whole_tokens(num_tokens)
        extra = [each for each in prompt.extra if each[0] < end]
        beginning = Prompt.of(prompt.tokens[:end], salt=prompt.salt, extra=extra)
        try:
            first = self._store.stored_tokens(beginning)
            if first == end:
                return
            blocks = memory.ledger.blocks(request)
            for g, group in enumerate(memory.ledger.groups):
                if not isinstance(group.retention, State):
                    blocks[g] = blocks[g].since(first // group.block_tokens)
                elif not is_running or end != num_tokens:
                    del blocks[g]
            self._store.save(memory.arena, blocks, beginning)
        except StoreError as error:
            log.warning("a prompt of %d tokens was not stored: %s", len(prompt), error)
