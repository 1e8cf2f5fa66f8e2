"""Passes of a model over caches of ours, and whether their rows serve other prompts.

A hook on the model tells the sequences behind a cache when a pass begins, with what arguments,
and when it is over. Where it is not plain that what a model keeps of a prompt serves another one
that begins alike, everything is computed and nothing is reused.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast
from weakref import ref

import torch
from transformers import Cache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvstow.adapters.transformers.identity import adapters_in_use, tuned_layers, uncompiled
from kvstow.errors import BlockError

if TYPE_CHECKING:
    from kvstow.adapters.transformers.sequences import Sequences

_compiler: Any = torch.compiler
eager: Any = _compiler.disable(
    reason="rows are found and grown by Python code; compile the model without fullgraph=True"
)
"""A compiled model leaves its graph to call what is marked so."""


class ModelPasses:
    """Hooks on a model that report its passes, and what the model was when they were set.

    Keeps no weights alive.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        whole = plain_model(model)
        self._model = ref(whole)
        self._first_state = _state(whole)
        parameters = inspect.signature(whole.forward)

        @eager
        def begin(module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            batch = self._batch(module, args, options)
            if batch is not None:
                bound = parameters.bind_partial(*args, **options).arguments
                arguments: dict[str, Any] = {**bound, **options}
                if arguments.get("use_cache") is False:
                    raise BlockError(
                        "a cache with use_cache=False: generate gives whole prompts then, to a "
                        "cache that keeps them all\n\nhint: leave use_cache out, or the cache"
                    )
                tokens: Any = arguments.get("input_ids")
                tokens = arguments.get("inputs_embeds") if tokens is None else tokens
                batch.begin_pass(tokens.shape[0], tokens.shape[1], arguments)

        @eager
        def end(
            module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any], result: object
        ) -> None:
            batch = self._batch(module, args, options)
            if batch is not None:
                batch.end_pass(is_whole=result is not None)

        hooks: tuple[Any, Any] = begin, end
        self._handles = (
            whole.register_forward_pre_hook(hooks[0], with_kwargs=True),
            whole.register_forward_hook(hooks[1], with_kwargs=True, always_call=True),
        )

    def _batch(
        self, module: torch.nn.Module, args: tuple[Any, ...], options: Mapping[str, Any]
    ) -> "Sequences | None":
        """The sequences behind the cache that the model is given, if it is one of its memory; a
        copy of the model has its hooks, too, and is another model."""
        if module is not self._model():
            return None
        caches = (each for each in (*options.values(), *args) if isinstance(each, Cache))
        batches = (batch for each in caches if (batch := getattr(each, "batch", None)))
        return next((batch for batch in batches if batch.memory.passes is self), None)

    def close(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def change(self) -> str:
        """What of the model has changed since, in words; empty for nothing, or no model."""
        model = self._model()
        now = self._first_state if model is None else _state(model)
        changed = [name for name, value in self._first_state.items() if value != now[name]]
        if not changed:
            return ""
        return f"the model has other {' and '.join(changed)} than when its memory was made"


def plain_model(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, inside what `torch.compile` or PEFT has wrapped around it."""
    modules = uncompiled(model).modules()
    return next(each for each in modules if isinstance(each, PreTrainedModel))


def _state(model: PreTrainedModel) -> dict[str, Any]:
    """What may change from pass to pass: weights, as torch counts changes of them, mode, adapters.

    PEFT puts hooks on its layers for one pass where sequences have adapters of their own.
    """
    layers = [layer for _, layer in tuned_layers(model)]
    hooks = [len(layer._forward_pre_hooks) + len(layer._forward_hooks) for layer in layers]
    merged = [getattr(layer, "merged_adapters", ()) for layer in layers]
    return {
        "weights": [0 if each.is_inference() else each._version for each in model.parameters()],
        "mode, training or not,": model.training,
        "adapters": (adapters_in_use(model), hooks, [*map(tuple, merged)]),
    }


# ── models that are computed and not reused ───────────────────────────────────────────

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
    config: Any = model.config
    kind = config.get_text_config(decoder=True).model_type
    if has_states and kind not in RESUMING:
        return f"whether a {kind} goes on from a state, or begins anew, is not known"
    own = "" if is_vouched else next(_own_code(model), "")
    return f"nobody knows what {own} does to what is kept" if own else ""


def _own_code(model: PreTrainedModel) -> Iterator[str]:
    """Attention, modules and hooks that no library brought."""
    setting: Any = model.config._attn_implementation  # pyright: ignore[reportPrivateUsage]
    kinds = cast("dict[str, Any]", setting).values() if isinstance(setting, dict) else [setting]
    for kind in kinds:
        functions: Any = ALL_ATTENTION_FUNCTIONS
        function = functions.get(str(kind), None)
        if function is not None and not _is_known(function):
            yield f"the attention {kind!r}"
    untyped: Any = model
    for name, module in untyped.named_modules():
        if not _is_known(type(module)):
            yield f"the class {type(module).__qualname__}"
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if not all(map(_is_known, hooks)):
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
    end: Any = settings.eos_token_id
    ends = cast("list[int]", end) if isinstance(end, list) else [end]
    return None if settings.pad_token_id in ends else int(settings.pad_token_id)


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of a configuration and of those inside it."""
    for name, value in config.items():
        yield str(name), value
        if isinstance(value, Mapping):
            yield from _settings(cast("Mapping[str, Any]", value))
