"""Pages of several sections, as vLLM's own code reads and writes them.

Its Triton kernels run in Triton's interpreter on pages of an arena: what they write is read
through field views, and what is written through field views is read by them. Every other byte of
the arena is a canary.
"""

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstow.adapters.vllm.cache.layout import CacheDeclaration, DeclaredRegion, adopted
from kvstow.adapters.vllm.cache.pages import declared_page
from kvstow.memory.arena import Arena
from kvstow.plan.group import grouped
from kvstow.plan.identity import Identity
from kvstow.plan.layout import Layout, Order
from kvstow.plan.models import model_layers
from kvstow.plan.pack import Site, packed

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

CANARY = 0x5A
SLIDING, C4, INDEXER = (f"model.layers.2.attn.{name}" for name in ("sliding", "c4", "indexer"))


@pytest.fixture(scope="module")
def kernels() -> Callable[[str], Any]:
    """vLLM's modules with the real Triton, which its CPU build hides."""
    triton_utils = importlib.import_module("vllm.triton_utils")
    import triton
    import triton.language as tl

    triton_utils.triton, triton_utils.tl = triton, tl
    return lambda name: importlib.import_module(f"vllm.{name}")


def v4() -> Layout:
    """Five caches of one layer of DeepSeek-V4 in packed rows."""
    layers = [x for x in model_layers("deepseek-v4-flash").layers if ".layers.2." in x.name]
    return packed(grouped(layers), num_slabs=3)


def filled(layout: Layout) -> Arena:
    arena = Arena(layout)
    arena.bytes.fill_(CANARY)
    return arena


def touched(arena: Arena, *views: tuple[str, str, list[tuple[int, int]]]) -> torch.Tensor:
    """Which bytes of the arena belong to a field in some (block, slot) pairs."""
    mask = torch.zeros(arena.nbytes, dtype=torch.bool)
    for layer, field, places in views:
        view = arena.layout.field(layer, field)
        block, _, token = view.axes[:3]
        nbytes = view.shape[3] * view.unit
        for number, slot in places:
            start = view.offset + number * block.stride + slot * token.stride
            mask[start : start + nbytes] = True
    return mask


def untouched(arena: Arena, mask: torch.Tensor) -> bool:
    return bool((arena.bytes[~mask] == CANARY).all())


