"""Checkpoints on disk, written by hand as their formats say."""

import json
from pathlib import Path

import numpy as np

CONFIG = {
    "model_type": "llama",
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    "sliding_window": None,
    "transformers_version": "5.22",
    "torch_dtype": "bfloat16",
}


def safetensors(tensors: dict[str, bytes], shapes: dict[str, list[int]] | None = None) -> bytes:
    """A safetensors file of bytes by name."""
    header: dict[str, object] = {}
    at = 0
    for name, data in tensors.items():
        shape = (shapes or {}).get(name, [len(data)])
        header[name] = {"dtype": "U8", "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(tensors.values())


def checkpoint(
    folder: Path, *, seed: int = 1, shards: int = 2, config: dict[str, object] | None = None
) -> Path:
    """A folder with a configuration, a tokenizer, and shards of three tensors of 4 KiB."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    (folder / "tokenizer.json").write_text('{"model": "words"}')
    random = np.random.default_rng(seed)
    for shard in range(shards):
        tensors = {f"layers.{shard}.{name}": random.bytes(4096) for name in ("q", "k", "v")}
        (folder / f"model-{shard}.safetensors").write_bytes(safetensors(tensors))
    return folder
