"""`kvstow models`: the models that are known by name."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from kvstow.cli.output import FAILED, refuse, reporting
from kvstow.text import table

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="WORD",
        help="Show only models with every WORD in their name, alias or family.",
        show_default=False,
    ),
]
UNKNOWN = "kvstow models, without a word, lists all; other commands take a config.json, too"
LEGEND = (
    "kv bytes: per token of a request, in the model's own dtype; 0 where only windows\n"
    "or states are kept. context: the most tokens of a request, as published;\n"
    "* was not compared with a second source."
)


@dataclass(frozen=True, slots=True)
class ModelsReport:
    """Models of the catalogue, a line each."""

    models: list[dict[str, Any]]

    def as_json(self) -> dict[str, Any]:
        return {"models": self.models}

    def __str__(self) -> str:
        rows = [
            (
                model["name"],
                model["family"],
                f"{model['layers']:,}",
                f"{model['kv_bytes_per_token']:,}",
                _context(model),
            )
            for model in self.models
        ]
        columns = ("model", "family", "layers", "kv bytes", "context")
        return f"{table(columns, rows, num_left=2)}\n\n{LEGEND}"


def _context(model: dict[str, Any]) -> str:
    if model["context"] is None:
        return "– "
    return f"{model['context']:,}{' ' if 'context' in model['checked'] else '*'}"


@reporting
def models(words: Words = None) -> ModelsReport:
    """Models known by name, and what a token costs in each."""
    from kvstow.plan.models.catalogue import close_names, matching
    from kvstow.plan.sizing.reports import catalogue_figures

    names = matching(words or ())
    if not names:
        close = close_names("-".join(words or ()))
        refuse(
            f"no model has {' and '.join(map(repr, words or ()))} in its name\n\nhint: "
            + (f"did you mean {', '.join(close)}?" if close else UNKNOWN),
            code=FAILED,
        )
    return ModelsReport([catalogue_figures(name) for name in names])
