"""What a transformers model really keeps, found by letting a twin without weights keep a token.

The twin is of the model's class and configuration, on torch's meta device: nothing is computed,
and the model itself is not run. Nothing is derived from the configuration but the retention of
each layer: heads, widths and element types are those of the tensors that the twin hands to its own
default cache. So a model that stores decompressed keys is described as such, whatever its paper
says.
"""

import copy
import inspect
from collections.abc import Mapping
from math import lcm
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvstow.errors import ModelError
from kvstow.plan.retention import Full, Retention, State, Window
from kvstow.plan.spec import DType, Extent, Field, LayerSpec

Rank = tuple[int, int]
"""Which of how many ranks, each of which holds a part of every layer's heads."""

FULL = Full()
ONE_HEAD = Extent.whole("head", 1)

PLAIN_LAYERS = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer"})
"""Attention layers whose whole content is keys, values and perhaps indexer keys."""

COMPRESSED_LAYERS = frozenset({"DeepseekV4HCACache", "DeepseekV4CSACache"})
"""Attention layers that keep a window, and one entry for several tokens of all."""


def kept_specs(name: str, layer: Any, block_tokens: int, tp: Rank) -> tuple[LayerSpec, ...]:
    """The specs of one layer: `name`, `name.state`, `name.indexer`, or none at all."""
    if type(layer).__name__ in COMPRESSED_LAYERS:
        return _compressed(name, layer, block_tokens)
    attention = _attention(name, layer, block_tokens, tp)
    state = _state(name, layer, block_tokens)
    return attention if state is None else (*attention, state)


def _attention(name: str, layer: Any, block_tokens: int, tp: Rank) -> tuple[LayerSpec, ...]:
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
    kv = field_of("k", keys), field_of("v", values)
    spec = _spec(name, block_tokens, *kv, retention=_retention(layer), heads=_held(keys, tp))
    indexer = getattr(layer, "indexer_keys", None)
    if indexer is None:
        return (spec,)
    return spec, _spec(f"{name}.indexer", block_tokens, field_of("key", indexer))


def _spec(
    name: str,
    block_tokens: int,
    *fields: Field,
    rate: int = 1,
    retention: Retention = FULL,
    heads: Extent = ONE_HEAD,
) -> LayerSpec:
    """A layer that keeps an entry for every `rate` tokens."""
    return LayerSpec(
        name=name,
        retention=retention,
        block_tokens=block_tokens,
        states=block_tokens // rate,
        heads=heads,
        fields=fields,
    )


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
    fields = (array(*each) for each in kept.items())
    return _spec(f"{name}.state", block_tokens, *fields, rate=block_tokens, retention=State())


def _retention(layer: Any) -> Retention:
    """Sliding and chunked layers alike keep the last tokens: the mask makes the difference."""
    window = getattr(layer, "sliding_window", None)
    return Full() if window is None else Window(window)


