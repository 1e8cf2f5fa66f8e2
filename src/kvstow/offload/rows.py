"""A row outside an arena: its layout, and how its bytes map to a block's.

Where a block is one run of bytes, its row is that run: arena row, host row and disk row are equal.
Where it is not, the row is the packed row of the same layers, and a route joins the two.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from math import lcm

import numpy as np
import numpy.typing as npt

from kvstow.errors import RouteError, StoreError
from kvstow.plan.layout import NULL_SLABS, Layout, Order, Page, PlacedGroup, moved, page_runs
from kvstow.plan.pack import Site, row_shape
from kvstow.plan.retention import Encoder, State
from kvstow.plan.slab import slab_geometry
from kvstow.plan.view import Ints, align_up
from kvstow.route.blocks import Blocks
from kvstow.route.copies import Copies
from kvstow.route.route import Route, plan_route

Bytes = npt.NDArray[np.uint8]

ROW_ALIGN = 256

_PACKED: dict[Order, Order] = {"LBHNC": "BLHNC", "LHBNC": "BLHNC", "LBNHC": "BLNHC"}


def row_layout(layout: Layout) -> Layout:
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
    whole = row_layout(layout)
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
    whole = row_layout(layout)
    groups = range(len(whole.groups))
    geometry = slab_geometry(
        [whole.row_bytes(g) for g in groups],
        [_step(rows) for rows in whole.groups],
        pool_bytes=budget,
    )
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


def check_same_rows(ours: Layout, tier: str, there: Layout) -> None:
    """Refuses a tier whose rows are of another computation, or not, group by group, the same bytes
    as ours: equal lengths do not say that, since another order of the same layers has them too."""
    above, below = ours.identity, there.identity
    if above is not None and below is not None and (unlike := below.differences(above)):
        raise StoreError(
            f"tier {tier!r} keeps rows of another computation than the tier above it:\n"
            + "\n".join(unlike)
        )
    for g, rows in enumerate(ours.groups):
        if g >= len(there.groups) or not same_rows(ours, g, there, g):
            raise StoreError(
                f"tier {tier!r} keeps other rows in group {rows.group.name!r} than the tier above "
                f"it: order {there.order}, above {ours.order}\n\n"
                "hint: make the tier above for the layout of this one: HostTier(tier.layout, …)"
            )


def _relative(rows: PlacedGroup) -> tuple[Page, ...]:
    """Where the pages are from the start of the row, whatever the distance between rows."""
    start = min(page[0].offset for page in rows.placements)
    return tuple(moved(page, -start, 0) for page in rows.placements)


def _placed(layout: Layout, group: int) -> tuple[Page, ...]:
    rows = layout.groups[group]
    if len(layout.footprints[group].strips) == 1:
        return _relative(rows)
    order = _PACKED.get(layout.order, layout.order)
    return row_shape(rows.group, Site(order=order)).places


def _step(rows: PlacedGroup) -> int:
    """What block strides must be multiples of."""
    return lcm(ROW_ALIGN, *(lcm(layer.align, layer.unit) for layer in rows.group.layers))


def _extent(rows: PlacedGroup) -> int:
    """Bytes from the start of block 0's first page to the end of its last."""
    return max(
        max(page[0].offset + layer.page_bytes, *(run.end for run in page_runs(layer, page)))
        for layer, page in zip(rows.group.layers, rows.placements, strict=True)
    )


def _strided(rows: PlacedGroup, stride: int) -> PlacedGroup:
    return replace(rows, placements=tuple(moved(page, 0, stride) for page in rows.placements))


