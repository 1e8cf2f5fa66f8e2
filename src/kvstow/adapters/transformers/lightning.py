# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""MiniMax's cache in rows: the model insists on a class of its own, which this is as well."""

from typing import Any

import torch
from transformers import Cache as TransformersCache
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from kvstow.adapters.transformers.cache import Cache


class LightningCache(Cache, MiniMaxCache):
    """Keys and values of some layers, the state of lightning attention of the others."""

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """The state of a layer; None before the first tokens."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """Replace the state of a layer."""
        layer: Any = self.layers[layer_idx]
        layer.update_recurrent_state(linear_cache)
        layer.has_previous_state[0] = True

    def __len__(self) -> int:
        return TransformersCache.__len__(self)
