"""Linear attention among full attention: delta nets, lightning attention, convolutions."""

from dataclasses import replace

from kvstow.plan.models import recurrent
from kvstow.plan.models.config import Config
from kvstow.plan.models.decoder import heads_of, num_layers
from kvstow.plan.models.deepseek import latent_layer
from kvstow.plan.models.pattern import (
    every,
    from_indices,
    from_types,
    full_attention,
    kernel,
    mixed,
)
from kvstow.plan.models.serving import Serving, Stack
from kvstow.plan.spec import DType, LayerSpec


def qwen3_next(config: Config, serving: Serving) -> Stack:
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


def kimi_linear(config: Config, serving: Serving) -> Stack:
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
            name, recurrence,
            key_heads=heads, value_heads=heads, key_dim=dim, value_dim=dim, kernel=taps,
        )  # fmt: skip

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


def minimax(config: Config, serving: Serving) -> Stack:
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


def lfm2(config: Config, serving: Serving) -> Stack:
    """Short convolutions, and attention in the layers that the configuration names."""
    is_attention = from_types(config)
    if is_attention is None:
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
