"""Layouts of the sizes that real models have, packed and per layer."""

from dataclasses import dataclass

from kvstow.plan.group import grouped
from kvstow.plan.layout import Layout, Order
from kvstow.plan.pack import Site, packed
from kvstow.plan.retention import Full
from kvstow.plan.spec import DType, Extent, Field, LayerSpec


@dataclass(frozen=True)
class Cache:
    """A model's full-attention group: layers of equal pages."""

    name: str
    num_layers: int
    heads: int
    dim: int
    tokens: int
    tensors: int = 2
    """Tensors a per-layer engine has for each layer: K and V apart, or one."""

    @property
    def page_bytes(self) -> int:
        return self.heads * self.tokens * self.dim * 2 * 2

    @property
    def row_bytes(self) -> int:
        return self.num_layers * self.page_bytes

    @property
    def num_tensors(self) -> int:
        return self.num_layers * self.tensors

    def layout(self, order: Order, num_blocks: int) -> Layout:
        """Whole layers, K and V in the content axis."""
        layers = [self._layer(f"layers.{i}", ("k", "v")) for i in range(self.num_layers)]
        return packed(grouped(layers), num_slabs=num_blocks, site=Site(order=order))

    def per_layer(self, num_blocks: int) -> Layout:
        """The same bytes as engines allocate them: one tensor after the other, `LBHNC`."""
        fields = (("k",), ("v",)) if self.tensors == 2 else (("k", "v"),)
        layers = [
            self._layer(f"layers.{i}.{names[0]}", names)
            for i in range(self.num_layers)
            for names in fields
        ]
        return packed(grouped(layers), num_slabs=num_blocks, site=Site(order="LBHNC"))

    def _layer(self, name: str, fields: tuple[str, ...]) -> LayerSpec:
        content = (Extent.whole("content", self.dim),)
        return LayerSpec(
            name=name,
            retention=Full(),
            block_tokens=self.tokens,
            states=self.tokens,
            heads=Extent.whole("head", self.heads),
            fields=tuple(Field(field, DType.BFLOAT16, content) for field in fields),
        )


CACHES = (
    Cache("gpt-oss-20b, 12 layers", 12, 8, 64, 16),
    Cache("92 × 16 KiB", 92, 2, 128, 16, tensors=1),
    Cache("Llama-3.1-8B", 32, 8, 128, 16),
    Cache("Mistral-Small-24B", 40, 8, 128, 16),
)
"""Rows of 0.39, 1.51, 2.10 and 2.62 MB. The second has about as many pages and bytes as the
full-attention row of DeepSeek-V4-Pro, which has 91 pages of 37,440, 8,640 and 1,728 bytes,
1.44 MB in all."""
