"""Rows outside an arena: the bytes of one block, strips of a layer-compact block end to end.

Where a block is one run, its image is that run: arena row, host row and disk row are the same
bytes. Where it is not, the image is the packed row of the same layers, and a route joins the two.
"""

from dataclasses import replace
from math import lcm

from kvstow.errors import StoreError
from kvstow.plan.layout import NULL_SLABS, Layout, Order, PlacedGroup, Placement
from kvstow.plan.pack import Site, row_shape
from kvstow.plan.slab import slab_geometry
from kvstow.plan.view import align_up

ROW_ALIGN = 256

_PACKED: dict[Order, Order] = {"LBHNC": "BLHNC", "LHBNC": "BLHNC", "LBNHC": "BLNHC"}


def image(layout: Layout) -> Layout:
    """The layout of the images: one row per group and slab, the same for any arena size.

    Its fingerprint is a store's identity.
    """
    groups = tuple(
        replace(rows, rows_per_slab=1, placements=_placed(layout, g))
        for g, rows in enumerate(layout.groups)
    )
    step = lcm(*(_step(rows) for rows in groups))
    stride = align_up(max(_extent(rows) for rows in groups), step)
    return replace(
        layout,
        order=_PACKED.get(layout.order, layout.order),
        groups=tuple(_strided(rows, stride) for rows in groups),
        num_slabs=1 + NULL_SLABS,
        nbytes=(1 + NULL_SLABS) * stride,
    )


def stacked(layout: Layout, group: int, num_rows: int) -> Layout:
    """Images of one group side by side, for `num_rows` rows with ids from 1 on.

    It holds a part of the layers, as a pipeline stage does, and is called one.
    """
    whole = image(layout)
    rows = replace(whole.groups[group], rows_per_slab=1)
    stride = align_up(_extent(rows), lcm(whole.base_align, _step(rows)))
    count = num_rows + NULL_SLABS
    return replace(
        whole, groups=(_strided(rows, stride),), num_slabs=count, nbytes=count * stride, pp=(0, 2)
    )


def only(layout: Layout, group: int) -> Layout:
    """One group of a layout, where it lies; called a pipeline stage, like `stacked`."""
    return replace(layout, groups=(layout.groups[group],), pp=(0, 2))


def pooled(layout: Layout, budget: int) -> Layout:
    """Images of all groups in slabs that pass between them: what a host tier looks like."""
    whole = image(layout)
    groups = range(len(whole.groups))
    geometry = slab_geometry(
        [whole.row_bytes(g) for g in groups], [_step(rows) for rows in whole.groups],
        pool_bytes=budget,
    )  # fmt: skip
    count = budget // geometry.slab_bytes
    if count < 1 + NULL_SLABS:
        raise StoreError(
            f"{budget} bytes hold {count} slabs of {geometry.slab_bytes}; {1 + NULL_SLABS} are "
            f"the least\n\nhint: give at least {(1 + NULL_SLABS) * geometry.slab_bytes} bytes"
        )
    rows = tuple(
        replace(_strided(placed, geometry.slab_bytes // n), rows_per_slab=n)
        for placed, n in zip(whole.groups, geometry.rows_per_slab, strict=True)
    )
    return replace(whole, groups=rows, num_slabs=count, nbytes=count * geometry.slab_bytes)


def same_rows(a: Layout, a_group: int, b: Layout, b_group: int) -> bool:
    """Whether blocks of the two groups are single runs of the same bytes."""
    one, other = a.groups[a_group], b.groups[b_group]
    return (
        len(a.footprints[a_group].strips) == len(b.footprints[b_group].strips) == 1
        and one.group.layers == other.group.layers
        and _relative(one) == _relative(other)
    )


def _relative(rows: PlacedGroup) -> tuple[tuple[int, int, int], ...]:
    start = min(place.offset for place in rows.placements)
    return tuple((p.offset - start, p.head_stride, p.token_stride) for p in rows.placements)


def _placed(layout: Layout, group: int) -> tuple[Placement, ...]:
    rows = layout.groups[group]
    if len(layout.footprints[group].strips) == 1:
        return tuple(Placement(offset, 0, head, token) for offset, head, token in _relative(rows))
    order = _PACKED.get(layout.order, layout.order)
    return row_shape(rows.group, Site(order=order)).places


def _step(rows: PlacedGroup) -> int:
    """What block strides must be multiples of."""
    return lcm(ROW_ALIGN, *(lcm(layer.align, layer.unit) for layer in rows.group.layers))


def _extent(rows: PlacedGroup) -> int:
    """Bytes from the start of block 0's first page to the end of its last."""
    return max(
        place.offset
        + max(layer.page_bytes, (layer.heads.size - 1) * place.head_stride
              + (layer.states - 1) * place.token_stride + layer.cell_bytes)
        for layer, place in zip(rows.group.layers, rows.placements, strict=True)
    )  # fmt: skip


def _strided(rows: PlacedGroup, stride: int) -> PlacedGroup:
    return replace(
        rows, placements=tuple(replace(place, block_stride=stride) for place in rows.placements)
    )
