# pyright: reportMissingTypeArgument=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Passes of a model over sequences whose tokens are known: is it given just these?

Rows are found again by the tokens that a cache was told. So what the model is really given has
to be these tokens, at their own positions, behind the padding that was told, and the model has
to be as it was when its memory was made. A hook on the model looks at every pass that computes
known tokens, and refuses what would make the rows those of something else. Passes behind the known
tokens are free, and noted: what is not as in a prompt is not remembered later.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

import torch
from transformers import Cache, PreTrainedModel

from kvstow.adapters.transformers.batch.prompts import known_ids, padding_of
from kvstow.adapters.transformers.model.identity import (
    active_adapters,
    adapter_strengths,
    lasting_buffers,
    own_attention,
    tuned_layers,
    uncompiled,
    user_hooks,
)
from kvstow.blocks.prompt import Prompt
from kvstow.errors import BlockError, ModelError
from kvstow.plan.identity import config_fields

if TYPE_CHECKING:
    from kvstow.adapters.transformers.batch.sequences import Sequences

Tensor = torch.Tensor

SAMPLED_ELEMENTS = 8
HINT = "hint: leave tokens out of Cache(...); then nothing is found, and nothing is kept"

eager: Any = torch.compiler.disable(
    reason="rows are found and grown by Python code; compile the model without fullgraph=True"
)
"""A compiled model leaves its graph to call what is marked so."""


