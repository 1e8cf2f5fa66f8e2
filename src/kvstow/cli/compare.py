"""`kvstow compare`: one model under many orders, packings, splits, block sizes and dtypes."""

import csv
import io
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstow.cli import options
from kvstow.cli.options import check_arena, on_rank
from kvstow.cli.output import (
    FAILED,
    HINT,
    MISUSED,
    command_line,
    emit_json,
    emit_text,
    human,
    note,
    refuse,
    table,
    wrapped,
    write_file,
)
from kvstow.errors import ModelError, PlanError
from kvstow.plan.layout import ORDERS, Order, parse_order
from kvstow.plan.pack import PACKINGS, Packing
from kvstow.plan.sizing.plan import (
    MAX_BLOCK_TOKENS,
    MAX_RANKS,
    USUAL_TOKENS,
    Deployment,
    RankLayers,
)
from kvstow.plan.sizing.reports import alike, compared_figures, mark_best

MOST_LAYOUTS = 1000
Choices = list[tuple[Order, Packing]]
Cell = Callable[[dict[str, Any]], str]
"""What a line shows in a column."""

SWEPT = {"tp": "tp", "block_tokens": "tokens", "kv_dtype": "kv dtype"}
"""What may be given several values, and its column."""

Tps = Annotated[
    str, typer.Option("--tp", metavar="N[,N…]", help="Tensor-parallel ranks; several are compared.")
]
BlockTokens = Annotated[
    str | None,
    typer.Option(
        "--block-tokens",
        metavar="N[,N…]",
        help="Tokens per block; several are compared.",
        show_default="16, or the model's own",
    ),
]
KvDtypes = Annotated[
    str | None,
    typer.Option(
        "--kv-dtype",
        metavar="DTYPE[,DTYPE…]",
        help="Element type of the cache; several are compared.",
        show_default="the model's own",
    ),
]
Orders = Annotated[
    str, typer.Option("--order", metavar="ORDER[,ORDER…]", help="Orders of axes, or all.")
]
PackingNames = Annotated[
    str, typer.Option("--packing", metavar="PACKING[,…]", help="slab, union, separate, or all.")
]
CsvFile = Annotated[
    Path | None,
    typer.Option(
        "--csv",
        metavar="FILE",
        help="Write one line per layout to FILE; - is stdout, in place of the table.",
        show_default=False,
    ),
]


