# pyright: reportMissingTypeArgument=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""What a transformers model really keeps, found by letting it keep a token or a few.

Nothing is derived from the configuration but the retention of each layer: heads, widths and
element types are those of the tensors that the model hands to its own default cache. So a
model that stores decompressed keys is described as such, whatever its paper says.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, cast

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.modeling_outputs import BaseModelOutput

from kvstow.adapters.transformers.model.ropes import length_ropes
from kvstow.errors import ModelError
from kvstow.plan.retention import Encoder, Full, Retention, State, Window
from kvstow.plan.spec import DType, Extent, Field, LayerSpec


@dataclass(frozen=True, slots=True)
class HeadShard:
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


ALL_HEADS = HeadShard()
"""One process holds everything."""


PLAIN_LAYERS = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer"})
"""Attention layers whose whole content is keys, values and perhaps indexer keys."""

COMPRESSED_LAYERS = frozenset({"DeepseekV4HCACache", "DeepseekV4CSACache"})
"""Attention layers that keep a window, and one entry for several tokens of all."""


def kept_specs(name: str, layer: Any, block_tokens: int, shard: HeadShard) -> tuple[LayerSpec, ...]:
    """The specs of one layer: `name`, `name.state`, `name.indexer`, or none at all."""
    if type(layer).__name__ in COMPRESSED_LAYERS:
        return _compressed(name, layer, block_tokens)
    attention = _attention(name, layer, block_tokens, shard)
    state = _state(name, layer, block_tokens)
    return attention if state is None else (*attention, state)


def _attention(name: str, layer: Any, block_tokens: int, shard: HeadShard) -> tuple[LayerSpec, ...]:
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


TRIAL_TOKENS = 8

OWN_CACHES = ("DynamicCache", "EncoderDecoderCache", "MiniMaxCache")
"""Caches whose content is described by `kept_layers`, and replaced by a kvstow `Cache`."""


def own_cache(model: PreTrainedModel) -> str:
    """The class of the cache that the model makes for itself, as its configuration says."""
    if model.config.is_encoder_decoder:
        return "EncoderDecoderCache"
    return "MiniMaxCache" if model.config.model_type == "minimax" else "DynamicCache"


def cache_name(model: PreTrainedModel) -> str:
    """The argument by which the model takes its cache."""
    takes = inspect.signature(model.forward).parameters
    return "cache_params" if "cache_params" in takes else "past_key_values"


@torch.no_grad()
def trial(model: PreTrainedModel) -> Cache:
    """The model's own cache after a token, or as many as it keeps one entry for.

    Every layer that keeps something has it then.
    """
    layers = DynamicCache(config=model.config).layers
    num_tokens = max(getattr(layer, "compress_rate", 1) for layer in layers)
    tokens = torch.zeros((1, num_tokens), dtype=torch.long, device=model.device)
    given: dict[str, Any] = {"input_ids": tokens}
    if model.config.is_encoder_decoder:
        width = model.config.hidden_size
        position: Any = torch.zeros((1, 1, width), device=model.device, dtype=model.dtype)
        encoder = BaseModelOutput(last_hidden_state=position)
        given = {"decoder_input_ids": tokens, "encoder_outputs": encoder}
    cache = model(use_cache=True, **given).get(cache_name(model))
    if type(cache).__name__ not in OWN_CACHES:
        kept = "no cache that it shows" if cache is None else f"a {type(cache).__name__}"
        raise ModelError(
            f"{type(model).__name__} keeps its tokens in {kept}\n\n"
            f"hint: models that make a {' or a '.join(OWN_CACHES)} can be served"
        )
    _check_takes_cache(model, cache, tokens)
    return cache


def _check_takes_cache(model: PreTrainedModel, kept: Cache, tokens: torch.Tensor) -> None:
    """Refuses a model that, given a cache, uses one of its own: with tokens in front of all others,
    as PEFT's prefix tuning does."""
    keys = [getattr(layer, "keys", None) for layer in getattr(kept, "layers", ())]
    if all(each is None or each.shape[-2] <= tokens.shape[1] for each in keys):
        return
    given = DynamicCache(config=model.config)
    model(input_ids=tokens, use_cache=True, past_key_values=given)
    if given.get_seq_length() == 0:
        raise ModelError(
            f"{type(model).__name__} puts keys and values of its own in the place of its cache"
            "\n\nhint: disable such an adapter (PEFT's prefix tuning) before"
        )


