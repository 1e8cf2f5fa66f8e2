"""Groups and a budget → Layout: `packed`, `union`, `separate`.

All three place the same pages; they differ in how many rows of each group make a slab,
and in who may own one:

    packed    tight rows; a slab is a whole number of rows of every group
    union     one row per slab, as long as the largest group's (what engines do today)
    separate  nothing is shared: every group keeps its own part of the arena
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import islice
from math import lcm

from kvstow.errors import PlanError
from kvstow.plan.group import Group, scaled, split
from kvstow.plan.layout import NULL_SLABS, Layout, Order, PlacedGroup, Placement
from kvstow.plan.retention import Full, State
from kvstow.plan.slab import MAX_SLAB_BYTES, slab_geometry
from kvstow.plan.spec import LayerSpec
from kvstow.plan.view import align_up


def whole_number(what: str, value: object, *, least: int) -> int:
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
    row: int = 64
    base: int = 4096
    demands: tuple[Demand, ...] = ()

    def __post_init__(self) -> None:
        for what, value in (("page", self.page), ("row", self.row), ("base", self.base)):
            whole_number(f"{what} alignment", value, least=1)

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


ANYWHERE = Site()
"""A nameless model on one rank, in the default order, with the default alignment."""


def check_demands(demands: Sequence[Demand], layer: LayerSpec, place: Placement) -> None:
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


@dataclass(frozen=True, slots=True)
class RowShape:
    """Pages of one block, placed relative to its row."""

    group: Group
    places: tuple[Placement, ...]
    nbytes: int

    def rows(self, base: int, stride: int, rows_per_slab: int) -> PlacedGroup:
        placements = tuple(
            replace(p, offset=base + p.offset, block_stride=stride) for p in self.places
        )
        return PlacedGroup(group=self.group, rows_per_slab=rows_per_slab, placements=placements)


def _inner_strides(layer: LayerSpec, order: Order) -> tuple[int, int]:
    """Head and token stride of a page in one piece."""
    cell = layer.cell_bytes
    if order.index("H") < order.index("N"):
        return layer.states * cell, cell
    return cell, layer.heads.size * cell


def row_shape(group: Group, site: Site) -> RowShape:
    """The pages of one block end to end; heads outermost where the order says so."""
    if site.order == "BHLNC":
        return _sliced_row(group, site)
    places: list[Placement] = []
    end = 0
    for layer in group.layers:
        offset = align_up(end, site.alignment.of(layer))
        places.append(Placement(offset, 0, *_inner_strides(layer, site.order)))
        end = offset + layer.page_bytes
    return RowShape(group, tuple(places), end)


def _sliced_row(group: Group, site: Site) -> RowShape:
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
        head_stride = align_up(slice_end, step)
        for layer, offset in zip(layers, offsets, strict=True):
            places[layer.name] = Placement(base + offset, 0, head_stride, layer.cell_bytes)
        end = base + (num_heads - 1) * head_stride + slice_end
    return RowShape(group, tuple(places[layer.name] for layer in group.layers), end)


def region(layer: LayerSpec, offset: int, num_blocks: int, site: Site) -> tuple[Placement, int]:
    """All pages of one layer side by side, and the bytes they take."""
    head_stride, token_stride = _inner_strides(layer, site.order)
    if site.order == "LHBNC":
        slice_bytes = align_up(layer.states * layer.cell_bytes, site.alignment.of(layer))
        place = Placement(offset, slice_bytes, num_blocks * slice_bytes, token_stride)
        return place, layer.heads.size * num_blocks * slice_bytes
    stride = align_up(layer.page_bytes, site.alignment.of(layer))
    return Placement(offset, stride, head_stride, token_stride), num_blocks * stride


__all__ = ["Alignment", "Demand", "Site", "packed", "separate", "union"]

LONG_ROW_BYTES = 32 << 20
"""A recurrent group with a longer row becomes several groups."""


def packed(
    groups: Sequence[Group],
    *,
    budget: int | None = None,
    num_slabs: int | None = None,
    site: Site = ANYWHERE,
) -> Layout:
    """Tight rows; slab geometry searched for the least expected waste.

    In layer-compact orders there are no rows: layers of one page shape, one from each
    group, take turns in one region, and a slab is one block id in all regions.
    """
    room = ArenaSize(budget, num_slabs)
    if site.order.startswith("L"):
        return _columns(equal_groups(groups), room, site)
    parts = tuple(part for group in groups for part in _bounded(group))
    shapes = [row_shape(group, site) for group in parts]
    geometry = slab_geometry(
        [shape.nbytes for shape in shapes],
        [site.alignment.of_row(group) for group in parts],
        pool_bytes=budget,
    )
    rows = tuple(
        shape.rows(0, geometry.slab_bytes // count, count)
        for shape, count in zip(shapes, geometry.rows_per_slab, strict=True)
    )
    count = room.slabs_of(geometry.slab_bytes)
    return _layout(rows, count, geometry.slab_bytes * count, site)


def union(
    groups: Sequence[Group],
    *,
    budget: int | None = None,
    num_slabs: int | None = None,
    site: Site = ANYWHERE,
) -> Layout:
    """One row per slab, as long as the largest: equally large groups, scaled blocks."""
    room = ArenaSize(budget, num_slabs)
    parts = equal_groups(level_pages(groups))
    if site.order.startswith("L"):
        return _columns(parts, room, site)
    shapes = [row_shape(group, site) for group in parts]
    step = lcm(*(site.alignment.of_row(group) for group in parts))
    stride = align_up(max(shape.nbytes for shape in shapes), step)
    rows = tuple(shape.rows(0, stride, 1) for shape in shapes)
    count = room.slabs_of(stride)
    return _layout(rows, count, stride * count, site)


def separate(
    groups: Sequence[Group],
    *,
    budget: int | None = None,
    num_slabs: int | None = None,
    context_tokens: int = 8192,
    site: Site = ANYWHERE,
) -> Layout:
    """Nothing shared. Budgets are cut so that all groups run out together at
    `context_tokens` per request."""
    room = ArenaSize(budget, num_slabs)
    needs = [group.rows_needed(context_tokens) for group in groups]
    shares = [max(1, round(need / min(needs))) for need in needs]
    if site.order.startswith("L"):
        return _stacks(groups, shares, room, site)
    shapes = [row_shape(group, site) for group in groups]
    strides = [
        align_up(shape.nbytes, site.alignment.of_row(group))
        for shape, group in zip(shapes, groups, strict=True)
    ]
    steps = [site.alignment.of_row(group) for group in groups]
    per_slab = sum(share * stride for share, stride in zip(shares, strides, strict=True))
    count = room.slabs_of(per_slab, reserved=sum(steps[1:]))
    rows: list[PlacedGroup] = []
    end = 0
    for shape, step, stride, share in zip(shapes, steps, strides, shares, strict=True):
        base = align_up(end, step)
        rows.append(shape.rows(base, stride, share))
        end = base + count * share * stride
    return _layout(tuple(rows), count, end, site)


@dataclass(frozen=True, slots=True)
class ArenaSize:
    """How much there is to fill: a budget in bytes, or a number of slabs; one of the two."""

    budget: int | None
    num_slabs: int | None

    def __post_init__(self) -> None:
        if (self.budget is None) == (self.num_slabs is None):
            raise PlanError(
                f"give either a budget or a number of slabs, not {self.budget!r} and "
                f"{self.num_slabs!r}"
            )
        if self.budget is None:
            whole_number("number of slabs", self.num_slabs, least=1 + NULL_SLABS)
        else:
            whole_number("budget in bytes", self.budget, least=1)

    def slabs_of(self, slab_bytes: int, *, reserved: int = 0) -> int:
        """How many slabs of `slab_bytes` there will be, `reserved` bytes set aside."""
        if self.budget is None:
            return self.num_slabs or 0
        count = (self.budget - reserved) // slab_bytes
        if count < 1 + NULL_SLABS:
            least = (1 + NULL_SLABS) * slab_bytes + reserved
            raise PlanError(
                f"a budget of {self.budget} bytes holds {max(0, count)} slabs of {slab_bytes}; "
                f"{1 + NULL_SLABS} are the least (one is the null slab)\n\n"
                f"hint: give at least {least} bytes"
            )
        return count


# ── groups ────────────────────────────────────────────────────────────────────────────


def _bounded(group: Group) -> tuple[Group, ...]:
    """A recurrent group with very long rows, cut into equal parts, so that slabs stay
    small; uneven parts, which would pad each other, only where a slab cannot hold it."""
    if not isinstance(group.retention, State) or group.page_bytes <= LONG_ROW_BYTES:
        return (group,)
    num_layers = len(group.layers)
    fewest = -(-group.page_bytes // LONG_ROW_BYTES)
    for parts in range(fewest, min(4 * fewest, num_layers) + 1):
        if num_layers % parts == 0:
            return split(group, parts)
    return split(group, min(num_layers, -(-group.page_bytes // MAX_SLAB_BYTES)))


def equal_groups(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Groups cut until none has longer rows than the full-attention group (the shortest
    one, where there is none); recurrent ones until none has more layers than it."""
    lasting = [group for group in groups if isinstance(group.retention, Full)]
    unit = lasting[0] if lasting else min(groups, key=lambda group: group.page_bytes)

    def parts(group: Group) -> int:
        if isinstance(group.retention, State):
            return -(-len(group.layers) // len(unit.layers))
        return min(len(group.layers), -(-group.page_bytes // unit.page_bytes))

    return tuple(part for group in groups for part in split(group, parts(group)))


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


# ── layer-compact orders ──────────────────────────────────────────────────────────────


def _stacks(groups: Sequence[Group], shares: Sequence[int], room: ArenaSize, site: Site) -> Layout:
    """One region per layer; group `g` has `shares[g]` blocks to a slab."""
    layers = [(layer, share) for group, share in zip(groups, shares, strict=True)
              for layer in group.layers]  # fmt: skip
    count, places, end = _regions(layers, room, site)
    placed = iter(places)
    rows = tuple(
        PlacedGroup(
            group=group, rows_per_slab=share, placements=tuple(islice(placed, len(group.layers)))
        )
        for group, share in zip(groups, shares, strict=True)
    )
    return _layout(rows, count, end, site)


def _columns(groups: Sequence[Group], room: ArenaSize, site: Site) -> Layout:
    """One region per page shape and rank within its group, shared by the groups."""
    columns: dict[tuple[int, ...], LayerSpec] = {}
    keys: list[list[tuple[int, ...]]] = []
    for group in groups:
        seen: Counter[tuple[int, ...]] = Counter()
        keys.append([])
        for layer in group.layers:
            shape = (layer.heads.size, layer.states, layer.cell_bytes, site.alignment.of(layer))
            key = (*shape, seen[shape])
            seen[shape] += 1
            columns.setdefault(key, layer)
            keys[-1].append(key)
    count, places, end = _regions([(layer, 1) for layer in columns.values()], room, site)
    place_of = dict(zip(columns, places, strict=True))
    rows = tuple(
        PlacedGroup(
            group=group, rows_per_slab=1, placements=tuple(place_of[key] for key in group_keys)
        )
        for group, group_keys in zip(groups, keys, strict=True)
    )
    return _layout(rows, count, end, site)


def _regions(
    layers: Sequence[tuple[LayerSpec, int]], room: ArenaSize, site: Site
) -> tuple[int, list[Placement], int]:
    """Layers one after another, each with its blocks per slab: slabs, places, total bytes."""
    per_slab = sum(share * region(layer, 0, 1, site)[1] for layer, share in layers)
    gaps = sum(site.alignment.of(layer) for layer, _ in layers)
    count = room.slabs_of(per_slab, reserved=gaps)
    places: list[Placement] = []
    end = 0
    for layer, share in layers:
        offset = align_up(end, site.alignment.of(layer))
        place, nbytes = region(layer, offset, count * share, site)
        places.append(place)
        end = offset + nbytes
    return count, places, end


def _layout(rows: tuple[PlacedGroup, ...], num_slabs: int, nbytes: int, site: Site) -> Layout:
    layers = [
        (layer, place)
        for placed in rows
        for layer, place in zip(placed.group.layers, placed.placements, strict=True)
    ]
    for layer, place in layers:
        check_demands(site.alignment.demands, layer, place)
    return Layout(
        model=site.model,
        order=site.order,
        groups=rows,
        num_slabs=num_slabs,
        nbytes=nbytes,
        base_align=lcm(site.alignment.base, *(site.alignment.of(layer) for layer, _ in layers)),
        tp=site.tp,
        pp=site.pp,
    )
