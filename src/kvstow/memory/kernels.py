# pyright: basic, reportCallIssue=false
# ruff: noqa: N803
"""Triton kernels, and the only module that imports triton.

Without a CUDA device they run in Triton's interpreter: set TRITON_INTERPRET=1 before the first
import.
"""

import torch

from kvstow.errors import BackendMissing

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:
    raise BackendMissing("triton", "torch") from error

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


# ── copies ────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _copy_tiles(source, destination, table, num_tiles, STEP: tl.constexpr, PAIRS: tl.constexpr):
    tile = tl.program_id(0)
    start = tl.load(table + tile)
    place = tl.load(table + num_tiles + tile)
    count = tl.load(table + 2 * num_tiles + tile)
    if PAIRS:  # words of 8 bytes that come in twos: 16 bytes per access
        start = tl.multiple_of(start * 2, 2)
        place = tl.multiple_of(place * 2, 2)
        count = tl.multiple_of(count * 2, 2)
    for done in range(0, count, STEP):
        at = done + tl.arange(0, STEP)
        words = tl.load(source + start + at, mask=at < count)
        tl.store(destination + place + at, words, mask=at < count)


def copy_tiles(
    source: torch.Tensor,
    destination: torch.Tensor,
    table: torch.Tensor,
    word: int,
    *,
    step_bytes: int = 16 << 10,
    num_warps: int = 8,
) -> None:
    """Copy tiles between two byte tensors; the table counts in words of `word` bytes.

    `table` has three rows: where each tile starts, where it goes, how long it is.
    """
    unit = min(word, 8)
    _copy_tiles[(table.shape[1],)](
        _words(source, unit),
        _words(destination, unit),
        table,
        table.shape[1],
        STEP=step_bytes // unit,
        PAIRS=word == 16,
        num_warps=num_warps,
    )


def _words(memory: torch.Tensor, unit: int) -> torch.Tensor:
    return memory[: memory.numel() // unit * unit].view(WORDS[unit])


# ── digest ────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _mixed(x):
    """One odd number per x: a bijection of 64-bit words that leaves no pattern behind."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return (x ^ (x >> 31)) | 1


@triton.jit
def _digest_cells(
    memory, keys, ids, index, offsets, seeds, sums,
    num_blocks, chunk, states, cell_words, tiles_per_head,
    block_stride, head_stride, token_stride, low, high, low2, high2,
    TOKENS: tl.constexpr, WORDS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    tile, part, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head = (tile // tiles_per_head).to(tl.int64)
    word = (tile % tiles_per_head) * WORDS + tl.arange(0, WORDS)
    inside = word < cell_words
    seed = tl.load(seeds + layer).to(tl.uint64)
    base = tl.load(offsets + layer) + head * head_stride
    total = tl.full((TOKENS, WORDS), 0, tl.uint64)
    for i in range(part * chunk, tl.minimum((part + 1) * chunk, num_blocks)):
        page = base + tl.load(ids + i) * block_stride
        first = tl.load(index + i) * states
        for done in range(0, states, TOKENS):
            token = done + tl.arange(0, TOKENS)
            state = first + token
            counted = ((state >= low) & (state < high)) | ((state >= low2) & (state < high2))
            counted = counted & (token < states)
            cell = page + token * token_stride
            if ALIGNED:
                cell = tl.multiple_of(cell, 4)
            where = memory + cell[:, None] + word[None, :]
            words = tl.load(where, mask=counted[:, None] & inside[None, :], other=0)
            key = _mixed(seed + (state + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
            total += words.to(tl.uint64) * key[:, None]
    key = tl.load(keys + head * cell_words + word, mask=inside, other=0).to(tl.uint64)
    found = tl.sum(tl.sum(total * key[None, :], axis=1), axis=0)
    slot = (layer * tl.num_programs(1) + part) * tl.num_programs(0) + tile
    tl.store(sums + slot, found.to(tl.int64))


def digest_cells(
    memory: torch.Tensor,
    keys: torch.Tensor,
    blocks: tuple[torch.Tensor, torch.Tensor],
    layers: tuple[torch.Tensor, torch.Tensor],
    strides: tuple[int, int, int],
    states: int,
    counted: tuple[int, int, int, int],
    *,
    aligned: bool,
) -> int:
    """Σ word · key(layer, state) · keys[head, word] modulo 2^64, over pages of one geometry.

    `memory` is the arena in words; `blocks` are ids and logical indices, `layers` offsets and
    seeds, `strides` those of block, head and token; all in words. `counted` are two
    half-open intervals of states. `aligned`: every cell starts at a multiple of four words
    of 4 bytes.
    """
    ids, index = blocks
    offsets, seeds = layers
    heads, cell_words = keys.shape
    tokens = min(16, triton.next_power_of_2(states))
    words = min(triton.next_power_of_2(cell_words), 2048 // tokens)
    tiles_per_head = triton.cdiv(cell_words, words)
    chunk = max(1, (64 << 10) // (words * states * memory.element_size()))
    parts = triton.cdiv(len(ids), chunk)
    grid = (heads * tiles_per_head, parts, len(offsets))
    sums = torch.empty(grid, dtype=torch.int64, device=memory.device)
    _digest_cells[grid](
        memory, keys, ids, index, offsets, seeds, sums,
        len(ids), chunk, states, cell_words, tiles_per_head, *strides, *counted,
        TOKENS=tokens, WORDS=words, ALIGNED=aligned, num_warps=4,
    )  # fmt: skip
    return int(sums.sum().item())
