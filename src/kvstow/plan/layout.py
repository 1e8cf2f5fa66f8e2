"""Layout: where every byte of every block lies. Numbers only, no addresses, no memory.

    address of (layer l, block b, head h, state n) in bytes from the arena's base
        = offset[l] + b · block_stride[l] + h · head_stride[l] + n · token_stride[l]

(of each section of a page; all sections of a page have one block stride).

Packed, separate, cross-layer, shared columns are different numbers in this one law:

    BLHNC  ┃ row 0: L0 L1 L2 ┃ row 1: L0 L1 L2 ┃        one run per block
    LBHNC  ┃ L0: 0 1 2 … ┃ L1: 0 1 2 … ┃                one run per block and layer

Groups take turns owning slabs: block `b` of group `g` lies in slab
`b // rows_per_slab[g]`, and slab 0 is nobody's: block 0 of every group is the null row.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, Protocol, get_args

import numpy as np

from kvstow.errors import BlockError, LayoutError, PlanError, SpecError
from kvstow.plan.group import Group
from kvstow.plan.identity import Identity
from kvstow.plan.sharing import Footprint, Strip, overlapping, sharing_sets, sharing_violations
from kvstow.plan.spec import LayerSpec
from kvstow.plan.view import Axis, Ints, Run, View, joined

Order = Literal["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
ORDERS: tuple[Order, ...] = get_args(Order)
PAGE_ORDERS: dict[str, Order] = {"HND": "BLHNC", "NHD": "BLNHC"}
"""What engines call the order inside a page: heads outside tokens, and tokens outside heads."""

NULL_SLABS = 1
"""Slabs that no group ever owns; block 0 of every group lies in one."""


MAX_LAYERS = 4096

MAX_ALL_PIECES = 1 << 17
"""Pieces that the pages of one block may be in altogether: checking takes a second then."""


def parse_order(value: str) -> Order:
    """The order that `"BLHNC"`, `"blhnc"` or `"HND"` is."""
    text = value.upper() if isinstance(value, str) else ""  # pyright: ignore[reportUnnecessaryIsInstance]
    if text in ORDERS:
        return text
    if text not in PAGE_ORDERS:
        raise PlanError(
            f"order {value!r} is none of {', '.join(ORDERS)}, HND and NHD"
            "\n\nhint: the letters are Layer Block Head tokeN Content, outermost first"
        )
    return PAGE_ORDERS[text]


@dataclass(frozen=True, slots=True)
class Placement:
    """The four numbers of one section of a layer's pages in the address law."""

    offset: int
    block_stride: int
    head_stride: int
    token_stride: int


Page = tuple[Placement, ...]
"""Where the pages of a layer lie: each section of them, all with one block stride."""


