"""What each layer of a decoder sees: everything, a window, or a chunk.

Read from `layer_types` where the configuration lists them. Older files have `sliding_window`
and leave the pattern to their family; each family's rule here is the one that transformers
follows, and a window whose family has no rule is refused:

    everywhere    mistral, mixtral, phi3 …      every layer, unless `use_sliding_window` is false
    every nth     gemma3, cohere2, exaone4 …    the nth layer sees everything
    first of n    cwm, granite_swa              the first of each n layers sees everything
    from layer n  qwen2, qwen3, dots1 …         layers from `max_window_layers` on
    without rope  smollm3                       layers that have no rotary positions
"""

from collections.abc import Callable, Sequence

from kvstow.plan.models.config import Config
from kvstow.plan.retention import Chunk, Full, Retention, Window

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
    used = config.flag("use_sliding_window", default=True)
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


def _everywhere(config: Config, total: int) -> list[bool]:
    return [True] * total


def _nowhere_unless_used(rule: Rule) -> Rule:
    """Qwen's files name a window that only `use_sliding_window` switches on."""

    def used(config: Config, total: int) -> Sequence[bool]:
        if not config.flag("use_sliding_window", default=False):
            return [False] * total
        return rule(config, total)

    return used


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


def _but_first_of(period: int) -> Rule:
    return lambda config, total: [i % period != 0 for i in range(total)]


def _from_layer(default: int) -> Rule:
    return lambda config, total: [i >= _window_layers(config, default) for i in range(total)]


def _even_before_layer(config: Config, total: int) -> list[bool]:
    limit = _window_layers(config, 28)
    return [i % 2 == 0 and i < limit for i in range(total)]


def _without_rope(config: Config, total: int) -> list[bool]:
    return [not has_rope for has_rope in _rotary(config, total)]


def _window_layers(config: Config, default: int) -> int:
    """Qwen's `max_window_layers`, which may be 0."""
    limit = config.facts.get("max_window_layers")
    limit = default if limit is None else limit
    if type(limit) is not int or limit < 0:
        raise config.error(f"max_window_layers is {limit!r}, not a whole number >= 0")
    return limit


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


_ALTERNATING = _every(2)
_QWEN2 = _nowhere_unless_used(_from_layer(28))
_QWEN2_VL = _nowhere_unless_used(_from_layer(80))

_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("ministral", "ministral3", "mistral", "mixtral", "phi3", "phi4_multimodal", "phimoe"),
        _everywhere,
    ),
    "starcoder2": _everywhere,
    "qwen3_moe": _nowhere_unless_used(_everywhere),
    "gemma2": _ALTERNATING,
    "gpt_oss": _ALTERNATING,
    "vaultgemma": _ALTERNATING,
    "gemma3": _every(6, *_PATTERN),
    "gemma3_text": _every(6, *_PATTERN),
    "gemma3n_text": _every(5),
    "gemma4_text": _every(6),
    "cohere2": _every(4, *_PATTERN),
    "exaone4": _every(4, *_PATTERN),
    "exaone_moe": _every(4, *_PATTERN),
    "olmo3": _every(4),
    "afmoe": _every(4, "global_attn_every_n_layers"),
    "cwm": _but_first_of(4),
    "granite_swa": _but_first_of(4),
    "granitemoe_swa": _but_first_of(4),
    "dots1": _from_layer(62),
    "qwen2": _QWEN2,
    "qwen3": _QWEN2,
    "qwen2_5_omni_text": _QWEN2,
    "qwen2_vl": _QWEN2_VL,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_moe": _nowhere_unless_used(_even_before_layer),
    "smollm3": _nowhere_unless_used(_without_rope),
}
