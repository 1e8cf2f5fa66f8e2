"""The Torch stand-ins for DeepSeek-V4's kernels do what vLLM's own do, where vLLM has them.

Byte by byte in the pages; in results as close as bfloat16 is.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "plugins"))

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

CANARY = 0x5A
PAGE = 37_440
"""64 states of 584 bytes, padded as vLLM pads them."""

SMALL = 448 * 1e-4
"""Below it vLLM's CPU kernel keeps the scale from getting smaller, its GPU kernels keep the largest
number of a group at 1e-4 or more. The stand-in follows the GPU's."""


@pytest.fixture(scope="module")
def own() -> Any:
    """vLLM's kernels."""
    platforms = pytest.importorskip("vllm.platforms")
    platforms.current_platform.import_kernels()
    if not hasattr(torch.ops._C, "flash_mla_with_kvcache_cpu"):
        pytest.skip("vLLM's kernels for DeepSeek-V4 need AVX512-BF16")
    return torch.ops._C


@pytest.fixture(scope="module")
def ours() -> Any:
    return importlib.import_module("v4_kernels").kernels


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(4)


def normal(rng: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=rng)


def pages(num: int = 5, nbytes: int = PAGE) -> torch.Tensor:
    """Pages of a layer between those of others: every other byte is a canary."""
    return torch.full((num, 2 * nbytes), CANARY, dtype=torch.uint8)[:, :nbytes]


def cos_sin(rng: torch.Generator) -> torch.Tensor:
    angles = torch.rand((1024, 32), generator=rng) * 6.28
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def written(rng: torch.Generator, own: Any, num: int = 5) -> torch.Tensor:
    """Pages with a state in each slot."""
    kv = normal(rng, 64 * num, 512).bfloat16()
    made = pages(num)
    slots = torch.arange(64 * num)
    q = normal(rng, 64 * num, 1, 512).bfloat16()
    own.fused_qnorm_rope_kv_insert_cpu(
        q, kv, torch.arange(64 * num), made, slots, cos_sin(rng), 1, 1e-6, 64
    )
    return made


def test_latents_are_inserted_byte_for_byte(own: Any, ours: Any, rng: torch.Generator) -> None:
    q, kv = normal(rng, 40, 4, 512).bfloat16(), normal(rng, 40, 512).bfloat16()
    kv *= torch.exp2(torch.randint(-3, 6, (40, 1), generator=rng))
    assert float(kv[:, :448].unflatten(1, (7, 64)).abs().amax(-1).min()) > SMALL
    slots = torch.randperm(5 * 64, generator=rng)[:40]
    slots[3] = -1
    table, positions = cos_sin(rng), torch.arange(300, 340)
    found = pages(), pages()
    made = [
        each(q.clone(), kv.clone(), positions, page, slots, table, 4, 1e-6, 64)
        for each, page in zip(
            (own.fused_qnorm_rope_kv_insert_cpu, ours["fused_qnorm_rope_kv_insert_cpu"]),
            found,
            strict=True,
        )
    ]
    assert torch.equal(*map(flushed, found))
    assert torch.allclose(made[0].float(), made[1].float(), atol=0.03, rtol=0.01)
    assert int((found[0] != CANARY).sum()) > 39 * 500


def flushed(page: torch.Tensor) -> torch.Tensor:
    """The same, with latents below fp8's normal numbers as 0: vLLM's CPU kernel writes 0 there,
    its GPU kernels and the stand-in write the number."""
    made = page.clone()
    latents = made[:, : 64 * 576].unflatten(1, (64, 576))[..., :448]
    latents[(latents & 0x7F) < 8] &= 0x80
    return made


