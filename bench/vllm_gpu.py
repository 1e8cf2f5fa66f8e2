"""First tokens inside vLLM on one GPU: kvstow beside vLLM's own connectors.

    python bench/vllm_gpu.py --json FILE [--only handover] [--models dense] [--quick]

Two engines on one GPU, dummy weights that were drawn large enough for the text to depend on the
cache, token-id prompts, pools that were used before so that free blocks lie scattered.

handover   prompts are prefilled in one engine; measured is the time to first token in the other,
           with kvstow (sample digest, and none), NixlPushConnector and NixlConnector; beside it
           the same prompts computed again, and with the prefix cached there (the floor)
offload    prompts are computed, pushed out of the pool by others and asked again: kvstow's host
           tier beside vLLM's OffloadingConnector

All texts are compared with those of one engine that computed everything itself.
"""

import argparse
import json
import multiprocessing as mp
import os
import random
import signal
import statistics
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

BLOCK = 16
TEXT_TOKENS = 8
LENGTHS = (64, 512, 2048, 8192, 16384, 32000)
IN_FLIGHT = (1, 4, 16)
MODELS: dict[str, dict[str, Any]] = {
    "dense": {  # Llama-3.1-8B's shape
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "hybrid": {  # Gemma-3-12B's shape: five layers with a window of 1,024 to one without
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
}
ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def connector(name: str, role: str, **options: Any) -> dict[str, Any]:
    """The `kv_transfer_config` of one of the connectors that are compared."""
    if name.startswith("kvstow"):
        return {
            "kv_connector": "KvstowConnector",
            "kv_connector_module_path": "kvstow.adapters.vllm",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"unverified": "dummy weights", **options},
        }
    return {"kv_connector": name, "kv_role": role, "kv_connector_extra_config": options}


# ── an engine in a process of its own ─────────────────────────────────────────────────


def fill_weights(model: Any) -> None:
    """Draw weights from a seeded normal, so large that a wrong cache changes the text."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                continue
            scale = 1.0 if "embed" in name else 0.03
            noise = torch.empty_like(parameter, dtype=torch.float32)
            parameter.copy_(noise.normal_(0.0, scale, generator=generator))


class Engine:
    """vLLM driven step by step, so that every request's first token has its own time."""

    def __init__(self, model: str, memory_bytes: int, transfer: dict[str, Any] | None) -> None:
        from vllm import LLM

        extra = {"kv_transfer_config": transfer} if transfer else {}
        self._llm = LLM(
            model=model,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            attention_backend="FLASH_ATTN",
            max_model_len=33000,
            block_size=BLOCK,
            kv_cache_memory_bytes=memory_bytes,
            gpu_memory_utilization=0.4,  # only checked against what is free: two engines share it
            enable_prefix_caching=True,
            max_num_batched_tokens=8192,
            **extra,
        )
        self._llm.apply_model(fill_weights)
        self._count = 0

    def run(self, jobs: list[dict[str, Any]], in_flight: int = 1) -> dict[str, Any]:
        """Run prompts, so many at once; per prompt the seconds to its first token, and its text."""
        waiting = list(enumerate(jobs))[::-1]
        running: dict[str, int] = {}
        done: list[dict[str, Any]] = [{} for _ in jobs]
        begun = time.perf_counter()
        while waiting or running:
            while waiting and len(running) < in_flight:
                index, job = waiting.pop()
                running[self._add(job)] = index
                done[index]["began"] = time.perf_counter()
            for output in self._llm.llm_engine.step():
                key = output.request_id.split("-")[0]
                entry = done[running[key]]
                tokens = list(output.outputs[0].token_ids)
                if tokens and "first" not in entry:
                    entry["first"] = time.perf_counter() - entry.pop("began")
                if output.finished:
                    entry |= {"text": tokens, "params": output.kv_transfer_params}
                    running.pop(key)
        return {"jobs": done, "seconds": time.perf_counter() - begun}

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    def _add(self, job: dict[str, Any]) -> str:
        from vllm import SamplingParams

        self._count += 1
        params = job.get("params")
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=job.get("max_tokens", TEXT_TOKENS),
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        key = f"r{self._count}"
        self._llm.llm_engine.add_request(key, {"prompt_token_ids": job["prompt"]}, sampling)
        return key


def serve(pipe: Connection, environment: dict[str, str], arguments: tuple[Any, ...]) -> None:
    """The body of an engine's process: answers calls of `Engine` until it is told to end."""
    os.environ.update(ENVIRONMENT | environment)
    os.setsid()  # so that its own processes can be ended with it
    try:
        engine = Engine(*arguments)
        pipe.send(("ready", None))
        while (call := pipe.recv()) is not None:
            pipe.send(("ok", engine.run(*call)))
        started = time.perf_counter()
        engine.close()
        pipe.send(("closed", time.perf_counter() - started))
    except Exception as error:  # the other side shows it
        pipe.send(("failed", repr(error)))
        raise


class Remote:
    """An engine in another process."""

    def __init__(self, port: int, *arguments: Any) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
        self._process = context.Process(target=serve, args=(theirs, environment, arguments))
        self._process.start()
        theirs.close()

    def ready(self) -> None:
        self._answer(300)

    def run(self, jobs: list[dict[str, Any]], in_flight: int = 1) -> dict[str, Any]:
        self._pipe.send((jobs, in_flight))
        return self._answer(240)

    def _answer(self, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            raise RuntimeError(f"an engine did not answer within {seconds} s")
        kind, value = self._pipe.recv()
        if kind == "failed":
            raise RuntimeError(value)
        return value

    def close(self) -> float:
        """End the engine and all its processes; the seconds that it took to shut down itself,
        -1 where it did not within 20."""
        seconds = -1.0
        if self._process.is_alive():
            self._pipe.send(None)
            if self._pipe.poll(20):
                kind, value = self._pipe.recv()
                seconds = value if kind == "closed" else -1.0
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()
        return round(seconds, 2)


# ── what is measured ──────────────────────────────────────────────────────────────────


@dataclass
class Settings:
    """How much is measured."""

    lengths: tuple[int, ...]
    repeats: int
    in_flight: tuple[int, ...]
    burst: int
    seed: int = 1

    def prompt(self, length: int) -> list[int]:
        self.seed += 1
        return random.Random(self.seed).choices(range(1000, 100_000), k=length)


def used(engine: Remote, settings: Settings, requests: int = 150) -> None:
    """Use a pool, so that its free blocks lie scattered as in service."""
    lengths = random.Random(5).choices(range(40, 3000), k=requests)
    engine.run([{"prompt": settings.prompt(n), "max_tokens": 1} for n in lengths], 16)


def spread(seconds: list[float]) -> dict[str, float]:
    """Milliseconds: median, 99th percentile, least, most, and all of them."""
    ms = sorted(1000 * value for value in seconds)
    return {
        "p50_ms": round(statistics.median(ms), 1),
        "p99_ms": round(ms[min(len(ms) - 1, int(0.99 * len(ms)))], 1),
        "min_ms": round(ms[0], 1),
        "max_ms": round(ms[-1], 1),
        "n": len(ms),
    }


def prefilled(prefill: Remote, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """The prompts as the other engine is to be asked, with what hands their caches over."""
    ask = {"do_remote_decode": True, "do_remote_prefill": False}
    ask |= dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    out = prefill.run([{"prompt": p, "max_tokens": 1, "params": dict(ask)} for p in prompts], 4)
    return [
        {"prompt": p, "params": job["params"]} for p, job in zip(prompts, out["jobs"], strict=True)
    ]


def handed_over(prefill: Remote, decode: Remote, settings: Settings) -> dict[str, Any]:
    """Times to first token of handed-over prompts, and whether all texts were right."""
    result: dict[str, Any] = {"lengths": {}, "in_flight": {}, "wrong_texts": 0, "texts": 0}
    first = prefilled(prefill, [settings.prompt(2048)])
    result["first_of_all_ms"] = round(1000 * decode.run(first)["jobs"][0]["first"], 1)
    for length in settings.lengths:
        prompts = [settings.prompt(length) for _ in range(settings.repeats)]
        seconds = []
        for prompt in prompts:
            job = decode.run(prefilled(prefill, [prompt]))["jobs"][0]
            seconds.append(job["first"])
            compare(result, prefill, prompt, job["text"])
        result["lengths"][str(length)] = spread(seconds)
    for many in settings.in_flight:
        prompts = [settings.prompt(4096) for _ in range(settings.burst)]
        jobs = prefilled(prefill, prompts)
        out = decode.run([{**job, "max_tokens": 1} for job in jobs], many)
        figures = spread([job["first"] for job in out["jobs"]])
        figures["requests_per_s"] = round(len(jobs) / out["seconds"], 2)
        result["in_flight"][str(many)] = figures
    return result


def compare(result: dict[str, Any], engine: Remote, prompt: list[int], text: list[int]) -> None:
    """Count whether a text is what the engine that computed the prompt makes of it."""
    own = engine.run([{"prompt": prompt}])["jobs"][0]["text"]
    result["texts"] += 1
    result["wrong_texts"] += own != text


def floor_and_ceiling(decode: Remote, settings: Settings) -> dict[str, Any]:
    """The same lengths computed again, and with the prefix cached here."""
    result: dict[str, Any] = {"computed": {}, "cached": {}}
    for length in settings.lengths:
        computed, cached = [], []
        for _ in range(max(2, settings.repeats // 2)):
            prompt = settings.prompt(length)
            job = {"prompt": prompt, "max_tokens": 1}
            computed.append(decode.run([job])["jobs"][0]["first"])
            cached.append(decode.run([job])["jobs"][0]["first"])
        result["computed"][str(length)] = spread(computed)
        result["cached"][str(length)] = spread(cached)
    return result


def depends_on_the_cache(engine: Remote, settings: Settings) -> bool:
    """Whether prompts that differ only in their distant half give different texts."""
    end = settings.prompt(256)
    prompts = [settings.prompt(256) + end for _ in range(4)]
    texts = [job["text"] for job in engine.run([{"prompt": p} for p in prompts])["jobs"]]
    return len({tuple(text) for text in texts}) == len(texts)


def measure_handover(model: str, settings: Settings, memory_bytes: int) -> dict[str, Any]:
    variants = {
        "kvstow": connector("kvstow", "kv_both"),
        "kvstow, digest off": connector("kvstow", "kv_both", digest="off"),
        "NixlPushConnector": connector("NixlPushConnector", "kv_both"),
        "NixlConnector": connector("NixlConnector", "kv_both"),
    }
    results: dict[str, Any] = {}
    for name, transfer in variants.items():
        print(f"handover, {name}", flush=True)
        slow = name == "NixlConnector"
        own = settings if not slow else Settings(settings.lengths, 2, (1,), 2, settings.seed)
        engines = [Remote(5600 + 100 * i, model, memory_bytes, transfer) for i in range(2)]
        try:
            for engine in engines:
                engine.ready()
                used(engine, settings)
            results[name] = handed_over(*engines, own)
            if name == "kvstow":
                results["text_depends_on_the_cache"] = depends_on_the_cache(engines[0], settings)
                results["decode_alone"] = floor_and_ceiling(engines[1], settings)
        except Exception as error:  # one connector's failure is a result, too
            results[name] = {"error": repr(error)[:500]}
        finally:
            ended = [engine.close() for engine in engines]
            results[name]["shutdown_s"] = ended
        print(json.dumps(results[name]), flush=True)
    return results


def measure_offload(model: str, settings: Settings, memory_bytes: int) -> dict[str, Any]:
    host = 40 << 30
    variants = {
        "kvstow": connector("kvstow", "kv_both", host_bytes=host),
        "OffloadingConnector": connector(
            "OffloadingConnector", "kv_both", cpu_bytes_to_use=host, block_size=BLOCK
        ),
    }
    results: dict[str, Any] = {}
    lengths = [n for n in settings.lengths if 512 <= n <= 16384]
    for name, transfer in variants.items():
        print(f"offload, {name}", flush=True)
        engine = Remote(5900, model, memory_bytes, transfer)
        try:
            engine.ready()
            used(engine, settings, 60)
            results[name] = come_back(engine, settings, lengths, memory_bytes)
        except Exception as error:  # as above
            results[name] = {"error": repr(error)[:500]}
        finally:
            results[name]["shutdown_s"] = engine.close()
        print(json.dumps(results[name]), flush=True)
    return results


def come_back(
    engine: Remote, settings: Settings, lengths: list[int], memory_bytes: int
) -> dict[str, Any]:
    """Compute prompts, push them out with others, and ask for them again."""
    result: dict[str, Any] = {"lengths": {}, "wrong_texts": 0, "texts": 0}
    prompts = {n: [settings.prompt(n) for _ in range(settings.repeats)] for n in lengths}
    texts = {
        n: [job["text"] for job in engine.run([{"prompt": p} for p in each])["jobs"]]
        for n, each in prompts.items()
    }
    others = memory_bytes // (2 << 20) * BLOCK // 4000 + 8  # enough to fill the pool again
    engine.run([{"prompt": settings.prompt(4000), "max_tokens": 1} for _ in range(others)], 4)
    for n, each in prompts.items():
        jobs = [engine.run([{"prompt": p}])["jobs"][0] for p in each]
        result["lengths"][str(n)] = spread([job["first"] for job in jobs])
        for job, text in zip(jobs, texts[n], strict=True):
            result["texts"] += 1
            result["wrong_texts"] += job["text"] != text
    return result


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--json", type=Path, required=True)
    options.add_argument("--only", choices=("handover", "offload"))
    options.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    options.add_argument("--quick", action="store_true", help="few lengths, few repeats")
    chosen = options.parse_args()
    from machine import machine

    settings = Settings(LENGTHS, 5, IN_FLIGHT, 24)
    if chosen.quick:
        settings = Settings((2048, 16384), 3, (1, 8), 8)
    document: dict[str, Any] = {"machine": machine(), "versions": versions()}
    for model in chosen.models:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(MODELS[model]))
            part = document.setdefault(model, {})
            if chosen.only != "offload":
                part["handover"] = measure_handover(folder, settings, 20 << 30)
            if chosen.only != "handover":
                part["offload"] = measure_offload(folder, settings, 8 << 30)
        chosen.json.write_text(json.dumps(document, indent=1) + "\n")


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("vllm", "torch", "nixl", "nixl-cu13", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


if __name__ == "__main__":
    main()
