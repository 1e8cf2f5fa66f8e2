"""What vLLM's planner declares on a GPU goes through the adapter: recorded values, no vLLM, no GPU.

`scripts/record_vllm_caches.py` has recorded them: vLLM's groups, where it places their layers, and
the views that it makes of the memory. Those views are the oracle.
"""

from copy import deepcopy

import numpy as np
import pytest
import torch

from kvstow.adapters.vllm.cache.layout import declaration
from kvstow.adapters.vllm.cache.pages import retention_of
from kvstow.errors import MemoryLayoutError
from kvstow.memory.arena import Arena
from kvstow.memory.copy import copy
from kvstow.plan.retention import Full, Window
from kvstow.route.blocks import Blocks, Tokens
from kvstow.route.route import plan_route
from recorded_cuda import OPTIONS, RECORDED, bits, fill, kv_cache_config, spec_of, vllm_config
from recorded_cuda import engine as recorded_engine

MODELS: list[str] = [name for name in RECORDED["models"] if "," not in name]
NUM_BLOCKS = {name: 8 if name == "qwen3-next-80b" else 40 for name in MODELS}


def engine(name: str) -> tuple[Arena, dict[str, torch.Tensor]]:
    return recorded_engine(name, NUM_BLOCKS[name])


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
        index.append(np.unique(np.arange(needed.first, needed.end) // group.block_tokens))
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
    copies = plan_route(here.layout, there.layout).copies(source, into, num_tokens)
    copy(here, there, copies).wait()
    moved = 0
    for g, group in enumerate(groups):
        for layer in group["layers"]:
            arrived = bits(others[layer][into[g].ids])
            assert torch.equal(arrived, bits(views[layer][source[g].ids]))
            moved += arrived.numel()
    assert np.count_nonzero(there.bytes.numpy()) == moved


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
    assert len(MODELS) == 6
