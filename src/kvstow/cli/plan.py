"""`kvstow plan`: the layout of a model, and what it costs and holds."""

from typing import TYPE_CHECKING, Any

from kvstow.cli import options
from kvstow.cli.options import check_arena, on_rank
from kvstow.cli.output import emit_json, emit_text, human, note, table
from kvstow.plan.deployment import Deployment, RankLayers
from kvstow.plan.report import padding_fractions, plan_figures, tensor_bytes

if TYPE_CHECKING:
    from kvstow.plan.layout import Layout


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
    manifest: options.ManifestFile = None,
    html: options.HtmlFile = None,
    json: options.Json = False,
) -> None:
    """The layout of a model, what it costs and what fits."""
    check_arena(memory, num_slabs)
    deployment = Deployment(
        model=model,
        tp=tp,
        pp=pp,
        block_tokens=block_tokens,
        kv_dtype=kv_dtype,
        memory=memory,
        num_slabs=num_slabs,
        alignment=options.alignment(align or ()),
    )
    what = on_rank(deployment, rank)
    layout = what.layout(order, packing)
    if manifest is not None:
        from kvstow.plan.manifest import encode

        manifest.write_bytes(encode(layout))
        note(f"manifest written to {manifest}")
    if html is not None:
        from kvstow.render.plan_page import plan_page

        html.write_text(plan_page(what, layout, packing), encoding="utf-8")
        note(f"page written to {html}")
    figures = plan_figures(what, layout)
    if json:
        emit_json(figures)
    else:
        emit_text(*_report(what, layout, figures, packing))


def _report(
    what: RankLayers, layout: "Layout", figures: dict[str, Any], packing: options.Packing
) -> list[str]:
    from kvstow.render.text import are_rows, rows_picture, slab_picture

    parts = [_heading(what, figures, packing), _groups(layout, figures), slab_picture(layout)]
    if are_rows(layout) and any(rows.rows_per_slab > 1 for rows in layout.groups):
        parts.append(rows_picture(layout))
    parts += [_moving(layout, figures), _holding(figures)]
    return parts


def _heading(what: RankLayers, figures: dict[str, Any], packing: options.Packing) -> str:
    asked = what.deployment
    return (
        f"{figures['model']}\n"
        f"rank {what.rank} of tp {asked.tp} × pp {asked.pp}, {figures['kv_dtype']}, order "
        f"{figures['order']}, packing {packing}\n"
        f"arena {human(figures['arena_bytes'])} in one region: {figures['num_slabs']:,} slabs of "
        f"{figures['slab_bytes']:,} bytes\n"
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
            f"{rows.group.num_tensors:,}",
            f"{tensor_bytes(rows.group):,}",
        )
        for rows in layout.groups
    ]
    columns = ("moving one block of", "copies", "bytes in all", "per layer: copies", "bytes each ≤")
    return table(columns, rows)


def _holding(figures: dict[str, Any]) -> str:
    request, capacity = figures["request"], figures["capacity"]
    rows = [
        (f"{int(n):,}", f"{nbytes:,}", human(nbytes), f"{capacity['requests'][n]:,}")
        for n, nbytes in request["at_tokens"].items()
    ]
    longest = "any length" if capacity["tokens"] is None else f"{capacity['tokens']:,} tokens"
    growth = request["bytes_per_token"]
    text = f"{growth:,}" if isinstance(growth, int) else f"{growth:,.2f}"
    return (
        f"one request: {request['fixed_bytes']:,} bytes fixed at most, {text} per token\n"
        f"the longest that fits: {longest}\n\n"
    ) + table(("tokens per request", "bytes", "", "requests at once"), rows, num_left=0)
