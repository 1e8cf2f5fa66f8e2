"""Which bytes of one arena are a row of another: by address where rows are alike, else by route."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvstow.errors import RouteError, StoreError
from kvstow.offload.image import only, same_rows
from kvstow.plan.layout import Layout
from kvstow.plan.retention import Encoder, State
from kvstow.route.blocks import Blocks
from kvstow.route.copies import Copies
from kvstow.route.route import Route, route

Ints = npt.NDArray[np.int64]


class Bridge:
    """Rows of group `group` of one layout, and of the group of the same layers of another."""

    def __init__(self, here: Layout, group: int, there: Layout, there_group: int) -> None:
        self.same = same_rows(here, group, there, there_group)
        self._here, self._group = here, group
        self._there, self._there_group = there, there_group
        self._routes: tuple[Route, Route] | None = None
        if not self.same:
            one, other = only(here, group), only(there, there_group)
            self._routes = route(one, other), route(other, one)

    def out(self, ids: Ints, there_ids: Ints) -> Copies:
        """The moves that bring blocks `ids` to the rows `there_ids`."""
        if self._routes is None:
            return self._direct(ids, there_ids)
        return self._routed(self._routes[0], ids, there_ids)

    def back(self, there_ids: Ints, ids: Ints) -> Copies:
        """The moves that bring rows `there_ids` to the blocks `ids`."""
        if self._routes is None:
            moves = self._direct(ids, there_ids)
            return Copies(moves.destination, moves.source, moves.nbytes)
        return self._routed(self._routes[1], there_ids, ids)

    def _direct(self, ids: Ints, there_ids: Ints) -> Copies:
        nbytes = np.full(len(ids), self._here.row_bytes(self._group))
        here = starts(self._here, self._group, ids)
        return Copies(here, starts(self._there, self._there_group, there_ids), nbytes)

    def _routed(self, way: Route, source: Ints, destination: Ints) -> Copies:
        """Rows as if they were one request's blocks, one after the other; a summary or an
        encoding is a request of its own."""
        group = self._here.groups[self._group].group
        step = 1 if isinstance(group.retention, State | Encoder) else max(1, len(source))
        parts: list[Copies] = []
        for lo in range(0, len(source), step):
            part: tuple[Mapping[int, Blocks], ...] = tuple(
                {0: Blocks.first(side[lo : lo + step])} for side in (source, destination)
            )
            tokens = len(source[lo : lo + step]) * group.block_tokens
            parts.append(way.copies(part[0], part[1], tokens))
        columns = [(moves.source, moves.destination, moves.nbytes) for moves in parts]
        return Copies(*(np.concatenate(column) for column in zip(*columns, strict=True)))


def starts(layout: Layout, group: int, ids: Ints) -> Ints:
    """Where rows begin, in a group whose blocks are single runs."""
    strip = layout.footprints[group].strips[0]
    return strip.offset + ids * strip.stride


def matching_group(ours: Layout, group: int, theirs: Layout) -> int:
    """The group of `theirs` that has the same layers and tokens per block as ours.

    Refuses groups that differ, with what differs.
    """
    mine = ours.groups[group].group
    names = [layer.name for layer in mine.layers]
    for g, rows in enumerate(theirs.groups):
        if [layer.name for layer in rows.group.layers] != names:
            continue
        if rows.group.block_tokens != mine.block_tokens:
            raise StoreError(
                f"group {mine.name!r} has {mine.block_tokens} tokens per block, the store "
                f"{rows.group.block_tokens}\n\nhint: load whole requests (load_request), or "
                "convert the store (kvstow store convert)"
            )
        if rows.group.layers != mine.layers:
            raise StoreError(
                f"group {mine.name!r} holds another part of its layers than the store does\n\n"
                "hint: load whole requests from the stores of all ranks (load_request)"
            )
        return g
    raise StoreError(
        f"no group of the store has the {len(names)} layers of group {mine.name!r}\n\n"
        "hint: load whole requests (load_request), or convert the store (kvstow store convert)"
    )


def check_joinable(ours: Layout, theirs: Layout) -> None:
    """Refuses layouts that no route can join, with every difference."""
    try:
        route(theirs, ours)
    except RouteError as error:
        raise StoreError(
            f"the store holds rows of another model or element type:\n{error}\n\n"
            "hint: give this layout a directory of its own"
        ) from error
