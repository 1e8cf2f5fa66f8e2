"""Tokens of a batch, written to rows and gathered."""

import numpy as np
import pytest
import torch

from kvstow.adapters.transformers.rows import BatchTable, one_stride

NUM_BLOCKS = 31


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("block_tokens", [1, 2, 4])
@pytest.mark.parametrize("start", [0, 1, 5])
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_tokens_come_back_in_order_and_nothing_else_is_touched(heads, block_tokens, start, tokens):
    content = 4
    pool = torch.full((NUM_BLOCKS, heads, block_tokens, content), float("nan"))
    blocks = -(-(start + tokens) // block_tokens)
    ids = torch.from_numpy(np.random.default_rng(0).permutation(NUM_BLOCKS)[: 2 * blocks])
    table = BatchTable(ids.view(2, blocks), 0, block_tokens, {})
    states = torch.arange(2 * heads * (start + tokens) * content, dtype=torch.float32)
    states = states.view(2, heads, start + tokens, content)
    if start:
        table.write(pool, states[:, :, :start], 0)
    table.write(pool, states[:, :, start:], start)
    for low in range(start + tokens):
        found = table.gathered(pool, low, start + tokens)
        assert found.is_contiguous()
        assert torch.equal(found, states[:, :, low:])
    expected = torch.full_like(pool, float("nan"))
    for sequence in range(2):
        for token in range(start + tokens):
            block = int(table.ids[sequence, token // block_tokens])
            expected[block, :, token % block_tokens] = states[sequence, :, token]
    assert torch.equal(pool.isnan(), expected.isnan())
    assert torch.equal(pool.nan_to_num(), expected.nan_to_num())


def test_a_table_may_begin_later_than_the_sequence():
    pool = torch.zeros((6, 1, 2, 1))
    table = BatchTable(torch.tensor([[5, 2]]), 3, 2, {})  # blocks 3 and 4: tokens 6 to 9
    table.write(pool, torch.tensor([[[[7.0], [8.0], [9.0]]]]), 7)
    assert pool[:, 0, :, 0].tolist() == [[0, 0], [0, 0], [8, 9], [0, 0], [0, 0], [0, 7]]
    assert table.gathered(pool, 7, 10).flatten().tolist() == [7, 8, 9]


@pytest.mark.parametrize(
    ("ids", "step"), [([3], 1), ([3, 4], 1), ([3, 5, 7], 2), ([3, 5, 6], None), ([5, 3], None)]
)
def test_rows_lie_at_one_stride_or_they_do_not(ids, step):
    assert one_stride(torch.tensor(ids)) == step
