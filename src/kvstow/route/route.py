"""Route: how bytes of one layout reach their places in another.

Compiled once per pair of peers, in a time that does not depend on the number of blocks:

    Layout × Layout ─▶ Route ─▶ per pair of groups: what both hold of each layer
                          │
      blocks of a request └───▶ grids(…): pairs of blocks, and the copies of each pair
                          └───▶ copies(…): the same written out: byte offsets on both sides, lengths
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import product
from math import lcm

import numpy as np

from kvstow.errors import RouteError
from kvstow.plan.group import Group
from kvstow.plan.layout import Layout, Planned, as_layout
from kvstow.plan.retention import Bools
from kvstow.plan.view import ceil_div
from kvstow.route.blocks import (
    Blocks,
    Overlap,
    Tokens,
    block_pairs,
    block_span,
    check_held,
    check_ids,
    cut_tokens,
)
from kvstow.route.compare import differences
from kvstow.route.copies import Copies
from kvstow.route.lanes import Grid, Lanes, LayerSet, Rows, lanes
from kvstow.route.overlap import Box, shared

Claims = Mapping[str, Mapping[str, Sequence[Box]]]
"""By layer and field, the parts that a route is to carry."""

MOST_KINDS = 256
"""Kinds of block pairs whose lanes are kept."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupPair:
    """Two groups that have layers in common, one on each side."""

    layouts: tuple[Layout, Layout]
    groups: tuple[int, int]
    layer_sets: tuple[LayerSet, ...]

    @property
    def source(self) -> Group:
        return self.layouts[0].groups[self.groups[0]].group

    @property
    def destination(self) -> Group:
        return self.layouts[1].groups[self.groups[1]].group

    def blocks(
        self, source: Mapping[int, Blocks], destination: Mapping[int, Blocks]
    ) -> tuple[Blocks, Blocks]:
        """Their blocks among those of all groups."""
        return source[self.groups[0]], destination[self.groups[1]]

    @property
    def spans(self) -> tuple[int, int]:
        """Tokens per block on either side."""
        return block_span(self.source), block_span(self.destination)

    @cached_property
    def lanes(self) -> Callable[[Overlap], Lanes]:
        """The copies of a kind of block pair; computed once for each kind."""
        rows = map(Rows.of, self.layouts, self.groups)
        return lru_cache(MOST_KINDS)(partial(lanes, self.layer_sets, *rows))

    @cached_property
    def period(self) -> tuple[Lanes, ...]:
        """The lanes of all kinds of full block pairs: block boundaries of the two sides
        meet again after the least common multiple of their tokens."""
        s_span, d_span = self.spans
        whole = Tokens(0, lcm(s_span, d_span))
        start, end = cut_tokens(whole, s_span, d_span)
        return tuple(
            self.lanes(Overlap(first % s_span, first % d_span, end - first))
            for first, end in zip(start.tolist(), end.tolist(), strict=True)
        )

    def grids(self, source: Blocks, destination: Blocks, tokens: Tokens) -> list[Grid]:
        """The copies of one request in these two groups: a grid for each kind of block pair."""
        check_ids(self.layouts[0], self.groups[0], source, "source")
        check_ids(self.layouts[1], self.groups[1], destination, "destination")
        if not len(destination):
            return []
        check_held(self.source, source, tokens, "source")
        check_held(self.destination, destination, tokens, "destination")
        brought = tokens.of(self.destination)
        if brought.first >= brought.end or not len(source):
            return []
        pairs = block_pairs(source, destination, brought, self.spans)
        return [Grid(self.lanes(overlap), here, there) for overlap, here, there in pairs]

    def copies(self, source: Blocks, destination: Blocks, tokens: Tokens) -> Copies:
        """The same written out, in the fewest pieces, by destination."""
        grids = self.grids(source, destination, tokens)
        return Copies.joined([grid.written_out() for grid in grids]).merged()

    def filled(self, source: Blocks, destination: Blocks, tokens: Tokens) -> Bools:
        """Which blocks of the destination get all that they have of the tokens."""
        brought, (s_span, d_span) = tokens.of(self.destination), self.spans
        first = np.maximum(d_span * destination.index, brought.first)
        end = np.minimum(d_span * (destination.index + 1), brought.end)
        first, end = first // s_span, ceil_div(end, s_span)  # in blocks of the source
        listed = np.searchsorted(source.index, end) - np.searchsorted(source.index, first)
        return listed >= end - first


