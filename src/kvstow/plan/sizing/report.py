"""The figures of a layout: what `kvstow plan`, `kvstow compare` and their pages show."""

from collections.abc import Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import Any

from kvstow.errors import PlanError
from kvstow.plan.group import Group
from kvstow.plan.layout import Layout, Order, PlacedGroup
from kvstow.plan.manifest import fingerprint
from kvstow.plan.models.catalogue import entries
from kvstow.plan.pack import Packing
from kvstow.plan.retention import short_name
from kvstow.plan.sizing.capacity import (
    bytes_per_token,
    fixed_bytes,
    max_requests,
    max_tokens,
    request_bytes,
)
from kvstow.plan.sizing.plan import USUAL_TOKENS, Deployment, Plan, RankLayers

LENGTHS = (1024, 8192, 32768, 131072)
"""Tokens per request for which sizes and concurrency are given."""


def plan_figures(plan: Plan, lengths: Sequence[int] = LENGTHS) -> dict[str, Any]:
    """Every stable key of `kvstow plan --json`, for requests of so many tokens."""
    held, layout, deployment = plan.held, plan.layout, plan.deployment
    names = [rows.group.name for rows in layout.groups]
    return {
        "model": layout.model,
        "tp": deployment.tp,
        "pp": deployment.pp,
        "rank": held.rank,
        "block_tokens": held.block_tokens,
        "kv_dtype": held.kv_dtype,
        "order": layout.order,
        "groups": [_group(layout, g, rows) for g, rows in enumerate(layout.groups)],
        "slab_bytes": layout.slab_bytes,
        "num_slabs": layout.num_slabs,
        "arena_bytes": layout.nbytes,
        "padding_bytes_per_slab": dict(zip(names, padding_bytes(layout), strict=True)),
        "regions": 1,
        "transfer": {
            "descriptors_per_block": dict(zip(names, descriptors(layout), strict=True)),
            "bytes_per_block": {name: layout.row_bytes(g) for g, name in enumerate(names)},
        },
        "separate": per_layer_figures(held.groups),
        "request": _request(layout, lengths),
        "capacity": _capacity(plan, lengths),
        "fingerprint": fingerprint(layout),
        "notes": list(plan.notes),
    }


def compared_figures(held: RankLayers, order: Order, packing: Packing) -> dict[str, Any]:
    """One line of `kvstow compare --json`: a layout's figures, or the reason why there is none."""
    choice: dict[str, Any] = {
        "tp": held.deployment.tp,
        "block_tokens": held.block_tokens,
        "kv_dtype": held.kv_dtype,
        "order": order,
        "packing": packing,
    }
    try:
        plan = Plan.of(held.changed(order=order, packing=packing))
    except PlanError as error:
        return choice | {"error": str(error)}
    layout = plan.layout
    names = [rows.group.name for rows in layout.groups]
    return choice | {
        "error": None,
        "slab_bytes": layout.slab_bytes,
        "num_slabs": layout.num_slabs,
        "arena_bytes": layout.nbytes,
        "padding": max(padding_fractions(layout)),
        "descriptors_per_block": dict(zip(names, descriptors(layout), strict=True)),
        "bytes_per_token": _plain(bytes_per_token(layout)),
        "requests": {str(USUAL_TOKENS): plan.max_requests(tokens=USUAL_TOKENS)},
    }


def mark_best(layouts: Sequence[dict[str, Any]]) -> None:
    """Set `best` on every line of a comparison: those with which most requests fit, of them
    those with the fewest copies per block, of them those with the least padding."""

    def merit(layout: dict[str, Any]) -> tuple[float, ...]:
        if layout["error"] is not None:
            return (-1.0,)
        copies = max(layout["descriptors_per_block"].values())
        return (layout["requests"][str(USUAL_TOKENS)], -copies, -layout["padding"])

    most = max(map(merit, layouts))
    for layout in layouts:
        layout["best"] = merit(layout) == most and most[0] > 0


