"""Ordinary decoders: attention in every layer, over everything, a window, or a chunk.

A cell of one kv head and one token is `k v`, with `k_scale v_scale` behind them where
elements are narrow; nvfp4 pages are four sections, `k`, `k_scale`, `v`, `v_scale`. Decoders that
read an encoder have a second cache per layer.

What each layer sees is read from `layer_types` where the configuration lists them. Older files
have `sliding_window` and leave the pattern to their family; each family's rule here is the one
that transformers follows, and a window whose family has no rule is refused:

    everywhere    mistral, mixtral, phi3 …      every layer, unless `use_sliding_window` is false
    every nth     gemma3, cohere2, exaone4 …    the nth layer sees everything
    first of n    cwm, granite_swa              the first of each n layers sees everything
    from layer n  qwen2, qwen3, dots1 …         layers from `max_window_layers` on
    without rope  smollm3                       layers that have no rotary positions
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvstow.errors import ModelError
from kvstow.plan.models.config import Config
from kvstow.plan.models.serving import AxisPart, Precision, ServingOptions, Stack
from kvstow.plan.retention import Chunk, Encoder, Full, Retention, Window
from kvstow.plan.spec import DType, Extent, Field, LayerSpec

ONE_HEAD = Extent.whole("head", 1)
_SCALE_GROUP = 16
"""Elements of nvfp4 that have a scale together."""

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
MOST_LAYERS = 1000
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


class Heads(NamedTuple):
    """An attention's heads, of the whole model."""

    query: int
    kv: int
    key_dim: int
    value_dim: int


def num_layers(config: Config) -> int:
    """How many decoder layers the model has."""
    return config.count(*_LAYERS, most=MOST_LAYERS)


