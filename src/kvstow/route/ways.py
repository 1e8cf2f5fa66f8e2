"""Which way bytes take from one layout to another: four ways, counted, priced and chosen.

    direct     every piece on its own: the consumer reads it, or the producer writes it
    rows       the consumer reads rows whole, and cuts them in memory of its own
    gathered   the producer puts pieces that fill one stretch of the consumer's memory side by
               side in memory of its own, and writes the stretch
    staged     piece by piece into a slot in host memory, which is read and cut

Agents choose by `fastest`, `prefers_rows`, `gathers` and `prefers_staged`, each when it has to be
known, with what they have measured. `kvstow route` chooses by `chosen`, which asks the same four,
with prices out of a table.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Literal, NamedTuple

from kvstow.route.price import LINKS, LinkSpeed, Price, price
from kvstow.route.route import Route

Way = Literal["read", "rows", "write", "staged"]
"""The consumer reads every piece into its place, or rows whole which it cuts itself; the producer
writes; or the consumer reads through host memory."""

WayName = Literal["direct", "rows", "gathered", "staged"]

PREFER_READ = 2.0
"""Other ways cost the producer work: they have to be so much faster to be chosen."""

PREFER_DIRECT = 1.25
"""Rows read whole use memory and the consumer's processor: they have to be so much cheaper."""

GATHER_RATE = 10e9
"""Bytes per second that a producer on one H200 gathered: a processor has to list every short copy
(bench/results/transfer_rows_gpu.json)."""

BYTES_PER_WRITE = 128 << 10
"""A write costs about as much as gathering so many bytes: it takes 6 to 8 µs between two processes
on one H200."""

LEAST_SAVED = 256
"""Fewer writes than these are not worth the slots to gather in."""

STAGED_SHARE = 0.7
"""What is left of the rate between two hosts' memories when rows are copied on both ends."""

DEVICE_SLOT_BYTES = 32 << 20
"""Staging slots of an agent whose arena is on a device; others have none unless they ask."""


class Amount(NamedTuple):
    """So many copies, and their bytes in all."""

    num: int
    nbytes: int


# ── what is chosen by ─────────────────────────────────────────────────────────────────


def fastest(
    read_rate: float, write_rate: float, staged_rate: float
) -> Literal["read", "write", "staged"]:
    """The fastest way for long copies; the simpler one where they are about equal."""
    if staged_rate > PREFER_READ * max(read_rate, write_rate):
        return "staged"
    return "write" if write_rate > PREFER_READ * read_rate else "read"


def prefers_rows(reading: LinkSpeed, cutting: LinkSpeed, pieces: Amount, rows: Amount) -> bool:
    """Whether a consumer reads rows whole and cuts them, instead of reading every piece.

    Pieces are priced as one engine reads them. With a second one, reads are up to 1.4× as fast as
    rows, but only on processors that nobody else uses, and take more processor time in any case
    (bench/results/transfer_rows_one_host.json).
    """
    return PREFER_DIRECT * rows_seconds(reading, cutting, pieces, rows) < reading.seconds(*pieces)


def rows_seconds(reading: LinkSpeed, cutting: LinkSpeed, pieces: Amount, rows: Amount) -> float:
    """What reading rows whole and cutting them takes."""
    return reading.seconds(*rows) + cutting.seconds(*pieces)


def gathers(pieces: Amount, num_stretches: int, *, on_device: bool) -> bool:
    """Whether a producer gathers pieces that fill so many stretches, instead of writing each.

    It does so on a device only: between hosts that was 1.2× as fast at best, and half as fast at
    worst (bench/transfer_rows.py --all-ways, two busy cores).
    """
    saved = pieces.num - num_stretches
    return on_device and saved > max(LEAST_SAVED, pieces.nbytes / BYTES_PER_WRITE)


def prefers_staged(writing: LinkSpeed, staged_rate: float, writes: Amount) -> bool:
    """Whether so many writes are so slow that going through host memory is better."""
    return writing.seconds(*writes) * staged_rate > PREFER_READ * writes.nbytes


# ── counted and priced ────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class WayCounts:
    """What one source brings of a request, if none of its blocks are neighbours: pieces, the
    stretches of the destination that they fill, the rows that they lie in."""

    pieces: Amount
    num_stretches: int
    rows: Amount
    num_slots: int
    """Staging slots that the pieces fill."""

    def writes(self, *, on_device: bool) -> Amount:
        """What a producer writes: stretches where it gathers, pieces otherwise."""
        is_gathered = gathers(self.pieces, self.num_stretches, on_device=on_device)
        return self.pieces._replace(num=self.num_stretches) if is_gathered else self.pieces


