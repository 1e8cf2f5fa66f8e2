"""Prompts that come back from host memory inside vLLM on one GPU: kvstow and OffloadingConnector.

    python bench/vllm_offload_gpu.py --json FILE [--models dense] [--rounds 2] [--eager]

Three engines share a GPU and take turns: one without a connector, one with kvstow's host tier, one
with vLLM's OffloadingConnector. In every round each computes the same prompts, asks for them again
while they are cached (the floor), computes others until the pool has forgotten them (the time of
which shows what stores cost), and asks once more. `back` is that last time to first token; without
a connector it is computing again.

Prompts are one token longer than their length says, so that one token is computed wherever the rest
comes from. Texts are compared with those of the cached prompt. With `--try`: tiny models on a CPU,
without OffloadingConnector, which has none.
"""

import argparse
import json
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import machine
from vllm_engines import (
    BLOCK,
    MODELS,
    EngineOptions,
    Prompts,
    Remote,
    connector,
    made_small,
    spread,
    use,
    versions,
)

THEIRS = "OffloadingConnector"


@dataclass
class Settings:
    """How much is measured. `others` prompts of `other_tokens` make the pool forget the rest."""

    options: EngineOptions
    prompts: Prompts
    host_bytes: int = 40 << 30
    lengths: tuple[int, ...] = (2048, 8192, 16384)
    repeats: int = 4
    rounds: int = 2
    others: int = 24
    other_tokens: int = 4000
    burst: int = 8
    burst_tokens: int = 4096
    used: int = 2000


def transfers(settings: Settings) -> dict[str, dict[str, Any] | None]:
    """The engines, by name."""
    ours = connector("kvstow", host_bytes=settings.host_bytes)
    theirs = connector(THEIRS, cpu_bytes_to_use=settings.host_bytes, block_size=BLOCK)
    return {"none": None, "kvstow": ours} | ({} if settings.options.cpu else {THEIRS: theirs})


class Turns:
    """What one engine has shown in its turns."""

    def __init__(self, engine: Remote, settings: Settings) -> None:
        self.engine, self._settings = engine, settings
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)
        self._texts = self._wrong = 0

    def round(self, prompts: dict[int, list[list[int]]], others: list[list[int]]) -> None:
        """Compute, ask again, forget, ask once more."""
        texts = {
            n: [self._asked(n, each, ("computed", "cached")) for each in same]
            for n, same in prompts.items()
        }
        jobs = [{"prompt": each, "max_tokens": 1} for each in others]
        self._seconds["others"].append(self.engine.run(jobs, 4)["seconds"])
        for n, same in prompts.items():
            for each, text in zip(same, texts[n], strict=True):
                self._texts += 1
                self._wrong += self._asked(n, each, ("back",)) != text

    def _asked(self, n: int, prompt: list[int], kinds: tuple[str, ...]) -> list[int]:
        """Ask for a prompt as often as there are kinds; its last text."""
        for kind in kinds:
            job = self.engine.first({"prompt": prompt})
            self._seconds[f"{kind} {n}"].append(job["first"])
        return job["text"]

    def burst(self, prompts: list[list[int]], others: list[list[int]]) -> None:
        """Several prompts at once, of which none is cached any more."""
        for some in (prompts, others):
            self.engine.run([{"prompt": each, "max_tokens": 1} for each in some], 4)
        out = self.engine.run([{"prompt": each, "max_tokens": 1} for each in prompts], len(prompts))
        self._seconds["burst"] += [job["first"] for job in out["jobs"]]

    def result(self) -> dict[str, Any]:
        lengths = {
            str(n): {
                kind: spread(self._seconds[f"{kind} {n}"])
                for kind in ("computed", "cached", "back")
            }
            for n in self._settings.lengths
        }
        return {
            "lengths": lengths,
            "others_s": [round(each, 3) for each in self._seconds["others"]],
            "burst": spread(self._seconds["burst"]),
            "texts": self._texts,
            "wrong_texts": self._wrong,
            "counts": self.engine.counts(),
        }


def started(engines: list[Remote]) -> None:
    """All at a time."""
    for engine in engines:
        engine.imported()
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.ready()


def measure(model: str, settings: Settings) -> dict[str, Any]:
    """All engines in turns."""
    with ExitStack() as ending:
        engines: dict[str, Turns] = {}
        for port, (name, transfer) in enumerate(transfers(settings).items()):
            engine = Remote(5900 + 10 * port, model, settings.options, transfer)
            ending.callback(engine.close)
            engines[name] = Turns(engine, settings)
        started([turns.engine for turns in engines.values()])
        use([turns.engine for turns in engines.values()], settings.prompts, settings.used)
        for number in range(settings.rounds):
            print(f"round {number}", flush=True)
            play(engines, settings)
        burst(engines, settings)
        return {name: turns.result() for name, turns in engines.items()}


def play(engines: dict[str, Turns], settings: Settings) -> None:
    """One round of each engine, with the same prompts."""
    draw = settings.prompts
    prompts = {n: [draw(n + 1) for _ in range(settings.repeats)] for n in settings.lengths}
    others = [draw(settings.other_tokens) for _ in range(settings.others)]
    for turns in engines.values():
        turns.round(prompts, others)


def burst(engines: dict[str, Turns], settings: Settings) -> None:
    """Several prompts at once that were forgotten before."""
    draw = settings.prompts
    prompts = [draw(settings.burst_tokens + 1) for _ in range(settings.burst)]
    others = [draw(settings.other_tokens) for _ in range(settings.others // 2)]
    for turns in engines.values():
        turns.burst(prompts, others)


def ratios(result: dict[str, Any]) -> dict[str, Any]:
    """kvstow by OffloadingConnector: first tokens by length, and the others' time by none's."""
    if THEIRS not in result:
        return {}
    ours, theirs, none = (result[name] for name in ("kvstow", THEIRS, "none"))
    back = {
        n: round(ours["lengths"][n]["back"]["p50_ms"] / theirs["lengths"][n]["back"]["p50_ms"], 2)
        for n in ours["lengths"]
    }
    middle = {name: sorted(result[name]["others_s"]) for name in result}
    others = {
        name: round(each[len(each) // 2] / middle["none"][len(none["others_s"]) // 2], 3)
        for name, each in middle.items()
    }
    return {"back": back, "others_to_none": others}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=["dense"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--try", dest="cpu", action="store_true", help="tiny models, on a CPU")
    chosen = parser.parse_args()
    document: dict[str, Any] = json.loads(chosen.json.read_text()) if chosen.json.exists() else {}
    document |= {"machine": machine(), "versions": versions()}
    for name in chosen.models:
        config = made_small(MODELS[name]) if chosen.cpu else MODELS[name]
        options = EngineOptions(memory_bytes=8 << 30, eager=chosen.eager)
        settings = Settings(options, Prompts(config["vocab_size"]), rounds=chosen.rounds)
        if chosen.cpu:
            tiny = EngineOptions(memory_bytes=32 << 20, max_tokens=1024, cpu=True)
            settings = Settings(
                tiny, settings.prompts, 128 << 20, (64, 512), 1, 1, 24, 600, 3, 200, 10
            )
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(config))
            result = measure(folder, settings)
        document[name] = result | {"ratios": ratios(result)}
        print(json.dumps(document[name]), flush=True)
        chosen.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
