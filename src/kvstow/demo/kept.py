"""Prompts on disk: their rows under keys made of their tokens."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import TracebackType
from typing import Self

import numpy as np

from kvstow.adapters.transformers import ModelMemory
from kvstow.demo.messages import Reloaded, Stored
from kvstow.errors import StoreError
from kvstow.offload.store import Store
from kvstow.plan.retention import State
from kvstow.route.blocks import Blocks

CAPACITY = 2 << 30


@dataclass(frozen=True, slots=True)
class Kept:
    """A store of prompts, and the memory whose rows it keeps."""

    memory: ModelMemory
    store: Store

    @classmethod
    def open(cls, memory: ModelMemory, path: str) -> Self:
        """The store in a directory, made if it is not there."""
        return cls(memory, Store.open(path, memory.layout, capacity=CAPACITY))

    def save(self, prompt: int, tokens: Sequence[int], blocks: Mapping[int, Blocks]) -> Stored:
        """Keep all rows of a prompt."""
        began = time.monotonic()
        for g, listed in blocks.items():
            keys = self._keys(g, tokens, listed)
            kept = self.store.save(self.memory.arena, g, listed.ids, keys)
            if not kept.all():
                raise StoreError(f"{int((~kept).sum())} of {len(keys)} rows were not kept")
        return Stored(prompt=prompt, seconds=time.monotonic() - began, **self._size(blocks))

    def load(self, prompt: int, tokens: Sequence[int], blocks: Mapping[int, Blocks]) -> Reloaded:
        """Bring all rows of a prompt back."""
        began = time.monotonic()
        for g, listed in blocks.items():
            keys = self._keys(g, tokens, listed)
            found = self.store.load(self.memory.arena, g, keys, listed.ids)
            if not found.all():
                raise StoreError(f"{int((~found).sum())} of {len(keys)} rows are not in the store")
        return Reloaded(prompt=prompt, seconds=time.monotonic() - began, **self._size(blocks))

    def _size(self, blocks: Mapping[int, Blocks]) -> dict[str, int]:
        layout = self.memory.layout
        return {
            "rows": sum(len(listed) for listed in blocks.values()),
            "nbytes": sum(layout.row_bytes(g) * len(listed) for g, listed in blocks.items()),
        }

    def _keys(self, g: int, tokens: Sequence[int], listed: Blocks) -> list[bytes]:
        """A key says which tokens a row depends on: all up to its end."""
        group = self.memory.layout.groups[g].group
        whole = np.asarray(tokens, "<i8")
        steps = [len(tokens)] * len(listed)
        if not isinstance(group.retention, State):
            steps = [(int(k) + 1) * group.block_tokens for k in listed.index]
        return [
            blake2b(whole[:end].tobytes(), digest_size=16, person=f"rows{g}".encode()).digest()
            for end in steps
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.store.close()
