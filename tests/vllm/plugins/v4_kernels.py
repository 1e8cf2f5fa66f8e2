"""Torch stand-ins for the kernels of DeepSeek-V4 that vLLM's CPU builds lack below AVX512-BF16.

`v4_metadata` registers them. Pages keep the bytes that vLLM's kernels define: of each state 448
fp8 numbers and 64 in bfloat16, all states' scales behind them; index keys and their scales
likewise; compressor states in float32. Every kernel reads and writes them by slots, so what the
cache holds decides what is computed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NOPE, ROPE, GROUP = 448, 64, 64
STATE, SCALES = NOPE + 2 * ROPE, 8
INDEX_KEY = 128
FP8_MAX = 448.0
MANY_BYTES = 64 << 20
"""Attention gathers so much of a cache at a time."""

schemas: dict[str, str] = {}
kernels: dict[str, Callable[..., Any]] = {}


def stands_in(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """This function is the operator of that schema."""

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.partition("(")[0]
        schemas[name], kernels[name] = schema, function
        return function

    return noted


def register(*, replace: bool) -> None:
    """Put these kernels where vLLM has none, or in the place of all of its own."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    for name, function in kernels.items():
        known = hasattr(torch.ops._C, name)
        if not known:
            LIBRARY.define(schemas[name])
        if replace or not known:
            LIBRARY.impl(name, function, "CPU", allow_override=known)


LIBRARY = torch.library.Library("_C", "FRAGMENT")


# ── pages ─────────────────────────────────────────────────────────────────────────────────


def sections(pages: Tensor, block_size: int, *widths: int) -> list[Tensor]:
    """`[block, slot, byte]` views of a page's sections, one behind the other."""
    found: list[Tensor] = []
    start = 0
    for width in widths:
        part = pages[:, start : start + block_size * width]
        found.append(part.unflatten(1, (block_size, width)))
        start += block_size * width
    return found


def powers_of_two(x: Tensor) -> Tensor:
    """The exponents of the scales for groups along the last axis."""
    largest = x.abs().amax(-1).clamp(min=1e-4)
    return torch.ceil(torch.log2(largest / FP8_MAX))


def fp8(x: Tensor) -> Tensor:
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def store_latents(pages: Tensor, block_size: int, slots: Tensor, x: Tensor, rope: Tensor) -> None:
    """Write states: `x[..., :448]` as fp8 with scales of 64 each, `rope` as bfloat16."""
    data, scales = sections(pages, block_size, STATE, SCALES)
    groups = x[:, :NOPE].bfloat16().float().unflatten(1, (-1, GROUP))
    exponents = powers_of_two(groups)
    at = slots // block_size, slots % block_size
    elements = fp8(groups * torch.exp2(-exponents)[..., None]).flatten(1)
    data[at] = torch.cat([elements, rope.bfloat16().view(torch.uint8)], dim=1)
    encoded = (exponents + 127).clamp(0, 255).to(torch.uint8)
    scales[at] = torch.nn.functional.pad(encoded, (0, 1))


