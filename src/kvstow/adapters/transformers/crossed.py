# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeArgument=false
"""Decoders that attend to an encoder: its keys and values are written once, as rows of their own.

layers.3         the decoder's tokens
layers.3.cross   the encoder's positions, as many as the memory was planned for at most
"""

from typing import Any

import torch
from transformers import Cache, EncoderDecoderCache
from transformers.cache_utils import CacheLayerMixin

from kvstow.adapters.transformers.batch import Batch
from kvstow.adapters.transformers.cache import KvstowCache
from kvstow.adapters.transformers.memory import ModelMemory

Tensor = torch.Tensor


class CrossLayer(CacheLayerMixin):
    """Keys and values of one layer's encoder positions."""

    is_compileable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, batch: Batch, name: str) -> None:
        self.batch, self.name = batch, name
        self.is_initialized = False

    @property
    def keys(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What `update` was given, gathered from the rows; None before."""
        return self.batch.held(self.name, "k", 0)

    @property
    def values(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What `update` was given, gathered from the rows; None before."""
        return self.batch.held(self.name, "v", 0)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Admits the sequences, unless they have been admitted already."""
        self.batch.begin(key_states.shape[0])
        self.is_initialized = True

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
        """All positions, from the first."""
        return self.get_seq_length(), 0

    def get_max_length(self) -> int:
        """None, in transformers' words."""
        return -1

    def reset(self) -> None:
        """Forget the sequences."""
        self.batch.release()
        self.is_initialized = False


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
