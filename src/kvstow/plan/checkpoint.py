"""What decides a checkpoint's computation beside its weights: configuration, code, tokenizer.

Files count by their names and bytes, never by where or since when they lie.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

from kvstow.errors import ModelError
from kvstow.plan.weight_files import small_file, weights_digest

SETTINGS = (
    "params.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "adapter_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files beside `config.json` that decide what is computed: quantisation, Mistral's configuration,
how images become numbers."""

TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "vocab.bpe",
    "merges.txt",
    "normalizer.json",
    "tekken.json",
    "*.tiktoken",
    "*.tiktoken.model",
    "*.bpe.model",
    "spiece.model",
)

MAX_CODE_FILES = 1024


def checkpoint_name(folder: Path) -> str:
    """`org/name` of a hub snapshot (`models--org--name/snapshots/…`), else the folder's name."""
    for part in folder.absolute().parts:
        match = re.fullmatch(r"models--(.+?)--(.+)", part)
        if match:
            return f"{match[1]}/{match[2]}"
    return folder.absolute().name


def checkpoint_config(folder: Path) -> Mapping[str, Any]:
    """The fields of `config.json`; none where Mistral's `params.json` stands in its place.

    Raises ModelError where neither can be read.
    """
    path = folder / "config.json"
    if not path.exists() and (folder / "params.json").is_file():
        return {}
    try:
        config: Any = json.loads(small_file(path))
    except (OSError, ValueError, RecursionError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise ModelError(
            f"{path}: no configuration: {why}\n\n"
            "hint: name the directory that holds a model's config.json and weights"
        ) from None
    if not isinstance(config, dict):
        raise ModelError(f"{path}: a list or a value, not the fields of a configuration")
    return cast("dict[str, Any]", config)


def deciding_files(
    folder: Path, config: Mapping[str, Any], *, trust_remote_code: bool
) -> dict[str, str]:
    """Digests of the files that decide what is computed, by name, without weights and tokenizer.

    With any `auto_map` in the configuration, at any depth, each Python file below the folder is
    one of them: which it imports nobody can tell. Code in another repository
    (`org/name--module.Class`) stands as that name.
    """
    paths = [path for name in SETTINGS if (path := folder / name).is_file()]
    digests = {path.name: _file_digest(path) for path in paths}
    maps = [*_auto_maps(config)] if trust_remote_code else []
    if maps:
        digests |= code_digests(folder)
        digests |= {text: "elsewhere" for each in maps for text in _texts(each) if "--" in text}
    return digests


def code_digests(folder: Path) -> dict[str, str]:
    """A digest of each Python file below a folder, by its path there."""
    digests: dict[str, str] = {}
    for where, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = [Path(where, name) for name in sorted(names) if name.endswith(".py")]
        digests |= {path.relative_to(folder).as_posix(): _file_digest(path) for path in paths}
        if len(digests) > MAX_CODE_FILES:
            raise ModelError(
                f"{folder}: more than {MAX_CODE_FILES} Python files below it\n\n"
                "hint: the model's own code counts by all of them; keep nothing else there"
            )
    return digests


def tokenizer_digest(folder: Path) -> str:
    """A digest of the tokenizer's files; empty where there are none.

    How a chat becomes text is not among them: prompts are compared as token ids.
    """
    state = blake2b(digest_size=16)
    paths = sorted({path for name in TOKENIZERS for path in folder.glob(name) if path.is_file()})
    for path in paths:
        data = path.read_bytes()
        if path.name == "tokenizer_config.json":
            data = _without_chat(data)
        state.update(f"{path.name}:{len(data)}:".encode() + data)
    return state.hexdigest() if paths else ""


def adapter_digest(adapter: str | Path) -> str:
    """Name and digest of a LoRA in a folder; a name that is no folder stands for itself."""
    folder = Path(adapter)
    if not str(adapter) or not folder.is_dir():
        return str(adapter)
    state = blake2b(weights_digest(folder).encode(), digest_size=16)
    with suppress(FileNotFoundError):
        state.update((folder / "adapter_config.json").read_bytes())
    return f"{folder.absolute().name}:{state.hexdigest()}"


def _without_chat(data: bytes) -> bytes:
    with suppress(ValueError, RecursionError):
        fields: Any = json.loads(data)
        if isinstance(fields, dict):
            kept = {k: v for k, v in cast("dict[str, Any]", fields).items() if k != "chat_template"}
            return json.dumps(kept, sort_keys=True).encode()
    return data


def _auto_maps(value: Any) -> Iterator[Any]:
    """What stands under `auto_map` in a configuration and in all parts of it."""
    if isinstance(value, Mapping):
        for key, inner in cast("Mapping[str, Any]", value).items():
            if key == "auto_map" and any(_texts(inner)):
                yield inner
            yield from _auto_maps(inner)
    elif isinstance(value, list):
        for inner in cast("list[Any]", value):
            yield from _auto_maps(inner)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*cast("Mapping[str, Any]", value).values()])
    elif isinstance(value, list):
        for each in cast("list[Any]", value):
            yield from _texts(each)


def _file_digest(path: Path) -> str:
    try:
        return blake2b(small_file(path), digest_size=16).hexdigest()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
