# pyright: reportMissingTypeArgument=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportPrivateUsage=false
"""Which computation fills a model's cache: everything in memory that decides its numbers.

    weights     every byte of every tensor of the state dict
    config      the configuration; what modules have made of it (numbers, and buffers that are
                not saved, such as a rope's frequencies), since it may be edited after loading;
                the files that define the modules' classes; attention and hooks of the user's
    adapter     PEFT's adapters: which are active, and how strongly

Nothing that differs between machines is in it: no paths, no times, no last bits of what is
computed from the configuration.
"""

import sys
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from inspect import getsource
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvstow.errors import ModelError
from kvstow.plan.code import code_digests
from kvstow.plan.identity import CODE, Identity

Tensor = torch.Tensor

HINT = "hint: ModelMemory.of(model, identity=...) with the identity of the whole model"


def model_identity(model: PreTrainedModel, *, name: str = "") -> Identity:
    """Which computation fills the model's cache, from the model as it is now.

    A model whose weights change afterwards, or whose adapters are switched, needs another
    memory. Raises ModelError for weights that are not in this process, and for code that
    cannot be read.
    """
    whole = uncompiled(model)
    return Identity.of_tensors(
        name or str(whole.config.model_type),
        {
            **whole.config.to_dict(),
            CODE: modelling_code(whole),
            "modules": _module_state(whole),
            "attention": own_attention(whole),
            "hooks": sorted(user_hooks(whole)),
        },
        _tensors(whole),
        kv_dtype=str(whole.dtype).removeprefix("torch."),
        adapter=active_adapters(whole),
    )


def uncompiled(model: PreTrainedModel) -> PreTrainedModel:
    """The model that `torch.compile` has wrapped, or the model itself."""
    return getattr(model, "_orig_mod", model)


# ── weights ───────────────────────────────────────────────────────────────────────────

WORDS = 1024
CHUNK_BYTES = 8 << 20
_KEYS = np.random.Generator(np.random.PCG64(20261116)).integers(1 << 63, size=WORDS) * 2 + 1
"""Odd numbers, so that a change of one word always changes its sum."""


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, str, bytes]]:
    """Every tensor's name, its type and shape, and a digest of its bytes; tied ones are read
    once."""
    known: dict[tuple[int, str], bytes] = {}
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor):
            continue
        if tensor.is_meta or hasattr(tensor, "full_tensor"):
            where = "not loaded" if tensor.is_meta else "split over ranks"
            raise ModelError(f"tensor {name!r} is {where}\n\n{HINT}")
        said = f"{tensor.dtype} {tuple(tensor.shape)}"
        place = (tensor.data_ptr(), said)
        if place not in known:
            known[place] = tensor_digest(tensor)
        yield name.replace("_orig_mod.", ""), said, known[place]


def tensor_digest(tensor: Tensor) -> bytes:
    """A digest of all bytes, the same on every device: only sums leave it.

    Each 8 KiB are one sum of words times keys, modulo 2^64; these are digested.
    """
    state = blake2b(digest_size=16)
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    keys = torch.from_numpy(_KEYS).to(flat.device)
    for part in flat.split(CHUNK_BYTES):
        short = -part.numel() % (8 * WORDS)
        if short or part.storage_offset() % 8:
            part = torch.nn.functional.pad(part, (0, short)).clone()
        words = part.view(torch.int64).view(-1, WORDS)
        sums = torch.mv(words, keys) if flat.device.type == "cpu" else (words * keys).sum(1)
        state.update(sums.cpu().numpy().tobytes())
    return state.digest()


# ── what modules have made of the configuration ───────────────────────────────────────

PASSING = frozenset({"training", "gradient_checkpointing"})
"""Attributes of modules that say nothing of what is computed, or are asked for elsewhere."""

MANTISSA_BITS = 12
"""Of a number computed from the configuration, so many: the last ones differ by machine."""


def _module_state(model: PreTrainedModel) -> str:
    """A digest of the modules' numbers, and of buffers that are not saved with the weights."""
    state = blake2b(digest_size=16)
    for name, module in model.named_modules():
        numbers = [
            f"{key}={value:.9g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in sorted(vars(module).items())
            if isinstance(value, bool | int | float)
            and not (key.startswith("_") or key in PASSING or "cached" in key)
        ]
        state.update(f"{name}:{','.join(numbers)};".encode())
        for key, buffer in _unsaved_buffers(module):
            state.update(f"{key}:{tuple(buffer.shape)}:".encode() + _rounded(buffer))
    return state.hexdigest()


