"""Layouts and rows that offload tests share; nothing here comes from kvstow.offload."""

from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstow.plan.group import grouped
from kvstow.plan.identity import Identity
from kvstow.plan.layout import Layout, Order
from kvstow.plan.pack import Site, packed
from kvstow.plan.retention import Full, Retention, State, Window
from kvstow.plan.spec import DType, Extent, Field, LayerSpec

Bytes = npt.NDArray[np.uint8]

IDENTITY = Identity(model="tested", weights="01" * 16, config=(("rope_theta", "10000"),))


def layer(
    name: str,
    retention: Retention,
    *,
    block_tokens: int = 4,
    heads: Extent | None = None,
    content: int = 8,
) -> LayerSpec:
    axes = (Extent.whole("content", content),)
    recurrent = isinstance(retention, State)
    return LayerSpec(
        name=name,
        retention=retention,
        block_tokens=block_tokens,
        states=1 if recurrent else block_tokens,
        heads=Extent.whole("head", 1) if recurrent else heads or Extent.whole("head", 2),
        fields=(Field("k", DType.FLOAT16, axes), Field("v", DType.FLOAT16, axes)),
    )


def hybrid(
    *,
    order: Order = "BLHNC",
    num_slabs: int = 8,
    model: str = "hybrid",
    block_tokens: int = 4,
    content: int = 8,
) -> Layout:
    """Three full, two window layers: two groups with rows of different length."""
    layers = [
        *(layer(f"l.{i}", Full(), block_tokens=block_tokens, content=content) for i in (0, 2, 4)),
        *(layer(f"l.{i}", Window(8), block_tokens=block_tokens, content=content) for i in (1, 3)),
    ]
    site = Site(model=model, order=order)
    return packed(grouped(layers), num_slabs=num_slabs, site=site).identified(IDENTITY)


def row_bytes(layout: Layout, group: int, block: int, memory: Bytes) -> Bytes:
    """A block's bytes, run by run, out of an arena's memory."""
    return np.concatenate([memory[run.offset : run.end] for run in layout.runs(group, block)])


def random_rows(nbytes: int, count: int, seed: int) -> list[Bytes]:
    dice = np.random.default_rng(seed)
    return [dice.integers(0, 256, nbytes, dtype=np.uint8) for _ in range(count)]


def key(group: int, number: int) -> bytes:
    return f"{group}/{number}".encode().ljust(16, b".")


class LaidOut(Protocol):
    """A tier, as far as these helpers look at it."""

    @property
    def layout(self) -> Layout: ...


def numbered_row(tier: LaidOut, group: int, number: int) -> Bytes:
    """A row that is a function of its number: whoever reads it can tell whether it is right."""
    dice = np.random.default_rng([group, number])
    return dice.integers(0, 256, tier.layout.row_bytes(group), dtype=np.uint8)


def numbered_key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def row_files(path: Path) -> list[Path]:
    """The names of all rows in a store's directory."""
    return sorted(path.glob("rows-*/*/*/*"))
