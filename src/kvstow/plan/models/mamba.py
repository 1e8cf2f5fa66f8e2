"""State-space models: Mamba 1 and 2, alone or with attention beside or between them."""

from kvstow.plan.models import recurrent
from kvstow.plan.models.config import Config
from kvstow.plan.models.decoder import layer_types, num_layers, self_attention
from kvstow.plan.models.pattern import (
    ATTENTION,
    Make,
    every,
    from_indices,
    from_types,
    full_attention,
    kernel,
    mixed,
)
from kvstow.plan.models.serving import Serving, Stack
from kvstow.plan.retention import Full
from kvstow.plan.spec import LayerSpec

_NEMOTRON_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_NEMOTRON_TYPES = {
    "mamba": "mamba", "linear_attention": "mamba",
    "attention": "attention", "full_attention": "attention",
    "mlp": "mlp", "moe": "moe",
}  # fmt: skip


def mamba(config: Config, serving: Serving) -> Stack:
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


def jamba(config: Config, serving: Serving) -> Stack:
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


def _mamba1(config: Config, serving: Serving, *, channels: int, state: str, conv: str) -> Make:
    return lambda name: recurrent.mamba1(
        name,
        serving.recurrence(config),
        channels=channels,
        state=config.count(state),
        kernel=kernel(config, conv),
    )


def mamba2(config: Config, serving: Serving) -> Stack:
    """Mamba 2 in every layer."""
    heads = config.count("num_heads")
    head_dim = config.count("head_dim")
    inner = config.count("expand", default=2) * config.count("hidden_size")
    _agree(config, heads, head_dim, inner, "expand x hidden_size")
    state = _mamba2(
        config, serving, heads=heads, head_dim=head_dim,
        groups="n_groups", state="state_size", conv="conv_kernel",
    )  # fmt: skip
    return Stack(tuple((state(f"backbone.layers.{i}.mixer"),) for i in range(num_layers(config))))


def bamba(config: Config, serving: Serving) -> Stack:
    """Mamba 2, and attention in the layers that the configuration names."""
    is_attention = from_types(config)
    if is_attention is None:
        is_attention = from_indices(config, "attn_layer_indices")
    attention = full_attention(config, serving)
    state = _bamba_state(config, serving)
    return mixed(is_attention, attention=attention, state=state, state_name="mamba")


def falcon_h1(config: Config, serving: Serving) -> Stack:
    """Mamba 2 and attention side by side in every layer."""
    state = _bamba_state(config, serving)
    layers: list[tuple[LayerSpec, ...]] = []
    for i in range(num_layers(config)):
        name = f"model.layers.{i}"
        attention = self_attention(f"{name}.self_attn", config, serving, retention=Full())
        layers.append((attention, state(f"{name}.mamba")))
    return Stack(tuple(layers))


def _bamba_state(config: Config, serving: Serving) -> Make:
    heads = config.count("mamba_n_heads")
    inner = config.count("mamba_expand", default=2) * config.count("hidden_size")
    inner = config.count("mamba_d_ssm", default=inner)
    automatic = config.facts.get("mamba_d_head") in (None, "auto")
    head_dim = inner // heads if automatic else config.count("mamba_d_head")
    _agree(config, heads, head_dim, inner, "the mamba width")
    return _mamba2(
        config, serving, heads=heads, head_dim=head_dim,
        groups="mamba_n_groups", state="mamba_d_state", conv="mamba_d_conv",
    )  # fmt: skip


def _agree(config: Config, heads: int, head_dim: int, inner: int, what: str) -> None:
    if heads * head_dim != inner:
        raise config.error(f"{heads} mamba heads of {head_dim} do not make {what}, {inner}")


def _mamba2(
    config: Config,
    serving: Serving,
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


def nemotron_h(config: Config, serving: Serving) -> Stack:
    """One of Mamba 2, attention, or a feed-forward that keeps nothing, in each layer."""
    attention = full_attention(config, serving)
    state = _mamba2(
        config, serving,
        heads=config.count("mamba_num_heads"), head_dim=config.count("mamba_head_dim"),
        groups="n_groups", state="ssm_state_size", conv="conv_kernel",
    )  # fmt: skip
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
