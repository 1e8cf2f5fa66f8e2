"""A layout as the plain numbers that a page draws from.

Many layouts of one model go into one page, so names and kinds of pages are listed once, in an
`Index`, and layouts refer to them by number. Everything else follows from the address law, which
the page applies itself.
"""

from dataclasses import dataclass, field
from typing import Any

from kvstow.plan.layout import Layout, PlacedGroup
from kvstow.plan.retention import in_words
from kvstow.plan.spec import LayerSpec


@dataclass(slots=True)
class Index:
    """Layer names and kinds of pages, each numbered when it is first asked for."""

    names: dict[str, int] = field(default_factory=dict[str, int])
    kinds: dict[LayerSpec, int] = field(default_factory=dict[LayerSpec, int])

    def name(self, layer: LayerSpec) -> int:
        return self.names.setdefault(layer.name, len(self.names))

    def kind(self, layer: LayerSpec) -> int:
        """Layers that differ in nothing but their names have one kind."""
        nameless = LayerSpec(
            name="",
            retention=layer.retention,
            block_tokens=layer.block_tokens,
            states=layer.states,
            heads=layer.heads,
            fields=layer.fields,
            align=layer.align,
        )
        return self.kinds.setdefault(nameless, len(self.kinds))

    def record(self) -> dict[str, Any]:
        """Names and kinds, in the order of their numbers."""
        return {"names": list(self.names), "kinds": [_kind(kind) for kind in self.kinds]}


def layout_record(layout: Layout, index: Index) -> dict[str, Any]:
    """Where everything is. `row` is null where a block is in several places."""
    return {
        "order": layout.order,
        "slab_bytes": layout.slab_bytes,
        "num_slabs": layout.num_slabs,
        "arena_bytes": layout.nbytes,
        "shared": len(layout.sharing) == 1,
        "groups": [_group(layout, g, rows, index) for g, rows in enumerate(layout.groups)],
    }


def _group(layout: Layout, g: int, rows: PlacedGroup, index: Index) -> dict[str, Any]:
    strips = layout.footprints[g].strips
    strides: dict[tuple[int, int, int], int] = {}
    stride_of = [
        strides.setdefault((p.block_stride, p.head_stride, p.token_stride), len(strides))
        for p in rows.placements
    ]
    return {
        "name": rows.group.name,
        "keeps": in_words(rows.group.retention),
        "block_tokens": rows.group.block_tokens,
        "rows_per_slab": rows.rows_per_slab,
        "row_bytes": layout.row_bytes(g),
        "row_stride": layout.row_stride(g),
        "row": [strips[0].offset, strips[0].nbytes, strips[0].stride] if len(strips) == 1 else None,
        "layers": [index.name(layer) for layer in rows.group.layers],
        "kinds": [index.kind(layer) for layer in rows.group.layers],
        "offsets": [place.offset for place in rows.placements],
        "strides": [list(each) for each in strides],
        "stride_of": stride_of,
    }


def _kind(layer: LayerSpec) -> dict[str, Any]:
    offsets = layer.field_offsets
    return {
        "keeps": in_words(layer.retention),
        "block_tokens": layer.block_tokens,
        "states": layer.states,
        "heads": layer.heads.size,
        "heads_in_all": layer.heads.total,
        "head_pieces": [list(piece) for piece in layer.heads.pieces],
        "cell_bytes": layer.cell_bytes,
        "page_bytes": layer.page_bytes,
        "fields": [
            {
                "name": each.name,
                "dtype": each.dtype.value,
                "axes": [[axis.name, axis.size] for axis in each.axes],
                "offset": offsets[each.name],
                "nbytes": each.nbytes,
            }
            for each in layer.fields
        ],
    }
