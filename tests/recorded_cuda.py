"""What vLLM's planner declares on a GPU, and memory with the views that vLLM makes of it.

`scripts/record_vllm_caches.py` has recorded the values. No vLLM, no GPU.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvstow.adapters.vllm.cache.layout import adopted, declaration
from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.memory.arena import Arena

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parent / "recorded_vllm_cuda.json").read_text()
)
OPTIONS = ConnectorOptions(unverified="recorded")


def spec_of(recorded: Mapping[str, Any]) -> Any:
    """A spec of vLLM's: a class name and numbers."""
    fields = {"num_head_slots": None, **{k: v for k, v in recorded.items() if k != "kind"}}
    return type(recorded["kind"], (SimpleNamespace,), {})(**fields)


def layer_with(kernels: str) -> Any:
    """A layer of vLLM's whose pages that class writes and reads."""
    module, _, name = kernels.rpartition(".")
    made = type(name, (), {"__module__": module}) if kernels else None
    return SimpleNamespace(impl=made()) if made else SimpleNamespace()


def kv_cache_config(model: Mapping[str, Any], num_blocks: int) -> SimpleNamespace:
    share = num_blocks / model["num_blocks"]
    return SimpleNamespace(
        kv_cache_layout=model["layout"],
        num_blocks=num_blocks,
        kv_cache_groups=[
            SimpleNamespace(
                layer_names=group["layers"],
                enable_kv_transfer=group["enable_kv_transfer"],
                host_resident=group["host_resident"],
                kv_cache_spec=type("UniformTypeKVCacheSpecs", (SimpleNamespace,), {})(
                    kv_cache_specs={name: spec_of(spec) for name, spec in group["specs"].items()}
                ),
            )
            for group in model["groups"]
        ],
        kv_cache_tensors=[
            SimpleNamespace(**{**tensor, "size": int(tensor["size"] * share)})
            for tensor in model["tensors"]
        ],
    )


def vllm_config(model: Mapping[str, Any]) -> SimpleNamespace:
    heads = max(s.get("num_heads", 1) for g in model["groups"] for s in g["specs"].values())
    layers = {name: layer_with(kernels) for name, kernels in model["kernels"].items()}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            rank=0,
        ),
        model_config=SimpleNamespace(
            model="recorded", dtype=torch.bfloat16, get_total_num_kv_heads=lambda: heads
        ),
        cache_config=SimpleNamespace(cache_dtype=model["cache_dtype"]),
        device_config=SimpleNamespace(device_type="cuda"),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )


def engine(
    name: str, num_blocks: int, model: Mapping[str, Any] | None = None
) -> tuple[Arena, dict[str, torch.Tensor]]:
    """Memory with vLLM's views of it, and the arena that the adapter makes of them.

    Fewer blocks than were recorded: in packed rows nothing else changes with their number.
    """
    model = model or RECORDED["models"][name]
    assert model["layout"].startswith("B")
    declared = declaration(vllm_config(model), kv_cache_config(model, num_blocks), OPTIONS)
    raw = torch.zeros(declared.regions[0].nbytes, dtype=torch.int8)
    views: dict[str, torch.Tensor] = {}
    for layer, view in model["views"].items():
        dtype = getattr(torch, view["dtype"].removeprefix("torch."))
        shape = (num_blocks, *view["shape"][1:])
        views[layer] = raw.view(dtype).as_strided(shape, view["stride"], view["offset"])
    return adopted(declared, views), views


def fill(view: torch.Tensor, block: int) -> None:
    """No byte zero, and no two pages alike."""
    part = view[block]
    values = np.random.default_rng(abs(hash((view.storage_offset(), block)))).integers(
        1, 120, part.nbytes, np.uint8
    )
    part.copy_(torch.from_numpy(values).view(view.dtype).reshape(part.shape))


def bits(values: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, as they lie."""
    return values.contiguous().view(torch.uint8)
