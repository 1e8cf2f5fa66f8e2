"""Poison mode: freed rows read as not-a-number, and both ends of a mistake are reported.

freed    rows are filled with the pattern; a write to one afterwards is found by `check`
read     cells that a request needs and that still hold the pattern are found by
         `check_reads`: freed, or handed out and never written
"""

import numpy as np
import torch

from kvstow.errors import BlockError
from kvstow.memory.arena import POISON, Arena
from kvstow.memory.digest import counted_states
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks


class Poison:
    """The freed rows of one arena. A debugging aid: it reads all of them at every check."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._freed: dict[int, set[int]] = {}

    def freed(self, group: int, ids: Ints) -> None:
        """Fill rows that nobody holds any more."""
        self._arena.poison(group, ids)
        self._freed.setdefault(group, set()).update(np.asarray(ids).tolist())

    def taken(self, group: int, ids: Ints) -> None:
        """Rows were handed out again; one that has been written to since is an error."""
        self.check()
        self._freed.setdefault(group, set()).difference_update(np.asarray(ids).tolist())

    def check(self) -> None:
        """BlockError naming freed rows that somebody wrote to."""
        for group, ids in self._freed.items():
            late = [block for block in sorted(ids) if not _pure(self._arena, group, block)]
            if late:
                name = self._arena.layout.groups[group].group.name
                raise BlockError(f"group {name!r}: freed blocks {late[:8]} were written to")


def _pure(arena: Arena, group: int, block: int) -> bool:
    return all(
        bool((arena.bytes[run.offset : run.end] == POISON).all())
        for run in arena.layout.runs(group, block)
    )


def check_reads(arena: Arena, blocks: dict[int, Blocks], num_tokens: int) -> None:
    """BlockError naming blocks in which a cell that the next token needs still holds poison."""
    for group, held in blocks.items():
        for spec in arena.layout.groups[group].group.layers:
            low, high = counted_states(arena.layout.groups[group].group, spec, num_tokens, 0)
            states = held.index[:, None] * spec.states + np.arange(spec.states)
            needed = (states >= low) & (states < high)
            ids = torch.as_tensor(arena.checked(group, held.ids), device=arena.device)
            pages = arena.tensor(spec.name)[ids]
            cells = pages.contiguous().view(torch.uint8).flatten(3)
            stale = (cells == POISON).all(-1).any(1).cpu().numpy() & needed
            if stale.any():
                wrong = held.ids[stale.any(1)]
                raise BlockError(
                    f"layer {spec.name!r}: blocks {wrong[:8].tolist()} would be read, and hold "
                    f"poison in states {states[stale][:8].tolist()}"
                )
