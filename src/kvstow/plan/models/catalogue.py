"""Real models by name: the facts that decide what they keep, and where each set came from.

The data is `catalogue.json`: an object of names, each with `source` (where the facts
were read, and after "unchecked" what nothing read confirms), `aliases`, and
`config` (the keys of the model's `config.json` that matter here).
"""

import json
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import TypedDict, cast

from kvstow.errors import ModelError


class CatalogueEntry(TypedDict):
    source: str
    aliases: list[str]
    config: dict[str, object]


@cache
def entries() -> dict[str, CatalogueEntry]:
    """Every entry by its name."""
    text = files("kvstow.plan.models").joinpath("catalogue.json").read_text("utf-8")
    return cast(dict[str, CatalogueEntry], json.loads(text))


def catalogue() -> tuple[str, ...]:
    """The names of the models that are known without a `config.json`."""
    return tuple(entries())


def entry(name: str) -> tuple[str, dict[str, object]]:
    """Canonical name and facts of a model by name or alias.

    Case does not matter, nor does an organisation in front (`org/name`).
    """
    wanted = name.rsplit("/", 1)[-1].lower()
    known = entries()
    names = {alias: key for key in known for alias in (key, *known[key]["aliases"])}
    if wanted not in names:
        close = get_close_matches(wanted, names, n=3, cutoff=0.5)
        raise ModelError(
            f"no model is called {name!r}\n\nhint: "
            + (f"did you mean {', '.join(close)}?" if close else "give the path of a config.json")
        )
    key = names[wanted]
    return key, known[key]["config"]
