"""The page of what becomes of every text model of transformers, which `scripts/docs` builds.

Each configuration class is planned from its defaults.
"""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from kvstow.errors import ModelError
from kvstow.plan.models import Model, model_layers
from kvstow.plan.retention import Chunk, Encoder, Full, Retention, State, Window

INTRODUCTION = """# Model families

What kvstow makes of every text model class of transformers {version}, from the class's own
defaults. A family that is not known by its `model_type` is read by its keys if they are ordinary
ones, and the plan says so; anything else is refused with the reason, never guessed. A test
compares each plan with the layer types, windows, heads and head sizes that transformers derives.

{planned} are planned, {refused} are refused.
"""


def configurations() -> Iterator[tuple[str, Any]]:
    """Every text model class's name and its default configuration; None if it has no default."""
    transformers.logging.set_verbosity_error()  # defaults that contradict each other are known
    names = {
        *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        *(name for name in CONFIG_MAPPING_NAMES if name.endswith("_text")),
    }
    for name in sorted(names):
        try:
            yield name, CONFIG_MAPPING[name]()
        except Exception as error:  # a class whose defaults contradict each other
            yield name, error


def facts(config: Any) -> dict[str, Any]:
    """What the class would write into a config.json."""
    return json.loads(json.dumps(config.to_dict(), default=str))


def outcome(config: Any) -> Model | str:
    """The plan, or why there is none."""
    if isinstance(config, Exception):
        return "transformers has no default configuration of it"
    try:
        return model_layers(facts(config))
    except ModelError as error:
        reason = str(error).partition("\n")[0].partition(": ")[2]
        return reason.removeprefix(f"unknown model_type {config.model_type!r}, and ")


def page(outcomes: dict[str, Model | str] | None = None) -> str:
    """The whole page."""
    if outcomes is None:
        outcomes = {name: outcome(config) for name, config in configurations()}
    planned = {name: model for name, model in outcomes.items() if isinstance(model, Model)}
    refused = {name: reason for name, reason in outcomes.items() if isinstance(reason, str)}
    head = INTRODUCTION.format(
        version=transformers.__version__, planned=len(planned), refused=len(refused)
    )
    lines = [head, "## Planned", "", "| model type | layers keep | read as |", "|---|---|---|"]
    lines += [f"| `{name}` | {_kept(model)} | {_note(model)} |" for name, model in planned.items()]
    lines += ["", "## Refused", "", "| model type | reason |", "|---|---|"]
    lines += [f"| `{name}` | {reason} |" for name, reason in refused.items()]
    return "\n".join(lines) + "\n"


def _kept(model: Model) -> str:
    counts = Counter(_words(layer.retention) for layer in model.layers)
    return ", ".join(f"{count} {words}" for words, count in counts.items())


def _words(retention: Retention) -> str:
    match retention:
        case Full():
            return "full"
        case Window(tokens):
            return f"window {tokens:,}"
        case Chunk(tokens):
            return f"chunk {tokens:,}"
        case State():
            return "state"
        case Encoder(tokens):
            return f"encoder {tokens:,}"


def _note(model: Model) -> str:
    read = [note.partition(": read as ")[2] for note in model.notes if ": read as " in note]
    return read[0] if read else "its family"
