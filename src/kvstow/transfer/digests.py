"""Digests across a transfer: which tokens of which layers, here and there, compared.

Each source counts what it brings (its claims), the consumer counts what it holds; the sum
over sources is the consumer's number, whatever tp, order or tokens per block either has.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from random import Random
from typing import get_args

import numpy as np

from kvstow.memory.arena import Arena
from kvstow.memory.digest import MODULUS, DigestOf, counted_states, prepared
from kvstow.plan.layout import Layout
from kvstow.plan.spec import LayerSpec
from kvstow.plan.view import ceil_div
from kvstow.route.blocks import Blocks, Tokens
from kvstow.route.route import Claims
from kvstow.transfer.channel.messages import Claim, Sample
from kvstow.transfer.options import DigestPolicy

LEAST_SHARE = 128
"""A sample is at most one cell in so many: digests are slower than transfers."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A sample whose digests differ."""

    sample: Sample
    here: int
    there: int


def samples(
    layouts: Sequence[Layout],
    start_token: int,
    num_tokens: int,
    policy: DigestPolicy,
    *,
    random: Random,
) -> tuple[Sample, ...]:
    """What to compare: everything, a little of every group chosen at random, or nothing.

    `layouts` are the consumer's, whose groups they are, and those of the sources. A little is
    one head of one layer and one state of every row, on whichever side rows are shorter; of
    fewer rows where that would be more than a `LEAST_SHARE` of the group's bytes.
    """
    if policy == "off":
        return ()
    result: list[Sample] = []
    for rows in layouts[0].groups:
        names = tuple(layer.name for layer in rows.group.layers)
        heads, every, phase = None, 1, 0
        if policy == "sample":
            name = random.choice(names)
            spec = layouts[0].layers[name][1]
            head = random.choice([*chain(*(range(*piece) for piece in spec.heads.pieces))])
            heads = head, head + 1
            every = max(_states(layouts, name), ceil_div(LEAST_SHARE, len(names) * spec.heads.size))
            low, high = counted_states(rows.group, spec, num_tokens, start_token)
            names, phase = (name,), random.randrange(low, max(low + 1, high)) % every
        result.append(Sample(names, heads, start_token, num_tokens, every, phase))
    return tuple(result)


def sample_bytes(layout: Layout, wanted: Sequence[Sample]) -> int:
    """At most so many bytes of an arena count for these samples."""
    return sum(count * spec.cell_bytes for spec, count in _counted_cells(layout, wanted))


def _counted_cells(layout: Layout, wanted: Sequence[Sample]) -> Iterator[tuple[LayerSpec, int]]:
    """Per layer that the arena holds, how many cells count at most."""
    for sample in wanted:
        for name in sample.layers:
            if name not in layout.layers:
                continue
            group, spec, _ = layout.layers[name]
            first, end = sample.heads or (0, spec.heads.size)
            low, high = counted_states(
                layout.groups[group].group, spec, sample.stop_token, sample.start_token
            )
            states = ceil_div(high - low, sample.every)
            yield spec, states * (end - first)


def _states(layouts: Sequence[Layout], layer: str) -> int:
    """States of a layer in a row, where rows are shortest."""
    return min(each.layers[layer][1].states for each in layouts if layer in each.layers)


def digests_of(
    arena: Arena, blocks: Mapping[int, Blocks], wanted: Sequence[Sample], claims: Claims | None
) -> list[DigestOf]:
    """What the digest of each sample counts: nothing in layers that this arena does not hold."""
    result: list[DigestOf] = []
    for sample in wanted:
        held = [name for name in sample.layers if name in arena.layout.layers]
        groups = {arena.layout.layers[name][0] for name in held}
        result.append(
            DigestOf(
                {g: blocks[g] for g in groups if g in blocks},
                sample.stop_token,
                layers=held,
                start_token=sample.start_token,
                claims=claims,
                heads=sample.heads,
                every=sample.every,
                phase=sample.phase,
            )
        )
    return result


def digests(
    arena: Arena, blocks: Mapping[int, Blocks], wanted: Sequence[Sample], claims: Claims | None
) -> tuple[int, ...]:
    """The digest of each sample, taken now."""
    return prepared(arena, digests_of(arena, blocks, wanted, claims))()


def warm_up(arena: Arena) -> None:
    """Compile what digests run on a device, and have the host memory that they need, by counting
    one row of every group."""
    blocks: dict[int, Blocks] = {}
    for g, rows in enumerate(arena.layout.groups):
        size = rows.group.block_tokens
        needed = Tokens(0, 1).needed(rows.group)
        index = np.arange(needed.first // size, ceil_div(needed.end, size))
        blocks[g] = Blocks(np.full_like(index, rows.rows_per_slab), index)
    for policy in get_args(DigestPolicy):
        wanted = samples([arena.layout], 0, 1, policy, random=Random(0))
        digests(arena, blocks, wanted, None)


def mismatches(
    wanted: Sequence[Sample], here: Sequence[int], there: Sequence[Sequence[int]]
) -> list[Mismatch]:
    """Samples whose sums over all sources are not what the consumer has."""
    sums = [sum(column) % MODULUS for column in zip(*there, strict=True)]
    return [
        Mismatch(sample, mine, theirs)
        for sample, mine, theirs in zip(wanted, here, sums, strict=True)
        if mine != theirs
    ]


# ── claims on the wire ────────────────────────────────────────────────────────────────


def packed_claims(claims: Claims) -> tuple[Claim, ...]:
    """Claims, layers with the same boxes together."""
    alike: dict[tuple[object, ...], list[str]] = {}
    for layer, fields in claims.items():
        key = tuple((name, tuple(tuple(box) for box in boxes)) for name, boxes in fields.items())
        alike.setdefault(key, []).append(layer)
    return tuple(
        Claim(tuple(layers), key)  # pyright: ignore[reportArgumentType]
        for key, layers in alike.items()
    )


def unpacked_claims(packed: Sequence[Claim]) -> Claims:
    """What `packed_claims` packed."""
    return {layer: dict(claim.fields) for claim in packed for layer in claim.layers}
