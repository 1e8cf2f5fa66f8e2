"""Poison mode reports writes to freed rows and reads of rows that nobody wrote."""

import numpy as np
import pytest
import torch

from kvstow.errors import BlockError
from kvstow.memory.arena import POISON, Arena
from kvstow.plan.group import grouped
from kvstow.plan.layout import Layout
from kvstow.plan.pack import packed
from kvstow.plan.retention import Window
from kvstow.route.blocks import Blocks
from kvstow.testing.poison import Poison, check_reads
from planning import attention, recurrent


def layout() -> Layout:
    layers = [attention("a", tokens=2), attention("b", tokens=2), recurrent("m")]
    return packed(grouped([*layers, attention("w", retention=Window(3))]), num_slabs=6)


def test_freed_rows_hold_the_pattern_and_their_neighbours_keep_their_bytes():
    plan = layout()
    with Arena(plan) as arena:
        arena.bytes.fill_(1)
        Poison(arena).freed(0, np.array([2, 3]))
        owned = {
            i for block in (2, 3) for run in plan.runs(0, block) for i in range(run.offset, run.end)
        }
        found = set(np.flatnonzero(arena.bytes.numpy() == POISON).tolist())
        assert found == owned


def test_a_write_to_a_freed_row_is_reported_with_its_block():
    with Arena(layout()) as arena:
        poison = Poison(arena)
        poison.freed(0, np.array([2, 3]))
        poison.check()
        arena.tensor("b")[3, 1, 1, 0] = 0.0
        with pytest.raises(BlockError, match=r"freed blocks \[3\] were written to"):
            poison.check()
        with pytest.raises(BlockError, match=r"freed blocks \[3\]"):
            poison.taken(0, np.array([3]))


def test_a_row_that_was_taken_again_may_be_written():
    with Arena(layout()) as arena:
        poison = Poison(arena)
        poison.freed(0, np.array([2, 3]))
        poison.taken(0, np.array([3]))
        arena.tensor("b")[3].zero_()
        poison.check()


def test_reading_a_row_that_was_freed_or_never_written_is_reported():
    with Arena(layout()) as arena:
        arena.bytes.fill_(POISON)
        blocks = {0: Blocks.first([3, 1])}
        for name in ("a", "b"):
            arena.tensor(name)[[3, 1]] = 0.5
        check_reads(arena, blocks, 4)
        arena.tensor("b")[1, :, 1].view(torch.uint8).fill_(POISON)
        check_reads(arena, blocks, 3)
        with pytest.raises(BlockError, match=r"layer 'b': blocks \[1\].*states \[3\]"):
            check_reads(arena, blocks, 4)


def test_cells_that_the_next_token_does_not_look_at_may_be_poison():
    plan = layout()
    group = plan.group_index("window3")
    with Arena(plan) as arena:
        arena.bytes.fill_(POISON)
        arena.tensor("w")[4] = 1.0
        check_reads(arena, {group: Blocks(np.array([5, 4]), np.array([0, 1]))}, 4)
        with pytest.raises(BlockError, match="states"):
            check_reads(arena, {group: Blocks(np.array([5, 4]), np.array([0, 1]))}, 3)