def exact(count: int, size: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers that quantising keeps, in groups of one power of two: the fp8 elements, the powers'
    exponents, and their products in bfloat16. (Triton's interpreter rounds fp8 its own way.)"""
    rng = torch.Generator().manual_seed(count * size)
    codes = torch.randint(0, 0x7E, (count, size), generator=rng, dtype=torch.uint8)
    codes |= torch.randint(0, 2, (count, size), generator=rng, dtype=torch.uint8) << 7
    codes[:, ::group] = 0x7E  # 448, so that every group has the scale of its own power
    elements = codes.view(torch.float8_e4m3fn)
    exponents = torch.randint(-6, 3, (count, size // group), generator=rng)
    powers = torch.exp2(exponents.float()).repeat_interleave(group, dim=-1)
    return elements, exponents, (elements.float() * powers).bfloat16()


# ── DeepSeek-V4's latents ─────────────────────────────────────────────────────────────────


def test_what_quantize_and_insert_k_cache_writes_is_read_through_field_views(
    kernels: Callable[[str], Any],
) -> None:
    ops = kernels("models.deepseek_v4.common.ops.cache_utils")
    latent, exponents, products = exact(4, 448, 64)
    keys = torch.cat([products, torch.randn(4, 64).bfloat16()], dim=1)
    places = [(1, 5), (1, 63), (2, 0), (4, 17)]
    with filled(v4()) as arena:
        slots = torch.tensor([block * 64 + slot for block, slot in places])
        ops.quantize_and_insert_k_cache(keys, arena.page(SLIDING), slots, block_size=64)
        for i, (block, slot) in enumerate(places):
            seen = [arena.field(SLIDING, name)[block, 0, slot] for name in ("latent", "rope")]
            assert seen[0].view(torch.uint8).tolist() == latent[i].view(torch.uint8).tolist()
            assert torch.equal(seen[1], keys[i, 448:])
            scale = arena.field(SLIDING, "scale")[block, 0, slot]
            assert scale.tolist() == [*(exponents[i] + 127).tolist(), 0]
        fields = ("latent", "rope", "scale")
        assert untouched(arena, touched(arena, *((SLIDING, name, places) for name in fields)))


def test_what_is_written_through_field_views_is_what_vllm_gathers(
    kernels: Callable[[str], Any],
) -> None:
    ops = kernels("models.deepseek_v4.common.ops.cache_utils")
    latent, exponents, products = exact(70, 448, 64)
    rope = torch.randn(70, 64).bfloat16()
    table = [3, 1]
    with filled(v4()) as arena:
        views = {name: arena.field(SLIDING, name) for name in ("latent", "rope", "scale")}
        for token in range(70):
            at = table[token // 64], 0, token % 64
            views["latent"][at] = latent[token]
            views["rope"][at] = rope[token]
            views["scale"][at] = torch.tensor([*(exponents[token] + 127).tolist(), 0])
        pages = arena.page(SLIDING)
        out = torch.zeros(1, 70, 512, dtype=torch.bfloat16)
        ops.DequantizeAndGatherKCacheKernel.kernel[(1, 8)](
            out,
            out.stride(0),
            out.stride(1),
            pages,
            torch.tensor([70], dtype=torch.int32),
            torch.tensor([table], dtype=torch.int32),
            0,
            None,
            max_blocks_per_seq=2,
            fp8_dim=448,
            bf16_dim=64,
            scale_dim=8,
            quant_block=64,
            cache_block_size=64,
            token_data_size=576,
            block_stride=pages.stride(0),
            output_dim=512,
            fp8_max=448.0,
            n_quant_blocks=7,
        )
    assert torch.equal(out[0, :, :448], products)
    assert torch.equal(out[0, :, 448:], rope)


# ── what the compressor stores ────────────────────────────────────────────────────────────


def run_compressor(
    kernel: Any, arena: Arena, layer: str, state: str, weights: torch.Tensor, **fixed: int
) -> torch.Tensor:
    """Fold tokens 0 to 7 of a sequence into slot 9 of block 1: the signs of what is folded.

    The states are in blocks 5 and 2, written through field views. One token has all the weight,
    its values are 1 and -1, and the norm's weights are what is stored: nothing is rounded. `cos`
    is 1 and `sin` 0, so positions change nothing.
    """
    dim = len(weights)
    signs = torch.randint(0, 2, (8, 2 * dim)).float() * 2 - 1
    score = torch.full((8, 2 * dim), -1e30)
    score[6] = 0.0
    for token in range(8):
        at = (5, 2)[token // 4], 0, token % 4
        arena.field(state, "value")[at] = signs[token]
        arena.field(state, "score")[at] = score[token]
    states, pages = arena.tensor(state)[:, 0], arena.page(layer)
    cos_sin = torch.cat([torch.ones(16, 32), torch.zeros(16, 32)], dim=1)
    kernel[(1,)](
        states,
        states.stride(0),
        states.stride(1),
        torch.tensor([0]),
        torch.tensor([7]),
        torch.tensor([0]),
        torch.tensor([[5, 2]], dtype=torch.int32),
        2,
        4,
        weights.float(),
        0.0,
        cos_sin,
        cos_sin.stride(0),
        pages,
        torch.tensor([64 + SLOT]),
        64,
        HEAD_SIZE=dim,
        TRITON_BLOCK_SIZE=dim,
        STATE_WIDTH=2 * dim,
        COMPRESS_RATIO=4,
        OVERLAP=True,
        ROPE_HEAD_DIM=64,
        FP8_MAX=448.0,
        KV_BLOCK_STRIDE=pages.stride(0),
        **fixed,
    )
    return signs[6, dim:]  # token 6 is of the window's own four


SLOT = 9


def test_the_compressor_reads_states_and_stores_latents_where_field_views_have_them(
    kernels: Callable[[str], Any],
) -> None:
    ops = kernels("models.deepseek_v4.common.ops.fused_compress_quant_cache")
    latent, exponents, products = exact(1, 448, 64)
    weights = torch.cat([products[0], torch.randn(64).bfloat16()])
    with filled(v4()) as arena:
        signs = run_compressor(
            ops._fused_kv_compress_norm_rope_insert_sparse_attn,
            arena,
            C4,
            f"{C4}_state",
            weights,
            QUANT_BLOCK=64,
            TOKEN_STRIDE=576,
            SCALE_DIM=8,
            SANITIZE_CACHE_NANS=False,
        )
        scale = arena.field(C4, "scale")[1, 0, SLOT]
        assert scale.tolist() == [*(exponents[0] + 127).tolist(), 0]
        seen = arena.field(C4, "latent")[1, 0, SLOT].float()
        assert seen.tolist() == (latent[0].float() * signs[:448]).tolist()
        rope = arena.field(C4, "rope")[1, 0, SLOT].float()
        assert rope.tolist() == (weights[448:].float() * signs[448:]).tolist()
        mine = [(C4, name, [(1, SLOT)]) for name in ("latent", "rope", "scale")]
        states = [(f"{C4}_state", name, STATES) for name in ("value", "score")]
        assert untouched(arena, touched(arena, *mine, *states))


STATES = [(block, slot) for block in (5, 2) for slot in range(4)]


def test_the_compressor_stores_index_keys_where_field_views_have_them(
    kernels: Callable[[str], Any],
) -> None:
    ops = kernels("models.deepseek_v4.common.ops.fused_compress_quant_cache")
    keys, exponents, products = exact(1, 128, 128)
    with filled(v4()) as arena:
        signs = run_compressor(
            ops._fused_kv_compress_norm_rope_insert_indexer_attn,
            arena,
            INDEXER,
            f"{INDEXER}_state",
            products[0],
            QUANT_BLOCK=128,
            TOKEN_STRIDE=128,
            SCALE_DIM=4,
        )
        assert arena.field(INDEXER, "scale")[1, 0, SLOT] == torch.exp2(exponents[0].float())
        seen = arena.field(INDEXER, "key")[1, 0, SLOT].float()
        assert seen.tolist() == (keys[0].float() * signs).tolist()
        mine = [(INDEXER, name, [(1, SLOT)]) for name in ("key", "scale")]
        states = [(f"{INDEXER}_state", name, STATES) for name in ("value", "score")]
        assert untouched(arena, touched(arena, *mine, *states))


# ── V3.2's index ──────────────────────────────────────────────────────────────────────────


def test_index_keys_of_v3_2_are_where_field_views_have_them(kernels: Callable[[str], Any]) -> None:
    ops = kernels("v1.attention.ops.rocm_aiter_mla_sparse")
    layers = model_layers("deepseek-v3.2", block_tokens=64).layers
    name = next(x.name for x in layers if x.name.endswith("indexer"))
    elements, exponents, keys = exact(3, 128, 128)
    places = [(1, 0), (1, 63), (2, 31)]
    with filled(packed(grouped(layers[:4]), num_slabs=4)) as arena:
        pages = arena.page(name)  # as `indexer_k_quant_and_cache_triton` cuts them
        data, scale = (
            pages[:, : 64 * 128].view(torch.float8_e4m3fn),
            pages[:, 64 * 128 : 64 * 132].view(torch.float32),
        )
        ops._indexer_k_quant_and_cache_kernel[(3,)](
            keys,
            data,
            scale,
            torch.tensor([b * 64 + s for b, s in places]),
            scale.stride(0),
            data.stride(0),
            64,
            3,
            128,
            "NORMAL",
            16,
            16,
            IS_FNUZ=False,
            USE_UE8M0=True,
        )
        for i, (block, slot) in enumerate(places):
            assert arena.field(name, "scale")[block, 0, slot] == torch.exp2(exponents[i].float())
            seen = arena.field(name, "key")[block, 0, slot]
            assert seen.view(torch.uint8).tolist() == elements[i].view(torch.uint8).tolist()
        mask = touched(arena, (name, "key", places), (name, "scale", places))
        assert untouched(arena, mask)


# ── NVFP4 ─────────────────────────────────────────────────────────────────────────────────


def nvfp4_views() -> Callable[..., Any]:
    """FlashInfer's view helper, out of a module that only imports with FlashInfer."""
    vllm = importlib.import_module("vllm")
    utils = importlib.import_module("vllm.utils.torch_utils")
    file = Path(vllm.__file__).parent / "v1" / "attention" / "backends" / "flashinfer.py"
    (function,) = (
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "_nvfp4_kv_views"
    )
    function.returns = None
    names = {"torch": torch, "nvfp4_split_data_scale": utils.nvfp4_split_data_scale}
    exec(compile(ast.Module([function], []), str(file), "exec"), names)
    return names["_nvfp4_kv_views"]


@pytest.mark.parametrize("order", ["BLHNC", "BLNHC", "LBHNC", "LBNHC"])
@pytest.mark.parametrize("heads", [1, 2])
def test_nvfp4_views_of_a_page_are_the_field_views(order: str, heads: int) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": heads,
        "head_dim": 64,
        "hidden_size": 64,
    }
    layers = model_layers(config, kv_dtype="nvfp4", block_tokens=16).layers
    layout = packed(grouped(layers), num_slabs=4, site=Site(order=order))  # pyright: ignore[reportArgumentType]
    name, full = layers[1].name, 64 // 2 + 64 // 16
    with filled(layout) as arena:
        page = arena.page(name)
        hnd = order.endswith("HNC")
        inner = (16 * full, full, 1) if hnd else (full, 2 * heads * full, 1)
        cache = page.as_strided((4, 2 * heads, 16, full), (page.stride(0), *inner))
        data, scales, shown = nvfp4_views()(cache, heads)
        assert shown == ("HND" if hnd else "NHD")
        theirs = dict(zip(("k", "v", "k_scale", "v_scale"), (*data, *scales), strict=True))
        for field, seen in theirs.items():
            view = layout.field(name, field)
            wanted = arena.strided(view, torch.uint8)
            found = seen.view(torch.uint8)
            found = found if hnd else found.transpose(1, 2)
            assert found.shape == wanted.shape, field
            assert found.data_ptr() == wanted.data_ptr(), field
            assert found.stride() == wanted.stride(), field


# ── as the adapter takes them over ────────────────────────────────────────────────────────


def nvfp4_arena(order: Order, heads: int) -> tuple[Arena, torch.Tensor]:
    """Memory of two layers as vLLM declares and views it, and the arena that is made of it."""
    specs = importlib.import_module("vllm.v1.kv_cache_interface")
    spec = specs.FullAttentionSpec(
        block_size=16,
        num_kv_heads=heads,
        head_size=64,
        dtype=torch.uint8,
        kv_quant_mode=specs.KVQuantMode.NVFP4,
        num_head_slots=2 * heads,
        state_content_bytes=36,
    )
    pages = [
        declared_page(name, spec, order=order, tp=(0, 1), total_heads=heads) for name in ("a", "b")
    ]
    assert spec.page_size_bytes == pages[0].nbytes
    size, rows = spec.page_size_bytes, order.startswith("B")
    block, layer = (2 * size, size) if rows else (size, 4 * size)
    declared = CacheDeclaration(
        identity=Identity.unverified("a test", model="m", kv_dtype="nvfp4"),
        order=order,
        num_blocks=4,
        groups=(tuple(pages),),
        regions=(
            DeclaredRegion(
                layers=("a", "b"),
                nbytes=8 * size,
                layer_stride=layer,
                block_stride=block,
                offset=0,
            ),
        ),
    )
    memory = torch.full((8 * size,), CANARY, dtype=torch.uint8)
    inner = (16 * 36, 36, 1) if order.endswith("HNC") else (36, 2 * heads * 36, 1)
    views = {
        name: memory.as_strided((4, 2 * heads, 16, 36), (block, *inner), start)
        for name, start in (("a", 0), ("b", layer))
    }
    return adopted(declared, views), views["b"]


@pytest.mark.parametrize("order", ["BLHNC", "BLNHC", "LBHNC", "LBNHC"])
@pytest.mark.parametrize("heads", [1, 2])
def test_nvfp4_pages_that_vllm_declares_have_its_views_as_fields(order: Order, heads: int) -> None:
    arena, cache = nvfp4_arena(order, heads)
    data, scales, shown = nvfp4_views()(cache, heads)
    theirs = dict(zip(("k", "v", "k_scale", "v_scale"), (*data, *scales), strict=True))
    for field, seen in theirs.items():
        wanted = arena.strided(arena.layout.field("b", field), torch.uint8)
        found = seen.view(torch.uint8)
        found = found if shown == "HND" else found.transpose(1, 2)
        assert found.shape == wanted.shape, field
        assert (found.data_ptr(), found.stride()) == (wanted.data_ptr(), wanted.stride()), field
