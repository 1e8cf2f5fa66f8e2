# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false
# ruff: noqa: N803
"""A kernel that copies many runs of bytes in one launch, pinned host memory included.

Runs are lanes of pairs of blocks, or of one pair whose lanes are all there is. They are cut into
tiles; so many programs as are allowed take the tiles in turns. A step of a program copies a stretch
of one long run, or several short runs at once.
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


@triton.jit(
    do_not_specialize=("num_pairs", "num_lanes", "num_units", "tiles"),  # one kernel for all
    do_not_specialize_on_alignment=("pairs", "lanes"),
)
def _copy_lanes(
    source, destination, pairs, lanes, num_pairs, num_lanes, num_units, tiles,
    RUNS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, TWOS: tl.constexpr,
):  # fmt: skip
    """Unit `u` is a tile of some lanes of a pair of blocks: tiles first, then lanes, then pairs."""
    parts = tl.cdiv(num_lanes, RUNS) * tiles
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        pair, part = unit // parts, unit % parts
        lane = part // tiles * RUNS + tl.arange(0, RUNS)
        is_lane = lane < num_lanes
        here = tl.load(pairs + pair)
        there = tl.load(pairs + num_pairs + pair)
        start = tl.load(lanes + lane, mask=is_lane, other=0)
        place = tl.load(lanes + num_lanes + lane, mask=is_lane, other=0)
        count = tl.load(lanes + 2 * num_lanes + lane, mask=is_lane, other=0)
        start += here * tl.load(lanes + 3 * num_lanes + lane, mask=is_lane, other=0)
        place += there * tl.load(lanes + 4 * num_lanes + lane, mask=is_lane, other=0)
        if TWOS:  # words of 8 bytes that come in twos: 16 bytes per access
            start = tl.multiple_of(start * 2, 2)
            place = tl.multiple_of(place * 2, 2)
            count = tl.multiple_of(count * 2, 2)
        first = part % tiles * TILE
        end = tl.minimum(count, first + TILE)
        for done in range(first, tl.max(end, axis=0), WIDTH):
            at = done + tl.arange(0, WIDTH)
            inside = at[None, :] < end[:, None]
            words = tl.load(source + start[:, None] + at[None, :], mask=inside)
            tl.store(destination + place[:, None] + at[None, :], words, mask=inside)


def copy_lanes(
    source: torch.Tensor,
    destination: torch.Tensor,
    pairs: torch.Tensor,
    lanes: torch.Tensor,
    word: int,
    *,
    longest: int,
    programs: int,
    width: int | None = None,
) -> None:
    """Copy every lane of every pair of blocks between two byte tensors.

    `pairs` has two rows: the number of the block here, and there. `lanes` has five, in words of
    `word` bytes: where each lane starts in block 0, where it goes, how long it is, and how far
    blocks are apart here and there. The longest has `longest` bytes. At most so many `programs`
    share the work. `width` is chosen by the longest, unless it is given.
    """
    unit = min(word, 8)
    width = width or next((w for w in WIDTHS if longest <= w), STEP_BYTES)
    runs = STEP_BYTES // width
    tiles = ceil_div(longest, TILE_BYTES)
    num_pairs, num_lanes = pairs.shape[1], lanes.shape[1]
    num_units = num_pairs * ceil_div(num_lanes, runs) * tiles
    _copy_lanes[(min(num_units, programs),)](
        _words(source, unit),
        _words(destination, unit),
        pairs,
        lanes,
        num_pairs,
        num_lanes,
        num_units,
        tiles,
        RUNS=runs,
        TILE=TILE_BYTES // unit,
        WIDTH=width // unit,
        TWOS=word == 16,
        num_warps=8,
    )


def _words(memory: torch.Tensor, unit: int) -> torch.Tensor:
    return memory[: memory.numel() // unit * unit].view(WORDS[unit])
