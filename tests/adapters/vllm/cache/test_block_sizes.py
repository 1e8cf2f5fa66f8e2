"""Different `--block-size` on the two sides, where kernels keep tokens in order inside a page.

What vLLM declares for CUDA is recorded (`recorded_cuda`), and so are its views of the memory. They
are the oracle: token `t` of a request is `view[ids[t // size], :, t % size]`, whatever we plan.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from kvstow.adapters.vllm.cache.pages import IN_TOKEN_ORDER, is_in_token_order
from kvstow.adapters.vllm.protocol import blocks_with_tokens
from kvstow.errors import RouteError
from kvstow.memory.arena import Arena
from kvstow.memory.copy import copy
from kvstow.memory.digest import digest
from kvstow.plan.retention import first_seen_token
from kvstow.plan.view import align_up
from kvstow.route.blocks import Blocks
from kvstow.route.route import plan_route
from recorded_cuda import RECORDED, bits, engine, spec_of

Views = dict[str, torch.Tensor]
SIZES = [(16, 64), (64, 16), (16, 16)]
PROMPTS = [1, 2, 63, 64, 65, 130]
WINDOW = 48
CANARY = 0x5A
NUM_BLOCKS = {16: 12, 64: 5}
GEMMA_BLOCKS = {16: 36, 64: 18}
FLASH = "vllm.v1.attention.backends.flash_attn.FlashAttentionImpl"


def few_layers(name: str, size: int) -> dict[str, Any]:
    """A recorded model with the first two layers of each group in its rows, and windows of 48."""
    model = deepcopy(RECORDED["models"][name if size == 16 else f"{name}, 64 tokens"])
    kept = {layer for group in model["groups"] for layer in group["layers"][:2]}
    for group in model["groups"]:
        group["layers"] = group["layers"][:2]
        for spec in group["specs"].values():
            spec |= {"sliding_window": WINDOW} if "sliding_window" in spec else {}
    for tensor in model["tensors"]:
        shorter = tensor["block_stride"] // (2 * tensor["layer_stride"])
        tensor["layers"] = [layer for layer in tensor["layers"] if layer in kept]
        for part in ("block_stride", "size"):
            tensor[part] //= shorter
        for layer in tensor["layers"]:
            model["views"][layer]["stride"][0] //= shorter
    model["views"] = {layer: view for layer, view in model["views"].items() if layer in kept}
    return model


def pair(name: str, sizes: tuple[int, int], blocks: Mapping[int, int]) -> list[tuple[Arena, Views]]:
    return [engine(name, blocks[size], few_layers(name, size)) for size in sizes]


def noise(arena: Arena) -> None:
    """No two cells alike: what is repeated has the length of no page."""
    values = np.random.default_rng(1).integers(0, 256, 1_000_003, np.uint8)
    arena.bytes.copy_(torch.from_numpy(np.resize(values, arena.bytes.numel())))


def tables(arena: Arena, num_tokens: int, seed: int) -> list[list[int]]:
    """Per group, ids by logical block as vLLM gives them: 0 where a window has let go."""
    draw = np.random.default_rng(seed)
    free = draw.permutation(np.arange(1, arena.layout.num_blocks(0))).tolist()
    found: list[list[int]] = []
    for rows in arena.layout.groups:
        size = rows.group.block_tokens
        first = first_seen_token(rows.group.retention, num_tokens) // size
        whole = -(-num_tokens // size)
        found.append([0] * first + [free.pop() for _ in range(first, whole)])
    return found


def listed(arena: Arena, ids: list[list[int]], num_tokens: int) -> dict[int, Blocks]:
    groups = [rows.group for rows in arena.layout.groups]
    return {
        g: blocks_with_tokens(each, 0, num_tokens, groups[g].block_tokens)
        for g, each in enumerate(ids)
    }


def place(view: torch.Tensor, ids: list[int], token: int) -> tuple[int, int]:
    """Block and slot of a token."""
    size = view.shape[2]
    return ids[token // size], token % size


def has(view: torch.Tensor, ids: list[int], token: int) -> bool:
    return place(view, ids, token)[0] > 0


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("num_tokens", PROMPTS)
@pytest.mark.parametrize(
    ("name", "blocks"), [("llama-3.1-8b", NUM_BLOCKS), ("gemma-3-27b", GEMMA_BLOCKS)]
)
def test_every_token_arrives_where_the_other_engine_reads_it(
    name: str, blocks: Mapping[int, int], num_tokens: int, sizes: tuple[int, int]
):
    (here, views), (there, others) = pair(name, sizes, blocks)
    noise(here)
    there.bytes.fill_(CANARY)
    source, into = tables(here, num_tokens, 1), tables(there, num_tokens, 2)
    copies = plan_route(here.layout, there.layout).copies(
        listed(here, source, num_tokens), listed(there, into, num_tokens), num_tokens
    )
    copy(here, there, copies).wait()
    memory, expected = pair(name, sizes, blocks)[1]
    memory.bytes.fill_(CANARY)
    for g, rows in enumerate(there.layout.groups):
        seen = first_seen_token(rows.group.retention, num_tokens)
        for layer in [layer.name for layer in rows.group.layers]:
            spans = (each[layer].shape[2] for each in (views, others))
            end = min(align_up(num_tokens, span) for span in spans)  # with the whole block
            for token in range(end):
                block, slot = place(views[layer], source[g], token)
                into_block, into_slot = place(others[layer], into[g], token)
                if block and into_block:
                    expected[layer][into_block, :, into_slot] = views[layer][block, :, slot]
                else:
                    assert token < seen
    for layer, view in others.items():
        assert torch.equal(bits(view), bits(expected[layer])), layer


@pytest.mark.parametrize("sizes", [(16, 64), (64, 16)])
@pytest.mark.parametrize("start", [16, 64])
def test_tokens_that_decode_has_are_left_alone(sizes: tuple[int, int], start: int):
    (here, views), (there, others) = pair("llama-3.1-8b", sizes, NUM_BLOCKS)
    noise(here)
    there.bytes.fill_(CANARY)
    source, into = tables(here, 130, 1), tables(there, 130, 2)
    copies = plan_route(here.layout, there.layout).copies(
        listed(here, source, 130), listed(there, into, 130), 130, start_token=start
    )
    copy(here, there, copies).wait()
    for layer, view in others.items():
        for token in range(130):
            block, slot = place(views[layer], source[0], token)
            into_block, into_slot = place(view, into[0], token)
            old, new = bits(views[layer][block, :, slot]), bits(view[into_block, :, into_slot])
            assert torch.equal(new, old) if token >= start else (new == CANARY).all()


@pytest.mark.parametrize("sizes", SIZES)
def test_both_sides_count_the_same_digest(sizes: tuple[int, int]):
    (here, _), (there, _) = pair("gemma-3-27b", sizes, GEMMA_BLOCKS)
    noise(here)
    source, into = (
        listed(arena, tables(arena, 130, seed), 130) for seed, arena in enumerate((here, there))
    )
    copy(here, there, plan_route(here.layout, there.layout).copies(source, into, 130)).wait()
    assert digest(here, source, 130) == digest(there, into, 130)


@pytest.mark.parametrize("num_tokens", [16, 17, 130])
def test_equal_blocks_are_one_copy_a_row_though_tokens_are_known(num_tokens: int):
    (here, _), (there, _) = pair("llama-3.1-8b", (16, 16), NUM_BLOCKS)
    source, into = (
        listed(arena, tables(arena, num_tokens, seed), num_tokens)
        for seed, arena in ((1, here), (2, there))
    )
    copies = plan_route(here.layout, there.layout).copies(source, into, num_tokens)
    rows = -(-num_tokens // 16)
    assert len(copies) <= rows
    assert copies.total <= rows * here.layout.row_bytes(0)


@pytest.mark.parametrize("num_tokens", PROMPTS)
@pytest.mark.parametrize(("sizes", "may_lack"), [((16, 64), True), ((64, 16), False)])
def test_only_larger_blocks_can_lack_what_a_window_has_let_go(
    sizes: tuple[int, int], may_lack: bool, num_tokens: int
):
    (here, _), (there, others) = pair("gemma-3-27b", sizes, GEMMA_BLOCKS)
    source, into = tables(here, num_tokens, 1), tables(there, num_tokens, 2)
    filled = plan_route(here.layout, there.layout).filled(
        listed(here, source, num_tokens), listed(there, into, num_tokens), num_tokens
    )
    for g, rows in enumerate(there.layout.groups):
        view = others[rows.group.layers[0].name]
        source_size = here.layout.groups[g].group.block_tokens
        lacking = {
            token // view.shape[2]
            for token in range(num_tokens)
            if has(view, into[g], token) and not source[g][token // source_size]
        }
        blocks = listed(there, into, num_tokens)[g]
        assert set(blocks.index[~filled[g]].tolist()) == lacking
        assert may_lack or not lacking


# ── whose kernels keep tokens in order ────────────────────────────────────────────────────


def with_kernels(kernels: str, size: int) -> Arena:
    model = few_layers("llama-3.1-8b", size)
    model["kernels"] = dict.fromkeys(model["kernels"], kernels)
    return engine("", NUM_BLOCKS[size], model)[0]


def test_kernels_that_nobody_has_read_hand_over_to_their_like_with_equal_blocks_only():
    arena = with_kernels("somewhere.OwnImpl", 16)
    same = plan_route(arena.layout, with_kernels("somewhere.OwnImpl", 16).layout)
    blocks = {0: Blocks.first([3, 5])}
    assert len(same.copies(blocks, blocks, 20)) == 2
    with pytest.raises(RouteError, match="tokens per state is 16 in the source, 64"):
        plan_route(arena.layout, with_kernels("somewhere.OwnImpl", 64).layout)


def test_opaque_pages_of_two_kernels_are_never_joined():
    one, other = (with_kernels(f"somewhere.{name}", 16) for name in ("OwnImpl", "OtherImpl"))
    with pytest.raises(RouteError, match=r"'kv of OwnImpl' is .* none in the destination"):
        plan_route(one.layout, other.layout)


def test_an_instance_that_knows_tokens_and_one_that_does_not_are_never_joined():
    """So an instance of an earlier version, whose pages are all opaque, is refused."""
    known, opaque = with_kernels(FLASH, 16), with_kernels("", 16)
    for pair_ in ((known, opaque), (opaque, known)):
        with pytest.raises(RouteError, match="tokens per state is"):
            plan_route(*(arena.layout for arena in pair_))


def plain_spec(**changes: Any) -> Any:
    specs = RECORDED["models"]["llama-3.1-8b"]["groups"][0]["specs"]
    return spec_of({**next(iter(specs.values())), **changes})


@pytest.mark.parametrize(
    ("device", "kernels", "changes"),
    [
        ("cpu", FLASH, {}),
        ("cpu", "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl", {}),
        ("cuda", "vllm.v1.attention.backends.rocm_aiter_fa.AiterFlashAttentionImpl", {}),
        ("cuda", "", {}),
        ("cuda", "elsewhere.FlashAttentionImpl", {}),
        ("cuda", FLASH, {"kv_quant_mode": 5}),
        ("cuda", FLASH, {"num_head_slots": 2}),
        ("cuda", FLASH, {"tokens_per_state": 4}),
    ],
)
def test_token_order_is_claimed_only_where_it_is_certain(device: str, kernels: str, changes: Any):
    assert is_in_token_order(plain_spec(), "cuda", FLASH)
    assert not is_in_token_order(plain_spec(**changes), device, kernels)


def test_the_version_stands_beside_the_kernels_that_were_read():
    assert set(IN_TOKEN_ORDER.values()) == {"0.32.0"}
    assert RECORDED["vllm"].startswith("0.32.")
    used = {k for model in RECORDED["models"].values() for k in model["kernels"].values()}
    assert ("cuda", FLASH) in IN_TOKEN_ORDER
    assert FLASH in used
