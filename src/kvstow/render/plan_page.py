"""What the page of `kvstow plan` can be asked: the same model, planned many times over."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kvstow import __version__
from kvstow.errors import KvstowError
from kvstow.plan.group import Group
from kvstow.plan.layout import ORDERS, Layout, Order
from kvstow.plan.pack import PACKINGS, Packing
from kvstow.plan.sizing.capacity import (
    bytes_per_token,
    fixed_bytes,
    max_requests,
    max_tokens,
    request_bytes,
)
from kvstow.plan.sizing.plan import Plan
from kvstow.plan.sizing.reports import descriptors, padding_fractions, per_layer_figures
from kvstow.render.data import Index, layout_record
from kvstow.render.page import page
from kvstow.render.text import slab_picture

PLAN_SCRIPTS = ("layout.js", "zoom.js", "compare.js", "plan.js")
TP = (1, 2, 4, 8)
PP = (1, 2, 4)
FACTORS = (0.5, 1, 2, 4)
"""Tokens per block, and memory, times what was asked for."""

DTYPES = ("bfloat16", "fp8", "int8_per_token_head")
"""Element types that are tried beside the one asked for."""

LENGTHS = tuple(1 << power for power in range(8, 21))
"""Tokens per request, from 256 to about a million, at which curves have a point."""

MOST_TOKENS = 4096
COMPARED: tuple[Order, ...] = ("BLHNC", "LBHNC")
"""The orders, one of either kind, in which every packing is planned."""


Progress = Callable[[int, int], None]
"""Told how many of how many variants are planned."""


def plan_page(plan: Plan, progress: Progress = lambda done, total: None) -> str:
    """The page: this layout and its neighbours, drawn; a still picture without scripts."""
    layout = plan.layout
    data = plan_data(plan, layout.order, plan.deployment.packing, progress)
    return page(f"{layout.model}: KV cache layout", data, PLAN_SCRIPTS, still=slab_picture(layout))


def plan_data(
    plan: Plan,
    order: Order,
    packing: Packing,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Everything the page draws: what was asked for, and its neighbours.

    `tp` and tokens per block are varied together; `pp`, dtype and memory one at a time.
    Neighbours that cannot be carry the reason instead. Ranks other than the first are
    planned as they were asked for, with no other `tp` or `pp`.
    """
    index = Index()
    base = plan.deployment
    choices = _choices(order, packing)
    alike: dict[tuple[tuple[Group, ...], int | None], dict[str, Any]] = {}
    variants: list[dict[str, Any]] = []
    tried = _variants(plan)
    for number, each in enumerate(tried):
        progress(number, len(tried))
        key = each.groups, each.deployment.budget
        if key not in alike:
            alike[key] = {"planned": len(alike), **_planned_all(each, choices, index)}
        variants.append({**_choice(each), "planned": alike[key]["planned"]})
    return {
        "kvstow": __version__,
        "model": plan.model,
        "source": str(base.model),
        "name": base.name,
        "align": base.alignment.wishes(),
        "rank": plan.rank,
        "pp": base.pp,
        "kv_dtype": plan.kv_dtype,
        "asked_dtype": base.kv_dtype,
        "budget": base.budget,
        "slabs_asked": base.num_slabs,
        "notes": list(plan.notes),
        "orders": sorted(ORDERS, key=lambda each: each[0]),
        "packings": list(PACKINGS),
        "lengths": list(LENGTHS),
        "start": {**_choice(plan), "order": order, "packing": packing},
        "variants": variants,
        "planned": list(alike.values()),
        **index.record(),
    }


def _tps(plan: Plan) -> list[int]:
    base = plan.deployment
    return [base.tp] if plan.rank else sorted({*TP, base.tp})


def _tokens(plan: Plan) -> list[int]:
    """Tokens per block to try, whole and within reason; what was asked for is among them."""
    base = plan.block_tokens
    tried = {int(base * factor) for factor in FACTORS if base * factor >= 1}
    return sorted(n for n in tried if n == base or n <= MOST_TOKENS)


def _variants(plan: Plan) -> list[Plan]:
    """What was asked for, and what the page's controls can make of it."""
    base, tokens = plan.deployment, plan.block_tokens
    changes: list[dict[str, Any]] = [
        {"tp": tp, "block_tokens": n} for tp in _tps(plan) for n in _tokens(plan)
    ]
    if not plan.rank:
        changes += [{"pp": pp, "block_tokens": tokens} for pp in PP]
    changes += [{"kv_dtype": dtype, "block_tokens": tokens} for dtype in DTYPES]
    if base.budget is not None:
        sizes = [int(base.budget * factor) for factor in FACTORS]
        changes += [{"memory": size, "block_tokens": tokens} for size in sizes]
    variants = {repr(_choice(plan)): plan}
    for change in changes:
        with suppress(KvstowError):
            other = replace(base, **change).on_rank(plan.rank)
            if other.block_tokens == change["block_tokens"]:
                variants.setdefault(repr(_choice(other)), other)
    return sorted(variants.values(), key=lambda each: (each.deployment.tp, each.block_tokens))


def _choice(plan: Plan) -> dict[str, Any]:
    """What distinguishes a variant."""
    return {
        "tp": plan.deployment.tp,
        "block_tokens": plan.block_tokens,
        "pp": plan.deployment.pp,
        "kv_dtype": plan.kv_dtype,
        "memory": plan.deployment.budget,
    }


def _choices(order: Order, packing: Packing) -> list[tuple[Order, Packing]]:
    """Slabs in every order; other packings in one order of either kind, and as asked for."""
    return [
        (each, other)
        for each in ORDERS
        for other in PACKINGS
        if other == "slab" or each in COMPARED or (each, other) == (order, packing)
    ]


def _planned_all(plan: Plan, choices: list[tuple[Order, Packing]], index: Index) -> dict[str, Any]:
    cache: dict[object, dict[str, Any]] = {}
    return {
        "per_layer": per_layer_figures(plan.groups),
        "layouts": {
            f"{order} {packing}": _planned(plan, order, packing, index, cache)
            for order, packing in choices
        },
    }


def _planned(
    plan: Plan,
    order: Order,
    packing: Packing,
    index: Index,
    cache: dict[object, dict[str, Any]],
) -> dict[str, Any]:
    try:
        layout = plan.changed(order=order, packing=packing).layout
    except KvstowError as error:
        return {"error": str(error)}
    return {
        **layout_record(layout, index),
        "copies": list(descriptors(layout)),
        "padding": [round(part, 6) for part in padding_fractions(layout)],
        **_holding(layout, cache),
    }


def _holding(layout: Layout, cache: dict[object, dict[str, Any]]) -> dict[str, Any]:
    """What fits; computed once for layouts that differ only inside their rows."""
    key = (
        layout.num_slabs,
        tuple(layout.sharing),
        tuple(
            (rows.group, rows.rows_per_slab, layout.row_stride(g))
            for g, rows in enumerate(layout.groups)
        ),
    )
    if key not in cache:
        cache[key] = {
            "fixed_bytes": fixed_bytes(layout),
            "bytes_per_token": float(bytes_per_token(layout)),
            "max_tokens": max_tokens(layout),
            "request_bytes": [request_bytes(layout, n) for n in LENGTHS],
            "requests": [max_requests(layout, n) for n in LENGTHS],
        }
    return cache[key]