class RowMapping:
    """Blocks of a group of one layout, and rows of the group of the same layers of another."""

    def __init__(self, here: Layout, group: int, there: Layout) -> None:
        self.there_group = matching_group(here, group, there)
        self._here, self._group, self._there = here, group, there
        self._routes: tuple[Route, Route] | None = None
        if not same_rows(here, group, there, self.there_group):
            one, other = only(here, group), only(there, self.there_group)
            self._routes = plan_route(one, other), plan_route(other, one)

    def out(self, ids: Ints, there_ids: Ints) -> Copies:
        """The copies that bring blocks `ids` to the rows `there_ids`."""
        if self._routes is None:
            return self._direct(ids, there_ids)
        return self._routed(self._routes[0], ids, there_ids)

    def back(self, there_ids: Ints, ids: Ints) -> Copies:
        """The copies that bring rows `there_ids` to the blocks `ids`."""
        if self._routes is None:
            copies = self._direct(ids, there_ids)
            return Copies(copies.destination, copies.source, copies.nbytes)
        return self._routed(self._routes[1], there_ids, ids)

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """The bytes `[start, end)` of a row of the other layout that are a block's, ascending."""
        here, there = (
            np.array([NULL_SLABS * layout.groups[g].rows_per_slab])
            for layout, g in ((self._here, self._group), (self._there, self.there_group))
        )
        copies = self.out(here, there)
        first = copies.destination - starts(self._there, self.there_group, there)
        return tuple(sorted(zip(first.tolist(), (first + copies.nbytes).tolist(), strict=True)))

    def _direct(self, ids: Ints, there_ids: Ints) -> Copies:
        nbytes = np.full(len(ids), self._here.row_bytes(self._group))
        here = starts(self._here, self._group, ids)
        return Copies(here, starts(self._there, self.there_group, there_ids), nbytes)

    def _routed(self, way: Route, source: Ints, destination: Ints) -> Copies:
        """Rows as if they were one request's blocks, one after the other; a summary or an
        encoding is a request of its own."""
        if not len(source):
            return Copies.none()
        group = self._here.groups[self._group].group
        step = 1 if isinstance(group.retention, State | Encoder) else len(source)
        parts: list[Copies] = []
        for lo in range(0, len(source), step):
            part: tuple[Mapping[int, Blocks], ...] = tuple(
                {0: Blocks.first(side[lo : lo + step])} for side in (source, destination)
            )
            tokens = len(source[lo : lo + step]) * group.block_tokens
            parts.append(way.copies(part[0], part[1], tokens))
        columns = [(copies.source, copies.destination, copies.nbytes) for copies in parts]
        return Copies(*(np.concatenate(column) for column in zip(*columns, strict=True)))


def starts(layout: Layout, group: int, ids: Ints) -> Ints:
    """Where rows begin, in a group whose blocks are single runs."""
    strip = layout.footprints[group].strips[0]
    return strip.offset + ids * strip.stride


def views(memory: Bytes, layout: Layout, group: int, ids: Ints) -> list[Bytes]:
    """The bytes of rows in memory that the layout shapes, in place."""
    nbytes = layout.row_bytes(group)
    return [memory[at : at + nbytes] for at in starts(layout, group, ids).tolist()]


def matching_group(ours: Layout, group: int, there: Layout) -> int:
    """The group of `theirs` that has the same layers and tokens per block as ours.

    Refuses groups that differ, with what differs.
    """
    own = ours.groups[group].group
    names = [layer.name for layer in own.layers]
    for g, rows in enumerate(there.groups):
        if [layer.name for layer in rows.group.layers] != names:
            continue
        if rows.group.block_tokens != own.block_tokens:
            raise StoreError(
                f"group {own.name!r} has {own.block_tokens} tokens per block, the store "
                f"{rows.group.block_tokens}\n\nhint: "
                "convert the store (kvstow store convert)"
            )
        if rows.group.layers != own.layers:
            raise StoreError(
                f"group {own.name!r} holds another part of its layers than the store does\n\n"
                "hint: convert the stores of all ranks into one (kvstow store convert)"
            )
        return g
    raise StoreError(
        f"no group of the store has the {len(names)} layers of group {own.name!r}\n\n"
        "hint: convert the store (kvstow store convert)"
    )


def check_joinable(ours: Layout, there: Layout) -> None:
    """Refuses layouts that no route can join, with every difference."""
    try:
        plan_route(there, ours)
    except RouteError as error:
        raise StoreError(
            f"the store holds rows of another model or element type:\n{error}\n\n"
            "hint: give this layout a directory of its own"
        ) from error
