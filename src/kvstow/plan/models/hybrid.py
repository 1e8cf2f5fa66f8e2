"""Models with recurrent layers: a table of which layers keep a state, and of what kind.

    kind                 conv (channel × tap)      ssm
    mamba1               channels                  channel × state
    mamba2               x | B | C                 ssm_head × dim × state
    gated delta net      q | k | v                 ssm_head × value × key
    linear attention     none                      ssm_head × key × value
    short convolution    channels                  none

A state is one page per sequence, whatever the tokens per block. A convolution of `kernel` taps
remembers the `kernel - 1` inputs before the next one. Channels are in the whole model's
coordinates: a rank of several holds a piece of x, a piece of B and a piece of C.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

from kvstow.plan.models.attention import (
    ONE_HEAD,
    Heads,
    heads_of,
    layer_types,
    num_layers,
    self_attention,
)
from kvstow.plan.models.config import Config
from kvstow.plan.models.deepseek import latent
from kvstow.plan.models.serving import AxisPart, ServingOptions, Stack, own_dtype, state_dtype
from kvstow.plan.retention import Full, State
from kvstow.plan.spec import Extent, Field, LayerSpec

CHECKPOINT_TOKENS = 512
"""From one recurrent state that is kept to the next."""

Kind = Literal["attention", "state", "both", "nothing"]
Kinds = Callable[[Config], Sequence[Kind]]
"""What each layer of a model has."""
Fields = tuple[Field, ...]

# ── kinds of state ────────────────────────────────────────────────────────────────────────


def _conv(config: Config, key: str, channels: Extent) -> Field:
    """The inputs that a convolution remembers."""
    taps = config.count(key)
    if taps < 2:
        raise config.error(f"{key} is {taps}: a convolution of that length keeps no state")
    return Field("conv", own_dtype(config), (channels, Extent.whole("tap", taps - 1)))


def _matrices(
    config: Config, heads: Extent, rows: tuple[str, int], columns: tuple[str, int]
) -> Field:
    """A matrix per head."""
    axes = (heads, Extent.whole(*rows), Extent.whole(*columns))
    return Field("ssm", state_dtype(config), axes)


class MambaKeys(NamedTuple):
    """What the facts of a Mamba layer are called: every family has its own words."""

    expand: str
    heads: str
    head_dim: str
    groups: str
    state: str
    conv: str


PLAIN = MambaKeys("expand", "num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")
BAMBA = MambaKeys(
    *("mamba_expand", "mamba_n_heads", "mamba_d_head"),
    *("mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
)
ZAMBA2 = BAMBA._replace(heads="n_mamba_heads", head_dim="mamba_headdim", groups="mamba_ngroups")
NEMOTRON = MambaKeys(
    *("", "mamba_num_heads", "mamba_head_dim"), *("n_groups", "ssm_state_size", "conv_kernel")
)


def mamba1(keys: MambaKeys, config: Config, serving: ServingOptions) -> Fields:
    """Selective scan: every channel has its own state vector."""
    channels = config.count(keys.expand, default=2) * config.count("hidden_size")
    if keys is PLAIN:
        channels = config.count("intermediate_size", default=channels)
    held = serving.split("channel", AxisPart("mamba channels", channels))
    state = Extent.whole("state", config.count(keys.state))
    return _conv(config, keys.conv, held), Field("ssm", state_dtype(config), (held, state))


def mamba2(keys: MambaKeys, config: Config, serving: ServingOptions) -> Fields:
    """State-space duality: a matrix per head; B and C are shared by groups of heads."""
    heads, groups = config.count(keys.heads), config.count(keys.groups, default=1)
    if not keys.expand:
        head_dim = config.count(keys.head_dim)
    else:
        inner = config.count(keys.expand, default=2) * config.count("hidden_size")
        inner = config.count("mamba_d_ssm", default=inner)
        is_automatic = config.facts.get(keys.head_dim) in (None, "auto")
        head_dim = inner // heads if is_automatic else config.count(keys.head_dim)
        if heads * head_dim != inner:
            raise config.error(
                f"{heads} mamba heads of {head_dim} do not make the mamba width, {inner}"
            )
    if heads % groups:
        raise config.error(f"{heads} mamba heads cannot share {groups} groups evenly")
    state = config.count(keys.state)
    group = AxisPart("mamba groups", groups, state, replicable=True)
    x = AxisPart("mamba heads", heads, head_dim)
    held = serving.split("ssm_head", AxisPart("mamba heads", heads))
    return (
        _conv(config, keys.conv, serving.split("channel", x, group, group)),
        _matrices(config, held, ("dim", head_dim), ("state", state)),
    )


def delta_net(config: Config, serving: ServingOptions) -> Fields:
    """Delta rule: a value × key matrix per value head, and a convolution over q, k, v."""
    heads = config.count("linear_num_value_heads")
    key_dim, value_dim = config.count("linear_key_head_dim"), config.count("linear_value_head_dim")
    key_heads = config.count("linear_num_key_heads")
    key = AxisPart("linear key heads", key_heads, key_dim, replicable=True)
    value = AxisPart("linear value heads", heads, value_dim)
    held = serving.split("ssm_head", AxisPart("linear value heads", heads))
    return (
        _conv(config, "linear_conv_kernel_dim", serving.split("channel", key, key, value)),
        _matrices(config, held, ("value", value_dim), ("key", key_dim)),
    )


def kimi_delta(config: Config, serving: ServingOptions) -> Fields:
    """A delta net with as many heads of one size everywhere, and float32 states."""
    if "linear_attn_config" in config:
        inner = config.inner("linear_attn_config")
        keys = ("num_heads", "head_dim", "short_conv_kernel_size")
    else:
        inner, keys = config, ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    heads, dim, taps = (inner.count(key) for key in keys)
    facts = {
        **config.facts,
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), heads),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), dim),
        "linear_conv_kernel_dim": taps,
        "mamba_ssm_cache_dtype": "float32",
    }
    return delta_net(Config(name=config.name, facts=facts), serving)


def lightning(config: Config, serving: ServingOptions) -> Fields:
    """Lightning attention: a key × value matrix per head, no convolution."""
    heads = heads_of(config)
    held = serving.split("ssm_head", AxisPart("linear attention heads", heads.query))
    return (_matrices(config, held, ("key", heads.key_dim), ("value", heads.key_dim)),)


def short_convolution(config: Config, serving: ServingOptions) -> Fields:
    """A gated convolution alone: its last inputs are all it remembers."""
    part = AxisPart("convolution channels", config.count("hidden_size"))
    return (_conv(config, "conv_L_cache", serving.split("channel", part)),)


# ── which layers are which ────────────────────────────────────────────────────────────────

_STATES: dict[str, Kind] = dict.fromkeys(
    ("linear_attention", "mamba", "conv", "short_conv"), "state"
)
_KINDS: dict[str, Kind] = {"full_attention": "attention", "attention": "attention", **_STATES}
_NEMOTRON: dict[str, Kind] = {"mlp": "nothing", "moe": "nothing", **_KINDS}
_ZAMBA: dict[str, Kind] = {"hybrid": "both", **_STATES}
_NEMOTRON_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _all(kind: Kind) -> Kinds:
    def kinds(config: Config) -> list[Kind]:
        return [kind] * num_layers(config)

    return kinds


def _named(config: Config, types: Sequence[str], kinds: dict[str, Kind]) -> list[Kind]:
    """What layers of those types have."""
    if odd := [each for each in types if each not in kinds]:
        raise config.error(f"layer_types has {odd[0]!r}, which is none of {', '.join(kinds)}")
    return [kinds[each] for each in types]


def _listed(otherwise: Callable[[Config], Sequence[bool]]) -> Kinds:
    """The configuration's own types; in older files `otherwise` tells which are attention."""

    def kinds(config: Config) -> Sequence[Kind]:
        types = layer_types(config, num_layers(config))
        if types is not None:
            return _named(config, types, _KINDS)
        return ["attention" if full else "state" for full in otherwise(config)]

    return kinds


