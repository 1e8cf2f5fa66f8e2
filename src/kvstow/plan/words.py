"""Sizes and orders as people write them, and numbers as they read them.

    size     20GiB  1.5TiB     powers of 1024
             20G  512M  64k    the same: 20G is 20GiB, as in `docker -m 20g` or `java -Xmx20G`
             20GB  512MB       powers of 1000
             21474836480       bytes; as a number or in words
    order    BLHNC  blhnc      the axes, outermost first
             HND               heads outside tokens in a page: BLHNC
             NHD               tokens outside heads in a page: BLNHC

Letters may be large or small. Element types are read by `DType.parse`.
"""

import re
from collections.abc import Iterable, Sequence
from fractions import Fraction

from kvstow.errors import PlanError
from kvstow.plan.layout import ORDERS, Order

MAX_BYTES = 1 << 63
"""No arena, budget or alignment is that large."""

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgtp", start=1)
    for suffix, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
_SIZE = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?) ?([A-Za-z]*)")
_SIZE_HINT = "\n\nhint: for example 20GiB, 512MB, 1.5TiB or 1073741824"
_PAGE_ORDERS: dict[str, Order] = {"HND": "BLHNC", "NHD": "BLNHC"}


def parse_size(value: int | str) -> int:
    """The bytes that `"20GiB"`, `"512MB"` or a number of them are, exactly."""
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
    if nbytes.denominator != 1:
        raise PlanError(f"{value!r} is {float(nbytes)} bytes, not a whole number of them")
    if not 0 < nbytes < MAX_BYTES:
        raise PlanError(f"{value!r} is {nbytes} bytes, not in [1, 2^63){_SIZE_HINT}")
    return int(nbytes)


def parse_order(value: str) -> Order:
    """The order that `"blhnc"` or `"HND"` is."""
    text = value.upper() if isinstance(value, str) else ""  # pyright: ignore[reportUnnecessaryIsInstance]
    for order in ORDERS:
        if text == order:
            return order
    if text not in _PAGE_ORDERS:
        raise PlanError(
            f"order {value!r} is none of {', '.join(ORDERS)}, HND and NHD"
            "\n\nhint: the letters are Layer Block Head tokeN Content, outermost first"
        )
    return _PAGE_ORDERS[text]


def counted(number: int, noun: str) -> str:
    """`1 request`, `2 requests`, `12,000 copies`."""
    if number != 1:
        noun = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {noun}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, num_left: int = 1) -> str:
    """Columns side by side: the first `num_left` start at the left, the others end at the right."""
    lines = [columns, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        each = zip(cells, widths, strict=True)
        texts = [
            cell.ljust(width) if i < num_left else cell.rjust(width)
            for i, (cell, width) in enumerate(each)
        ]
        return "   ".join(texts).rstrip()

    head, *others = map(line, lines)
    return "\n".join([head, "─" * (sum(widths) + 3 * (len(widths) - 1)), *others])


def human(nbytes: int | float) -> str:
    """`20 GiB`: four digits at most, so not exact."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if float(f"{size:.4g}") < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} PiB"
