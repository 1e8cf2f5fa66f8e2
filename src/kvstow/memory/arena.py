"""An arena: one allocation shaped by a layout, and views into it that never copy.

Every view is `base + offset + Σ index · stride`, exactly the numbers of the layout, over the
same storage: nothing is allocated, and a write through one view is seen through all.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from kvstow.errors import ArenaError, BlockError, MemoryLayoutError, SpecError
from kvstow.memory.allocate import bytes_at, device_bytes, host_bytes
from kvstow.plan.layout import Layout, Planned, as_layout
from kvstow.plan.sharing import Strip
from kvstow.plan.spec import DType, LayerSpec
from kvstow.plan.view import Axis, Ints, Run, View

POISON = 0xFF
"""Every floating-point type reads this byte, repeated, as not-a-number."""

TORCH_TYPES: Mapping[DType, torch.dtype] = {
    DType.FLOAT64: torch.float64,
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT8_E4M3: torch.float8_e4m3fn,
    DType.FLOAT8_E5M2: torch.float8_e5m2,
    DType.FLOAT4_E2M1: torch.uint8,
    DType.INT32: torch.int32,
    DType.INT8: torch.int8,
    DType.UINT8: torch.uint8,
    DType.INT4: torch.uint8,
}
"""4-bit elements are bytes, two each."""

RAW_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What stands for elements of several types, by their bytes."""

NUMPY_LACKS = {
    torch.bfloat16: torch.uint16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}

Tensors = Mapping[str, torch.Tensor]
"""An engine's tensors by the names of their layers."""

AxisNames = Sequence[str] | Mapping[str, Sequence[str]]
"""Names of the tensors' axes as they stand: `block`, `head`, `token` and `content`; `block` and
`content` alone for pages of several sections. One sequence for all tensors, or one for each.
`head` and `token` may be missing where there is one."""


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
        layout: Layout | Planned,
        *,
        device: str | torch.device = "cpu",
        pinned: bool = False,
        huge_pages: bool = False,
        numa_node: int | None = None,
    ) -> None:
        where, layout = _device(device), as_layout(layout)
        nbytes, align = layout.nbytes, layout.base_align
        self._take(layout)
        if where.type == "cpu":
            self._bytes, self.file = host_bytes(
                nbytes, align=align, huge_pages=huge_pages, pinned=pinned, numa_node=numa_node
            )
        elif pinned or huge_pages:
            raise ArenaError(f"memory of {where} cannot be pinned or on huge pages")
        else:
            self._bytes = device_bytes(nbytes, where, align=align)

    @classmethod
    def over(cls, layout: Layout, memory: torch.Tensor) -> Self:
        """An arena in the memory of a tensor of `layout.nbytes` bytes, which is kept alive."""
        arena = cls.__new__(cls)
        arena._take(layout, memory)
        return arena

    @classmethod
    def adopt(cls, layout: Layout | Planned, tensors: Tensors, *, axes: AxisNames) -> Self:
        """An arena in memory that an engine has allocated, verified against the layout.

        `axes` names each tensor's axes as they stand. The arena keeps the tensors alive.
        """
        layout = as_layout(layout)
        base = _base_of(layout, tensors, axes)
        kept = tuple(tensors.values())
        arena = cls.over(layout, bytes_at(base, layout.nbytes, kept[0].device))
        arena.regions = _regions(layout, tensors)
        arena._kept = kept
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
        """Whether its memory has been released."""
        return self._bytes is None

    # ── views ─────────────────────────────────────────────────────────────────────

    def tensor(self, layer: str) -> torch.Tensor:
        """All pages of a layer: `[block, head, token, content]`.

        Of the fields' element type where they have one; of integers as wide otherwise. Pages
        of several sections have no such tensor: `page` has their bytes, `field` each field.
        """
        return self.strided(self.layout.view(layer), page_type(self._spec(layer)))

    def page(self, layer: str) -> torch.Tensor:
        """All pages of a layer as bytes, for kernels that find sections themselves:
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
                memory = self.bytes.numpy()
                for start in (strip.offset + blocks * strip.stride).tolist():
                    memory[start : start + strip.nbytes] = value
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

    def only_group(self) -> int:
        """The number of the only group, 0. BlockError where there are several."""
        names = [placed.group.name for placed in self.layout.groups]
        if len(names) > 1:
            raise BlockError(
                f"the layout has {len(names)} groups, and each has blocks of its own: {names}\n\n"
                f"hint: name the group, such as {names[0]!r}"
            )
        return 0

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


def page_type(spec: LayerSpec) -> torch.dtype:
    """The fields' element type where they have one; integers as wide, or bytes, otherwise."""
    kinds = {TORCH_TYPES[field.dtype] for field in spec.fields}
    units = {field.dtype.unit for field in spec.fields}
    if len(kinds) == 1:
        return kinds.pop()
    return RAW_TYPES[units.pop() if len(units) == 1 else 1]


# ── memory that an engine has allocated ───────────────────────────────────────────────────────

# Nothing is guessed from shapes. The caller names the axes of every tensor as they stand; what the
# numbers then contradict is refused, with both of them.
#
#     one tensor per layer        base ┃ L0: 0 1 2 … ┃  (not ours)  ┃ L1: 0 1 2 … ┃
#     one buffer for all layers   base ┃ row 0: L0 L1 ┃ row 1: L0 L1 ┃


