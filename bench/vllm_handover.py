# ruff: noqa: E402
"""One prompt handed over between two vLLM servers: vLLM's own connector against kvstow's.

    .venv-vllm/bin/python bench/vllm_handover.py --json bench/results/vllm_handover.json

SmolLM2-135M in float32 on CPUs, 128 tokens per block, packed rows (KVSTOW_VLLM_CPU_ROWS=1) on
both sides and for both connectors; prompts of 768 tokens, six blocks. Descriptors and seconds
are the connectors' own, from vLLM's /metrics.
"""

import os
import sys

ROOT = os.path.dirname(sys.path[0])
sys.path[0] = ROOT
sys.path.insert(1, os.path.join(ROOT, "tests", "vllm"))

import json
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from bench.machine import arguments, write
from serving import Launch, Server, free_port, running

from kvstow.demo.weights import SMOLLM2, unpacked

TOKENS = 768
PROMPTS = 5
TCP = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}


def total(server: Server, name: str) -> float:
    with urllib.request.urlopen(server.url + "/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def handed_over(pair: list[Server], ask: dict[str, Any]) -> bool:
    """Whether decode answered as prefill does, for every prompt."""
    prefill, decode = pair
    same = True
    for seed in range(PROMPTS):
        prompt = np.random.default_rng(seed).integers(100, 40_000, TOKENS).tolist()
        answer = prefill.ask(prompt, max_tokens=1, kv_transfer_params=ask)
        text = decode.text(prompt, max_tokens=4, kv_transfer_params=answer["kv_transfer_params"])
        same &= text == prefill.text(prompt, max_tokens=4)
    return same


def kvstow(model: Path, logs: Path) -> dict[str, Any]:
    launch = Launch(model=model, name="m", settings={"digest": "off"}, environment=TCP)
    with running(launch, launch, logs=logs) as pair:
        same = handed_over(pair, {"do_remote_decode": True})
        pair[1].await_count("pulls accepted", PROMPTS)
        counts = pair[1].counts()
    return {
        "identical": same,
        "descriptors": counts["pull_descriptors"],
        "bytes": counts["pulled_bytes"],
        "seconds": counts["pull_seconds"],
    }


def incumbent(model: Path, logs: Path) -> dict[str, Any]:
    launches = [
        Launch(
            model=model,
            name="m",
            settings={},
            transfer={
                "kv_connector": "NixlConnector",
                "kv_connector_module_path": None,
                "kv_buffer_device": "cpu",
            },
            environment={
                **TCP,
                "VLLM_KV_CACHE_LAYOUT": "BLHNC",
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            },
        )
        for _ in range(2)
    ]
    ask = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    with running(*launches, logs=logs) as pair:
        same = handed_over(pair, ask)
        return {
            "identical": same,
            "descriptors": total(pair[1], "vllm:nixl_num_descriptors_sum"),
            "bytes": total(pair[1], "vllm:nixl_bytes_transferred_sum"),
            "seconds": total(pair[1], "vllm:nixl_xfer_time_seconds_sum"),
        }


def main() -> None:
    options = arguments(__doc__ or "")
    model = unpacked(SMOLLM2)
    logs = Path(tempfile.mkdtemp())
    ours, theirs = kvstow(model, logs), incumbent(model, logs)
    results: dict[str, object] = {
        "prompts": PROMPTS,
        "tokens": TOKENS,
        "kvstow": ours,
        "incumbent": theirs,
        "descriptors_ratio": theirs["descriptors"] / ours["descriptors"],
    }
    print(json.dumps(results, indent=1))
    write(options.json, results)


if __name__ == "__main__":
    main()
