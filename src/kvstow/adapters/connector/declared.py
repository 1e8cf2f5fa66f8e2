"""What an engine says of its cache → a layout. From its words, never from shapes.

    page of layer i of a region, block b   starts at   offset + i · layer_stride + b · block_stride

All regions lie in one allocation and may overlay each other: a block id belongs to one group
at a time. What lies inside a page is the kernels' business (one backend keeps keys transposed
over the whole block), so all tokens of a block are one state: blocks move whole, and two
engines with different tokens per block are not joined.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd

from kvstow.errors import MemoryLayoutError
from kvstow.plan.group import Group, title
from kvstow.plan.layout import ORDERS, Layout, Order, PlacedGroup, Placement
from kvstow.plan.retention import Retention
from kvstow.plan.spec import DType, Extent, Field, LayerSpec

MAX_BASE_ALIGN = 64
"""No more is asked of the allocation than any allocator gives, so that a layout stays the same
from start to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One layer as the engine declares it: `states` cells of `content` elements per head."""

    layer: str
    retention: Retention
    block_tokens: int
    heads: Extent
    states: int
    content: int
    dtype: DType

    @property
    def nbytes(self) -> int:
        return self.heads.size * self.states * self.content * self.dtype.bits // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Same-shaped layers at equal distances in the allocation of `nbytes` bytes."""

    layers: tuple[str, ...]
    nbytes: int
    layer_stride: int
    block_stride: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """Everything the engine says of one rank's cache. `groups` share one set of block ids."""

    model: str
    order: str
    num_blocks: int
    groups: tuple[tuple[Page, ...], ...]
    regions: tuple[Region, ...]
    tp: tuple[int, int] = (0, 1)
    pp: tuple[int, int] = (0, 1)


def declared_order(name: str | None) -> Order:
    """The order of that name; MemoryLayoutError for one that is not known."""
    for order in ORDERS:
        if order == name:
            return order
    raise MemoryLayoutError(f"the engine calls its layout {name!r}, not one of {', '.join(ORDERS)}")


def declared_groups(declaration: Declaration) -> tuple[Group, ...]:
    """The engine's groups, in its order."""
    order = declared_order(declaration.order)
    return tuple(
        Group(
            name=f"{title(pages[0].retention)}.{g}",
            layers=tuple(_spec(page, order) for page in pages),
        )
        for g, pages in enumerate(declaration.groups)
    )


def axes_of(order: Order) -> tuple[str, ...]:
    """Names of a layer tensor's axes once the inside of a page is one: see `page_view`."""
    return ("block", "head", "content") if _heads_outside(order) else ("block", "content")


def page_view_start(order: Order) -> int:
    """From which axis on `[block, head, token, content]` is one opaque run, in memory order."""
    return 2 if _heads_outside(order) else 1


def declared_layout(declaration: Declaration, *, base_align: int) -> Layout:
    """The layout, with offsets from the start of the allocation.

    `base_align` is what the allocation's address is a multiple of. Refuses declarations that
    contradict themselves; `Arena.adopt` then compares with the memory itself.
    """
    order = declared_order(declaration.order)
    groups = declared_groups(declaration)
    places = _places(declaration, order)
    named = [layer.name for group in groups for layer in group.layers]
    if sorted(named) != sorted(places):
        raise MemoryLayoutError(
            f"layers of groups that have no place: {sorted(set(named) - set(places))[:8]}; "
            f"places of layers that no group has: {sorted(set(places) - set(named))[:8]}"
        )
    sizes = {region.nbytes for region in declaration.regions}
    if len(sizes) != 1:
        raise MemoryLayoutError(f"regions of allocations of {sorted(sizes)} bytes, not of one")
    rows = tuple(
        PlacedGroup(
            group=group,
            rows_per_slab=1,
            placements=tuple(places[layer.name] for layer in group.layers),
        )
        for group in groups
    )
    return Layout(
        model=declaration.model,
        order=order,
        groups=rows,
        num_slabs=declaration.num_blocks,
        nbytes=sizes.pop(),
        base_align=gcd(base_align, MAX_BASE_ALIGN),
        tp=declaration.tp,
        pp=declaration.pp,
    )


def _heads_outside(order: Order) -> bool:
    return order.index("H") < order.index("N")


def _spec(page: Page, order: Order) -> LayerSpec:
    """A layer whose block is one state: per head where heads lie apart, else all together."""
    whole = Extent.whole
    if _heads_outside(order):
        heads = page.heads
        axes = (whole("content", page.states * page.content),)
    else:
        heads = whole("head", 1)
        axes = (whole("token", page.states), page.heads, whole("content", page.content))
    return LayerSpec(
        name=page.layer,
        retention=page.retention,
        block_tokens=page.block_tokens,
        states=1,
        heads=heads,
        fields=(Field("kv", page.dtype, axes),),
    )


def _places(declaration: Declaration, order: Order) -> Mapping[str, Placement]:
    pages = {page.layer: page for pages in declaration.groups for page in pages}
    places: dict[str, Placement] = {}
    for region in declaration.regions:
        for i, layer in enumerate(region.layers):
            if layer in places:
                raise MemoryLayoutError(f"layer {layer!r} has two places")
            if layer in pages:
                head_stride, nbytes = _inside(pages[layer], region, order, declaration.num_blocks)
                start = region.offset + i * region.layer_stride
                places[layer] = Placement(start, region.block_stride, head_stride, nbytes)
    return places


def _inside(page: Page, region: Region, order: Order, num_blocks: int) -> tuple[int, int]:
    """Head stride and bytes of one head's part of a page (of the page, where heads are inside)."""
    if not _heads_outside(order):
        return page.nbytes, page.nbytes
    part = page.nbytes // page.heads.size
    match order:
        case "LHBNC":
            return num_blocks * region.block_stride, part
        case "BHLNC":
            return len(region.layers) * region.layer_stride, part
        case _:
            return part, part
