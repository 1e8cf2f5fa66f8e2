"""Memory that an engine has allocated, taken as it is, once it has been found to keep a layout.

Nothing is guessed from shapes. The caller names the axes of every tensor as they stand; what
the numbers then contradict is refused, with both of them.

    one tensor per layer        base ┃ L0: 0 1 2 … ┃  (not ours)  ┃ L1: 0 1 2 … ┃
    one buffer for all layers   base ┃ row 0: L0 L1 ┃ row 1: L0 L1 ┃

Offsets count from the lowest address. `regions` says where memory really is; the bytes between
two allocations are never touched.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from kvstow.errors import MemoryLayoutError
from kvstow.memory.dtypes import page_type
from kvstow.plan.layout import Layout
from kvstow.plan.sharing import Strip
from kvstow.plan.view import Axis, Run

Tensors = Mapping[str, torch.Tensor]
"""An engine's tensors by the names of their layers."""

AxisNames = Sequence[str] | Mapping[str, Sequence[str]]
"""Names of the tensors' axes as they stand: `block`, `head`, `token` and `content`; `block` and
`content` alone for pages of several sections. One sequence for all tensors, or one for each.
`head` and `token` may be missing where there is one."""


@dataclass(frozen=True, slots=True, eq=False)
class Adopted:
    """Memory that was found to hold a layout: its base, where it really is, what keeps it alive."""

    address: int
    regions: tuple[Run, ...]
    tensors: tuple[torch.Tensor, ...]


def adopted(layout: Layout, tensors: Tensors, *, axes: AxisNames) -> Adopted:
    """The memory of the tensors, if it holds the layout exactly."""
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
    return Adopted(low, _regions(layout, tensors), tuple(tensors.values()))


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
    hulls: dict[int, tuple[int, int]] = {}
    for layer, tensor in tensors.items():
        sections = range(len(layout.layers[layer][1].sections))
        views = [layout.view(layer, section) for section in sections]
        storage = tensor.untyped_storage().data_ptr()
        low, high = hulls.get(storage, (views[0].offset, views[0].end))
        low = min(low, *(view.offset for view in views))
        hulls[storage] = low, max(high, *(view.end for view in views))
    regions: list[Run] = []
    for low, high in sorted(hulls.values()):
        if regions and low < regions[-1].end:  # allocations that overlap are one
            last = regions.pop()
            low, high = last.offset, max(last.end, high)
        regions.append(Run(low, high - low))
    return tuple(regions)


def _check(contradictions: Iterable[str]) -> None:
    """MemoryLayoutError that lists them, if there are any."""
    if text := "\n".join(contradictions):
        raise MemoryLayoutError(text)
