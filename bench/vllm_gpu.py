"""First tokens inside vLLM on one GPU: kvstow beside vLLM's own connectors.

    python bench/vllm_gpu.py --json FILE [--parts handover] [--models dense] [--variants kvstow]

Two engines on one GPU, dummy weights that were drawn large enough for the text to depend on the
cache, token-id prompts, pools that were used before so that free blocks lie scattered.

handover   prompts are prefilled in one engine; measured is the time to first token in the other,
           with kvstow (rows mapped; by NIXL only; without a digest), NixlPushConnector and
           NixlConnector; beside it the same prompts computed again, and with the prefix cached
           there (the floor)
failures   what a handed-over request gets whose ticket has expired, is forged, or is of another
           prompt, and whose prefill engine is killed
damage     what a prompt gets whose rows were damaged in host memory or on disk
block sizes
           engines with 16 and with 64 tokens per block, from the one to the other and back: pieces
           of rows as the agent chooses to move them, the same with every byte compared, and rows
           that are moved whole and cut there; beside it engines with equal blocks, whose texts say
           how often texts differ though all bytes are right

All texts are compared with those of an engine that computed the prompt itself. The file is
written after every variant, and keeps what an earlier run has measured of other parts.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import vllm_damage
from machine import as_text, machine
from vllm_block_sizes import WAYS, measure_block_sizes, sized_pair
from vllm_engines import (
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
from vllm_failures import LEASE_SECONDS, measure_damage, measure_failures
from vllm_others import others_slowed
from vllm_pairs import Save, Settings, begun, computed_apart, counted, pair, prefilled
from vllm_sleep import measure_sleep, sleepy_pair

PARTS = ("handover", "failures", "damage", "block sizes", "sleep")
HANDOVER = {
    "kvstow": connector("kvstow"),
    "kvstow, NIXL only": connector("kvstow", mapped=False),
    "kvstow, digest off": connector("kvstow", digest="off"),
    "NixlPushConnector": connector("NixlPushConnector"),
    "NixlConnector": connector("NixlConnector"),
}


# ── handover ──────────────────────────────────────────────────────────────────────────


def handed_text(
    prefill: Remote, decode: Remote, prompt: list[int], *, stops_short: bool
) -> tuple[dict[str, Any], list[int]]:
    """One prompt that was handed over, and the right text, of a cache computed in the same pieces.

    A prefill engine that stops one token short leaves the last whole block out of its own prefix
    cache (vLLM enters only what a prompt of that length can find): its prompt is computed apart,
    and its last token is the one that follows.
    """
    if not stops_short:
        job = decode.first(prefilled(prefill, [prompt])[0])
        return job, prefill.first({"prompt": prompt})["text"]
    told = computed_apart(prefill, prompt[:-1])
    job = decode.first(prefilled(prefill, [[*prompt[:-1], told[0]]])[0])
    return job, told[1:]


def handed_over(prefill: Remote, decode: Remote, settings: Settings, *, name: str) -> Any:
    """Times to first token of handed-over prompts, and whether all texts were right."""
    result: dict[str, Any] = {"lengths": {}, "in_flight": {}, "wrong_texts": 0, "texts": 0}
    firsts = [
        decode.first(prefilled(prefill, [settings.prompts(settings.first)])[0]) for _ in range(4)
    ]
    result["first_pulls_ms"] = [round(1000 * job["first"], 1) for job in firsts]
    slow = name == "NixlConnector"
    stops_short = settings.windows and name.startswith("kvstow")
    for length in settings.slow if slow else settings.lengths:
        seconds, before = [], decode.counts()
        for _ in range(2 if slow else settings.repeats):
            prompt = settings.prompts(length + 1)
            job, right = handed_text(prefill, decode, prompt, stops_short=stops_short)
            seconds.append(job["first"])
            result["texts"] += 1
            result["wrong_texts"] += job["text"] != right
        result["lengths"][str(length)] = spread(seconds) | counted(before, decode.counts())
    for many in () if slow else settings.in_flight:
        jobs = prefilled(
            prefill, [settings.prompts(settings.burst_tokens + 1) for _ in range(settings.burst)]
        )
        before = decode.counts()
        out = decode.run([{**job, "max_tokens": 1} for job in jobs], many)
        figures = spread([job["first"] for job in out["jobs"]])
        figures |= counted(before, decode.counts())
        figures["requests_per_s"] = round(len(jobs) / out["seconds"], 2)
        result["in_flight"][str(many)] = figures
    return result


def alone(decode: Remote, settings: Settings) -> dict[str, Any]:
    """The same lengths computed, and with the prefix cached here; bursts likewise."""
    result: dict[str, Any] = {"computed": {}, "cached": {}, "cached_in_flight": {}}
    for length in settings.lengths:
        computed, cached = [], []
        job: dict[str, Any] = {}
        for _ in range(settings.repeats):
            if not job or not settings.brief:
                job = {"prompt": settings.prompts(length + 1), "max_tokens": 1}
                computed.append(decode.first(job)["first"])
            time.sleep(0.1)  # as long as another engine takes to prefill, in the other figures
            cached.append(decode.first(job)["first"])
        result["computed"][str(length)] = spread(computed)
        result["cached"][str(length)] = spread(cached)
    for many in settings.in_flight:
        prompts = [settings.prompts(settings.burst_tokens + 1) for _ in range(settings.burst)]
        jobs = [{"prompt": prompt, "max_tokens": 1} for prompt in prompts]
        decode.run(jobs, 4)
        out = decode.run(jobs, many)
        figures = spread([job["first"] for job in out["jobs"]])
        figures["requests_per_s"] = round(len(jobs) / out["seconds"], 2)
        result["cached_in_flight"][str(many)] = figures
    return result


def wrong_cache_changes_text(prefill: Remote, decode: Remote, settings: Settings) -> bool:
    """Whether a prompt that is given another one's cache, on purpose, gets another text."""
    from kvstow.adapters.vllm.protocol import OURS, EngineRequest, prompt_digest

    one, other = (settings.prompts(513) for _ in range(2))
    job = prefilled(prefill, [one])[0]
    carried = job["params"][OURS]
    request = EngineRequest(id="", tokens=other)
    carried["prompt"] = prompt_digest(request, carried["num_tokens"])
    wrong = decode.first({**job, "prompt": other})["text"]
    return wrong != prefill.first({"prompt": other})["text"]


