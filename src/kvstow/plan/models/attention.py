"""Ordinary decoders: attention in every layer, over everything, a window, or a chunk.

A cell of one kv head and one token is `k v`, with `k_scale v_scale` behind them where
elements are narrow. Which layers see what is read from `layer_types` where the
configuration has it, and otherwise from the older keys of each family.
"""

from dataclasses import dataclass

from kvstow.errors import ModelError
from kvstow.plan.models.config import Config
from kvstow.plan.models.ranks import AxisPart, split
from kvstow.plan.models.serving import (
    NvFp4,
    PerTokenHead,
    Plain,
    Precision,
    ScaledLatent,
    ServingOptions,
    Stack,
)
from kvstow.plan.retention import Chunk, Full, Retention, Window
from kvstow.plan.spec import DType, Extent, Field, LayerSpec

ONE_HEAD = Extent.whole("head", 1)
_NVFP4_SCALE_GROUP = 16

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_MOST_LAYERS = 1000
_QUERY_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv")
_HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels", "d_kv")
_HIDDEN = ("hidden_size", "n_embd", "d_model")


def content(name: str, dtype: DType, size: int) -> Field:
    """A field that is one run of `size` elements per cell, alike on every rank."""
    return Field(name, dtype, (Extent.whole("content", size),))


def attention(
    name: str,
    *,
    retention: Retention,
    block_tokens: int,
    heads: Extent,
    key_dim: int,
    value_dim: int,
    precision: Precision,
) -> LayerSpec:
    """Keys and values of each token, per kv head: `key_dim + value_dim` elements and scales."""
    return LayerSpec(
        name=name,
        retention=retention,
        block_tokens=block_tokens,
        states=block_tokens,
        heads=heads,
        fields=_key_value_fields(name, key_dim, value_dim, precision),
    )


def _key_value_fields(
    name: str, key_dim: int, value_dim: int, precision: Precision
) -> tuple[Field, ...]:
    match precision:
        case Plain(dtype):
            return content("k", dtype, key_dim), content("v", dtype, value_dim)
        case PerTokenHead(dtype):
            return (
                content("k", dtype, key_dim),
                content("v", dtype, value_dim),
                content("k_scale", DType.FLOAT32, 1),
                content("v_scale", DType.FLOAT32, 1),
            )
        case NvFp4():
            return _nvfp4_fields(name, key_dim, value_dim)
        case ScaledLatent():
            raise ModelError(
                f"layer {name!r}: fp8_ds_mla stores latents, and this layer keeps keys and values"
                "\n\nhint: use fp8 or fp8_per_token_head"
            )


