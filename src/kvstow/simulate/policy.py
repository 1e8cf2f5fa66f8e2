"""Policies: how a budget becomes slabs. Ours, and what engines do today."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from kvstow.plan.align import Site
from kvstow.plan.group import Group
from kvstow.plan.layout import Layout
from kvstow.plan.pack import packed, union
from kvstow.plan.retention import State

Policy = Literal["slab", "union"]
USUAL_SITE = Site()
POLICIES: tuple[Policy, ...] = get_args(Policy)


def layout_of(
    policy: Policy,
    groups: Sequence[Group],
    *,
    budget: int | None = None,
    num_slabs: int | None = None,
    site: Site = USUAL_SITE,
) -> Layout:
    """The layout that a policy makes of the groups.

    Under `union` states are kept at the distance of the scaled attention blocks, or no
    prefix of any length would end at both.
    """
    if policy == "slab":
        return packed(groups, budget=budget, num_slabs=num_slabs, site=site)
    layout = union(groups, budget=budget, num_slabs=num_slabs, site=site)
    attention = [
        rows.group.block_tokens
        for rows in layout.groups
        if not isinstance(rows.group.retention, State)
    ]
    if not attention or len(attention) == len(layout.groups):
        return layout
    spaced = [_spaced(group, max(attention)) for group in groups]
    return union(spaced, budget=budget, num_slabs=num_slabs, site=site)


def _spaced(group: Group, block_tokens: int) -> Group:
    """A recurrent group with checkpoints at another distance; others as they are."""
    if not isinstance(group.retention, State):
        return group
    layers = tuple(replace(layer, block_tokens=block_tokens) for layer in group.layers)
    return replace(group, layers=layers)
