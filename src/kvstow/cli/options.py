"""The options that several commands share, and how their values are read."""

import re
from collections.abc import Iterable
from fractions import Fraction
from math import lcm
from pathlib import Path
from typing import Annotated, Literal

import typer

from kvstow.plan.layout import Order
from kvstow.plan.pack import Alignment, Demand

Packing = Literal["slab", "union", "separate"]

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgtp", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)")
_SIZE_HINT = "hint: for example 20GiB, 512MB, 1.5TiB or 1073741824"
_SIZE_LIMIT = 1 << 63
_USUAL = Alignment()


def size(text: str) -> int:
    """The bytes that `20GiB`, `512MB` or `1.5TiB` are, exactly."""
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise typer.BadParameter(f"{text!r} is not a size\n\n{_SIZE_HINT}")
    nbytes = Fraction(match[1]) * unit
    if nbytes.denominator != 1:
        raise typer.BadParameter(f"{text!r} is {float(nbytes)} bytes, not a whole number of them")
    if not 0 < nbytes < _SIZE_LIMIT:
        raise typer.BadParameter(f"{text!r} is {nbytes} bytes, not in [1, 2^63)\n\n{_SIZE_HINT}")
    return int(nbytes)


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
