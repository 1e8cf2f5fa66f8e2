"""The page of the models that are known by name, which `scripts/docs` builds."""

from typing import Any

from kvstow.plan.models.catalogue import catalogue, entries, unchecked
from kvstow.plan.sizing.reports import catalogue_figures

INTRODUCTION = """# List of models

These models are known by name: to `kvstow plan`, `compare`, `size`, `simulate` and `route`, and to
`kvstow.plan_model`. Any other is planned from its `config.json`, or refused with the reason
([every family](families.md)). Case does not matter, nor does an organisation in front
(`meta-llama/Llama-3.1-8B-Instruct`). `kvstow models WORD…` lists those with all these words in
their name, alias or family.

KV bytes are per token of a request, in the model's own dtype; 0 where only windows or states are
kept. `*` marks numbers that were not compared with a second source: parameters and context serve
`kvstow size` alone.

{unchecked}

| model | family | layers | KV bytes | context | parameters | source |
|---|---|---|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    notes = [note for name in catalogue() for note in unchecked(name, entries()[name]["config"])]
    head = INTRODUCTION.format(unchecked="\n".join(f"- {note}" for note in notes))
    return head + "".join(_line(catalogue_figures(name)) for name in catalogue())


def _line(model: dict[str, Any]) -> str:
    cells = (
        model["name"],
        f"`{model['family']}`",
        f"{model['layers']:,}",
        f"{model['kv_bytes_per_token']:,}",
        _published(model, "context"),
        _published(model, "parameters"),
        model["source"].replace("|", "\\|"),
    )
    return f"| {' | '.join(cells)} |\n"


def _published(model: dict[str, Any], what: str) -> str:
    if model[what] is None:
        return "–"
    return f"{model[what]:,}{'' if what in model['checked'] else '*'}"
