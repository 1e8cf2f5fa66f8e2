"""Which peers a rank reads from, and what from each: every byte from exactly one of them.

The destination's bytes are cut wherever some peer's part ends. A piece that one peer holds
comes from that peer; where several hold it alike, one of them is chosen:

    kv head          0     1     2     3       source, tp 8: two ranks hold each head
    source rank     0 1   2 3   4 5   6 7
    destination     └ rank 0 ┘  └ rank 1 ┘     tp 2: rank 0 reads 0 and 2, rank 1 reads 5 and 7
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from kvstow.errors import RouteError
from kvstow.plan.layout import Layout
from kvstow.plan.spec import Extent, LayerSpec
from kvstow.route.compare import by_layers, differences
from kvstow.route.overlap import Box, Interval
from kvstow.route.route import Claims, Route, plan_route

Holders = tuple[int, ...]
"""Indices of the layouts that hold something, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SourceRoute:
    """A peer to read from, by its place in the list of layouts, and what to read."""

    index: int
    route: Route
    claims: Claims


class _Piece(NamedTuple):
    """Part of one field, and who holds it."""

    field: str
    box: Box
    holders: Holders
    nbytes: int


_Pieces = Sequence[tuple[str, _Piece]]
"""Each with the name of its layer."""


def sources(layouts: Sequence[Layout], destination: Layout) -> tuple[SourceRoute, ...]:
    """The routes that together write every byte of `destination` exactly once.

    `layouts` are those of all ranks of the source. Where replicas offer a choice, a peer
    that is read from anyway is preferred, then the one with fewer bytes to send, then
    one by turns: the destination's tp rank rotates the choice, so that ranks spread over the
    replicas.
    """
    unlike: dict[str, list[str]] = {}
    for i, layout in enumerate(layouts):
        for text in differences(layout, destination):
            unlike.setdefault(text, []).append(str(i))
    if unlike:
        raise RouteError(tuple(f"source {', '.join(of)}: {text}" for text, of in unlike.items()))
    pieces = _pieces(layouts, destination)
    _check_held(pieces, layouts)
    choice = _choose(pieces, destination.tp[0])
    claims: dict[int, dict[str, dict[str, list[Box]]]] = {}
    for name, piece in pieces:
        layer = claims.setdefault(choice[piece.holders], {}).setdefault(name, {})
        layer.setdefault(piece.field, []).append(piece.box)
    return tuple(
        SourceRoute(
            index=i, route=plan_route(layouts[i], destination, claims=claims[i]), claims=claims[i]
        )
        for i in sorted(claims)
    )


def _choose(pieces: _Pieces, turn: int) -> Mapping[Holders, int]:
    """For each set of holders, the one to read from."""
    nbytes: dict[Holders, int] = {}
    for _, piece in pieces:
        nbytes[piece.holders] = nbytes.get(piece.holders, 0) + piece.nbytes
    choice: dict[Holders, int] = {}
    load: dict[int, int] = {}
    for holders in sorted(nbytes, key=lambda holders: (len(holders), holders)):
        first = turn % len(holders)
        rotated = holders[first:] + holders[:first]
        best = min(rotated, key=lambda i: (i not in load, load.get(i, 0)))
        choice[holders] = best
        load[best] = load.get(best, 0) + nbytes[holders]
    return choice


def _check_held(pieces: _Pieces, layouts: Sequence[Layout]) -> None:
    lacking = by_layers(
        (
            name,
            f"field {piece.field!r}: no source holds heads [{piece.box[0][0]}, "
            f"{piece.box[0][1]}), {list(piece.box[1:])} of its axes",
        )
        for name, piece in pieces
        if not piece.holders
    )
    if not lacking:
        return
    ranks = {(layout.tp[0], layout.pp[0]) for layout in layouts}
    needed = max((layout.tp[1] * layout.pp[1] for layout in layouts), default=1)
    if len(ranks) < needed:
        lacking += (f"{len(ranks)} of {needed} ranks are there: one ticket per rank is needed",)
    raise RouteError(lacking)


def _pieces(layouts: Sequence[Layout], destination: Layout) -> _Pieces:
    """Every byte of the destination, cut by who holds it."""
    cuts: dict[object, list[_Piece]] = {}
    pieces: list[tuple[str, _Piece]] = []
    for name, (_, spec, _) in destination.layers.items():
        held = {
            i: layout.layers[name][1] for i, layout in enumerate(layouts) if name in layout.layers
        }
        parts = tuple((i, peer.heads, peer.fields) for i, peer in held.items())
        key = (spec.heads, spec.fields, spec.states, parts)
        if key not in cuts:
            cuts[key] = list(_layer_pieces(spec, held))
        pieces += [(name, piece) for piece in cuts[key]]
    return pieces


def _layer_pieces(spec: LayerSpec, held: Mapping[int, LayerSpec]) -> Iterator[_Piece]:
    for field in spec.fields:
        fields = {i: peer.field(field.name) for i, peer in held.items()}
        cuts = [_cut(spec.heads, {i: peer.heads for i, peer in held.items()})]
        for k, axis in enumerate(field.axes):
            cuts.append(_cut(axis, {i: peer.axes[k] for i, peer in fields.items()}))
        for parts in product(*cuts):
            box = tuple(interval for interval, _ in parts)
            holders = parts[0][1].intersection(*(holders for _, holders in parts))
            size = prod(hi - lo for lo, hi in box) * field.dtype.bits * spec.states // 8
            yield _Piece(field.name, box, tuple(sorted(holders)), size)


def _cut(extent: Extent, held: Mapping[int, Extent]) -> list[tuple[Interval, frozenset[int]]]:
    """The axis in pieces that are held alike all over, and who holds each."""
    ends = {end for other in (extent, *held.values()) for piece in other.pieces for end in piece}
    pieces: list[tuple[Interval, frozenset[int]]] = []
    for lo, hi in pairwise(sorted(ends)):
        if not _holds(extent, lo, hi):
            continue
        holders = frozenset(i for i, other in held.items() if _holds(other, lo, hi))
        if pieces and pieces[-1][0][1] == lo and pieces[-1][1] == holders:
            pieces[-1] = ((pieces[-1][0][0], hi), holders)
        else:
            pieces.append(((lo, hi), holders))
    return pieces


def _holds(extent: Extent, lo: int, hi: int) -> bool:
    return any(start <= lo and hi <= end for start, end in extent.pieces)
