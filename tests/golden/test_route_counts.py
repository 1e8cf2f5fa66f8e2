"""Moves per destination block between layouts of real models: counts that can be derived
by hand from the model's facts, and change only on purpose."""

import pytest

from kvstow.plan.layout import ORDERS
from kvstow.plan.sizing.plan import Deployment
from kvstow.route.price import price
from kvstow.route.sources import sources

Counts = dict[str, dict[int, int]]


def counts(here: Deployment, there: Deployment, rank: int) -> Counts:
    """By destination group and source rank, the moves of one destination block."""
    destination = there.layout(rank)
    found: Counts = {}
    for source in sources(here.on_rank(0).layouts, destination):
        for g, rows in enumerate(destination.groups):
            moves = price([c for c in source.route.pairs if c.groups[1] == g]).copies
            if moves:
                assert moves.denominator == 1
                found.setdefault(rows.group.name, {})[source.index] = int(moves)
    return found


# 80 layers, 8 kv heads, 16 tokens: two heads on each of 4 ranks, one on each of 8.
LLAMA_70B = {
    "LBHNC": 80,
    "LBNHC": 80 * 16,
    "LHBNC": 80,
    "BLHNC": 80,
    "BLNHC": 80 * 16,
    "BHLNC": 1,
}


@pytest.mark.parametrize("order", ORDERS)
def test_llama_70b_from_tp_4_to_tp_8(order):
    here = Deployment(model="llama-3.1-70b", tp=4, order=order, num_slabs=16)
    there = Deployment(model="llama-3.1-70b", tp=8, order=order, num_slabs=16)
    assert counts(here, there, rank=3) == {"full": {1: LLAMA_70B[order]}}


def test_llama_70b_with_heads_outermost_takes_one_move_per_block_and_peer():
    here = Deployment(model="llama-3.1-70b", tp=8, order="BHLNC", num_slabs=16)
    there = Deployment(model="llama-3.1-70b", tp=2, order="BHLNC", num_slabs=16)
    assert counts(here, there, rank=1) == {"full": {4: 1, 5: 1, 6: 1, 7: 1}}


PAIRS = {
    # Equal layouts: one row is one move, in every group.
    "v4-flash": (
        {"model": "deepseek-v4-flash"},
        {"model": "deepseek-v4-flash"},
        0,
        {name: {0: 1} for name in ("full", "window128.64", "window128.8", "window8")},
    ),
    # 12 layers × 8 heads × 4 source blocks.
    "gpt-oss 16 to 64 tokens": (
        {"model": "gpt-oss-20b"},
        {"model": "gpt-oss-20b", "block_tokens": 64},
        0,
        {"full": {0: 12 * 8 * 4}, "window128": {0: 12 * 8 * 4}},
    ),
    # Tokens outside heads: a source block is one piece of its layer.
    "gpt-oss 16 to 64 tokens, tokens outermost": (
        {"model": "gpt-oss-20b", "order": "LBNHC"},
        {"model": "gpt-oss-20b", "order": "LBNHC", "block_tokens": 64},
        0,
        {"full": {0: 12 * 4}, "window128": {0: 12 * 4}},
    ),
    # The latent is alike on all ranks: one peer, and not the same one for every rank.
    "deepseek-v3 tp 8 to 4": (
        {"model": "deepseek-v3", "tp": 8},
        {"model": "deepseek-v3", "tp": 4},
        2,
        {"full": {2: 1}},
    ),
    # Every head of every token; the last of a layer and the first of the next follow each
    # other on both sides.
    "llama-8b heads and tokens swapped": (
        {"model": "llama-3.1-8b"},
        {"model": "llama-3.1-8b", "order": "BLNHC"},
        0,
        {"full": {0: 32 * 8 * 16 - 31}},
    ),
    # 8 layers from each of two stages.
    "llama-8b pp 4 to 2": (
        {"model": "llama-3.1-8b", "pp": 4},
        {"model": "llama-3.1-8b", "pp": 2},
        1,
        {"full": {2: 1, 3: 1}},
    ),
    # 61 latents, two source blocks to a destination block, 4 pairs to 2 blocks.
    "kimi-k2 16 to 24 tokens": (
        {"model": "kimi-k2", "order": "LBNHC"},
        {"model": "kimi-k2", "order": "LBNHC", "block_tokens": 24},
        0,
        {"full": {0: 61 * 2}},
    ),
    # 24 mamba layers: x, B, C and the state; 4 attention layers, heads outermost.
    "nemotron-h tp 8 to 4": (
        {"model": "nemotron-h-8b", "tp": 8, "order": "BHLNC"},
        {"model": "nemotron-h-8b", "tp": 4, "order": "BHLNC"},
        1,
        {"full": {2: 1, 3: 1}, "state": {2: 24 * 4, 3: 24 * 4}},
    ),
    # 29 mamba layers: x and state from both; B and C, alike on both, join rank 0's state.
    "bamba tp 2 to 1": (
        {"model": "bamba-9b", "tp": 2},
        {"model": "bamba-9b"},
        0,
        {"full": {0: 3, 1: 3}, "state": {0: 29 * 2, 1: 29 * 2}},
    ),
    # 2 kv heads on 4 ranks: rank 1 needs head 0; 36 linear layers of q, k, v and state.
    "qwen3-next tp 2 to 4": (
        {"model": "qwen3-next-80b", "tp": 2},
        {"model": "qwen3-next-80b", "tp": 4},
        1,
        {"full": {0: 1}, "state": {0: 36 * 4}},
    ),
}


@pytest.mark.parametrize(("here", "there", "rank", "expected"), PAIRS.values(), ids=PAIRS)
def test_moves_per_block(here, there, rank, expected):
    assert (
        counts(Deployment(num_slabs=16, **here), Deployment(num_slabs=16, **there), rank)
        == expected
    )
