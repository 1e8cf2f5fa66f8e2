"""Adopt an engine's tensors: one per layer, K and V side by side, nothing moved.

python examples/adopt_tensors.py
"""

import torch

import kvstow
from kvstow.plan.pack import Alignment, Site

NUM_BLOCKS, HEADS, BLOCK_TOKENS, HEAD_DIM = 64, 4, 16, 32


def main() -> None:
    groups = kvstow.grouped(
        kvstow.LayerSpec.attention(f"layers.{i}", heads=HEADS, head_dim=HEAD_DIM, dtype="float32")
        for i in range(6)
    )
    # What an engine has: one tensor per layer, [block, token, head, k and v].
    memory = torch.randn(6, NUM_BLOCKS, BLOCK_TOKENS, HEADS, 2 * HEAD_DIM)
    tensors = {f"layers.{i}": memory[i] for i in range(6)}
    axes = ("block", "token", "head", "content")
    site = Site(order="LBNHC", alignment=Alignment(base=64))
    theirs = kvstow.separate(groups, num_slabs=NUM_BLOCKS, site=site)
    engine = kvstow.Arena.adopt(theirs, tensors, axes=axes)
    print(f"adopted {len(tensors)} tensors as {theirs.order}")

    ours = kvstow.packed(groups, num_slabs=NUM_BLOCKS)
    rows = kvstow.Arena(ours)
    source, destination = kvstow.Blocks.first([9, 3, 40]), kvstow.Blocks.first([5, 6, 7])
    copies = kvstow.plan_route(theirs, ours).copies({0: source}, {0: destination}, 3 * BLOCK_TOKENS)
    kvstow.copy(engine, rows, copies).wait()
    same = torch.equal(
        engine.field("layers.5", "v")[source.ids],
        rows.field("layers.5", "v")[destination.ids],
    )
    print(f"3 blocks in {len(copies)} copies into rows: {'identical' if same else 'DIFFERENT'}")
    print(f"from now on each is {len(ours.runs(0, 5))} piece of {ours.row_bytes(0):,} bytes")


if __name__ == "__main__":
    main()