def compare(
    model: options.ModelName,
    tp: Tps = "1",
    pp: options.Pp = 1,
    rank: options.Rank = 0,
    block_tokens: BlockTokens = None,
    kv_dtype: KvDtypes = None,
    order: Orders = "all",
    packing: PackingNames = "all",
    memory: options.Memory = None,
    num_slabs: options.NumSlabs = None,
    align: options.Align = None,
    csv: CsvFile = None,
    html: options.HtmlFile = None,
    json: options.Json = False,
) -> None:
    """Layouts, splits and dtypes of a model, side by side.

    Exits with 1 if no layout is possible.
    """
    check_arena(memory, num_slabs)
    if json and csv == Path("-"):
        refuse(
            f"--csv - and --json both write a document to stdout{HINT}give one of them",
            code=MISUSED,
        )
    deployments = _deployments(
        Deployment(
            model=model,
            pp=pp,
            memory=memory,
            num_slabs=num_slabs,
            alignment=options.alignment(align or ()),
        ),
        tps=_numbers("--tp", tp, most=MAX_RANKS // pp),
        block_tokens=_numbers("--block-tokens", block_tokens, most=MAX_BLOCK_TOKENS)
        if block_tokens
        else [None],
        kv_dtypes=list(kv_dtype.split(",")) if kv_dtype else [None],
    )
    choices: Choices = [(each, other) for each in _orders(order) for other in _packings(packing)]
    if len(deployments) * len(choices) > MOST_LAYOUTS:
        refuse(
            f"{len(deployments) * len(choices):,} layouts, {MOST_LAYOUTS:,} at most are compared"
            f"{HINT}name fewer values",
            code=MISUSED,
        )
    first = _first(deployments, rank)
    layouts = [line for each in deployments for line in _compared(each, rank, choices)]
    mark_best(layouts)
    document = _document(first, layouts)
    _write(document, csv, html, arena=_arena(first))
    if json:
        emit_json(document)
    elif csv != Path("-"):
        emit_text(*_report(first, layouts))
    if all(layout["error"] is not None for layout in layouts):
        refuse("no layout is possible" + HINT + "the reasons are on stdout", code=FAILED)


# ── what is compared ──────────────────────────────────────────────────────────────────


def _numbers(name: str, text: str, *, most: int) -> list[int]:
    values = text.split(",")
    if not all(value.isdecimal() and len(value) <= options.MAX_DIGITS for value in values):
        raise typer.BadParameter(
            f"{text!r} is not a list of whole numbers, such as 1,2,4", param_hint=f"'{name}'"
        )
    numbers = [int(value) for value in values]
    if wrong := [number for number in numbers if not 1 <= number <= most]:
        raise typer.BadParameter(
            f"{wrong[0]} is not in the range from 1 to {most}, as 1,2,4 are",
            param_hint=f"'{name}'",
        )
    return numbers


def _orders(text: str) -> list[Order]:
    if text.lower() == "all":
        return sorted(ORDERS, key=lambda order: order[0])
    try:
        return list(dict.fromkeys(parse_order(each) for each in text.split(",")))
    except PlanError as error:
        raise typer.BadParameter(str(error), param_hint="'--order'") from error


def _packings(text: str) -> list[Packing]:
    if text == "all":
        return list(PACKINGS)
    asked = text.split(",")
    wrong = [each for each in asked if each not in PACKINGS]
    if wrong:
        raise typer.BadParameter(
            f"{wrong[0]!r} is none of {', '.join(PACKINGS)}, all", param_hint="'--packing'"
        )
    return [packing for packing in PACKINGS if packing in asked]


def _deployments(
    deployment: Deployment,
    *,
    tps: Iterable[int],
    block_tokens: Iterable[int | None],
    kv_dtypes: Iterable[str | None],
) -> list[Deployment]:
    block_tokens, kv_dtypes = list(block_tokens), list(kv_dtypes)
    return [
        replace(deployment, tp=tp, block_tokens=tokens, kv_dtype=kv_dtype)
        for tp in tps
        for tokens in block_tokens
        for kv_dtype in kv_dtypes
    ]


def _first(deployments: list[Deployment], rank: int) -> RankLayers:
    """What the rank holds in the first deployment that can be; ends if none can."""
    for each in deployments:
        options.check_model(each)
    for each in deployments:
        with suppress(ModelError, PlanError):
            each.on_rank(rank)
            return on_rank(each, rank)
    return on_rank(deployments[0], rank)


def _compared(deployment: Deployment, rank: int, choices: Choices) -> list[dict[str, Any]]:
    """The lines of one deployment; of one that cannot be, the reason on each."""
    try:
        held = deployment.on_rank(rank)
    except (ModelError, PlanError) as error:
        asked = {name: getattr(deployment, name) for name in SWEPT}
        return [
            {**asked, "order": order, "packing": packing, "error": str(error)}
            for order, packing in choices
        ]
    return [compared_figures(held, order, packing) for order, packing in choices]


def _document(first: RankLayers, layouts: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "model": first.model.name,
        "tp": first.deployment.tp,
        "pp": first.deployment.pp,
        "rank": first.rank,
        "block_tokens": first.block_tokens,
        "kv_dtype": first.kv_dtype,
        "layouts": layouts,
    }


# ── text ──────────────────────────────────────────────────────────────────────────────


def _report(first: RankLayers, layouts: list[dict[str, Any]]) -> list[str]:
    swept = [name for name in SWEPT if len({layout[name] for layout in layouts} - {None}) > 1]
    asked = first.deployment
    split = (
        f"pp {asked.pp}" if "tp" in swept else f"rank {first.rank} of tp {asked.tp} × pp {asked.pp}"
    )
    said = [split, *([] if "kv_dtype" in swept else [first.kv_dtype]), _arena(first)]
    columns = _columns(swept, {layout["packing"] for layout in layouts})
    lines = alike(layouts)
    rows = [[of(line) for of in columns.values()] for line in lines if line["error"] is None]
    left = 2 + len(swept)
    legend = (
        "padding, and copies per block: of the worst group\n"
        f"requests: of {USUAL_TOKENS:,} tokens, at once; ← the best"
    )
    parts = [f"{first.model.name}\n{', '.join(said)}"]
    if rows:
        parts += [table(list(columns), rows, num_left=left), legend]
    choices = {(layout["order"], layout["packing"]) for layout in layouts}
    return [*parts, *_reasons(lines, swept, len(choices))]


def _columns(swept: list[str], packings: set[str]) -> dict[str, Cell]:
    """What a line shows, by column; the slab only where there is room for it."""

    def packing(line: dict[str, Any]) -> str:
        every = len(packings) > 1 and len(line["packings"]) == len(packings)
        return "any" if every else " ".join(line["packings"])

    columns: dict[str, Cell] = {"order": lambda line: " ".join(line["orders"]), "packing": packing}
    for name in swept:
        columns[SWEPT[name]] = lambda line, name=name: str(line[name])
    if not swept:
        columns["slab"] = lambda line: human(line["slab_bytes"])
    figures: dict[str, Cell] = {
        "padding": lambda line: f"{line['padding']:.2%}",
        "copies": lambda line: f"{max(line['descriptors_per_block'].values()):,}",
        "requests": lambda line: (
            f"{line['requests'][str(USUAL_TOKENS)]:,} {'←' if line['best'] else ' '}"
        ),
    }
    return columns | figures


def _reasons(lines: list[dict[str, Any]], swept: list[str], num_choices: int) -> list[str]:
    """Every reason once, with the layouts that it bars."""
    barred: dict[str, list[str]] = {}
    for line in lines:
        if line["error"] is not None:
            which = [f"{SWEPT[name]} {line[name]}" for name in swept if line[name] is not None]
            if not which or len(line["orders"]) * len(line["packings"]) < num_choices:
                which += [*line["packings"], f"({' '.join(line['orders'])})"]
            barred.setdefault(line["error"].partition(HINT)[0], []).append(" ".join(which))
    return [
        "\n".join(wrapped(f"{', '.join(names)}: {why}") for why, names in barred.items())
    ] * bool(barred)


def _arena(first: RankLayers) -> str:
    budget = first.deployment.budget
    if budget is None:
        return f"{first.deployment.num_slabs:,} slabs"
    return human(budget)


# ── files ─────────────────────────────────────────────────────────────────────────────


def _write(
    document: dict[str, Any], csv_file: Path | None, html: Path | None, *, arena: str
) -> None:
    if csv_file == Path("-"):
        typer.echo(as_csv(document), nl=False)
    elif csv_file is not None:
        write_file(csv_file, as_csv(document))
        note(f"table written to {csv_file}")
    if html is not None:
        from kvstow import __version__
        from kvstow.render.page import page

        title = f"{document['model']}: layouts compared"
        data = {"kvstow": __version__, "usual_tokens": USUAL_TOKENS, **document}
        data |= {"lines": alike(document["layouts"]), "arena": f"arena {arena}"}
        data["command"] = command_line()
        write_file(html, page(title, data, ("sweep.js",)))
        note(f"page written to {html}")


def as_csv(document: dict[str, Any]) -> str:
    """One line per layout, a header first."""
    out = io.StringIO()
    names = (
        "model",
        "tp",
        "pp",
        "block_tokens",
        "kv_dtype",
        "order",
        "packing",
        "best",
        "slab_bytes",
        "num_slabs",
        "arena_bytes",
        "padding",
        "copies",
        "bytes_per_token",
        "requests",
        "error",
    )
    writer = csv.DictWriter(out, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for layout in document["layouts"]:
        line = {"model": document["model"], "pp": document["pp"]} | layout
        if layout["error"] is None:
            line["copies"] = max(layout["descriptors_per_block"].values())
            line["requests"] = layout["requests"][str(USUAL_TOKENS)]
        writer.writerow(line)
    return out.getvalue()