@dataclass(frozen=True, kw_only=True, eq=False)
class Route:
    """What is carried from one layout to another, ready to be expanded for any request."""

    source: Layout
    destination: Layout
    pairs: tuple[GroupPair, ...]

    @property
    def lanes(self) -> tuple[Lanes, ...]:
        """Every copy of every kind of full block pair."""
        return tuple(lanes for pair in self.pairs for lanes in pair.period)

    @cached_property
    def mean_bytes(self) -> int:
        """The mean length of the pieces."""
        kinds = [lanes.copies for lanes in self.lanes]
        return sum(each.total for each in kinds) // max(1, sum(map(len, kinds)))

    def copies(
        self,
        source: Mapping[int, Blocks],
        destination: Mapping[int, Blocks],
        num_tokens: int,
        *,
        start_token: int = 0,
    ) -> Copies:
        """The copies that bring tokens `[start_token, num_tokens)` of a request across, as few as
        possible: `grids`, written out."""
        tokens = self._tokens(source, destination, start_token, num_tokens)
        return Copies.joined(
            [pair.copies(*pair.blocks(source, destination), tokens) for pair in self.pairs]
        )

    def grids(
        self,
        source: Mapping[int, Blocks],
        destination: Mapping[int, Blocks],
        num_tokens: int,
        *,
        start_token: int = 0,
    ) -> list[Grid]:
        """The copies that bring tokens `[start_token, num_tokens)` of a request across.

        Keys are group indices; offsets count from the start of either arena. What the
        destination lists is brought if the source lists it too. Raises RouteError if one of
        them lacks a block of these tokens that the next token needs; a destination that lists
        none at all wants nothing of the group.

        A copy stays inside one group. It runs over padding of the request's own rows, and the
        last tokens travel with the slots behind them in their blocks. Recurrent and encoder
        groups are brought whole, whatever `start_token` is.
        """
        tokens = self._tokens(source, destination, start_token, num_tokens)
        return [
            grid
            for pair in self.pairs
            for grid in pair.grids(*pair.blocks(source, destination), tokens)
        ]

    def _tokens(
        self,
        source: Mapping[int, Blocks],
        destination: Mapping[int, Blocks],
        start_token: int,
        num_tokens: int,
    ) -> Tokens:
        """What is to be brought, once it is certain that all groups are listed."""
        if not 0 <= start_token <= num_tokens:
            raise RouteError((f"tokens [{start_token}, {num_tokens}) are no interval from 0 on",))
        self._check_listed(source, destination)
        return Tokens(start_token, num_tokens)

    def filled(
        self,
        source: Mapping[int, Blocks],
        destination: Mapping[int, Blocks],
        num_tokens: int,
        *,
        start_token: int = 0,
    ) -> dict[int, Bools]:
        """By destination group, which of its blocks `copies` fills.

        A source need not list what the next token does not see, so that a block behind a window
        may get some of its tokens, or none. Blocks of other tokens count as filled.
        """
        tokens, whole = Tokens(start_token, num_tokens), dict[int, Bools]()
        for pair in self.pairs:
            s, d = pair.groups
            filled = pair.filled(source[s], destination[d], tokens)
            whole[d] = whole[d] & filled if d in whole else filled
        return whole

    def _check_listed(
        self, source: Mapping[int, Blocks], destination: Mapping[int, Blocks]
    ) -> None:
        missing = [
            f"{side} group {number} ({group.name!r}): no list of blocks"
            for pair in self.pairs
            for side, listed, number, group in (
                ("source", source, pair.groups[0], pair.source),
                ("destination", destination, pair.groups[1], pair.destination),
            )
            if number not in listed
        ]
        if missing:
            raise RouteError(tuple(dict.fromkeys(missing)))


def plan_route(
    source: Layout | Planned, destination: Layout | Planned, *, claims: Claims | None = None
) -> Route:
    """How bytes of `source` reach their places in `destination`.

    Carries what both sides hold; with `claims`, only that part of it. Raises RouteError
    with every difference where models or element types differ.
    """
    source, destination = as_layout(source), as_layout(destination)
    unlike = differences(source, destination)
    if unlike:
        raise RouteError(unlike)
    names = destination.layers if claims is None else claims
    members = {
        (source.layers[name][0], destination.layers[name][0])
        for name in names
        if name in source.layers and name in destination.layers
    }
    pairs = (
        GroupPair(
            layouts=(source, destination),
            groups=groups,
            layer_sets=tuple(_layer_sets(source, destination, groups, claims)),
        )
        for groups in sorted(members)
    )
    return Route(
        source=source,
        destination=destination,
        pairs=tuple(pair for pair in pairs if pair.layer_sets),
    )


def _layer_sets(
    source: Layout, destination: Layout, groups: tuple[int, int], claims: Claims | None
) -> Iterator[LayerSet]:
    """What two groups have in common, layers alike on both sides together."""
    sets = source.page_sets[groups[0]], destination.page_sets[groups[1]]
    for here, there in product(*sets):
        starts = dict(zip(here.layers, here.offsets.tolist(), strict=True))
        by_claim: dict[object, list[tuple[str, int, int]]] = {}
        for name, offset in zip(there.layers, there.offsets.tolist(), strict=True):
            if name in starts and (claims is None or name in claims):
                boxes = () if claims is None else claims[name].items()
                key = tuple((field, *claimed) for field, claimed in boxes)
                by_claim.setdefault(key, []).append((name, starts[name], offset))
        for members in by_claim.values():
            name = members[0][0]
            held = shared(here.spec, there.spec, None if claims is None else claims[name])
            if held:
                offsets = np.array([each[1:] for each in members], np.int64).T
                yield LayerSet(
                    offsets=(offsets[0], offsets[1]),
                    places=(here.place, there.place),
                    shared=held,
                    state_tokens=there.spec.tokens_per_state,
                )
