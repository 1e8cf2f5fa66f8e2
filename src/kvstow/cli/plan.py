"""`kvstow plan`: the layout of a model, and what it costs and holds."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstow.cli import options
from kvstow.cli.options import check_arena, on_rank
from kvstow.cli.output import (
    MISUSED,
    emit_json,
    emit_text,
    exact,
    human,
    note,
    refuse,
    slow_progress,
    table,
    write_file,
)
from kvstow.plan.sizing.plan import Deployment, Plan
from kvstow.plan.sizing.reports import LENGTHS, padding_fractions, plan_figures, tensor_bytes

if TYPE_CHECKING:
    from kvstow.plan.layout import Layout

STDOUT = Path("-")
Tokens = Annotated[
    int | None,
    typer.Option(
        "--tokens", min=1, help="Length of a request in tokens.", show_default="four lengths"
    ),
]


def plan(
    model: options.ModelName,
    tp: options.Tp = 1,
    pp: options.Pp = 1,
    rank: options.Rank = 0,
    block_tokens: options.BlockTokens = None,
    kv_dtype: options.KvDtype = None,
    order: options.OrderName = "BLHNC",
    packing: options.PackingName = "slab",
    memory: options.Memory = None,
    num_slabs: options.NumSlabs = None,
    align: options.Align = None,
    tokens: Tokens = None,
    name: options.Name = None,
    manifest: options.ManifestFile = None,
    html: options.HtmlFile = None,
    json: options.Json = False,
) -> None:
    """The layout of a model, what it costs and what fits."""
    check_arena(memory, num_slabs)
    deployment = Deployment(
        model=model,
        name=name,
        tp=tp,
        pp=pp,
        block_tokens=block_tokens,
        kv_dtype=kv_dtype,
        order=order,
        packing=packing,
        memory=memory,
        num_slabs=num_slabs,
        alignment=options.alignment(align or ()),
    )
    found = Plan.of(on_rank(deployment, rank))
    if manifest is not None:
        _write_manifest(manifest, found.layout, json=json)
    if html is not None:
        from kvstow.render.plan_page import plan_page

        write_file(html, plan_page(found, slow_progress("plans for the page")))
        note(f"page written to {html}")
    if manifest == STDOUT:
        return
    figures = plan_figures(found, LENGTHS if tokens is None else (tokens,))
    if json:
        emit_json(figures)
    else:
        emit_text(*_report(found, figures))


def _write_manifest(file: Path, layout: "Layout", *, json: bool) -> None:
    """The manifest in a file; on stdout, where it is all that is written there."""
    from kvstow.plan.manifest import encode

    if file != STDOUT:
        write_file(file, encode(layout))
        note(f"manifest written to {file}")
        return
    if json:
        refuse(
            "--manifest - and --json both write a document to stdout\n\nhint: give one of them",
            code=MISUSED,
        )
    typer.get_binary_stream("stdout").write(encode(layout))


def _report(plan: Plan, figures: dict[str, Any]) -> list[str]:
    from kvstow.render.text import are_rows, rows_picture, slab_picture

    layout = plan.layout
    parts = [_heading(plan, figures), _groups(layout, figures), slab_picture(layout)]
    if are_rows(layout) and any(rows.rows_per_slab > 1 for rows in layout.groups):
        parts.append(rows_picture(layout))
    parts += [_moving(layout, figures), _holding(figures)]
    return parts


def _heading(plan: Plan, figures: dict[str, Any]) -> str:
    asked = plan.deployment
    return (
        f"{figures['model']}\n"
        f"rank {plan.rank} of tp {asked.tp} × pp {asked.pp}, {figures['kv_dtype']}, order "
        f"{figures['order']}, packing {asked.packing}\n"
        f"arena {human(figures['arena_bytes'])} in one region: {figures['num_slabs']:,} slabs of "
        f"{exact(figures['slab_bytes'])}\n"
        f"fingerprint {figures['fingerprint']}"
    )


def _groups(layout: "Layout", figures: dict[str, Any]) -> str:
    rows = [
        (
            group["name"],
            group["retention"],
            f"{len(group['layers']):,}",
            f"{group['block_tokens']:,}",
            f"{group['row_bytes']:,}",
            f"{group['rows_per_slab']:,}",
            f"{padding:.2%}",
        )
        for group, padding in zip(figures["groups"], padding_fractions(layout), strict=True)
    ]
    columns = ("group", "keeps", "layers", "tokens", "row bytes", "rows/slab", "padding")
    return table(columns, rows, num_left=2)


def _moving(layout: "Layout", figures: dict[str, Any]) -> str:
    transfer = figures["transfer"]
    rows = [
        (
            rows.group.name,
            f"{transfer['descriptors_per_block'][rows.group.name]:,}",
            f"{transfer['bytes_per_block'][rows.group.name]:,}",
            human(transfer["bytes_per_block"][rows.group.name]),
            f"{rows.group.num_tensors:,}",
            human(tensor_bytes(rows.group)),
        )
        for rows in layout.groups
    ]
    columns = ("moving one block of", "copies", "bytes", "", "per layer", "each ≤")
    return table(columns, rows)


def _holding(figures: dict[str, Any]) -> str:
    request, capacity = figures["request"], figures["capacity"]
    mine = capacity["this_rank"]
    is_less = mine["requests"] != capacity["requests"]
    rows = [
        (
            f"{int(n):,}",
            f"{nbytes:,}",
            human(nbytes),
            f"{capacity['requests'][n]:,}",
            *([f"{mine['requests'][n]:,}"] if is_less else []),
        )
        for n, nbytes in request["at_tokens"].items()
    ]
    longest = "any length" if capacity["tokens"] is None else f"{capacity['tokens']:,} tokens"
    columns = ("tokens per request", "bytes", "", "requests at once")
    parts = [
        f"one request: {_cost(request)}\nthe longest that fits: {longest}",
        table((*columns, f"on rank {figures['rank']}") if is_less else columns, rows, num_left=0),
    ]
    if is_less:
        parts.append(
            f"A request is on all {figures['tp'] * figures['pp']} ranks at once: rank "
            f"{capacity['limiting_rank']} limits how many fit."
        )
    return "\n\n".join(parts)


def _cost(request: dict[str, Any]) -> str:
    """The part that does not grow, and the part that does, as far as there are any."""
    fixed, growth = request["fixed_bytes"], request["bytes_per_token"]
    if not growth:
        return f"{exact(fixed)} at most, whatever its length"
    each = f"{exact(growth)} per token"
    return f"{exact(fixed)} fixed at most,\n             and {each}" if fixed else each
