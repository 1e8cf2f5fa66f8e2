"""The kinds of recurrent state: one page per sequence, whatever the tokens per block.

    kind                 conv (channel × tap)      ssm
    mamba1               channels                  channel × state
    mamba2               x | B | C                 ssm_head × dim × state
    gated delta net      q | k | v                 ssm_head × value × key
    linear attention     none                      ssm_head × key × value
    short convolution    channels                  none

A convolution of `kernel` taps remembers the `kernel - 1` inputs before the next one.
Channels are in the whole model's coordinates: a rank of several holds a piece of x,
a piece of B and a piece of C.
"""

from kvstow.plan.models.attention import ONE_HEAD
from kvstow.plan.models.precision import Recurrence
from kvstow.plan.models.ranks import AxisPart, split
from kvstow.plan.retention import State
from kvstow.plan.spec import DType, Extent, Field, LayerSpec

CHECKPOINT_TOKENS = 512
"""From one recurrent state that is kept to the next."""


def _layer(name: str, *fields: Field) -> LayerSpec:
    return LayerSpec(
        name=name,
        retention=State(),
        block_tokens=CHECKPOINT_TOKENS,
        states=1,
        heads=ONE_HEAD,
        fields=fields,
    )


def _conv(channels: Extent, kernel: int, dtype: DType) -> Field:
    return Field("conv", dtype, (channels, Extent.whole("tap", kernel - 1)))


def _heads_state(part: AxisPart, rows: Extent, columns: Extent, recurrence: Recurrence) -> Field:
    heads = split("ssm_head", (part,), recurrence.rank)
    return Field("ssm", recurrence.state_dtype, (heads, rows, columns))


def mamba1(
    name: str, recurrence: Recurrence, *, channels: int, state: int, kernel: int
) -> LayerSpec:
    """Selective scan: every channel has its own state vector."""
    held = split("channel", (AxisPart("mamba channels", channels),), recurrence.rank)
    ssm = Field("ssm", recurrence.state_dtype, (held, Extent.whole("state", state)))
    return _layer(name, _conv(held, kernel, recurrence.conv_dtype), ssm)


def mamba2(
    name: str,
    recurrence: Recurrence,
    *,
    heads: int,
    head_dim: int,
    groups: int,
    state: int,
    kernel: int,
) -> LayerSpec:
    """State-space duality: a matrix per head; B and C are shared by groups of heads."""
    x = AxisPart("mamba heads", heads, head_dim)
    group = AxisPart("mamba groups", groups, state, replicable=True)
    channels = split("channel", (x, group, group), recurrence.rank)
    ssm = _heads_state(
        AxisPart("mamba heads", heads),
        Extent.whole("dim", head_dim),
        Extent.whole("state", state),
        recurrence,
    )
    return _layer(name, _conv(channels, kernel, recurrence.conv_dtype), ssm)


def gated_delta_net(
    name: str,
    recurrence: Recurrence,
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    kernel: int,
) -> LayerSpec:
    """Delta rule: a value × key matrix per value head, and a convolution over q, k, v."""
    key = AxisPart("linear key heads", key_heads, key_dim, replicable=True)
    value = AxisPart("linear value heads", value_heads, value_dim)
    channels = split("channel", (key, key, value), recurrence.rank)
    ssm = _heads_state(
        AxisPart("linear value heads", value_heads),
        Extent.whole("value", value_dim),
        Extent.whole("key", key_dim),
        recurrence,
    )
    return _layer(name, _conv(channels, kernel, recurrence.conv_dtype), ssm)


def linear_attention(name: str, recurrence: Recurrence, *, heads: int, head_dim: int) -> LayerSpec:
    """Lightning attention: a key × value matrix per head, no convolution."""
    ssm = _heads_state(
        AxisPart("linear attention heads", heads),
        Extent.whole("key", head_dim),
        Extent.whole("value", head_dim),
        recurrence,
    )
    return _layer(name, ssm)


def short_convolution(
    name: str, recurrence: Recurrence, *, channels: int, kernel: int
) -> LayerSpec:
    """A gated convolution alone: its last inputs are all it remembers."""
    held = split("channel", (AxisPart("convolution channels", channels),), recurrence.rank)
    return _layer(name, _conv(held, kernel, recurrence.conv_dtype))
