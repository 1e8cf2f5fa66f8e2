"""Which computation fills a model's cache: the checkpoint's, the adapters' and the mode's.

    weights     every byte of every tensor of the state dict
    config      the configuration, the mode, and remote code that came with the checkpoint
    adapter     PEFT's adapters: which are active, and how strongly

Nothing that differs between machines is in it: no paths, no times.
"""

import sys
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from kvstow.errors import ModelError
from kvstow.plan.checkpoint import code_digests
from kvstow.plan.identity import Identity

Tensor = torch.Tensor

HINT = "hint: ModelMemory.of(model, identity=...) with the identity of the whole model"


def model_identity(model: PreTrainedModel, *, name: str = "") -> Identity:
    """Which computation fills the model's cache, from the model as it is now.

    A model whose weights change afterwards, or whose adapters are switched, needs another
    memory. Raises ModelError for weights that are not in this process.
    """
    whole = uncompiled(model)
    return Identity.of_tensors(
        name or str(whole.config.model_type),
        {
            **whole.config.to_dict(),
            "modelling_code": remote_code(whole),
            "training": whole.training,
        },
        _tensors(whole),
        kv_dtype=str(whole.dtype).removeprefix("torch."),
        adapter=adapters_in_use(whole),
    )


def remote_code(model: PreTrainedModel) -> dict[str, str]:
    """Digests of the files that came with a checkpoint and define the model, by name."""
    names = {type(module).__module__ for module in model.modules()}
    digests: dict[str, str] = {}
    for name in sorted(names):
        if name.startswith("transformers_modules."):
            digests |= code_digests(Path(str(sys.modules[name].__file__)).parent)
    return digests


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
    digests: dict[tuple[int, str], bytes] = {}
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor):
            continue
        if tensor.is_meta or hasattr(tensor, "full_tensor"):
            where = "not loaded" if tensor.is_meta else "split over ranks"
            raise ModelError(f"tensor {name!r} is {where}\n\n{HINT}")
        said = f"{tensor.dtype} {tuple(tensor.shape)}"
        place = (tensor.data_ptr(), said)
        if place not in digests:
            digests[place] = tensor_digest(tensor)
        yield name.replace("_orig_mod.", ""), said, digests[place]


def tensor_digest(tensor: Tensor) -> bytes:
    """A digest of all bytes, the same on every device: only sums leave it.

    Each 8 KiB are one sum of words times keys, modulo 2^64; these are digested.
    """
    state = blake2b(digest_size=16)
    flat: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    keys = torch.from_numpy(_KEYS).to(flat.device)  # pyright: ignore[reportUnknownMemberType]
    for part in flat.split(CHUNK_BYTES):
        short = -part.numel() % (8 * WORDS)
        if short or part.storage_offset() % 8:
            part = torch.nn.functional.pad(part, (0, short)).clone()
        words = part.view(torch.int64).view(-1, WORDS)
        sums = torch.mv(words, keys) if flat.device.type == "cpu" else (words * keys).sum(1)
        state.update(sums.cpu().numpy().tobytes())
    return state.digest()


# ── adapters ──────────────────────────────────────────────────────────────────────────


def adapters_in_use(model: PreTrainedModel) -> str:
    """The adapters that the model computes with; the tensors of all are there at any time."""
    used: set[str] = set()
    how: list[tuple[str, dict[str, Any]]] = []
    for name, layer in tuned_layers(model):
        if not getattr(layer, "disable_adapters", False):
            scaling: dict[str, Any] = getattr(layer, "scaling", {})
            strength = {each: scaling.get(each) for each in sorted(layer.active_adapters)}
            used.update(strength)
            how.append((name, strength))
    if not used:
        return ""
    return f"{'+'.join(sorted(used))}:{blake2b(repr(how).encode(), digest_size=16).hexdigest()}"


def tuned_layers(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """Layers that PEFT has put adapters into, by name."""
    untyped: Any = model
    for name, module in untyped.named_modules():
        if isinstance(getattr(module, "active_adapters", None), list):
            yield name, module
