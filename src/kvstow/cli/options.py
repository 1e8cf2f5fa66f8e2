"""The options that several commands share, and how their values are read."""

from collections.abc import Iterable
from math import lcm
from pathlib import Path
from typing import Annotated

import typer

from kvstow.errors import PlanError
from kvstow.plan.layout import Order
from kvstow.plan.pack import Alignment, Demand, Packing
from kvstow.plan.words import parse_size

_USUAL = Alignment()


def size(text: str) -> int:
    """The bytes that `20GiB`, `512MB` or `1.5TiB` are, exactly."""
    try:
        return parse_size(text)
    except PlanError as error:
        raise typer.BadParameter(str(error)) from error


def alignment(wishes: Iterable[str]) -> Alignment:
    """What `--align` asks for: `SIZE`, `page=SIZE`, `row=SIZE`, `base=SIZE`, `LAYERS=SIZE`.

    A bare size is one for pages, and so for rows. The base becomes a multiple of all of
    them: an offset in the arena is only as aligned as the arena is.
    """
    asked = {"page": _USUAL.page, "row": _USUAL.row, "base": _USUAL.base}
    demands: list[Demand] = []
    for wish in wishes:
        what, _, text = wish.rpartition("=")
        multiple = size(text)
        if (what or "page") in asked:
            asked[what or "page"] = multiple
        else:
            demands.append(Demand(layers=what, offset_multiple=multiple, stride_multiple=multiple))
    return Alignment(
        page=asked["page"],
        row=asked["row"],
        base=lcm(*asked.values(), *(demand.offset_multiple for demand in demands)),
        demands=tuple(demands),
    )


MODEL_HELP = "A catalogue name, a config.json or a directory that holds one."

ModelName = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)]
Tp = Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel ranks.")]
Pp = Annotated[int, typer.Option("--pp", min=1, help="Pipeline stages.")]
Rank = Annotated[
    int, typer.Option("--rank", min=0, help="The rank to plan: stage × tp + tensor-parallel rank.")
]
BlockTokens = Annotated[
    int | None,
    typer.Option(
        "--block-tokens", min=1, help="Tokens per block.", show_default="16, or the model's own"
    ),
]
KvDtype = Annotated[
    str | None,
    typer.Option(
        "--kv-dtype",
        metavar="DTYPE",
        help="Element type of the cache: bfloat16, fp8, int8_per_token_head, nvfp4 …",
        show_default="the model's own",
    ),
]
OrderName = Annotated[
    Order, typer.Option("--order", help="Axes, outermost first: Layer Block Head tokeN Content.")
]
PackingName = Annotated[
    Packing,
    typer.Option(
        "--packing", help="Tight rows in shared slabs, one row per slab, or nothing shared."
    ),
]
Memory = Annotated[
    int | None,
    typer.Option(
        "--memory",
        parser=size,
        metavar="SIZE",
        help="Memory for the arena, such as 20GiB.",
        show_default="16GiB",
    ),
]
NumSlabs = Annotated[
    int | None,
    typer.Option(
        "--num-slabs", min=2, help="Slabs of the arena, in place of --memory.", show_default=False
    ),
]
Align = Annotated[
    list[str] | None,
    typer.Option(
        "--align",
        metavar="[WHAT=]SIZE",
        help="Where pages start; with page=, row=, base= or a pattern of layer names and = in "
        "front, where those do. May be given several times.",
        show_default=f"page={_USUAL.page} row={_USUAL.row} base={_USUAL.base}",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
ManifestFile = Annotated[
    Path | None,
    typer.Option(
        "--manifest",
        metavar="FILE",
        help="Write the layout's manifest there.",
        show_default=False,
    ),
]
HtmlFile = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="FILE",
        help="Draw it as a page there, all in one file.",
        show_default=False,
    ),
]
