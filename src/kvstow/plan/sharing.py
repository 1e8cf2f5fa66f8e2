"""The sharing law, decided exactly, in time that does not grow with the number of blocks.

A *strip* is the same piece of every block: `count` runs of `nbytes`, `stride` apart. A
layout is a handful of strips, so the question "do any two blocks collide?" becomes a
question about two arithmetic progressions, and Euclid answers it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvstow.plan.view import Run, ceil_div


@dataclass(frozen=True, slots=True)
class Strip:
    """Runs `[offset + b * stride, … + nbytes)` for every block `b < count`."""

    offset: int
    nbytes: int
    stride: int
    count: int

    @property
    def hull(self) -> Run:
        """From the first byte of the first run to the last byte of the last."""
        return Run(self.offset, (self.count - 1) * self.stride + self.nbytes)


def first_residue(step: int, modulus: int, lo: int, hi: int) -> int | None:
    """The smallest `x ≥ 0` with `lo ≤ step·x mod modulus ≤ hi`, for `0 ≤ lo ≤ hi < modulus`."""
    if lo == 0:
        return 0
    step %= modulus
    if step == 0:
        return None
    if 2 * step > modulus:
        step, lo, hi = modulus - step, modulus - hi, modulus - lo
    x = ceil_div(lo, step)
    if x * step <= hi:
        return x
    y = first_residue(step - modulus % step, step, lo % step, hi % step)
    return None if y is None else ceil_div(lo + modulus * y, step)


def collision(a: Strip, b: Strip) -> tuple[int, int] | None:
    """Some pair of blocks whose runs share a byte; None if there is none.

    Run `i` of `a` meets run `j` of `b` exactly when `j·b.stride` lies in the `width + 1`
    whole numbers that end at `x(i) = a.offset - b.offset + i·a.stride + a.nbytes - 1`.
    """
    width = a.nbytes + b.nbytes - 2
    start = a.offset - b.offset + a.nbytes - 1
    last = (b.count - 1) * b.stride

    def index_reaching(x: int) -> int:
        return max(0, ceil_div(x - start, a.stride))

    for lo, j in ((0, 0), (last, b.count - 1)):  # the ends of `b`: one candidate each
        i = index_reaching(lo)
        if i < a.count and lo <= start + i * a.stride <= lo + width:
            return i, j
    first, stop = index_reaching(0), min(a.count, index_reaching(last))
    if first >= stop:
        return None
    phase = (start + first * a.stride) % b.stride
    need = b.stride - phase
    i = 0 if phase <= width else first_residue(a.stride, b.stride, need, need + width)
    if i is None or first + i >= stop:
        return None
    return first + i, (start + (first + i) * a.stride) // b.stride


@dataclass(frozen=True, slots=True)
class Footprint:
    """A group's strips, `rows_per_slab` blocks of it to a slab."""

    name: str
    strips: tuple[Strip, ...]
    rows_per_slab: int


def meeting(footprints: Sequence[Footprint]) -> Iterator[tuple[int, Strip, int, Strip]]:
    """Pairs of different strips whose hulls overlap, with their groups' indices."""
    everything = sorted(
        ((strip, g) for g, footprint in enumerate(footprints) for strip in footprint.strips),
        key=lambda item: item[0].offset,
    )
    open_: list[tuple[Strip, int]] = []
    for strip, g in everything:
        open_ = [(other, h) for other, h in open_ if other.hull.end > strip.offset]
        for other, h in open_:
            yield h, other, g, strip
        open_.append((strip, g))


def sharing_sets(footprints: Sequence[Footprint]) -> tuple[tuple[int, ...], ...]:
    """Groups that have bytes in common, directly or through others: each set passes
    slabs around among its members."""
    owner = list(range(len(footprints)))
    for g, a, h, b in meeting(footprints):
        if owner[g] != owner[h] and collision(a, b):
            low, high = sorted((owner[g], owner[h]))
            owner = [low if o == high else o for o in owner]
    return tuple(tuple(g for g, o in enumerate(owner) if o == root) for root in sorted(set(owner)))


def sharing_violations(footprints: Sequence[Footprint], num_slabs: int) -> Iterator[str]:
    """Every pair of strips that breaks the sharing law, with a pair of blocks to prove it."""
    for footprint in footprints:
        for strip in footprint.strips:
            if strip.count > 1 and strip.nbytes > strip.stride:
                yield (
                    f"sharing: group {footprint.name!r}: a run of {strip.nbytes} bytes "
                    f"repeats every {strip.stride} bytes and overlaps itself"
                )
    for g, a, h, b in meeting(footprints):
        if g == h:
            clash = collision(a, b)
            where = f"two layers of group {footprints[g].name!r}"
        else:
            clash = foreign_collision(footprints[g], a, footprints[h], b, num_slabs)
            where = f"groups {footprints[g].name!r} and {footprints[h].name!r}"
        if clash:
            i, j = clash
            yield (
                f"sharing: {where} overlap without sharing a slab: block {i} at "
                f"{a.offset + i * a.stride} and block {j} at {b.offset + j * b.stride}, "
                f"{a.nbytes} and {b.nbytes} bytes long"
            )


def foreign_collision(
    f: Footprint, a: Strip, g: Footprint, b: Strip, num_slabs: int
) -> tuple[int, int] | None:
    """Blocks of two groups that overlap although they lie in different slabs."""
    if num_slabs == 1:
        return None
    slab = f.rows_per_slab * a.stride
    if slab != g.rows_per_slab * b.stride:
        return collision(a, b)
    end = a.offset + (f.rows_per_slab - 1) * a.stride + a.nbytes
    other_end = b.offset + (g.rows_per_slab - 1) * b.stride + b.nbytes
    first = (a.offset - other_end) // slab + 1  # a slab of b's further down ends before a begins
    last = ceil_div(end - b.offset, slab) - 1
    if first >= 0 >= last:
        return None  # no other slab reaches so far
    one = Strip(a.offset, a.nbytes, a.stride, f.rows_per_slab)
    for shift in range(max(first, 1 - num_slabs), min(last, num_slabs - 1) + 1):
        moved = Strip(b.offset + shift * slab, b.nbytes, b.stride, g.rows_per_slab)
        clash = collision(one, moved) if shift else None
        if clash:
            i, j = max(0, -shift), max(0, shift)
            return clash[0] + i * f.rows_per_slab, clash[1] + j * g.rows_per_slab
    return None


def overlapping(runs: Sequence[Run]) -> Iterator[tuple[Run, Run]]:
    """Neighbours, by offset, that share bytes."""
    ordered = sorted(runs)
    return ((a, b) for a, b in pairwise(ordered) if a.end > b.offset)
