"""`kvstow models`: the models that are known by name."""

from typing import Annotated, Any

import typer

from kvstow.cli import options
from kvstow.cli.output import FAILED, emit_json, emit_text, refuse, table

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="WORD",
        help="Show only models with every WORD in their name, alias or family.",
        show_default=False,
    ),
]


def models(words: Words = None, json: options.Json = False) -> None:
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
    known = [catalogue_figures(name) for name in names]
    if json:
        emit_json({"models": known})
    else:
        emit_text(_table(known), LEGEND)


UNKNOWN = "kvstow models, without a word, lists all; other commands take a config.json, too"
LEGEND = (
    "kv bytes: per token of a request, in the model's own dtype; 0 where only windows\n"
    "or states are kept. context: the most tokens of a request, as published;\n"
    "* was not compared with a second source."
)


def _context(model: dict[str, Any]) -> str:
    if model["context"] is None:
        return "– "
    return f"{model['context']:,}{' ' if 'context' in model['checked'] else '*'}"


def _table(known: list[dict[str, Any]]) -> str:
    rows = [
        (
            model["name"],
            model["family"],
            f"{model['layers']:,}",
            f"{model['kv_bytes_per_token']:,}",
            _context(model),
        )
        for model in known
    ]
    return table(("model", "family", "layers", "kv bytes", "context"), rows, num_left=2)
