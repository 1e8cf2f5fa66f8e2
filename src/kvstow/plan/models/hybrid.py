"""Models with recurrent layers: alone, beside attention, or with attention in between.

    mamba, mamba2                               recurrent layers only
    jamba, bamba, nemotron_h, qwen3_next,
    kimi_linear, minimax, lfm2                  attention in some layers
    falcon_h1                                   both in every layer
    zamba, zamba2                               a state in every layer, attention too in some

What a recurrent layer keeps is in `recurrent`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvstow.plan.models import recurrent
from kvstow.plan.models.attention import Heads, heads_of, num_layers, self_attention
from kvstow.plan.models.config import Config
from kvstow.plan.models.deepseek import latent_layer
from kvstow.plan.models.precision import ServingOptions, Stack
from kvstow.plan.models.windows import layer_types
from kvstow.plan.retention import Full
from kvstow.plan.spec import DType, LayerSpec

Make = Callable[[str], LayerSpec]

ATTENTION = ("full_attention", "attention")
RECURRENT = ("linear_attention", "mamba", "conv", "short_conv")
_NEMOTRON_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_NEMOTRON_TYPES = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}


def mixed(is_attention: Sequence[bool], *, attention: Make, state: Make, state_name: str) -> Stack:
    """Attention in some decoder layers, a recurrent state in all others."""
    layers = (
        attention(f"model.layers.{i}.self_attn")
        if full
        else state(f"model.layers.{i}.{state_name}")
        for i, full in enumerate(is_attention)
    )
    return Stack(tuple((layer,) for layer in layers))


def full_attention(config: Config, serving: ServingOptions) -> Make:
    """The model's attention over everything, by layer name."""
    return lambda name: self_attention(name, config, serving, retention=Full())


def from_types(config: Config) -> list[bool] | None:
    """For each layer whether it is attention, where the configuration lists layer types."""
    types = layer_types(config, num_layers(config))
    if types is None:
        return None
    odd = [kind for kind in types if kind not in ATTENTION + RECURRENT]
    if odd:
        raise config.error(f"layer_types has {odd[0]!r}, which is neither attention nor recurrent")
    return [kind in ATTENTION for kind in types]


def from_indices(config: Config, key: str, *, first: int = 0) -> list[bool]:
    """For each layer whether the list under `key`, counted from `first`, names it."""
    total = num_layers(config)
    chosen = config.counts(key) if key in config else []
    outside = [i for i in chosen if not first <= i < first + total]
    if outside:
        raise config.error(f"{key} names layer {outside[0]}, num_hidden_layers is {total}")
    return [first + i in chosen for i in range(total)]


def every(config: Config, period: int, offset: int) -> list[bool]:
    """Attention in layers `offset`, `offset + period` and so on."""
    return [i % period == offset for i in range(num_layers(config))]


def kernel(config: Config, key: str) -> int:
    """Taps of a convolution that remembers something."""
    taps = config.count(key)
    if taps < 2:
        raise config.error(f"{key} is {taps}: such a convolution remembers nothing")
    return taps


# ── state-space models ────────────────────────────────────────────────────────────────────


def mamba(config: Config, serving: ServingOptions) -> Stack:
    """Mamba 1 in every layer."""
    hidden = config.count("hidden_size")
    inner = config.count("expand", default=2) * hidden
    state = _mamba1(
        config,
        serving,
        channels=config.count("intermediate_size", default=inner),
        state="state_size",
        conv="conv_kernel",
    )
    return Stack(tuple((state(f"backbone.layers.{i}.mixer"),) for i in range(num_layers(config))))


def jamba(config: Config, serving: ServingOptions) -> Stack:
    """Mamba 1, and attention once in every `attn_layer_period` layers."""
    is_attention = from_types(config)
    if is_attention is None:
        period = config.count("attn_layer_period")
        is_attention = every(config, period, _offset(config, period))
    channels = config.count("mamba_expand") * config.count("hidden_size")
    state = _mamba1(config, serving, channels=channels, state="mamba_d_state", conv="mamba_d_conv")
    attention = full_attention(config, serving)
    return mixed(is_attention, attention=attention, state=state, state_name="mamba")


