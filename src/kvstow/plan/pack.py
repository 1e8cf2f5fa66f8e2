"""Groups and a budget → Layout: `packed`, `union`, `separate`.

All three place the same pages; they differ in how many rows of each group make a slab,
and in who may own one:

    packed    tight rows; a slab is a whole number of rows of every group
    union     one row per slab, as long as the largest group's (what engines do today)
    separate  nothing is shared: every group keeps its own part of the arena
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import lcm

from kvstow.errors import PlanError
from kvstow.plan.group import Group, rows_needed, scaled, split
from kvstow.plan.layout import NULL_SLABS, Layout, Order, Placement, Rows
from kvstow.plan.slab import slab_geometry
from kvstow.plan.spec import Full, LayerSpec, State
from kvstow.plan.view import align_up

MAX_STATE_ROW_BYTES = 32 << 20
"""A recurrent group with a longer row becomes several groups, so that slabs stay small."""


def whole(what: str, value: object, *, least: int) -> int:
    """The value, if it is a whole number and not below `least`."""
    if type(value) is not int or value < least:
        raise PlanError(f"{what} is {value!r}, not a whole number of at least {least}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a kernel or a NIC asks of the layers whose names match `layers`, in bytes."""

    layers: str = "*"
    offset_multiple: int = 1
    stride_multiple: int = 1
    stride_limit: int = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """Multiples at which pages, rows and the arena start, and further demands by layer."""

    page: int = 16
    row: int = 256
    base: int = 4096
    demands: tuple[Demand, ...] = ()

    def __post_init__(self) -> None:
        for what, value in (("page", self.page), ("row", self.row), ("base", self.base)):
            whole(f"{what} alignment", value, least=1)

    def of(self, layer: LayerSpec) -> int:
        """What the layer's pages must start at multiples of."""
        demands = [d.offset_multiple for d in self.demands if fnmatchcase(layer.name, d.layers)]
        return lcm(self.page, layer.align, layer.unit, *demands)

    def of_row(self, group: Group) -> int:
        """What the group's rows must start at multiples of."""
        demands = [
            d.stride_multiple
            for d in self.demands
            for layer in group.layers
            if fnmatchcase(layer.name, d.layers)
        ]
        return lcm(self.row, *(self.of(layer) for layer in group.layers), *demands)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a layout will live: its name, its place among the ranks, its alignment."""

    model: str = ""
    order: Order = "BLHNC"
    tp: tuple[int, int] = (0, 1)
    pp: tuple[int, int] = (0, 1)
    alignment: Alignment = Alignment()


def packed(
    groups: Sequence[Group],
    *,
    budget: int | None = None,
    num_slabs: int | None = None,
    site: Site = Site(),
) -> Layout:
    """Tight rows; slab geometry searched for the least expected waste."""
    if site.order.startswith("L") and len(groups) > 1:
        return _columns(equal_groups(groups), budget, num_slabs, site)
    if site.order.startswith("L"):
        return separate(groups, budget=budget, num_slabs=num_slabs, site=site)
    parts = tuple(part for group in groups for part in _bounded(group))
    shapes = [_row(group, site) for group in parts]
    geometry = slab_geometry(
        [shape.nbytes for shape in shapes],
        [site.alignment.of_row(group) for group in parts],
        pool_bytes=_checked(budget, num_slabs),
    )
    rows = tuple(
        shape.rows(0, geometry.slab_bytes // count, count)
        for shape, count in zip(shapes, geometry.rows_per_slab, strict=True)
    )
    count = _count(geometry.slab_bytes, budget, num_slabs)
    return _layout(rows, count, geometry.slab_bytes * count, site)


def union(
    groups: Sequence[Group],
    *,
    budget: int | None = None,
    num_slabs: int | None = None,
    site: Site = Site(),
) -> Layout:
    """One row per slab, as long as the largest: equally large groups, scaled blocks."""
    _checked(budget, num_slabs)
    parts = equal_groups(level_pages(groups))
    if site.order.startswith("L"):
        return _columns(parts, budget, num_slabs, site)
    shapes = [_row(group, site) for group in parts]
    step = lcm(*(site.alignment.of_row(group) for group in parts))
    stride = align_up(max(shape.nbytes for shape in shapes), step)
    rows = tuple(shape.rows(0, stride, 1) for shape in shapes)
    count = _count(stride, budget, num_slabs)
    return _layout(rows, count, stride * count, site)


def separate(
    groups: Sequence[Group],
    *,
    budget: int | None = None,
    num_slabs: int | None = None,
    context_tokens: int = 8192,
    site: Site = Site(),
) -> Layout:
    """Nothing shared. Budgets are cut so that all groups run out together at
    `context_tokens` per request."""
    _checked(budget, num_slabs)
    needs = [rows_needed(group, context_tokens) for group in groups]
    shares = [max(1, round(need / min(needs))) for need in needs]
    shapes = [_row(group, site) for group in groups]
    strides = [
        align_up(shape.nbytes, site.alignment.of_row(group))
        for shape, group in zip(shapes, groups, strict=True)
    ]
    per_slab = sum(share * stride for share, stride in zip(shares, strides, strict=True))
    count = _count(per_slab, budget, num_slabs)
    rows: list[Rows] = []
    base = 0
    for group, shape, share, stride in zip(groups, shapes, shares, strides, strict=True):
        if site.order.startswith("L"):
            placed, end = _stacked(group, base, count * share, site)
            rows.append(Rows(group=group, rows_per_slab=share, placements=placed))
        else:
            rows.append(shape.rows(base, stride, share))
            end = base + count * share * stride
        base = end
    return _layout(tuple(rows), count, base, site)


# ── groups ────────────────────────────────────────────────────────────────────────────


def _bounded(group: Group) -> tuple[Group, ...]:
    """A recurrent group cut so that no row is longer than `MAX_STATE_ROW_BYTES`."""
    if not isinstance(group.retention, State) or group.page_bytes <= MAX_STATE_ROW_BYTES:
        return (group,)
    parts = -(-group.page_bytes // MAX_STATE_ROW_BYTES)
    return split(group, min(parts, len(group.layers)))


def equal_groups(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Groups cut until none has longer rows than the full-attention group (the shortest
    one, where there is none); recurrent ones until none has more layers than it."""
    lasting = [group for group in groups if isinstance(group.retention, Full)]
    unit = lasting[0] if lasting else min(groups, key=lambda group: group.page_bytes)
    return tuple(
        part
        for group in groups
        for part in split(group, -(-len(group.layers) // len(unit.layers))
                          if isinstance(group.retention, State)
                          else min(len(group.layers), -(-group.page_bytes // unit.page_bytes)))
    )  # fmt: skip


def level_pages(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Attention blocks scaled up until a page is no smaller than a recurrent page."""
    states = [layer.page_bytes for group in groups if isinstance(group.retention, State)
              for layer in group.layers]  # fmt: skip
    if not states:
        return tuple(groups)
    return tuple(
        group
        if isinstance(group.retention, State)
        else scaled(group, -(-max(states) // min(layer.page_bytes for layer in group.layers)))
        for group in groups
    )


# ── rows ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Shape:
    """Pages of one block, placed relative to its row."""

    group: Group
    places: tuple[Placement, ...]
    nbytes: int

    def rows(self, base: int, stride: int, rows_per_slab: int) -> Rows:
        placements = tuple(
            replace(p, offset=base + p.offset, block_stride=stride) for p in self.places
        )
        return Rows(group=self.group, rows_per_slab=rows_per_slab, placements=placements)


def _inner_strides(layer: LayerSpec, order: Order) -> tuple[int, int]:
    """Head and token stride of a page in one piece."""
    cell = layer.cell_bytes
    if order.index("H") < order.index("N"):
        return layer.states * cell, cell
    return cell, layer.heads.size * cell


def _row(group: Group, site: Site) -> _Shape:
    """The pages of one block end to end; heads outermost where the order says so."""
    if site.order == "BHLNC":
        return _sliced_row(group, site)
    places: list[Placement] = []
    end = 0
    for layer in group.layers:
        offset = align_up(end, site.alignment.of(layer))
        places.append(Placement(offset, 0, *_inner_strides(layer, site.order)))
        end = offset + layer.page_bytes
    return _Shape(group, tuple(places), end)


def _sliced_row(group: Group, site: Site) -> _Shape:
    """Layers of equally many heads together: per head, the slices of all of them."""
    places: dict[str, Placement] = {}
    end = 0
    for num_heads in dict.fromkeys(layer.heads.size for layer in group.layers):
        layers = [layer for layer in group.layers if layer.heads.size == num_heads]
        step = lcm(*(site.alignment.of(layer) for layer in layers))
        base = align_up(end, step)
        offsets: list[int] = []
        slice_end = 0
        for layer in layers:
            offsets.append(align_up(slice_end, site.alignment.of(layer)))
            slice_end = offsets[-1] + align_up(layer.states * layer.cell_bytes, layer.align)
        head_stride = align_up(slice_end, step) if num_heads > 1 else slice_end
        for layer, offset in zip(layers, offsets, strict=True):
            places[layer.name] = Placement(base + offset, 0, head_stride, layer.cell_bytes)
        end = base + num_heads * head_stride
    return _Shape(group, tuple(places[layer.name] for layer in group.layers), end)


# ── layer-compact orders ──────────────────────────────────────────────────────────────


def _stacked(
    group: Group, base: int, num_blocks: int, site: Site
) -> tuple[tuple[Placement, ...], int]:
    """One region per layer, end to end."""
    places: list[Placement] = []
    end = base
    for layer in group.layers:
        offset = align_up(end, site.alignment.of(layer))
        place, nbytes = _region(layer, offset, num_blocks, site)
        places.append(place)
        end = offset + nbytes
    return tuple(places), end


def _region(layer: LayerSpec, offset: int, num_blocks: int, site: Site) -> tuple[Placement, int]:
    """All pages of one layer side by side, and the bytes they take."""
    head_stride, token_stride = _inner_strides(layer, site.order)
    if site.order == "LHBNC":
        slice_bytes = align_up(layer.states * layer.cell_bytes, lcm(layer.align, layer.unit))
        place = Placement(offset, slice_bytes, num_blocks * slice_bytes, token_stride)
        return place, layer.heads.size * num_blocks * slice_bytes
    stride = align_up(layer.page_bytes, site.alignment.of(layer))
    return Placement(offset, stride, head_stride, token_stride), num_blocks * stride


def _columns(
    groups: Sequence[Group], budget: int | None, num_slabs: int | None, site: Site
) -> Layout:
    """Layer-compact and shared: the k-th layers of one page shape, one from each group,
    take turns in one region; a slab is the same block id in all regions."""
    _checked(budget, num_slabs)
    columns: dict[tuple[int, int, int, int, int], LayerSpec] = {}
    keys: list[list[tuple[int, int, int, int, int]]] = []
    for group in groups:
        seen: dict[tuple[int, int, int, int], int] = {}
        keys.append([])
        for layer in group.layers:
            shape = (layer.heads.size, layer.states, layer.cell_bytes, site.alignment.of(layer))
            key = (*shape, seen.setdefault(shape, 0))
            seen[shape] += 1
            columns.setdefault(key, layer)
            keys[-1].append(key)
    per_slab = sum(_region(layer, 0, 1, site)[1] for layer in columns.values())
    count = _count(per_slab, budget, num_slabs)
    places: dict[tuple[int, int, int, int, int], Placement] = {}
    end = 0
    for key, layer in columns.items():
        offset = align_up(end, site.alignment.of(layer))
        places[key], nbytes = _region(layer, offset, count, site)
        end = offset + nbytes
    rows = tuple(
        Rows(group=group, rows_per_slab=1, placements=tuple(places[key] for key in row_keys))
        for group, row_keys in zip(groups, keys, strict=True)
    )
    return _layout(rows, count, end, site)


# ── counts ────────────────────────────────────────────────────────────────────────────


def _checked(budget: int | None, num_slabs: int | None) -> int | None:
    """The budget, once it is certain that exactly one of the two was given, and whole."""
    if (budget is None) == (num_slabs is None):
        raise PlanError(f"give either a budget or a number of slabs, not {budget!r} and "
                        f"{num_slabs!r}")  # fmt: skip
    if num_slabs is not None:
        whole("number of slabs", num_slabs, least=1 + NULL_SLABS)
        return None
    return whole("budget in bytes", budget, least=1)


def _count(slab_bytes: int, budget: int | None, num_slabs: int | None) -> int:
    if num_slabs is not None:
        return num_slabs
    assert budget is not None
    count = budget // slab_bytes
    if count < 1 + NULL_SLABS:
        raise PlanError(
            f"a budget of {budget} bytes holds {count} slabs of {slab_bytes}; "
            f"{1 + NULL_SLABS} are the least (one is the null slab)\n\n"
            f"hint: give at least {(1 + NULL_SLABS) * slab_bytes} bytes"
        )
    return count


def _layout(rows: tuple[Rows, ...], num_slabs: int, nbytes: int, site: Site) -> Layout:
    for placed in rows:
        for layer, place in zip(placed.group.layers, placed.placements, strict=True):
            _meet(site.alignment.demands, layer, place)
    return Layout(
        model=site.model,
        order=site.order,
        groups=rows,
        num_slabs=num_slabs,
        nbytes=nbytes,
        base_align=lcm(site.alignment.base, *(
            layer.unit for placed in rows for layer in placed.group.layers)),  # fmt: skip
        tp=site.tp,
        pp=site.pp,
    )


def _meet(demands: Sequence[Demand], layer: LayerSpec, place: Placement) -> None:
    """Refuses a placement that does not give a layer what was asked for it."""
    for demand in demands:
        if not fnmatchcase(layer.name, demand.layers):
            continue
        for what, value, multiple in (
            ("offset", place.offset, demand.offset_multiple),
            ("block stride", place.block_stride, demand.stride_multiple),
        ):
            if value % multiple:
                raise PlanError(f"layer {layer.name!r}: {what} {value} is not a multiple of "
                                f"{multiple}")  # fmt: skip
        if place.block_stride > demand.stride_limit:
            raise PlanError(
                f"layer {layer.name!r}: block stride {place.block_stride} is above the limit of "
                f"{demand.stride_limit}\n\nhint: layer-compact orders (LBHNC) have the page "
                f"itself, {layer.page_bytes} bytes, as stride"
            )
