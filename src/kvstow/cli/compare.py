"""`kvstow compare`: one model under every order and packing."""

from typing import Any

from kvstow.cli import options
from kvstow.cli.options import check_arena, on_rank
from kvstow.cli.output import FAILED, HINT, emit_json, emit_text, human, refuse, table, wrapped
from kvstow.plan.deployment import USUAL_TOKENS, Deployment, RankLayers
from kvstow.plan.layout import ORDERS
from kvstow.plan.pack import PACKINGS
from kvstow.plan.report import compared_figures


def compare(
    model: options.ModelName,
    tp: options.Tp = 1,
    pp: options.Pp = 1,
    rank: options.Rank = 0,
    block_tokens: options.BlockTokens = None,
    kv_dtype: options.KvDtype = None,
    memory: options.Memory = None,
    num_slabs: options.NumSlabs = None,
    align: options.Align = None,
    json: options.Json = False,
) -> None:
    """Every order and packing of a model, side by side."""
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
    layouts = [
        compared_figures(what, order, packing)
        for order in sorted(ORDERS, key=lambda order: order[0])
        for packing in PACKINGS
    ]
    if json:
        emit_json(_document(what, layouts))
    else:
        emit_text(*_report(what, layouts))
    if all(layout["error"] is not None for layout in layouts):
        refuse("no order and packing can be" + HINT + "see each reason on stdout", code=FAILED)


def _document(what: RankLayers, layouts: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "model": what.model.name,
        "tp": what.deployment.tp,
        "pp": what.deployment.pp,
        "rank": what.rank,
        "block_tokens": what.block_tokens,
        "kv_dtype": what.kv_dtype,
        "layouts": layouts,
    }


def _report(what: RankLayers, layouts: list[dict[str, Any]]) -> list[str]:
    asked = what.deployment
    heading = (
        f"{what.model.name}\n"
        f"rank {what.rank} of tp {asked.tp} × pp {asked.pp}, {what.kv_dtype}, {_arena(what)}"
    )
    columns = ("order", "packing", "slab bytes", "slabs", "padding", "copies", "requests")
    legend = (
        "padding, and copies per block: of the worst group\n"
        f"requests: of {USUAL_TOKENS:,} tokens, at once"
    )
    refused = [
        wrapped(f"{layout['order']} {layout['packing']}: {layout['error'].partition(HINT)[0]}")
        for layout in layouts
        if layout["error"] is not None
    ]
    reasons = ["\n".join(refused)] if refused else []
    return [heading, table(columns, map(_row, layouts), num_left=2), legend, *reasons]


def _arena(what: RankLayers) -> str:
    budget = what.deployment.budget
    if budget is None:
        return f"{what.deployment.num_slabs:,} slabs"
    return human(budget)


def _row(layout: dict[str, Any]) -> tuple[str, ...]:
    """One line of the table; a layout that cannot be is one of dashes."""
    if layout["error"] is not None:
        return (layout["order"], layout["packing"], *"–" * 5)
    return (
        layout["order"],
        layout["packing"],
        f"{layout['slab_bytes']:,}",
        f"{layout['num_slabs']:,}",
        f"{layout['padding']:.2%}",
        f"{max(layout['descriptors_per_block'].values()):,}",
        f"{layout['requests'][str(USUAL_TOKENS)]:,}",
    )
