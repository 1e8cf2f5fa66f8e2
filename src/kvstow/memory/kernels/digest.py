# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false
# ruff: noqa: N803
"""The digest's sum over the pages of many layers, in one launch."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

PROGRAMS = 4096
"""Programs of a launch: enough to keep a device busy."""

CHUNK_BYTES = 256 << 10
"""What a program reads at most before it multiplies by keys and adds up."""


VARYING = ("num_states", "low", "high", "num_blocks", "chunk", "num_cells")
LISTS = ("index", "seeds", "keys", "state_keys", "ids", "offsets", "sums", "cells")
"""Triton compiles another kernel where one of its numbers is 1 or a multiple of 16, and where a
pointer is a multiple of 16: these change from transfer to transfer, and each would wait for it."""


def _compiled_once(function: Callable[..., None]) -> Any:
    """A kernel that is compiled once for all lengths."""
    names = inspect.signature(function).parameters
    return triton.jit(
        function,
        do_not_specialize=[name for name in names if name in VARYING],
        do_not_specialize_on_alignment=[name for name in names if name in LISTS],
    )


@_compiled_once
def _state_keys(index, seeds, keys, num_states, states, low, high, SIZE: tl.constexpr):
    """T of every state of every listed block, 0 where it does not count."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    layer = tl.program_id(1)
    there = at < num_states
    state = tl.load(index + at // states, mask=there, other=0) * states + at % states
    counted = (state >= low) & (state < high)
    x = tl.load(seeds + layer).to(tl.uint64) + (state + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = (x ^ (x >> 31)) | 1
    found = tl.where(counted, x.to(tl.int64), 0)
    tl.store(keys + layer.to(tl.int64) * num_states + at, found, mask=there)


@_compiled_once
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
    counted: tuple[int, int],
    *,
    aligned: bool,
) -> Callable[[], torch.Tensor]:
    """Σ word · key(layer, state) · keys[head, word] modulo 2^64, over pages of one geometry.

    What it returns launches the sum; the states' keys are found now. `memory` is the arena in
    words; `blocks` are ids and logical indices, `layers` offsets and seeds, `strides` those of
    block, head and token; all in words. `counted` is a half-open interval of states.
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


@_compiled_once
def _sum_cells(memory, keys, cells, sums, num_cells, SIZE: tl.constexpr):
    """One cell's words times their keys, times its state's key."""
    cell = tl.program_id(0)
    start = tl.load(cells + cell)
    factor = tl.load(cells + num_cells + cell).to(tl.uint64)
    first = tl.load(cells + 2 * num_cells + cell)
    count = tl.load(cells + 3 * num_cells + cell)
    total = tl.full((SIZE,), 0, tl.uint64)
    for at in range(0, count, SIZE):
        word = at + tl.arange(0, SIZE)
        inside = word < count
        words = tl.load(memory + start + word, mask=inside, other=0)
        key = tl.load(keys + first + word, mask=inside, other=0)
        total += words.to(tl.uint64) * key.to(tl.uint64)
    tl.store(sums + cell, (tl.sum(total, axis=0) * factor).to(tl.int64))


def cells_summed(
    memory: torch.Tensor, keys: torch.Tensor, cells: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """Per cell, Σ word · key, times the key of its state, modulo 2^64; launched when called.

    `cells` has four rows: where each cell starts in `memory`, its state's key, where its words'
    keys start in `keys`, and how many words it has.
    """
    num_cells = len(cells) // 4
    sums = torch.empty(num_cells, dtype=torch.int64, device=memory.device)

    def launched() -> torch.Tensor:
        _sum_cells[(num_cells,)](memory, keys, cells, sums, num_cells, SIZE=256, num_warps=4)
        return sums

    return launched
