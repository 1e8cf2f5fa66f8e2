"""Where a model's facts come from: a catalogue name, a `config.json`, a directory, a dict."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from kvstow.errors import ModelError
from kvstow.plan.models.catalogue import entry
from kvstow.plan.models.config import Config

Source = str | Path | Mapping[str, object] | Config

MAX_CONFIG_BYTES = 16 << 20

_TEXT_PARTS = ("thinker_config", "text_config", "llm_config", "language_config")

# Facts that released files leave out because their class has them as defaults.
CLASS_DEFAULTS: dict[str, dict[str, object]] = {
    "falcon": {"multi_query": True},
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
    },
    "gpt_bigcode": {"multi_query": True},
    "llama4_text": {"head_dim": 128, "attention_chunk_size": 8192},
    "qwen3": {"head_dim": 128},
}


def load_model(source: Source) -> Config:
    """The facts of a model, its text part merged to the top.

    A string is a path if something exists there or it looks like one, and a catalogue
    name otherwise.
    """
    match source:
        case Config():
            return source
        case Path():
            return _from_file(source)
        case str():
            if _looks_like_path(source):
                return _from_file(Path(source))
            name, facts = entry(source)
            return Config(name=name, facts=facts)
        case _:
            return _from_facts(_name(source), source)


def _name(facts: object) -> str:
    """What to call a model that came as a dict."""
    if isinstance(facts, Mapping):
        known = cast(Mapping[str, object], facts)
        for key in ("_name_or_path", "model_type"):
            if isinstance(value := known.get(key), str) and value:
                return value
    return "config"


def _looks_like_path(source: str) -> bool:
    if source.endswith(".json") or source.startswith((".", "/", "~")):
        return True
    try:
        return Path(source).exists()
    except (OSError, ValueError):
        return False


def _from_file(path: Path) -> Config:
    path = path.expanduser()
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_CONFIG_BYTES + 1)
        if len(data) > MAX_CONFIG_BYTES:
            raise ModelError(f"{file}: above {MAX_CONFIG_BYTES} bytes, no config.json is")
        facts: object = json.loads(data)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: not JSON: {error}") from error
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    return _from_facts(name, facts)


def _from_facts(name: str, facts: object) -> Config:
    if not isinstance(facts, Mapping):
        raise ModelError(f"{name}: a configuration is an object, not {type(facts).__name__}")
    merged = dict(cast(Mapping[str, object], facts))
    for key in _TEXT_PARTS:
        if merged.get(key) is not None:
            part = Config(name=name, facts=merged).inner(key).facts
            merged |= {k: v for k, v in part.items() if v is not None}
    kind = merged.get("model_type")
    defaults = CLASS_DEFAULTS.get(kind, {}) if isinstance(kind, str) else {}
    return Config(name=name, facts=defaults | merged)