def _compressed(name: str, layer: Any, block_tokens: int) -> tuple[LayerSpec, ...]:
    """What such a layer of transformers' own cache keeps, after at least `rate` tokens."""
    rate: int = layer.compress_rate
    key, retention = field_of("k", layer.keys), Window(layer.sliding_window)
    window = _spec(name, block_tokens, key, retention=retention)
    entries = [
        _spec(f"{name}.{part}", lcm(block_tokens, rate), field_of("entry", kept), rate=rate)
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


def field_of(name: str, tensor: torch.Tensor) -> Field:
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
        names = ", ".join(DType)
        raise ModelError(f"elements are {name}, not one of {names}") from None


def _held(keys: torch.Tensor, tp: Rank) -> Extent:
    """A rank's part of all heads. What cannot be shared out, a latent say, every rank holds."""
    heads, (rank, ranks) = keys.shape[1], tp
    if heads % ranks:
        return Extent.whole("head", heads)
    part = heads // ranks
    return Extent("head", heads, ((part * rank, part * (rank + 1)),))


# ── a twin ────────────────────────────────────────────────────────────────────────────

OWN_CACHES = ("DynamicCache", "MiniMaxCache")
"""Caches whose content is described by `kept_layers`, and replaced by a kvstow `Cache`."""


def own_cache_class(model: PreTrainedModel) -> str:
    """The class of the cache that the model makes for itself, as its configuration says."""
    return "MiniMaxCache" if model.config.model_type == "minimax" else "DynamicCache"


def cache_name(model: PreTrainedModel) -> str:
    """The argument by which the model takes its cache."""
    takes = inspect.signature(model.forward).parameters
    return "cache_params" if "cache_params" in takes else "past_key_values"


@torch.no_grad()
def twin_cache(model: PreTrainedModel) -> Cache:
    """The own cache of the model's twin after a token, or as many as it keeps one entry for.

    Every layer that keeps something has it then. Refuses models whose layers attend to an encoder.
    """
    check_decoder(model)
    base = next(each for each in model.modules() if isinstance(each, PreTrainedModel))
    config = copy.deepcopy(base.config)
    config._attn_implementation = "eager"  # pyright: ignore[reportPrivateUsage]
    config._experts_implementation = "batched_mm"  # pyright: ignore[reportPrivateUsage]  # needs no values
    num_tokens = max(
        getattr(layer, "compress_rate", 1) for layer in DynamicCache(config=config).layers
    )
    try:
        with torch.device("meta"):
            twin = type(base)._from_config(config, dtype=base.dtype).eval()  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
            _fix_ropes(twin)
            tokens = torch.zeros((1, num_tokens), dtype=torch.long)
            try:
                output = twin(input_ids=tokens, use_cache=True)
            except RuntimeError:  # some look for padding among tokens where there is no mask
                mask = torch.ones_like(tokens)
                output = twin(input_ids=tokens, attention_mask=mask, use_cache=True)
            cache = output.get(cache_name(model))
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            f"{type(model).__name__} does not say what it keeps of a token: {error}"
            "\n\nhint: use the model's own cache"
        ) from error
    if type(cache).__name__ not in OWN_CACHES:
        kept = "no cache that it shows" if cache is None else f"a {type(cache).__name__}"
        raise ModelError(
            f"{type(model).__name__} keeps its tokens in {kept}\n\n"
            f"hint: models that make a {' or a '.join(OWN_CACHES)} can be served"
        )
    most = max((_num_entries(layer) for layer in cache.layers), default=0)
    if most > num_tokens:
        raise ModelError(
            f"{type(model).__name__} keeps {most} entries of {num_tokens} tokens: it puts tokens "
            "of its own in front\n\nhint: use the model's own cache"
        )
    return cache


def _num_entries(layer: Any) -> int:
    keys: torch.Tensor | None = getattr(layer, "keys", None)
    return 0 if keys is None else keys.shape[-2]


def _fix_ropes(twin: PreTrainedModel) -> None:
    """Ropes that follow the length look at values of positions, and a twin has none."""
    for module in twin.modules():
        kind: Any = getattr(module, "rope_type", None)
        if isinstance(kind, str | dict):
            fixed: Any = "default" if isinstance(kind, str) else dict.fromkeys(kind, "default")  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            module.rope_type = fixed


def check_decoder(model: PreTrainedModel) -> None:
    """ModelError for models with cross-attention (encoder–decoder models, and Mllama), and for
    PEFT's prefix tuning."""
    tuning: Any = getattr(model, "active_peft_config", None)
    if tuning is not None and tuning.peft_type == "PREFIX_TUNING":
        raise ModelError(
            f"{type(model).__name__} puts keys and values of its own in place of its cache"
            "\n\nhint: disable such an adapter (PEFT's prefix tuning) before"
        )
    configs = (model.config, model.config.get_text_config())  # pyright: ignore[reportUnknownMemberType]
    if model.config.is_encoder_decoder or any(
        getattr(config, "cross_attention_layers", None) for config in configs
    ):
        raise ModelError(
            f"{type(model).__name__} attends to an encoder, whose keys and values a cache of rows "
            "does not hold\n\nhint: use the model's own cache"
        )


def kept_layers(cache: Cache, *, block_tokens: int, tp: Rank = (0, 1)) -> tuple[LayerSpec, ...]:
    """What a cache that has been used keeps: `layers.3`, `layers.3.state`, `layers.3.indexer`.

    Blocks hold `block_tokens` tokens, or more where these would not make whole entries.
    """
    specs: list[LayerSpec] = []
    for i, layer in enumerate(cache.layers):
        specs += kept_specs(f"layers.{i}", layer, block_tokens, tp)
    states: list[torch.Tensor] = getattr(cache, "linear_cache", [])
    for i, state in enumerate(states):
        if len(state):
            specs.append(state_spec(f"layers.{i}", {"recurrent0": state}, block_tokens))
    if not specs:
        raise ModelError(f"a model kept nothing in its {type(cache).__name__}")
    return tuple(specs)
