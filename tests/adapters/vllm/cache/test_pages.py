"""Pages of several sections: what vLLM's specs say of them, and where their bytes are."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvstow.adapters.vllm.cache.layout import CacheDeclaration, DeclaredRegion, adopted
from kvstow.adapters.vllm.cache.pages import CONV_LAYOUT, DeclaredPage, declared_page
from kvstow.errors import MemoryLayoutError
from kvstow.memory.arena import Arena
from kvstow.memory.copy import copy
from kvstow.plan.identity import Identity
from kvstow.plan.manifest import decode, encode
from kvstow.plan.spec import DType
from kvstow.route.blocks import Blocks
from kvstow.route.route import plan_route

RECORDED = json.loads((Path(__file__).parents[3] / "recorded_vllm_cuda.json").read_text())
V4 = {
    layer: spec
    for group in RECORDED["models"]["deepseek-v4-flash"]["groups"]
    for layer, spec in group["specs"].items()
}
SLIDING, C4, C128, INDEX, STATE = (
    "model.layers.2.attn.swa_cache",
    "model.layers.2.attn",
    "model.layers.3.attn",
    "model.layers.2.attn.indexer.k_cache",
    "model.layers.2.attn.compressor.state_cache",
)
LATENT = {"latent": (0, 0, 448), "rope": (0, 448, 128), "scale": (1, 0, 8)}
KEY = {"key": (0, 0, 128), "scale": (1, 0, 4)}
"""By field: its section, where it is in a state's cell there, and its bytes."""

WIDTHS = {584: (576, 8), 132: (128, 4)}
"""By all bytes of a state, those in each section."""


def spec(kind: str = "FullAttentionSpec", **fields: Any) -> Any:
    defaults = {"num_head_slots": None, "tokens_per_state": 1, "num_heads": 1, "num_kv_heads": 1}
    return type(kind, (SimpleNamespace,), {})(**{**defaults, **fields})


def recorded(layer: str, **changes: Any) -> Any:
    return spec(**{**V4[layer], **changes})


def page(
    spec: Any, order: Any = "BLHNC", tp: tuple[int, int] = (0, 1), layer: str = "layer"
) -> DeclaredPage:
    return declared_page(layer, spec, order=order, tp=tp, total_heads=8)


def nvfp4(**changes: Any) -> Any:
    """As FlashInfer's backend makes it: keys' heads, then values', each with its scales."""
    fields = {
        "block_size": 16,
        "num_states": 16,
        "head_size": 64,
        "head_size_v": 64,
        "num_kv_heads": 2,
        "num_heads": 4,
        "num_head_slots": 4,
        "state_content_size_bytes": 36,
        "kv_quant_mode": 5,
        "dtype": torch.uint8,
    }
    return spec(**{**fields, **changes})