def _key_value_fields(name: str, heads: Heads, precision: Precision) -> tuple[Field, ...]:
    """Keys and values of a token and head, and their scales."""
    key_dim, value_dim = heads.key_dim, heads.value_dim
    dtype, scale = precision.dtype, DType.FLOAT8_E4M3
    plain = content("k", dtype, key_dim), content("v", dtype, value_dim)
    match precision.scales:
        case "none":
            return plain
        case "head":
            scales = (content(f"{each}_scale", DType.FLOAT32, 1) for each in "kv")
            return *plain, *scales
        case "group":
            for dim in (key_dim, value_dim):
                if dim % _SCALE_GROUP:
                    raise ModelError(
                        f"layer {name!r}: nvfp4 needs head dims in multiples of {_SCALE_GROUP}, "
                        f"not {dim}"
                    )
            return (
                plain[0],
                content("k_scale", scale, key_dim // _SCALE_GROUP, 1),
                content("v", dtype, value_dim, 2),
                content("v_scale", scale, value_dim // _SCALE_GROUP, 3),
            )
        case "latent":
            raise ModelError(
                f"layer {name!r}: fp8_ds_mla stores latents, and this layer keeps keys and values"
                "\n\nhint: use fp8 or fp8_per_token_head"
            )


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
    heads = heads or heads_of(config)
    serving.divided("attention heads", heads.query)
    return LayerSpec(
        name=name,
        retention=retention,
        block_tokens=serving.tokens,
        states=serving.tokens,
        heads=serving.split("head", AxisPart("kv heads", heads.kv, replicable=True)),
        fields=_key_value_fields(name, heads, serving.precision(config)),
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
    kept = total - config.count("num_kv_shared_layers", default=0, least=0, most=total - 1)
    layers: list[tuple[LayerSpec, ...]] = []
    for i, retention in enumerate(retentions(config, total)[:kept]):
        heads = heads_of_layer(config, i, sees_all=isinstance(retention, Full))
        name = f"model.layers.{i}.self_attn"
        layers.append((self_attention(name, config, serving, retention=retention, heads=heads),))
    return Stack((*layers, *[()] * (total - kept)))


_PER_LAYER = {"head_dim", "num_key_value_heads"}


def heads_of_layer(config: Config, layer: int, *, sees_all: bool) -> Heads:
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
        num_layers=config.count("decoder_layers", most=MOST_LAYERS),
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
        num_layers=config.count("num_decoder_layers", "num_layers", most=MOST_LAYERS),
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


# ── what each layer sees ──────────────────────────────────────────────────────────────────

Rule = Callable[[Config, int], Sequence[bool]]
"""For each of so many layers of a model with a window, whether the layer is limited to it."""

_PATTERN = ("sliding_window_pattern", "_sliding_window_pattern")


def layer_types(config: Config, total: int) -> list[str] | None:
    """The configuration's own list of layer types, if it has one."""
    key = config.present("layer_types", "layers_block_type")
    if key is None:
        return None
    types = config.texts(key)
    if len(types) != total:
        raise config.error(f"{key} names {len(types)} layers, num_hidden_layers is {total}")
    return types


def retentions(config: Config, total: int) -> list[Retention]:
    """What each of the `total` layers of a decoder sees."""
    types = layer_types(config, total)
    if types is not None:
        return [_retention(config, kind) for kind in types]
    if config.model_type in ("llama4_text", "llama4"):
        return _chunked(config, total)
    used = config.flag("use_sliding_window", default=config.model_type not in _OFF)
    if not used or "sliding_window" not in config:
        return [Full()] * total
    rule = _RULES.get(config.model_type)
    window = Window(config.count("sliding_window"))
    if rule is None:
        raise config.error(
            f"sliding_window is {window.tokens}, and nothing says which layers of model_type "
            f"{config.model_type!r} it limits",
            "add 'layer_types', a list of 'full_attention' and 'sliding_attention'; "
            "or take sliding_window out if no layer has it",
        )
    return [window if limited else Full() for limited in rule(config, total)]


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
                f"layer_types has {kind!r}, which is not supported for model_type "
                f"{config.model_type!r}"
            )


# ── the rules ─────────────────────────────────────────────────────────────────────────────


def _every(default: int, *keys: str) -> Rule:
    """All but each nth layer; the number is under one of `keys`, or letters as in `LLLG`."""

    def rule(config: Config, total: int) -> list[bool]:
        key = config.present(*keys)
        if key is not None and isinstance(config.facts[key], str):
            letters = config.text(key, "")
            if not letters or set(letters) - {"L", "G"}:
                raise config.error(f"{key} is {letters!r}, not letters L (local) and G (global)")
            return [letters[i % len(letters)] == "L" for i in range(total)]
        period = default if key is None else config.count(key)
        return [(i + 1) % period != 0 for i in range(total)]

    return rule


def _each(limited: Callable[[int], bool]) -> Rule:
    return lambda config, total: [limited(i) for i in range(total)]


def _from_layer(default: int) -> Rule:
    def rule(config: Config, total: int) -> list[bool]:
        first = config.count("max_window_layers", default=default, least=0)
        return [i >= first for i in range(total)]

    return rule


def _even_before_layer(config: Config, total: int) -> list[bool]:
    limit = config.count("max_window_layers", default=28, least=0)
    return [i % 2 == 0 and i < limit for i in range(total)]


def _without_rope(config: Config, total: int) -> list[bool]:
    return [not has_rope for has_rope in _rotary(config, total)]


def _rotary(config: Config, total: int) -> list[bool]:
    """For each layer whether it has rotary positions."""
    if not config.facts.get("no_rope_layers"):
        period = config.count("no_rope_layer_interval", default=4)
        return [(i + 1) % period != 0 for i in range(total)]
    rotary = config.counts("no_rope_layers")
    if len(rotary) != total:
        raise config.error(
            f"no_rope_layers has {len(rotary)} entries, num_hidden_layers is {total}"
        )
    return [has_rope != 0 for has_rope in rotary]


def _chunked(config: Config, total: int) -> list[Retention]:
    """Llama 4: layers with rotary positions see their chunk, the others everything."""
    if "attention_chunk_size" not in config:
        return [Full()] * total
    chunk = Chunk(config.count("attention_chunk_size"))
    return [chunk if has_rope else Full() for has_rope in _rotary(config, total)]


_all_limited = _each(lambda i: True)

_RULES: dict[str, Rule] = {
    name: rule
    for names, rule in {
        "ministral ministral3 mistral mixtral phi3 phi4_multimodal phimoe": _all_limited,
        "qwen3_moe starcoder2": _all_limited,
        "cwm granite_swa granitemoe_swa": _each(lambda i: i % 4 != 0),
        "gemma2 gpt_oss vaultgemma": _every(2),
        "cohere2 exaone4 exaone_moe": _every(4, *_PATTERN),
        "olmo3": _every(4),
        "afmoe": _every(4, "global_attn_every_n_layers"),
        "gemma3n_text": _every(5),
        "gemma3 gemma3_text": _every(6, *_PATTERN),
        "gemma4_text": _every(6),
        "dots1": _from_layer(62),
        "qwen2 qwen3 qwen2_5_omni_text": _from_layer(28),
        "qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text": _from_layer(80),
        "qwen2_moe": _even_before_layer,
        "smollm3": _without_rope,
    }.items()
    for name in names.split()
}
"""By `model_type`."""

_OFF = frozenset(
    (
        *("qwen2", "qwen2_5_omni_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl"),
        *("qwen2_vl_text", "qwen3", "qwen3_moe", "smollm3"),
    )
)
"""Families whose files name a window that only `use_sliding_window` switches on."""
