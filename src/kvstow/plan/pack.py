"""Groups and a budget → Layout: `packed`, `union`, `separate`.

`packed_as` takes the name of one. All three place the same pages; they differ in how many
rows of each group make a slab, and in who may own one:

    packed    tight rows; a slab is a whole number of rows of every group
    union     one row per slab, as long as the largest group's (what engines do today)
    separate  nothing is shared: every group keeps its own part of the arena
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import lcm
from typing import Literal, get_args

from kvstow.errors import PlanError
from kvstow.plan.group import Group, equal_groups, level_pages, short_rows
from kvstow.plan.layout import (
    NULL_SLABS,
    Layout,
    Order,
    Page,
    PlacedGroup,
    Placement,
    moved,
    parse_order,
)
from kvstow.plan.slab import Geometry, slab_geometry
from kvstow.plan.spec import LayerSpec
from kvstow.plan.view import MAX_BYTES, align_up, check_count, parse_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a kernel or a NIC asks of the layers whose names match `layers`: pages that start at
    multiples of so many bytes, and lie multiples of them apart."""

    layers: str = "*"
    multiple: int = 1

    def __post_init__(self) -> None:
        _check_bytes(f"multiple of {self.layers!r}", self.multiple)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """Multiples at which pages, rows and the arena start, and further demands by layer."""

    page: int = 16
    row: int = 64
    base: int = 4096
    demands: tuple[Demand, ...] = ()

    def __post_init__(self) -> None:
        for what, value in (("page", self.page), ("row", self.row), ("base", self.base)):
            _check_bytes(f"{what} alignment", value)

    def wishes(self) -> list[str]:
        """What differs from the usual alignment, as `kvstow plan --align` takes it."""
        said = [
            f"{what}={getattr(self, what)}"
            for what in ("page", "row")
            if getattr(self, what) != getattr(USUAL, what)
        ]
        if self.base != lcm(USUAL.base, self.page, self.row, *(d.multiple for d in self.demands)):
            said.append(f"base={self.base}")
        return said + [f"{demand.layers}={demand.multiple}" for demand in self.demands]

    def of(self, layer: LayerSpec) -> int:
        """What the layer's pages start at multiples of."""
        demands = [d.multiple for d in self.demands if fnmatchcase(layer.name, d.layers)]
        return lcm(self.page, layer.align, layer.unit, *demands)

    def of_row(self, group: Group) -> int:
        """What the group's rows start at multiples of."""
        return lcm(self.row, *(self.of(layer) for layer in group.layers))


def _check_bytes(what: str, value: object) -> None:
    check_count(what, value, most=MAX_BYTES - 1, error=PlanError)


