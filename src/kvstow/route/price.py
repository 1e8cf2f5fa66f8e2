"""What a route costs before anything is sent: copies and bytes, and time by the way an agent takes.

mapped    one node: the destination copies every piece out of the source's memory
direct    a network: every piece is one read or one write
slots     a network: the source gathers pieces into slots, whole slots travel, and are cut
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, lcm
from typing import Literal

from kvstow.route.route import GroupPair, Route
from kvstow.route.ways import LONG_BYTES, PROBE_BYTES, PROBE_COPIES, SLOTS_SHARE, Path, Rates

Way = Literal["mapped", "direct", "slots"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Per destination block that is no neighbour of another: copies, and their bytes.

    Fractions, because a destination block may share a source block with the next one.
    """

    lanes: int
    copies: Fraction
    nbytes: Fraction
    min_copy_bytes: int
    max_copy_bytes: int


def price(pairs: Iterable[GroupPair]) -> Price:
    """The price of one block of a destination group, from all of its sources."""
    lanes = 0
    num_copies = nbytes = Fraction(0)
    sizes: list[int] = []
    for pair in pairs:
        s_span, d_span = pair.spans
        blocks = lcm(s_span, d_span) // d_span
        copies = [kind.copies.nbytes for kind in pair.period]
        count = sum(map(len, copies))
        lanes += count
        num_copies += Fraction(count, blocks)
        nbytes += Fraction(sum(int(copy.sum()) for copy in copies), blocks)
        sizes += [extreme for copy in copies for extreme in (int(copy.min()), int(copy.max()))]
    return Price(
        lanes=lanes,
        copies=num_copies,
        nbytes=nbytes,
        min_copy_bytes=min(sizes, default=0),
        max_copy_bytes=max(sizes, default=0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What bytes travel on: how fast they flow, and what each copy costs more.

    On one node an agent maps its peer's memory. Otherwise it goes by the rates that it would
    measure.
    """

    name: str
    bytes_per_second: float
    seconds_per_copy: float
    is_one_node: bool = False

    def ways(self, num_copies: int, nbytes: int) -> dict[Way, float]:
        """The ways there are, and how long so many copies of so many bytes in all take."""
        seconds = num_copies * self.seconds_per_copy + nbytes / self.bytes_per_second
        if self.is_one_node:
            return {"mapped": seconds}
        return {"direct": seconds, "slots": nbytes / (SLOTS_SHARE * self.bytes_per_second)}

    @property
    def path(self) -> Path:
        """What an agent measures here: its probes, in one piece and in many."""
        long, short = (
            PROBE_BYTES / self.ways(num_copies, PROBE_BYTES)["direct"]
            for num_copies in (1, PROBE_COPIES)
        )
        return Path(read=Rates(long, short), slots=SLOTS_SHARE * long)

    def way(self, mean_bytes: int) -> Way:
        """The way that an agent takes for pieces of this length."""
        if self.is_one_node:
            return "mapped"
        return "slots" if self.path.way_of(mean_bytes) == "slots" else "direct"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPrice:
    """What a route brings of a request whose blocks are no neighbours, and how long each way takes;
    `way` is the one that an agent takes, and `seconds` its time."""

    copies_per_block: Fraction
    bytes_per_block: Fraction
    copies: int
    nbytes: int
    ways: dict[Way, float]
    way: str
    seconds: float

    @staticmethod
    def of(route: Route, num_tokens: int, link: Link) -> "RequestPrice":
        """The price of so many tokens on a link."""
        copies = nbytes = 0
        copies_per_block = bytes_per_block = Fraction(0)
        for g, placed in enumerate(route.destination.groups):
            block = price(pair for pair in route.pairs if pair.groups[1] == g)
            count = placed.group.rows_needed(num_tokens)
            copies += ceil(block.copies * count)
            nbytes += ceil(block.nbytes * count)
            copies_per_block += block.copies
            bytes_per_block += block.nbytes
        is_equal = route.source == route.destination  # its whole rows count as long pieces
        way = link.way(LONG_BYTES if is_equal else route.mean_bytes)
        ways = link.ways(copies, nbytes)
        return RequestPrice(
            copies_per_block=copies_per_block,
            bytes_per_block=bytes_per_block,
            copies=copies,
            nbytes=nbytes,
            ways=ways,
            way=way,
            seconds=ways[way],
        )

    @staticmethod
    def total(prices: "Sequence[RequestPrice]") -> "RequestPrice":
        """That of several sources, one after the other."""
        return RequestPrice(
            copies_per_block=sum((each.copies_per_block for each in prices), Fraction(0)),
            bytes_per_block=sum((each.bytes_per_block for each in prices), Fraction(0)),
            copies=sum(each.copies for each in prices),
            nbytes=sum(each.nbytes for each in prices),
            ways={way: sum(each.ways[way] for each in prices) for way in prices[0].ways},
            way=" and ".join(sorted({each.way for each in prices})),
            seconds=sum(each.seconds for each in prices),
        )


LINKS = tuple(
    Link(
        name=name,
        bytes_per_second=gigabytes * 1e9,
        seconds_per_copy=micros * 1e-6,
        is_one_node=is_one_node,
    )
    for name, gigabytes, micros, is_one_node in (
        ("gpu", 1600.0, 0.0, True),
        ("nvlink", 400.0, 0.0, True),
        ("pcie4", 25.0, 0.0, True),
        ("pcie5", 55.0, 0.0, True),
        ("shm", 10.0, 0.6, True),
        ("ib200", 25.0, 0.5, False),
        ("ib400", 50.0, 0.5, False),
        ("ib800", 100.0, 0.5, False),
        ("tcp10", 1.25, 5.0, False),
        ("tcp25", 3.125, 5.0, False),
        ("tcp100", 12.5, 5.0, False),
    )
)
"""Rates and costs per copy: `gpu` is one GPU that two processes share (measured on an H200, where
a kernel copies pieces of any length alike), `shm` memory that two processes of a host share, copied
by one processor; the others are nominal rates with the usual cost of posting one descriptor.
Estimates, for comparing layouts with each other."""