def _in_list(key: str, config: Config, *, first: int = 0) -> list[bool]:
    """For each layer whether the list under `key`, counted from `first`, names it."""
    if key not in config:
        raise config.missing("layer_types", key)
    total, indices = num_layers(config), config.counts(key)
    outside = [i for i in indices if not first <= i < first + total]
    if outside:
        raise config.error(f"{key} names layer {outside[0]}, num_hidden_layers is {total}")
    return [first + i in indices for i in range(total)]


def _jamba(config: Config) -> list[bool]:
    period, offset = config.count("attn_layer_period"), config.facts.get("attn_layer_offset")
    if type(offset) is not int or not 0 <= offset < period:
        raise config.error(f"attn_layer_offset is {offset!r}, attn_layer_period is {period}")
    return [i % period == offset for i in range(num_layers(config))]


def _last_of_four(config: Config) -> list[bool]:
    period = config.count("full_attention_interval", default=4)
    return [(i + 1) % period == 0 for i in range(num_layers(config))]


def _minimax(config: Config) -> list[bool]:
    kinds = config.counts("attn_type_list")
    if len(kinds) != num_layers(config) or not set(kinds) <= {0, 1}:
        raise config.error(
            f"attn_type_list has {len(kinds)} entries of {sorted(set(kinds))}, "
            f"not {num_layers(config)} of 0 and 1"
        )
    return [kind == 1 for kind in kinds]


def _kimi(config: Config) -> list[bool]:
    """The configuration counts layers from 1, and names each in one of two lists."""
    if "linear_attn_config" not in config:
        raise config.missing("linear_attn_config", "layer_types")
    facts = {**config.facts, **config.inner("linear_attn_config").facts}
    whole = Config(name=config.name, facts=facts)
    is_attention = _in_list("full_attn_layers", whole, first=1)
    is_delta = _in_list("kda_layers", whole, first=1)
    for i, (full, delta) in enumerate(zip(is_attention, is_delta, strict=True), start=1):
        if full == delta:
            which = "both" if full else "neither"
            raise config.error(f"layer {i} is in {which} of full_attn_layers and kda_layers")
    return is_attention


