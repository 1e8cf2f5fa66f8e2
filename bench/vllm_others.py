"""How much requests that decode are slowed by prompts that are handed over beside them.

Prefill and decode share one GPU here, which processes take turns on. What the turns for the bytes
alone cost is measured beside it: another process copies as many bytes, in as many pieces, as often,
while the same prompts come from decode's own cache.
"""

import multiprocessing as mp
import statistics
import time
from multiprocessing.connection import Connection
from random import Random
from typing import Any

from vllm_engines import Remote
from vllm_pairs import Settings, counted, prefilled

CACHED, HANDED_OVER = "cached", "handed over"
COPIED = "cached, as many bytes copied by a third process"
RUNNING = 8
STEPS = 200
PER_SECOND = 10
"""About what one prefill engine on an H200 computes: with Llama-8B's shape, 2,048 tokens took 52 ms
and 8,192 took 220."""


class Copier:
    """A process with memory of its own on the GPU, which copies pieces of it, and nothing else."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_copying, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, bursts: int, pieces: int, nbytes: int, every: float) -> None:
        """Copy so many pieces of together so many bytes, again and again, a burst so often."""
        self._pipe.send((bursts, pieces, nbytes, every))

    def end(self) -> float:
        """Wait for it; the milliseconds of a burst."""
        return self._pipe.recv()

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _copying(pipe: Connection) -> None:
    import torch

    memory = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    draw, stream = Random(1), torch.cuda.Stream()
    while True:
        bursts, pieces, nbytes, every = pipe.recv()
        size = nbytes // pieces
        rows = memory[: memory.numel() // size * size].view(-1, size)
        seconds: list[float] = []
        for _ in range(bursts):
            places = [draw.sample(range(len(rows)), 2) for _ in range(pieces)]
            began = time.perf_counter()
            with torch.cuda.stream(stream):
                for source, destination in places:
                    rows[destination].copy_(rows[source], non_blocking=True)
            stream.synchronize()
            seconds.append(time.perf_counter() - began)
            time.sleep(max(0.0, every - seconds[-1]))
        pipe.send(round(1000 * statistics.median(seconds), 2))


def others_slowed(
    prefill: Remote, decode: Remote, settings: Settings, copier: Copier | None
) -> dict[str, Any]:
    """Milliseconds per token of requests that decode while prompts come in: from the cache, handed
    over, and from the cache while a third process copies; in turns. First one prompt after the
    other, then as many as one prefill engine makes. Medians, and every reading."""
    fast = _Readings(decode, settings, settings.burst, 0.0)
    paced = _Readings(decode, settings, PER_SECOND, 1 / PER_SECOND)
    bursts: list[float] = []
    for _ in range(settings.rounds):
        fast.take(CACHED)
        before = decode.counts()
        seconds = fast.take(HANDED_OVER, prefill)
        moved = counted(before, decode.counts())
        if copier is not None and moved:
            pieces, nbytes = round(moved["descriptors"]), int(1e6 * moved["megabytes"])
            copier.begin(settings.burst, pieces, nbytes, seconds)
            fast.take(COPIED)
            bursts.append(copier.end())
        paced.take(CACHED)
        paced.take(HANDED_OVER, prefill)
    result = fast.result() | {f"{PER_SECOND} prompts a second": paced.result()}
    if bursts:
        result["a third process's copies of one prompt, ms"] = statistics.median(bursts)
    return result


class _Readings:
    """Readings while so many prompts come in, each so many seconds after the one before."""

    def __init__(self, decode: Remote, settings: Settings, count: int, every: float) -> None:
        self._decode = decode
        self._settings = settings
        self._count = count
        self._every = every
        self._found: dict[str, list[float]] = {}

    def take(self, name: str, prefill: Remote | None = None) -> float:
        """One reading, of prompts that `prefill` hands over, or that are cached; the seconds to the
        first token of a prompt that came in."""
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
        ran, came = out["jobs"][:RUNNING], out["jobs"][RUNNING:]
        per_token = [(job["total"] - job["first"]) / (STEPS - 1) for job in ran]
        self._found.setdefault(name, []).append(1000 * statistics.mean(per_token))
        return statistics.median(job["first"] for job in came)

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
