"""Whole requests out of stores of other layouts: other tp, pp, order, tokens per block.

store of rank 0 ─▶ stage ─┐
store of rank 1 ─▶ stage ─┴─ routes ─▶ arena
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from kvstow.memory.arena import Arena
from kvstow.memory.copy import copy
from kvstow.offload.keys import Keyed
from kvstow.offload.rows import row_layout
from kvstow.offload.staging import views
from kvstow.offload.tier import Tier
from kvstow.plan.layout import NULL_SLABS, Layout
from kvstow.plan.retention import State
from kvstow.route.blocks import Blocks
from kvstow.route.sources import sources


def load_request(
    tiers: Sequence[Tier],
    wanted: Mapping[int, Keyed],
    arena: Arena,
    blocks: Mapping[int, Blocks],
    num_tokens: int,
) -> bool:
    """Bring the first `num_tokens` tokens of a request into blocks of an arena.

    `tiers` hold the rows of all ranks of one deployment, `wanted` names them by the groups
    and block sizes of *their* layout (`keys.wanted`); `blocks` are the request's in the arena.
    False, and nothing written, if some row is missing in some tier that is needed. Refuses,
    with RouteError, layouts that no routes can join.
    """
    rows = sum(len(keyed.keys) for keyed in wanted.values())
    shapes = [_stage(tier.layout, rows) for tier in tiers]
    copies: list[tuple[Arena, Mapping[int, Blocks], int]] = []
    needed = sources(shapes, arena.layout)
    for source in needed:
        stage = Arena(shapes[source.index])
        staged = _filled(tiers[source.index], stage, wanted)
        if staged is None:
            return False
        copies.append((stage, staged, source.index))
    for source, (stage, staged, _) in zip(needed, copies, strict=True):
        copy(stage, arena, source.route.copies(staged, blocks, num_tokens)).wait()
    return True


def _stage(layout: Layout, rows: int) -> Layout:
    """The layout of images with room for so many rows, whichever group they are of."""
    whole, slabs = row_layout(layout), rows + NULL_SLABS
    return replace(whole, num_slabs=slabs, nbytes=slabs * whole.slab_bytes)


def _filled(tier: Tier, stage: Arena, wanted: Mapping[int, Keyed]) -> dict[int, Blocks] | None:
    """Load the rows that a tier has into a stage; where they are, or None if one is missing."""
    found: dict[int, Blocks] = {}
    next_id = NULL_SLABS
    for group, keyed in wanted.items():
        ids = np.arange(next_id, next_id + len(keyed.keys))
        next_id += len(ids)
        if not tier.load(group, keyed.keys, views(stage, group, ids)).all():
            return None
        recurrent = isinstance(tier.layout.groups[group].group.retention, State)
        found[group] = Blocks(ids, np.zeros(len(ids), np.int64) if recurrent else keyed.index)
    return found