def _offset(config: Config, period: int) -> int:
    offset = config.facts.get("attn_layer_offset")
    if type(offset) is not int or not 0 <= offset < period:
        raise config.error(f"attn_layer_offset is {offset!r}, attn_layer_period is {period}")
    return offset


def _mamba1(
    config: Config, serving: ServingOptions, *, channels: int, state: str, conv: str
) -> Make:
    return lambda name: recurrent.mamba1(
        name,
        serving.recurrence(config),
        channels=channels,
        state=config.count(state),
        kernel=kernel(config, conv),
    )


def mamba2(config: Config, serving: ServingOptions) -> Stack:
    """Mamba 2 in every layer."""
    heads = config.count("num_heads")
    head_dim = config.count("head_dim")
    inner = config.count("expand", default=2) * config.count("hidden_size")
    _agree(config, heads, head_dim, inner, "expand x hidden_size")
    state = _mamba2(
        config,
        serving,
        heads=heads,
        head_dim=head_dim,
        groups="n_groups",
        state="state_size",
        conv="conv_kernel",
    )
    return Stack(tuple((state(f"backbone.layers.{i}.mixer"),) for i in range(num_layers(config))))


def bamba(config: Config, serving: ServingOptions) -> Stack:
    """Mamba 2, and attention in the layers that the configuration names."""
    is_attention = from_types(config)
    if is_attention is None:
        is_attention = from_indices(config, "attn_layer_indices")
    attention = full_attention(config, serving)
    state = _bamba_state(config, serving)
    return mixed(is_attention, attention=attention, state=state, state_name="mamba")


def falcon_h1(config: Config, serving: ServingOptions) -> Stack:
    """Mamba 2 and attention side by side in every layer."""
    state = _bamba_state(config, serving)
    layers: list[tuple[LayerSpec, ...]] = []
    for i in range(num_layers(config)):
        name = f"model.layers.{i}"
        attention = self_attention(f"{name}.self_attn", config, serving, retention=Full())
        layers.append((attention, state(f"{name}.mamba")))
    return Stack(tuple(layers))