def arena_of(*pages: DeclaredPage, num_blocks: int, stride: int) -> Arena:
    """Memory of one group in rows, as vLLM allocates and views it."""
    regions, offset = [], 0
    for each in pages:
        regions.append(
            DeclaredRegion(
                layers=(each.layer,),
                nbytes=stride * num_blocks,
                layer_stride=stride,
                block_stride=stride,
                offset=offset,
            )
        )
        offset += each.nbytes
    declared = CacheDeclaration(
        identity=Identity.unverified("a test", model="m", kv_dtype="fp8"),
        order="BLHNC",
        num_blocks=num_blocks,
        groups=(pages,),
        regions=tuple(regions),
    )
    memory = torch.zeros(stride * num_blocks, dtype=torch.uint8)
    views = {
        each.layer: memory.as_strided(
            (num_blocks, 1, each.states, each.nbytes // each.states),
            (stride, each.nbytes, each.nbytes // each.states, 1),
            region.offset,
        ).view(torch.int8 if each.dtype is DType.INT8 else torch.uint8)
        for each, region in zip(pages, regions, strict=True)
    }
    return adopted(declared, views)


@pytest.mark.parametrize(
    ("layer", "fields"), [(SLIDING, LATENT), (C4, LATENT), (C128, LATENT), (INDEX, KEY)]
)
def test_fields_of_v4_are_where_its_kernels_keep_them(layer: str, fields: dict[str, Any]) -> None:
    """Of all states the first section, then of all states the second."""
    declared = page(recorded(layer))
    cell = declared.nbytes // declared.states
    widths = WIDTHS[cell]
    with arena_of(declared, num_blocks=3, stride=declared.nbytes + 64) as arena:
        memory = arena.bytes.numpy()
        memory[:] = np.random.default_rng(1).integers(0, 256, len(memory), np.uint8)
        for name, (section, start, nbytes) in fields.items():
            view = arena.field("layer", name)
            for block, state in ((0, 0), (2, declared.states - 1), (1, declared.states // 2)):
                at = block * (declared.nbytes + 64) + section * declared.states * widths[0]
                at += state * widths[section] + start
                seen = view[block, 0, state].contiguous().view(torch.uint8)
                assert seen.tolist() == memory[at : at + nbytes].tolist()
        assert decode(encode(arena.layout)) == arena.layout


def test_compressor_states_are_one_section() -> None:
    assert page(recorded(STATE)).fields == ()


def test_pages_of_another_size_than_their_kernels_keep_are_refused() -> None:
    with pytest.raises(MemoryLayoutError, match=r"600 bytes .* keep 584: 448 of latent"):
        page(recorded(C4, state_content_size_bytes=600))


@pytest.mark.parametrize(("order", "heads"), [("LHBNC", 4), ("BHLNC", 4), ("LBNHC", 2)])
def test_sections_are_known_where_pages_are_in_one_piece(order: str, heads: int) -> None:
    found = page(nvfp4(), order)
    assert (found.heads.size, bool(found.fields)) == (heads, heads == 2)
    assert found.nbytes == 16 * 4 * 36


def test_nvfp4_is_shared_out_by_heads_of_keys_and_values_together() -> None:
    found = page(nvfp4(), tp=(1, 4))
    assert found.heads.pieces == ((2, 4),)
    assert [(x.name, x.section, x.nbytes) for x in found.fields] == [
        ("k", 0, 32),
        ("k_scale", 1, 4),
        ("v", 2, 32),
        ("v_scale", 3, 4),
    ]


def test_plain_pages_stay_opaque() -> None:
    plain = spec(block_size=16, num_states=16, state_content_size_bytes=256, dtype=torch.bfloat16)
    assert page(plain).fields == ()


@pytest.mark.parametrize("tokens", [(64, 128), (128, 64), (32, 64)])
def test_pages_are_cut_anew_for_other_tokens_per_block(tokens: tuple[int, int]) -> None:
    """Two layers with sections, and other block sizes on the two sides: every state arrives."""
    arenas, ids = [], []
    rng = np.random.default_rng(2)
    for size in tokens:
        same = {"kind": "MLAAttentionSpec", "tokens_per_state": 1}
        pages = [
            page(recorded(layer, **same, block_size=size, num_states=size), layer=name)
            for name, layer in (("latents", SLIDING), ("keys", INDEX))
        ]
        arenas.append(arena_of(*pages, num_blocks=9, stride=sum(p.nbytes for p in pages) + 128))
        ids.append(rng.permutation(np.arange(1, 9))[: 256 // size])
    source, destination = arenas
    for name, layout in (("latents", LATENT), ("keys", KEY)):
        for field in layout:
            view = source.field(name, field).view(torch.uint8)
            view.copy_(torch.from_numpy(rng.integers(0, 256, view.shape, np.uint8)))
    blocks = [{0: Blocks(each, np.arange(len(each)))} for each in ids]
    copies = plan_route(source.layout, destination.layout).copies(*blocks, 256)
    copy(source, destination, copies).wait()
    others = sorted(set(range(9)) - set(ids[1].tolist()))
    rows = destination.bytes.view(9, -1)
    assert not rows[others].any()
    for name, layout in (("latents", LATENT), ("keys", KEY)):
        for field in layout:
            a, b = (arena.field(name, field).view(torch.uint8) for arena in arenas)
            for token in range(256):
                here = a[ids[0][token // tokens[0]], 0, token % tokens[0]]
                there = b[ids[1][token // tokens[1]], 0, token % tokens[1]]
                assert torch.equal(here, there), (name, field, token)


# ── recurrent states ──────────────────────────────────────────────────────────────────────

TAPS = 3
PARTS = {
    "GDN_ATTN": (16, 16, 32),
    "MAMBA2": (32, 32, 32),
    "MAMBA1": (32,),
    "SHORT_CONV": (32,),
    "LINEAR": (),
}
"""Channels of the whole model's convolution, by kind of state."""
MATRICES = {
    "GDN_ATTN": (8, 4, 2),
    "MAMBA2": (8, 4, 8),
    "MAMBA1": (32, 2),
    "SHORT_CONV": (),
    "LINEAR": (8, 4, 4),
}


def state_spec(kind: str, ranks: int, **changes: Any) -> Any:
    """What vLLM declares of a state on one of so many ranks, tap by tap."""
    shapes: list[tuple[int, ...]] = []
    if PARTS[kind]:
        shapes.append((TAPS, sum(PARTS[kind]) // ranks))
    if MATRICES[kind]:
        shapes.append((MATRICES[kind][0] // ranks, *MATRICES[kind][1:]))
    dtypes = [torch.bfloat16] * len(shapes)
    fields = {
        "mamba_type": SimpleNamespace(name=kind),
        "mamba_cache_mode": "align",
        "num_speculative_blocks": 0,
        "tp_replicated": False,
        "block_size": 128,
        "shapes": tuple(shapes),
        "dtypes": tuple(dtypes),
        "state_content_size_bytes": 2 * sum(int(np.prod(shape)) for shape in shapes),
        "tokens_per_state": -1,
    }
    return spec("MambaSpec", **{**fields, **changes})


def state_page(kind: str, tp: tuple[int, int], groups: int | None = 4, **changes: Any) -> Any:
    return declared_page(
        "layer",
        state_spec(kind, tp[1], **changes),
        order="BLHNC",
        tp=tp,
        total_heads=8,
        state_groups=groups,
    )


def held_of(kind: str, conv: Any, matrices: Any, tp: tuple[int, int]) -> Any:
    """The bytes of one rank's state, cut out of the whole model's by NumPy."""
    rank, ranks = tp
    cut = [np.split(part, ranks, axis=1)[rank] for part in conv]
    parts = [np.concatenate(cut, axis=1).ravel()] if cut else []
    parts += [np.split(matrices, ranks, axis=0)[rank].ravel()] if MATRICES[kind] else []
    return np.concatenate(parts).view(np.uint8)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 4), (4, 2)])
@pytest.mark.parametrize("kind", PARTS)
def test_states_are_shared_out_anew_among_other_numbers_of_ranks(
    kind: str, sizes: tuple[int, int]
) -> None:
    rng = np.random.default_rng(3)
    conv = [rng.integers(0, 1 << 16, (TAPS, size)).astype(np.uint16) for size in PARTS[kind]]
    matrices = rng.integers(0, 1 << 16, MATRICES[kind]).astype(np.uint16)
    sides: list[list[Arena]] = []
    for size in sizes:
        pages = [state_page(kind, (rank, size)) for rank in range(size)]
        sides.append([arena_of(p, num_blocks=4, stride=p.nbytes + 64) for p in pages])
    for rank, arena in enumerate(sides[0]):
        own = held_of(kind, conv, matrices, (rank, sizes[0]))
        arena.bytes.view(4, -1)[3, : len(own)] = torch.from_numpy(own)
    blocks = [{0: Blocks(np.array([id]), np.array([0]))} for id in (3, 2)]
    for rank, there in enumerate(sides[1]):
        for here in sides[0]:
            copy(here, there, plan_route(here.layout, there.layout).copies(*blocks, 128)).wait()
        wanted = held_of(kind, conv, matrices, (rank, sizes[1]))
        rows = there.bytes.view(4, -1)
        assert rows[2, : len(wanted)].tolist() == wanted.tolist()
        assert not rows[[0, 1, 3]].any()
        assert not rows[2, len(wanted) :].any()


def test_groups_that_vllm_adds_for_its_ranks_are_not_taken_for_the_models() -> None:
    """With one group every rank has it; with three on four ranks, vLLM makes it four."""
    one = state_page("MAMBA2", (1, 2), 1, shapes=((TAPS, 16 + 8 + 8), (4, 4, 8)))
    conv, _ = one.fields
    assert conv.axes[1].pieces == ((16, 32), (32, 40), (40, 48))
    assert not state_page("MAMBA2", (1, 4), 3).fields
    assert not state_page("MAMBA2", (1, 2), None).fields


@pytest.mark.parametrize("change", [{"tp_replicated": True}, {"mamba_type": None}])
def test_states_whose_parts_are_not_known_stay_opaque(change: dict[str, Any]) -> None:
    assert not state_page("GDN_ATTN", (0, 2), **change).fields


def test_convolutions_that_lie_channel_by_channel_are_other_fields(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_tap = state_page("SHORT_CONV", (0, 1))
    monkeypatch.setenv(CONV_LAYOUT, "DS")
    by_channel = state_page("SHORT_CONV", (0, 1), shapes=((32, TAPS),))
    assert [[axis.name for axis in p.fields[0].axes] for p in (by_tap, by_channel)] == [
        ["tap", "channel"],
        ["channel", "tap"],
    ]


def test_a_ring_is_refused_with_what_is_missing() -> None:
    with pytest.raises(MemoryLayoutError, match="the ring as it was after the prefix's last token"):
        page(spec("CircularBufferSpec"))
