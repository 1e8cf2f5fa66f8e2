"""Real models by name: the facts that decide what they keep, and where each set came from.

The data is `catalogue.json`: an object of names, each with `source` (where the facts
were read, and after "unchecked" what nothing read confirms), `repository` (where the model is,
unless that is the one whose config.json the source names), `aliases` (of the same organisation, in
its spelling), `config` (the keys
of the model's `config.json` that matter here), and `published`: `parameters`, to three digits,
`experts`, those of them in routed experts, `weights_bytes` where they are not released in the
model's own dtype, `vocabulary`, where the configuration here has none, and `context`, the tokens
that a request may have. `checked` names those of
parameters and context that agree with a complete configuration of the model in
ai-dynamo/aiconfigurator or Lightning-AI/litgpt: parameters counted from it within half a percent,
and the context that it gives. What is published serves sizing alone, and no layout depends on it.
"""

import json
import re
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from functools import cache
from importlib.resources import files
from typing import NotRequired, TypedDict, cast

from kvstow.errors import ModelError

NEAR = 0.6
"""How alike a name has to be to one that was asked for, from 0 to 1, to be suggested."""


class Published(TypedDict, total=False):
    parameters: int
    weights_bytes: int
    experts: int
    vocabulary: int
    context: int
    checked: list[str]


class CatalogueEntry(TypedDict):
    source: str
    repository: NotRequired[str]
    aliases: list[str]
    published: Published
    config: dict[str, object]


@cache
def entries() -> dict[str, CatalogueEntry]:
    """Every entry by its name."""
    text = files("kvstow.plan.models").joinpath("catalogue.json").read_text("utf-8")
    return cast(dict[str, CatalogueEntry], json.loads(text))


def catalogue() -> tuple[str, ...]:
    """The names of the models that are known without a `config.json`."""
    return tuple(entries())


def is_known(name: str) -> bool:
    """Whether a model has that name or alias, with or without `-FP8` or the like behind it."""
    return _plain(name).removesuffix(quantisation(name)) in _aliases()


_RELEASES: dict[str, dict[str, object]] = {
    "-gptq-int8": {"quant_method": "gptq", "bits": 8},
    "-gptq-int4": {"quant_method": "gptq", "bits": 4},
    "-gptq": {"quant_method": "gptq", "bits": 4},
    "-awq": {"quant_method": "awq", "bits": 4},
    "-nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "-fp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "-fp8": {"quant_method": "fp8"},
}
"""How weights are kept in releases whose names end so."""


def quantisation(name: str) -> str:
    """What a name ends in that says how the weights are kept; empty for a model's own name."""
    plain = _plain(name)
    if plain in _aliases():
        return ""
    return next((suffix for suffix in _RELEASES if plain.endswith(suffix)), "")


def entry(name: str) -> tuple[str, dict[str, object]]:
    """Canonical name and facts of a model by name or alias.

    Case does not matter, nor does an organisation in front (`org/name`). With `-FP8`, `-NVFP4`,
    `-AWQ` or `-GPTQ` behind it, the weights are kept so and the cache is what it was; NVIDIA's
    releases leave attention with latents as it is.
    """
    suffix = quantisation(name)
    key = _aliases().get(_plain(name).removesuffix(suffix))
    if key is not None and suffix:
        config, quantised = entries()[key]["config"], _RELEASES[suffix]
        if suffix == "-fp8" and name.lower().startswith("nvidia/"):
            quantised = {"quant_method": "modelopt", "quant_algo": "FP8"}
        if quantised["quant_method"] == "modelopt":
            quantised = quantised | {_NAMED_ONLY: True}
            if "kv_lora_rank" in config:
                quantised |= {"ignore": ["re:.*self_attn.*"]}
        return key, config | {"quantization_config": quantised}
    if key is None:
        close = close_names(name)
        raise ModelError(
            f"no model is called {name!r}\n\nhint: "
            + (f"did you mean {', '.join(close)}?" if close else "give the path of a config.json")
            + "\n      kvstow models lists the models that are known by name"
        )
    return key, entries()[key]["config"]


_NAMED_ONLY = "kvstow_named_only"
"""In a quantisation by modelopt of which only the release's name is known."""


def is_named_only(facts: Mapping[str, object]) -> bool:
    """Whether a release by modelopt is known by its name alone, which does not tell its cache."""
    quantised = facts.get("quantization_config")
    return isinstance(quantised, Mapping) and _NAMED_ONLY in quantised


_UNKNOWN: CatalogueEntry = {"source": "", "aliases": [], "published": {}, "config": {}}


def unchecked(name: str, facts: Mapping[str, object]) -> tuple[str, ...]:
    """What nothing that was read confirms of an entry, as a note; none for any other facts."""
    entry = entries().get(name, _UNKNOWN)
    _, _, what = entry["source"].partition("unchecked: ")
    if not what or entry["config"] is not facts:
        return ()
    return (f"{name}: its {what.split()[0]} is unchecked: no source that was read says it",)


def published(name: str) -> Published:
    """What is published about a model by its canonical name; empty for any other."""
    return entries().get(name, _UNKNOWN)["published"]


def repository(name: str) -> str:
    """Where a model is on the hub, by its name or an alias; empty for any other."""
    key = _aliases().get(_plain(name), "")
    entry = entries().get(key, _UNKNOWN)
    named = re.search(r"config\.json of ([\w.-]+/[\w.-]+)", entry["source"])
    own = entry.get("repository") or (named[1] if named else "")
    spelled = next((alias for alias in entry["aliases"] if alias.lower() == _plain(name)), "")
    return f"{own.partition('/')[0]}/{spelled}" if spelled else own


def matching(words: Iterable[str]) -> tuple[str, ...]:
    """The models whose name, aliases and family have every one of the words in them."""
    lowered = [word.lower() for word in words]

    def text(key: str) -> str:
        entry = entries()[key]
        return " ".join(
            (key, *entry["aliases"], str(entry["config"].get("model_type", "")))
        ).lower()

    return tuple(key for key in entries() if all(word in text(key) for word in lowered))


def close_names(name: str) -> tuple[str, ...]:
    """The three known names nearest to one that is not known, nearest first.

    A name is as near as its beginning, of equal length, is: `gpt4` is near `gpt-oss-20b`.
    """
    letters = _letters(_plain(name))
    if not letters:
        return ()

    def nearness(alias: str) -> float:
        whole = _letters(alias)
        start = SequenceMatcher(None, letters, whole[: len(letters)]).ratio()
        return max(start, SequenceMatcher(None, letters, whole).ratio())

    best: dict[str, float] = {}
    for alias, key in _aliases().items():
        best[key] = max(best.get(key, 0.0), nearness(alias))
    near = sorted((key for key in best if best[key] >= NEAR), key=lambda key: -best[key])
    return tuple(near[:3])


@cache
def _aliases() -> dict[str, str]:
    models = entries()
    return {name.lower(): key for key in models for name in (key, *models[key]["aliases"])}


def _plain(name: str) -> str:
    return name.rsplit("/", 1)[-1].lower()


def _letters(name: str) -> str:
    """Letters and digits alone."""
    return "".join(letter for letter in name if letter.isalnum())
