"""What one rank holds: its part of each axis (tensor parallel), its layers (pipeline).

Tensor parallelism has one rule:

    units % tp == 0    units / tp each, contiguous          8 heads, tp 2:  0-3 │ 4-7
    tp % units == 0    one each, on tp / units ranks alike  2 heads, tp 4:  0 │ 0 │ 1 │ 1
    otherwise          refused

What is only read (kv heads, state groups) may be replicated; what a rank computes
(query heads, recurrent heads, channels) must divide.

Pipeline stages are contiguous decoder layers, as even as the engines make them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvstow.errors import ModelError
from kvstow.plan.spec import Extent


@dataclass(frozen=True, slots=True)
class TensorRank:
    """Rank `rank` of `tp` tensor-parallel ranks."""

    tp: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if type(self.tp) is not int or self.tp < 1:
            raise ModelError(f"tp is {self.tp!r}, not a whole number > 0")
        if type(self.rank) is not int or not 0 <= self.rank < self.tp:
            raise ModelError(f"tp rank {self.rank!r} is not one of the {self.tp} ranks from 0")

    def divided(self, what: str, units: int) -> tuple[int, int]:
        """This rank's interval of `units` that must divide evenly."""
        if units % self.tp:
            raise ModelError(
                f"{units} {what} cannot be split over {self.tp} tensor-parallel ranks"
                f"\n\nhint: choose a tp that divides {units}"
            )
        each = units // self.tp
        return self.rank * each, (self.rank + 1) * each

    def shared(self, what: str, units: int) -> tuple[int, int]:
        """This rank's interval of `units` that may be replicated."""
        if units < self.tp and self.tp % units == 0:
            unit = self.rank // (self.tp // units)
            return unit, unit + 1
        if units % self.tp:
            raise ModelError(
                f"{units} {what} cannot be split over {self.tp} tensor-parallel ranks, "
                f"nor replicated evenly\n\n"
                f"hint: choose a tp that divides {units} or is a multiple of it"
            )
        return self.divided(what, units)


@dataclass(frozen=True, slots=True)
class AxisPart:
    """A stretch of an axis: `units` pieces of `size` elements, split by whole units."""

    what: str
    units: int
    size: int = 1
    replicable: bool = False


def split(axis: str, parts: Sequence[AxisPart], rank: TensorRank) -> Extent:
    """What `rank` holds of an axis made of `parts` one after the other.

    Each part is split on its own; pieces that touch become one.
    """
    pieces: list[tuple[int, int]] = []
    start = 0
    for part in parts:
        share = rank.shared if part.replicable else rank.divided
        lo, hi = share(part.what, part.units)
        piece = (start + lo * part.size, start + hi * part.size)
        if pieces and pieces[-1][1] == piece[0]:
            piece = (pieces.pop()[0], piece[1])
        pieces.append(piece)
        start += part.units * part.size
    return Extent(axis, start, tuple(pieces))


def stage(num_layers: int, *, pp: int, pp_rank: int) -> range:
    """The decoder layers of stage `pp_rank` of `pp`.

    Every stage takes `num_layers // pp`. What remains goes one each to the stages from
    the last but one backwards: the last stage has the output head to compute, and the
    first the embedding. 61 layers on 4 stages are 15, 15, 16, 15.
    """
    if type(pp) is not int or pp < 1:
        raise ModelError(f"pp is {pp!r}, not a whole number > 0")
    if type(pp_rank) is not int or not 0 <= pp_rank < pp:
        raise ModelError(f"pp rank {pp_rank!r} is not one of the {pp} stages from 0")
    if pp > num_layers:
        raise ModelError(
            f"{num_layers} layers cannot fill {pp} pipeline stages"
            f"\n\nhint: choose a pp of at most {num_layers}"
        )
    each, left = divmod(num_layers, pp)
    sizes = [each + (pp - 1 - left <= i < pp - 1) for i in range(pp)]
    start = sum(sizes[:pp_rank])
    return range(start, start + sizes[pp_rank])
