"""Strided bytes: axes with names, views over an arena, contiguous runs.

Everything counts in bytes from the start of the arena. Intervals are half-open.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvstow.errors import SpecError

Ints = npt.NDArray[np.int64]
"""Ids, offsets, counts: the one integer array type."""


def align_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """Contiguous bytes `[offset, offset + nbytes)`."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


def joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """The same bytes in the fewest runs, ascending. The runs must not overlap."""
    merged: list[Run] = []
    for run in sorted(runs):
        if merged and merged[-1].end == run.offset:
            merged[-1] = Run(merged[-1].offset, merged[-1].nbytes + run.nbytes)
        elif run.nbytes:
            merged.append(run)
    return tuple(merged)


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of a view: how many elements, and how far apart they are."""

    name: str
    size: int
    stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A strided array of `unit`-byte elements; axes outermost first.

    An axis of size 1 keeps the stride it would have were it longer: descriptors
    built from a view (TMA wants strides of at least 16 bytes) stay valid.
    """

    offset: int
    axes: tuple[Axis, ...]
    unit: int

    def axis(self, name: str) -> Axis:
        """The axis of that name."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise SpecError(f"no axis {name!r} among {[axis.name for axis in self.axes]}")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(axis.stride for axis in self.axes)

    @property
    def end(self) -> int:
        """One past the last byte that any element touches."""
        return self.offset + sum((a.size - 1) * a.stride for a in self.axes) + self.unit

    def at(self, name: str, index: int) -> "View":
        """The view with one axis fixed at `index` and gone."""
        axis = self.axis(name)
        if not 0 <= index < axis.size:
            raise SpecError(f"index {index} is outside axis {name!r} of size {axis.size}")
        rest = tuple(a for a in self.axes if a is not axis)
        return replace(self, offset=self.offset + index * axis.stride, axes=rest)

    def subdivided(self, name: str, inner: int) -> "View":
        """The view with one axis cut into pieces of `inner` elements.

        The outer part is merged into the `block` axis when the strides allow it
        (then kernel block `b * pieces + p` is piece `p` of block `b`), and stands
        beside it as axis `sub` otherwise.
        """
        axis = self.axis(name)
        if inner < 1 or axis.size % inner:
            raise SpecError(f"axis {name!r} of size {axis.size} cannot be cut into {inner}s")
        pieces = axis.size // inner
        block = self.axis("block")
        axes: list[Axis] = []
        for a in self.axes:
            if a is block and block.stride == pieces * inner * axis.stride:
                axes.append(Axis("block", block.size * pieces, inner * axis.stride))
            elif a is block:
                axes += [block, Axis("sub", pieces, inner * axis.stride)]
            elif a is axis:
                axes.append(Axis(name, inner, axis.stride))
            else:
                axes.append(a)
        return replace(self, axes=tuple(axes))

    def runs(self) -> tuple[Run, ...]:
        """The bytes of the view as the fewest runs, ascending. Meant for one block."""
        runs = [Run(self.offset, self.unit)]
        for axis in sorted(self.axes, key=lambda a: a.stride):
            if axis.size == 1:
                continue
            if len(runs) == 1 and runs[0].nbytes == axis.stride:
                runs = [Run(runs[0].offset, axis.stride * axis.size)]
            else:
                runs = [
                    Run(r.offset + i * axis.stride, r.nbytes)
                    for i in range(axis.size)
                    for r in runs
                ]
        return joined(runs)
