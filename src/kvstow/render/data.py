"""Layouts, routes and simulations as the plain numbers that pages draw from.

Layouts: many of one model go into one page, so names and kinds of pages are listed once, in an
`Index`, and layouts refer to them by number. Everything else follows from the address law, which
the page applies itself.

Routes: bands, which are the copies of one period of blocks, from source to destination. Both
sides are drawn as the blocks of one period, each block's bytes side by side however far apart
they are in the arena. A period is the tokens after which block boundaries of both sides meet.

    rank 0  ┃ block 0 ┃ block 1 ┃  rank 1  ┃ block 0 ┃ block 1 ┃       source
             ┊┊┊        ┊┊┊               ┊┊┊       ┊┊┊
            ┃ block 0                     ┃                             destination

Simulations: curves over time, and the history of the slabs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvstow import __version__
from kvstow.plan.layout import Layout, Page, PlacedGroup, Placement, page_runs, placed_sections
from kvstow.plan.retention import in_words
from kvstow.plan.spec import LayerSpec
from kvstow.plan.view import Ints, ceil_div
from kvstow.render.page import page
from kvstow.route.route import GroupPair, Route

if TYPE_CHECKING:
    from kvstow.blocks.slabs import SlabMap
    from kvstow.simulate.replay import Replay, ReplaySample
    from kvstow.simulate.report import SimulationReport

RESOLUTION = 2000
"""Copies whose gaps on both sides are shorter than this part of the picture are one band."""

MAX_BANDS = 1500
"""Bands that are drawn of one pair of groups: more than that, and every second, third … is."""

MAX_SAMPLES = 1200
"""Points of a curve: of a longer simulation every second, third … is drawn."""


# ── layouts ─────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Index:
    """Layer names and kinds of pages, each numbered when it is first asked for."""

    names: dict[str, int] = field(default_factory=dict[str, int])
    kinds: dict[LayerSpec, int] = field(default_factory=dict[LayerSpec, int])
    _seen: dict[LayerSpec, int] = field(default_factory=dict[LayerSpec, int])

    def name(self, layer: LayerSpec) -> int:
        return self.names.setdefault(layer.name, len(self.names))

    def kind(self, layer: LayerSpec) -> int:
        """Layers that differ in nothing but their names have one kind."""
        if layer not in self._seen:
            self._seen[layer] = self.kinds.setdefault(replace(layer, name=""), len(self.kinds))
        return self._seen[layer]

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
    """One group. A section of a page is drawn like a page."""
    strips = layout.footprints[g].strips
    drawn = [
        part
        for layer, page in zip(rows.group.layers, rows.placements, strict=True)
        for part in _drawn_pages(layer, page)
    ]
    strides: dict[tuple[int, int, int], int] = {}
    stride_of = [
        strides.setdefault((p.block_stride, p.head_stride, p.token_stride), len(strides))
        for _, p in drawn
    ]
    return {
        "name": rows.group.name,
        "keeps": in_words(rows.group.retention),
        "block_tokens": rows.group.block_tokens,
        "rows_per_slab": rows.rows_per_slab,
        "row_bytes": layout.row_bytes(g),
        "row_stride": layout.row_stride(g),
        "row": [strips[0].offset, strips[0].nbytes, strips[0].stride] if len(strips) == 1 else None,
        "num_layers": len(rows.group.layers),
        "layers": [index.name(layer) for layer, _ in drawn],
        "kinds": [index.kind(layer) for layer, _ in drawn],
        "offsets": [place.offset for _, place in drawn],
        "strides": [list(each) for each in strides],
        "stride_of": stride_of,
    }


def _drawn_pages(layer: LayerSpec, page: Page) -> list[tuple[LayerSpec, Placement]]:
    """The sections of a layer's pages, each called by its fields; the page, if it is one."""
    parts = placed_sections(layer, page)
    if len(parts) == 1:
        return list(parts)
    return [
        (replace(part, name=f"{layer.name} {' '.join(each.name for each in part.fields)}"), at)
        for part, at in parts
    ]


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


