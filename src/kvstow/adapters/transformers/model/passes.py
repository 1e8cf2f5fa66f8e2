"""Passes of a model over a cache of ours: is it given the tokens that the cache was told?

Rows are found again by the tokens that a cache was told, so what the model is given has to be
these tokens. A hook on the model compares the token ids of every pass over such a cache. A pass
that may leave other rows than a prompt's (other positions or masks, embeddings, adapters by
sequence, a model that has changed) is computed, and its rows are not reused.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

import torch
from transformers import Cache, PreTrainedModel

from kvstow.adapters.transformers.batch.prompts import padding_of
from kvstow.adapters.transformers.model.identity import active_adapters, tuned_layers, uncompiled
from kvstow.blocks.prompt import Prompt

if TYPE_CHECKING:
    from kvstow.adapters.transformers.batch.sequences import Sequences

_compiler: Any = torch.compiler
eager: Any = _compiler.disable(
    reason="rows are found and grown by Python code; compile the model without fullgraph=True"
)
"""A compiled model leaves its graph to call what is marked so."""

SAMPLED_ELEMENTS = 8


class ModelPasses:
    """Hooks on a model that report its passes, and what the model was when they were set.

    Keeps no weights alive.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        whole = uncompiled(model)
        self._model = ref(whole)
        self._switches = _switches(whole)
        self._weights = _weight_samples(whole)
        models = [each for each in whole.modules() if isinstance(each, PreTrainedModel)]
        self._watched = WeakSet[torch.nn.Module](models)
        self._handles = [handle for each in models for handle in self._hooks(each)]

    def close(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def change(self) -> str:
        """What of the model has changed since, in words; empty for nothing, or no model."""
        model = self._model()
        if model is None or self._weights == _weight_samples(model):
            return self.switch()
        return "the model has other weights than when its memory was made"

    def switch(self) -> str:
        """The same of its mode and its adapters alone: cheap enough for every pass."""
        model = self._model()
        switches = self._switches if model is None else _switches(model)
        changed = [name for name, value in self._switches.items() if value != switches[name]]
        if not changed:
            return ""
        return f"the model has other {' and '.join(changed)} than when its memory was made"

    def _hooks(self, module: torch.nn.Module) -> Iterator[Any]:
        """Of a model and of those inside it: the outermost that is called speaks for all."""

        @eager
        def before(module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            batch = _batch(args, options)
            if batch is None or batch.memory.passes is not self:
                return
            if batch.known.pass_of is None and module in self._watched:  # not a copy's hooks
                self._begin(batch, module, args, options)

        @eager
        def after(
            module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any], _: object
        ) -> None:
            batch = _batch(args, options)
            if batch is not None and batch.known.pass_of is module:
                batch.known.pass_of = None

        hooks: tuple[Any, Any] = before, after
        yield module.register_forward_pre_hook(hooks[0], with_kwargs=True)
        yield module.register_forward_hook(hooks[1], with_kwargs=True, always_call=True)

    def _begin(
        self,
        batch: "Sequences",
        module: torch.nn.Module,
        args: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        known, start = batch.known, batch.next_token
        if known.prompts:
            bound = inspect.signature(module.forward).bind_partial(*args, **options).arguments
            arguments: dict[str, Any] = {**bound, **options}
            fault = self.switch() or pass_fault(arguments, known.prompts, start)
            known.begin_pass(start, arguments.get("input_ids"), fault)
        known.pass_of = module


def _batch(args: tuple[Any, ...], options: Mapping[str, Any]) -> "Sequences | None":
    """The sequences behind the cache that a model is given, if it is one of ours."""
    caches = (each for each in (*options.values(), *args) if isinstance(each, Cache))
    return next((batch for each in caches if (batch := getattr(each, "batch", None))), None)


def _switches(model: PreTrainedModel) -> dict[str, Any]:
    """What may be switched from pass to pass: mode and adapters.

    PEFT puts hooks on its layers for one pass where sequences have adapters of their own.
    """
    layers: list[Any] = [layer for _, layer in tuned_layers(model)]
    hooks = [len(layer._forward_pre_hooks) + len(layer._forward_hooks) for layer in layers]
    return {
        "mode, training or not,": model.training,
        "adapters": (active_adapters(model), hooks),
    }


def _weight_samples(model: PreTrainedModel) -> list[tuple[str, bytes]]:
    """A few elements of every parameter, as bytes by type."""
    samples: dict[str, list[torch.Tensor]] = {}
    for tensor in model.parameters():
        if tensor.is_meta or not tensor.numel():
            continue
        flat = getattr(tensor, "_local_tensor", tensor).detach().reshape(-1)
        step = max(1, flat.numel() // SAMPLED_ELEMENTS)
        part = flat[::step][:SAMPLED_ELEMENTS]
        samples.setdefault(f"{flat.dtype} {flat.device}", []).append(part)
    return [
        (kind, torch.cat(parts).view(torch.uint8).cpu().numpy().tobytes())
        for kind, parts in sorted(samples.items())
    ]


def pass_fault(arguments: Mapping[str, Any], prompts: Sequence[Prompt], start: int) -> str:
    """Why a pass with these arguments may leave other rows than a prompt's; empty if it does not.

    Tokens from `start` on have to be given as ids, one after the other, behind the padding that
    the prompts name, which is hidden.
    """
    ids = arguments.get("input_ids")
    if ids is None:
        return "the model is given embeddings, not tokens"
    if arguments.get("adapter_names") is not None:
        return "the model is given adapters by sequence"
    if len(ids) != len(prompts):
        return ""  # refused when its tokens are compared
    pads = [padding_of(each) for each in prompts]
    padding = torch.tensor(pads)[:, None]
    end = start + ids.shape[1]
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    if mask is None and padding.any():
        return f"the cache was told padding of {pads} tokens, the model no mask"
    if mask is not None and not _hides_just_padding(mask, padding, end):
        return "the model is given a mask that hides more or less than the padding"
    if (positions is None and padding.any()) or _are_others(positions, padding, start):
        return "tokens are not at their own positions behind the padding"
    return ""


def _hides_just_padding(mask: Any, padding: torch.Tensor, end: int) -> bool:
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or mask.shape[1] < end:
        return False
    return torch.equal(mask[:, :end].cpu() != 0, torch.arange(end) >= padding)


def _are_others(positions: torch.Tensor | None, padding: torch.Tensor, start: int) -> bool:
    """Whether positions do not count from the first token behind the padding, as in `generate`.

    Those with several axes, of models that see images, are not looked at.
    """
    if positions is None or positions.ndim > 2:
        return False
    expected = torch.arange(start, start + positions.shape[-1]) - padding
    return bool(((positions.cpu() != expected) & (expected >= 0)).any())
