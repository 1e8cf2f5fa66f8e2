# ruff: noqa: E402
"""How long the ledger takes: µs per operation, rows and tokens per second.

    python -P bench/blocks.py [--json FILE] [--passes N]

Every figure is the best of many rounds in one process, and of several passes over all of
them, which other work on the machine does not disturb all. `scaling` repeats the main ones
on pools of 10³ to 10⁶ rows and with a full cache, so that growth would show as a ratio.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path = [p for p in sys.path if os.path.abspath(p) != HERE]  # for bench.machine

import argparse
import json
import platform
import timeit
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvstow.blocks.ledger import Ledger
from kvstow.blocks.pool import Pool
from kvstow.blocks.prompt import Prompt
from kvstow.plan.group import grouped
from kvstow.plan.layout import Layout
from kvstow.plan.pack import packed
from kvstow.plan.retention import Full, Retention, Window
from kvstow.plan.spec import DType, Extent, Field, LayerSpec

BLOCK_TOKENS = 16
PROMPT_TOKENS = 8192
ROUNDS = 9


def layer(name: str, retention: Retention, heads: int = 8) -> LayerSpec:
    content = (Extent.whole("content", 128),)
    return LayerSpec(
        name=name,
        retention=retention,
        block_tokens=BLOCK_TOKENS,
        states=BLOCK_TOKENS,
        heads=Extent.whole("head", heads),
        fields=(Field("k", DType.BFLOAT16, content), Field("v", DType.BFLOAT16, content)),
    )


def one_group(num_rows: int) -> Layout:
    return packed(grouped([layer("a", Full())]), num_slabs=num_rows)


def two_groups(num_rows: int) -> Layout:
    """Full and window attention, equally large rows, one slab each: as in gpt-oss."""
    return packed(grouped([layer("a", Full()), layer("b", Window(128))]), num_slabs=num_rows)


def slabs_of_many(num_rows: int) -> Layout:
    """Full and window attention, rows of unequal size, several to a slab."""
    groups = grouped([layer("a", Full()), *(layer(f"b{i}", Window(128), 7) for i in range(5))])
    size = packed(groups, num_slabs=4).groups[0].rows_per_slab
    return packed(groups, num_slabs=max(4, num_rows // size))


def micros(step: Callable[[], object], number: int) -> float:
    """What one step takes, in µs, when nothing else runs."""
    return best(timeit.repeat(step, number=1, repeat=ROUNDS * number))


def prompts(count: int, num_tokens: int, seed: int = 0) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    made = [Prompt.of(rng.integers(0, 100_000, num_tokens)) for _ in range(count)]
    for prompt in made:
        prompt.hashes(BLOCK_TOKENS)  # hashing is measured apart
    return made


def decode_us(layout: Layout, caching: bool) -> float:
    """One step of 256 requests of mixed lengths, one token each."""
    ledger = Ledger(Pool(layout), caching=caching)
    rng = np.random.default_rng(1)
    lengths = 200 + rng.permutation(256)
    handles = np.array([ledger.admit(int(n)).request for n in lengths])
    tokens = lengths.copy()

    def step() -> None:
        nonlocal tokens
        tokens = tokens + 1
        ledger.grow(handles, tokens)

    times = timeit.repeat(step, number=1, repeat=40 * BLOCK_TOKENS)
    rounds = np.reshape(times, (-1, BLOCK_TOKENS))  # all phases of a block in every round
    return float(rounds.min(axis=0).mean()) * 1e6


def admit_release_us(layout: Layout, caching: bool, cached: int) -> tuple[float, float]:
    """Admit a prompt nobody has seen, and release it; `cached` others fill the cache."""
    ledger = Ledger(Pool(layout), caching=caching)
    for prompt in prompts(cached, PROMPT_TOKENS, seed=2):
        ledger.release(ledger.admit(prompt).request)
    fresh = prompts(ROUNDS * 12, PROMPT_TOKENS, seed=3)
    admit, release = [], []
    for prompt in fresh:
        what = prompt if caching else PROMPT_TOKENS
        start = timeit.default_timer()
        request = ledger.admit(what).request
        middle = timeit.default_timer()
        ledger.release(request)
        admit.append(middle - start)
        release.append(timeit.default_timer() - middle)
    return best(admit), best(release)


def hit_us(layout: Layout) -> float:
    """Admit a prompt of which all but the last block is cached."""
    ledger = Ledger(Pool(layout))
    (prompt,) = prompts(1, PROMPT_TOKENS, seed=4)
    ledger.release(ledger.admit(prompt).request)
    times = []
    for _ in range(ROUNDS * 12):
        start = timeit.default_timer()
        admission = ledger.admit(prompt)
        times.append(timeit.default_timer() - start)
        assert admission.hit_tokens == PROMPT_TOKENS - BLOCK_TOKENS
        ledger.release(admission.request)
    return best(times)


def best(seconds: list[float]) -> float:
    """The least, in µs: what it takes when nothing else runs."""
    return float(np.min(seconds)) * 1e6


def rows_per_second(layout: Layout, count: int) -> float:
    """Rows held and released again, through the batch interface."""
    pool = Pool(layout)
    return count / micros(lambda: pool.release(0, pool.hold(0, count)), 20) * 1e6


def hashed_tokens_per_second(num_tokens: int) -> float:
    tokens = np.random.default_rng(5).integers(0, 100_000, num_tokens).astype(np.int32)
    took = micros(lambda: Prompt.of(tokens).hashes(BLOCK_TOKENS), max(4, (1 << 18) // num_tokens))
    return num_tokens / took * 1e6


def figures() -> dict[str, float]:
    plain, both, many = one_group(60_000), two_groups(60_000), slabs_of_many(60_000)
    results: dict[str, float] = {}
    for name, layout in (("one group", plain), ("two groups", both), ("slabs of many", many)):
        results[f"decode 256, {name}, µs"] = decode_us(layout, caching=True)
        results[f"admit 8k uncached, {name}, µs"], results[f"release 8k uncached, {name}, µs"] = (
            admit_release_us(layout, caching=False, cached=0)
        )
        (
            results[f"admit 8k, nothing cached, {name}, µs"],
            results[f"release and store 8k, {name}, µs"],
        ) = admit_release_us(layout, caching=True, cached=0)
        results[f"admit 8k, all but one block cached, {name}, µs"] = hit_us(layout)
        results[f"hold and release, {name}, million rows/s"] = rows_per_second(layout, 4096) / 1e6
    results["hash, million tokens/s"] = hashed_tokens_per_second(PROMPT_TOKENS) / 1e6
    return results


def scaling() -> dict[str, float]:
    results: dict[str, float] = {}
    for num_rows in (1_000, 10_000, 100_000, 1_000_000):
        layout = one_group(num_rows)
        admit, release = admit_release_us(layout, caching=False, cached=0)
        results[f"{num_rows} rows: admit + release 8k uncached, µs"] = admit + release
        results[f"{num_rows} rows: hold and release, million rows/s"] = (
            rows_per_second(layout, 512) / 1e6
        )
    for cached in (0, 10, 100, 1_000):
        admit, release = admit_release_us(one_group(1_000_000), caching=True, cached=cached)
        results[f"{cached} prompts of 8k cached: admit + release and store 8k, µs"] = (
            admit + release
        )
    return results


def best_of(measure: Callable[[], dict[str, float]], passes: int) -> dict[str, float]:
    """Every figure at its best: the least time, the highest rate."""
    results = [measure() for _ in range(passes)]
    return {
        name: (max if name.endswith("/s") else min)(figure[name] for figure in results)
        for name in results[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--passes", type=int, default=3)
    options = parser.parse_args()
    machine = f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}"
    report = {
        "machine": machine,
        "figures": best_of(figures, options.passes),
        "scaling": best_of(scaling, options.passes),
    }
    print(f"{machine}\n", file=sys.stderr)
    for part in ("figures", "scaling"):
        for name, value in report[part].items():
            print(f"{value:10.1f}  {name}")
        print()
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
