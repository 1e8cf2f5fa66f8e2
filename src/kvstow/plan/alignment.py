"""What kernels, NICs and files ask of offsets and strides, and whether a placement gives it."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import lcm

from kvstow.errors import PlanError
from kvstow.plan.group import Group
from kvstow.plan.layout import Placement
from kvstow.plan.spec import LayerSpec
from kvstow.plan.words import MAX_BYTES


def whole_number(what: str, value: object, *, least: int, most: int = MAX_BYTES - 1) -> int:
    """The value, if it is a whole number in `[least, most]`."""
    if type(value) is not int or not least <= value <= most:
        raise PlanError(f"{what} is {value!r}, not a whole number from {least} to {most}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a kernel or a NIC asks of the layers whose names match `layers`, in bytes."""

    layers: str = "*"
    offset_multiple: int = 1
    stride_multiple: int = 1
    stride_limit: int = 1 << 62

    def __post_init__(self) -> None:
        for what, value in (
            ("offset multiple", self.offset_multiple),
            ("stride multiple", self.stride_multiple),
            ("stride limit", self.stride_limit),
        ):
            whole_number(f"{what} of {self.layers!r}", value, least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """Multiples at which pages, rows and the arena start, and further demands by layer."""

    page: int = 16
    row: int = 64
    base: int = 4096
    demands: tuple[Demand, ...] = ()

    def __post_init__(self) -> None:
        for what, value in (("page", self.page), ("row", self.row), ("base", self.base)):
            whole_number(f"{what} alignment", value, least=1)

    def wishes(self) -> list[str]:
        """What differs from the usual alignment, as `kvstow plan --align` takes it."""
        said = [
            f"{what}={getattr(self, what)}"
            for what in ("page", "row")
            if getattr(self, what) != getattr(USUAL, what)
        ]
        offsets = [demand.offset_multiple for demand in self.demands]
        if self.base != lcm(USUAL.base, self.page, self.row, *offsets):
            said.append(f"base={self.base}")
        return said + [f"{demand.layers}={demand.offset_multiple}" for demand in self.demands]

    def of(self, layer: LayerSpec) -> int:
        """What the layer's pages must start at multiples of."""
        demands = [d.offset_multiple for d in self.demands if fnmatchcase(layer.name, d.layers)]
        return lcm(self.page, layer.align, layer.unit, *demands)

    def of_row(self, group: Group) -> int:
        """What the group's rows must start at multiples of."""
        demands = [
            d.stride_multiple
            for d in self.demands
            for layer in group.layers
            if fnmatchcase(layer.name, d.layers)
        ]
        return lcm(self.row, *(self.of(layer) for layer in group.layers), *demands)


USUAL = Alignment()


def check_demands(demands: Sequence[Demand], layer: LayerSpec, place: Placement) -> None:
    """Refuses a placement that does not give a layer what was asked for it."""
    for demand in demands:
        if not fnmatchcase(layer.name, demand.layers):
            continue
        for what, value, multiple in (
            ("offset", place.offset, demand.offset_multiple),
            ("block stride", place.block_stride, demand.stride_multiple),
        ):
            if value % multiple:
                raise PlanError(
                    f"layer {layer.name!r}: {what} {value} is not a multiple of {multiple}"
                )
        if place.block_stride > demand.stride_limit:
            raise PlanError(
                f"layer {layer.name!r}: block stride {place.block_stride} is above the limit of "
                f"{demand.stride_limit}\n\nhint: layer-compact orders (LBHNC) have the page "
                f"itself, {layer.page_bytes} bytes, as stride"
            )
