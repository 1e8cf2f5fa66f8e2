"""Route: how bytes of one layout reach their places in another.

Compiled once per pair of peers, in a time that does not depend on the number of blocks:

    Layout × Layout ─▶ Route ─▶ per pair of groups: what both hold of each layer
                          │
      blocks of a request └───▶ copies(…): byte offsets on both sides, and lengths
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import product
from math import lcm

import numpy as np

from kvstow.errors import RouteError
from kvstow.plan.group import Group
from kvstow.plan.layout import Layout, Placement, placed_sections
from kvstow.plan.retention import Bools
from kvstow.plan.spec import LayerSpec
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks, Tokens, block_span, check_held, check_ids
from kvstow.route.compare import differences
from kvstow.route.copies import Copies, joined
from kvstow.route.expand import EqualRows, block_pairs, cut_tokens, expanded
from kvstow.route.lanes import Lanes, LayerSet, Overlap, free_bytes, lanes, state_tokens
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

    @property
    def spans(self) -> tuple[int, int]:
        """Tokens per block on either side."""
        return block_span(self.source), block_span(self.destination)

    @property
    def last_ids(self) -> tuple[int, int]:
        """The last block of either group."""
        (source, destination), (s_group, d_group) = self.layouts, self.groups
        return source.num_blocks(s_group) - 1, destination.num_blocks(d_group) - 1

    @cached_property
    def lanes(self) -> Callable[[Overlap], Lanes]:
        """The copies of a kind of block pair; computed once for each kind."""
        free = [free_bytes(*side) for side in zip(self.layouts, self.groups, strict=True)]
        return lru_cache(MOST_KINDS)(partial(lanes, self.layer_sets, *free))

    @cached_property
    def period(self) -> tuple[Lanes, ...]:
        """The lanes of all kinds of full block pairs: block boundaries of the two sides
        meet again after the least common multiple of their tokens."""
        s_span, d_span = self.spans
        whole = Tokens(0, lcm(s_span, d_span))
        start, end = cut_tokens(whole, s_span, d_span)
        return tuple(
            self.lanes(Overlap(first % s_span, first % d_span, end - first, s_span, d_span))
            for first, end in zip(start.tolist(), end.tolist(), strict=True)
        )

    @cached_property
    def equal_rows(self) -> EqualRows | None:
        """The rows that are copied whole, if both sides have the same ones."""
        return EqualRows.of(self.lanes, self.spans, self.last_ids)

    def copies(self, source: Blocks, destination: Blocks, tokens: Tokens, *, exact: bool) -> Copies:
        """The copies of one request in these two groups, by destination."""
        check_ids(self.layouts[0], self.groups[0], source, "source")
        check_ids(self.layouts[1], self.groups[1], destination, "destination")
        if not len(destination):
            return Copies.none()
        check_held(self.source, source, tokens, "source")
        check_held(self.destination, destination, tokens, "destination")
        mine, rows = tokens.of(self.destination), self.equal_rows
        if mine.first >= mine.end or not len(source):
            return Copies.none()
        if rows is not None:
            found = rows.copies(source, destination, mine, exact=exact)
            if found is not None:
                return found
        pairs = block_pairs(source, destination, mine, self.spans, self.last_ids, exact=exact)
        return expanded(pairs, [self.lanes(overlap) for overlap in pairs.overlaps])

    def filled(self, source: Blocks, destination: Blocks, tokens: Tokens) -> Bools:
        """Which blocks of the destination get all that they have of the tokens."""
        mine, (s_span, d_span) = tokens.of(self.destination), self.spans
        first = np.maximum(d_span * destination.index, mine.first)
        end = np.minimum(d_span * (destination.index + 1), mine.end)
        first, end = first // s_span, -(-end // s_span)  # in blocks of the source
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

    def copies(
        self,
        source: Mapping[int, Blocks],
        destination: Mapping[int, Blocks],
        num_tokens: int,
        *,
        exact: bool = False,
        start_token: int = 0,
    ) -> Copies:
        """The copies that bring tokens `[start_token, num_tokens)` of a request across.

        Keys are group indices; offsets count from the start of either arena. What the
        destination lists is brought if the source lists it too. Raises RouteError if one of
        them lacks a block of these tokens that the next token needs; a destination that lists
        none at all wants nothing of the group.

        A copy stays inside one group; it runs over padding of the request's own rows and
        over slots from `num_tokens` on where that joins two copies, with `exact` over padding
        only. Recurrent and encoder groups are brought whole, whatever `start_token` is.
        """
        if not 0 <= start_token <= num_tokens:
            raise RouteError((f"tokens [{start_token}, {num_tokens}) are no interval from 0 on",))
        self._check_listed(source, destination)
        tokens = Tokens(start_token, num_tokens)
        found = [
            pair.copies(source[pair.groups[0]], destination[pair.groups[1]], tokens, exact=exact)
            for pair in self.pairs
        ]
        return joined(found)

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
        tokens, found = Tokens(start_token, num_tokens), dict[int, Bools]()
        for pair in self.pairs:
            s, d = pair.groups
            filled = pair.filled(source[s], destination[d], tokens)
            found[d] = found[d] & filled if d in found else filled
        return found

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


def route(source: Layout, destination: Layout, *, claims: Claims | None = None) -> Route:
    """How bytes of `source` reach their places in `destination`.

    Carries what both sides hold; with `claims`, only that part of it. Refuses layouts of
    different models or element types with every difference.
    """
    for layout in (source, destination):
        if not isinstance(layout, Layout):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RouteError(
                (f"a route is between layouts, not {type(layout).__name__}; a plan has .layout",)
            )
    found = differences(source, destination)
    if found:
        raise RouteError(found)
    members: dict[tuple[int, int], list[str]] = {}
    for name, (group, _, _) in destination.layers.items():
        if name in source.layers and (claims is None or name in claims):
            members.setdefault((source.layers[name][0], group), []).append(name)
    pairs = (
        GroupPair(
            layouts=(source, destination),
            groups=groups,
            layer_sets=_layer_sets(source, destination, names, claims),
        )
        for groups, names in sorted(members.items())
    )
    return Route(
        source=source,
        destination=destination,
        pairs=tuple(pair for pair in pairs if pair.layer_sets),
    )


def _layer_sets(
    source: Layout, destination: Layout, names: Sequence[str], claims: Claims | None
) -> tuple[LayerSet, ...]:
    """The layers, those alike in everything but their offsets together."""
    alike: dict[tuple[object, ...], list[str]] = {}
    for name in names:
        mine = () if claims is None else claims[name].items()
        claimed = tuple((field, *boxes) for field, boxes in mine)
        key = (_alike(*source.layers[name][1:]), _alike(*destination.layers[name][1:]), claimed)
        alike.setdefault(key, []).append(name)
    found: list[LayerSet] = []
    for members in alike.values():
        mine = None if claims is None else claims[members[0]]
        here = placed_sections(*source.layers[members[0]][1:])
        there = placed_sections(*destination.layers[members[0]][1:])
        for (s, (s_spec, s_place)), (d, (d_spec, d_place)) in product(
            enumerate(here), enumerate(there)
        ):
            found.append(
                LayerSet(
                    source_offsets=_offsets(source, members, s),
                    destination_offsets=_offsets(destination, members, d),
                    source=s_place,
                    destination=d_place,
                    shared=shared(s_spec, d_spec, mine),
                    state_tokens=state_tokens(d_spec),
                )
            )
    return tuple(layers for layers in found if layers.shared)


def _alike(spec: LayerSpec, place: Placement) -> tuple[object, ...]:
    return (spec.heads, spec.fields, spec.states, replace(place, offset=0))


def _offsets(layout: Layout, names: Sequence[str], section: int) -> Ints:
    places = (layout.layers[name][2].sections[section] for name in names)
    return np.array([place.offset for place in places], np.int64)
