"""Pages placed inside a row, or layer by layer: the two ways that orders begin."""

from dataclasses import dataclass, replace
from math import lcm

from kvstow.plan.align import Site
from kvstow.plan.group import Group
from kvstow.plan.layout import Order, PlacedGroup, Placement
from kvstow.plan.spec import LayerSpec
from kvstow.plan.view import align_up


@dataclass(frozen=True, slots=True)
class Shape:
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


def row_shape(group: Group, site: Site) -> Shape:
    """The pages of one block end to end; heads outermost where the order says so."""
    if site.order == "BHLNC":
        return _sliced_row(group, site)
    places: list[Placement] = []
    end = 0
    for layer in group.layers:
        offset = align_up(end, site.alignment.of(layer))
        places.append(Placement(offset, 0, *_inner_strides(layer, site.order)))
        end = offset + layer.page_bytes
    return Shape(group, tuple(places), end)


def _sliced_row(group: Group, site: Site) -> Shape:
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
    return Shape(group, tuple(places[layer.name] for layer in group.layers), end)


def region(layer: LayerSpec, offset: int, num_blocks: int, site: Site) -> tuple[Placement, int]:
    """All pages of one layer side by side, and the bytes they take."""
    head_stride, token_stride = _inner_strides(layer, site.order)
    if site.order == "LHBNC":
        slice_bytes = align_up(layer.states * layer.cell_bytes, site.alignment.of(layer))
        place = Placement(offset, slice_bytes, num_blocks * slice_bytes, token_stride)
        return place, layer.heads.size * num_blocks * slice_bytes
    stride = align_up(layer.page_bytes, site.alignment.of(layer))
    return Placement(offset, stride, head_stride, token_stride), num_blocks * stride
