"""How much of a prompt can be loaded, from which rows are present and which blocks are listed."""

from collections.abc import Callable, Mapping, Sequence
from math import lcm

import numpy as np

from kvstow.blocks.prompt import Prompt
from kvstow.errors import StoreError
from kvstow.offload.keys import block_keys, tokenwise_groups, wanted
from kvstow.offload.tier import Bools
from kvstow.plan.identity import Identity
from kvstow.plan.layout import Layout
from kvstow.plan.retention import State, can_hit
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks

Present = Callable[[int, Sequence[bytes]], Bools]
"""Which keys of a group have rows."""


def longest_prefix(
    layout: Layout,
    identity: Identity,
    prompt: Prompt,
    present: Present,
    most: int | None,
    into: Mapping[int, Blocks] | None,
) -> int:
    """The longest beginning, at most `most` tokens, that is kept, and for which blocks are listed
    where there are any: all of the prompt, or whole blocks of every group."""
    end = len(prompt) if most is None else max(0, min(most, len(prompt)))
    if end == len(prompt) and _has_all(layout, identity, prompt, present, into):
        return end
    groups = tokenwise_groups(layout)
    unit = lcm(*(group.block_tokens for _, group in groups))
    lengths: Ints = np.arange(0, end // unit * unit + 1, unit)
    for g, group in groups:
        keys = block_keys(identity, prompt, group.block_tokens)
        keys = keys[: int(lengths[-1]) // group.block_tokens]
        there = present(g, keys)
        if into is not None and not isinstance(group.retention, State):
            there &= np.isin(np.arange(len(keys)), into[g].index)
        lengths = lengths[can_hit(group.retention, lengths, group.block_tokens, there)]
    return int(lengths[-1])


def _has_all(
    layout: Layout,
    identity: Identity,
    prompt: Prompt,
    present: Present,
    into: Mapping[int, Blocks] | None,
) -> bool:
    """Whether all of a prompt is kept, with a last block that is partly filled."""
    for g, keyed in wanted(identity, prompt, layout, len(prompt)).items():
        recurrent = isinstance(layout.groups[g].group.retention, State)
        if into is not None and not recurrent and not np.isin(keyed.index, into[g].index).all():
            return False
        if not present(g, keyed.keys).all():
            return False
    return len(prompt) > 0


def check_blocks(blocks: Mapping[int, Blocks]) -> None:
    """Refuses what is not blocks by group, such as the number of a request."""
    if not isinstance(blocks, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise StoreError(
            f"blocks are listed by group, not as {type(blocks).__name__}\n\n"
            "hint: ledger.blocks(request)"
        )


def check_listed(layout: Layout, into: Mapping[int, Blocks]) -> None:
    """Refuses blocks that leave out a whole group."""
    check_blocks(into)
    missing = [group.name for g, group in tokenwise_groups(layout) if g not in into]
    if missing:
        raise StoreError(
            f"no blocks are listed for {len(missing)} of {len(layout.groups)} groups: "
            f"{', '.join(missing)}\n\nhint: into=ledger.blocks(request)"
        )


def last_row(listed: Blocks | None, retention: object, num_tokens: int, block_tokens: int) -> Ints:
    """The block that ends with the prompt: a running state, or a block that is partly filled."""
    if listed is None or not num_tokens:
        return np.empty(0, np.int64)
    if isinstance(retention, State):
        return listed.ids[:1]
    if num_tokens % block_tokens == 0:
        return np.empty(0, np.int64)
    return listed.ids[listed.index == num_tokens // block_tokens]