def measure_handover(engines: list[Remote], *, name: str, settings: Settings, save: Save) -> None:
    """All figures of one connector, with the engines' own beside kvstow's."""
    result: dict[str, Any] = {}
    try:
        begun(engines)
        use(engines, settings.prompts, settings.used)
        prefill, decode = engines
        result |= handed_over(prefill, decode, settings, name=name)
        save(name, result)
        if name != "NixlConnector" and not settings.brief:  # 16 of its hand-overs take a minute
            result["others"] = others_slowed(prefill, decode, settings)
        if name == "kvstow":
            changes = wrong_cache_changes_text(prefill, decode, settings)
            result["a_wrong_cache_changes_the_text"] = changes
            save("decode alone", alone(decode, settings))
    except Exception as error:  # one connector's failure is a result, too
        result["error"] = repr(error)[:500]
    finally:
        result["shutdown_s"] = [engine.close() for engine in engines]
    save(name, result)


# ── from the command line ─────────────────────────────────────────────────────────────


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--variants", nargs="+", choices=tuple(HANDOVER), default=list(HANDOVER))
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=4, help="of requests beside hand-overs")
    parser.add_argument("--quick", action="store_true", help="few lengths, few repeats")
    parser.add_argument("--brief", action="store_true", help="hand-overs and cached prompts alone")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--try", dest="cpu", action="store_true", help="tiny models, on a CPU")
    chosen = parser.parse_args()
    document: dict[str, Any] = json.loads(chosen.json.read_text()) if chosen.json.exists() else {}
    document |= {"machine": machine(), "versions": versions()}
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            run
            for part in chosen.parts
            for model in chosen.models
            for run in planned(chosen, part, model, Path(folder, f"{part}-{model}"), document)
        ]
        all_engines = [engine for engines, _ in runs for engine in engines]

        def ended(*_: object) -> None:
            """Whoever ends us does not wait: engines are killed at once, not asked to stop."""
            for engine in all_engines:
                engine.kill()
            sys.exit(1)

        signal.signal(signal.SIGTERM, ended)
        try:
            for engine in all_engines:
                engine.imported()
            for engines, run in runs:
                run(engines)
        finally:
            for engine in all_engines:
                engine.kill()