def _zamba(config: Config) -> Sequence[Kind]:
    types = layer_types(config, num_layers(config))
    if types is not None:
        return _named(config, types, _ZAMBA)
    return ["both" if both else "state" for both in _in_list("hybrid_layer_ids", config)]


def _nemotron(config: Config) -> Sequence[Kind]:
    """A letter per layer, or a type; their number is that of the layers where none is given."""
    keys = ("hybrid_override_pattern", "layer_types", "layers_block_type")
    key = config.present(*keys)
    if key is None:
        raise config.missing(*keys)
    if key == keys[0]:
        types = [_NEMOTRON_LETTERS.get(letter, letter) for letter in config.text(key, "")]
    else:
        types = config.texts(key)
    if not types or len(types) != config.count("num_hidden_layers", default=len(types)):
        total = config.facts.get("num_hidden_layers")
        raise config.error(f"{key} names {len(types)} layers, num_hidden_layers is {total}")
    return _named(config, types, _NEMOTRON)


# ── families ──────────────────────────────────────────────────────────────────────────────


def _full(name: str, config: Config, serving: ServingOptions) -> LayerSpec:
    return self_attention(name, config, serving, retention=Full())


def _double_width(name: str, config: Config, serving: ServingOptions) -> LayerSpec:
    """Attention that reads the layer's input and the embedding side by side."""
    query = config.count("num_attention_heads")
    dim = config.count("attention_head_dim", default=2 * config.count("hidden_size") // query)
    kv = config.count("num_key_value_heads", default=query)
    heads = Heads(query=query, kv=kv, key_dim=dim, value_dim=dim)
    return self_attention(name, config, serving, retention=Full(), heads=heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Which layers keep what, and what the modules are called that do."""

    kinds: Kinds
    state: Callable[[Config, ServingOptions], Fields]
    state_name: str = "model.layers.{}.mamba"
    attention: Callable[[str, Config, ServingOptions], LayerSpec] = _full
    attention_name: str = "model.layers.{}.self_attn"


_BAMBA = Family(
    kinds=_listed(partial(_in_list, "attn_layer_indices")), state=partial(mamba2, BAMBA)
)
_MAMBA = Family(
    kinds=_all("state"), state=partial(mamba1, PLAIN), state_name="backbone.layers.{}.mixer"
)
_QWEN = Family(
    kinds=_listed(_last_of_four), state=delta_net, state_name="model.layers.{}.linear_attn"
)
_LIGHTNING = Family(
    kinds=_listed(_minimax), state=lightning, state_name="model.layers.{}.self_attn"
)
_LFM2 = Family(
    kinds=_listed(partial(_in_list, "full_attn_idxs")),
    state=short_convolution,
    state_name="model.layers.{}.conv",
)
_ZAMBA1 = Family(kinds=_zamba, state=partial(mamba1, BAMBA), attention=_double_width)

FAMILIES: dict[str, Family] = {
    "mamba": _MAMBA,
    "falcon_mamba": _MAMBA,
    "mamba2": replace(_MAMBA, state=partial(mamba2, PLAIN)),
    "jamba": Family(kinds=_listed(_jamba), state=partial(mamba1, BAMBA)),
    "bamba": _BAMBA,
    "granitemoehybrid": _BAMBA,
    "falcon_h1": replace(_BAMBA, kinds=_all("both")),
    "zamba": _ZAMBA1,
    "zamba2": replace(_ZAMBA1, state=partial(mamba2, ZAMBA2)),
    "nemotron_h": Family(
        kinds=_nemotron,
        state=partial(mamba2, NEMOTRON),
        state_name="model.layers.{}.mixer",
        attention_name="model.layers.{}.mixer",
    ),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _QWEN),
    "kimi_linear": Family(
        kinds=_listed(_kimi),
        state=kimi_delta,
        state_name="model.layers.{}.self_attn",
        attention=latent,
    ),
    **dict.fromkeys(("minimax", "minimax_text_01", "minimax_m1"), _LIGHTNING),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _LFM2),
}


def hybrid_decoder(config: Config, serving: ServingOptions) -> Stack:
    """The layers of a model of one of the families."""
    family = FAMILIES[config.model_type]
    fields = family.state(config, serving)

    def layers(i: int, kind: Kind) -> tuple[LayerSpec, ...]:
        attention: tuple[LayerSpec, ...] = ()
        if kind in ("attention", "both"):
            attention = (family.attention(family.attention_name.format(i), config, serving),)
        if kind in ("attention", "nothing"):
            return attention
        state = LayerSpec(
            name=family.state_name.format(i),
            retention=State(),
            block_tokens=CHECKPOINT_TOKENS,
            states=1,
            heads=ONE_HEAD,
            fields=fields,
        )
        return *attention, state

    return Stack(tuple(layers(i, kind) for i, kind in enumerate(family.kinds(config))))
