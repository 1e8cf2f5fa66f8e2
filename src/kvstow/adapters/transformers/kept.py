# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeArgument=false
"""What one layer of transformers' own cache keeps, as layer specs.

Nothing but the retention is taken from anywhere else than the tensors that lie there.
"""

from collections.abc import Mapping
from math import lcm
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvstow.adapters.transformers.shard import Shard
from kvstow.errors import ModelError
from kvstow.plan.retention import Full, Retention, State, Window
from kvstow.plan.spec import DType, Extent, Field, LayerSpec

PLAIN_LAYERS = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer"})
"""Attention layers whose whole content is keys, values and perhaps indexer keys."""

COMPRESSED_LAYERS = frozenset({"DeepseekV4HCACache", "DeepseekV4CSACache"})
"""Attention layers that keep a window, and one entry for several tokens of all."""


def kept_specs(name: str, layer: Any, block_tokens: int, shard: Shard) -> tuple[LayerSpec, ...]:
    """The specs of one layer: `name`, `name.state`, `name.indexer`, or none at all."""
    if type(layer).__name__ in COMPRESSED_LAYERS:
        return _compressed(name, layer, block_tokens)
    attention = _attention(name, layer, block_tokens, shard)
    state = _state(name, layer, block_tokens)
    return attention if state is None else (*attention, state)


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
            fields=(content("k", keys), content("v", values)),
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
                fields=(content("key", indexer),),
            )
        )
    return tuple(specs)


def _state(name: str, layer: Any, block_tokens: int) -> LayerSpec | None:
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return None
    kept = {
        f"{kind}{index}": tensor
        for kind, states in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states))
        for index, tensor in states.items()
        if tensor is not None
    }
    return state_spec(name, kept, block_tokens) if kept else None


def state_spec(name: str, kept: Mapping[str, torch.Tensor], block_tokens: int) -> LayerSpec:
    """What a layer keeps of a whole sequence: `[batch, ...]` tensors by name."""
    return LayerSpec(
        name=f"{name}.state",
        retention=State(),
        block_tokens=block_tokens,
        states=1,
        heads=Extent.whole("head", 1),
        fields=tuple(array(*each) for each in kept.items()),
    )


def _retention(layer: Any) -> Retention:
    """Sliding and chunked layers alike keep the last tokens: the mask makes the difference."""
    window = getattr(layer, "sliding_window", None)
    return Full() if window is None else Window(window)


def _compressed(name: str, layer: Any, block_tokens: int) -> tuple[LayerSpec, ...]:
    """What such a layer of transformers' own cache keeps, after at least `rate` tokens."""
    rate: int = layer.compress_rate
    step = lcm(block_tokens, rate)
    one = Extent.whole("head", 1)
    window = LayerSpec(
        name=name,
        retention=Window(layer.sliding_window),
        block_tokens=block_tokens,
        states=block_tokens,
        heads=one,
        fields=(content("k", layer.keys),),
    )
    entries = [
        LayerSpec(
            name=f"{name}.{part}",
            retention=Full(),
            block_tokens=step,
            states=step // rate,
            heads=one,
            fields=(content("entry", kept),),
        )
        for part, kept in layer.compressed_kv.items()
    ]
    return (window, *entries, state_spec(name, _unfinished(layer), block_tokens))


def _unfinished(layer: Any) -> dict[str, torch.Tensor]:
    """Tokens of an entry that is not whole yet, and those of the last whole one."""
    rate: int = layer.compress_rate
    kept: dict[str, torch.Tensor] = {}
    for part in layer.compressed_kv:
        for kind in ("kv", "gate"):
            waiting: torch.Tensor = getattr(layer, f"buffer_{kind}")[part]
            kept[f"{part}.{kind}"] = waiting.new_empty(1, rate, waiting.shape[-1])
            overlap: torch.Tensor | None = getattr(layer, f"overlap_{kind}", {}).get(part)
            if overlap is not None:
                kept[f"{part}.overlap_{kind}"] = overlap
    return kept


def content(name: str, tensor: torch.Tensor) -> Field:
    """What one token leaves of a `[..., content]` tensor."""
    return Field(name, dtype_of(tensor), (Extent.whole("content", tensor.shape[-1]),))


def array(name: str, tensor: torch.Tensor) -> Field:
    """What one sequence has of a `[batch, ...]` tensor."""
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