# ── routes ──────────────────────────────────────────────────────────────────────────


def group_records(routes: Mapping[str, Route], destination: Layout) -> list[dict[str, Any]]:
    """One record per destination group that anything is brought to; `routes` are those from each
    source rank, by what the rank is called."""
    records: list[dict[str, Any]] = []
    for g, rows in enumerate(destination.groups):
        pairs = [
            (name, pair)
            for name, route in routes.items()
            for pair in route.pairs
            if pair.groups[1] == g
        ]
        if pairs:
            records.append({"name": rows.group.name, **_record(pairs, destination, g)})
    return records


def _record(pairs: Sequence[tuple[str, GroupPair]], destination: Layout, g: int) -> dict[str, Any]:
    tokens = max(sum(lanes.tokens for lanes in pair.period) for _, pair in pairs)
    target = _Side(destination, g, ceil_div(tokens, pairs[0][1].spans[1]))
    sources, bands = list[dict[str, Any]](), list[list[int]]()
    start = 0
    for name, pair in pairs:
        side = _Side(pair.layouts[0], pair.groups[0], ceil_div(tokens, pair.spans[0]))
        bands += _bands(pair, side, target, len(sources), start)
        sources.append(
            {
                "name": name,
                "group": pair.source.name,
                "block_tokens": pair.source.block_tokens,
                "at": start,
                **side.record(),
            }
        )
        start += side.nbytes
    step = ceil_div(len(bands), MAX_BANDS)
    return {
        "tokens": tokens,
        "block_tokens": destination.groups[g].group.block_tokens,
        "source_bytes": start,
        "sources": sources,
        "destination": target.record(),
        "copies": sum(band[5] for band in bands),
        "bands": bands[:: max(1, step)],
        "every": max(1, step),
    }


class _Side:
    """The blocks of one period of one group, bytes of each side by side."""

    def __init__(self, layout: Layout, group: int, num_blocks: int) -> None:
        self.layout, self.group, self.num_blocks = layout, group, num_blocks
        strips = sorted(layout.footprints[group].strips, key=lambda strip: strip.offset)
        self.offsets = np.array([strip.offset for strip in strips], np.int64)
        self.starts = np.cumsum([0, *(strip.nbytes for strip in strips)])[:-1].astype(np.int64)
        self.block_bytes = sum(strip.nbytes for strip in strips)

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def places(self, offsets: Ints, block: int) -> Ints:
        """Where bytes of block 0 are drawn, were it the block of that number."""
        strip = np.searchsorted(self.offsets, offsets, side="right") - 1
        return self.starts[strip] + offsets - self.offsets[strip] + block * self.block_bytes

    def record(self) -> dict[str, Any]:
        """The pieces of one block, `[place, nbytes, layer]`, and how many blocks there are."""
        rows = self.layout.groups[self.group]
        pieces = [
            (run, layer.name)
            for layer, place in zip(rows.group.layers, rows.placements, strict=True)
            for run in page_runs(layer, place)
        ]
        pieces.sort(key=lambda pair: pair[0])
        places = self.places(np.array([run.offset for run, _ in pieces], np.int64), 0)
        return {
            "order": self.layout.order,
            "num_blocks": self.num_blocks,
            "block_bytes": self.block_bytes,
            "pieces": [
                [int(place), run.nbytes, name]
                for place, (run, name) in zip(places, pieces, strict=True)
            ],
        }


def _bands(
    pair: GroupPair, source: _Side, destination: _Side, number: int, start: int
) -> list[list[int]]:
    """`[route, source place, its bytes, destination place, its bytes, copies, bytes copied]`."""
    bands: list[list[int]] = []
    near, far = source.nbytes // RESOLUTION, destination.nbytes // RESOLUTION
    token = 0
    for lanes in pair.period:
        s_block, d_block = token // pair.spans[0], token // pair.spans[1]
        s = source.places(lanes.copies.source, s_block) + start
        d = destination.places(lanes.copies.destination, d_block)
        columns = s.tolist(), d.tolist(), lanes.copies.nbytes.tolist()
        for here, there, nbytes in zip(*columns, strict=True):
            _add(bands, [number, here, nbytes, there, nbytes, 1, nbytes], near, far)
        token += lanes.tokens
    return bands


