"""What a route costs before anything is sent: copies, bytes, and time on a link."""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

from kvstow.route.blocks import Blocks, Tokens
from kvstow.route.copies import Copies, joined, merged, num_stretches
from kvstow.route.expand import cut_tokens
from kvstow.route.route import GroupPair
from kvstow.route.rows import covered, row_starts


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Per destination block that is no neighbour of another: copies and bytes of it; the stretches
    of it that they fill; and reads and bytes if source rows are read whole and cut here.

    Fractions, because a destination block may share a source block with the next one.
    """

    lanes: int
    copies: Fraction
    nbytes: Fraction
    stretches: Fraction
    reads: Fraction
    read_bytes: Fraction
    min_copy_bytes: int
    max_copy_bytes: int


def price(pairs: Iterable[GroupPair]) -> Price:
    """The price of one block of a destination group, from all of its sources."""
    lanes = 0
    num_copies = nbytes = stretches = num_reads = read_bytes = Fraction(0)
    sizes: list[int] = []
    for pair in pairs:
        s_span, d_span = pair.spans
        blocks = lcm(s_span, d_span) // d_span
        copies = [kind.copies.nbytes for kind in pair.period]
        lanes += sum(map(len, copies))
        num_copies += Fraction(sum(map(len, copies)), blocks)
        nbytes += Fraction(sum(int(copy.sum()) for copy in copies), blocks)
        stretches += Fraction(_num_stretches(pair), blocks)
        reads = _row_reads(pair)
        num_reads += Fraction(len(reads), blocks)
        read_bytes += Fraction(sum(reads), blocks)
        sizes += [extreme for copy in copies for extreme in (int(copy.min()), int(copy.max()))]
    return Price(
        lanes=lanes,
        copies=num_copies,
        nbytes=nbytes,
        stretches=stretches,
        reads=num_reads,
        read_bytes=read_bytes,
        min_copy_bytes=min(sizes, default=0),
        max_copy_bytes=max(sizes, default=0),
    )


def _row_reads(pair: GroupPair) -> list[int]:
    """The lengths of all reads of a period of full blocks, if rows are read whole."""
    starts = row_starts(pair.layouts[0], {pair.groups[0]: Blocks.first([0])})
    wanted = [merged(copies, by="source") for copies in _by_block(pair, pair.spans[0])]
    return [nbytes for copies in wanted for nbytes in covered(starts, copies)[1].tolist()]


def _num_stretches(pair: GroupPair) -> int:
    """How many stretches of the destination the copies of a period of full blocks fill."""
    return sum(map(num_stretches, _by_block(pair, pair.spans[1])))


def _by_block(pair: GroupPair, span: int) -> list[Copies]:
    """The copies of a period of full blocks, those of each block of so many tokens together."""
    s_span, d_span = pair.spans
    first, _ = cut_tokens(Tokens(0, lcm(s_span, d_span)), s_span, d_span)
    found: dict[int, list[Copies]] = {}
    for block, kind in zip((first // span).tolist(), pair.period, strict=True):
        found.setdefault(block, []).append(kind.copies)
    return [joined(copies) for copies in found.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """A way for bytes, as two numbers: how fast they flow, and what each copy costs more."""

    name: str
    bytes_per_second: float
    seconds_per_copy: float

    def seconds(self, num_copies: float, nbytes: float) -> float:
        """How long so many copies of so many bytes in all take."""
        return num_copies * self.seconds_per_copy + nbytes / self.bytes_per_second


LINKS = tuple(
    LinkSpeed(name=name, bytes_per_second=gigabytes * 1e9, seconds_per_copy=micros * 1e-6)
    for name, gigabytes, micros in (
        ("pcie4", 25.0, 0.6),
        ("pcie5", 55.0, 0.6),
        ("nvlink", 144.0, 10.0),
        ("shm", 9.0, 2.3),
        ("ib200", 25.0, 0.5),
        ("ib400", 50.0, 0.5),
        ("ib800", 100.0, 0.5),
        ("tcp10", 1.25, 5.0),
        ("tcp25", 3.125, 5.0),
        ("tcp100", 12.5, 5.0),
    )
)
"""Rates that rows reach and costs per copy: pcie5 and nvlink as measured on one H200
(batched copies; writes between two processes), shm between host memories of two processes
(bench/results/transfer_rows_again.json), the others nominal rates with the usual cost of posting
one descriptor. Estimates, for comparing layouts with each other."""

MEMORIES = tuple(
    LinkSpeed(name=name, bytes_per_second=gigabytes * 1e9, seconds_per_copy=micros * 1e-6)
    for name, gigabytes, micros in (("device", 2000.0, 0.06), ("host", 10.0, 0.6))
)
"""Where rows are cut: an H200's own memory by the copy kernel (bench/results/copy_gpu.json), a
host's by one processor (bench/results/transfer_rows.json). Agents measure their own."""
