# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeArgument=false
"""Decoders that attend to an encoder: its keys and values are written once, as rows of their own.

layers.3         the decoder's tokens
layers.3.cross   the encoder's positions, as many as the memory was planned for at most
"""

from typing import Any

import torch
from transformers import Cache, EncoderDecoderCache

from kvstow.adapters.transformers.batch import Batch
from kvstow.adapters.transformers.cache import KvstowCache
from kvstow.adapters.transformers.layers import RowsLayer
from kvstow.adapters.transformers.memory import ModelMemory

Tensor = torch.Tensor


class CrossLayer(RowsLayer):
    """Keys and values of one layer's encoder positions: all are there at once, and stay."""

    def __init__(self, batch: Batch, name: str) -> None:
        super().__init__(batch, name, window=None)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store all positions."""
        self.lazy_initialization(key_states, value_states)
        self.batch.encode(self.name, {"k": key_states, "v": value_states})
        return key_states, value_states

    def get_seq_length(self) -> int:
        """The encoder's positions."""
        return self.batch.encoder_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All positions, from the first; a query adds none."""
        return self.get_seq_length(), 0


class CrossCache(KvstowCache, EncoderDecoderCache):
    """Both caches of such a model, as the two that it looks for."""

    def __init__(self, memory: ModelMemory, **given: Any) -> None:
        super().__init__(memory, **given)
        names = [f"layers.{i}.cross" for i in range(memory.num_layers)]
        self.self_attention_cache = Cache(layers=self.layers)
        self.cross_attention_cache = Cache(layers=[CrossLayer(self.batch, x) for x in names])
        self._note_whether_encoded()

    def reset(self) -> None:
        """Forget all sequences; the next ones bring their encoder's positions."""
        super().reset()
        self._note_whether_encoded()

    def __len__(self) -> int:
        return Cache.__len__(self)

    def _note_whether_encoded(self) -> None:
        encoded = self.batch.encoder_tokens > 0
        self.is_updated = dict.fromkeys(range(self.memory.num_layers), encoded)