def _unsaved_buffers(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers of a module itself that are made from the configuration, and stay as they are."""
    unsaved: set[str] = module._non_persistent_buffers_set
    by_length = _follows_length(module)
    for key in sorted(unsaved):  # not `named_buffers`, which leaves out what stands there twice
        buffer = module._buffers[key]
        passing = "cached" in key or (by_length and not key.endswith("original_inv_freq"))
        if buffer is not None and not passing and not buffer.is_meta:
            yield key, buffer


def lasting_buffers(model: PreTrainedModel) -> Iterator[Tensor]:
    """Buffers that no pass changes: those that are not saved with the weights."""
    for module in model.modules():
        yield from (buffer for _, buffer in _unsaved_buffers(module))


def _follows_length(module: torch.nn.Module) -> bool:
    """Whether a module is a rope whose frequencies are those of the longest sequence so far."""
    kinds: Any = getattr(module, "rope_type", "")
    named = kinds.values() if isinstance(kinds, Mapping) else [kinds]
    return any(kind == "longrope" or "dynamic" in str(kind) for kind in named)


def _rounded(buffer: Tensor) -> bytes:
    values = buffer.detach().cpu()
    if values.is_floating_point():
        drop = 23 - MANTISSA_BITS
        values = (values.float().contiguous().view(torch.int32) + (1 << (drop - 1))) >> drop
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# ── code ──────────────────────────────────────────────────────────────────────────────

SHARED_CODE = ("transformers.masking_utils", "transformers.modeling_rope_utils")
"""What the models of transformers have in common and is no module's class."""


def modelling_code(model: PreTrainedModel) -> dict[str, str]:
    """Digests of the files that define the model's modules, by file name.

    Those of transformers count by what they hold, not by its version: most versions change
    nothing for most models, and a fork changes them without a version.
    """
    classes = {each for module in model.modules() for each in type(module).__mro__}
    found: dict[str, str] = {}
    seen: set[str] = set()
    for each in sorted(classes, key=lambda each: (each.__module__, each.__qualname__)):
        if each.__module__ in seen or not _computes(each):
            continue
        seen.add(each.__module__)
        found |= _files(each)
    for name in SHARED_CODE:
        found |= _file(sys.modules[name].__file__ or "")
    return found


def _computes(each: type) -> bool:
    """Whether a class may decide what is cached: not those that hold modules of all models."""
    where = each.__module__
    if not issubclass(each, torch.nn.Module) or where.partition(".")[0] in ("torch", "kvstow"):
        return False
    if where.partition(".")[0] != "transformers":
        return True
    return where.startswith("transformers.models.") or where == "transformers.activations"


def _files(each: type) -> dict[str, str]:
    """The file of a class; with what it imports from beside it, where that is remote code."""
    path = getattr(sys.modules.get(each.__module__), "__file__", None)
    if path and Path(path).is_file():
        remote = each.__module__.startswith("transformers_modules.")
        return code_digests(Path(path)) if remote else _file(path)
    try:
        source = getsource(each).encode()
    except (OSError, TypeError):
        raise ModelError(
            f"the code of {each.__module__}.{each.__qualname__} cannot be read, so nobody can "
            f"tell whether it is the one that computed a store's rows\n\n{HINT}"
        ) from None
    return {each.__qualname__: blake2b(source, digest_size=16).hexdigest()}


def _file(path: str) -> dict[str, str]:
    source = Path(path).read_bytes()
    return {Path(path).name: blake2b(source, digest_size=16).hexdigest()}


def own_attention(model: PreTrainedModel) -> str:
    """An attention of the user's own; empty for those of transformers, which compute alike."""
    used: Any = model.config._attn_implementation
    kinds = sorted({str(each) for each in (used.values() if isinstance(used, dict) else [used])})
    own: list[str] = []
    for kind in kinds:
        function: Any = ALL_ATTENTION_FUNCTIONS.get(kind, None)
        where = str(getattr(function, "__module__", "transformers."))
        if not where.startswith(("transformers.", "kvstow.")):
            own.append(f"{kind} of {where}.{getattr(function, '__qualname__', '')}")
    return " ".join(own)


def user_hooks(model: PreTrainedModel) -> Iterator[str]:
    """Hooks on the model's modules that are neither torch's nor transformers': what they do to
    what is kept, nobody can tell."""
    for name, module in model.named_modules():
        hooks: Any = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        for hook in hooks:
            where = str(getattr(hook, "__module__", type(hook).__module__))
            if where.partition(".")[0] not in ("torch", "transformers", "accelerate", "kvstow"):
                yield f"{name}: {where}.{getattr(hook, '__qualname__', type(hook).__qualname__)}"


# ── adapters ──────────────────────────────────────────────────────────────────────────


def active_adapters(model: PreTrainedModel) -> str:
    """The adapters that the model computes with; the tensors of all are there at any time."""
    used: set[str] = set()
    how: list[tuple[str, dict[str, Any]]] = []
    for name, layer in tuned_layers(model):
        if not getattr(layer, "disable_adapters", False):
            strength = adapter_strengths(layer)
            used.update(strength)
            how.append((name, strength))
    if not used:
        return ""
    return f"{'+'.join(sorted(used))}:{blake2b(repr(how).encode(), digest_size=16).hexdigest()}"


def tuned_layers(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Module]]:
    """Layers that PEFT has put adapters into, by name."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "active_adapters", None), list):
            yield name, module


def adapter_strengths(layer: Any) -> dict[str, Any]:
    """The active adapters of a layer, and how strongly each counts."""
    scaling: dict[str, Any] = getattr(layer, "scaling", {})
    return {each: scaling.get(each) for each in sorted(layer.active_adapters)}
