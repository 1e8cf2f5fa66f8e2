# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeArgument=false
"""What a transformers model really keeps, found by letting it keep one token.

Nothing is derived from the configuration but the retention of each layer: heads, widths and
element types are those of the tensors that the model hands to its own default cache. So a
model that stores decompressed keys is described as such, whatever its paper says.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvstow.errors import ModelError
from kvstow.plan.spec import DType, Extent, Field, Full, LayerSpec, Retention, State, Window

PLAIN_LAYERS = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer"})
"""Attention layers whose whole content is keys, values and perhaps indexer keys."""

TRIAL_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of every layer's heads that this process holds.

    The model computes just these, or all of them (`computes_all`) and the others are dropped.
    """

    rank: int = 0
    size: int = 1
    computes_all: bool = False

    def heads(self, computed: int) -> Extent:
        """What is held, as a part of all ranks' heads, where the model computes so many.

        What cannot be shared out, a latent say, every rank holds whole.
        """
        if self.computes_all and computed % self.size:
            return Extent.whole("head", computed)
        held = computed // self.size if self.computes_all else computed
        return Extent("head", held * self.size, ((held * self.rank, held * (self.rank + 1)),))


ALL_HEADS = Shard()
"""One process holds everything."""


def cache_name(model: PreTrainedModel) -> str:
    """The argument by which the model takes its cache."""
    return "cache_params" if "mamba" in type(model).__name__.lower() else "past_key_values"


@torch.no_grad()
def trial(model: PreTrainedModel) -> DynamicCache:
    """The model's default cache after one token: every layer that keeps something has it."""
    cache = DynamicCache(config=model.config)
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    given = {cache_name(model): cache}
    model(input_ids=token, use_cache=True, **given)
    return cache


@torch.no_grad()
def resumes(model: PreTrainedModel) -> bool:
    """Whether the model, given several tokens, goes on from the state it finds in its cache.

    Some recurrent models begin anew unless tokens come one by one. Their states must not be
    reused for a prompt that continues, so this is tried rather than believed.
    """
    tokens = torch.arange(2 * TRIAL_TOKENS, device=model.device).unsqueeze(0)
    whole = model(input_ids=tokens, use_cache=False).logits[:, -1].float()
    given = {cache_name(model): DynamicCache(config=model.config)}
    model(input_ids=tokens[:, :TRIAL_TOKENS], use_cache=True, **given)
    parts = model(input_ids=tokens[:, TRIAL_TOKENS:], use_cache=True, **given).logits[:, -1].float()
    tolerance = max(3e-5, 8 * torch.finfo(model.dtype).eps)
    return bool((whole - parts).abs().max() <= tolerance * whole.abs().max())


def cache_layers(
    model: PreTrainedModel, *, block_tokens: int = 16, shard: Shard = ALL_HEADS
) -> tuple[LayerSpec, ...]:
    """The model's cache as layer specs: `layers.3`, `layers.3.state`, `layers.3.indexer`."""
    specs: list[LayerSpec] = []
    for i, layer in enumerate(trial(model).layers):
        name = f"layers.{i}"
        attention = _attention(name, layer, block_tokens, shard)
        specs += [spec for spec in (*attention, _state(name, layer, block_tokens)) if spec]
    if not specs:
        raise ModelError(f"{type(model).__name__} kept nothing in its cache")
    return tuple(specs)


def _attention(name: str, layer: Any, block_tokens: int, shard: Shard) -> tuple[LayerSpec, ...]:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None:
        return ()
    mixed = isinstance(layer, LinearAttentionCacheLayerMixin)
    if type(layer).__name__ not in PLAIN_LAYERS and not mixed:
        raise ModelError(
            f"layer {name!r} is a {type(layer).__name__}, which keeps more than keys and values"
            "\n\nhint: use the model's own cache"
        )
    if keys.shape[:3] != values.shape[:3]:
        raise ModelError(
            f"layer {name!r}: keys {tuple(keys.shape)} and values {tuple(values.shape)} "
            "are not of the same heads and tokens"
        )
    specs = [
        LayerSpec(
            name=name,
            retention=_retention(layer),
            block_tokens=block_tokens,
            states=block_tokens,
            heads=shard.heads(keys.shape[1]),
            fields=(_content("k", keys), _content("v", values)),
        )
    ]
    indexer = getattr(layer, "indexer_keys", None)
    if indexer is not None:
        specs.append(
            LayerSpec(
                name=f"{name}.indexer",
                retention=Full(),
                block_tokens=block_tokens,
                states=block_tokens,
                heads=Extent.whole("head", 1),
                fields=(_content("key", indexer),),
            )
        )
    return tuple(specs)


def _state(name: str, layer: Any, block_tokens: int) -> LayerSpec | None:
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return None
    fields = tuple(
        _array(f"{kind}{index}", tensor)
        for kind, states in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states))
        for index, tensor in states.items()
        if tensor is not None
    )
    if not fields:
        return None
    return LayerSpec(
        name=f"{name}.state",
        retention=State(),
        block_tokens=block_tokens,
        states=1,
        heads=Extent.whole("head", 1),
        fields=fields,
    )


def _retention(layer: Any) -> Retention:
    """Sliding and chunked layers alike keep the last tokens: the mask makes the difference."""
    window = getattr(layer, "sliding_window", None)
    return Full() if window is None else Window(window)


def _content(name: str, tensor: torch.Tensor) -> Field:
    return Field(name, dtype_of(tensor), (Extent.whole("content", tensor.shape[-1]),))


def _array(name: str, tensor: torch.Tensor) -> Field:
    axes = tuple(Extent.whole(f"axis{i}", size) for i, size in enumerate(tensor.shape[1:]))
    return Field(name, dtype_of(tensor), axes)


def dtype_of(tensor: torch.Tensor) -> DType:
    """The element type by our name for it."""
    name = str(tensor.dtype).removeprefix("torch.")
    try:
        return DType(name)
    except ValueError:
        known = ", ".join(DType)
        raise ModelError(f"elements are {name}, not one of {known}") from None
