# ruff: noqa: E402
"""Attention of one new token in place: every order against per-layer `LBHNC`, on one CUDA machine.

    PYTHONPATH=src python bench/attention.py --json bench/results/attention_gpu.json

64 sequences of 8,192 tokens, 32 query heads on 8 kv heads of 128, bf16; all layers of a model, or
half of them where two arenas would not fit: 16, where every stride is a power of two, and 18 and
28, where those of heads and rows are not. Above 1.00 is faster than `LBHNC`. Seven rounds, each
with fresh memory; the median counts.
"""

import os
import sys

sys.path[0] = os.path.dirname(sys.path[0])

import statistics
from collections.abc import Callable
from itertools import product

import numpy as np
import torch
from bench.caches import Cache
from bench.machine import arguments, write

from kvstow.memory.arena import Arena
from kvstow.memory.kernels.attention import paged_attention
from kvstow.plan.layout import ORDERS

DEVICE = torch.device("cuda:0")
SEQUENCES, TOKENS, QUERY_HEADS = 64, 8192, 32
SPACERS = tuple(gib << 30 for gib in (0, 3, 7, 1, 5, 11, 13))
"""Bytes set aside before a round: where pages lie in DRAM moves results by half a percent."""
MODELS = (
    ("Llama-3.1-8B, half of it", 16, ORDERS[1:]),
    ("Qwen3-8B, half of it", 18, ("BLHNC", "BLNHC", "BHLNC")),
    ("Qwen3-1.7B", 28, ("BLHNC", "BLNHC", "BHLNC")),
)


class Pool:
    """One order's arena, filled, with random block tables."""

    def __init__(self, order: str, cache: Cache, query: torch.Tensor) -> None:
        per_sequence = TOKENS // cache.tokens
        num_blocks = SEQUENCES * per_sequence + 1
        self.arena = Arena(cache.layout(order, num_blocks), device=DEVICE)
        self.views = [(self.arena.field(name, "k"), self.arena.field(name, "v"))
                      for name in self.arena.layout.layers]  # fmt: skip
        generator = torch.Generator(DEVICE).manual_seed(0)
        for k, v in self.views:
            logical = torch.randn(k.shape[1:], generator=generator, device=DEVICE)
            for view in (k, v):
                view.copy_(logical.bfloat16().expand_as(view))
                view += torch.rand((view.shape[0], 1, 1, 1), device=DEVICE).bfloat16()
        ids = np.random.default_rng(0).permutation(num_blocks - 1) + 1
        self.table = torch.as_tensor(ids.reshape(SEQUENCES, per_sequence), dtype=torch.int32,
                                     device=DEVICE)  # fmt: skip
        self.query = query

    def attend(self, layer: int) -> torch.Tensor:
        k, v = self.views[layer % len(self.views)]
        return paged_attention(self.query, k, v, self.table, num_tokens=TOKENS)

    def seconds(self, layer: int) -> float:
        """GPU time of all layers once, one after the other, per layer."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for i in range(len(self.views)):
            self.attend(layer + i)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / len(self.views)


def compared(cache: Cache, order: str, baseline: Pool, repeats: int) -> dict[str, float]:
    """Medians of this round, in seconds per layer."""
    other = Pool(order, cache, baseline.query)
    times: dict[str, list[float]] = {"base": [], "other": [], "again": []}
    for i in range(repeats + 2):
        found = {"base": baseline.seconds(i), "other": other.seconds(i),
                 "again": baseline.seconds(i)}  # fmt: skip
        if i >= 2:
            for name, value in found.items():
                times[name].append(value)
    other.arena.close()
    return {name: statistics.median(values) for name, values in times.items()}


def ratios(rounds: list[dict[str, float]], cache: Cache) -> dict[str, object]:
    """The median over rounds of every figure, and the first of them of each round."""
    nbytes = SEQUENCES * TOKENS * cache.heads * cache.dim * 2 * 2

    def typical(figure: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(map(figure, rounds))

    return {
        "of_LBHNC": round(typical(lambda r: r["base"] / r["other"]), 4),
        "LBHNC_again": round(typical(lambda r: r["base"] / r["again"]), 4),
        "GB/s": round(typical(lambda r: nbytes / r["other"] / 1e9)),
        "LBHNC_GB/s": round(typical(lambda r: nbytes / r["base"] / 1e9)),
        "rounds": [round(r["base"] / r["other"], 4) for r in rounds],
    }


def main() -> None:
    options = arguments(__doc__ or "")
    if not torch.cuda.is_available():
        raise SystemExit("bench/attention.py needs a CUDA device")
    rounds: dict[str, list[dict[str, float]]] = {}
    results: dict[str, object] = {}
    query = torch.randn(SEQUENCES, QUERY_HEADS, 1, 128, device=DEVICE).bfloat16()
    for spacer, (model, layers, orders), tokens in product(SPACERS, MODELS, (16, 64)):
        aside = torch.empty(spacer, dtype=torch.uint8, device=DEVICE)
        cache = Cache(model, layers, 8, 128, tokens)
        baseline = Pool("LBHNC", cache, query)
        for order in orders:
            name = f"{order}, {tokens} tokens per block, {layers} layers"
            found = rounds.setdefault(name, [])
            found.append(compared(cache, order, baseline, options.repeats))
            results[name] = ratios(found, cache)
            print(name, results[name], flush=True)
            torch.cuda.empty_cache()
            write(options.json, results)
        baseline.arena.close()
        del baseline, aside
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
