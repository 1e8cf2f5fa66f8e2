# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false
# ruff: noqa: N803
"""A sum over the words of each of many rows, in one launch."""

import torch
import triton
import triton.language as tl

PROGRAMS = 8
"""They share a run of words."""


@triton.jit(do_not_specialize=["num_runs"], do_not_specialize_on_alignment=["table", "sums"])
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