@pytest.mark.parametrize("num_compressed", [0, 100])
def test_attention_reads_the_states_of_its_slots(
    own: Any, ours: Any, rng: torch.Generator, num_compressed: int
) -> None:
    window, compressed = written(rng, own), written(rng, own)
    q, sink = normal(rng, 6, 4, 512).bfloat16(), normal(rng, 4)
    slots = torch.stack([torch.randperm(320, generator=rng)[:128] for _ in range(6)])
    slots[1, 50:] = -1
    more = torch.randint(0, 320, (6, num_compressed), generator=rng)
    if num_compressed:
        more[2] = -1
    out = torch.zeros(6, 4, 512).bfloat16(), torch.zeros(6, 4, 512).bfloat16()
    for each, to in zip(
        (own.flash_mla_with_kvcache_cpu, ours["flash_mla_with_kvcache_cpu"]), out, strict=True
    ):
        each(to, q, window, slots, 64, compressed, more, 64, sink, 512**-0.5)
    assert torch.allclose(out[0].float(), out[1].float(), atol=0.02, rtol=0.02)
    assert float(out[0].float().abs().mean()) > 0.01


@pytest.mark.parametrize("num_windows", [0, 2])
@pytest.mark.parametrize(("ratio", "overlap", "dim"), [(4, 2, 512), (128, 1, 512), (4, 2, 128)])
def test_states_are_saved_and_folded_byte_for_byte(
    own: Any, ours: Any, rng: torch.Generator, ratio: int, overlap: int, dim: int, num_windows: int
) -> None:
    name = "compress_norm_rope_store_cpu" if dim == 512 else "compress_norm_rope_store_indexer_cpu"
    width, size, length = overlap * dim, 4 if ratio == 4 else 8, num_windows * ratio + 3
    blocks = torch.randperm(length, generator=rng)[: -(-length // size)]
    positions = torch.arange(length)
    slots = blocks[positions // size] * size + positions % size
    kv, score, ape = (normal(rng, n, width) for n in (length, length, ratio))
    window = positions[:, None] - overlap * ratio + 1 + torch.arange(overlap * ratio)
    gather = torch.where(window >= 0, slots[window.clamp(min=0)], -1)
    kv_slots = torch.where((positions + 1) % ratio == 0, 64 + positions // ratio, -1)
    weight, table = 1 + 0.1 * normal(rng, dim), cos_sin(rng)
    states = torch.zeros(length, size, 2 * width), torch.zeros(length, size, 2 * width)
    found = (pages(), pages()) if dim == 512 else (pages(5, 8640), pages(5, 8640))
    chosen = (
        (own.save_partial_states_cpu, getattr(own, name)),
        (ours["save_partial_states_cpu"], ours[name]),
    )
    for (save, fold), state, page in zip(chosen, states, found, strict=True):
        save(kv, score, ape, positions, state, slots)
        fold(state, gather, positions, kv_slots, weight, 1e-6, table, page, 64, ratio)
    assert torch.equal(*states)
    assert close_bytes(*found)


def close_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, but for sums in another order: a few numbers are one step apart."""
    differing = a != b
    apart = (a.int() - b.int()).abs()[differing]
    return int(differing.sum()) <= 0.005 * int((b != CANARY).sum()) and bool((apart <= 1).all())


def test_the_index_chooses_the_same_states(own: Any, ours: Any, rng: torch.Generator) -> None:
    num, heads, length = 3, 4, 700
    keys = pages(12, 8640)
    sections = importlib.import_module("v4_kernels").sections
    data, scales = sections(keys, 64, 128, 4)
    data.copy_(normal(rng, 12, 64, 128).to(torch.float8_e4m3fn).view(torch.uint8))
    scales.copy_(torch.rand((12, 64, 1), generator=rng).view(torch.uint8))
    q, weights = normal(rng, num, heads, 128), normal(rng, num, heads)
    table, positions = cos_sin(rng), torch.tensor([3, 400, 700])
    lengths = torch.tensor([600, length, 13], dtype=torch.int32)
    pages_of = torch.stack([torch.randperm(12, generator=rng) for _ in range(num)]).int()
    results: list[Any] = []
    for kernel in (lambda name: getattr(own, name), ours.__getitem__):
        q8 = torch.empty_like(q, dtype=torch.float8_e4m3fn)
        w = torch.empty_like(weights)
        kernel("fused_indexer_q_rope_quant_cpu")(positions, q, table, q8, weights, 0.09, 0.5, w)
        logits = kernel("fp8_paged_mqa_logits_cpu")(q8, keys, w, lengths, pages_of, 64, length)
        out = torch.empty((num, 512), dtype=torch.int32), torch.empty((num, 512), dtype=torch.int32)
        kernel("topk_transform_512_cpu")(logits, lengths, pages_of, out[0], 64, out[1])
        chosen = [set(row.tolist()) for row in out[1]]
        results.append((q8.view(torch.uint8), w, logits, chosen))
    (q_a, w_a, logits_a, chosen_a), (q_b, w_b, logits_b, chosen_b) = results
    assert torch.equal(q_a, q_b)
    assert torch.allclose(w_a, w_b)
    for i, n in enumerate(lengths.tolist()):
        assert torch.allclose(logits_a[i, :n], logits_b[i, :n], atol=2e-2, rtol=2e-2)
        assert len(chosen_a[i] ^ chosen_b[i]) <= 4  # ties, rounded otherwise


def test_what_is_no_attention_agrees(own: Any, ours: Any, rng: torch.Generator) -> None:
    x, out = normal(rng, 5, 4, 256).bfloat16(), normal(rng, 5, 256).bfloat16()
    fn, scale, base = 0.05 * normal(rng, 24, 1024), normal(rng, 3), normal(rng, 24)
    args = (x, fn, scale, base, 4, 4, 1e-6, 1e-6)
    made = [each(*args) for each in (own.hc_pre_fused_cpu, ours["hc_pre_fused_cpu"])]
    for a, b in zip(*made, strict=True):
        assert torch.allclose(a.float(), b.float(), atol=0.03, rtol=0.02)
    _, post, comb = made[1]
    found = [
        each(out, x, post, comb) for each in (own.hc_post_fused_cpu, ours["hc_post_fused_cpu"])
    ]
    assert torch.allclose(found[0].float(), found[1].float(), atol=0.05, rtol=0.02)
    head = (x, fn[:4], scale[:1], base[:4], 1e-6, 1e-6)
    found = [each(*head) for each in (own.hc_head_fused_cpu, ours["hc_head_fused_cpu"])]
    assert torch.allclose(found[0].float(), found[1].float(), atol=0.03, rtol=0.02)
    logits, bias = normal(rng, 5, 256), normal(rng, 256)
    args = (logits, logits, bias, 6, True, "sqrtsoftplus", 0, 1.5, True)
    same_experts(own.biased_topk_cpu(*args), ours["biased_topk_cpu"](*args))
    chosen = torch.randint(0, 256, (5, 6), generator=rng).int()
    args = (logits, chosen, 6, "sqrtsoftplus", 0, 256, 1.5)
    same_experts(own.hash_topk_cpu(*args), ours["hash_topk_cpu"](*args))


def same_experts(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> None:
    (a_weights, a_ids), (b_weights, b_ids) = a, b
    at, bt = a_ids.argsort(dim=1, stable=True), b_ids.argsort(dim=1, stable=True)
    assert torch.equal(a_ids.gather(1, at), b_ids.gather(1, bt))
    assert torch.allclose(a_weights.gather(1, at), b_weights.gather(1, bt), atol=1e-4)


def test_outputs_are_turned_back_and_projected(own: Any, ours: Any, rng: torch.Generator) -> None:
    o, table = normal(rng, 5, 4, 512).bfloat16(), cos_sin(rng)
    name = "inverse_gptj_rope_o_proj_cpu"
    found = [each(o, torch.arange(5), table, 64) for each in (getattr(own, name), ours[name])]
    assert torch.allclose(*found, atol=1e-5)
    weight, x = normal(rng, 2, 64, 1024).bfloat16(), normal(rng, 2, 5, 1024).bfloat16()
    made = torch.empty(2, 5, 64).bfloat16(), torch.empty(2, 5, 64).bfloat16()
    own.bmm_cpu(made[0], x, own.convert_weight_packed(weight), True, None)
    ours["bmm_cpu"](made[1], x, ours["convert_weight_packed"](weight), True, None)
    assert torch.allclose(made[0].float(), made[1].float(), atol=0.3, rtol=0.01)
