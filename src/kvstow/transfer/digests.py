"""Digests across a transfer: which tokens of which layers, here and there, compared.

Each source counts what it brings (its claims), the consumer counts what it holds; the sum
over sources is the consumer's number, whatever tp, order or tokens per block either has.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from random import Random
from typing import TYPE_CHECKING, get_args

import numpy as np

from kvstow.memory.arena import Arena
from kvstow.memory.digest import MODULUS, DigestCount, DigestOf, counted_states, prepared
from kvstow.plan.layout import Layout
from kvstow.plan.view import ceil_div
from kvstow.route.blocks import Blocks, Tokens
from kvstow.route.route import Claims
from kvstow.transfer.channel.messages import Claim, Sample
from kvstow.transfer.loop import Routine, result_of
from kvstow.transfer.options import DigestPolicy

if TYPE_CHECKING:
    from kvstow.transfer.peers.endpoint import Endpoint
    from kvstow.transfer.transport.mapped import MappedPeer

LEAST_SHARE = 128
"""A sample is at most one cell in so many: digests are slower than transfers."""


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
        layers = rows.group.layers
        if policy == "always":
            names = tuple(layer.name for layer in layers)
            result.append(Sample(names, None, start_token, num_tokens, 1, 0))
            continue
        spec = random.choice(layers)
        head = random.choice([h for piece in spec.heads.pieces for h in range(*piece)])
        every = max(
            _states(layouts, spec.name), ceil_div(LEAST_SHARE, len(layers) * spec.heads.size)
        )
        low, high = counted_states(rows.group, spec, num_tokens, start_token)
        phase = random.randrange(low, max(low + 1, high)) % every
        heads = head, head + 1
        result.append(Sample((spec.name,), heads, start_token, num_tokens, every, phase))
    return tuple(result)


def _states(layouts: Sequence[Layout], layer: str) -> int:
    """States of a layer in a row, where rows are shortest."""
    return min(each.layers[layer][1].states for each in layouts if layer in each.layers)


def ready_digests(
    arena: Arena, blocks: Mapping[int, Blocks], parts: Sequence[Sample], claims: Claims | None
) -> DigestCount:
    """What counts the digest of each sample; nothing counts of layers that this arena does not
    hold."""
    counts: list[DigestOf] = []
    for sample in parts:
        held = [name for name in sample.layers if name in arena.layout.layers]
        groups = {arena.layout.layers[name][0] for name in held}
        counts.append(
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
    return prepared(arena, counts)


def digests(
    arena: Arena, blocks: Mapping[int, Blocks], parts: Sequence[Sample], claims: Claims | None
) -> tuple[int, ...]:
    """The digest of each sample, taken now."""
    return ready_digests(arena, blocks, parts, claims)()


def in_worker(
    endpoint: "Endpoint",
    count: Callable[[], tuple[int, ...]],
    mapped: "MappedPeer | None" = None,
) -> Routine[tuple[int, ...]]:
    """Count in the agent's second thread. It may go on when nobody waits any more: memory that is
    `mapped` is held until it has ended."""
    with ExitStack() as undo:
        if mapped is not None:
            mapped.hold()
            undo.callback(mapped.release)
        running = endpoint.worker.submit(count)
        release = undo.pop_all().close
    running.add_done_callback(lambda _: (release(), endpoint.wake()))
    return (yield from result_of(running))


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
        parts = samples([arena.layout], 0, 1, policy, random=Random(0))
        digests(arena, blocks, parts, None)


def mismatches(
    parts: Sequence[Sample], here: Sequence[int], there: Sequence[Sequence[int]]
) -> list[tuple[Sample, int, int]]:
    """Samples whose sums over all sources are not what the consumer has, with both numbers."""
    sums = (sum(column) % MODULUS for column in zip(*there, strict=True))
    return [each for each in zip(parts, here, sums, strict=True) if each[1] != each[2]]


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
