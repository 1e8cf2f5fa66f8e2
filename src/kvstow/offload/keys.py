"""Names for rows: a cryptographic hash of everything up to the end of a block.

    key at t  =  BLAKE2b-128( len(salt) as 8 bytes, salt, then token by token 4 bytes each;
                              before a token at which another input begins: ff ff ff ff,
                              len(digest) as 8 bytes, digest )          all little endian

The key depends on the tokens before it, not on the block size: blocks of 64 tokens have the keys
of every fourth block of 16. The pool's own hashes are 64 bits wide and confirmed token by token;
a store has no tokens to compare, so its keys are wide enough not to need them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import lcm

import numpy as np
import numpy.typing as npt

from kvstow.blocks.prefix import blocks_seen, served
from kvstow.blocks.prompt import Prompt
from kvstow.offload.disk.segments import ChainLink
from kvstow.offload.tier import Tier
from kvstow.plan.group import Group
from kvstow.plan.layout import Layout
from kvstow.plan.retention import Encoder

KEY_BYTES = 16
_INPUT = b"\xff\xff\xff\xff"

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Keyed:
    """Logical block `index[i]` of a request has key `keys[i]` in one group."""

    keys: tuple[bytes, ...]
    index: Ints


def block_keys(prompt: Prompt, block_tokens: int) -> list[bytes]:
    """The key of every whole block of the prompt."""
    state = blake2b(_sized(prompt.salt), digest_size=KEY_BYTES)
    inputs = sorted(prompt.extra)
    tokens = prompt.tokens.astype("<i4").tobytes()
    keys: list[bytes] = []
    for end in range(block_tokens, len(prompt) + 1, block_tokens):
        at = end - block_tokens
        while inputs and inputs[0][0] < end:
            position, digest = inputs.pop(0)
            state.update(tokens[4 * at : 4 * position])
            state.update(_INPUT + _sized(digest))
            at = position
        state.update(tokens[4 * at : 4 * end])
        keys.append(state.copy().digest())
    return keys


def links(keys: Sequence[bytes]) -> list[ChainLink]:
    """Where the blocks with these keys, a request's from the first on, stand."""
    return [ChainLink(i, keys[i - 1] if i else b"") for i in range(len(keys))]


def _sized(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


# ── hits ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class StoredPrefix:
    """The first `num_tokens` tokens of a prompt can be had: these blocks, by group."""

    num_tokens: int
    blocks: Mapping[int, Keyed]


def hit(tiers: Sequence[Tier], prompt: Prompt) -> StoredPrefix:
    """The longest beginning of the prompt that every group can serve from the tiers.

    Full groups need all blocks before it, window groups their last window, recurrent groups
    a checkpoint at its end; each block may come from any of the tiers. The rows may be gone
    when they are loaded: what counts is what `load` says.
    """
    layout = tiers[0].layout
    groups = _tokenwise(layout)
    unit = lcm(*(group.block_tokens for _, group in groups))
    lengths: Ints = np.arange(0, max(0, len(prompt) - 1) // unit * unit + 1, unit)
    keys = {g: block_keys(prompt, group.block_tokens) for g, group in groups}
    for g, group in groups:
        near = keys[g][: int(lengths[-1]) // group.block_tokens]
        present = np.zeros(len(near), bool)
        for tier in tiers:
            present |= tier.contains(g, near)
        lengths = lengths[served(group, present, lengths)]
    num_tokens = int(lengths[-1])
    return StoredPrefix(num_tokens, wanted(layout, prompt, num_tokens))


def wanted(layout: Layout, prompt: Prompt, num_tokens: int) -> dict[int, Keyed]:
    """The blocks of each group that the token at `num_tokens` sees, with their keys."""
    found: dict[int, Keyed] = {}
    for g, group in _tokenwise(layout):
        keys = block_keys(prompt, group.block_tokens)
        index = blocks_seen(group, num_tokens)
        found[g] = Keyed(tuple(keys[int(i)] for i in index), index)
    return found


def _tokenwise(layout: Layout) -> list[tuple[int, Group]]:
    """Groups whose rows belong to tokens of the prompt; an encoding is made anew."""
    return [
        (g, rows.group)
        for g, rows in enumerate(layout.groups)
        if not isinstance(rows.group.retention, Encoder)
    ]