class ModelWatch:
    """What a model was when its memory was made. Keeps no weights alive.

    `vouched` says that somebody gave the identity, and answers for hooks too.
    """

    def __init__(self, model: PreTrainedModel, *, vouched: bool = False) -> None:
        whole = uncompiled(model)
        self._model = ref(whole)
        self._vouched = vouched
        self._was = self._state(whole)
        self._tuned = [ref(layer) for _, layer in tuned_layers(whole)]
        self._switches_were = self._switches()
        models = [each for each in whole.modules() if isinstance(each, PreTrainedModel)]
        self._watched = WeakSet[torch.nn.Module](models)
        self._handles = [handle for each in models for handle in self._hooks(each)]

    def close(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def check(self) -> None:
        """Refuses a model that is not what it was; one that is gone computes nothing."""
        model = self._model()
        if model is None:
            return
        now = self._state(model)
        changed = [name for name, value in self._was.items() if value != now[name]]
        if changed:
            raise ModelError(
                f"the model has other {' and '.join(changed)} than when its memory was made: what "
                "the memory and its stores hold would be taken for what it computes now\n\n"
                "hint: make another ModelMemory after such a change"
            )

    def _state(self, model: PreTrainedModel) -> dict[str, Any]:
        return {
            "mode, training or not,": model.training,
            "adapters": active_adapters(model),
            "attention": own_attention(model),
            "hooks": [] if self._vouched else list(user_hooks(model)),
            "hooks on adapters": [_num_hooks(layer) for _, layer in tuned_layers(model)],
            "configuration": config_fields(model.config.to_dict()),
            "weights": _samples(model),
        }

    def _switches(self) -> list[Any]:
        """What may be switched from pass to pass: mode and adapters."""
        model = self._model()
        layers = (layer for each in self._tuned if (layer := each()) is not None)
        return [model is not None and model.training, *map(_adapter_state, layers)]

    def _hooks(self, module: torch.nn.Module) -> Iterator[Any]:
        """Of a model and of those inside it: the outermost that is called speaks for all."""

        @eager
        def before(module: torch.nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
            batch = _batch(args, given)
            if batch is None or batch.memory.watch is not self:
                return
            outermost = batch.known.announced_by is None
            if outermost and module in self._watched:  # not a copy of the model, with its hooks
                self._announce(batch, module, args, given)

        @eager
        def after(
            module: torch.nn.Module, args: tuple[Any, ...], given: dict[str, Any], _: object
        ) -> None:
            batch = _batch(args, given)
            if batch is not None and batch.known.announced_by is module:
                batch.known.announced_by = None

        hooks: tuple[Any, Any] = before, after
        yield module.register_forward_pre_hook(hooks[0], with_kwargs=True)
        yield module.register_forward_hook(hooks[1], with_kwargs=True, always_call=True)

    def _announce(
        self,
        batch: "Sequences",
        module: torch.nn.Module,
        args: tuple[Any, ...],
        given: dict[str, Any],
    ) -> None:
        start, known = batch.next_token, batch.known
        named = inspect.signature(module.forward).bind_partial(*args, **given).arguments
        named = {**named, **given}
        check_goes_on(named, start)
        if start < known.num_tokens:
            self.check()
            check_pass(named, known.prompts, start, found=batch.hit_tokens > 0)
            known.heard.hear(start, named.get("input_ids"))
        elif known.prompts:
            fault = self._fault(named, known.prompts, start)
            known.heard.hear(start, named.get("input_ids"), fault)
        known.announced_by = module

    def _fault(self, named: Mapping[str, Any], prompts: Sequence[Prompt], start: int) -> str:
        """Why later prompts could not use the rows of a pass behind the known tokens, if so."""
        if self._switches() != self._switches_were:
            return "the model had other adapters, or was in another mode"
        try:
            check_pass(named, prompts, start, found=False)
        except BlockError as error:
            return str(error).partition("\n")[0]
        return ""


def _batch(args: tuple[Any, ...], given: Mapping[str, Any]) -> "Sequences | None":
    """The sequences behind the cache that a model is given, if it is one of ours."""
    caches = (each for each in (*given.values(), *args) if isinstance(each, Cache))
    return next((each.batch for each in caches if hasattr(each, "batch")), None)  # pyright: ignore[reportAttributeAccessIssue]


def _adapter_state(layer: Any) -> tuple[Any, ...]:
    """How PEFT's adapters take part in a layer now: used, off, or merged into the weights."""
    is_off = getattr(layer, "disable_adapters", False)
    merged = [*getattr(layer, "merged_adapters", ())]
    return is_off, adapter_strengths(layer), merged, _num_hooks(layer)


def _num_hooks(layer: Any) -> tuple[int, int]:
    """Hooks on a layer. PEFT puts some there for one pass, where sequences have adapters of their
    own or adapters begin at a token."""
    return len(layer._forward_pre_hooks), len(layer._forward_hooks)


def _samples(model: PreTrainedModel) -> list[tuple[str, bytes]]:
    """A few elements of every tensor, a rope's frequencies included, as bytes by type."""
    taken: dict[str, list[Tensor]] = {}
    for tensor in (*model.parameters(), *lasting_buffers(model)):
        if tensor.is_meta or not tensor.numel():
            continue
        flat = getattr(tensor, "_local_tensor", tensor).detach().reshape(-1)
        step = max(1, flat.numel() // SAMPLED_ELEMENTS)
        taken.setdefault(f"{flat.dtype} {flat.device}", []).append(flat[::step][:SAMPLED_ELEMENTS])
    return [
        (kind, bytes(torch.cat(parts).view(torch.uint8).cpu().numpy()))
        for kind, parts in sorted(taken.items())
    ]


# ── what a model is given ─────────────────────────────────────────────────────────────


def check_goes_on(given: Mapping[str, Any], start: int) -> None:
    """Refuses passes of `generate(use_cache=False)`, which gives all tokens at every step, behind
    those that the cache holds."""
    positions = given.get("position_ids")
    if given.get("use_cache") is False and start and positions is not None and not positions.min():
        raise BlockError(
            f"the cache holds {start} tokens, and the model is given {positions.shape[-1]} from "
            "position 0 on, with use_cache=False\n\n"
            "hint: leave use_cache out, or give generate no cache"
        )


def check_pass(
    given: Mapping[str, Any], prompts: Sequence[Prompt], start: int, *, found: bool
) -> None:
    """Refuses arguments by which tokens from `start` on become other rows than a prompt's.

    `found` says that tokens before them were found.
    """
    known = known_ids(prompts, start)
    paddings = torch.tensor([padding_of(each) for each in prompts])
    if given.get("adapter_names") is not None:
        raise BlockError(f"adapters by sequence are in no row's name\n\n{HINT}")
    ids, embeddings = given.get("input_ids"), given.get("inputs_embeds")
    if ids is None:
        what = "neither" if embeddings is None else "embeddings, not"
        raise BlockError(
            f"the model is given {what} tokens, and the cache was told some: whether they belong "
            f"together, nobody can tell\n\n{HINT}"
        )
    tokens = min(ids.shape[1], known.shape[1])
    if found and tokens < ids.shape[1]:
        return  # the prompt comes again: `Sequences` refuses it, and says why that happens
    _check_tokens(ids[:, :tokens], known[:, :tokens], start)
    _check_mask(given.get("attention_mask"), paddings, start + ids.shape[1])
    positions = given.get("position_ids")
    if positions is None or positions.ndim <= 2:
        _check_positions(positions, paddings, start, ids.shape[1])


def _check_tokens(ids: Tensor, known: Tensor, start: int) -> None:
    if ids.shape != known.shape:
        raise BlockError(
            f"a cache of {len(known)} sequences was given {len(ids)}\n\n"
            "hint: give it one row of tokens for each beam or returned sequence"
        )
    other = (ids.cpu() != known).nonzero()
    if len(other):
        sequence, at = other[0].tolist()
        raise BlockError(
            f"sequence {sequence}: the model is given {int(ids[sequence, at])} as token "
            f"{start + at}, the cache was told {int(known[sequence, at])}\n\n"
            "hint: Cache(..., tokens=...) are the input_ids that the model is given"
        )


def _check_mask(mask: Any, paddings: Tensor, end: int) -> None:
    if mask is None and not paddings.any():
        return
    told = f"the cache was told padding of {paddings.tolist()} tokens"
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] < end:
        what = "no mask" if mask is None else f"a mask {tuple(getattr(mask, 'shape', ()))}"
        raise BlockError(
            f"{told}, the model is given {what}\n\n"
            "hint: give both the same attention_mask, [sequence, token]"
        )
    seen = torch.arange(end) >= paddings[:, None]
    if not torch.equal(mask[:, :end].cpu() != 0, seen):
        raise BlockError(
            f"{told}, the mask that the model is given hides other ones\n\n"
            "hint: Cache(..., attention_mask=...), the one that the model is given"
        )


def _check_positions(positions: Tensor | None, paddings: Tensor, start: int, count: int) -> None:
    """Positions count from the first token that is none of the padding, as `generate` has it."""
    at = torch.arange(start, start + count) - paddings[:, None]
    given = torch.arange(start, start + count)[None] if positions is None else positions.cpu()
    if ((given != at) & (at >= 0)).any():
        what = "no position_ids, so padding counts" if positions is None else f"{given.tolist()}"
        raise BlockError(
            f"tokens from {start} on are not at their own positions behind padding of "
            f"{paddings.tolist()}: the model is given {what:.80}\n\n"
            "hint: give position_ids as generate does, which count from the first token behind the "
            "padding"
        )
