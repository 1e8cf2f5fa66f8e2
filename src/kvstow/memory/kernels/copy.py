# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false
# ruff: noqa: N803
"""A kernel that copies many runs of bytes in one launch, pinned host memory included."""

import torch
import triton
import triton.language as tl

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}

TILE_BYTES = 64 << 10
"""What a program copies before it goes on to its next tile."""

STEP_BYTES = 4 << 10


@triton.jit(do_not_specialize=("num_runs", "programs"))  # one kernel for every number of copies
def _copy_runs(
    source, destination, table, num_runs, programs,
    TILE: tl.constexpr, STEP: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Each run is shared by `programs`, tile by tile."""
    run = tl.program_id(0) // programs
    start = tl.load(table + run)
    place = tl.load(table + num_runs + run)
    count = tl.load(table + 2 * num_runs + run)
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


def copy_runs(
    source: torch.Tensor,
    destination: torch.Tensor,
    table: torch.Tensor,
    word: int,
    *,
    programs: int,
) -> None:
    """Copy between two byte tensors, by a table that counts in words of `word` bytes.

    `table` has three rows: where each run starts, where it goes, how long it is. As many
    programs as `programs` share each of them.
    """
    unit = min(word, 8)
    _copy_runs[(table.shape[1] * programs,)](
        _words(source, unit),
        _words(destination, unit),
        table,
        table.shape[1],
        programs,
        TILE=TILE_BYTES // unit,
        STEP=STEP_BYTES // unit,
        PAIRS=word == 16,
        num_warps=8,
    )


def _words(memory: torch.Tensor, unit: int) -> torch.Tensor:
    return memory[: memory.numel() // unit * unit].view(WORDS[unit])
