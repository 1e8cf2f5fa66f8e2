# pyright: basic, reportCallIssue=false, reportOperatorIssue=false
# ruff: noqa: N803
"""Attention that reads keys and values where they lie: prompts, chunks and single tokens.

Queries of one kv head are taken together, `ROWS` of them at a time: token by token, and inside a
token head by head. Keys come `TOKENS` at a time through the block table. Where that makes too few
programs, each takes a part of the keys, and a second kernel joins the parts.
"""

import torch
import triton
import triton.language as tl

_WHOLE = 1 << 30
_BUSY_PROGRAMS = 1024
_MAX_SPLITS = 16
_LOG2_E = tl.constexpr(1.4426950408889634)
"""Logits are taken to base 2."""


@triton.jit(do_not_specialize=["num_tokens", "num_queries", "first_block"])
def _attend(
    query_at, key_at, value_at, table_at, first_at, sink_at, out_at, sum_at, peak_at,
    q_sequence, q_head, q_token, k_block, k_head, k_token, v_block, v_head, v_token, t_sequence,
    o_sequence, o_token, o_head, num_tokens, num_queries, first_block, window, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    K_DIM: tl.constexpr, K_WIDTH: tl.constexpr, V_DIM: tl.constexpr, V_WIDTH: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """One kv head of one sequence, `ROWS` of its queries, one part of the tokens they see."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sequence = (tl.program_id(1) // HEADS).to(tl.int64)
    head = tl.program_id(1) % HEADS
    split = tl.program_id(2)
    query, own = rows // GROUP, (head * GROUP + rows % GROUP).to(tl.int64)
    real, far = query < num_queries, query.to(tl.int64)
    past = num_tokens - num_queries
    k_column, v_column = tl.arange(0, K_WIDTH), tl.arange(0, V_WIDTH)
    q = tl.load(
        query_at + sequence * q_sequence + own[:, None] * q_head + far[:, None] * q_token
        + k_column[None, :],
        mask=real[:, None] & (k_column < K_DIM)[None, :], other=0.0,
    )  # fmt: skip
    oldest, high, start, end = _part(
        tl.load(first_at + sequence), past, num_tokens, window, split, GROUP, ROWS, TOKENS, SPLITS
    )
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, V_WIDTH], tl.float32)
    row_at = table_at + sequence * t_sequence - first_block
    key_at += head.to(tl.int64) * k_head
    value_at += head.to(tl.int64) * v_head
    for at in range(start, end, TOKENS):
        token = at + tl.arange(0, TOKENS)
        there = (token < high) & (token >= oldest)
        block, slot = _place(row_at, at, token, there, BLOCK, TOKENS)
        k_there, v_there = _masks(there, k_column, v_column, K_DIM, K_WIDTH, V_DIM, V_WIDTH)
        k = tl.load(
            key_at + (block * k_block + slot * k_token)[None, :] + k_column[:, None],
            mask=k_there, other=0.0,
        )  # fmt: skip
        score = tl.dot(q, k, input_precision="ieee") * scale
        distance = (past + query)[:, None] - token[None, :]
        seen = (distance >= 0) & (distance < window) & there[None, :]
        higher, part, shrink = _softmax(tl.where(seen, score, -float("inf")), peak)
        v = tl.load(
            value_at + (block * v_block + slot * v_token)[:, None] + v_column[None, :],
            mask=v_there, other=0.0,
        )  # fmt: skip
        total = total * shrink[:, None] + tl.dot(part.to(v.dtype), v, input_precision="ieee")
        weight = weight * shrink + tl.sum(part, 1)
        peak = higher
    if SPLITS == 1:
        if SINK:
            sink = tl.load(sink_at + own, mask=real, other=0.0).to(tl.float32) * _LOG2_E
            total, weight = _with_sink(total, weight, peak, sink)
        weight = tl.where(weight == 0.0, 1.0, weight)
        tl.store(
            out_at + sequence * o_sequence + far[:, None] * o_token + own[:, None] * o_head
            + v_column[None, :],
            (total / weight[:, None]).to(out_at.dtype.element_ty),
            mask=real[:, None] & (v_column < V_DIM)[None, :],
        )  # fmt: skip
    else:
        place = (tl.program_id(1) * num_queries * GROUP + rows) * SPLITS + split
        tl.store(sum_at + place[:, None] * V_WIDTH + v_column[None, :], total, mask=real[:, None])
        tl.store(peak_at + place * 2, peak, mask=real)
        tl.store(peak_at + place * 2 + 1, weight, mask=real)


@triton.jit
def _part(
    first, past, num_tokens, window, split,
    GROUP: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Tokens `[oldest, high)` are seen by some of these queries; `[start, end)` of them, whole
    tiles, are this program's part."""
    oldest = tl.maximum(first, past + tl.program_id(0) * ROWS // GROUP - window + 1)
    oldest = tl.maximum(oldest, 0)  # what lies before may not even be in the table
    low = oldest // TOKENS * TOKENS
    high = tl.minimum(num_tokens, past + (tl.program_id(0) * ROWS + ROWS - 1) // GROUP + 1)
    share = tl.cdiv(tl.cdiv(high - low, TOKENS), SPLITS) * TOKENS
    start = low + split * share
    return oldest, high, start, tl.minimum(high, start + share)


@triton.jit
def _place(row_at, at, token, there, BLOCK: tl.constexpr, TOKENS: tl.constexpr):
    """The block of each token from `at` on, and its slot in the block."""
    if BLOCK % TOKENS == 0:  # one look-up, and what is read lies together
        block = tl.load(row_at + at // BLOCK)
        slot = at % BLOCK + tl.arange(0, TOKENS)
    else:
        block = tl.load(row_at + token // BLOCK, mask=there, other=0)
        slot = token % BLOCK
    return block.to(tl.int64), slot


@triton.jit
def _masks(
    there, k_column, v_column,
    K_DIM: tl.constexpr, K_WIDTH: tl.constexpr, V_DIM: tl.constexpr, V_WIDTH: tl.constexpr,
):  # fmt: skip
    """What is there of a tile of keys, `[column, token]`, and of values, `[token, column]`."""
    k_there, v_there = there[None, :], there[:, None]
    if K_DIM < K_WIDTH:
        k_there = k_there & (k_column < K_DIM)[:, None]
    if V_DIM < V_WIDTH:
        v_there = v_there & (v_column < V_DIM)[None, :]
    return k_there, v_there


@triton.jit
def _softmax(score, peak):
    """The highest scores so far, the tile's weights, and the factor of all that came before."""
    higher = tl.maximum(peak, tl.max(score, 1))
    safe = tl.where(higher == -float("inf"), 0.0, higher)
    return higher, tl.exp2(score - safe[:, None]), tl.exp2(peak - safe)


@triton.jit
def _with_sink(total, weight, peak, sink):
    """Sums and weights with one more logit, which has no value."""
    higher = tl.maximum(peak, sink)
    shrink = tl.exp2(peak - higher)
    return total * shrink[:, None], weight * shrink + tl.exp2(sink - higher)


@triton.jit(do_not_specialize=["num_queries"])
def _join(
    sum_at, peak_at, sink_at, out_at, o_sequence, o_token, o_head, num_queries,
    HEADS: tl.constexpr, GROUP: tl.constexpr, V_DIM: tl.constexpr, V_WIDTH: tl.constexpr,
    SPLITS: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """One query of one head: the parts weighed against each other, and the sink."""
    row = tl.program_id(0)
    pair, rest = row // (num_queries * GROUP), row % (num_queries * GROUP)
    sequence = (pair // HEADS).to(tl.int64)
    query, own = rest // GROUP, pair % HEADS * GROUP + rest % GROUP
    split, column = tl.arange(0, SPLITS), tl.arange(0, V_WIDTH)
    place = row * SPLITS + split
    peak, weight = tl.load(peak_at + place * 2), tl.load(peak_at + place * 2 + 1)
    total = tl.load(sum_at + place[:, None] * V_WIDTH + column[None, :])
    highest = tl.max(peak, 0)
    if SINK:
        sink = tl.load(sink_at + own).to(tl.float32) * _LOG2_E
        highest = tl.maximum(highest, sink)
    highest = tl.where(highest == -float("inf"), 0.0, highest)
    shrink = tl.exp2(peak - highest)
    whole = tl.sum(weight * shrink, 0)
    if SINK:
        whole += tl.exp2(sink - highest)
    whole = tl.where(whole == 0.0, 1.0, whole)
    result = tl.sum(total * shrink[:, None], 0) / whole
    tl.store(
        out_at + sequence * o_sequence + query * o_token + own * o_head + column,
        result.to(out_at.dtype.element_ty),
        mask=column < V_DIM,
    )


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    *,
    num_tokens: int,
    first_block: int = 0,
    first_tokens: torch.Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Causal attention of each sequence's last tokens: `[sequence, token, head, dim]`.

    `query` is `[sequence, head, token, dim]`; `keys` and `values` are views `[block, kv head,
    token, dim]` of any strides but the last, which is 1; `table[s, j]` is logical block
    `first_block + j` of sequence `s`. All sequences have `num_tokens` tokens, the queries'
    included; tokens before `first_tokens[s]` are padding. `sinks` is one logit per head.
    """
    sequences, heads, num_queries, k_dim = query.shape
    kv_heads, block_tokens, v_dim = keys.shape[1], keys.shape[2], values.shape[3]
    group = heads // kv_heads
    if query.stride(3) != 1:
        query = query.contiguous()
    size = num_queries * group
    rows = 16 if size <= 16 else 32 if size <= 32 else 64
    tiles = triton.cdiv(size, rows)
    by_block = rows == 16 and block_tokens % 16 == 0
    tokens = 16 if by_block else 64 if k_dim <= 128 else 32
    reach = min(num_tokens, window or num_tokens)
    splits = splits or _splits(sequences * kv_heads * tiles, reach, tokens)
    v_width = max(16, triton.next_power_of_2(v_dim))
    device = query.device
    out = torch.empty((sequences, num_queries, heads, v_dim), dtype=query.dtype, device=device)
    parts = sequences * kv_heads * size * splits if splits > 1 else 1
    sums = torch.empty((parts, v_width), dtype=torch.float32, device=device)
    peaks = torch.empty((parts, 2), dtype=torch.float32, device=device)
    if first_tokens is None:
        first_tokens = torch.zeros(sequences, dtype=torch.int32, device=device)
    sink = peaks if sinks is None else sinks
    _attend[(tiles, sequences * kv_heads, splits)](
        query, keys, values, table, first_tokens, sink, out, sums, peaks,
        *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3], table.stride(0),
        *out.stride()[:3], num_tokens, num_queries, first_block, window or _WHOLE,
        (k_dim**-0.5 if scale is None else scale) * _LOG2_E.value,
        HEADS=kv_heads, GROUP=group, BLOCK=block_tokens,
        K_DIM=k_dim, K_WIDTH=max(16, triton.next_power_of_2(k_dim)), V_DIM=v_dim, V_WIDTH=v_width,
        ROWS=rows, TOKENS=tokens, SPLITS=splits, SINK=sinks is not None,
        num_warps=2 if by_block else 4, num_stages=5 if by_block else 3 if rows == 16 else 2,
    )  # fmt: skip
    if splits > 1:
        _join[(sequences * kv_heads * size,)](
            sums, peaks, sink, out, *out.stride()[:3], num_queries,
            HEADS=kv_heads, GROUP=group, V_DIM=v_dim, V_WIDTH=v_width,
            SPLITS=splits, SINK=sinks is not None,
        )  # fmt: skip
    return out


def _splits(programs: int, num_tokens: int, tokens: int) -> int:
    """Parts of the keys, so that the device has enough to do and each part a few tiles."""
    splits = 1
    while (
        splits < _MAX_SPLITS
        and programs * splits < _BUSY_PROGRAMS
        and splits * 8 * tokens <= num_tokens
    ):
        splits *= 2
    return splits
