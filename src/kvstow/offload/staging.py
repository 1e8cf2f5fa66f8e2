"""Between an arena and rows as a tier keeps them: in place where they are the same bytes.

same rows, host arena    views of the arena itself, nothing is copied
same rows, CUDA arena    one batched copy to or from a pinned stage
other rows               the route's copies to or from a stage
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from kvstow.errors import RouteError, StoreError
from kvstow.memory.arena import Arena
from kvstow.memory.copy import copy
from kvstow.offload.image import same_rows, stacked
from kvstow.offload.tier import Bytes
from kvstow.plan.blocklist import Blocks
from kvstow.plan.layout import Layout
from kvstow.plan.moves import Moves
from kvstow.plan.route import Route, route
from kvstow.plan.spec import Encoder, State

Ints = npt.NDArray[np.int64]

STAGE_BYTES = 64 << 20


class Window:
    """Rows of one group of an arena, seen as rows of one group of a tier's layout."""

    def __init__(self, arena: Arena, group: int, layout: Layout) -> None:
        self._arena = arena
        self._group = group
        self.tier_group = matching_group(arena.layout, group, layout)
        self._same = same_rows(arena.layout, group, layout, self.tier_group)
        self._in_place = self._same and arena.device.type == "cpu"
        self._stage: Arena | None = None
        self._routes: tuple[Route, Route] | None = None
        self.num_rows = max(1, STAGE_BYTES // layout.row_bytes(self.tier_group))
        if self._in_place:
            self.num_rows = 1 << 30
        else:
            self._open_stage(layout)

    def _open_stage(self, layout: Layout) -> None:
        shape = stacked(layout, self.tier_group, self.num_rows)
        self._stage = Arena(shape, pinned=torch.cuda.is_available())
        if not self._same:
            here = self._arena.layout
            self._routes = route(here, shape), route(shape, here)

    def fetch(self, ids: Ints) -> list[Bytes]:
        """The bytes of at most `num_rows` rows; valid until the next call."""
        if self._stage is None:
            return _views(self._arena, self._group, ids)
        staged = np.arange(1, len(ids) + 1)
        copy(self._arena, self._stage, self._moves(ids, staged, inward=False)).wait()
        return _views(self._stage, 0, staged)

    def room(self, ids: Ints) -> list[Bytes]:
        """Memory for the bytes of at most `num_rows` rows, to be filled for `deliver`."""
        if self._stage is None:
            return _views(self._arena, self._group, ids)
        return _views(self._stage, 0, np.arange(1, len(ids) + 1))

    def deliver(self, ids: Ints, which: npt.NDArray[np.bool_]) -> None:
        """Bring those rows that were filled to their places."""
        if self._stage is None or not which.any():
            return
        staged = np.flatnonzero(which) + 1
        copy(self._stage, self._arena, self._moves(ids[which], staged, inward=True)).wait()

    def _moves(self, ids: Ints, staged: Ints, *, inward: bool) -> Moves:
        assert self._stage is not None
        if self._routes is None:
            here = _starts(self._arena.layout, self._group, ids)
            there = _starts(self._stage.layout, 0, staged)
            nbytes = np.full(len(ids), self._stage.layout.row_bytes(0))
            return Moves(there, here, nbytes) if inward else Moves(here, there, nbytes)
        retention = self._arena.layout.groups[self._group].group.retention
        if isinstance(retention, State | Encoder):
            parts = [self._routed(ids[i : i + 1], staged[i : i + 1], inward=inward)
                     for i in range(len(ids))]  # fmt: skip
            return Moves(
                *(np.concatenate(column) for column in zip(*map(_columns, parts), strict=True))
            )
        return self._routed(ids, staged, inward=inward)

    def _routed(self, ids: Ints, staged: Ints, *, inward: bool) -> Moves:
        """Rows as if they were one request's blocks, one after the other."""
        assert self._routes is not None
        out, back = self._routes
        here: Mapping[int, Blocks] = {self._group: Blocks.first(ids)}
        there: Mapping[int, Blocks] = {0: Blocks.first(staged)}
        tokens = len(ids) * self._arena.layout.groups[self._group].group.block_tokens
        return back.moves(there, here, tokens) if inward else out.moves(here, there, tokens)


def matching_group(ours: Layout, group: int, theirs: Layout) -> int:
    """The group of `theirs` that has the same layers and tokens per block as ours.

    Refuses layouts of other models, and groups that differ, with what differs.
    """
    mine = ours.groups[group].group
    names = [layer.name for layer in mine.layers]
    for g, rows in enumerate(theirs.groups):
        if [layer.name for layer in rows.group.layers] == names:
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


def _starts(layout: Layout, group: int, ids: Ints) -> Ints:
    strip = layout.footprints[group].strips[0]
    return strip.offset + ids * strip.stride


def _views(arena: Arena, group: int, ids: Ints) -> list[Bytes]:
    memory: Bytes = arena.bytes.numpy()
    nbytes = arena.layout.row_bytes(group)
    return [memory[at : at + nbytes] for at in _starts(arena.layout, group, ids).tolist()]


def _columns(moves: Moves) -> tuple[Ints, Ints, Ints]:
    return moves.source, moves.destination, moves.nbytes
