"""Memory that an engine has allocated, taken as it is, once it has been found to keep the laws.

Nothing is guessed from shapes. The caller names the axes of every tensor as they stand; what
the numbers then contradict is refused, with both of them.

    one tensor per layer        base ┃ L0: 0 1 2 … ┃  (not ours)  ┃ L1: 0 1 2 … ┃
    one buffer for all layers   base ┃ row 0: L0 L1 ┃ row 1: L0 L1 ┃

Offsets count from the lowest address. `regions` says where memory really is; the bytes between
two allocations are never touched.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from kvstow.errors import MemoryLayoutError
from kvstow.memory.dtypes import TORCH_TYPES, page_type
from kvstow.plan.group import Group
from kvstow.plan.layout import (
    ORDERS,
    Layout,
    Order,
    Page,
    PlacedGroup,
    Placement,
    page_runs,
    placed_sections,
)
from kvstow.plan.pack import page_in_one_piece
from kvstow.plan.sharing import Strip
from kvstow.plan.spec import Field, LayerSpec
from kvstow.plan.view import Axis, Run

Key = str | tuple[str, str]
"""A layer's name, or a layer's and one of its fields'."""

Tensors = Mapping[Key, torch.Tensor]
AxisNames = Sequence[str] | Mapping[Key, Sequence[str]]
"""Names of the tensors' axes as they stand: `block`, `head`, `token`, then `content` for all of a
cell, or a field's own axes; `block` and `content` alone for pages of several sections. One sequence
for all tensors, or one for each. `head` and `token` may be missing where there is one."""

MAX_BASE_ALIGN = 4096


@dataclass(frozen=True, slots=True, eq=False)
class EngineTensor:
    """A tensor that is said to hold a layer's pages, or one field of them."""

    layer: str
    field: str | None
    tensor: torch.Tensor
    axes: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"layer {self.layer!r}" + (f", field {self.field!r}" if self.field else "")

    def axis(self, name: str) -> Axis | None:
        """An axis of the tensor, in bytes; None where it is missing."""
        if name not in self.axes:
            return None
        dim = self.axes.index(name)
        stride = self.tensor.stride(dim) * self.tensor.element_size()
        return Axis(name, self.tensor.shape[dim], stride)


