# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false
# ruff: noqa: N803
"""A kernel that copies many runs of bytes in one launch, pinned host memory included.

The runs are cut into tiles; so many programs as are allowed take the tiles in turns. A step of a
program copies a stretch of one long run, or several short runs at once.
"""

import torch
import triton
import triton.language as tl

from kvstow.plan.view import ceil_div

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}

TILE_BYTES = 64 << 10
"""What a program copies before it goes on to its next tile."""

STEP_BYTES = 32 << 10
WIDTHS = (256, 1 << 10, 4 << 10, STEP_BYTES)
"""Bytes of each run that one step copies, for each of which there is a kernel."""


@triton.jit(do_not_specialize=("num_runs", "num_units", "tiles"))  # one kernel for all numbers
def _copy_runs(
    source, destination, table, num_runs, num_units, tiles,
    RUNS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Unit `u` is tile `u % tiles` of runs `[u // tiles * RUNS, … + RUNS)`."""
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        run = unit // tiles * RUNS + tl.arange(0, RUNS)
        start = tl.load(table + run, mask=run < num_runs, other=0)
        place = tl.load(table + num_runs + run, mask=run < num_runs, other=0)
        count = tl.load(table + 2 * num_runs + run, mask=run < num_runs, other=0)
        if PAIRS:  # words of 8 bytes that come in twos: 16 bytes per access
            start = tl.multiple_of(start * 2, 2)
            place = tl.multiple_of(place * 2, 2)
            count = tl.multiple_of(count * 2, 2)
        first = unit % tiles * TILE
        end = tl.minimum(count, first + TILE)
        for done in range(first, tl.max(end, axis=0), WIDTH):
            at = done + tl.arange(0, WIDTH)
            inside = at[None, :] < end[:, None]
            words = tl.load(source + start[:, None] + at[None, :], mask=inside)
            tl.store(destination + place[:, None] + at[None, :], words, mask=inside)


def copy_runs(
    source: torch.Tensor,
    destination: torch.Tensor,
    table: torch.Tensor,
    word: int,
    *,
    longest: int,
    programs: int,
    width: int | None = None,
) -> None:
    """Copy between two byte tensors, by a table that counts in words of `word` bytes.

    `table` has three rows: where each run starts, where it goes, how long it is; the longest has
    `longest` bytes. At most so many `programs` share the work. `width` is chosen by the longest,
    unless it is given.
    """
    unit = min(word, 8)
    width = width or next((w for w in WIDTHS if longest <= w), STEP_BYTES)
    runs = STEP_BYTES // width
    tiles = ceil_div(longest, TILE_BYTES)
    num_runs = table.shape[1]
    num_units = ceil_div(num_runs, runs) * tiles
    _copy_runs[(min(num_units, programs),)](
        _words(source, unit),
        _words(destination, unit),
        table,
        num_runs,
        num_units,
        tiles,
        RUNS=runs,
        TILE=TILE_BYTES // unit,
        WIDTH=width // unit,
        PAIRS=word == 16,
        num_warps=8,
    )


def _words(memory: torch.Tensor, unit: int) -> torch.Tensor:
    return memory[: memory.numel() // unit * unit].view(WORDS[unit])
