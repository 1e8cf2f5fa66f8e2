"""Marks on a line of text, each where its byte is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise

from kvstow.plan.view import Run

EDGE = "│"
PADDING = "·"


@dataclass(frozen=True, slots=True)
class Mark:
    """Something starts at `offset`. Where all marks have room for it, its full name is
    written, then what it consists of as far as that fits; its brief name otherwise."""

    offset: int
    brief: str
    full: str
    parts: tuple[str, ...] = ()

    def label(self, room: int) -> str:
        """The full name and as many parts as fit."""
        for num_parts in range(len(self.parts), 0, -1):
            more = " …" if num_parts < len(self.parts) else ""
            text = f" {self.full}: {' '.join(self.parts[:num_parts])}{more}"
            if len(text) <= room:
                return text
        return f" {self.full}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruler:
    """`[0, nbytes)` drawn `width` columns wide; the edge at its end takes one more."""

    nbytes: int
    width: int

    def column(self, offset: int) -> int:
        """The column nearest to a byte."""
        return (2 * offset * self.width + self.nbytes) // (2 * self.nbytes)

    def drawn(self, marks: Sequence[Mark], *, end: int, padding: Sequence[Run] = ()) -> str:
        """The marks up to `end`: all of them, or every second, every fifth … for lack of room.

        Marks ascend. Padding is drawn where it is half a column long at least.
        """
        line = [" "] * (self.width + 1)
        for run in padding:
            hi = self.column(run.end)
            lo = hi - self.column(run.nbytes)
            line[lo:hi] = PADDING * (hi - lo)
        chosen = self._chosen(marks, end)
        is_wide = all(room > len(mark.full) for mark, room in chosen)
        for mark, room in chosen:
            at = self.column(mark.offset)
            name = mark.label(room) if is_wide else mark.brief
            text = EDGE + (name if len(name) <= room else "")
            line[at : at + len(text)] = text
        line[self.column(end)] = EDGE
        return "".join(line).rstrip()

    def _chosen(self, marks: Sequence[Mark], end: int) -> list[tuple[Mark, int]]:
        """Every k-th mark and its columns of room, for the smallest k with room for the
        brief names of all but the last."""
        for step in _steps():
            some = marks[::step]
            columns = [*(self.column(mark.offset) for mark in some), self.column(end)]
            rooms = [b - a - 1 for a, b in pairwise(columns)]
            chosen = list(zip(some, rooms, strict=True))
            if all(len(mark.brief) <= room for mark, room in chosen[:-1]):
                return chosen
        raise AssertionError("steps never end")


def _steps() -> Iterator[int]:
    """1, 2, 5, 10, 20, 50, …"""
    return (digit * 10**power for power in count() for digit in (1, 2, 5))
