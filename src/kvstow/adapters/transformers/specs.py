# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeArgument=false
"""What a transformers model really keeps, found by letting it keep a token or a few.

Nothing is derived from the configuration but the retention of each layer: heads, widths and
element types are those of the tensors that the model hands to its own default cache. So a
model that stores decompressed keys is described as such, whatever its paper says.
"""

import inspect
from dataclasses import replace
from typing import Any

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from kvstow.adapters.transformers.kept import kept_specs, state_spec
from kvstow.adapters.transformers.shard import ALL_HEADS, Shard
from kvstow.errors import ModelError
from kvstow.plan.retention import Encoder
from kvstow.plan.spec import LayerSpec

TRIAL_TOKENS = 8

OWN_CACHES = ("DynamicCache", "EncoderDecoderCache", "MiniMaxCache")
"""Caches whose content is described by `kept_layers`, and replaced by a `KvstowCache`."""


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
    return cache


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
    model: PreTrainedModel, *, block_tokens: int = 16, shard: Shard = ALL_HEADS
) -> tuple[LayerSpec, ...]:
    """The model's cache as layer specs: `layers.3`, `layers.3.state`, `layers.3.indexer`.

    Blocks hold `block_tokens` tokens, or more where these would not make whole entries.
    """
    return kept_layers(trial(model), block_tokens=block_tokens, shard=shard)


def kept_layers(cache: Cache, *, block_tokens: int, shard: Shard) -> tuple[LayerSpec, ...]:
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
    cache: EncoderDecoderCache, encoder_tokens: int, *, block_tokens: int, shard: Shard
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