def _add(bands: list[list[int]], band: list[int], near: int, far: int) -> None:
    """Lengthen the last band by this one where no eye could tell them apart."""
    if bands and bands[-1][0] == band[0]:
        last = bands[-1]
        gap, other = band[1] - last[1] - last[2], band[3] - last[3] - last[4]
        if 0 <= gap <= near and 0 <= other <= far:
            last[2] += gap + band[2]
            last[4] += other + band[4]
            last[5] += 1
            last[6] += band[6]
            return
    bands.append(band)


# ── simulations ─────────────────────────────────────────────────────────────────────


MAX_MOMENTS = 240


class SlabMoment(NamedTuple):
    """One moment: the slabs, and what of all prompts so far was found cached."""

    seconds: float
    slabs: "SlabMap"
    hit_rate: float


class SlabHistory:
    """Who owned which slab of a pool: moments, evenly spread over a time whose end nobody knows
    beforehand."""

    def __init__(self) -> None:
        self.moments: list[SlabMoment] = []
        self._every = 1
        self._seen = 0

    def see(self, replay: "Replay") -> None:
        """Remember the moment, if it is time for one."""
        if self._seen % self._every == 0:
            hit_rate = replay.record.hit_tokens / max(1, replay.record.prompt_tokens)
            slabs = replay.ledger.pool.slab_map()
            self.moments.append(SlabMoment(replay.seconds, slabs, hit_rate))
        self._seen += 1
        if len(self.moments) > MAX_MOMENTS:
            self.moments = self.moments[::2]
            self._every *= 2

    def record(self) -> dict[str, Any]:
        """What a page draws from."""
        first = self.moments[0].slabs if self.moments else None
        return {
            "groups": list(first.groups) if first else [],
            "num_slabs": first.num_slabs if first else 0,
            "step": first.step if first else 1,
            "seconds": [round(moment.seconds, 3) for moment in self.moments],
            "slabs": [moment.slabs.letters for moment in self.moments],
            "hit_rate": [round(moment.hit_rate, 5) for moment in self.moments],
        }


def simulation_page(
    report: "SimulationReport",
    histories: Mapping[str, SlabHistory],
    *,
    about: Mapping[str, Any],
) -> str:
    """The page: one curve and one history of the slabs per policy.

    `about` has what the header tells: `requests`, `arena_bytes`, `seed`, `step` and `command`.
    """
    data = {
        "kvstow": __version__,
        "model": report.model,
        "trace": report.trace,
        **about,
        "lines": report.lines(),
        "policies": {
            name: {
                "figures": replay.as_json(),
                "curves": _curves(replay.samples),
                "history": histories[name].record(),
            }
            for name, replay in report.policies.items()
        },
    }
    title = f"{report.model}: {report.trace} simulated"
    return page(title, data, ("slabmap.js", "simulate.js"))


def _curves(samples: "Sequence[ReplaySample]") -> dict[str, Any]:
    """Columns of numbers, by name; parts are of the bytes in use."""
    some = samples[:: max(1, ceil_div(len(samples), MAX_SAMPLES))]
    return {
        "seconds": [round(sample.seconds, 3) for sample in some],
        "requests": [sample.requests for sample in some],
        "waiting": [sample.waiting for sample in some],
        "in_use": [round(sample.waste.in_use) for sample in some],
        "cached": [sample.cached_bytes for sample in some],
        **{
            part: [_share(getattr(sample.waste, part), sample.waste.in_use) for sample in some]
            for part in ("padding", "fragmentation", "rounding")
        },
    }


def _share(part: float, whole: float) -> float:
    return round(part / whole, 5) if whole else 0.0
