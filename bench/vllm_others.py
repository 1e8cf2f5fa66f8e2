"""How much requests that decode are slowed by prompts that are handed over beside them.

Prefill and decode share one GPU here, which processes take turns on.
"""

import statistics
from typing import Any

from vllm_engines import Remote
from vllm_pairs import Settings, prefilled

CACHED, HANDED_OVER = "cached", "handed over"
RUNNING = 8
STEPS = 200
PER_SECOND = 10
"""About what one prefill engine on an H200 computes: with Llama-8B's shape, 2,048 tokens took 52 ms
and 8,192 took 220."""


def others_slowed(prefill: Remote, decode: Remote, settings: Settings) -> dict[str, Any]:
    """Milliseconds per token of requests that decode while prompts come in, from the cache and
    handed over, in turns. First one prompt after the other, then as many as one prefill engine
    makes. Medians, and every reading."""
    fast = _Readings(decode, settings, settings.burst, 0.0)
    paced = _Readings(decode, settings, PER_SECOND, 1 / PER_SECOND)
    for _ in range(settings.rounds):
        fast.take(CACHED)
        fast.take(HANDED_OVER, prefill)
        paced.take(CACHED)
        paced.take(HANDED_OVER, prefill)
    return fast.result() | {f"{PER_SECOND} prompts a second": paced.result()}


class _Readings:
    """Readings while so many prompts come in, each so many seconds after the one before."""

    def __init__(self, decode: Remote, settings: Settings, count: int, every: float) -> None:
        self._decode = decode
        self._settings = settings
        self._count = count
        self._every = every
        self._found: dict[str, list[float]] = {}

    def take(self, name: str, prefill: Remote | None = None) -> None:
        """One reading, of prompts that `prefill` hands over, or that are cached."""
        draw, tokens = self._settings.prompts, self._settings.burst_tokens + 1
        running = [{"prompt": draw(256), "max_tokens": STEPS} for _ in range(RUNNING)]
        prompts = [draw(tokens) for _ in range(self._count)]
        if prefill is None:
            coming = [{"prompt": prompt} for prompt in prompts]
            self._decode.run(coming, 4)
        else:
            coming = prefilled(prefill, prompts)
        coming = [
            {**job, "max_tokens": 1, "after": k * self._every} for k, job in enumerate(coming)
        ]
        out = self._decode.run([*running, *coming], RUNNING + 1)
        ran = out["jobs"][:RUNNING]
        per_token = [(job["total"] - job["first"]) / (STEPS - 1) for job in ran]
        self._found.setdefault(name, []).append(1000 * statistics.mean(per_token))

    def result(self) -> dict[str, Any]:
        """Medians, every reading, and what one prompt that is handed over costs the others."""
        medians = {name: statistics.median(found) for name, found in self._found.items()}
        lost = (medians[HANDED_OVER] - medians[CACHED]) * (STEPS - 1) / self._count
        return {
            **{f"{name}, ms per token": round(ms, 3) for name, ms in medians.items()},
            "slower, %": round(100 * (medians[HANDED_OVER] / medians[CACHED] - 1), 2),
            "a hand-over costs others, ms": round(lost, 2),
            "readings": {
                name: [round(ms, 3) for ms in found] for name, found in self._found.items()
            },
        }
