"""Whole numbers, and strided bytes: axes with names, views over an arena, contiguous runs.

Everything counts in bytes from the start of the arena. Intervals are half-open.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvstow.errors import KvstowError, PlanError, SpecError

Ints = npt.NDArray[np.int64]
"""Ids, offsets, counts: the one integer array type."""

Whole = TypeVar("Whole", int, Ints)


MAX_TOKENS = 1 << 40
"""No count of tokens, heads or states is larger."""

MAX_BYTES = 1 << 63
"""No arena, budget or alignment is that large."""

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgtp", start=1)
    for suffix, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
_SIZE = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?) ?([A-Za-z]*)")
_SIZE_HINT = "\n\nhint: for example 20GiB, 512MB, 1.5TiB or 1073741824"


def check_count(
    what: str,
    value: object,
    *,
    least: int = 1,
    most: int = MAX_TOKENS,
    error: type[KvstowError] = SpecError,
    hint: str = "",
) -> int:
    """The value, if it is a whole number from `least` to `most`; raises `error` otherwise."""
    if type(value) is not int or not least <= value <= most:
        text = f"{what} is {value!r}, not a whole number from {least} to {most}"
        raise error(f"{text}\n\nhint: {hint}" if hint else text)
    return value


def parse_size(value: int | str) -> int:
    """The bytes that a size as people write it is, a fraction of one left out; letters may be
    large or small.

    20GiB  1.5TiB     powers of 1024
    20G  512M  64k    the same: 20G is 20GiB, as in `docker -m 20g` or `java -Xmx20G`
    20GB  3.05GB      powers of 1000
    21474836480       bytes; as a number or in words
    """
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise PlanError(f"{value[:80]!r} is not a size{_SIZE_HINT}")
        nbytes = Fraction(match[1]) * unit
    elif type(value) is int:
        nbytes = Fraction(value)
    else:
        raise PlanError(f"{value!r} is not a size, but {type(value).__name__}{_SIZE_HINT}")
    if not 1 <= nbytes < MAX_BYTES:
        raise PlanError(f"{value!r} is {float(nbytes):g} bytes, not in [1, 2^63){_SIZE_HINT}")
    return int(nbytes)


def ceil_div(value: Whole, divisor: Whole | int) -> Whole:
    """`value / divisor`, rounded up; of arrays element by element."""
    return -(-value // divisor)


def align_up(value: Whole, multiple: Whole | int) -> Whole:
    """The smallest multiple of `multiple` that is not below `value`."""
    return ceil_div(value, multiple) * multiple


def merged(starts: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """The same intervals `[start, start + length)` in the fewest, ascending, as starts and lengths.

    Neighbours become one. The intervals must neither overlap nor be empty.
    """
    if (starts[1:] < starts[:-1]).any():
        order = np.argsort(starts)
        starts, lengths = starts[order], lengths[order]
    apart = starts[1:] != starts[:-1] + lengths[:-1]
    if apart.all():
        return starts, lengths
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return starts[first], np.add.reduceat(lengths, first)


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
    pieces = np.array([(run.offset, run.nbytes) for run in runs if run.nbytes], np.int64)
    starts, lengths = merged(*pieces.reshape(-1, 2).T)
    return tuple(map(Run, starts.tolist(), lengths.tolist()))


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
