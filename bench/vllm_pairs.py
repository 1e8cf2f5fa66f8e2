"""A prefill and a decode engine for benches: how much is measured, and what they hand over."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_engines import TEXT_TOKENS, EngineOptions, Prompts, Remote


@dataclass
class Settings:
    """How much is measured. `slow` lengths are those of a connector that takes seconds.

    Prompts are one token longer than their length says. A whole number of blocks is cached then,
    and wherever the rest comes from, exactly one token is computed, by the same kernels.
    """

    options: EngineOptions
    prompts: Prompts
    lengths: tuple[int, ...] = (64, 512, 2048, 8192, 16384, 32000)
    slow: tuple[int, ...] = (2048, 8192)
    repeats: int = 4
    rounds: int = 4
    in_flight: tuple[int, ...] = (1, 4, 16)
    burst: int = 24
    burst_tokens: int = 4096
    used: int = 2500
    first: int = 2048
    unequal: tuple[int, ...] = (500, 2048, 8192)
    failing: int = 16384
    filling: int = 11
    tier_bytes: int = 1 << 30
    windows: bool = False
    brief: bool = False


Save = Callable[[str, dict[str, Any]], None]

HAND_OVER: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}
"""What prefill is asked with."""


def prefilled(prefill: Remote, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """The prompts as the other engine is to be asked, with what hands their caches over."""
    jobs = [
        {
            "id": f"h{time.monotonic_ns() + i}",
            "prompt": p,
            "max_tokens": 1,
            "params": dict(HAND_OVER),
        }
        for i, p in enumerate(prompts)
    ]
    out = prefill.run(jobs, 4)
    return [
        {"id": job["id"], "prompt": job["prompt"], "params": done["params"]}
        for job, done in zip(jobs, out["jobs"], strict=True)
    ]


def computed_apart(prefill: Remote, prompt: list[int]) -> list[int]:
    """How a prompt goes on, with nothing of it cached: one token more than a text has.

    A text can be compared exactly where both caches were computed in the same pieces. What is
    partly cached is computed in others, rounded in others, and now and then says something else.
    """
    job = {"prompt": prompt, "salt": f"{time.monotonic_ns()}", "max_tokens": TEXT_TOKENS + 1}
    return prefill.first(job)["text"]


def pair(
    model: str,
    options: EngineOptions,
    transfer: dict[str, Any],
    engine: type[Any] = Remote,
    **environment: str,
) -> list[Any]:
    """A prefill and a decode engine that have not started."""
    roles = ("kv_both", "kv_both")
    if transfer["kv_connector"].startswith("Nixl"):
        roles = ("kv_producer", "kv_consumer")
        transfer = {**transfer, "kv_buffer_device": "cpu" if options.cpu else "cuda"}
    return [
        engine(5600 + 100 * i, model, options, {**transfer, "kv_role": role}, **environment)
        for i, role in enumerate(roles)
    ]


def begun(engines: list[Remote]) -> None:
    """Start engines, and wait until all are ready."""
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.ready()


def counted(before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    """What kvstow's own counters say of the pulls between: milliseconds and descriptors each, which
    way they went, and whether they were over before their request was planned."""
    grown = {what: after[what] - before.get(what, 0.0) for what in after}
    pulls = grown.get("pulls accepted", 0)
    if not pulls:
        return {}
    ways = {
        what.removeprefix("pull_paths ").replace("early_pulls", "early,"): int(count)
        for what, count in grown.items()
        if count and what.startswith(("pull_paths", "early_pulls"))
    }
    return {
        "agent_ms": round(1000 * grown["pull_seconds"] / pulls, 1),
        "descriptors": grown["pull_descriptors"] / pulls,
        "megabytes": round(grown["pulled_bytes"] / pulls / 1e6, 1),
        "ways": ways,
    }