def engine_tensors(tensors: Tensors, axes: AxisNames) -> tuple[EngineTensor, ...]:
    """The tensors with the names of their axes, checked for number and repetition."""
    engine: list[EngineTensor] = []
    if not isinstance(tensors, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise MemoryLayoutError(
            f"tensors are {type(tensors).__name__}, not by the names of their layers"
            "\n\nhint: {'layers.0': tensor, …}"
        )
    for key, tensor in tensors.items():
        layer, field = (key, None) if isinstance(key, str) else key
        if isinstance(axes, Mapping) and key not in axes:
            raise MemoryLayoutError(
                f"no axes are named for layer {layer!r}, only for {list(axes)[:8]}"
            )
        names = tuple(axes[key] if isinstance(axes, Mapping) else axes)
        if len(names) != tensor.ndim or len(set(names)) < len(names) or "block" not in names:
            raise MemoryLayoutError(
                f"layer {layer!r}: a tensor of {tensor.ndim} axes {tuple(tensor.shape)} is said "
                f"to have {len(names)}: {names}\n\nhint: name each once, `block` among them"
            )
        engine.append(EngineTensor(layer, field, tensor, names))
    if not engine:
        raise MemoryLayoutError("no tensors to adopt")
    places = {given.tensor.device for given in engine}
    if len(places) > 1:
        raise MemoryLayoutError(f"tensors on several devices: {sorted(map(str, places))}")
    return tuple(engine)


# ── a layout out of addresses ─────────────────────────────────────────────────────────────


def adopted_layout(
    groups: Sequence[Group],
    tensors: Tensors,
    *,
    axes: AxisNames,
    order: Order,
    model: str = "",
    tp: tuple[int, int] = (0, 1),
    pp: tuple[int, int] = (0, 1),
    rows_per_slab: Sequence[int] = (),
    padding: Literal["none", "ours"] = "none",
) -> Layout:
    """The layout that the engine's tensors have, with offsets from the lowest address.

    Groups share block ids slab by slab: `rows_per_slab` of each, one where nothing is said.
    `padding` says whether bytes between the pages of a row may be written over.
    """
    counts = tuple(rows_per_slab) or (1,) * len(groups)
    _check(_impossible(groups, counts, order))
    engine = engine_tensors(tensors, axes)
    specs = {layer.name: layer for group in groups for layer in group.layers}
    _check_covered(engine, specs)
    _check([text for given in engine for text in _misread(specs[given.layer], given)])
    base = min(given.tensor.data_ptr() - _field_offset(given, specs) for given in engine)
    places = {given.layer: _placement(given, specs[given.layer], order, base) for given in engine}
    num_slabs = _num_slabs(groups, engine, counts)
    rows = tuple(
        PlacedGroup(
            group=group,
            rows_per_slab=count,
            placements=tuple(places[layer.name] for layer in group.layers),
        )
        for group, count in zip(groups, counts, strict=True)
    )
    footprints = [placed.footprint(num_slabs) for placed in rows]
    layout = Layout(
        model=model,
        order=order,
        groups=rows,
        num_slabs=num_slabs,
        nbytes=max(strip.hull.end for footprint in footprints for strip in footprint.strips),
        base_align=min(base & -base, MAX_BASE_ALIGN),
        tp=tp,
        pp=pp,
    )
    _check([*_order_contradictions(layout), *(_gaps(layout) if padding == "none" else [])])
    adopted(layout, tensors, axes=axes)
    return layout


def _impossible(groups: Sequence[Group], counts: Sequence[int], order: str) -> list[str]:
    """What no engine's memory can be."""
    wrong: list[str] = []
    if order not in ORDERS:
        wrong.append(f"{order!r} is no order\n\nhint: one of {ORDERS}")
    if len(counts) != len(groups):
        wrong.append(f"{len(groups)} groups, rows_per_slab has {len(counts)} numbers")
    wrong += [f"rows_per_slab {count} is not positive" for count in counts if count < 1]
    return wrong


def _check_covered(engine: Sequence[EngineTensor], specs: Mapping[str, LayerSpec]) -> None:
    named = {given.layer for given in engine}
    if named != set(specs):
        raise MemoryLayoutError(
            f"tensors for layers that no group has: {sorted(named - set(specs))[:8]}; layers "
            f"without a tensor: {sorted(set(specs) - named)[:8]}"
        )


def _field_offset(given: EngineTensor, specs: Mapping[str, LayerSpec]) -> int:
    """Where in a page in one piece the tensor starts."""
    if given.field is None:
        return 0
    spec = specs[given.layer]
    section = spec.section_offsets[spec.field(given.field).section]
    return section + spec.field_offsets[given.field]


def _placement(given: EngineTensor, spec: LayerSpec, order: Order, base: int) -> Page:
    """The address law's four numbers, from pointer and strides; canonical where a size is 1.

    Pages of several sections are in one piece: a tensor of them says nothing about the others.
    """
    head, token, block = given.axis("head"), given.axis("token"), given.axis("block")
    assert block is not None
    offset = given.tensor.data_ptr() - _field_offset(given, {spec.name: spec}) - base
    block_stride = block.stride if block.size > 1 else max(block.stride, spec.page_bytes)
    if len(spec.sections) > 1:
        return page_in_one_piece(spec, order, offset, block_stride)
    token_stride = token.stride if token and token.size > 1 else None
    head_stride = head.stride if head and head.size > 1 else None
    if order.index("H") < order.index("N"):
        token_stride = token_stride or spec.cell_bytes
        head_stride = head_stride or spec.states * token_stride
    else:
        head_stride = head_stride or spec.cell_bytes
        token_stride = token_stride or spec.heads.size * head_stride
    return (Placement(offset, block_stride, head_stride, token_stride),)


def _num_slabs(
    groups: Sequence[Group], engine: Sequence[EngineTensor], counts: Sequence[int]
) -> int:
    per_slab = {
        layer.name: count
        for group, count in zip(groups, counts, strict=True)
        for layer in group.layers
    }
    slabs: dict[str, int] = {}
    for given in engine:
        block = given.axis("block")
        assert block is not None
        if block.size % per_slab[given.layer]:
            raise MemoryLayoutError(
                f"{given.name}: {block.size} blocks are not whole slabs of {per_slab[given.layer]}"
            )
        slabs[given.name] = block.size // per_slab[given.layer]
    if len(set(slabs.values())) > 1:
        few, many = min(slabs, key=slabs.__getitem__), max(slabs, key=slabs.__getitem__)
        raise MemoryLayoutError(f"{few} has {slabs[few]} slabs, {many} has {slabs[many]}")
    return next(iter(slabs.values()))


def _order_contradictions(layout: Layout) -> list[str]:
    """Where the strides say another order than the caller."""
    wrong: list[str] = []
    for name, (group, spec, page) in layout.layers.items():
        sizes = {"B": layout.num_blocks(group), "H": spec.heads.size, "N": spec.states}
        place = page[0]
        strides = {"B": place.block_stride, "H": place.head_stride, "N": place.token_stride}
        letters = [letter for letter in layout.order if sizes.get(letter, 1) > 1]
        real = sorted(letters, key=lambda letter: -strides[letter])
        if real != letters:
            wrong.append(
                f"layer {name!r}: the order is said to be {layout.order}, the strides "
                f"{strides} say {''.join(real)}"
            )
    for rows, footprint in zip(layout.groups, layout.footprints, strict=True):
        if len(rows.group.layers) < 2 or layout.num_slabs * rows.rows_per_slab < 2:
            continue
        offsets = [page[0].offset for page in rows.placements]
        spread = max(offsets) - min(offsets)
        stride = min(page[0].block_stride for page in rows.placements)
        if layout.order.startswith("B") != (spread < stride and len(footprint.strips) == 1):
            wrong.append(
                f"group {footprint.name!r}: the order is said to be {layout.order}, its "
                f"layers are {spread} bytes apart, its blocks {stride}"
            )
    return wrong


def _gaps(layout: Layout) -> list[str]:
    """Groups whose rows have bytes that no page accounts for."""
    wrong: list[str] = []
    for g, rows in enumerate(layout.groups):
        pages = sum(
            run.nbytes
            for layer, place in zip(rows.group.layers, rows.placements, strict=True)
            for run in page_runs(layer, place)
        )
        if layout.row_bytes(g) != pages:
            wrong.append(
                f"group {rows.group.name!r}: rows of {layout.row_bytes(g)} bytes hold pages of "
                f"{pages}; what lies between them is unknown\n\n"
                f"hint: padding='ours' if nobody else uses it"
            )
    return wrong


# ── tensors against a layout ──────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class Adopted:
    """Memory that was found to hold a layout: its base, where it really is, what keeps it alive."""

    address: int
    regions: tuple[Run, ...]
    tensors: tuple[torch.Tensor, ...]


def adopted(layout: Layout, tensors: Tensors, *, axes: AxisNames) -> Adopted:
    """The memory of the tensors, if it holds the layout exactly."""
    engine = engine_tensors(tensors, axes)
    specs = {name: spec for name, (_, spec, _) in layout.layers.items()}
    _check_covered(engine, specs)
    _check([text for given in engine for text in _contradictions(layout, given)])
    bases = {
        given.tensor.data_ptr()
        - _field_offset(given, specs)
        - layout.layers[given.layer][2][0].offset
        for given in engine
    }
    if len(bases) > 1:
        low, high = min(bases), max(bases)
        raise MemoryLayoutError(
            f"tensors do not lie as the layout says: their bases are {low} and {high}, "
            f"{high - low} bytes apart"
        )
    base = bases.pop()
    if base % layout.base_align:
        raise MemoryLayoutError(
            f"memory starts at {base}, not at a multiple of {layout.base_align}"
        )
    _check(
        [
            text
            for g in range(len(layout.groups))
            for strip in layout.footprints[g].strips
            for text in _outside(strip, engine, base)
        ]
    )
    return Adopted(base, _regions(layout, engine), tuple(given.tensor for given in engine))


def _contradictions(layout: Layout, given: EngineTensor) -> list[str]:
    """How one tensor differs from what the layout says of it."""
    group, spec, page = layout.layers[given.layer]
    wrong = _misread(spec, given)
    inner = spec.field(given.field) if given.field else None
    unit = given.tensor.element_size()
    wanted = [Axis("block", layout.num_blocks(group), page[0].block_stride)]
    if inner is None and len(spec.sections) > 1:
        wanted += [Axis("content", spec.page_bytes // unit, unit)]
    else:
        spec, place = placed_sections(spec, page)[inner.section if inner else 0]
        wanted += [
            Axis("head", spec.heads.size, place.head_stride),
            Axis("token", spec.states, place.token_stride),
            *_inner_axes(spec, inner, unit),
        ]
    for axis in wanted:
        real = given.axis(axis.name) or Axis(axis.name, 1, axis.stride)
        if axis.name == "block" and real.size != axis.size:
            wrong.append(_other_size(given, real, axis.size))
        elif real.size == axis.size > 1 and real.stride != axis.stride:
            wrong.append(
                f"{given.name}: axis {axis.name!r} has a stride of {real.stride} bytes, "
                f"the layout {axis.stride}"
            )
    return wrong


def _misread(spec: LayerSpec, given: EngineTensor) -> list[str]:
    """What no layout of the layer can have: elements, names of axes, sizes inside a page."""
    inner = spec.field(given.field) if given.field else None
    dtypes = {torch.uint8, TORCH_TYPES[inner.dtype] if inner else page_type(spec)}
    if given.tensor.dtype not in dtypes:
        return [
            f"{given.name}: elements are {given.tensor.dtype}, the layout has "
            f"{' or '.join(sorted(map(str, dtypes)))}"
        ]
    unit = given.tensor.element_size()
    sizes = [("content", spec.page_bytes // unit)]
    if inner is not None or len(spec.sections) == 1:
        spec = spec.sections[inner.section if inner else 0]
        sizes = [("head", spec.heads.size), ("token", spec.states)]
        sizes += [(axis.name, axis.size) for axis in _inner_axes(spec, inner, unit)]
    known = ["block", *(name for name, _ in sizes)]
    wrong = [
        f"{given.name}: there is no axis {name!r} among {known}"
        for name in given.axes
        if name not in known
    ]
    for name, size in sizes:
        real = given.axis(name) or Axis(name, 1, 0)
        if real.size != size:
            wrong.append(_other_size(given, real, size))
    return wrong


def _other_size(given: EngineTensor, real: Axis, size: int) -> str:
    return f"{given.name}: axis {real.name!r} has {real.size} elements, the layout {size}"


def _inner_axes(spec: LayerSpec, field: Field | None, unit: int) -> list[Axis]:
    """Axes inside a cell, in elements of `unit` bytes: a field's own, or all of the content."""
    if field is None:
        return [Axis("content", spec.cell_bytes // unit, unit)]
    axes: list[Axis] = []
    stride = unit
    for extent in reversed(field.axes):
        nbytes = extent.size * (1 if axes else field.dtype.bits) // (1 if axes else 8)
        size = extent.size if axes else nbytes // unit
        axes.insert(0, Axis(extent.name, size, stride))
        stride *= size
    return axes


def _regions(layout: Layout, engine: Sequence[EngineTensor]) -> tuple[Run, ...]:
    """The fewest runs of real memory that hold all layers: one per allocation.

    Two tensors with one base are two tensors: the longer one decides.
    """
    hulls: dict[int, Run] = {}
    for given in engine:
        views = [layout.view(given.layer, section) for section in _sections(layout, given.layer)]
        storage = given.tensor.untyped_storage().data_ptr()
        low, high = min(view.offset for view in views), max(view.end for view in views)
        if storage in hulls:
            low, high = min(low, hulls[storage].offset), max(high, hulls[storage].end)
        hulls[storage] = Run(low, high - low)
    regions: list[Run] = []
    for run in sorted(hulls.values()):
        if regions and run.offset < regions[-1].end:
            low, high = regions[-1].offset, max(regions[-1].end, run.end)
            regions[-1] = Run(low, high - low)
        else:
            regions.append(run)
    return tuple(regions)


def _sections(layout: Layout, layer: str) -> range:
    return range(len(layout.layers[layer][1].sections))


def _outside(strip: Strip, engine: Sequence[EngineTensor], base: int) -> list[str]:
    """A strip that no allocation holds from end to end."""
    start, end = base + strip.hull.offset, base + strip.hull.end
    for given in engine:
        storage = given.tensor.untyped_storage()
        if storage.data_ptr() <= start and end <= storage.data_ptr() + storage.nbytes():
            return []
    return [
        f"no tensor's memory holds the {end - start} bytes at {start}: runs of {strip.nbytes} "
        f"bytes every {strip.stride}"
    ]


def _check(contradictions: Sequence[str]) -> None:
    """MemoryLayoutError that lists them, if there are any."""
    if contradictions:
        raise MemoryLayoutError("\n".join(contradictions))
