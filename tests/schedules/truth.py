"""What is computed in a schedule: models, their layouts, requests, and every byte of their rows.

A cell (model, adapter, all tokens up to its own, layer, head) has bytes of its own, drawn from a
hash of just that. Where a cell lies in an arena is worked out here from the strides of its layout,
so that rows of any order, block size and rank are compared with the same truth.
"""

from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import shake_128
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstow.blocks.prompt import Prompt
from kvstow.offload.keys import block_keys
from kvstow.plan.group import grouped
from kvstow.plan.identity import Identity
from kvstow.plan.layout import Layout, Order
from kvstow.plan.pack import Site, packed
from kvstow.plan.retention import Full, Retention, State, Window
from kvstow.plan.spec import DType, Extent, Field, LayerSpec

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

LAYERS = 2
HEADS = 2
CONTENT = 2
CELL_BYTES = 2 * CONTENT
WINDOW = 4


RETENTIONS: dict[str, Retention] = {"full": Full(), "window": Window(WINDOW), "state": State()}


class Shape(NamedTuple):
    """How a rank keeps its rows."""

    order: Order = "BLHNC"
    block_tokens: int = 2
    tp: tuple[int, int] = (0, 1)
    second: Literal["full", "window", "state"] = "full"
    """What the second layer keeps: where that is not all, it is a group of its own."""

    @property
    def is_hybrid(self) -> bool:
        return self.second != "full"

    def is_state(self, group: int) -> bool:
        """Whether a group has one running row for each request."""
        return self.second == "state" and group == 1


@cache
def identity_of(model: str, adapter: str = "") -> Identity:
    """The computation of a model, for requests with that adapter."""
    known = Identity(model=model, weights=f"weights of {model}")
    return known.for_request(adapter=adapter) if adapter else known


@cache
def layout_of(model: str, shape: Shape) -> Layout:
    """Two small layers with two heads, of which a rank of two has one."""
    rank, size = shape.tp
    heads = Extent("head", HEADS, ((rank * HEADS // size, (rank + 1) * HEADS // size),))
    content = (Extent.whole("content", CONTENT),)

    def layer(number: int) -> LayerSpec:
        is_state = number == 1 and shape.second == "state"
        return LayerSpec(
            name=f"layers.{number}",
            retention=RETENTIONS[shape.second] if number else Full(),
            block_tokens=shape.block_tokens,
            states=1 if is_state else shape.block_tokens,
            heads=heads,
            fields=(Field("k", DType.BFLOAT16, content),),
        )

    site = Site(model="small", order=shape.order, tp=shape.tp)
    slabs = {2: 14, 4: 9}[shape.block_tokens] + 8 * shape.is_hybrid
    layout = packed(grouped([layer(i) for i in range(LAYERS)]), num_slabs=slabs, site=site)
    return layout.identified(identity_of(model))


# ── requests ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Request:
    """Tokens that a model, with an adapter or without one, has computed."""

    model: str
    tokens: tuple[int, ...]
    adapter: str = ""

    def cut(self, num_tokens: int) -> "Request":
        """The same with its first tokens only."""
        return Request(self.model, self.tokens[:num_tokens], self.adapter)

    @property
    def identity(self) -> Identity:
        return identity_of(self.model, self.adapter)

    @property
    def prompt(self) -> Prompt:
        return _prompt(self.tokens, self.adapter)

    def keys(self, block_tokens: int) -> list[bytes]:
        """The keys of its whole blocks."""
        return block_keys(self.identity, self.prompt, block_tokens)


@lru_cache(maxsize=4096)
def _prompt(tokens: tuple[int, ...], adapter: str) -> Prompt:
    return Prompt.of(tokens, salt=adapter.encode())


@lru_cache(maxsize=1 << 14)
def _cells(model: str, adapter: str, tokens: tuple[int, ...]) -> Bytes:
    """The cells of the last of these tokens: `[layer, head, byte]`."""
    name = repr((model, adapter, tokens)).encode()
    drawn = shake_128(name).digest(LAYERS * HEADS * CELL_BYTES)
    return np.frombuffer(drawn, np.uint8).reshape(LAYERS, HEADS, CELL_BYTES)


@lru_cache(maxsize=1 << 13)
def truth(request: Request, shape: Shape, group: int) -> Bytes:
    """What each token has in the rows of a group: `[token, byte]`."""
    layers = [group] if shape.is_hybrid else list(range(LAYERS))
    rank, size = shape.tp
    heads = slice(rank * HEADS // size, (rank + 1) * HEADS // size)
    tokens = request.tokens
    each = [
        _cells(request.model, request.adapter, tokens[: t + 1])[layers, heads].ravel()
        for t in range(len(tokens))
    ]
    return np.stack(each) if each else np.zeros((0, 1), np.uint8)


# ── where it lies ─────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class Places:
    """Where the rows of a layout are, as offsets of bytes in its arena.

    `cells[g]` is `[block, token, byte]`, in the order of `truth`; `rows[g]` is `[block, byte]`
    and has all bytes of a row, padding included.
    """

    cells: tuple[Ints, ...]
    rows: tuple[Ints, ...]


@cache
def places_of(shape: Shape) -> Places:
    return places_in(layout_of("alpha", shape))


def places_in(layout: Layout) -> Places:
    """Where everything is in an arena of this layout."""
    cells = tuple(_cells_of(layout, g) for g in range(len(layout.groups)))
    rows = tuple(_rows_of(layout, g) for g in range(len(layout.groups)))
    return Places(cells, rows)


def _cells_of(layout: Layout, group: int) -> Ints:
    found: list[Ints] = []
    for layer in layout.groups[group].group.layers:
        view = layout.view(layer.name)
        address = np.full((1,), view.offset, np.int64)
        for name in ("block", "token", "head"):
            axis = view.axis(name)
            address = address[..., None] + np.arange(axis.size) * axis.stride
        cell = np.arange(CELL_BYTES)  # a cell's content is contiguous
        found.append((address[0][..., None] + cell).reshape(*address.shape[1:3], -1))
    return np.concatenate(found, axis=2)


def _rows_of(layout: Layout, group: int) -> Ints:
    """All bytes of every row; with the padding behind it, which belongs to nobody else and is
    copied where rows lie side by side."""
    strips = sorted(layout.footprints[group].strips, key=lambda strip: strip.offset)
    ends = [strip.offset + strip.count * strip.stride for strip in strips]
    apart = all(end <= after.offset for end, after in zip(ends, strips[1:], strict=False))
    found = [
        (strip.offset + np.arange(strip.count) * strip.stride)[:, None]
        + np.arange(strip.stride if apart else strip.nbytes)
        for strip in strips
    ]
    return np.minimum(np.concatenate(found, axis=1), layout.nbytes - 1)
