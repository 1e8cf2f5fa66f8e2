"""Which layers of a hybrid model are attention, and which are recurrent."""

from collections.abc import Callable, Sequence

from kvstow.plan.models.config import Config
from kvstow.plan.models.decoder import layer_types, num_layers, self_attention
from kvstow.plan.models.serving import Serving, Stack
from kvstow.plan.retention import Full
from kvstow.plan.spec import LayerSpec

Make = Callable[[str], LayerSpec]

ATTENTION = ("full_attention", "attention")
RECURRENT = ("linear_attention", "mamba", "conv", "short_conv")


def mixed(is_attention: Sequence[bool], *, attention: Make, state: Make, state_name: str) -> Stack:
    """Attention in some decoder layers, a recurrent state in all others."""
    layers = (
        attention(f"model.layers.{i}.self_attn")
        if full
        else state(f"model.layers.{i}.{state_name}")
        for i, full in enumerate(is_attention)
    )
    return Stack(tuple((layer,) for layer in layers))


def full_attention(config: Config, serving: Serving) -> Make:
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