def moved(page: Page, by: int, block_stride: int) -> Page:
    """The same page, so many bytes further, with another stride from block to block."""
    return tuple(
        replace(place, offset=place.offset + by, block_stride=block_stride) for place in page
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageSet:
    """Layers of a group whose pages, or one section of them, differ only in where they start.

    `spec` and `place` are the first layer's, of that section; block `b` of `layers[i]` starts
    at `offsets[i] + b · place.block_stride`.
    """

    spec: LayerSpec
    place: Placement
    layers: tuple[str, ...]
    offsets: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedGroup:
    """A group, placed: `placements[i]` belongs to `group.layers[i]`."""

    group: Group
    rows_per_slab: int
    placements: tuple[Page, ...]

    def footprint(self, num_slabs: int) -> Footprint:
        """The strips that the group's blocks are made of.

        When all pages move with one stride and fit inside it, the block is a row: one
        strip, padding between its pages included. Otherwise each contiguous piece is one.
        """
        count = num_slabs * self.rows_per_slab
        pieces = [
            (run, page[0].block_stride)
            for layer, page in zip(self.group.layers, self.placements, strict=True)
            for run in page_runs(layer, page)
        ]
        strides = {stride for _, stride in pieces}
        start = min(run.offset for run, _ in pieces)
        nbytes = max(run.end for run, _ in pieces) - start
        if len(strides) == 1 and (nbytes <= min(strides) or count == 1):
            strips = (Strip(start, nbytes, min(strides), count),)
        else:
            strips = tuple(
                Strip(run.offset, run.nbytes, stride, count)
                for stride in sorted(strides)
                for run in joined(run for run, s in pieces if s == stride)
            )
        return Footprint(self.group.name, strips, self.rows_per_slab)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Groups placed in one arena of `nbytes`. A layout that breaks a law cannot be built.

    `tp` and `pp` are `(rank, size)`; what a rank holds is in the specs themselves.
    `identity` says which computation fills it; a plan has none, what moves or keeps
    bytes requires one.
    """

    model: str
    order: Order
    groups: tuple[PlacedGroup, ...]
    num_slabs: int
    nbytes: int
    base_align: int = 1
    tp: tuple[int, int] = (0, 1)
    pp: tuple[int, int] = (0, 1)
    identity: Identity | None = None

    def __post_init__(self) -> None:
        violations = self.violations()
        if violations:
            raise LayoutError(violations)

    def identified(self, identity: Identity) -> "Layout":
        """The same layout, filled by this computation."""
        return replace(self, identity=identity)

    # ── where things are ──────────────────────────────────────────────────────────

    @cached_property
    def layers(self) -> dict[str, tuple[int, LayerSpec, Page]]:
        """Every layer by name: its group's index, its spec, its place."""
        return {
            layer.name: (g, layer, page)
            for g, rows in enumerate(self.groups)
            for layer, page in zip(rows.group.layers, rows.placements, strict=True)
        }

    def _layer(self, layer: str) -> tuple[int, LayerSpec, Page]:
        try:
            return self.layers[layer]
        except KeyError:
            raise SpecError(
                f"no layer {layer!r} in the layout of {self.model!r}\n\n"
                f"hint: its layers have names like {next(iter(self.layers))!r}"
            ) from None

    def group_index(self, name: str) -> int:
        """The index of the group of that name."""
        for g, rows in enumerate(self.groups):
            if rows.group.name == name:
                return g
        raise SpecError(f"no group {name!r} among {[r.group.name for r in self.groups]}")

    def num_blocks(self, group: int) -> int:
        """Block ids of a group, those in the null slab included."""
        return self.num_slabs * self.groups[group].rows_per_slab

    def view(self, layer: str, section: int | None = None) -> View:
        """All pages of a layer, or a section of them: axes block, head, token, content.

        The content axis counts elements when the layer's fields have one element type,
        bytes otherwise. A page of several sections has no such view as a whole: `page` has it
        as bytes.
        """
        group, spec, page = self._layer(layer)
        if section is None and len(spec.sections) > 1:
            raise SpecError(
                f"layer {layer!r}: its pages have {len(spec.sections)} sections, with strides of "
                "their own\n\nhint: view(layer, section=0), field(layer, name) or page(layer)"
            )
        if not 0 <= (section or 0) < len(spec.sections):
            raise SpecError(f"layer {layer!r}: no section {section} among {len(spec.sections)}")
        part = spec.sections[section or 0]
        units = {field.dtype.unit for field in part.fields}
        unit = units.pop() if len(units) == 1 else 1
        place = page[section or 0]
        content = Axis("content", part.cell_bytes // unit, unit)
        axes = (*cell_axes(part, place, self.num_blocks(group)), content)
        return View(offset=place.offset, axes=axes, unit=unit)

    def field(self, layer: str, name: str) -> View:
        """One field of a layer: axes block, head, token, then the field's own.

        4-bit elements are counted in bytes, two elements each, on the last axis.
        """
        group, spec, page = self._layer(layer)
        field = spec.field(name)
        place = page[field.section]
        axes: list[Axis] = []
        stride = field.dtype.unit
        for extent in reversed(field.axes):
            size = extent.size if axes else extent.size // field.dtype.per_unit
            axes.insert(0, Axis(extent.name, size, stride))
            stride *= size
        return View(
            offset=place.offset + spec.field_offsets[name],
            axes=(*cell_axes(spec, place, self.num_blocks(group)), *axes),
            unit=field.dtype.unit,
        )

    def page(self, layer: str) -> View:
        """All pages of a layer as bytes, padding included: axes block, content.

        What a kernel takes that finds the sections of a page by itself.
        """
        group, spec, page = self._layer(layer)
        first, *others = page_runs(spec, page)
        if others:
            raise SpecError(
                f"layer {layer!r}: a page in {1 + len(others)} pieces is no run of bytes"
            )
        blocks = Axis("block", self.num_blocks(group), page[0].block_stride)
        content = Axis("content", first.nbytes, 1)
        return View(offset=page[0].offset, axes=(blocks, content), unit=1)

    # ── what belongs together ─────────────────────────────────────────────────────

    @cached_property
    def page_sets(self) -> tuple[tuple[PageSet, ...], ...]:
        """Per group, its layers' pages section by section, those of one geometry together."""
        return tuple(_page_sets(rows) for rows in self.groups)

    @cached_property
    def footprints(self) -> tuple[Footprint, ...]:
        """Per group, the strips its blocks are made of."""
        return tuple(rows.footprint(self.num_slabs) for rows in self.groups)

    @cached_property
    def sharing(self) -> tuple[tuple[int, ...], ...]:
        """Sets of groups that pass slabs around; a group alone keeps all of its own."""
        return sharing_sets(self.footprints)

    def _footprint(self, group: int) -> Footprint:
        try:
            return self.footprints[group]
        except (IndexError, TypeError):
            names = [rows.group.name for rows in self.groups]
            raise SpecError(
                f"no group {group!r}: the layout has {len(names)}, {names}\n\n"
                f"hint: a group is named by its number, such as group_index({names[0]!r})"
            ) from None

    def runs(self, group: int, block: int) -> tuple[Run, ...]:
        """The bytes of one block, as the fewest runs: one where blocks are rows."""
        strips = self._footprint(group).strips
        if not 0 <= block < self.num_blocks(group):
            raise BlockError(
                f"group {self.groups[group].group.name!r}: no block {block} among "
                f"{self.num_blocks(group)}, which count from 0"
            )
        return tuple(Run(strip.offset + block * strip.stride, strip.nbytes) for strip in strips)

    def row_bytes(self, group: int) -> int:
        """Bytes of one block, padding between its pages included."""
        return sum(strip.nbytes for strip in self._footprint(group).strips)

    def row_stride(self, group: int) -> int:
        """Bytes from one block to the next, over all strips."""
        return sum(strip.stride for strip in self._footprint(group).strips)

    @property
    def slab_bytes(self) -> int:
        return self.nbytes // self.num_slabs

    # ── the laws ──────────────────────────────────────────────────────────────────

    def violations(self) -> tuple[str, ...]:
        """Every broken law, in words; empty for a layout that may be used."""
        for laws in (self._broken_counts, self._broken_pages, self._broken_blocks):
            broken = tuple(laws())
            if broken:
                return broken
        return ()

    def _broken_counts(self) -> Iterator[str]:
        if self.order not in ORDERS:
            yield f"order: {self.order!r} is none of {', '.join(ORDERS)}"
        names = [layer.name for rows in self.groups for layer in rows.group.layers]
        if len(names) > MAX_LAYERS:
            yield f"size: {len(names)} layers, at most {MAX_LAYERS}"
        if not names or len(set(names)) < len(names):
            yield f"coverage: {len(names)} layers, {len(set(names))} different names"
        if len({rows.group.name for rows in self.groups}) < len(self.groups):
            yield "coverage: two groups have one name"
        for (rank, size), what in ((self.tp, "tp"), (self.pp, "pp")):
            if not 0 <= rank < size:
                yield f"coverage: {what} rank {rank} of {size}"
        for rows in self.groups:
            where, layers, places = rows.group.name, len(rows.group.layers), len(rows.placements)
            if places != layers:
                yield f"coverage: group {where!r}: {layers} layers, {places} placements"
            if rows.rows_per_slab < 1:
                yield f"slab: group {where!r}: {rows.rows_per_slab} rows per slab"
        if self.num_slabs < 1 or self.base_align < 1:
            yield f"slab: {self.num_slabs} slabs, base aligned to {self.base_align}"

    def _broken_pages(self) -> Iterator[str]:
        """Of block 0 of every group."""
        pages = [(layer, page) for _, layer, page in self.layers.values()]
        total = sum(strip.count for each in pages for strip in _strips(*each))
        if total > MAX_ALL_PIECES:
            yield f"order: {total} pieces in all, at most {MAX_ALL_PIECES}"
            return
        for rows in self.groups:
            pages = list(zip(rows.group.layers, rows.placements, strict=True))
            broken = [text for page in pages for text in self._broken_page(*page)]
            ends = [strip.hull.end for page in pages for strip in _strips(*page)]
            if not broken and (end := max(ends)) > self.nbytes:
                broken = [
                    f"bounds: group {rows.group.name!r}: block 0 ends at {end}, not inside the "
                    f"arena of {self.nbytes}"
                ]
            yield from broken
            if broken:
                continue
            for a, b in overlapping([run for page in pages for run in page_runs(*page)]):
                yield (
                    f"sharing: group {rows.group.name!r}: pages at {a.offset} (+{a.nbytes}) and "
                    f"{b.offset} (+{b.nbytes}) overlap in block 0"
                )

    def _broken_page(self, spec: LayerSpec, page: Page) -> Iterator[str]:
        """Alignment, nesting, axes not in the stated order."""
        layer = f"layer {spec.name!r}"
        if len(spec.sections) != len(page):
            yield (
                f"coverage: {layer}: its pages have {len(spec.sections)} sections, "
                f"{len(page)} are placed"
            )
            return
        for number, (part, place) in enumerate(placed_sections(spec, page)):
            where = layer + (f", section {number}" if page[1:] else "")
            yield from _misplaced(where, part, place, self.order)
            if place.block_stride < 1 or place.block_stride != page[0].block_stride:
                yield f"order: {where}: block stride {place.block_stride}"
        for what, value in (("offset", page[0].offset), ("block stride", page[0].block_stride)):
            if value % spec.align:
                yield f"alignment: {layer}: {what} {value} is not a multiple of {spec.align}"
        if self.base_align % spec.unit:
            yield f"alignment: {layer}: base aligned to {self.base_align}, elements to {spec.unit}"

    def _broken_blocks(self) -> Iterator[str]:
        for footprint in self.footprints:
            for strip in footprint.strips:
                if strip.hull.offset < 0 or strip.hull.end > self.nbytes:
                    yield (
                        f"bounds: group {footprint.name!r}: bytes [{strip.hull.offset}, "
                        f"{strip.hull.end}) are not inside the arena of {self.nbytes}"
                    )
        yield from sharing_violations(self.footprints, self.num_slabs)


class Planned(Protocol):
    """What has a layout: a plan, of the rank that was asked for."""

    @property
    def layout(self) -> Layout: ...


def as_layout(planned: Layout | Planned) -> Layout:
    """A layout as it is, or a plan's. SpecError for anything else."""
    layout = planned if isinstance(planned, Layout) else getattr(planned, "layout", None)
    if not isinstance(layout, Layout):
        raise SpecError(
            f"expected a Layout or a Plan, got {type(planned).__name__}\n\n"
            "hint: kvstow.plan_model('llama-3.1-8b', memory='20GiB')"
        )
    return layout


def cell_axes(spec: LayerSpec, place: Placement, num_blocks: int) -> tuple[Axis, Axis, Axis]:
    """Block, head and token axes of a placed section of a layer."""
    return (
        Axis("block", num_blocks, place.block_stride),
        Axis("head", spec.heads.size, place.head_stride),
        Axis("token", spec.states, place.token_stride),
    )


def placed_sections(spec: LayerSpec, page: Page) -> tuple[tuple[LayerSpec, Placement], ...]:
    """The sections of a layer's pages, each as a layer of its own with its place."""
    return tuple(zip(spec.sections, page, strict=True))


def _page_sets(rows: PlacedGroup) -> tuple[PageSet, ...]:
    alike: dict[object, list[tuple[LayerSpec, Placement]]] = {}
    for layer, page in zip(rows.group.layers, rows.placements, strict=True):
        for spec, place in placed_sections(layer, page):
            key = spec.heads, spec.fields, spec.states, replace(place, offset=0)
            alike.setdefault(key, []).append((spec, place))
    return tuple(
        PageSet(
            spec=members[0][0],
            place=members[0][1],
            layers=tuple(spec.name for spec, _ in members),
            offsets=np.array([place.offset for _, place in members], np.int64),
        )
        for members in alike.values()
    )


@lru_cache(maxsize=1024)
def page_runs(spec: LayerSpec, page: Page) -> tuple[Run, ...]:
    """The bytes of the page in block 0. A page in one piece includes its final padding."""
    strips = _strips(spec, page)
    starts = [page[0].offset + start for start in spec.section_offsets]
    if [strip.offset for strip in strips if strip.count == 1] == starts:
        return (Run(page[0].offset, spec.page_bytes),)
    return joined(
        Run(strip.offset + i * strip.stride, strip.nbytes)
        for strip in strips
        for i in range(strip.count)
    )


def _strips(spec: LayerSpec, page: Page) -> list[Strip]:
    """The sections of the page in block 0: pieces over the axis that is not dense, if one is."""
    strips: list[Strip] = []
    for part, place in zip(spec.sections, page, strict=False):  # before it is known to be lawful
        nbytes, stride, count = part.cell_bytes, 1, 1
        for axis in sorted(cell_axes(part, place, 1)[1:], key=lambda axis: axis.stride):
            if count == 1 and axis.stride == nbytes:
                nbytes *= axis.size
            elif axis.size > 1:
                stride, count = axis.stride, count * axis.size
        strips.append(Strip(place.offset, nbytes, stride, count))
    return strips


def nested(spec: LayerSpec, place: Placement, order: Order) -> tuple[Axis, Axis]:
    """The two axes of a section's cells in a block, the outer one first, as the order says."""
    _, head, token = cell_axes(spec, place, 1)
    return (head, token) if order.index("H") < order.index("N") else (token, head)


def _misplaced(where: str, spec: LayerSpec, place: Placement, order: Order) -> Iterator[str]:
    """What is wrong with the place of one section."""
    for what, value in (
        ("offset", place.offset),
        ("block stride", place.block_stride),
        ("head stride", place.head_stride),
        ("token stride", place.token_stride),
    ):
        if value < 0 or value % spec.unit:
            yield f"alignment: {where}: {what} {value} is not a multiple of {spec.unit}"
    outer, inner = nested(spec, place, order)
    cells = inner.size * spec.cell_bytes
    if inner.size > 1 and inner.stride != spec.cell_bytes:
        yield (
            f"order: {where}: {inner.name} stride {inner.stride} is not the {spec.cell_bytes} "
            f"bytes of a cell, innermost in {order}"
        )
    if outer.size > 1 and outer.stride < cells:
        yield (
            f"order: {where}: {outer.name} stride {outer.stride} is below the {cells} bytes "
            "inside it"
        )