def alike(layouts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines that differ in nothing but order and packing as one line, with `orders[]` and
    `packings[]`: every one of these orders under every one of these packings."""
    lines: dict[str, dict[str, Any]] = {}
    for layout in layouts:
        line = lines.setdefault(_without(layout, "order"), {**layout, "orders": []})
        line["orders"].append(layout["order"])
    found: dict[str, dict[str, Any]] = {}
    for line in lines.values():
        of = found.setdefault(_without(line, "order", "packing"), {**line, "packings": []})
        of["packings"].append(line["packing"])
    return list(found.values())


def _without(line: dict[str, Any], *names: str) -> str:
    return repr([value for name, value in line.items() if name not in names])


def catalogue_figures(name: str) -> dict[str, Any]:
    """One line of `kvstow models --json`: a model that is known by name, in its own dtype."""
    held = Deployment(model=name).on_rank(0)
    known, growing = entries()[name], [g for g in held.groups if g.rows_bound(in_flight=1) is None]
    growth = sum((Fraction(g.page_bytes, g.block_tokens) for g in growing), Fraction(0))
    return {
        "name": name,
        "aliases": known["aliases"],
        "family": known["config"]["model_type"],
        "layers": held.model.total_layers,
        "kv_bytes_per_token": _plain(growth),
        "fixed_bytes": sum((g.rows_bound(in_flight=1) or 0) * g.page_bytes for g in held.groups),
        "kv_dtype": held.kv_dtype,
        "context": known["published"].get("context"),
        "parameters": known["published"].get("parameters"),
        "checked": known["published"].get("checked", []),
        "source": known["source"],
    }


def descriptors(layout: Layout) -> tuple[int, ...]:
    """Per group, the contiguous pieces that a block consists of."""
    return tuple(len(footprint.strips) for footprint in layout.footprints)


def slab_shares(layout: Layout) -> tuple[int, ...]:
    """Per group, the bytes that it takes away from others by owning one slab.

    All groups that pass slabs around take the same: the strips of any of them.
    """
    shares = [0] * len(layout.groups)
    for sharing in layout.sharing:
        strips = {
            (strip.offset, strip.stride * layout.groups[g].rows_per_slab)
            for g in sharing
            for strip in layout.footprints[g].strips
        }
        for g in sharing:
            shares[g] = sum(nbytes for _, nbytes in strips)
    return tuple(shares)


def padding_bytes(layout: Layout) -> tuple[int, ...]:
    """Per group, the bytes of a slab that are no page of it while it owns the slab."""
    return tuple(
        share - rows.rows_per_slab * rows.group.page_bytes
        for share, rows in zip(slab_shares(layout), layout.groups, strict=True)
    )


def padding_fractions(layout: Layout) -> tuple[float, ...]:
    """The same, as parts of the slab."""
    return tuple(
        padding / share
        for padding, share in zip(padding_bytes(layout), slab_shares(layout), strict=True)
    )


def per_layer_figures(groups: tuple[Group, ...]) -> dict[str, int]:
    """What one tensor per layer, keys and values apart, costs instead.

    `descriptors_per_block` is that of the group with the most tensors.
    """
    return {
        "regions": sum(group.num_tensors for group in groups),
        "descriptors_per_block": max(group.num_tensors for group in groups),
        "bytes_per_descriptor_max": max(tensor_bytes(group) for group in groups),
    }


def tensor_bytes(group: Group) -> int:
    """The most bytes that one block has in one tensor of a per-layer engine."""
    return max(layer.page_bytes // layer.num_tensors for layer in group.layers)


def _group(layout: Layout, g: int, rows: PlacedGroup) -> dict[str, Any]:
    return {
        "name": rows.group.name,
        "retention": short_name(rows.group.retention),
        "layers": [layer.name for layer in rows.group.layers],
        "block_tokens": rows.group.block_tokens,
        "row_bytes": layout.row_bytes(g),
        "row_stride": layout.row_stride(g),
        "rows_per_slab": rows.rows_per_slab,
        "placements": [
            {
                "layer": layer.name,
                "offset": page[0].offset,
                "nbytes": layer.page_bytes,
                "block_stride": page[0].block_stride,
                "sections": [asdict(place) for place in page],
            }
            for layer, page in zip(rows.group.layers, rows.placements, strict=True)
        ],
    }


def _request(layout: Layout, lengths: Sequence[int]) -> dict[str, Any]:
    return {
        "fixed_bytes": fixed_bytes(layout),
        "bytes_per_token": _plain(bytes_per_token(layout)),
        "at_tokens": {str(n): request_bytes(layout, n) for n in lengths},
    }


def _capacity(plan: Plan, lengths: Sequence[int]) -> dict[str, Any]:
    """What fits on all ranks at once, and on this one by itself."""
    longest = [max_tokens(each) for each in plan.stages]
    return {
        "tokens": min((n for n in longest if n is not None), default=None),
        "requests": {str(n): plan.max_requests(tokens=n) for n in lengths},
        "limiting_rank": plan.limiting_rank,
        "this_rank": {
            "tokens": max_tokens(plan.layout),
            "requests": {str(n): max_requests(plan.layout, n) for n in lengths},
        },
    }


def _plain(number: Fraction) -> int | float:
    return int(number) if number.denominator == 1 else float(number)
