"""A model's facts: where they come from, and typed questions about untrusted values.

They come from a catalogue name, a `config.json`, a directory that holds one, or a dict.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

from msgspec import ValidationError, convert

from kvstow.errors import ModelError
from kvstow.plan.checkpoint import checkpoint_name, small_file
from kvstow.plan.models.catalogue import entry, is_known
from kvstow.plan.view import MAX_TOKENS, check_count

Value = TypeVar("Value")


QUANTISATION = "hf_quant_config.json"
"""Where modelopt, until version 0.29, said how a checkpoint is quantised."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One model's facts. A key that is absent and a key that is null are the same."""

    name: str
    facts: Mapping[str, object] = field(repr=False)

    def __contains__(self, key: str) -> bool:
        return self.facts.get(key) is not None

    @property
    def model_type(self) -> str:
        return self.text("model_type", "")

    def error(self, message: str, hint: str = "") -> ModelError:
        """The error to raise about this model."""
        return ModelError(f"{self.name}: {message}" + (f"\n\nhint: {hint}" if hint else ""))

    def missing(self, *keys: str) -> ModelError:
        """The error for a fact that none of `keys` gives."""
        names = " or ".join(repr(key) for key in keys)
        return self.error(f"no {names} in the configuration", f"add {keys[0]!r} to it")

    def present(self, *keys: str) -> str | None:
        """The first of `keys` that has a value."""
        return next((key for key in keys if key in self), None)

    def count(
        self, *keys: str, default: int | None = None, least: int = 1, most: int = MAX_TOKENS
    ) -> int:
        """The whole number, `least` to `most`, under the first of `keys` that has a value."""
        key = self.present(*keys)
        if key is None:
            if default is None:
                raise self.missing(*keys)
            return default
        where = f"{self.name}: {key}"
        return check_count(where, self.facts[key], least=least, most=most, error=ModelError)

    def text(self, key: str, default: str) -> str:
        """The string under `key`."""
        return self._read(key, str, "a string", default)

    def flag(self, key: str, *, default: bool) -> bool:
        """The boolean under `key`."""
        return self._read(key, bool, "true or false", default)

    def counts(self, key: str) -> list[int]:
        """The list of whole numbers >= 0 under `key`."""
        values = self._read(key, list[int], "a list of whole numbers")
        if bad := [value for value in values if value < 0]:
            raise self.error(f"{key} holds {bad[0]!r}, not a whole number >= 0")
        return values

    def texts(self, key: str) -> list[str]:
        """The list of strings under `key`."""
        return self._read(key, list[str], "a list of strings")

    def inner(self, key: str) -> "Config":
        """The object under `key`, as facts of its own."""
        facts = self._read(key, dict[str, object], "an object")
        return Config(name=f"{self.name}: {key}", facts=facts)

    def _read(self, key: str, kind: type[Value], what: str, default: Value | None = None) -> Value:
        value = self.facts.get(key)
        if value is None and default is not None:
            return default
        try:
            return convert(value, kind)
        except ValidationError:
            raise self.error(f"{key} is {value!r:.80}, not {what}") from None


Source = str | Path | Mapping[str, object] | Config


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
        case "":
            raise ModelError(
                "a model without a name\n\nhint: a catalogue name, a config.json or its directory"
            )
        case str():
            if _looks_like_path(source):
                return _from_file(Path(source))
            name, facts = entry(source)
            return Config(name=name, facts=facts)
        case Mapping():
            return _from_facts(_name(source), source)
        case _:
            raise ModelError(
                f"a model is a name, a path or a configuration, not {type(source).__name__}"
            )


def _name(facts: Mapping[str, object]) -> str:
    """What to call a model that came as a dict."""
    for key in ("_name_or_path", "model_type"):
        if isinstance(value := facts.get(key), str) and value:
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
    with suppress(RuntimeError):  # `~nobody`: a path like any other
        path = path.expanduser()
    file = _config_in(path) if path.is_dir() else path
    try:
        facts = _json(file)
    except OSError as error:
        shadowed = is_known(str(path))
        hint = f"\n\nhint: {path} here hides the model of that name" if shadowed else ""
        if path.is_dir() and not shadowed:
            hint = "\n\nhint: a model is a known name, a config.json, or a folder that has one"
        raise ModelError(f"{file}: cannot be read: {error.strerror or error}{hint}") from error
    if file.name != "config.json":
        return _from_facts(file.stem, facts)
    beside, quantised = file.with_name(QUANTISATION), None
    try:
        quantised = _json(beside)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ModelError(f"{beside}: cannot be read: {error.strerror or error}") from error
    return _from_facts(checkpoint_name(file.parent.resolve()), facts, quantised)


def _json(file: Path) -> object:
    """What a file holds. Raises OSError for one that cannot be read, ModelError for no JSON."""
    try:
        return json.loads(small_file(file))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: not JSON: {error}") from error


def _config_in(folder: Path) -> Path:
    """The config.json of a folder; of a hub's folder for a model, that of its only snapshot."""
    snapshots = sorted(folder.glob("snapshots/*/config.json"))
    if not snapshots or (folder / "config.json").exists():
        return folder / "config.json"
    if len(snapshots) > 1:
        names = ", ".join(str(file.parent) for file in snapshots)
        raise ModelError(f"{folder}: {len(snapshots)} snapshots\n\nhint: name one of {names}")
    return snapshots[0]


def _from_facts(name: str, facts: object, quantised: object = None) -> Config:
    """A model by its facts; `quantised` is what a file beside says, which counts if they do not at
    the top: as in vLLM."""
    if not isinstance(facts, Mapping):
        raise ModelError(f"{name}: a configuration is an object, not {type(facts).__name__}")
    merged = dict(cast(Mapping[str, object], facts))
    if "kvstow" in merged and "layout" in merged:
        raise ModelError(
            f"{name}: a layout's manifest, not a model's configuration\n\n"
            "hint: kvstow check and kvstow route take manifests"
        )
    for key in _TEXT_PARTS:
        if merged.get(key) is not None:
            part = Config(name=name, facts=merged).inner(key).facts
            merged |= {k: v for k, v in part.items() if v is not None}
    quantised = cast(Mapping[str, object], facts).get("quantization_config") or quantised
    quantised = quantised or merged.get("quantization_config")
    if isinstance(quantised, Mapping):
        merged["quantization_config"] = _flat(cast(Mapping[str, object], quantised))
    kind = merged.get("model_type")
    defaults = CLASS_DEFAULTS.get(kind, {}) if isinstance(kind, str) else {}
    return Config(name=as_unicode(name), facts=defaults | merged)


def _flat(quantised: Mapping[str, object]) -> Mapping[str, object]:
    """A quantisation as modelopt once wrote it, a level deeper and under the name of its producer,
    in the form that it writes now."""
    inner, producer = quantised.get("quantization"), quantised.get("producer")
    if not isinstance(inner, Mapping):
        return quantised
    flat = {**quantised, **cast(Mapping[str, object], inner)}
    if (
        isinstance(producer, Mapping)
        and "modelopt" in cast(Mapping[str, object], producer).values()
    ):
        flat["quant_method"] = "modelopt"
    return flat


def as_unicode(name: str) -> str:
    """The name with a question mark for each byte that is not text: manifests hold only text."""
    return name.encode(errors="replace").decode()
