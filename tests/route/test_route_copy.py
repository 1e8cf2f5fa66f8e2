"""Routes carried out by `memory.copy`, between arenas of different layouts in one process."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvstow.memory.arena import Arena
from kvstow.memory.copy import copy
from kvstow.plan.group import grouped
from kvstow.plan.layout import Layout, Order
from kvstow.plan.models import model_layers
from kvstow.plan.pack import Site, packed, separate
from kvstow.plan.retention import State
from kvstow.route.blocks import Blocks
from kvstow.route.sources import sources

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "hidden_size": 96,
    "torch_dtype": "float16",
}
HYBRID = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size": 32,
    "torch_dtype": "float16",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
NUM_TOKENS = 45


def ranks(config: dict, tp: int, *, block_tokens: int, order: Order, pack=packed) -> list[Layout]:
    return [
        pack(
            grouped(model_layers(config, tp=tp, tp_rank=r, block_tokens=block_tokens).layers),
            num_slabs=9,
            site=Site(order=order, tp=(r, tp)),
        )
        for r in range(tp)
    ]


def blocks(layout: Layout, seed: int) -> dict[int, Blocks]:
    """Scattered ids, outside the null slab."""
    rng = np.random.default_rng(seed)
    found = {}
    for g, rows in enumerate(layout.groups):
        group = rows.group
        need = 1 if isinstance(group.retention, State) else -(-NUM_TOKENS // group.block_tokens)
        ids = np.arange(rows.rows_per_slab, layout.num_blocks(g))
        found[g] = Blocks.first(rng.permutation(ids)[:need])
    return found


def cells(arena: Arena, held: dict[int, Blocks]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Every field of every filled state, with what the whole model keeps there."""
    for g, rows in enumerate(arena.layout.groups):
        for layer in rows.group.layers:
            for field in layer.fields:
                view = arena.field(layer.name, field.name)[torch.as_tensor(held[g].ids)]
                extents = (layer.heads, *field.axes)
                axes = [np.concatenate([np.arange(lo, hi) for lo, hi in e.pieces]) for e in extents]
                state = isinstance(rows.group.retention, State)
                tokens = np.arange(view.shape[0] * view.shape[2])
                tokens = tokens[: 1 if state else NUM_TOKENS]
                flat = view.permute(0, 2, 1, *range(3, view.ndim)).flatten(0, 1)[: len(tokens)]
                number = sum(ord(c) * (i + 1) for i, c in enumerate(layer.name + field.name))
                expected = torch.full(flat.shape, float(number % 97))
                for i, coordinate in enumerate([tokens, *axes]):
                    shape = [-1 if i == j else 1 for j in range(flat.ndim)]
                    expected += torch.as_tensor(coordinate).reshape(shape) * (3 * i + 1)
                yield flat, (expected % 1000).to(flat.dtype)


def fill(arena: Arena, held: dict[int, Blocks]) -> None:
    """The whole model's content, where this rank keeps its part of it."""
    arena.bytes.fill_(0x5A)
    fields = [
        (g, layer, field.name)
        for g, rows in enumerate(arena.layout.groups)
        for layer in rows.group.layers
        for field in layer.fields
    ]
    for (g, layer, field), (_, expected) in zip(fields, cells(arena, held), strict=True):
        view = arena.field(layer.name, field)
        ids = held[g].ids.tolist()
        for n, row in enumerate(expected):
            view[ids[n // layer.states], :, n % layer.states] = row


@pytest.mark.parametrize(
    ("config", "there", "here"),
    [
        (LLAMA, (1, 16, "BLHNC", packed), (1, 16, "BLHNC", packed)),
        (LLAMA, (2, 16, "BHLNC", packed), (3, 16, "BHLNC", packed)),
        (LLAMA, (3, 16, "BLNHC", packed), (2, 24, "LBHNC", packed)),
        (LLAMA, (6, 8, "LHBNC", packed), (1, 32, "BLHNC", separate)),
        (HYBRID, (2, 16, "BLHNC", packed), (1, 32, "BHLNC", packed)),
        (HYBRID, (1, 24, "BLNHC", packed), (2, 16, "LBHNC", separate)),
    ],
)
def test_every_rank_ends_up_with_its_part_of_the_whole_model(config, there, here):
    source_layouts = ranks(config, there[0], block_tokens=there[1], order=there[2], pack=there[3])
    arenas = [Arena(layout) for layout in source_layouts]
    held = [blocks(layout, r) for r, layout in enumerate(source_layouts)]
    for arena, own in zip(arenas, held, strict=True):
        fill(arena, own)
    for layout in ranks(config, here[0], block_tokens=here[1], order=here[2], pack=here[3]):
        mine = Arena(layout)
        mine.bytes.fill_(0xA5)
        into = blocks(layout, 99)
        for peer in sources(source_layouts, layout):
            moves = peer.route.copies(held[peer.index], into, NUM_TOKENS)
            copy(arenas[peer.index], mine, moves).wait()
        for got, expected in cells(mine, into):
            assert torch.equal(got, expected)
        mine.close()
    for arena in arenas:
        arena.close()
