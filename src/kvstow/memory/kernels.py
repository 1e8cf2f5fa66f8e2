# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false
# ruff: noqa: N803
"""Triton kernels, and the only module that imports triton.

Without a CUDA device they run in Triton's interpreter: set TRITON_INTERPRET=1 before the first
import.
"""

from collections.abc import Callable

import torch

from kvstow.errors import BackendMissing

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:
    raise BackendMissing("triton", "torch") from error

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


# ── copies ────────────────────────────────────────────────────────────────────────────────


TILE_BYTES = 64 << 10
"""What a program copies before it goes on to its next tile."""


@triton.jit
def _copy_moves(
    source, destination, table, num_moves, programs,
    TILE: tl.constexpr, STEP: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Each move is shared by `programs`, tile by tile."""
    move = tl.program_id(0) // programs
    start = tl.load(table + move)
    place = tl.load(table + num_moves + move)
    count = tl.load(table + 2 * num_moves + move)
    if PAIRS:  # words of 8 bytes that come in twos: 16 bytes per access
        start = tl.multiple_of(start * 2, 2)
        place = tl.multiple_of(place * 2, 2)
        count = tl.multiple_of(count * 2, 2)
    for tile in range((tl.program_id(0) % programs) * TILE, count, programs * TILE):
        end = tl.minimum(tile + TILE, count)
        for done in range(tile, end, STEP):
            at = done + tl.arange(0, STEP)
            words = tl.load(source + start + at, mask=at < end)
            tl.store(destination + place + at, words, mask=at < end)


def copy_moves(
    source: torch.Tensor,
    destination: torch.Tensor,
    table: torch.Tensor,
    word: int,
    *,
    programs: int,
    tile_bytes: int = TILE_BYTES,
    step_bytes: int = 4 << 10,
    num_warps: int = 8,
) -> None:
    """Copy between two byte tensors, by a table that counts in words of `word` bytes.

    `table` has three rows: where each move starts, where it goes, how long it is. As many
    programs as `programs` share each of them.
    """
    unit = min(word, 8)
    _copy_moves[(table.shape[1] * programs,)](
        _words(source, unit),
        _words(destination, unit),
        table,
        table.shape[1],
        programs,
        TILE=tile_bytes // unit,
        STEP=step_bytes // unit,
        PAIRS=word == 16,
        num_warps=num_warps,
    )


def _words(memory: torch.Tensor, unit: int) -> torch.Tensor:
    return memory[: memory.numel() // unit * unit].view(WORDS[unit])


# ── digest ────────────────────────────────────────────────────────────────────────────────


PROGRAMS = 4096
"""As many as keep a device busy: fewer would each have a longer way to go."""

CHUNK_BYTES = 256 << 10
"""What a program reads at most before it multiplies by keys and adds up."""


@triton.jit
def _state_keys(index, seeds, keys, num_states, states, low, high, low2, high2, SIZE: tl.constexpr):
    """T of every state of every listed block, 0 where it does not count."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    layer = tl.program_id(1)
    there = at < num_states
    state = tl.load(index + at // states, mask=there, other=0) * states + at % states
    counted = ((state >= low) & (state < high)) | ((state >= low2) & (state < high2))
    x = tl.load(seeds + layer).to(tl.uint64) + (state + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = (x ^ (x >> 31)) | 1
    found = tl.where(counted, x.to(tl.int64), 0)
    tl.store(keys + layer.to(tl.int64) * num_states + at, found, mask=there)


@triton.jit
def _digest_cells(
    memory, keys, state_keys, ids, offsets, sums,
    num_blocks, chunk, states, cell_words, tiles_per_head, block_stride, head_stride, token_stride,
    TOKENS: tl.constexpr, WORDS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One tile of one head's cells, summed over a chunk of blocks, then times its keys."""
    tile, part, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head = (tile // tiles_per_head).to(tl.int64)
    word = (tile % tiles_per_head) * WORDS + tl.arange(0, WORDS)
    inside = word < cell_words
    base = tl.load(offsets + layer) + head * head_stride
    factors = state_keys + layer.to(tl.int64) * num_blocks * states
    steps = tl.cdiv(states, TOKENS)
    total = tl.full((TOKENS, WORDS), 0, tl.uint64)
    start, end = part * chunk, tl.minimum((part + 1) * chunk, num_blocks)
    for at in tl.range(start * steps, end * steps, num_stages=4):  # one loop: loads run ahead
        i = at // steps
        token = (at % steps) * TOKENS + tl.arange(0, TOKENS)
        there = token < states
        cell = base + tl.load(ids + i) * block_stride + token * token_stride
        if ALIGNED:
            cell = tl.multiple_of(cell, 4)
        where = memory + cell[:, None] + word[None, :]
        words = tl.load(where, mask=there[:, None] & inside[None, :], other=0)
        factor = tl.load(factors + i * states + token, mask=there, other=0)
        total += words.to(tl.uint64) * factor.to(tl.uint64)[:, None]
    key = tl.load(keys + head * cell_words + word, mask=inside, other=0).to(tl.uint64)
    found = tl.sum(tl.sum(total * key[None, :], axis=1), axis=0)
    slot = (layer * tl.num_programs(1) + part) * tl.num_programs(0) + tile
    tl.store(sums + slot, found.to(tl.int64))


def cell_sums(
    memory: torch.Tensor,
    keys: torch.Tensor,
    blocks: tuple[torch.Tensor, torch.Tensor],
    layers: tuple[torch.Tensor, torch.Tensor],
    strides: tuple[int, int, int],
    states: int,
    counted: tuple[int, int, int, int],
    *,
    aligned: bool,
) -> Callable[[], torch.Tensor]:
    """Σ word · key(layer, state) · keys[head, word] modulo 2^64, over pages of one geometry.

    What it returns launches the sum; the states' keys are found now. `memory` is the arena in
    words; `blocks` are ids and logical indices, `layers` offsets and seeds, `strides` those of
    block, head and token; all in words. `counted` are two half-open intervals of states.
    `aligned`: every cell starts at a multiple of four words of 4 bytes.
    """
    ids, index = blocks
    offsets, seeds = layers
    heads, cell_words = keys.shape
    num_states = len(ids) * states
    state_keys = torch.empty((len(offsets), num_states), dtype=torch.int64, device=memory.device)
    _state_keys[(triton.cdiv(num_states, 256), len(offsets))](
        index, seeds, state_keys, num_states, states, *counted, SIZE=256
    )
    tokens = min(16, triton.next_power_of_2(states))
    words = min(triton.next_power_of_2(cell_words), 1024 // tokens)
    tiles_per_head = triton.cdiv(cell_words, words)
    share = heads * tiles_per_head * len(offsets) * len(ids) // PROGRAMS
    chunk = max(1, min(share, CHUNK_BYTES // (words * states * memory.element_size())))
    grid = (heads * tiles_per_head, triton.cdiv(len(ids), chunk), len(offsets))
    sums = torch.empty(grid, dtype=torch.int64, device=memory.device)

    def launched() -> torch.Tensor:
        _digest_cells[grid](
            memory, keys, state_keys, ids, offsets, sums,
            len(ids), chunk, states, cell_words, tiles_per_head, *strides,
            TOKENS=tokens, WORDS=words, ALIGNED=aligned, num_warps=1,
        )  # fmt: skip
        return sums.sum()

    return launched


# ── attention ─────────────────────────────────────────────────────────────────────────────


_STEP = 16  # tokens that a program takes at a time


@triton.jit
def _paged_decode(
    query, keys, values, table, lengths, sums, peaks, weights,
    scale, table_width, k_block, k_head, k_token, v_block, v_head, v_token,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """One sequence, one kv head, one part of the tokens: an unnormalised softmax average."""
    sequence, part, head = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    share = tl.cdiv(tl.cdiv(length, STEP), tl.num_programs(1)) * STEP
    start, end = part * share, tl.minimum((part + 1) * share, length)
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    real = (row < GROUP)[:, None] & (column < DIM)[None, :]
    first = (sequence * tl.num_programs(2) + head) * GROUP
    q = tl.load(query + (first + row)[:, None] * DIM + column[None, :], mask=real, other=0.0)
    peak = tl.full((ROWS,), -float("inf"), tl.float32)
    weight = tl.full((ROWS,), 0.0, tl.float32)
    total = tl.full((ROWS, WIDTH), 0.0, tl.float32)
    row_at = table + sequence * table_width
    keys += head.to(tl.int64) * k_head
    values += head.to(tl.int64) * v_head
    # Heads of one sequence run at the same time: on the same block where their pages lie together,
    # on blocks far from each other where they lie apart, as pages at distances of a power of two
    # would wait for the same parts of DRAM.
    steps = tl.cdiv(end - start, STEP)
    ahead = head * steps // tl.num_programs(2) if APART else 0
    for i in range(steps):
        step = tl.where(i + ahead < steps, i + ahead, i + ahead - steps)
        at = start + step * STEP
        token = at + tl.arange(0, STEP)
        there = token < end
        if BLOCK % STEP == 0:  # one look-up, and what is read lies together
            block = tl.load(row_at + at // BLOCK)
            slot = at % BLOCK + tl.arange(0, STEP)
        else:
            block = tl.load(row_at + token // BLOCK, mask=there, other=0)
            slot = token % BLOCK
        block = block.to(tl.int64)
        seen = there[:, None]
        if DIM < WIDTH:
            seen = seen & (column < DIM)[None, :]
        k_at = block * k_block + slot * k_token
        k = tl.load(keys + k_at[:, None] + column[None, :], mask=seen, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where(there[None, :], scores, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        part_of = tl.exp(scores - higher[:, None])
        shrink = tl.exp(peak - higher)
        v_at = block * v_block + slot * v_token
        v = tl.load(values + v_at[:, None] + column[None, :], mask=seen, other=0.0)
        total = total * shrink[:, None] + tl.dot(part_of.to(v.dtype), v)
        weight = weight * shrink + tl.sum(part_of, axis=1)
        peak = higher
    place = part * tl.num_programs(0) * tl.num_programs(2) * GROUP + first + row
    tl.store(sums + place[:, None] * DIM + column[None, :], total, mask=real)
    tl.store(peaks + place, peak, mask=row < GROUP)
    tl.store(weights + place, weight, mask=row < GROUP)


@triton.jit
def _join_parts(
    sums, peaks, weights, out, rows, num_parts,
    PARTS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One query head of one sequence: its parts, weighed against each other."""
    part, column = tl.arange(0, PARTS), tl.arange(0, WIDTH)
    there = part < num_parts
    place = part * rows + tl.program_id(0)
    peak = tl.load(peaks + place, mask=there, other=-float("inf"))
    shrink = tl.exp(peak - tl.max(peak, 0))
    weight = tl.load(weights + place, mask=there, other=0.0)
    real = there[:, None] & (column < DIM)[None, :]
    total = tl.load(sums + place[:, None] * DIM + column[None, :], mask=real, other=0.0)
    found = tl.sum(total * shrink[:, None], 0) / tl.sum(weight * shrink, 0)
    at = out + tl.program_id(0) * DIM + column
    tl.store(at, found.to(out.dtype.element_ty), mask=column < DIM)


def paged_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    num_parts: int = 1,
) -> torch.Tensor:
    """Attention of one new token per sequence to its cached tokens, read where they lie.

    `query` is `[sequence, head, dim]`, contiguous; `keys` and `values` are views `[block, head,
    token, dim]` of any strides but the last, which is 1; `block_table` is `[sequence, logical
    block]`, and `lengths` says how many tokens each sequence has. An H200 runs 1,320 programs
    at once, one per sequence, kv head and part: parts that just fill it are best.
    """
    sequences, heads, dim = query.shape
    kv_heads, block_tokens = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    shape = (num_parts, sequences, heads)
    sums = torch.empty((*shape, dim), dtype=torch.float32, device=query.device)
    peaks = torch.empty(shape, dtype=torch.float32, device=query.device)
    weights = torch.empty(shape, dtype=torch.float32, device=query.device)
    _paged_decode[(sequences, num_parts, kv_heads)](
        query, keys, values, block_table, lengths, sums, peaks, weights,
        dim**-0.5, block_table.stride(0), *keys.stride()[:3], *values.stride()[:3],
        GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), DIM=dim,
        WIDTH=max(16, triton.next_power_of_2(dim)), BLOCK=block_tokens, STEP=_STEP,
        APART=keys.stride(1) > block_tokens * keys.stride(2), num_warps=1, num_stages=6,
    )  # fmt: skip
    out = torch.empty_like(query)
    _join_parts[(sequences * heads,)](
        sums, peaks, weights, out, sequences * heads, num_parts,
        PARTS=triton.next_power_of_2(num_parts), DIM=dim, WIDTH=triton.next_power_of_2(dim),
    )  # fmt: skip
    return out
