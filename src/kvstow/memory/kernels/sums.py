# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false
# ruff: noqa: N803
"""Sums over words: a digest's, over the cells of many blocks; and one for each of many rows."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

VARYING = ("num_entries", "num_runs")
LISTS = ("keys", "entries", "parts", "table", "sums")
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


# ── digests ───────────────────────────────────────────────────────────────────────────────


@_compiled_once
def _digest_blocks(
    memory, keys, entries, parts, sums, num_entries,
    TOKENS: tl.constexpr, WORDS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One layer of one block: Σ word · T(layer, state) · P(head, word)."""
    entry = tl.program_id(0)
    base = tl.load(entries + entry)
    seed = tl.load(entries + num_entries + entry).to(tl.uint64)
    first = tl.load(entries + 2 * num_entries + entry)
    part = parts + 8 * tl.load(entries + 3 * num_entries + entry)
    low, high, states = tl.load(part), tl.load(part + 1), tl.load(part + 2)
    heads, cell_words = tl.load(part + 3), tl.load(part + 4)
    head_stride, token_stride = tl.load(part + 5), tl.load(part + 6)
    keys += tl.load(part + 7)
    tiles = tl.cdiv(cell_words, WORDS)
    result = tl.full((TOKENS, WORDS), 0, tl.uint64)
    for done in range(0, states, TOKENS):
        token = done + tl.arange(0, TOKENS)
        state = first + token
        counts = (token < states) & (state >= low) & (state < high)
        x = seed + (state + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB
        x = (x ^ (x >> 31)) | 1
        total = tl.full((TOKENS, WORDS), 0, tl.uint64)
        for tile in tl.range(0, heads * tiles, num_stages=4):  # loads run ahead
            head = tile // tiles
            word = (tile % tiles) * WORDS + tl.arange(0, WORDS)
            inside = word < cell_words
            cell = base + head * head_stride + token * token_stride
            if ALIGNED:
                cell = tl.multiple_of(cell, 4)
            where = memory + cell[:, None] + word[None, :]
            words = tl.load(where, mask=counts[:, None] & inside[None, :], other=0)
            key = tl.load(keys + head * cell_words + word, mask=inside, other=0)
            total += words.to(tl.uint64) * key.to(tl.uint64)[None, :]
        result += total * x[:, None]
    tl.store(sums + entry, tl.sum(tl.sum(result, axis=1), axis=0).to(tl.int64))


def block_sums(
    memory: torch.Tensor,
    keys: torch.Tensor,
    entries: torch.Tensor,
    parts: torch.Tensor,
    *,
    tile: tuple[int, int],
    aligned: bool,
) -> Callable[[], torch.Tensor]:
    """Per entry Σ word · T · P modulo 2^64; launched when called.

    An entry is one layer of one block: where its first state lies in `memory`, the layer's seed,
    the number of that state, and its part. A part has eight numbers: which states count, `[low,
    high)`; how many a block holds; heads, words of a cell; strides of head and token; and where its
    keys begin. All is in words. A program takes `tile` states and words at a time. `aligned`: every
    cell starts at a multiple of four words of 4 bytes.
    """
    num_entries = entries.shape[1]
    sums = torch.empty(num_entries, dtype=torch.int64, device=memory.device)
    tokens = min(16, triton.next_power_of_2(tile[0]))
    words = min(triton.next_power_of_2(tile[1]), 1024 // tokens)

    def launched() -> torch.Tensor:
        _digest_blocks[(num_entries,)](
            memory, keys, entries, parts, sums, num_entries,
            TOKENS=tokens, WORDS=words, ALIGNED=aligned, num_warps=1,
        )  # fmt: skip
        return sums

    return launched


# ── rows ──────────────────────────────────────────────────────────────────────────────────

PROGRAMS = 8
"""They share a run of words."""


@_compiled_once
def _sum_rows(memory, table, sums, num_runs, PROGRAMS: tl.constexpr, STEP: tl.constexpr):
    """Words of a run times a number of their place in the row, added to the row's sum."""
    run = tl.program_id(0) // PROGRAMS
    start = tl.load(table + run)
    place = tl.load(table + num_runs + run)
    count = tl.load(table + 2 * num_runs + run)
    row = tl.load(table + 3 * num_runs + run)
    total = tl.zeros((STEP,), tl.uint64)
    for done in range((tl.program_id(0) % PROGRAMS) * STEP, count, PROGRAMS * STEP):
        at = done + tl.arange(0, STEP)
        words = tl.load(memory + start + at, mask=at < count, other=0).to(tl.uint64)
        x = (place + at + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
        x = (x ^ (x >> 31)) | 1
        total += words * x
    tl.atomic_add(sums + row, tl.sum(total.to(tl.int64), axis=0))


def sum_rows(memory: torch.Tensor, table: torch.Tensor, sums: torch.Tensor) -> None:
    """Add to `sums`, by row. `memory` is bytes; the table has four lines, in words of 8 bytes:
    where each run starts, where it lies in its row, how long it is; and the number of its row."""
    words = memory[: memory.numel() // 8 * 8].view(torch.int64)
    runs = table.shape[1]
    _sum_rows[(runs * PROGRAMS,)](words, table, sums, runs, PROGRAMS=PROGRAMS, STEP=1024)
