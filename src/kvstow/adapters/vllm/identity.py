"""Which computation fills vLLM's cache: its checkpoint, and everything that it is started with.

While the engine runs, two things change it. Weights in place:

    started               the checkpoint's identity
    changed               an identity that no other engine has: these may be any weights
    named "run 3, 400"    the checkpoint's and this name: the same in every engine that was told so

And a request's LoRA adapter, which is known by its name and a digest of its weights where they lie
on disk; under one that the engine was given in another way nothing is shared.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from secrets import token_hex
from typing import Any

from kvstow.adapters.vllm.engine import EngineConfig, LoraAdapter
from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.errors import ModelError
from kvstow.plan.checkpoint import adapter_digest
from kvstow.plan.identity import TOKEN_ORDERED, Identity, config_fields

log = logging.getLogger(__name__)

CPU_INTERIOR = "cpu-transposed"
"""vLLM's plain CPU kernels keep keys transposed over the whole block. A name for all CPU kernels,
so that nothing of theirs is taken for what others keep; `pages.IN_TOKEN_ORDER` tells which of
them a route may look into."""

RUNNING_FIELDS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
    "sliding_window",
    "attention_chunk_size",
)
"""Fields that arguments of the engine may change from what the checkpoint says."""

MODEL_SETTINGS = ("quantization_config", "model_class_overrides")
CACHE_SETTINGS = ("mamba_cache_dtype", "mamba_ssm_cache_dtype")
IMAGE_SETTINGS = (
    "mm_processor_kwargs",
    "mm_encoder_attn_dtype",
    "video_pruning_rate",
    "video_pruning_method",
)
"""Settings of vLLM's that change numbers and that no checkpoint has. What a request says of its
images is in their hashes; what the engine says is not."""

WEIGHT_FILES = {"pt": "*.pt", "npcache": "*.bin", "mistral": "consolidated*.safetensors"}
"""Weights that vLLM loads, by its load format, where it is not the first format that is there."""

LONG_ROPES = ("'longrope'", "'su'")

HINT = (
    'hint: "kv_connector_extra_config": {"unverified": "why"}, where all instances and stores are '
    "known to run the same weights"
)


def identity_of(vllm_config: EngineConfig, options: ConnectorOptions) -> Identity:
    """Which computation fills the cache: weights, configuration as it runs, cache dtype, kernels.

    Raises ModelError where the weights cannot be looked at, unless `options.unverified` says
    why that is fine.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    name = options.model or os.path.basename(os.path.normpath(model.model))
    own = str(model.dtype).removeprefix("torch.")
    kv_dtype = own if cache.cache_dtype == "auto" else str(cache.cache_dtype)
    if options.unverified:
        unseen = Identity.unverified(options.unverified, model=name, kv_dtype=kv_dtype)
        return replace(unseen, config=config_fields({"run": _settings(vllm_config, seen=False)}))
    if getattr(cache, "calculate_kv_scales", False):
        raise ModelError(
            "vLLM computes its cache's scales while it runs: bytes of two engines mean different "
            "numbers\n\nhint: use a checkpoint with scales, without --calculate-kv-scales"
        )
    cpu = vllm_config.device_config.device_type == "cpu"
    identity = Identity.of(
        _checkpoint(vllm_config),
        model=name,
        kv_dtype=kv_dtype,
        interior=CPU_INTERIOR if cpu else TOKEN_ORDERED,
        trust_remote_code=bool(getattr(model, "trust_remote_code", False)),
        weight_files=WEIGHT_FILES.get(str(vllm_config.load_config.load_format), ""),
    )
    running = config_fields({"run": _settings(vllm_config, seen=True)})
    return replace(identity, config=tuple(sorted((*identity.config, *running))))


def _settings(vllm_config: EngineConfig, *, seen: bool) -> dict[str, Any]:
    """What the engine runs with that changes its cache, and is not in the checkpoint. Unless it
    was `seen`, somebody vouches for what has no name."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    images, text = (getattr(model, name, None) for name in ("multimodal_config", "hf_text_config"))
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": getattr(model, "quantization", None),
        **{field: getattr(text, field, None) for field in RUNNING_FIELDS},
        **_replaced(model, seen=seen),
        **{name: _text(getattr(model, name, None)) for name in MODEL_SETTINGS},
        **{name: _text(getattr(cache, name, None)) for name in CACHE_SETTINGS},
        **{name: _text(getattr(images, name, None)) for name in IMAGE_SETTINGS},
        "long_rope": _long_rope(model),
        "draft": _draft(vllm_config) if seen else None,
    }


def _text(value: Any) -> str | None:
    return None if value in (None, "", "auto", {}) else str(value)


def _replaced(model: Any, *, seen: bool) -> dict[str, Any]:
    """What somebody has put into the place of the checkpoint's own configuration."""
    overrides: Any = getattr(model, "hf_overrides", None) or {}
    if callable(overrides) and not seen:
        return {}
    if callable(overrides):
        raise ModelError(
            f"{model.model}: its configuration is changed by a function, {overrides!r}, "
            f"whose effect cannot be compared\n\n{HINT}"
        )
    other = getattr(model, "hf_config_path", None)
    return {"overrides": overrides, "config": model.hf_config.to_dict() if other else {}}


def _long_rope(model: Any) -> str | None:
    """Which of its two ropes a model with LongRoPE uses: vLLM decides by the longest request that
    it allows."""
    text = getattr(model, "hf_text_config", None)
    ropes = [getattr(text, name, None) for name in ("rope_parameters", "rope_scaling")]
    if not any(kind in repr(ropes) for kind in LONG_ROPES):
        return None
    name = "original_max_position_embeddings"
    said = [getattr(text, name, None), *(rope.get(name) for rope in ropes if rope)]
    original = next((each for each in said if each), None)
    if original is None:
        return f"of {model.max_model_len} tokens"
    return "long" if model.max_model_len > original else "short"


