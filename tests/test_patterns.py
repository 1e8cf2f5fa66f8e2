"""Contents of a request: one value for one place of the model, in any layout."""

import numpy as np
import pytest
import torch

from kvstow.memory.arena import Arena
from kvstow.plan.group import grouped
from kvstow.plan.pack import packed
from kvstow.plan.retention import Full
from kvstow.plan.spec import DType, Extent, Field, LayerSpec
from kvstow.route.blocks import Blocks
from patterns import CANARY, fill_canaries, fill_request, wrong_values

TOKENS = 12


def filled(block_tokens: int, heads: tuple[int, int] = (0, 2)) -> tuple[Arena, dict[int, Blocks]]:
    content = (Extent.whole("content", 4),)
    layers = [
        LayerSpec(
            name=f"layers.{i}",
            retention=Full(),
            block_tokens=block_tokens,
            states=block_tokens,
            heads=Extent("head", 2, (heads,)),
            fields=(Field("k", DType.BFLOAT16, content), Field("v", DType.BFLOAT16, content)),
        )
        for i in range(2)
    ]
    arena = Arena(packed(grouped(layers), num_slabs=8))
    fill_canaries(arena)
    blocks = {0: Blocks.first(np.arange(TOKENS // block_tokens, 0, -1))}
    fill_request(arena, blocks)
    return arena, blocks


def values(block_tokens: int, heads: tuple[int, int] = (0, 2)) -> torch.Tensor:
    """`[layer and field, head, token, content]` of a request, whatever its layout."""
    arena, blocks = filled(block_tokens, heads)
    views = [arena.field(f"layers.{i}", name) for i in range(2) for name in "kv"]
    ids = torch.as_tensor(blocks[0].ids)
    pages = torch.stack([view.view(torch.int16)[ids] for view in views])
    return pages.transpose(1, 2).flatten(2, 3)


def test_layouts_of_one_model_get_the_same_values():
    whole = values(4)
    assert torch.equal(values(2), whole)
    assert torch.equal(values(12), whole)
    for head in range(2):
        assert torch.equal(values(4, (head, head + 1)), whole[:, head : head + 1])


def test_no_two_places_of_a_small_request_have_the_same_token_value():
    cells = values(4).flatten(0, 2)
    assert len(torch.unique(cells, dim=0)) == len(cells)


@pytest.mark.parametrize("token", [0, 3, TOKENS - 1])
def test_one_changed_value_is_found_unless_it_is_behind_the_tokens(token):
    arena, blocks = filled(4)
    assert wrong_values(arena, blocks, TOKENS) == 0
    block = int(blocks[0].ids[token // 4])
    arena.field("layers.1", "v").view(torch.int16)[block, 1, token % 4, 2] += 1
    assert wrong_values(arena, blocks, TOKENS) == 1
    assert wrong_values(arena, blocks, token) == 0


def test_nothing_but_the_request_is_filled():
    arena, blocks = filled(4)
    arena.fill(0, blocks[0].ids, CANARY)
    assert (arena.bytes == CANARY).all()