def zamba2(config: Config, serving: ServingOptions) -> Stack:
    """Mamba 2 in every layer, and in some of them attention in front of it."""
    heads = config.count("n_mamba_heads")
    inner = config.count("mamba_expand", default=2) * config.count("hidden_size")
    head_dim = config.count("mamba_headdim", default=max(1, inner // heads))
    _agree(config, heads, head_dim, inner, "mamba_expand x hidden_size")
    state = _mamba2(
        config,
        serving,
        heads=heads,
        head_dim=head_dim,
        groups="mamba_ngroups",
        state="mamba_d_state",
        conv="mamba_d_conv",
    )
    return _zamba(config, serving, state)


def zamba(config: Config, serving: ServingOptions) -> Stack:
    """Mamba 1 in every layer, and in some of them attention in front of it."""
    channels = config.count("mamba_expand", default=2) * config.count("hidden_size")
    state = _mamba1(config, serving, channels=channels, state="mamba_d_state", conv="mamba_d_conv")
    return _zamba(config, serving, state)


def _zamba(config: Config, serving: ServingOptions, state: Make) -> Stack:
    """Attention reads the layer's input and the embedding side by side: twice the width."""
    query = config.count("num_attention_heads")
    dim = config.count("attention_head_dim", default=2 * config.count("hidden_size") // query)
    kv = config.count("num_key_value_heads", default=query)
    heads = Heads(query=query, kv=kv, key_dim=dim, value_dim=dim)
    layers: list[tuple[LayerSpec, ...]] = []
    for i, has_attention in enumerate(_zamba_attention(config)):
        name = f"model.layers.{i}"
        own = self_attention(f"{name}.self_attn", config, serving, retention=Full(), heads=heads)
        layers.append((own, state(f"{name}.mamba")) if has_attention else (state(f"{name}.mamba"),))
    return Stack(tuple(layers))


def _zamba_attention(config: Config) -> list[bool]:
    types = layer_types(config, num_layers(config))
    if types is None:
        if "hybrid_layer_ids" not in config:
            raise config.missing("layers_block_type", "hybrid_layer_ids")
        return from_indices(config, "hybrid_layer_ids")
    odd = [kind for kind in types if kind not in ("hybrid", *RECURRENT)]
    if odd:
        raise config.error(f"a layer is {odd[0]!r}, neither hybrid nor mamba")
    return [kind == "hybrid" for kind in types]


def _bamba_state(config: Config, serving: ServingOptions) -> Make:
    heads = config.count("mamba_n_heads")
    inner = config.count("mamba_expand", default=2) * config.count("hidden_size")
    inner = config.count("mamba_d_ssm", default=inner)
    automatic = config.facts.get("mamba_d_head") in (None, "auto")
    head_dim = inner // heads if automatic else config.count("mamba_d_head")
    _agree(config, heads, head_dim, inner, "the mamba width")
    return _mamba2(
        config,
        serving,
        heads=heads,
        head_dim=head_dim,
        groups="mamba_n_groups",
        state="mamba_d_state",
        conv="mamba_d_conv",
    )


def _agree(config: Config, heads: int, head_dim: int, inner: int, what: str) -> None:
    if heads * head_dim != inner:
        raise config.error(f"{heads} mamba heads of {head_dim} do not make {what}, {inner}")


def _mamba2(
    config: Config,
    serving: ServingOptions,
    *,
    heads: int,
    head_dim: int,
    groups: str,
    state: str,
    conv: str,
) -> Make:
    num_groups = config.count(groups, default=1)
    if heads % num_groups:
        raise config.error(f"{heads} mamba heads cannot share {num_groups} groups evenly")
    return lambda name: recurrent.mamba2(
        name,
        serving.recurrence(config),
        heads=heads,
        head_dim=head_dim,
        groups=num_groups,
        state=config.count(state),
        kernel=kernel(config, conv),
    )


def nemotron_h(config: Config, serving: ServingOptions) -> Stack:
    """One of Mamba 2, attention, or a feed-forward that keeps nothing, in each layer."""
    attention = full_attention(config, serving)
    state = _mamba2(
        config,
        serving,
        heads=config.count("mamba_num_heads"),
        head_dim=config.count("mamba_head_dim"),
        groups="n_groups",
        state="ssm_state_size",
        conv="conv_kernel",
    )
    layers: list[tuple[LayerSpec, ...]] = []
    for i, kind in enumerate(_nemotron_types(config)):
        name = f"model.layers.{i}.mixer"
        if kind in ATTENTION:
            layers.append((attention(name),))
        else:
            layers.append((state(name),) if kind == "mamba" else ())
    return Stack(tuple(layers))


def _nemotron_types(config: Config) -> list[str]:
    key = "hybrid_override_pattern"
    if key in config:
        named: list[str | None] = [_NEMOTRON_LETTERS.get(x) for x in config.text(key, "")]
        if "num_hidden_layers" in config and len(named) != num_layers(config):
            raise config.error(
                f"{key} names {len(named)} layers, num_hidden_layers is {num_layers(config)}"
            )
    else:
        listed = config.present("layer_types", "layers_block_type")
        total = len(config.items(listed)) if listed else num_layers(config)
        types = layer_types(config, config.count("num_hidden_layers", default=total))
        if types is None:
            raise config.missing(key, "layers_block_type")
        named = [_NEMOTRON_TYPES.get(kind) for kind in types]
    if None in named or not named:
        raise config.error("a layer is none of mamba, attention, mlp and moe")
    return [kind for kind in named if kind is not None]


# ── delta nets, lightning attention, convolutions ─────────────────────────────────────────


def qwen3_next(config: Config, serving: ServingOptions) -> Stack:
    """Gated delta net, and attention in every fourth layer."""
    is_attention = from_types(config)
    if is_attention is None:
        period = config.count("full_attention_interval", default=4)
        is_attention = every(config, period, period - 1)

    def state(name: str) -> LayerSpec:
        return recurrent.gated_delta_net(
            name,
            serving.recurrence(config),
            key_heads=config.count("linear_num_key_heads"),
            value_heads=config.count("linear_num_value_heads"),
            key_dim=config.count("linear_key_head_dim"),
            value_dim=config.count("linear_value_head_dim"),
            kernel=kernel(config, "linear_conv_kernel_dim"),
        )

    attention = full_attention(config, serving)
    return mixed(is_attention, attention=attention, state=state, state_name="linear_attn")


def kimi_linear(config: Config, serving: ServingOptions) -> Stack:
    """Kimi delta attention with float32 states, and MLA in between."""
    if "linear_attn_config" in config:
        inner = config.inner("linear_attn_config")
        whole = Config(name=config.name, facts={**config.facts, **inner.facts})
        is_attention = _kimi_attention(whole)
        heads, dim = inner.count("num_heads"), inner.count("head_dim")
        taps = kernel(inner, "short_conv_kernel_size")
    else:
        listed = from_types(config)
        if listed is None:
            raise config.missing("linear_attn_config", "layer_types")
        is_attention = listed
        heads, dim = config.count("linear_num_heads"), config.count("linear_head_dim")
        taps = kernel(config, "linear_conv_kernel_dim")
    recurrence = replace(serving.recurrence(config), state_dtype=DType.FLOAT32)
    precision = serving.precision(config)

    def state(name: str) -> LayerSpec:
        return recurrent.gated_delta_net(
            name,
            recurrence,
            key_heads=heads,
            value_heads=heads,
            key_dim=dim,
            value_dim=dim,
            kernel=taps,
        )

    def attention(name: str) -> LayerSpec:
        return latent_layer(name, config, serving, precision)

    return mixed(is_attention, attention=attention, state=state, state_name="self_attn")


def _kimi_attention(config: Config) -> list[bool]:
    """The configuration counts layers from 1, and names each in one of two lists."""
    is_attention = from_indices(config, "full_attn_layers", first=1)
    is_delta = from_indices(config, "kda_layers", first=1)
    for i, (full, delta) in enumerate(zip(is_attention, is_delta, strict=True)):
        if full == delta:
            which = "both" if full else "neither"
            raise config.error(f"layer {i + 1} is in {which} of full_attn_layers and kda_layers")
    return is_attention


def minimax(config: Config, serving: ServingOptions) -> Stack:
    """Lightning attention, and full attention where `attn_type_list` has a 1."""
    is_attention = from_types(config)
    if is_attention is None:
        kinds = config.counts("attn_type_list")
        if len(kinds) != num_layers(config) or not set(kinds) <= {0, 1}:
            raise config.error(
                f"attn_type_list has {len(kinds)} entries of {sorted(set(kinds))}, "
                f"not {num_layers(config)} of 0 and 1"
            )
        is_attention = [kind == 1 for kind in kinds]
    heads = heads_of(config)

    def state(name: str) -> LayerSpec:
        return recurrent.linear_attention(
            name, serving.recurrence(config), heads=heads.query, head_dim=heads.key_dim
        )

    attention = full_attention(config, serving)
    return mixed(is_attention, attention=attention, state=state, state_name="self_attn")


def lfm2(config: Config, serving: ServingOptions) -> Stack:
    """Short convolutions, and attention in the layers that the configuration names."""
    is_attention = from_types(config)
    if is_attention is None:
        if "full_attn_idxs" not in config:
            raise config.missing("layer_types", "full_attn_idxs")
        is_attention = from_indices(config, "full_attn_idxs")

    def state(name: str) -> LayerSpec:
        return recurrent.short_convolution(
            name,
            serving.recurrence(config),
            channels=config.count("hidden_size"),
            kernel=kernel(config, "conv_L_cache"),
        )

    attention = full_attention(config, serving)
    return mixed(is_attention, attention=attention, state=state, state_name="conv")
