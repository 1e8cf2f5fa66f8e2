"""Route: how bytes of one layout reach their places in another.

Compiled once per pair of peers, in a time that does not depend on the number of blocks:

    Layout × Layout ─▶ Route ─▶ per pair of groups: what both hold of each layer
                          │
      blocks of a request └───▶ copies(…): byte offsets on both sides, and lengths
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from kvstow.errors import RouteError
from kvstow.plan.group import Group
from kvstow.plan.layout import Layout, Placement
from kvstow.plan.spec import LayerSpec
from kvstow.route.blocks import Blocks
from kvstow.route.compare import differences
from kvstow.route.copies import Copies, joined
from kvstow.route.lanes import Lanes, Overlap, Strand, lanes
from kvstow.route.meeting import meeting
from kvstow.route.moves import Weave, expanded
from kvstow.route.overlap import Box, Part, parts
from kvstow.route.pairing import Tokens, block_span, check_covered, listed
from kvstow.route.period import period
from kvstow.route.seams import seams
from kvstow.route.territory import Pieces, Territory, state_tokens, territory

Claims = Mapping[str, Mapping[str, Sequence[Box]]]
"""By layer and field, the parts that a route is to carry."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Crossing:
    """Two groups that have layers in common, one on each side."""

    layouts: tuple[Layout, Layout]
    groups: tuple[int, int]
    strands: tuple[Strand, ...]

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

    @cached_property
    def _territories(self) -> tuple[Territory, Territory]:
        (source, destination), (s_group, d_group) = self.layouts, self.groups
        return territory(source, s_group), territory(destination, d_group)

    @cached_property
    def _known(self) -> dict[Overlap, Lanes]:
        return {}

    def lanes(self, overlap: Overlap) -> Lanes:
        """The copies of one kind of block pair; computed once for each kind."""
        if overlap not in self._known:
            self._known[overlap] = lanes(self.strands, *self._territories, overlap)
        return self._known[overlap]

    @cached_property
    def _woven(self) -> dict[tuple[Overlap, ...], Weave]:
        return {}

    def weave(self, overlaps: tuple[Overlap, ...]) -> Weave:
        """The copies of kinds of block pairs that come together; computed once for these."""
        if overlaps not in self._woven:
            kinds = tuple(map(self.lanes, overlaps))
            most = period(*self.spans).most
            self._woven[overlaps] = Weave(kinds=kinds, seams=seams(kinds, most))
        return self._woven[overlaps]

    @cached_property
    def period(self) -> tuple[Lanes, ...]:
        """The lanes of all kinds of full block pairs: block boundaries of the two sides
        meet again after the least common multiple of their tokens."""
        return tuple(map(self.lanes, period(*self.spans).overlaps))

    def moves(self, source: Blocks, destination: Blocks, tokens: Tokens, *, exact: bool) -> Pieces:
        """The moves of one request in these two groups."""
        ours = listed(self.layouts[0], self.groups[0], source, "source")
        theirs = listed(self.layouts[1], self.groups[1], destination, "destination")
        found = meeting(ours, theirs, tokens.of(self.destination), exact=exact)
        if found is None:
            return Pieces(*np.empty((3, 0), np.int64))
        moves, missing = expanded(found, self.weave(found.kinds.overlaps))
        if missing:
            check_covered(self.destination, np.hstack(missing), tokens)
        return moves


@dataclass(frozen=True, kw_only=True, eq=False)
class Route:
    """What is carried from one layout to another, ready to be expanded for any request."""

    source: Layout
    destination: Layout
    crossings: tuple[Crossing, ...]

    @property
    def lanes(self) -> tuple[Lanes, ...]:
        """Every copy of every kind of full block pair."""
        return tuple(lanes for crossing in self.crossings for lanes in crossing.period)

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

        Keys are group indices. What the destination lists is brought if the source lists
        it too; refused with `RouteError` if the next token needs it and the source does
        not list it. A move stays inside one group; it runs over padding of the request's
        own rows and over slots from `num_tokens` on where that joins two copies, with
        `exact` over padding only. Recurrent and encoder groups are brought whole,
        whatever `start_token` is.
        """
        if not 0 <= start_token <= num_tokens:
            raise RouteError((f"tokens [{start_token}, {num_tokens}) are no interval from 0 on",))
        self._check_listed(source, destination)
        tokens = Tokens(start_token, num_tokens)
        found = [
            crossing.moves(
                source[crossing.groups[0]], destination[crossing.groups[1]], tokens, exact=exact
            )
            for crossing in self.crossings
        ]
        return joined([Copies(*pieces) for pieces in found])

    moves = copies  # until every caller says `copies`

    def _check_listed(
        self, source: Mapping[int, Blocks], destination: Mapping[int, Blocks]
    ) -> None:
        missing = [
            f"{side} group {crossing.groups[i]} ({group.name!r}): no list of blocks"
            for crossing in self.crossings
            for i, (side, listed, group) in enumerate(
                (("source", source, crossing.source),
                 ("destination", destination, crossing.destination))
            )
            if crossing.groups[i] not in listed
        ]  # fmt: skip
        if missing:
            raise RouteError(tuple(dict.fromkeys(missing)))


def route(source: Layout, destination: Layout, *, claims: Claims | None = None) -> Route:
    """How bytes of `source` reach their places in `destination`.

    Carries what both sides hold; with `claims`, only that part of it. Refuses layouts of
    different models or element types with every difference.
    """
    found = differences(source, destination)
    if found:
        raise RouteError(found)
    members: dict[tuple[int, int], list[str]] = {}
    for name, (group, _, _) in destination.layers.items():
        if name in source.layers and (claims is None or name in claims):
            members.setdefault((source.layers[name][0], group), []).append(name)
    crossings = (
        Crossing(
            layouts=(source, destination),
            groups=groups,
            strands=_strands(source, destination, names, claims),
        )
        for groups, names in sorted(members.items())
    )
    return Route(
        source=source,
        destination=destination,
        crossings=tuple(crossing for crossing in crossings if crossing.strands),
    )


def _strands(
    source: Layout, destination: Layout, names: Sequence[str], claims: Claims | None
) -> tuple[Strand, ...]:
    """The layers, those alike in everything but their offsets together."""
    alike: dict[tuple[object, ...], list[str]] = {}
    for name in names:
        claimed = None if claims is None else tuple(
            (field, tuple(boxes)) for field, boxes in claims[name].items()
        )  # fmt: skip
        key = (_alike(*source.layers[name][1:]), _alike(*destination.layers[name][1:]), claimed)
        alike.setdefault(key, []).append(name)
    found: list[Strand] = []
    for members in alike.values():
        _, s_spec, s_place = source.layers[members[0]]
        _, d_spec, d_place = destination.layers[members[0]]
        held: tuple[Part, ...] = parts(
            s_spec, d_spec, None if claims is None else claims[members[0]]
        )
        if held:
            found.append(Strand(
                source_offsets=_offsets(source, members),
                destination_offsets=_offsets(destination, members),
                source=s_place,
                destination=d_place,
                parts=held,
                state_tokens=state_tokens(d_spec),
            ))  # fmt: skip
    return tuple(found)


def _alike(spec: LayerSpec, place: Placement) -> tuple[object, ...]:
    return (spec.heads, spec.fields, spec.states, replace(place, offset=0))


def _offsets(layout: Layout, names: Sequence[str]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array([layout.layers[name][2].offset for name in names], np.int64)
