"""Text for people: numbers with their nouns, sizes, tables."""

from collections.abc import Iterable, Sequence


def plural(number: int, noun: str) -> str:
    """`1 request`, `2 requests`, `12,000 copies`."""
    if number != 1:
        noun = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {noun}"


def human(nbytes: int | float) -> str:
    """`20 GiB`: four digits at most, so not exact."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if float(f"{size:.4g}") < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} PiB"


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
