"""Digests across a transfer: which tokens of which layers, here and there, compared.

Each source counts what it brings (its claims), the consumer counts what it holds; the sum
over sources is the consumer's number, whatever tp, order or tokens per block either has.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstow.memory.arena import Arena
from kvstow.memory.digest import MODULUS, digest
from kvstow.plan.blocklist import Blocks
from kvstow.plan.layout import Layout
from kvstow.plan.route import Claims
from kvstow.plan.spec import Full
from kvstow.transfer.options import DigestPolicy
from kvstow.transfer.wire import Claim, Sample

SAMPLE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A sample whose digests differ."""

    sample: Sample
    here: int
    there: int


def samples(
    layout: Layout, start_token: int, num_tokens: int, policy: DigestPolicy
) -> tuple[Sample, ...]:
    """What to compare: everything, a little of every group chosen at random, or nothing.

    A little is one layer and up to 64 tokens; the last ones where older ones may be gone.
    """
    if policy == "off":
        return ()
    found: list[Sample] = []
    for rows in layout.groups:
        names = tuple(layer.name for layer in rows.group.layers)
        start, stop = start_token, num_tokens
        if policy == "sample":
            names = (random.choice(names),)
            start = max(start_token, num_tokens - SAMPLE_TOKENS)
            if isinstance(rows.group.retention, Full):
                start = random.randint(start_token, start)
                stop = min(num_tokens, start + SAMPLE_TOKENS)
        found.append(Sample(names, start, stop))
    return tuple(found)


def digests(
    arena: Arena, blocks: Mapping[int, Blocks], wanted: Sequence[Sample], claims: Claims | None
) -> tuple[int, ...]:
    """The digest of each sample; layers that this arena does not hold count nothing."""
    found: list[int] = []
    for sample in wanted:
        held = [name for name in sample.layers if name in arena.layout.layers]
        groups = {arena.layout.layers[name][0] for name in held}
        listed = {g: blocks[g] for g in groups if g in blocks}
        found.append(
            digest(arena, listed, sample.stop_token, layers=held, start_token=sample.start_token,
                   claims=claims)
        )  # fmt: skip
    return tuple(found)


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