def _base_of(layout: Layout, tensors: Tensors, axes: AxisNames) -> int:
    """The lowest address of tensors that hold the layout exactly."""
    _check_named(layout, tensors)
    names = {name: _axis_names(name, tensor, axes) for name, tensor in tensors.items()}
    _check(
        text
        for name, tensor in tensors.items()
        for text in _contradictions(layout, name, tensor, names[name])
    )
    bases = {
        tensor.data_ptr() - layout.layers[name][2][0].offset for name, tensor in tensors.items()
    }
    low, high = min(bases), max(bases)
    if low < high:
        raise MemoryLayoutError(
            f"tensors do not lie as the layout says: their bases are {low} and {high}, "
            f"{high - low} bytes apart"
        )
    if low % layout.base_align:
        raise MemoryLayoutError(f"memory starts at {low}, not at a multiple of {layout.base_align}")
    strips = [strip for footprint in layout.footprints for strip in footprint.strips]
    _check(text for strip in strips for text in _outside(strip, tensors.values(), low))
    return low


def _check_named(layout: Layout, tensors: Tensors) -> None:
    if not isinstance(tensors, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise MemoryLayoutError(
            f"tensors are {type(tensors).__name__}, not by the names of their layers"
            "\n\nhint: {'layers.0': tensor, …}"
        )
    if set(tensors) != set(layout.layers):
        raise MemoryLayoutError(
            f"tensors for layers that no group has: {sorted(set(tensors) - set(layout.layers))[:8]}"
            f"; layers without a tensor: {sorted(set(layout.layers) - set(tensors))[:8]}"
        )
    places = {tensor.device for tensor in tensors.values()}
    if len(places) > 1:
        raise MemoryLayoutError(f"tensors on several devices: {sorted(map(str, places))}")


def _axis_names(layer: str, tensor: torch.Tensor, axes: AxisNames) -> tuple[str, ...]:
    if isinstance(axes, Mapping) and layer not in axes:
        raise MemoryLayoutError(f"no axes are named for layer {layer!r}, only for {list(axes)[:8]}")
    names = tuple(axes[layer] if isinstance(axes, Mapping) else axes)
    if len(names) != tensor.ndim or len(set(names)) < len(names) or "block" not in names:
        raise MemoryLayoutError(
            f"layer {layer!r}: a tensor of {tensor.ndim} axes {tuple(tensor.shape)} is said "
            f"to have {len(names)}: {names}\n\nhint: name each once, `block` among them"
        )
    return names


def _contradictions(
    layout: Layout, layer: str, tensor: torch.Tensor, names: tuple[str, ...]
) -> Iterator[str]:
    """How one tensor differs from what the layout says of it."""
    spec = layout.layers[layer][1]
    if tensor.dtype not in (torch.uint8, page_type(spec)):
        yield f"layer {layer!r}: elements are {tensor.dtype}, the layout has {page_type(spec)}"
        return
    unit = tensor.element_size()
    view = layout.view(layer) if len(spec.sections) == 1 else layout.page(layer)
    content = Axis("content", view.axis("content").size * view.unit // unit, unit)
    expected = {axis.name: axis for axis in (*view.axes, content)}
    sizes = zip(names, tensor.shape, tensor.stride(), strict=True)
    real = {name: Axis(name, size, stride * unit) for name, size, stride in sizes}
    for name in real.keys() - expected.keys():
        yield f"layer {layer!r}: there is no axis {name!r} among {list(expected)}"
    for name, axis in expected.items():
        size, stride = (real[name].size, real[name].stride) if name in real else (1, axis.stride)
        if size != axis.size:
            yield f"layer {layer!r}: axis {name!r} has {size} elements, the layout {axis.size}"
        elif size > 1 and stride != axis.stride:
            yield (
                f"layer {layer!r}: axis {name!r} has a stride of {stride} bytes, "
                f"the layout {axis.stride}"
            )


def _outside(strip: Strip, tensors: Iterable[torch.Tensor], base: int) -> Iterator[str]:
    """A strip that no allocation holds from end to end."""
    start, end = base + strip.hull.offset, base + strip.hull.end
    storages = [tensor.untyped_storage() for tensor in tensors]
    if not any(s.data_ptr() <= start and end <= s.data_ptr() + s.nbytes() for s in storages):
        yield (
            f"no tensor's memory holds the {end - start} bytes at {start}: runs of {strip.nbytes} "
            f"bytes every {strip.stride}"
        )


def _regions(layout: Layout, tensors: Tensors) -> tuple[Run, ...]:
    """The fewest runs of real memory that hold all layers: one per allocation."""
    bounds: dict[int, list[int]] = {}
    for layer, tensor in tensors.items():
        for section in range(len(layout.layers[layer][1].sections)):
            view = layout.view(layer, section)
            bounds.setdefault(tensor.untyped_storage().data_ptr(), []).extend(
                (view.offset, view.end)
            )
    regions: list[Run] = []
    for low, high in sorted((min(each), max(each)) for each in bounds.values()):
        if regions and low < regions[-1].end:  # allocations that overlap are one
            last = regions.pop()
            low, high = last.offset, max(last.end, high)
        regions.append(Run(low, high - low))
    return tuple(regions)


def _check(contradictions: Iterable[str]) -> None:
    """MemoryLayoutError that lists them, if there are any."""
    if text := "\n".join(contradictions):
        raise MemoryLayoutError(text)
