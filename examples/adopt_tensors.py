"""Adopt an engine's tensors: one per layer, K and V stacked, nothing moved.

python examples/adopt_tensors.py
"""

import torch

from kvstow.memory.adopt import adopted_layout
from kvstow.memory.arena import Arena
from kvstow.memory.copy import copy
from kvstow.plan.group import grouped
from kvstow.plan.pack import packed
from kvstow.plan.retention import Full
from kvstow.plan.spec import DType, Extent, Field, LayerSpec
from kvstow.route.blocks import Blocks
from kvstow.route.route import route

NUM_BLOCKS, HEADS, BLOCK_TOKENS, DIM = 64, 4, 16, 32


def main() -> None:
    content = (Extent.whole("content", DIM),)
    groups = grouped(
        LayerSpec(
            name=f"layers.{i}",
            retention=Full(),
            block_tokens=BLOCK_TOKENS,
            states=BLOCK_TOKENS,
            heads=Extent.whole("head", HEADS),
            fields=(Field("k", DType.FLOAT32, content), Field("v", DType.FLOAT32, content)),
        )
        for i in range(6)
    )
    # What an engine has: one tensor per layer, [block, token, head, k and v].
    tensors = {
        f"layers.{i}": torch.randn(NUM_BLOCKS, BLOCK_TOKENS, HEADS, 2 * DIM) for i in range(6)
    }
    axes = ("block", "token", "head", "content")
    theirs = adopted_layout(groups, tensors, axes=axes, order="LBNHC")
    engine = Arena.adopt(theirs, tensors, axes=axes)
    print(f"adopted {len(tensors)} tensors as {theirs.order}: {len(engine.regions)} regions")

    ours = packed(groups, num_slabs=NUM_BLOCKS)
    packed_rows = Arena(ours)
    source, destination = Blocks.first([9, 3, 40]), Blocks.first([5, 6, 7])
    moves = route(theirs, ours).copies({0: source}, {0: destination}, 3 * BLOCK_TOKENS)
    copy(engine, packed_rows, moves).wait()
    same = torch.equal(
        engine.field("layers.5", "v")[source.ids],
        packed_rows.field("layers.5", "v")[destination.ids],
    )
    print(
        f"3 blocks in {len(moves.nbytes)} copies into rows: {'identical' if same else 'DIFFERENT'}"
    )
    print(f"from now on each is {len(ours.runs(0, 5))} piece of {ours.row_bytes(0):,} bytes")


if __name__ == "__main__":
    main()