USUAL = Alignment()


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a layout will live: its name, its place among the ranks, its alignment."""

    model: str = ""
    order: Order = "BLHNC"
    tp: tuple[int, int] = (0, 1)
    pp: tuple[int, int] = (0, 1)
    alignment: Alignment = USUAL

    def __post_init__(self) -> None:
        if parse_order(self.order) != self.order:
            raise PlanError(
                f"order {self.order!r} is written {parse_order(self.order)!r}"
                "\n\nhint: kvstow.plan.layout.parse_order reads the spellings that people use"
            )


ANYWHERE = Site()
"""A nameless model on one rank, in the default order, with the default alignment."""


# ── the three packings ─────────────────────────────────────────────────────────────────


Packing = Literal["slab", "union", "separate"]
PACKINGS: tuple[Packing, ...] = get_args(Packing)


def packed(
    groups: Sequence[Group],
    *,
    budget: int | str | None = None,
    num_slabs: int | None = None,
    site: Site = ANYWHERE,
) -> Layout:
    """Tight rows; slab geometry searched for the least expected waste.

    In layer-compact orders there are no rows: layers of one page shape, one from each
    group, take turns in one region, and a slab is one block id in all regions.
    """
    size = ArenaSize.of(groups, budget, num_slabs)
    if site.order.startswith("L"):
        return _by_layer(equal_groups(groups), size, site)
    shapes = [row_shape(part, site) for group in groups for part in short_rows(group)]
    lengths, steps = [shape.nbytes for shape in shapes], [shape.step for shape in shapes]
    return _rows(shapes, slab_geometry(lengths, steps, pool_bytes=size.budget), size, site)


def union(
    groups: Sequence[Group],
    *,
    budget: int | str | None = None,
    num_slabs: int | None = None,
    site: Site = ANYWHERE,
) -> Layout:
    """One row per slab, as long as the largest: equally large groups, scaled blocks."""
    size = ArenaSize.of(groups, budget, num_slabs)
    parts = equal_groups(level_pages(groups))
    if site.order.startswith("L"):
        return _by_layer(parts, size, site)
    shapes = [row_shape(group, site) for group in parts]
    longest = max(shape.nbytes for shape in shapes)
    stride = align_up(longest, lcm(*(shape.step for shape in shapes)))
    return _rows(shapes, Geometry(stride, (1,) * len(parts)), size, site)


def separate(
    groups: Sequence[Group],
    *,
    budget: int | str | None = None,
    num_slabs: int | None = None,
    context_tokens: int = 8192,
    site: Site = ANYWHERE,
) -> Layout:
    """Nothing shared. Budgets are cut so that all groups run out together at
    `context_tokens` per request."""
    size = ArenaSize.of(groups, budget, num_slabs)
    check_count("context_tokens", context_tokens, error=PlanError)
    needs = [group.rows_needed(context_tokens) for group in groups]
    shares = [max(1, round(need / min(needs))) for need in needs]
    if site.order.startswith("L"):
        return _by_layer(groups, size, site, shares)
    shapes = [row_shape(group, site) for group in groups]
    per_slab = sum(share * shape.stride for share, shape in zip(shares, shapes, strict=True))
    count = size.slabs_of(per_slab, reserved=sum(shape.step for shape in shapes[1:]))
    rows: list[PlacedGroup] = []
    end = 0
    for shape, share in zip(shapes, shares, strict=True):
        base = align_up(end, shape.step)
        rows.append(shape.rows(base, shape.stride, share))
        end = base + count * share * shape.stride
    return _layout(tuple(rows), count, end, site)


def packed_as(
    packing: Packing,
    groups: Sequence[Group],
    *,
    budget: int | str | None = None,
    num_slabs: int | None = None,
    site: Site = ANYWHERE,
) -> Layout:
    """The groups under the packing of that name; `slab` is `packed`."""
    if packing not in PACKINGS:
        raise PlanError(f"packing {packing!r} is none of {', '.join(PACKINGS)}")
    pack = {"slab": packed, "union": union, "separate": separate}[packing]
    return pack(groups, budget=budget, num_slabs=num_slabs, site=site)


def _check_groups(groups: Sequence[Group]) -> None:
    """Refuses no groups at all, and pages that no arena holds."""
    if not groups:
        raise PlanError("there are no groups to place\n\nhint: grouped(layers) makes them")
    for group in groups:
        if not isinstance(group, Group):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlanError(
                f"expected Group, got {type(group).__name__}\n\nhint: grouped(layers) makes them"
            )
        if group.page_bytes >= MAX_BYTES:
            raise PlanError(
                f"group {group.name!r}: one block of {group.block_tokens} tokens takes "
                f"{group.page_bytes} bytes, not below 2^63\n\nhint: fewer tokens per block"
            )


@dataclass(frozen=True, slots=True)
class ArenaSize:
    """How much there is to fill: a budget in bytes, or a number of slabs; one of the two."""

    budget: int | None
    num_slabs: int | None

    @staticmethod
    def of(groups: Sequence[Group], budget: int | str | None, num_slabs: int | None) -> "ArenaSize":
        """The one of the two that is given; a budget may be written `"20GiB"`."""
        _check_groups(groups)
        if budget is not None and num_slabs is None:
            return ArenaSize(parse_size(budget), None)
        if budget is None and num_slabs is not None:
            least, most = 1 + NULL_SLABS, MAX_BYTES - 1
            check_count("number of slabs", num_slabs, least=least, most=most, error=PlanError)
            return ArenaSize(None, num_slabs)
        raise PlanError(
            f"give either a budget or a number of slabs, not {budget!r} and {num_slabs!r}"
            '\n\nhint: budget="20GiB" for all that fits into 20 GiB'
        )

    def slabs_of(self, slab_bytes: int, *, reserved: int = 0) -> int:
        """How many slabs of `slab_bytes` there will be, `reserved` bytes set aside."""
        if self.budget is None:
            return self.num_slabs or 0
        count = (self.budget - reserved) // slab_bytes
        if count < 1 + NULL_SLABS:
            least = (1 + NULL_SLABS) * slab_bytes + reserved
            raise PlanError(
                f"a budget of {self.budget:,} bytes holds {max(0, count)} slabs of {slab_bytes:,}; "
                f"at least {1 + NULL_SLABS} are needed (one is the null slab)\n\n"
                f"hint: give at least {least:,} bytes"
            )
        return count


# ── rows: the pages of one block together ──────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class RowShape:
    """Pages of one block, placed relative to its row."""

    group: Group
    places: tuple[Page, ...]
    nbytes: int
    step: int
    """What rows start at multiples of."""

    @property
    def stride(self) -> int:
        """From one row to the next, side by side."""
        return align_up(self.nbytes, self.step)

    def rows(self, base: int, stride: int, rows_per_slab: int) -> PlacedGroup:
        placements = tuple(moved(page, base, stride) for page in self.places)
        return PlacedGroup(group=self.group, rows_per_slab=rows_per_slab, placements=placements)


def page_in_one_piece(
    layer: LayerSpec, order: Order, offset: int = 0, block_stride: int = 0
) -> Page:
    """The place of pages whose sections follow each other, cells side by side in each."""

    def place(start: int, section: LayerSpec) -> Placement:
        cell = section.cell_bytes
        if order.index("H") < order.index("N"):
            return Placement(offset + start, block_stride, section.states * cell, cell)
        return Placement(offset + start, block_stride, cell, section.heads.size * cell)

    return tuple(map(place, layer.section_offsets, layer.sections))


def _page_in_slices(layer: LayerSpec, offset: int, block_stride: int, head_stride: int) -> Page:
    """The place of pages whose heads lie apart, each with all sections."""
    return tuple(
        Placement(offset + start, block_stride, head_stride, section.cell_bytes)
        for start, section in zip(layer.end_to_end(1)[0], layer.sections, strict=True)
    )


def row_shape(group: Group, site: Site) -> RowShape:
    """The pages of one block end to end; heads outermost where the order says so."""
    if site.order == "BHLNC":
        return _sliced_row(group, site)
    places: list[Page] = []
    end = 0
    for layer in group.layers:
        offset = align_up(end, site.alignment.of(layer))
        places.append(page_in_one_piece(layer, site.order, offset))
        end = offset + layer.page_bytes
    return RowShape(group, tuple(places), end, site.alignment.of_row(group))


def _sliced_row(group: Group, site: Site) -> RowShape:
    """Layers of equally many heads together: per head, the slices of all of them."""
    places: dict[str, Page] = {}
    end = 0
    for num_heads in dict.fromkeys(layer.heads.size for layer in group.layers):
        layers = [layer for layer in group.layers if layer.heads.size == num_heads]
        step = lcm(*(site.alignment.of(layer) for layer in layers))
        base = align_up(end, step)
        offsets: list[int] = []
        slice_end = 0
        for layer in layers:
            offsets.append(align_up(slice_end, site.alignment.of(layer)))
            slice_end = offsets[-1] + align_up(layer.end_to_end(1)[1], layer.align)
        head_stride = align_up(slice_end, step)
        for layer, offset in zip(layers, offsets, strict=True):
            places[layer.name] = _page_in_slices(layer, base + offset, 0, head_stride)
        end = base + (num_heads - 1) * head_stride + slice_end
    ordered = tuple(places[layer.name] for layer in group.layers)
    return RowShape(group, ordered, end, site.alignment.of_row(group))


# ── layer-compact orders: the pages of one layer together ──────────────────────────────


def region(layer: LayerSpec, offset: int, num_blocks: int, site: Site) -> tuple[Page, int]:
    """All pages of one layer side by side, and the bytes they take."""
    if site.order == "LHBNC":
        slice_bytes = align_up(layer.end_to_end(1)[1], site.alignment.of(layer))
        place = _page_in_slices(layer, offset, slice_bytes, num_blocks * slice_bytes)
        return place, layer.heads.size * num_blocks * slice_bytes
    stride = align_up(layer.page_bytes, site.alignment.of(layer))
    return page_in_one_piece(layer, site.order, offset, stride), num_blocks * stride


def _by_layer(
    groups: Sequence[Group], size: ArenaSize, site: Site, shares: Sequence[int] = ()
) -> Layout:
    """A region per layer, with `shares[g]` blocks of group `g` to a slab.

    Without `shares`, layers of one page shape, one from each group, have one together.
    """
    is_shared, shares = not shares, shares or [1] * len(groups)
    regions: dict[object, tuple[LayerSpec, int]] = {}
    keys: list[list[object]] = []
    for group, share in zip(groups, shares, strict=True):
        count: Counter[object] = Counter()
        keys.append([])
        for layer in group.layers:
            cells = tuple(section.cell_bytes for section in layer.sections)
            shape = layer.heads.size, layer.states, cells, site.alignment.of(layer)
            key = (shape, count[shape]) if is_shared else layer.name
            count[shape] += 1
            regions.setdefault(key, (layer, share))
            keys[-1].append(key)
    per_slab = sum(share * region(layer, 0, 1, site)[1] for layer, share in regions.values())
    gaps = sum(site.alignment.of(layer) for layer, _ in regions.values())
    num_slabs = size.slabs_of(per_slab, reserved=gaps)
    places: dict[object, Page] = {}
    end = 0
    for key, (layer, share) in regions.items():
        offset = align_up(end, site.alignment.of(layer))
        places[key], nbytes = region(layer, offset, num_slabs * share, site)
        end = offset + nbytes
    rows = tuple(
        PlacedGroup(
            group=group, rows_per_slab=share, placements=tuple(places[key] for key in group_keys)
        )
        for group, share, group_keys in zip(groups, shares, keys, strict=True)
    )
    return _layout(rows, num_slabs, end, site)


def _rows(shapes: Sequence[RowShape], slab: Geometry, size: ArenaSize, site: Site) -> Layout:
    """Rows side by side in slabs that all groups share."""
    rows = tuple(
        shape.rows(0, slab.slab_bytes // count, count)
        for shape, count in zip(shapes, slab.rows_per_slab, strict=True)
    )
    num_slabs = size.slabs_of(slab.slab_bytes)
    return _layout(rows, num_slabs, slab.slab_bytes * num_slabs, site)


def _layout(rows: tuple[PlacedGroup, ...], num_slabs: int, nbytes: int, site: Site) -> Layout:
    if nbytes >= MAX_BYTES:
        raise PlanError(
            f"{num_slabs} slabs take {nbytes} bytes, not below 2^63"
            "\n\nhint: fewer slabs, or fewer tokens per block"
        )
    layers = [layer for placed in rows for layer in placed.group.layers]
    return Layout(
        model=site.model,
        order=site.order,
        groups=rows,
        num_slabs=num_slabs,
        nbytes=nbytes,
        base_align=lcm(site.alignment.base, *(site.alignment.of(layer) for layer in layers)),
        tp=site.tp,
        pp=site.pp,
    )
