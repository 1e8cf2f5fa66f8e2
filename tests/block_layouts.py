"""Small layouts for tests of pools and ledgers: few slabs, so that everything runs out."""

from dataclasses import replace

import numpy as np

from kvstow.blocks.ledger import Ledger
from kvstow.blocks.pool import Pool
from kvstow.blocks.prompt import Prompt
from kvstow.plan.group import grouped
from kvstow.plan.layout import Layout
from kvstow.plan.pack import packed, separate, union
from kvstow.plan.retention import Chunk, Encoder, Retention, State, Window
from kvstow.plan.spec import LayerSpec
from planning import attention, recurrent


def state(name: str, *, tokens: int = 4, channels: int = 64) -> LayerSpec:
    layer = recurrent(name, channels=channels)
    return replace(layer, block_tokens=tokens, retention=State())


def layer(
    name: str, retention: Retention | None = None, *, tokens: int = 2, dim: int = 32
) -> LayerSpec:
    return attention(name, tokens=tokens, dim=dim, retention=retention)


ALONE = (layer("a"), layer("b"))
HYBRID = (layer("a"), layer("b", Window(5)), layer("c", Window(5)), layer("d", Window(5)))
RECURRENT = (layer("a"), state("b"), state("c"))
MIXED = (
    layer("a", tokens=4),
    layer("b", Window(6), tokens=2, dim=48),
    layer("c", Chunk(4), tokens=2, dim=80),
    layer("d", tokens=1, dim=16),
    layer("e", Encoder(3), tokens=2),
)
WINDOWS = (layer("a", Window(3), tokens=2), layer("b", Window(3), tokens=2))


def packed_layout(layers: tuple[LayerSpec, ...], num_slabs: int) -> Layout:
    return packed(grouped(layers), num_slabs=num_slabs)


def layouts() -> dict[str, Layout]:
    """Layouts by name, of every kind of sharing."""
    alone = packed_layout(ALONE, 12)
    in_pairs = tuple(replace(rows, rows_per_slab=2) for rows in alone.groups)
    return {
        "alone": alone,
        "alone in pairs": replace(alone, num_slabs=6, groups=in_pairs),
        "hybrid": packed_layout(HYBRID, 9),
        "two to one": packed_layout(HYBRID[:3], 6),
        "recurrent": packed_layout(RECURRENT, 6),
        "mixed": packed_layout(MIXED, 9),
        "windows": packed_layout(WINDOWS, 9),
        "union": union(grouped(HYBRID), num_slabs=24),
        "separate": separate(grouped(HYBRID), num_slabs=6, context_tokens=8),
        "two": packed_layout(HYBRID, 2),
    }


def ledger_of(*layers: LayerSpec, num_slabs: int = 60, caching: bool = True) -> Ledger:
    return Ledger(Pool(packed_layout(layers, num_slabs)), caching=caching)


def tokens(count: int, seed: int = 0) -> list[int]:
    """Token ids, other ones for every seed."""
    return np.random.default_rng(seed).integers(0, 50_000, count).tolist()


def computed(ledger: Ledger, prompt: Prompt, step: int | None = None) -> int:
    """Admit and compute a prompt, `step` tokens at a time; its request."""
    step = step or len(prompt)
    request = ledger.admit(prompt, num_tokens=min(step, len(prompt))).request
    while (have := ledger.num_tokens(request)) < len(prompt):
        ledger.grow(request, min(len(prompt), have + step))
    return request


def rows_per_slab(pool: Pool, group: int) -> int:
    return pool.layout.groups[group].rows_per_slab


def all_rows(pool: Pool, group: int) -> int:
    return (pool.layout.num_slabs - 1) * rows_per_slab(pool, group)


def cache(pool: Pool, group: int, count: int) -> np.ndarray:
    """Hold, keep and release rows."""
    ids = pool.hold(group, count)
    pool.keep(group, ids)
    pool.release(group, ids)
    return ids
