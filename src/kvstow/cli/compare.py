"""`kvstow compare`: one model under every order and packing."""

from typing import Any, get_args

from kvstow.cli import options
from kvstow.cli.deployment import Deployment, Served, served
from kvstow.cli.output import FAILED, HINT, emit_json, emit_text, human, refuse, table, wrapped
from kvstow.errors import PlanError
from kvstow.plan.layout import ORDERS, Order

CONTEXT_TOKENS = 8192
"""The request for which concurrency is compared."""


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
    deployment = Deployment(
        model=model,
        tp=tp,
        pp=pp,
        rank=rank,
        block_tokens=block_tokens,
        kv_dtype=kv_dtype,
        memory=memory,
        num_slabs=num_slabs,
        alignment=options.alignment(align or ()),
    )
    what = served(deployment)
    layouts = [
        _candidate(what, order, packing)
        for order in sorted(ORDERS, key=lambda order: order[0])
        for packing in get_args(options.Packing)
    ]
    if json:
        emit_json(_document(what, layouts))
    else:
        emit_text(*_report(what, layouts))
    if all(layout["error"] is not None for layout in layouts):
        refuse("no order and packing can be" + HINT + "see each reason on stdout", code=FAILED)


def _candidate(what: Served, order: Order, packing: options.Packing) -> dict[str, Any]:
    """The figures of one layout, or the reason why there is none."""
    from kvstow.cli.figures import descriptors, padding_fractions
    from kvstow.plan.capacity import bytes_per_token, max_requests

    chosen = {"order": order, "packing": packing}
    try:
        layout = what.layout(order, packing)
    except PlanError as error:
        return chosen | {"error": str(error)}
    names = [rows.group.name for rows in layout.groups]
    growth = bytes_per_token(layout)
    return chosen | {
        "error": None,
        "slab_bytes": layout.slab_bytes,
        "num_slabs": layout.num_slabs,
        "arena_bytes": layout.nbytes,
        "padding": max(padding_fractions(layout)),
        "descriptors_per_block": dict(zip(names, descriptors(layout), strict=True)),
        "bytes_per_token": int(growth) if growth.denominator == 1 else float(growth),
        "requests": {str(CONTEXT_TOKENS): max_requests(layout, CONTEXT_TOKENS)},
    }


def _document(what: Served, layouts: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "model": what.model.name,
        "tp": what.deployment.tp,
        "pp": what.deployment.pp,
        "rank": what.deployment.rank,
        "block_tokens": what.block_tokens,
        "kv_dtype": what.kv_dtype,
        "layouts": layouts,
    }


def _report(what: Served, layouts: list[dict[str, Any]]) -> list[str]:
    asked = what.deployment
    heading = (
        f"{what.model.name}\n"
        f"rank {asked.rank} of tp {asked.tp} × pp {asked.pp}, {what.kv_dtype}, {_arena(what)}"
    )
    columns = ("order", "packing", "slab bytes", "slabs", "padding", "copies", "requests")
    legend = (
        "padding, and copies per block: of the worst group\n"
        f"requests: of {CONTEXT_TOKENS:,} tokens, at once"
    )
    refused = [
        wrapped(f"{layout['order']} {layout['packing']}: {layout['error'].partition(HINT)[0]}")
        for layout in layouts
        if layout["error"] is not None
    ]
    reasons = ["\n".join(refused)] if refused else []
    return [heading, table(columns, map(_row, layouts), num_left=2), legend, *reasons]


def _arena(what: Served) -> str:
    if what.budget is None:
        return f"{what.deployment.num_slabs:,} slabs"
    return human(what.budget)


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
        f"{layout['requests'][str(CONTEXT_TOKENS)]:,}",
    )
