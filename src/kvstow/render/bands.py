"""A route as bands: every copy of one period of blocks, from its source to its destination.

Both sides are drawn as the blocks of one period, each block's bytes side by side however far
apart they are in the arena. A period is the tokens after which block boundaries of the two
sides meet again.

    rank 0  ┃ block 0 ┃ block 1 ┃  rank 1  ┃ block 0 ┃ block 1 ┃       source
             ┊┊┊        ┊┊┊               ┊┊┊       ┊┊┊
            ┃ block 0                     ┃                             destination
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstow.plan.layout import Layout, page_runs
from kvstow.plan.view import Ints
from kvstow.route.route import GroupPair, Route

RESOLUTION = 2000
"""Copies whose gaps on both sides are shorter than this part of the picture are one band."""

MAX_BANDS = 1500
"""Bands that are drawn of one pair of groups: more than that, and every second, third … is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRoute:
    """The route from one source rank; `name` is what the rank is called."""

    name: str
    route: Route


def group_records(routes: Sequence[NamedRoute], destination: Layout) -> list[dict[str, Any]]:
    """One record per destination group that anything is brought to."""
    found: list[dict[str, Any]] = []
    for g, rows in enumerate(destination.groups):
        pairs = [(way, pair) for way in routes for pair in way.route.pairs if pair.groups[1] == g]
        if pairs:
            found.append({"name": rows.group.name, **_record(pairs, destination, g)})
    return found


def _record(
    pairs: Sequence[tuple[NamedRoute, GroupPair]], destination: Layout, g: int
) -> dict[str, Any]:
    tokens = max(sum(lanes.tokens for lanes in c.period) for _, c in pairs)
    target = _Side(destination, g, -(-tokens // pairs[0][1].spans[1]))
    sources, bands = list[dict[str, Any]](), list[list[int]]()
    start = 0
    for way, pair in pairs:
        side = _Side(pair.layouts[0], pair.groups[0], -(-tokens // pair.spans[0]))
        bands += _bands(pair, side, target, len(sources), start)
        sources.append(
            {
                "name": way.name,
                "group": pair.source.name,
                "block_tokens": pair.source.block_tokens,
                "at": start,
                **side.record(),
            }
        )
        start += side.nbytes
    step = -(-len(bands) // MAX_BANDS)
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
    found: list[list[int]] = []
    near, far = source.nbytes // RESOLUTION, destination.nbytes // RESOLUTION
    token = 0
    for lanes in pair.period:
        s_block, d_block = token // pair.spans[0], token // pair.spans[1]
        s = source.places(lanes.copies.source, s_block) + start
        d = destination.places(lanes.copies.destination, d_block)
        columns = s.tolist(), d.tolist(), lanes.copies.nbytes.tolist()
        for here, there, nbytes in zip(*columns, strict=True):
            _add(found, [number, here, nbytes, there, nbytes, 1, nbytes], near, far)
        token += lanes.tokens
    return found


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