def counted(route: Route, num_tokens: int) -> WayCounts:
    """What a route brings of a request of so many tokens."""
    pieces = stretches = nbytes = rows = row_bytes = longest = 0
    for placed, cost in zip(route.destination.groups, _block_prices(route), strict=True):
        blocks = placed.group.rows_needed(num_tokens)
        pieces += ceil(cost.copies * blocks)
        nbytes += ceil(cost.nbytes * blocks)
        stretches += ceil(cost.stretches * blocks)
        rows += ceil(cost.reads * blocks)
        row_bytes += ceil(cost.read_bytes * blocks)
        longest = max(longest, cost.max_copy_bytes)
    return WayCounts(
        pieces=Amount(pieces, nbytes),
        num_stretches=stretches,
        rows=Amount(rows, row_bytes),
        num_slots=-(-nbytes // _filled(longest)),
    )


@lru_cache(maxsize=64)
def _block_prices(route: Route) -> tuple[Price, ...]:
    """The price of one block of each destination group; kept, because agents ask for every pull."""
    return tuple(
        price(pair for pair in route.pairs if pair.groups[1] == g)
        for g in range(len(route.destination.groups))
    )


def _filled(longest: int) -> int:
    """Bytes of a staging slot that pieces of this length fill; longer ones are cut."""
    slot = DEVICE_SLOT_BYTES
    return slot // longest * longest if 0 < longest < slot else slot


@dataclass(frozen=True, slots=True, kw_only=True)
class WayPrices:
    """What the ways between two agents cost. `staged_rate` is 0 where both sides' rows are in host
    memory: nothing to gain."""

    reading: LinkSpeed
    writing: LinkSpeed
    cutting: LinkSpeed
    staged_rate: float
    on_device: bool

    @staticmethod
    def assumed(link: LinkSpeed, memory: LinkSpeed, *, on_device: bool) -> "WayPrices":
        """Prices for rows in such memory on both sides.

        A link reads and writes alike, but for nvlink: on one H200 only writes have a direct path
        (bench/results/transfer_gpu.json), and host memory is on another link.
        """
        reading, hosts = link, link
        if on_device and link.name == "nvlink":
            reading = replace(link, bytes_per_second=2.3e9)
            hosts = next(known for known in LINKS if known.name == "shm")
        return WayPrices(
            reading=reading,
            writing=link,
            cutting=memory,
            staged_rate=STAGED_SHARE * hosts.bytes_per_second if on_device else 0.0,
            on_device=on_device,
        )

    def seconds(self, way: WayName, counts: WayCounts) -> float | None:
        """What a way takes; None for one that no agent takes with rows in such memory."""
        pieces = counts.pieces
        match way:
            case "direct":
                return min(self.reading.seconds(*pieces), self.writing.seconds(*pieces))
            case "rows":
                return rows_seconds(self.reading, self.cutting, pieces, counts.rows)
            case "gathered":
                writing = self.writing.seconds(counts.num_stretches, pieces.nbytes)
                return writing + pieces.nbytes / GATHER_RATE if self.on_device else None
            case "staged":
                return pieces.nbytes / self.staged_rate if self.staged_rate else None


# ── chosen ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The way that an agent takes, which direction its `Stats` call that, and why."""

    way: WayName
    direction: Way
    why: str


def chosen(counts: WayCounts, prices: WayPrices, *, is_same_layout: bool) -> Choice:
    """What an agent does at these prices. Between equal layouts it does not ask what a single
    write costs."""
    rates = prices.reading.bytes_per_second, prices.writing.bytes_per_second, prices.staged_rate
    match fastest(*rates):
        case "read":
            return _read(counts, prices)
        case "write":
            return _written(counts, prices, is_same_layout=is_same_layout)
        case "staged":
            times = prices.staged_rate / max(rates[:2])
            why = f"{times:.1f}× as fast as what has to do without a direct path"
            return Choice(way="staged", direction="staged", why=why)


def _read(counts: WayCounts, prices: WayPrices) -> Choice:
    pieces, rows = counts.pieces, counts.rows
    if rows.num == pieces.num:
        return Choice(way="direct", direction="read", why="each row is one read as it is")
    how = prices.reading, prices.cutting, pieces, rows
    cheaper = prices.reading.seconds(*pieces) / rows_seconds(*how)
    if prefers_rows(*how):
        return Choice(way="rows", direction="rows", why=f"{cheaper:.1f}× cheaper than direct reads")
    why = f"rows would be {cheaper:.2f}× cheaper, and have to be {PREFER_DIRECT:g}×"
    if cheaper < 1:
        why = f"rows would cost {1 / cheaper:.1f}× as much"
    return Choice(way="direct", direction="read", why=why)


def _written(counts: WayCounts, prices: WayPrices, *, is_same_layout: bool) -> Choice:
    pieces, writes = counts.pieces, counts.writes(on_device=prices.on_device)
    why = "writes are faster than reads on this link"
    if not is_same_layout and prefers_staged(prices.writing, prices.staged_rate, writes):
        cheaper = prices.writing.seconds(*writes) * prices.staged_rate / writes.nbytes
        why += f", but so many that this is {cheaper:.1f}× cheaper"
        return Choice(way="staged", direction="staged", why=why)
    if writes.num < pieces.num:
        why += f", and {pieces.num / writes.num:,.0f} pieces fill one stretch"
        return Choice(way="gathered", direction="write", why=why)
    return Choice(way="direct", direction="write", why=why)
