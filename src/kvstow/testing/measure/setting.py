"""What a measurement moves: a layout of packed rows, and requests in it."""

from dataclasses import dataclass

import numpy as np

from kvstow.memory.arena import Arena
from kvstow.plan.group import grouped
from kvstow.plan.identity import Identity
from kvstow.plan.layout import Layout
from kvstow.plan.pack import packed
from kvstow.plan.spec import LayerSpec
from kvstow.route.blocks import Blocks

BLOCK_TOKENS = 16
HEADS = 4
SPARE = 32
IDENTITY = Identity.unverified("bytes of a measurement")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is moved: `rows` rows of `layers` layers, K and V of `piece` bytes each."""

    rows: int = 512
    layers: int = 46
    piece: int = 16 << 10
    repeats: int = 5
    device: str = "cpu"

    @property
    def row_bytes(self) -> int:
        return 2 * self.layers * self.piece

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    def layout(self) -> Layout:
        """Packed rows: K and V of all layers side by side."""
        layers = [
            LayerSpec.attention(
                f"layers.{i}",
                heads=HEADS,
                head_dim=self.piece // BLOCK_TOKENS // HEADS // 2,
                dtype="bfloat16",
                block_tokens=BLOCK_TOKENS,
            )
            for i in range(self.layers)
        ]
        return packed(grouped(layers), num_slabs=self.rows + SPARE)

    def arena(self) -> Arena:
        """Memory for it, as agents get it: processes of one node can map it."""
        return Arena(self.layout(), device=self.device)

    def scattered(self, seed: int) -> Blocks:
        """Rows in random order."""
        ids = np.random.default_rng(seed).permutation(np.arange(1, self.rows + SPARE))
        return Blocks.first(ids[: self.rows])

    def in_order(self) -> Blocks:
        return Blocks.first(np.arange(1, self.rows + 1))
