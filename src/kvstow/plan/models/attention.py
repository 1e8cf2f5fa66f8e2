"""Ordinary decoders: attention in every layer, over everything, a window, or a chunk.

A cell of one kv head and one token is `k v`, with `k_scale v_scale` behind them where
elements are narrow; nvfp4 pages are four sections, `k`, `k_scale`, `v`, `v_scale`. Which
layers see what is in `windows`. Decoders that read an encoder have a second cache per layer.
"""

from dataclasses import dataclass, replace

from kvstow.errors import ModelError
from kvstow.plan.models.config import Config
from kvstow.plan.models.precision import (
    NvFp4,
    PerTokenHead,
    Plain,
    Precision,
    ScaledLatent,
    ServingOptions,
    Stack,
)
from kvstow.plan.models.ranks import AxisPart, split
from kvstow.plan.models.windows import retentions
from kvstow.plan.retention import Encoder, Full, Retention
from kvstow.plan.spec import DType, Extent, Field, LayerSpec

ONE_HEAD = Extent.whole("head", 1)
_NVFP4_SCALE_GROUP = 16

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_MOST_LAYERS = 1000
_QUERY_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_KV_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "multi_query_group_num",
    "n_head_kv",
    "num_attention_groups",
)
_HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels", "d_kv")
_HIDDEN = ("hidden_size", "n_embd", "d_model")


def content(name: str, dtype: DType, size: int, section: int = 0) -> Field:
    """A field that is one run of `size` elements per cell, alike on every rank."""
    return Field(name, dtype, (Extent.whole("content", size),), section)


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
        content("k", DType.FLOAT4_E2M1, key_dim, 0),
        content("k_scale", DType.FLOAT8_E4M3, key_dim // _NVFP4_SCALE_GROUP, 1),
        content("v", DType.FLOAT4_E2M1, value_dim, 2),
        content("v_scale", DType.FLOAT8_E4M3, value_dim // _NVFP4_SCALE_GROUP, 3),
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
        for i, retention in enumerate(retentions(config, num_layers(config)))
    )
    return Stack(layers)


# ── Gemma 3n and 4: layers that read another layer's cache, heads of two sizes ─────────────


def sharing_decoder(config: Config, serving: ServingOptions) -> Stack:
    """Attention in every layer; the last `num_kv_shared_layers` read earlier caches and keep none.

    In Gemma 4 layers that see everything have heads of their own size and number.
    """
    total = num_layers(config)
    kept = total - _shared_layers(config, total)
    layers: list[tuple[LayerSpec, ...]] = []
    for i, retention in enumerate(retentions(config, total)[:kept]):
        heads = _heads_of_layer(config, i, sees_all=isinstance(retention, Full))
        name = f"model.layers.{i}.self_attn"
        layers.append((self_attention(name, config, serving, retention=retention, heads=heads),))
    return Stack((*layers, *[()] * (total - kept)))


def _shared_layers(config: Config, total: int) -> int:
    shared = config.facts.get("num_kv_shared_layers")
    shared = 0 if shared is None else shared
    if type(shared) is not int or not 0 <= shared < total:
        raise config.error(
            f"num_kv_shared_layers is {shared!r}, not a whole number from 0 to {total - 1}"
        )
    return shared


_PER_LAYER = {"head_dim", "num_key_value_heads"}


def _heads_of_layer(config: Config, layer: int, *, sees_all: bool) -> Heads:
    """The heads of one layer: `per_layer_config` says, or the older `global_` keys do."""
    own: dict[str, object] = {}
    if "per_layer_config" in config:
        overrides = config.inner("per_layer_config")
        for key in overrides.facts:
            if not key.isdecimal() or len(key) > 9:
                raise config.error(f"per_layer_config has {key[:40]!r}, not the number of a layer")
            if int(key) == layer:  # written with leading zeros
                own = dict(overrides.inner(key).facts)
        if odd := sorted(own.keys() - _PER_LAYER):
            raise config.error(f"per_layer_config of layer {layer} changes {odd[0]!r}")
    elif sees_all and config.model_type.startswith("gemma4"):
        own["head_dim"] = config.count("global_head_dim", default=512)
        if config.flag("attention_k_eq_v", default=False):
            own["num_key_value_heads"] = config.facts.get("num_global_key_value_heads")
    facts = {**config.facts, **{key: value for key, value in own.items() if value is not None}}
    return heads_of(Config(name=config.name, facts=facts))


# ── decoders that read an encoder ─────────────────────────────────────────────────────────

_T5_TOKENS = 512


def encoder_decoder(config: Config, serving: ServingOptions) -> Stack:
    """Whisper, and text models of the same shape: an encoder of a fixed length."""
    heads, hidden = config.count("decoder_attention_heads"), config.count("d_model")
    if hidden % heads:
        raise config.error(f"d_model {hidden} is not divisible by {heads} decoder_attention_heads")
    dim = hidden // heads
    return _reading_decoder(
        config,
        serving,
        num_layers=checked_layers(config, "decoder_layers"),
        heads=Heads(query=heads, kv=heads, key_dim=dim, value_dim=dim),
        tokens=config.count("max_source_positions", "max_position_embeddings"),
        names=("model.decoder.layers.{}.self_attn", "model.decoder.layers.{}.encoder_attn"),
    )


def t5(config: Config, serving: ServingOptions) -> Stack:
    """T5: relative positions, so the encoder's length is an assumption unless stated."""
    heads, dim = config.count("num_heads"), config.count("d_kv")
    tokens = config.count("n_positions", default=_T5_TOKENS)
    whence = "n_positions" if "n_positions" in config else "an assumption, no n_positions is given"
    stack = _reading_decoder(
        config,
        serving,
        num_layers=checked_layers(config, "num_decoder_layers", "num_layers"),
        heads=Heads(query=heads, kv=heads, key_dim=dim, value_dim=dim),
        tokens=tokens,
        names=(
            "decoder.block.{}.layer.0.SelfAttention",
            "decoder.block.{}.layer.1.EncDecAttention",
        ),
    )
    note = f"cross-attention is planned for {tokens} encoder tokens ({whence})"
    return replace(stack, notes=(note,))


def _reading_decoder(
    config: Config,
    serving: ServingOptions,
    *,
    num_layers: int,
    heads: Heads,
    tokens: int,
    names: tuple[str, str],
) -> Stack:
    """Per layer the decoder's own attention, and what it reads of an encoder of `tokens`."""

    def cache(name: str, retention: Retention) -> LayerSpec:
        return self_attention(name, config, serving, retention=retention, heads=heads)

    own, cross = names
    return Stack(
        tuple(
            (cache(own.format(i), Full()), cache(cross.format(i), Encoder(tokens)))
            for i in range(num_layers)
        )
    )