def load_latents(pages: Tensor, block_size: int, slots: Tensor) -> Tensor:
    """The states of these slots, in float32; any state for a slot below 0."""
    data, scales = sections(pages, block_size, STATE, SCALES)
    at = slots.clamp(min=0)
    at = at // block_size, at % block_size
    cells = data[at]
    elements = cells[..., :NOPE].contiguous().view(torch.float8_e4m3fn).float()
    powers = torch.exp2(scales[at][..., : NOPE // GROUP].float() - 127)
    latents = elements.unflatten(-1, (-1, GROUP)) * powers[..., None]
    rope = cells[..., NOPE:].contiguous().view(torch.bfloat16).float()
    return torch.cat([latents.flatten(-2), rope], dim=-1)


def rotated(x: Tensor, cos_sin: Tensor, positions: Tensor, sign: int = 1) -> Tensor:
    """Neighbours turned by their position's angles. `x` is `[token, ..., 64]`."""
    cos, sin = cos_sin[positions].float().chunk(2, dim=-1)
    heads = (slice(None), *[None] * (x.ndim - 2))
    cos, sin = cos[heads], sign * sin[heads]
    even, odd = x.float()[..., ::2], x.float()[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)


def normed(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


# ── attention ─────────────────────────────────────────────────────────────────────────────


@stands_in(
    "fused_qnorm_rope_kv_insert_cpu(Tensor q, Tensor kv, Tensor positions, "
    "Tensor(a!) swa_kv_cache_2d, Tensor slot_mapping, Tensor cos_sin_cache, int q_head_padded, "
    "float eps, int cache_block_size) -> Tensor"
)
def insert_latents(
    q: Tensor,
    kv: Tensor,
    positions: Tensor,
    pages: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    num_heads: int,
    eps: float,
    block_size: int,
) -> Tensor:
    """Queries normed and turned; latents of the tokens turned, and written to their slots."""
    kept = slots >= 0
    new, at = kv[: len(slots)][kept].float(), positions[: len(slots)][kept]
    store_latents(pages, block_size, slots[kept], new, rotated(new[:, NOPE:], cos_sin, at))
    made = normed(q.float(), eps)
    made[..., NOPE:] = rotated(made[..., NOPE:], cos_sin, positions)
    return torch.nn.functional.pad(made.to(q.dtype), (0, 0, 0, num_heads - q.shape[1]))


@stands_in(
    "flash_mla_with_kvcache_cpu(Tensor(a!) out, Tensor q, Tensor window_cache_2d, "
    "Tensor window_slots, int window_block_size, Tensor compressed_cache_2d, "
    "Tensor compressed_slots, int compressed_block_size, Tensor attn_sink, float scale) -> ()"
)
def attend(
    out: Tensor,
    q: Tensor,
    window: Tensor,
    window_slots: Tensor,
    window_block: int,
    compressed: Tensor,
    compressed_slots: Tensor,
    compressed_block: int,
    sink: Tensor,
    scale: float,
) -> None:
    """Attention over the window's and the compressed states in these slots, and a sink."""
    slots = torch.cat([window_slots, compressed_slots.to(window_slots.dtype)], dim=1)
    step = max(1, MANY_BYTES // (slots.shape[1] * (NOPE + ROPE) * 4))
    for low in range(0, len(q), step):
        some = slice(low, low + step)
        states = load_latents(window, window_block, window_slots[some])
        if compressed_slots.shape[1]:
            more = load_latents(compressed, compressed_block, compressed_slots[some])
            states = torch.cat([states, more], dim=1)
        scores = torch.einsum("thd,tkd->thk", q[some].float(), states) * scale
        scores.masked_fill_((slots[some] < 0)[:, None], float("-inf"))
        last = sink[: q.shape[1]].float()[None, :, None].expand(len(scores), -1, 1)
        weights = torch.softmax(torch.cat([scores, last], dim=-1), dim=-1)[..., :-1]
        out[some] = torch.einsum("thk,tkd->thd", weights, states).to(out.dtype)


@stands_in(
    "inverse_gptj_rope_o_proj_cpu(Tensor o, Tensor positions, Tensor cos_sin_cache, "
    "int rope_dim) -> Tensor"
)
def turned_back(o: Tensor, positions: Tensor, cos_sin: Tensor, rope_dim: int) -> Tensor:
    made = o.float().clone()
    made[..., -rope_dim:] = rotated(made[..., -rope_dim:], cos_sin, positions, sign=-1)
    return made


@stands_in("convert_weight_packed(Tensor weight) -> Tensor")
def unpacked(weight: Tensor) -> Tensor:
    return weight.clone()


@stands_in("bmm_cpu(Tensor(a!) out, Tensor mat1, Tensor mat2, bool is_vnni, Tensor? scale) -> ()")
def multiply(out: Tensor, a: Tensor, b: Tensor, is_vnni: bool, scale: Tensor | None) -> None:
    out.copy_(a.float() @ b.float().transpose(1, 2))


# ── compressor ────────────────────────────────────────────────────────────────────────────


@stands_in(
    "save_partial_states_cpu(Tensor kv, Tensor score, Tensor ape, Tensor positions, "
    "Tensor(a!) state_cache, Tensor slot_mapping) -> ()"
)
def save_states(
    kv: Tensor, score: Tensor, ape: Tensor, positions: Tensor, states: Tensor, slots: Tensor
) -> None:
    """Values and scores of the tokens, written to their slots."""
    kept = slots >= 0
    n = len(slots)
    values = kv[:n][kept].float()
    scores = score[:n][kept].float() + ape[positions[:n][kept] % len(ape)]
    at = slots[kept]
    states[at // states.shape[1], at % states.shape[1]] = torch.cat([values, scores], dim=-1)


def compressed(
    states: Tensor,
    gather: Tensor,
    positions: Tensor,
    slots: Tensor,
    weight: Tensor,
    eps: float,
    ratio: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the states before each boundary fold into, normed; its slots and positions."""
    n = len(slots)
    done = (slots >= 0) & ((positions[:n] + 1) % ratio == 0) & (gather[:n, -1] >= 0)
    at = gather[:n][done]
    head = len(weight)
    window = at.shape[1]
    cells = states[at.clamp(min=0) // states.shape[1], at.clamp(min=0) % states.shape[1]]
    values, scores = cells.chunk(2, dim=-1)
    late = torch.arange(window) >= ratio  # of overlapping windows the later half is its own
    values, scores = (
        torch.where(late[:, None], x[..., -head:], x[..., :head]) for x in (values, scores)
    )
    scores = scores.masked_fill((at < 0)[..., None], float("-inf"))
    folded = (values * torch.softmax(scores, dim=1)).nan_to_num(0.0).sum(1)
    return normed(folded, eps) * weight, slots[done], positions[:n][done] // ratio * ratio


@stands_in(
    "compress_norm_rope_store_cpu(Tensor state_cache, Tensor gather_slots, Tensor positions, "
    "Tensor kv_slot_mapping, Tensor rms_norm_weight, float rms_norm_eps, Tensor cos_sin_cache, "
    "Tensor(a!) kv_cache_2d, int kv_cache_block_size, int compress_ratio) -> ()"
)
def store_compressed(
    states: Tensor,
    gather: Tensor,
    positions: Tensor,
    slots: Tensor,
    weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    pages: Tensor,
    block_size: int,
    ratio: int,
) -> None:
    new, at, where = compressed(states, gather, positions, slots, weight, eps, ratio)
    store_latents(pages, block_size, at, new, rotated(new[:, NOPE:], cos_sin, where))


@stands_in(
    "compress_norm_rope_store_indexer_cpu(Tensor state_cache, Tensor gather_slots, "
    "Tensor positions, Tensor kv_slot_mapping, Tensor rms_norm_weight, float rms_norm_eps, "
    "Tensor cos_sin_cache, Tensor(a!) kv_cache_2d, int kv_cache_block_size, "
    "int compress_ratio) -> ()"
)
def store_index_keys(
    states: Tensor,
    gather: Tensor,
    positions: Tensor,
    slots: Tensor,
    weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    pages: Tensor,
    block_size: int,
    ratio: int,
) -> None:
    new, at, where = compressed(states, gather, positions, slots, weight, eps, ratio)
    new[:, -ROPE:] = rotated(new[:, -ROPE:], cos_sin, where)
    new = new.bfloat16().float()
    keys, scales = sections(pages, block_size, INDEX_KEY, 4)
    power = torch.exp2(powers_of_two(new))[:, None]
    place = at // block_size, at % block_size
    keys[place] = fp8(new / power)
    scales[place] = power.view(torch.uint8)


# ── indexer ───────────────────────────────────────────────────────────────────────────────


@stands_in(
    "fused_indexer_q_rope_quant_cpu(Tensor positions, Tensor index_q, Tensor cos_sin_cache, "
    "Tensor(a!) index_q_fp8, Tensor index_weights, float softmax_scale, float head_scale, "
    "Tensor(b!) index_weights_out) -> ()"
)
def quantize_queries(
    positions: Tensor,
    q: Tensor,
    cos_sin: Tensor,
    out: Tensor,
    weights: Tensor,
    softmax_scale: float,
    head_scale: float,
    weights_out: Tensor,
) -> None:
    turned = rotated(q[..., -ROPE:], cos_sin, positions).bfloat16().float()
    x = torch.cat([q[..., :-ROPE].float(), turned], dim=-1)
    power = torch.exp2(powers_of_two(x))
    out.copy_((x / power[..., None]).clamp(-FP8_MAX, FP8_MAX).to(out.dtype))
    weights_out.copy_(weights * power * softmax_scale * head_scale)


@stands_in(
    "fp8_paged_mqa_logits_cpu(Tensor q_fp8, Tensor kvcache_fp8, Tensor weight, Tensor seq_lens, "
    "Tensor page_table, int block_size, int max_seq_len) -> Tensor"
)
def index_logits(
    q: Tensor,
    pages: Tensor,
    weight: Tensor,
    lengths: Tensor,
    table: Tensor,
    block_size: int,
    max_length: int,
) -> Tensor:
    """How much each compressed state of a request matters to each token."""
    keys, scales = sections(pages, block_size, INDEX_KEY, 4)
    logits = torch.full((len(q), max_length), float("-inf"))
    local = torch.arange(max_length)
    for token, length in enumerate(lengths.flatten().tolist()):
        k = local[:length]
        at = table[token, k // block_size].long(), k % block_size
        key = keys[at].view(torch.float8_e4m3fn).float() * scales[at].view(torch.float32)
        scores = torch.relu(q[token].float() @ key.T)
        logits[token, :length] = weight[token] @ scores
    return logits


@stands_in(
    "topk_transform_512_cpu(Tensor scores, Tensor seq_lens, Tensor page_tables, "
    "Tensor(a!) out_page_indices, int page_size, Tensor(b!)? out_raw_indices) -> ()"
)
def choose_states(
    scores: Tensor, lengths: Tensor, tables: Tensor, out: Tensor, size: int, raw: Tensor | None
) -> None:
    """The places of the largest scores of each token; all of them where there are few."""
    width = out.shape[1]
    out.fill_(-1)
    if raw is not None:
        raw.fill_(-1)
    for token, length in enumerate(lengths.flatten().tolist()):
        chosen = torch.arange(length)
        if length > width:
            chosen = torch.topk(scores[token, :length], width).indices
        out[token, : len(chosen)] = tables[token, chosen // size].int() * size + chosen % size
        if raw is not None:
            raw[token, : len(chosen)] = chosen.to(raw.dtype)


# ── what is no attention ──────────────────────────────────────────────────────────────────


@stands_in(
    "hc_pre_fused_cpu(Tensor x, Tensor hc_fn, Tensor hc_scale, Tensor hc_base, int hc_mult, "
    "int sinkhorn_iters, float rms_eps, float hc_eps) -> (Tensor, Tensor, Tensor)"
)
def hyper_pre(
    x: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    mult: int,
    iters: int,
    rms_eps: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from vllm.model_executor.kernels.mhc.torch import mhc_pre_torch

    post, comb, y = mhc_pre_torch(x, fn, scale, base, rms_eps, eps, eps, 2.0, iters)
    return y, post.squeeze(-1), comb


@stands_in("hc_post_fused_cpu(Tensor x, Tensor residual, Tensor post, Tensor comb) -> Tensor")
def hyper_post(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch

    return mhc_post_torch(x, residual, post[..., None], comb)


@stands_in(
    "hc_head_fused_cpu(Tensor x, Tensor hc_fn, Tensor hc_scale, Tensor hc_base, float hc_eps, "
    "float norm_eps) -> Tensor"
)
def hyper_head(
    x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float
) -> Tensor:
    flat = x.flatten(1).float()
    mixes = (flat @ fn.T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    pre = torch.sigmoid(mixes * scale + base) + eps
    return (pre[..., None] * x.float()).sum(1).to(x.dtype)


def chosen_weights(logits: Tensor, ids: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    scores = torch.sqrt(torch.nn.functional.softplus(logits.float())).gather(1, ids.long())
    return scores / scores.sum(-1, keepdim=True) * factor, ids.int()


@stands_in(
    "biased_topk_cpu(Tensor hidden_states, Tensor gating_output, Tensor correction_bias, int topk, "
    "bool renormalize, str scoring_func, int num_fused_shared_experts, "
    "float? routed_scaling_factor, bool apply_routed_scaling_factor_on_output) -> (Tensor, Tensor)"
)
def biased_experts(
    hidden: Tensor,
    logits: Tensor,
    bias: Tensor,
    topk: int,
    renormalize: bool,
    scoring: str,
    shared: int,
    factor: float | None,
    on_output: bool,
) -> tuple[Tensor, Tensor]:
    scores = torch.sqrt(torch.nn.functional.softplus(logits.float())) + bias
    return chosen_weights(logits, scores.topk(topk).indices, factor or 1.0)


@stands_in(
    "hash_topk_cpu(Tensor gating_output, Tensor tid2eid, int topk, str scoring_func, "
    "int num_fused_shared_experts, int num_experts, float routed_scaling_factor) "
    "-> (Tensor, Tensor)"
)
def hashed_experts(
    logits: Tensor, table: Tensor, topk: int, scoring: str, shared: int, experts: int, factor: float
) -> tuple[Tensor, Tensor]:
    return chosen_weights(logits, table, factor)