def _nvfp4_fields(name: str, key_dim: int, value_dim: int) -> tuple[Field, ...]:
    for dim in (key_dim, value_dim):
        if dim % _NVFP4_SCALE_GROUP:
            raise ModelError(
                f"layer {name!r}: nvfp4 needs head dims in multiples of "
                f"{_NVFP4_SCALE_GROUP}, not {dim}"
            )
    return (
        content("k", DType.FLOAT4_E2M1, key_dim),
        content("v", DType.FLOAT4_E2M1, value_dim),
        content("k_scale", DType.FLOAT8_E4M3, key_dim // _NVFP4_SCALE_GROUP),
        content("v_scale", DType.FLOAT8_E4M3, value_dim // _NVFP4_SCALE_GROUP),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """An attention's heads, of the whole model."""

    query: int
    kv: int
    key_dim: int
    value_dim: int


def num_layers(config: Config) -> int:
    """How many decoder layers the model has."""
    return checked_layers(config, *_LAYERS)


def checked_layers(config: Config, *keys: str) -> int:
    """The number of layers under the first of `keys` that has a value, within reason."""
    total = config.count(*keys)
    if total > _MOST_LAYERS:
        raise config.error(f"{config.present(*keys)} is {total}, more than {_MOST_LAYERS}")
    return total


def heads_of(config: Config) -> Heads:
    """The heads of a model, checked against each other."""
    query = config.count(*_QUERY_HEADS)
    kv = _kv_heads(config, query)
    if kv > query or query % kv:
        raise config.error(f"{query} attention heads cannot share {kv} kv heads evenly")
    key_dim = _head_dim(config, query)
    return Heads(
        query=query,
        kv=kv,
        key_dim=key_dim,
        value_dim=config.count("v_head_dim", default=key_dim),
    )


def _kv_heads(config: Config, query: int) -> int:
    multi_query = config.flag("multi_query", default=False)
    if config.model_type == "falcon" and not config.flag("new_decoder_architecture", default=False):
        return 1 if multi_query else query
    return config.count(*_KV_HEADS, default=1 if multi_query else query)


def _head_dim(config: Config, query: int) -> int:
    if config.present(*_HEAD_DIM):
        return config.count(*_HEAD_DIM)
    hidden = config.count(*_HIDDEN)
    if hidden % query:
        raise config.error(
            f"hidden_size {hidden} is not divisible by {query} attention heads, "
            "and there is no head_dim",
            "add 'head_dim' to the configuration",
        )
    return hidden // query


def self_attention(
    name: str,
    config: Config,
    serving: ServingOptions,
    *,
    retention: Retention,
    heads: Heads | None = None,
) -> LayerSpec:
    """One attention layer of the model, this rank's part of it."""
    heads = heads_of(config) if heads is None else heads
    serving.rank.divided("attention heads", heads.query)
    return attention(
        name,
        retention=retention,
        block_tokens=serving.tokens,
        heads=split("head", (AxisPart("kv heads", heads.kv, replicable=True),), serving.rank),
        key_dim=heads.key_dim,
        value_dim=heads.value_dim,
        precision=serving.precision(config),
    )


def decoder(config: Config, serving: ServingOptions) -> Stack:
    """Attention in every layer."""
    layers = tuple(
        (self_attention(f"model.layers.{i}.self_attn", config, serving, retention=retention),)
        for i, retention in enumerate(retentions(config))
    )
    return Stack(layers)


def layer_types(config: Config, total: int) -> list[str] | None:
    """The configuration's own list of layer types, if it has one."""
    key = config.present("layer_types", "layers_block_type")
    if key is None:
        return None
    types = config.texts(key)
    if len(types) != total:
        raise config.error(f"{key} names {len(types)} layers, num_hidden_layers is {total}")
    return types


def retentions(config: Config) -> list[Retention]:
    """What each layer of an ordinary decoder sees."""
    total = num_layers(config)
    types = layer_types(config, total)
    if types is not None:
        return [_retention(config, kind) for kind in types]
    used = config.flag("use_sliding_window", default=False)
    match config.model_type:
        case "gemma2" | "gpt_oss":
            local = [i % 2 == 0 for i in range(total)]
        case "gemma3_text" | "gemma3":
            local = _every(config, total, default=6)
        case "cohere2":
            local = _every(config, total, default=4)
        case "llama4_text" | "llama4":
            return _chunked(config, total)
        case "qwen2" | "qwen3":
            local = [used and i >= _window_layers(config) for i in range(total)]
        case "qwen2_moe":
            local = [used and i % 2 == 0 and i < _window_layers(config) for i in range(total)]
        case "qwen3_moe":
            local = [used] * total
        case _:
            local = [config.flag("use_sliding_window", default=True)] * total
            if _pattern_key(config) is not None:
                local = _every(config, total, default=1)
    window = _window(config)
    return [window if is_local else Full() for is_local in local]


def _retention(config: Config, kind: str) -> Retention:
    match kind:
        case "full_attention" | "attention" | "global_attention":
            return Full()
        case "sliding_attention" | "sliding_window_attention":
            return Window(config.count("sliding_window"))
        case "chunked_attention":
            return Chunk(config.count("attention_chunk_size"))
        case _:
            raise config.error(
                f"layer_types has {kind!r}, which model_type {config.model_type!r} is not known for"
            )


def _window_layers(config: Config) -> int:
    """Qwen's `max_window_layers`, which may be 0."""
    limit = config.facts.get("max_window_layers", 28)
    if type(limit) is not int or limit < 0:
        raise config.error(f"max_window_layers is {limit!r}, not a whole number >= 0")
    return limit


def _window(config: Config) -> Retention:
    return Window(config.count("sliding_window")) if "sliding_window" in config else Full()


def _pattern_key(config: Config) -> str | None:
    return config.present("sliding_window_pattern", "_sliding_window_pattern")


def _every(config: Config, total: int, *, default: int) -> list[bool]:
    key = _pattern_key(config)
    period = default if key is None else config.count(key)
    return [(i + 1) % period != 0 for i in range(total)]


def _chunked(config: Config, total: int) -> list[Retention]:
    """Llama 4: layers with rotary positions see their chunk, the others everything."""
    if "attention_chunk_size" not in config:
        return [Full()] * total
    chunk = Chunk(config.count("attention_chunk_size"))
    if config.facts.get("no_rope_layers"):
        rotary = config.counts("no_rope_layers")
        if len(rotary) != total:
            raise config.error(
                f"no_rope_layers has {len(rotary)} entries, num_hidden_layers is {total}"
            )
    else:
        period = config.count("no_rope_layer_interval", default=4)
        rotary = [(i + 1) % period for i in range(total)]
    return [chunk if has_rope else Full() for has_rope in rotary]
