# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""Whether what a model keeps of a prompt serves another prompt that begins alike.

Where that is not plainly so, everything is computed and nothing is reused.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ROPES_BY_LENGTH = re.compile("dynamic|longrope|^su$")
"""Ropes that turn all keys by another angle in long sequences than in short ones."""

PLACEHOLDER = re.compile(r"(image|video|vision|audio|speech)\w*_token_(id|index)$")


RESUMING = frozenset(
    {
        "deepseek_v4",
        "falcon_h1",
        "inkling_text",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "mamba2",
        "minimax",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
    }
)
"""Recurrent models that, given several tokens, go on from the state that they find in their cache:
tried, each of them. Some others (Jamba, Bamba) begin anew unless tokens come one by one."""

LIBRARIES = ("torch", "transformers", "transformers_modules", "peft", "accelerate", "kvstow")
"""Whose code is known, or part of a model's identity."""


def why_not_reused(model: PreTrainedModel, *, has_states: bool, is_vouched: bool) -> str:
    """Why rows of this model serve no other prompt, in words; empty where they do.

    Whoever gives a model its identity vouches for code of their own.
    """
    if model.training:
        return "it is in training, where weights change and dropout is random"
    for name, value in _settings(model.config.to_dict()):
        if name in ("rope_type", "type") and ROPES_BY_LENGTH.search(str(value)):
            return f"its rope ({value}) follows the length of the sequence"
        if name == "use_dynamic_ntk" and value:
            return "its rope follows the length of the sequence"
        if name in ("use_bidirectional_attention", "prefix_lm") and value in (True, "all"):
            return "its tokens see later ones"
    kind = model.config.get_text_config(decoder=True).model_type
    if has_states and kind not in RESUMING:
        return f"whether a {kind} goes on from a state, or begins anew, is not known"
    own = "" if is_vouched else next(_own_code(model), "")
    return f"nobody knows what {own} does to what is kept" if own else ""


def _own_code(model: PreTrainedModel) -> Iterator[str]:
    """Attention, modules and hooks that no library brought."""
    setting: Any = model.config._attn_implementation  # pyright: ignore[reportPrivateUsage]
    for kind in setting.values() if isinstance(setting, dict) else [setting]:
        function: Any = ALL_ATTENTION_FUNCTIONS.get(str(kind), None)
        if function is not None and not _is_known(function):
            yield f"the attention {kind!r}"
    for name, module in model.named_modules():
        if not _is_known(type(module)):
            yield f"the class {type(module).__qualname__}"
        hooks: Any = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())  # pyright: ignore[reportPrivateUsage]
        for hook in hooks:
            if not _is_known(hook):
                yield f"a hook on {name or 'the model'}"


def _is_known(code: Any) -> bool:
    where = str(getattr(code, "__module__", None) or type(code).__module__)
    return where.partition(".")[0] in LIBRARIES


def placeholder_tokens(model: PreTrainedModel) -> frozenset[int]:
    """The ids of tokens that stand for an image, a clip or a sound, as the configuration says."""
    return frozenset(
        value
        for name, value in _settings(model.config.to_dict())
        if PLACEHOLDER.search(name) and isinstance(value, int)
    )


def padding_token(model: PreTrainedModel) -> int | None:
    """The token that `generate` masks as padding where it is given no mask; None where there is
    none, or where the same token ends sequences."""
    settings: Any = model.generation_config
    if settings is None or settings.pad_token_id is None:
        return None
    ends = settings.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return None if settings.pad_token_id in ends else int(settings.pad_token_id)


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of a configuration and of those inside it."""
    for name, value in config.items():
        yield str(name), value
        if isinstance(value, Mapping):
            yield from _settings(cast("Mapping[str, Any]", value))
