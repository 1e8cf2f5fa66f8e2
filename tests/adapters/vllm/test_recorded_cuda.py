"""What vLLM's planner declares on a GPU goes through the adapter: recorded values, no vLLM, no GPU.

`scripts/record_vllm_caches.py` has recorded them: vLLM's groups, where it places their layers, and
the views that it makes of the memory. Those views are the oracle.
"""

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvstow.adapters.vllm.layout import adopted, declaration
from kvstow.adapters.vllm.options import ConnectorOptions
from kvstow.adapters.vllm.pages import retention_of
from kvstow.errors import MemoryLayoutError
from kvstow.memory.arena import Arena
from kvstow.memory.copy import copy
from kvstow.plan.retention import Full, Window
from kvstow.route.blocks import Blocks, Tokens
from kvstow.route.route import route

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "recorded_vllm_cuda.json").read_text()
)
MODELS: list[str] = list(RECORDED["models"])
NUM_BLOCKS = {name: 8 if name == "qwen3-next-80b" else 40 for name in MODELS}
"""Fewer than were recorded: in packed rows nothing else changes with their number."""

OPTIONS = ConnectorOptions(unverified="recorded")


def spec_of(recorded: Mapping[str, Any]) -> Any:
    """A spec of vLLM's as the adapter sees it: a class name and numbers."""
    fields = {"num_head_slots": None, **{k: v for k, v in recorded.items() if k != "kind"}}
    return type(recorded["kind"], (SimpleNamespace,), {})(**fields)


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
    )


def engine(name: str) -> tuple[Arena, dict[str, torch.Tensor]]:
    """Memory with vLLM's views of it, and the arena that the adapter makes of them."""
    model = RECORDED["models"][name]
    assert model["layout"].startswith("B")
    config = kv_cache_config(model, NUM_BLOCKS[name])
    declared = declaration(vllm_config(model), config, OPTIONS)
    raw = torch.zeros(declared.regions[0].nbytes, dtype=torch.int8)
    views: dict[str, torch.Tensor] = {}
    for layer, view in model["views"].items():
        dtype = getattr(torch, view["dtype"].removeprefix("torch."))
        shape = (NUM_BLOCKS[name], *view["shape"][1:])
        views[layer] = raw.view(dtype).as_strided(shape, view["stride"], view["offset"])
    return adopted(declared, views), views


def fill(view: torch.Tensor, block: int) -> None:
    """No byte zero, and no two pages alike."""
    part = view[block]
    values = np.random.default_rng(abs(hash((view.storage_offset(), block)))).integers(
        1, 120, part.nbytes, np.uint8
    )
    part.copy_(torch.from_numpy(values).view(view.dtype).reshape(part.shape))


@pytest.mark.parametrize("name", MODELS)
def test_a_block_of_a_group_is_exactly_what_vllm_sees_of_it(name: str):
    arena, views = engine(name)
    memory = arena.bytes.numpy()
    for g, group in enumerate(RECORDED["models"][name]["groups"]):
        for block in (1, NUM_BLOCKS[name] - 1):
            memory[:] = 0
            for layer in group["layers"]:
                fill(views[layer], block)
            inside = 0
            for run in arena.layout.runs(g, block):
                inside += np.count_nonzero(memory[run.offset : run.offset + run.nbytes])
            assert inside == sum(views[layer][block].nbytes for layer in group["layers"])
            assert np.count_nonzero(memory) == inside, "vLLM writes outside of the block's runs"


def requests(name: str, arena: Arena) -> tuple[int, list[dict[int, Blocks]]]:
    """The tokens of a request, and its blocks of every group, here and there."""
    groups = [rows.group for rows in arena.layout.groups]
    num_tokens = max(group.block_tokens for group in groups)
    index = []
    for group in groups:
        needed = Tokens(0, num_tokens).needed(group)
        ranges = [np.arange(t.first, t.end) // group.block_tokens for t in needed]
        index.append(np.unique(np.concatenate(ranges)))
    ends = np.cumsum([len(each) for each in index])
    assert ends[-1] < NUM_BLOCKS[name]
    draw = np.random.default_rng(3)
    sides = [
        np.split(draw.permutation(np.arange(1, NUM_BLOCKS[name]))[: ends[-1]], ends[:-1])
        for _ in range(2)
    ]
    return num_tokens, [{g: Blocks(ids[g], each) for g, each in enumerate(index)} for ids in sides]


@pytest.mark.parametrize("name", MODELS)
def test_a_request_moves_whole_and_no_other_block_changes(name: str):
    (here, views), (there, others) = engine(name), engine(name)
    num_tokens, (source, into) = requests(name, here)
    groups = RECORDED["models"][name]["groups"]
    for g, group in enumerate(groups):
        for layer in group["layers"]:
            for block in source[g].ids:
                fill(views[layer], block)
    copies = route(here.layout, there.layout).copies(source, into, num_tokens)
    copy(here, there, copies).wait()
    moved = 0
    for g, group in enumerate(groups):
        for layer in group["layers"]:
            arrived = bits(others[layer][into[g].ids])
            assert torch.equal(arrived, bits(views[layer][source[g].ids]))
            moved += arrived.numel()
    assert np.count_nonzero(there.bytes.numpy()) == moved


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


@pytest.mark.parametrize("name", MODELS)
def test_windows_are_those_that_vllm_keeps(name: str):
    for group in RECORDED["models"][name]["groups"]:
        for spec in group["specs"].values():
            if spec["kind"] == "MambaSpec":
                continue
            window = spec.get("sliding_window")
            expected = Window(window + spec.get("extra_retained_tokens", 0)) if window else Full()
            assert retention_of(spec_of(spec)) == expected


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("llama-3.1-8b", 2_097_152),
        ("gpt-oss-20b", 393_216),
        ("gemma-3-27b", 1_310_720),
    ],
)
def test_a_block_is_one_row_of_as_many_bytes_as_vllm_plans(name: str, nbytes: int):
    arena, _ = engine(name)
    widest = max(range(len(arena.layout.groups)), key=arena.layout.row_bytes)
    assert [run.nbytes for run in arena.layout.runs(widest, 3)] == [nbytes]


def test_recurrent_states_that_are_not_kept_for_each_block_are_refused():
    model = deepcopy(RECORDED["models"]["qwen3-next-80b"])
    for spec in model["groups"][0]["specs"].values():
        spec["mamba_cache_mode"] = "none"
    with pytest.raises(MemoryLayoutError, match="mode 'none'"):
        declaration(vllm_config(model), kv_cache_config(model, 8), OPTIONS)


def test_the_version_stands_beside_what_was_recorded():
    assert RECORDED["vllm"].startswith("0.32.")
    assert len(RECORDED["models"]) == 6