def _draft(vllm_config: EngineConfig) -> str | None:
    """The weights of a model that drafts tokens, where it has its own: its cache is in the rows."""
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    if draft is None or draft.model == vllm_config.model_config.model:
        return None
    folder = _folder(draft)
    return Identity.of(folder).weights if folder else str(draft.model)


def _checkpoint(vllm_config: EngineConfig) -> Path:
    """The folder that vLLM has read its weights from."""
    model = vllm_config.model_config
    if str(vllm_config.load_config.load_format) == "dummy":
        raise ModelError(f"{model.model}: its weights are random (load_format dummy)\n\n{HINT}")
    folder = _folder(model)
    if folder is None:
        raise ModelError(f"{model.model}: neither a folder nor in the hub's cache\n\n{HINT}")
    return folder


def _folder(model: Any) -> Path | None:
    """Where a model lies, in the hub's cache perhaps."""
    if os.path.isdir(model.model):
        return Path(model.model)
    return _in_hub(model.model, "config.json", model.revision)


def _in_hub(name: str, file: str, revision: str | None = None) -> Path | None:
    """The folder with that file in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    try:
        path = try_to_load_from_cache(name, file, revision=revision)
    except ValueError:  # not a name of the hub's
        return None
    return Path(path).parent if isinstance(path, str) else None


# ── weights that are changed in place ─────────────────────────────────────────────────


class EngineWeights:
    """The identity of one engine, from its start through all changes of its weights.

    A name that something was computed under is not taken a second time: it may be said of other
    weights then. Whoever gives one says that it stands for these weights, here and everywhere.
    """

    def __init__(self, identity: Identity) -> None:
        self._started = self.identity = identity
        self._name: str | None = None
        self._used: set[str] = set()

    @property
    def have_changed(self) -> bool:
        """Whether they may be others than the checkpoint's."""
        return self.identity is not self._started

    def change(self) -> None:
        """They may have become any others."""
        self._name = None
        self.identity = unshared(self._started)

    def name(self, name: str) -> None:
        """They have become those of this name; any others, if it was used before."""
        self.change()
        if name in self._used:
            log.warning(
                "weights %r: something was computed under that name before, so nothing is shared "
                "with other engines\n\nhint: a new name for every change of weights",
                name,
            )
            return
        self._name = name
        self.identity = _with(self._started, "weights", ascii(name))
        log.info("weights are called %r from now on", name)

    def mark_used(self) -> None:
        """The engine computes with them: their name stands for them, and for no others."""
        if self._name is not None:
            self._used.add(self._name)


def unshared(identity: Identity) -> Identity:
    """The same, told apart from what everybody else has."""
    return _with(identity, "reset", token_hex(16))


def _with(identity: Identity, field: str, value: str) -> Identity:
    config = dict(identity.config) | {f"run.{field}": value}
    return replace(identity, config=tuple(sorted(config.items())))


# ── LoRA adapters ─────────────────────────────────────────────────────────────────────

AdapterPlace = tuple[str, str, int]
"""An adapter's name, path and number in the engine."""

FolderFacts = tuple[tuple[str, int, int, int, int], ...]
"""Name, inode, size and times of each file."""


class AdapterNames:
    """Adapters of one engine, as they were when they were first asked for.

    The engine reads an adapter's files when it loads it, and perhaps again later; we read them when
    a request names it. Files that were written anew may or may not be what the engine has in
    memory: nothing is shared under them. Where somebody has `vouched` for what is not looked at, an
    adapter whose weights cannot be found is known by its path.
    """

    def __init__(self, *, vouched: bool = False) -> None:
        self._vouched = vouched
        self._first: dict[AdapterPlace, str | None] = {}

    def name(self, adapter: LoraAdapter) -> str | None:
        """What an adapter of vLLM's is known by; None where its weights are nowhere to be found, or
        are not those of before."""
        path = adapter.lora_path
        folder = _adapter_folder(path)
        digest = _adapter_digest(folder, _files(folder)) or (path if self._vouched else None)
        name = f"{adapter.lora_name} {digest}" if digest else None
        return name if name == self._first.setdefault(_place(adapter), name) else None

    def looked_up_once(self) -> Callable[[LoraAdapter], str | None]:
        """`name`, for a moment in which no file changes: each adapter's are looked at once, however
        many requests use it."""
        names: dict[AdapterPlace, str | None] = {}

        def name(adapter: LoraAdapter) -> str | None:
            place = _place(adapter)
            if place not in names:
                names[place] = self.name(adapter)
            return names[place]

        return name


def _place(adapter: LoraAdapter) -> AdapterPlace:
    return adapter.lora_name, adapter.lora_path, adapter.lora_int_id


def _adapter_folder(path: str) -> str:
    """Where an adapter lies: a path, or the name of one in the hub's cache; as it is otherwise."""
    if os.path.isabs(path) or os.path.isdir(path):
        return path
    if path.startswith("~"):
        return os.path.expanduser(path)
    return str(_in_hub(path, "adapter_config.json") or path)


def _files(folder: str) -> FolderFacts:
    """What tells whether something in a folder was written anew, empty where there is none: an
    adapter may be loaded again under its name. The latest time alone does not: files keep older
    times when they are copied, and clocks are set back."""
    try:
        files = [(entry.name, entry.stat()) for entry in os.scandir(folder)]
    except OSError:
        return ()
    return tuple(sorted((n, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for n, s in files))


@lru_cache(maxsize=1024)
def _adapter_digest(folder: str, files: FolderFacts) -> str | None:
    try:
        return adapter_digest(folder) if os.path.isdir(folder) else None
    except ModelError:
        return None
