"""What the page of `kvstow plan` can be asked: the same model, planned many times over."""

from dataclasses import replace
from typing import Any, get_args

from kvstow import __version__
from kvstow.cli.deployment import Deployment, Served
from kvstow.cli.figures import descriptors, padding_fractions, per_layer_figures
from kvstow.cli.options import Packing
from kvstow.errors import KvstowError
from kvstow.plan.capacity import (
    bytes_per_token,
    fixed_bytes,
    max_requests,
    max_tokens,
    request_bytes,
)
from kvstow.plan.group import Group
from kvstow.plan.layout import ORDERS, Layout, Order
from kvstow.render.page import page
from kvstow.render.record import Index, layout_record
from kvstow.render.svg import layout_svg

PLAN_SCRIPTS = ("layout.js", "zoom.js", "compare.js", "plan.js")
PACKINGS: tuple[Packing, ...] = get_args(Packing)
TP = (1, 2, 4, 8)
FACTORS = (0.5, 1, 2, 4)
"""Tokens per block, times what was asked for."""

LENGTHS = tuple(1 << power for power in range(8, 21))
"""Tokens per request, from 256 to about a million, at which curves have a point."""

MOST_TOKENS = 4096
COMPARED: tuple[Order, ...] = ("BLHNC", "LBHNC")
"""The orders, one of either kind, in which every packing is planned."""


def plan_page(served: Served, layout: Layout, packing: Packing) -> str:
    """The page: this layout and its neighbours, drawn; a still picture without scripts."""
    data = plan_data(served, layout.order, packing)
    return page(f"{layout.model}: KV cache layout", data, PLAN_SCRIPTS, still=layout_svg(layout))


def plan_data(served: Served, order: Order, packing: Packing) -> dict[str, Any]:
    """Everything the page draws: what was asked for, and its neighbours.

    Neighbours that cannot be carry the reason instead. Ranks other than the first are
    planned as they were asked for, with no other `tp`.
    """
    index = Index()
    asked = served.deployment
    choices = _choices(order, packing)
    tried = [_served(served, tp, tokens) for tp in _tps(served) for tokens in _tokens(served)]
    alike: dict[tuple[Group, ...], dict[str, Any]] = {}
    variants: list[dict[str, Any]] = []
    for each in tried:
        if each is None:
            continue
        if each.groups not in alike:
            alike[each.groups] = {"planned": len(alike), **_planned_all(each, choices, index)}
        variants.append({
            "tp": each.deployment.tp,
            "block_tokens": each.block_tokens,
            "planned": alike[each.groups]["planned"],
        })  # fmt: skip
    return {
        "kvstow": __version__,
        "model": served.model.name,
        "source": asked.model,
        "rank": asked.rank,
        "pp": asked.pp,
        "kv_dtype": served.kv_dtype,
        "asked_dtype": asked.kv_dtype,
        "budget": served.budget,
        "slabs_asked": asked.num_slabs,
        "notes": list(served.model.notes),
        "orders": sorted(ORDERS, key=lambda each: each[0]),
        "packings": list(PACKINGS),
        "lengths": list(LENGTHS),
        "start": {
            "tp": asked.tp,
            "block_tokens": served.block_tokens,
            "order": order,
            "packing": packing,
        },
        "variants": variants,
        "planned": list(alike.values()),
        **index.record(),
    }


def _tps(served: Served) -> list[int]:
    asked = served.deployment
    return [asked.tp] if asked.rank else sorted({*TP, asked.tp})


def _tokens(served: Served) -> list[int]:
    """Tokens per block to try, whole and within reason; what was asked for is among them."""
    asked = served.block_tokens
    tried = {int(asked * factor) for factor in FACTORS if asked * factor >= 1}
    return sorted(n for n in tried if n == asked or n <= MOST_TOKENS)


def _served(served: Served, tp: int, block_tokens: int) -> Served | None:
    """The same model with another `tp` and block size; None where it cannot be split so."""
    asked = served.deployment
    if (tp, block_tokens) == (asked.tp, served.block_tokens):
        return served
    try:
        found = _planned_as(replace(asked, tp=tp, block_tokens=block_tokens), served.budget)
    except KvstowError:
        return None
    return found if found.block_tokens == block_tokens else None


def _planned_as(deployment: Deployment, budget: int | None) -> Served:
    from kvstow.plan.group import grouped
    from kvstow.plan.models import load_model, model_layers

    model = model_layers(
        load_model(deployment.model),
        tp=deployment.tp,
        tp_rank=deployment.tp_rank,
        pp=deployment.pp,
        pp_rank=deployment.pp_rank,
        block_tokens=deployment.block_tokens,
        kv_dtype=deployment.kv_dtype,
    )
    return Served(deployment=deployment, model=model, groups=grouped(model.layers), budget=budget)


def _choices(order: Order, packing: Packing) -> list[tuple[Order, Packing]]:
    """Slabs in every order; other packings in one order of either kind, and as asked for."""
    return [
        (each, other)
        for each in ORDERS
        for other in PACKINGS
        if other == "slab" or each in COMPARED or (each, other) == (order, packing)
    ]


def _planned_all(
    served: Served, choices: list[tuple[Order, Packing]], index: Index
) -> dict[str, Any]:
    known: dict[object, dict[str, Any]] = {}
    return {
        "per_layer": per_layer_figures(served.groups),
        "layouts": {
            f"{order} {packing}": _planned(served, order, packing, index, known)
            for order, packing in choices
        },
    }


def _planned(
    served: Served,
    order: Order,
    packing: Packing,
    index: Index,
    known: dict[object, dict[str, Any]],
) -> dict[str, Any]:
    try:
        layout = served.layout(order, packing)
    except KvstowError as error:
        return {"error": str(error)}
    return {
        **layout_record(layout, index),
        "copies": list(descriptors(layout)),
        "padding": [round(part, 6) for part in padding_fractions(layout)],
        **_holding(layout, known),
    }


def _holding(layout: Layout, known: dict[object, dict[str, Any]]) -> dict[str, Any]:
    """What fits; computed once for layouts that differ only inside their rows."""
    key = (
        layout.num_slabs,
        tuple(layout.sharing),
        tuple((rows.group, rows.rows_per_slab, layout.row_stride(g))
              for g, rows in enumerate(layout.groups)),
    )  # fmt: skip
    if key not in known:
        known[key] = {
            "fixed_bytes": fixed_bytes(layout),
            "bytes_per_token": float(bytes_per_token(layout)),
            "max_tokens": max_tokens(layout),
            "request_bytes": [request_bytes(layout, n) for n in LENGTHS],
            "requests": [max_requests(layout, n) for n in LENGTHS],
        }
    return known[key]