def planned(
    chosen: argparse.Namespace, part: str, model: str, folder: Path, document: dict[str, Any]
) -> list[tuple[list[Remote], Callable[[list[Remote]], None]]]:
    """The runs of one part and their engines, whose processes import vLLM side by side. One
    model's failures are enough."""
    config = made_small(MODELS[model]) if chosen.cpu else MODELS[model]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    settings = settings_of(chosen, config)
    save = saver(chosen.json, document, model, part)
    if part == "handover":
        return [
            (
                pair(str(folder), settings.options, HANDOVER[name]),
                partial(measure_handover, name=name, settings=settings, save=save),
            )
            for name in chosen.variants
        ]
    if part == "block sizes":
        return [
            (
                sized_pair(str(folder), settings, connector("kvstow", **way), sizes),
                partial(measure_block_sizes, name=name, sizes=sizes, settings=settings, save=save),
            )
            for name, (sizes, way) in WAYS.items()
            if name in chosen.ways
        ]
    if model != chosen.models[0]:
        return []
    if part == "damage":
        shared, store = f"kvstow-bench-{os.getpid()}", folder / "store"
        if not chosen.cpu:  # a small pool, so that little makes it forget
            small = replace(settings.options, memory_bytes=5 << 30)
            settings = replace(settings, options=small, filling=3)
        engines = vllm_damage.tier_engines(
            str(folder), settings.options, shared, store, settings.tier_bytes
        )
        run = partial(measure_damage, settings=settings, save=save, shared=shared, folder=store)
        return [(engines, run)]
    if part == "sleep":
        engines = sleepy_pair(str(folder), settings.options, 8 << 30)
        return [(engines, partial(measure_sleep, settings=settings, save=save))]
    transfer = connector("kvstow", lease_seconds=LEASE_SECONDS, transfer_seconds=5)
    engines = pair(str(folder), settings.options, transfer)
    return [(engines, partial(measure_failures, settings=settings, save=save))]


def settings_of(chosen: argparse.Namespace, config: dict[str, Any]) -> Settings:
    options = EngineOptions(memory_bytes=20 << 30, eager=chosen.eager)
    made = Settings(options, Prompts(config["vocab_size"]), rounds=chosen.rounds)
    if chosen.quick:
        made = replace(made, lengths=(2048, 8192, 16384), repeats=3, in_flight=(1, 16), burst=16)
        made = replace(made, rounds=1)
    if chosen.brief:
        made = replace(made, lengths=(64, 2048, 8192, 16384, 32000), in_flight=(1, 16))
        made = replace(made, brief=True)
    if chosen.cpu:
        small = EngineOptions(memory_bytes=32 << 20, max_tokens=1024, cpu=True)
        made = Settings(small, made.prompts, (64, 700), (64,), 2, 1, (1, 4), 4, 200, 20, 300)
        made = replace(made, failing=700, filling=20, tier_bytes=8 << 20, unequal=(64, 700))
        made = replace(made, brief=chosen.brief)
    if "sliding_window" in config:  # its steps take nearly three times as long
        made = replace(made, windows=True, rounds=min(made.rounds, 2))
    return made


def saver(file: Path, document: dict[str, Any], model: str, part: str) -> Save:
    """Keeps what was measured of a variant, prints it, and writes the file."""

    def save(name: str, result: dict[str, Any]) -> None:
        document.setdefault(model, {}).setdefault(part, {})[name] = result
        print(f"{model}, {part}, {name}: {json.dumps(result)}", flush=True)
        file.write_text(as_text(document))

    return save


if __name__ == "__main__":
    main()
