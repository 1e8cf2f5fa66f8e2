"""Models with recurrent layers, alone or among attention layers."""

from collections.abc import Callable

from kvstow.plan.models import recurrent
from kvstow.plan.models.config import Config
from kvstow.plan.models.decoder import LAYERS, layer_types, self_attention
from kvstow.plan.models.deepseek import latent_layer
from kvstow.plan.models.serving import Serving, Stack
from kvstow.plan.spec import Full, LayerSpec

Make = Callable[[str], LayerSpec]

_RECURRENT = ("linear_attention", "mamba", "recurrent", "conv")
_ATTENTION = ("full_attention", "attention")


def _mixed(
    config: Config, is_attention: list[bool], attention: Make, state: Make, state_name: str
) -> Stack:
    """One attention or one recurrent layer in each decoder layer."""
    layers = (
        attention(f"model.layers.{i}.self_attn")
        if full
        else state(f"model.layers.{i}.{state_name}")
        for i, full in enumerate(is_attention)
    )
    return Stack(tuple((layer,) for layer in layers))


def _attention(config: Config, serving: Serving) -> Make:
    return lambda name: self_attention(name, config, serving, retention=Full())


def _from_types(config: Config, num_layers: int) -> list[bool] | None:
    types = layer_types(config, num_layers)
    if types is None:
        return None
    odd = [kind for kind in types if kind not in _RECURRENT + _ATTENTION]
    if odd:
        raise config.error(f"layer_types has {odd[0]!r}, which is neither attention nor recurrent")
    return [kind in _ATTENTION for kind in types]


def _indices(config: Config, key: str, num_layers: int) -> list[bool]:
    chosen = set(config.counts(key)) if key in config else set[int]()
    if any(i >= num_layers for i in chosen):
        raise config.error(f"{key} names layer {max(chosen)}, num_hidden_layers is {num_layers}")
    return [i in chosen for i in range(num_layers)]


def jamba(config: Config, serving: Serving) -> Stack:
    """Mamba 1, and attention once in every `attn_layer_period` layers."""
    num_layers = config.count(*LAYERS)
    is_attention = _from_types(config, num_layers)
    if is_attention is None:
        period = config.count("attn_layer_period")
        is_attention = [i % period == _offset(config, period) for i in range(num_layers)]
    channels = config.count("mamba_expand") * config.count("hidden_size")
    recurrence = serving.recurrence(config)

    def state(name: str) -> LayerSpec:
        return recurrent.mamba1(
            name,
            recurrence,
            channels=channels,
            state=config.count("mamba_d_state"),
            kernel=_kernel(config, "mamba_d_conv"),
        )

    return _mixed(config, is_attention, _attention(config, serving), state, "mamba")


def _offset(config: Config, period: int) -> int:
    offset = config.facts.get("attn_layer_offset")
    if type(offset) is not int or not 0 <= offset < period:
        raise config.error(f"attn_layer_offset is {offset!r}, attn_layer_period is {period}")
    return offset


def _kernel(config: Config, *keys: str) -> int:
    kernel = config.count(*keys)
    if kernel < 2:
        raise config.error(f"{keys[0]} is {kernel}: such a convolution remembers nothing")
    return kernel


def qwen3_next(config: Config, serving: Serving) -> Stack:
    """Gated delta net, and attention in every fourth layer."""
    num_layers = config.count(*LAYERS)
    is_attention = _from_types(config, num_layers)
    if is_attention is None:
        period = config.count("full_attention_interval", default=4)
        is_attention = [(i + 1) % period == 0 for i in range(num_layers)]
    recurrence = serving.recurrence(config)

    def state(name: str) -> LayerSpec:
        return recurrent.gated_delta_net(
            name,
            recurrence,
            key_heads=config.count("linear_num_key_heads"),
            value_heads=config.count("linear_num_value_heads"),
            key_dim=config.count("linear_key_head_dim"),
            value_dim=config.count("linear_value_head_dim"),
            kernel=_kernel(config, "linear_conv_kernel_dim"),
        )

    return _mixed(config, is_attention, _attention(config, serving), state, "linear_attn")
