"""An arena: one allocation shaped by a layout, and views into it that never copy.

Every view is `base + offset + Σ index · stride`, exactly the numbers of the layout, over the
same storage: nothing is allocated, and a write through one view is seen through all.
"""

from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from kvstow.errors import ArenaError, BlockError, SpecError
from kvstow.memory.adopt import AxisNames, Tensors, adopted
from kvstow.memory.allocate import (
    bytes_at,
    device_bytes,
    host_bytes,
    huge_page_bytes,
)
from kvstow.memory.dtypes import NUMPY_LACKS, TORCH_TYPES, page_type
from kvstow.plan.layout import Layout
from kvstow.plan.spec import LayerSpec
from kvstow.plan.view import Ints, Run, View

POISON = 0xFF
"""Every floating-point type reads this byte, repeated, as not-a-number."""


class Arena:
    """One allocation of `layout.nbytes`, zeroed, its base aligned as planned.

    `device` is torch's word for where: "cpu", "cuda:0". Host memory may be `pinned` (for CUDA) and
    on huge pages where the system grants them, and near a device (`numa_node`); other processes of
    this user can map what is not on huge pages (`kvstow.memory.share`). A constructor that raises
    leaves nothing behind.

    >>> from kvstow.plan.group import grouped
    >>> from kvstow.plan.models import model_layers
    >>> from kvstow.plan.pack import packed
    >>> layout = packed(grouped(model_layers("Llama-3.2-1B").layers), budget=64 << 20)
    >>> arena = Arena(layout)
    >>> arena
    Arena(128 blocks of 'full', 67108864 bytes on cpu)
    >>> arena.field("model.layers.3.self_attn", "k").shape      # block, head, token, dim
    torch.Size([128, 8, 16, 64])
    >>> arena.zero("full", [1, 2, 3])
    """

    layout: Layout
    regions: tuple[Run, ...]
    """Where memory really is, in bytes from the base; everything, unless it was adopted."""

    file: int | None
    """The descriptor of the file in memory that host memory maps; None for all other memory."""

    def __init__(
        self,
        layout: Layout,
        *,
        device: str | torch.device = "cpu",
        pinned: bool = False,
        huge_pages: bool = False,
        numa_node: int | None = None,
    ) -> None:
        where, nbytes, align = _device(device), _planned(layout).nbytes, layout.base_align
        self._take(layout)
        if where.type == "cpu":
            self._bytes, self.file = host_bytes(
                nbytes, align=align, huge_pages=huge_pages, pinned=pinned, numa_node=numa_node
            )
        elif pinned or huge_pages:
            raise ArenaError(f"memory of {where} is not pinned or on huge pages")
        else:
            self._bytes = device_bytes(nbytes, where, align=align)

    @classmethod
    def over(cls, layout: Layout, memory: torch.Tensor) -> Self:
        """An arena in memory of somebody else's: `layout.nbytes` bytes, kept by the tensor."""
        arena = cls.__new__(cls)
        arena._take(layout, memory)
        return arena

    @classmethod
    def adopt(cls, layout: Layout, tensors: Tensors, *, axes: AxisNames) -> Self:
        """An arena in memory that an engine has allocated, verified against the layout.

        `axes` names each tensor's axes as they stand. The arena keeps the tensors alive.
        """
        engine = adopted(_planned(layout), tensors, axes=axes)
        memory = bytes_at(engine.address, layout.nbytes, engine.tensors[0].device)
        arena = cls.over(layout, memory)
        arena.regions = engine.regions
        arena._kept = engine.tensors
        return arena

    def _take(self, layout: Layout, memory: torch.Tensor | None = None) -> None:
        self.layout = layout
        self.regions = (Run(0, layout.nbytes),)
        self.file = None
        self._bytes = memory
        self._kept: tuple[torch.Tensor, ...] = ()

    # ── what it is ────────────────────────────────────────────────────────────────

    def __repr__(self) -> str:
        if self._bytes is None:
            return f"Arena(closed, of {self.layout.model!r})"
        counts = [
            f"{self.layout.num_blocks(g)} blocks of {placed.group.name!r}"
            for g, placed in enumerate(self.layout.groups)
        ]
        return f"Arena({', '.join(counts)}, {self.nbytes} bytes on {self.device})"

    @property
    def bytes(self) -> torch.Tensor:
        """All of it, as a flat tensor of bytes."""
        if self._bytes is None:
            raise ArenaError(f"the arena of {self.layout.model!r} is closed")
        return self._bytes

    @cached_property
    def address(self) -> int:
        return self.bytes.data_ptr()

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    @property
    def device(self) -> torch.device:
        return self.bytes.device

    @cached_property
    def pinned(self) -> bool:
        return self.device.type == "cpu" and torch.cuda.is_available() and self.bytes.is_pinned()

    @property
    def is_closed(self) -> bool:
        """Whether its memory was let go of."""
        return self._bytes is None

    @property
    def huge_page_bytes(self) -> int:
        """Bytes of host memory that the system has put on huge pages by now."""
        return huge_page_bytes(self.bytes)

    # ── views ─────────────────────────────────────────────────────────────────────

    def tensor(self, layer: str) -> torch.Tensor:
        """All pages of a layer: `[block, head, token, content]`.

        Of the fields' element type where they have one; of integers as wide otherwise. Pages
        of several sections have no such tensor: `page` has their bytes, `field` each field.
        """
        return self.strided(self.layout.view(layer), page_type(self._spec(layer)))

    def page(self, layer: str) -> torch.Tensor:
        """All pages of a layer as bytes, for kernels that find sections by themselves:
        `[block, content]`."""
        self._spec(layer)
        return self.strided(self.layout.page(layer), torch.uint8)

    def field(self, layer: str, name: str) -> torch.Tensor:
        """One field of a layer: `[block, head, token, …the field's own axes]`."""
        dtype = self._spec(layer).field(name).dtype
        return self.strided(self.layout.field(layer, name), TORCH_TYPES[dtype])

    def strided(self, view: View, dtype: torch.dtype) -> torch.Tensor:
        """Any view of this layout as a tensor over the arena's storage."""
        whole = self.bytes[: self.nbytes // view.unit * view.unit].view(dtype)
        strides = [stride // view.unit for stride in view.strides]
        start = whole.storage_offset() + view.offset // view.unit
        return whole.as_strided(view.shape, strides, start)

    def numpy(self, layer: str, field: str | None = None) -> npt.NDArray[Any]:
        """`tensor(layer)` or `field(layer, field)` as an array over the same host memory.

        Types that NumPy lacks come as unsigned integers of as many bytes.
        """
        tensor = self.tensor(layer) if field is None else self.field(layer, field)
        return tensor.view(NUMPY_LACKS.get(tensor.dtype, tensor.dtype)).numpy()

    def _spec(self, layer: str) -> LayerSpec:
        if layer not in self.layout.layers:
            names = list(self.layout.layers)
            raise SpecError(
                f"no layer {layer!r} in the arena of {self.layout.model!r}\n\n"
                f"hint: its {len(names)} layers are {', '.join(names[:3])}"
                + (", …" if len(names) > 3 else "")
            )
        return self.layout.layers[layer][1]

    # ── whole blocks ──────────────────────────────────────────────────────────────

    def zero(self, group: int | str, ids: npt.ArrayLike) -> None:
        """Zero the bytes of these blocks, and no others; on CUDA, in the current stream."""
        self.fill(group, ids, 0)

    def poison(self, group: int | str, ids: npt.ArrayLike) -> None:
        """Fill the bytes of these blocks, and no others, with not-a-number."""
        self.fill(group, ids, POISON)

    def fill(self, group: int | str, ids: npt.ArrayLike, value: int) -> None:
        """Set every byte of these blocks, padding between their pages included."""
        number = self.group(group)
        blocks = self.checked(number, ids)
        for strip in self.layout.footprints[number].strips:
            if self.device.type == "cpu":
                starts = strip.offset + blocks * strip.stride
                _fill_host(self.bytes.numpy(), starts, strip.nbytes, value)
                continue
            rows = self.bytes.as_strided(
                (strip.count, strip.nbytes),
                (strip.stride, 1),
                self.bytes.storage_offset() + strip.offset,
            )
            rows.index_fill_(0, torch.as_tensor(blocks, device=self.device), value)

    def group(self, group: int | str) -> int:
        """A group's number, by its number or its name."""
        number = self.layout.group_index(group) if isinstance(group, str) else group
        if not 0 <= number < len(self.layout.groups):
            names = [placed.group.name for placed in self.layout.groups]
            raise BlockError(f"no group {number}: the layout has {len(names)}, {names}")
        return number

    def checked(self, group: int | str, ids: npt.ArrayLike) -> Ints:
        """The ids as an array, once it is certain that the group has such blocks."""
        return checked_ids(self.layout, self.group(group), ids)

    # ── its end ───────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Let go of the memory; it is unmapped when the last view of it has gone."""
        self._bytes, self._kept = None, ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def checked_ids(layout: Layout, group: int, ids: npt.ArrayLike) -> Ints:
    """Block ids as an array, once it is certain that the group has such blocks."""
    blocks = np.atleast_1d(np.asarray(ids))
    if not blocks.size:
        return np.empty(0, np.int64)
    name = layout.groups[group].group.name
    if blocks.ndim != 1 or blocks.dtype.kind not in "iu":
        raise BlockError(
            f"group {name!r}: block ids are a list of whole numbers, not {blocks.dtype} of shape "
            f"{blocks.shape}"
        )
    blocks = blocks.astype(np.int64)
    count = layout.num_blocks(group)
    wrong = blocks[(blocks < 0) | (blocks >= count)]
    if len(wrong):
        raise BlockError(f"group {name!r}: blocks {wrong[:8].tolist()} are not in [0, {count})")
    return blocks


def _device(device: str | torch.device) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ArenaError(f"{device!r} is no device\n\nhint: 'cpu', 'cuda:0'") from error


def _planned(layout: Layout) -> Layout:
    if not isinstance(layout, Layout):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArenaError(
            f"an arena needs a Layout, not {type(layout).__name__}\n\n"
            f"hint: a plan has one, plan.layout"
        )
    return layout


def _fill_host(memory: npt.NDArray[np.uint8], starts: Ints, nbytes: int, value: int) -> None:
    for start in starts.tolist():
        memory[start : start + nbytes] = value