@torch.no_grad()
def resumes(model: PreTrainedModel) -> bool:
    """Whether the model, given several tokens, goes on from the state it finds in its cache.

    Some recurrent models begin anew unless tokens come one by one. Their states must not be
    reused for a prompt that continues, so this is tried rather than believed.
    """
    tokens = torch.arange(2 * TRIAL_TOKENS, device=model.device).unsqueeze(0)
    whole = model(input_ids=tokens, use_cache=False).logits[:, -1].float()
    first = model(input_ids=tokens[:, :TRIAL_TOKENS], use_cache=True)
    given = {cache_name(model): first[cache_name(model)]}
    parts = model(input_ids=tokens[:, TRIAL_TOKENS:], use_cache=True, **given).logits[:, -1].float()
    tolerance = max(3e-5, 8 * torch.finfo(model.dtype).eps)
    return bool((whole - parts).abs().max() <= tolerance * whole.abs().max())


def cache_layers(
    model: PreTrainedModel, *, block_tokens: int = 16, shard: HeadShard = ALL_HEADS
) -> tuple[LayerSpec, ...]:
    """The model's cache as layer specs: `layers.3`, `layers.3.state`, `layers.3.indexer`.

    Blocks hold `block_tokens` tokens, or more where these would not make whole entries.
    """
    return kept_layers(trial(model), block_tokens=block_tokens, shard=shard)


def kept_layers(cache: Cache, *, block_tokens: int, shard: HeadShard) -> tuple[LayerSpec, ...]:
    """What a cache that has been used keeps, as layer specs."""
    specs: list[LayerSpec] = []
    own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    for i, layer in enumerate(own.layers):
        specs += kept_specs(f"layers.{i}", layer, block_tokens, shard)
    states: list[torch.Tensor] = getattr(cache, "linear_cache", [])
    for i, state in enumerate(states):
        if len(state):
            specs.append(state_spec(f"layers.{i}", {"recurrent0": state}, block_tokens))
    if not specs:
        raise ModelError(f"a model kept nothing in its {type(cache).__name__}")
    return tuple(specs)


def crossed_layers(
    cache: EncoderDecoderCache, encoder_tokens: int, *, block_tokens: int, shard: HeadShard
) -> tuple[LayerSpec, ...]:
    """What such a cache keeps of an encoder of at most so many positions: `layers.3.cross`."""
    return tuple(
        replace(spec, retention=Encoder(encoder_tokens))
        for i, layer in enumerate(cache.cross_attention_cache.layers)
        for spec in kept_specs(f"layers.{i}.cross", layer, block_tokens, shard)
    )


def encoder_positions(model: PreTrainedModel) -> int:
    """The most positions of the model's encoder, as its configuration says."""
    most = getattr(model.config, "max_source_positions", None)
    if most is None:
        raise ModelError(
            f"{type(model).__name__} does not say how long its encoder's input may be\n\n"
            "hint: ModelMemory.of(model, encoder_tokens=...)"
        )
    return int(most)


def placeholder_tokens(model: PreTrainedModel) -> frozenset[int]:
    """The ids of tokens that stand for an image, a clip or a sound, as the configuration says."""
    return frozenset(
        value
        for name, value in _settings(model.config.to_dict())
        if _PLACEHOLDER.search(name) and isinstance(value, int)
    )


def padding_token(model: PreTrainedModel) -> int | None:
    """The token that `generate` masks as padding where it is given no mask; None where there is
    none, or where the same token ends sequences."""
    settings: Any = model.generation_config
    if settings is None or settings.pad_token_id is None:
        return None
    ends = settings.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return None if settings.pad_token_id in ends else int(settings.pad_token_id)


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of a configuration and of those inside it."""
    for name, value in config.items():
        yield str(name), value
        if isinstance(value, Mapping):
            yield from _settings(cast("Mapping[str, Any]", value))


_PLACEHOLDER = re.compile(r"(image|video|vision|audio|speech)\w*_token_(id|index)$")


ROPES_BY_LENGTH = re.compile("dynamic|longrope|^su$")
"""Ropes that turn all keys by another angle in long sequences than in short ones."""


def follows_tokens(model: PreTrainedModel) -> bool:
    """Whether what is kept of a token depends on it and on those before it, and nothing else.

    Not where the rope follows the sequence's length in a way that is not known (see `ropes`),
    where tokens see later ones, and in training, where weights change and dropout is random.
    """
    if model.training:
        return False
    ropes = length_ropes(model)
    for name, value in _settings(model.config.to_dict()):
        by_length = name in ("rope_type", "type") and ROPES_BY_LENGTH.search(str(value))
        if (by_length or (name == "use_dynamic_ntk" and value)) and not ropes:
            return False
        if name in ("use_bidirectional_attention", "prefix_lm") and value in (True, "all"):
            return False
    return len(ropes) <= 1 and None not in ropes
