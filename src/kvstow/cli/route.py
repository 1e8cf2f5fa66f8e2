"""`kvstow route`: what moving blocks from one layout to another costs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain
from math import ceil
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from kvstow.cli import options
from kvstow.cli.options import Named
from kvstow.cli.output import reporting, wrapped, write_file
from kvstow.plan.layout import ORDERS, Layout, Order
from kvstow.plan.sizing.reports import plain
from kvstow.text import human, table

if TYPE_CHECKING:
    from kvstow.route.price import Link, Price, RequestPrice
    from kvstow.route.route import Claims, Route

WAYS = {
    "mapped": "each copied out of memory of the same node",
    "direct": "each move a read or a write of its own",
    "slots": "gathered into slots, which travel whole",
}
CHANGES = {"from": "another order in FROM", "to": "another order in TO", "both": "one in both"}
"""The sides whose order may change."""

SPEC_HELP = "A manifest, or MODEL@tp=2,pp=1,rank=0,order=BHLNC,block_tokens=64,packing=slab."

From = Annotated[str, typer.Argument(metavar="FROM", help=SPEC_HELP)]
To = Annotated[str, typer.Argument(metavar="TO", help="Likewise; rank 0 unless rank= is given.")]
LinkName = Annotated[
    str,
    typer.Option(
        help="What the bytes travel on. One node: gpu (one GPU), nvlink, pcie4, pcie5, shm (host "
        "memory). A network: ib200, ib400, ib800, tcp10, tcp25, tcp100, or GB_PER_S:MICROS, the "
        "time per copy."
    ),
]
NumTokens = Annotated[int, typer.Option(min=1, help="Request length in tokens.")]


# ── the report ────────────────────────────────────────────────────────────────────────


class RankRoute(NamedTuple):
    """One source rank's part: which of the layouts, the route, and what it is limited to."""

    place: int
    route: "Route"
    claims: "Claims | None"


class OtherOrders(NamedTuple):
    """The quickest pair of orders where one side's order may change, or both."""

    change: str
    orders: tuple[Order, Order]
    price: "RequestPrice"


@dataclass(frozen=True, kw_only=True)
class RouteReport:
    """What moving a request costs: by group, by source rank, by way, and in other orders."""

    source: Named
    destination: Named
    routes: Sequence[RankRoute]
    link: "Link"
    tokens: int

    @property
    def layout(self) -> Layout:
        """The destination's."""
        return self.destination.layouts[0]

    @property
    def orders(self) -> tuple[Order, Order]:
        return self.source.layouts[0].order, self.layout.order

    @cached_property
    def groups(self) -> "list[Price]":
        """Of one block of each destination group, from all sources."""
        from kvstow.route.price import price

        pairs = [pair for each in self.routes for pair in each.route.pairs]
        return [
            price(pair for pair in pairs if pair.groups[1] == g)
            for g in range(len(self.layout.groups))
        ]

    @cached_property
    def prices(self) -> "list[RequestPrice]":
        """Of the request, by source rank."""
        return self._priced([each.route for each in self.routes])

    def _priced(self, routes: "Sequence[Route]") -> "list[RequestPrice]":
        from kvstow.route.price import RequestPrice

        return [RequestPrice.of(route, self.tokens, self.link) for route in routes]

    @cached_property
    def total(self) -> "RequestPrice":
        from kvstow.route.price import RequestPrice

        return RequestPrice.total(self.prices)

    @cached_property
    def cheapest(self) -> list[OtherOrders]:
        """The quickest orders by the way that an agent takes; those that there are, where none is
        quicker."""
        present = self.orders
        pairs: dict[str, list[tuple[Order, Order]]] = {
            "from": [(order, present[1]) for order in ORDERS],
            "to": [(present[0], order) for order in ORDERS],
            "both": [(order, order) for order in ORDERS],
        }
        prices = {pair: self._reordered(*pair) for pair in {present, *chain(*pairs.values())}}
        best = {
            change: min((present, *some), key=lambda pair: prices[pair].seconds)
            for change, some in pairs.items()
        }
        return [OtherOrders(change, pair, prices[pair]) for change, pair in best.items()]

    def _reordered(self, here: Order, there: Order) -> "RequestPrice":
        """What it costs when the same parts come from the same ranks in other orders."""
        from kvstow.route.price import RequestPrice
        from kvstow.route.route import plan_route

        layouts, (destination,) = self.source.reordered(here), self.destination.reordered(there)
        routes = [
            plan_route(layouts[each.place], destination, claims=each.claims) for each in self.routes
        ]
        return RequestPrice.total(self._priced(routes))

    # ── JSON ──────────────────────────────────────────────────────────────────────

    def as_json(self) -> dict[str, Any]:
        link, total = self.link, self.total
        sizes = [group for group in self.groups if group.lanes]
        return {
            "model": self.layout.model,
            "from": self.source.text,
            "to": self.destination.text,
            "orders": list(self.orders),
            "lanes": sum(group.lanes for group in self.groups),
            "moves_per_block": _number(total.copies_per_block),
            "bytes_per_block": _number(total.bytes_per_block),
            "min_move_bytes": min((group.min_copy_bytes for group in sizes), default=0),
            "max_move_bytes": max((group.max_copy_bytes for group in sizes), default=0),
            "groups": [self._group(g) for g in range(len(self.groups))],
            "sources": [
                self._source(each, price)
                for each, price in zip(self.routes, self.prices, strict=True)
            ],
            "request": {"tokens": self.tokens, "moves": total.copies, "bytes": total.nbytes},
            "link": {
                "name": link.name,
                "bytes_per_second": link.bytes_per_second,
                "seconds_per_move": link.seconds_per_copy,
                "is_one_node": link.is_one_node,
            },
            "ways": total.ways,
            "way": total.way,
            "seconds": total.seconds,
            "cheapest": [
                {
                    "change": change,
                    "orders": list(orders),
                    "moves_per_block": _number(price.copies_per_block),
                    "request_moves": price.copies,
                    "way": price.way,
                    "seconds": price.seconds,
                    "saved_seconds": total.seconds - price.seconds,
                }
                for change, orders, price in self.cheapest
            ],
        }

    def _group(self, g: int) -> dict[str, Any]:
        group, block = self.layout.groups[g].group, self.groups[g]
        count = group.rows_needed(self.tokens)
        return {
            "name": group.name,
            "block_tokens": group.block_tokens,
            "source_block_tokens": self._source_tokens(g),
            "lanes": block.lanes,
            "moves_per_block": _number(block.copies),
            "bytes_per_block": _number(block.nbytes),
            "min_move_bytes": block.min_copy_bytes,
            "max_move_bytes": block.max_copy_bytes,
            "request_moves": ceil(block.copies * count),
            "request_bytes": ceil(block.nbytes * count),
        }

    def _source_tokens(self, g: int) -> list[int]:
        pairs = [pair for each in self.routes for pair in each.route.pairs if pair.groups[1] == g]
        return sorted({pair.source.block_tokens for pair in pairs})

    def _source(self, source: RankRoute, price: "RequestPrice") -> dict[str, Any]:
        layout = self.source.layouts[source.place]
        return {
            "rank": self.source.ranks[source.place],
            "tp_rank": layout.tp[0],
            "pp_rank": layout.pp[0],
            "moves_per_block": _number(price.copies_per_block),
            "bytes_per_block": _number(price.bytes_per_block),
            "way": price.way,
            "seconds": price.seconds,
        }

    # ── text ──────────────────────────────────────────────────────────────────────

    def __str__(self) -> str:
        return "\n\n".join(self._parts())

    def _parts(self) -> Iterator[str]:
        here, there = self.orders
        yield (
            f"{self.layout.model}\n{self.source.text} ({here}) → {self.destination.text} ({there})"
        )
        groups = [
            (
                rows.group.name,
                f"{'/'.join(map(str, self._source_tokens(g)))} → {rows.group.block_tokens}",
                f"{_number(block.copies):,}",
                f"{_number(block.nbytes):,}",
                f"{block.min_copy_bytes:,}",
                f"{block.max_copy_bytes:,}",
            )
            for g, (rows, block) in enumerate(zip(self.layout.groups, self.groups, strict=True))
        ]
        yield table(("group", "tokens", "moves", "bytes", "smallest", "largest"), groups)
        yield (
            "per destination block that has no neighbour of its request beside it;\n"
            "moves of neighbouring blocks are joined where both sides allow it"
        )
        sources = [
            (
                str(self.source.ranks[each.place]),
                *(str(rank[0]) for rank in (each.route.source.tp, each.route.source.pp)),
                f"{_number(price.copies_per_block):,}",
                f"{_number(price.bytes_per_block):,}",
            )
            for each, price in zip(self.routes, self.prices, strict=True)
        ]
        yield table(("from rank", "tp", "pp", "moves", "bytes"), sources)
        link, total = self.link, self.total
        yield wrapped(
            f"{self.tokens:,} tokens: {total.copies:,} moves, {human(total.nbytes)}, "
            f"about {_duration(total.seconds)} on {link.name} "
            f"({link.bytes_per_second / 1e9:g} GB/s, {link.seconds_per_copy * 1e6:g} µs per move)"
        )
        ways = [
            (f"{way} ←" if way in total.way else way, WAYS[way], _duration(seconds))
            for way, seconds in total.ways.items()
        ]
        yield table(("way", "moves are", "time"), ways, num_left=2) + "\n\n← what an agent takes"
        yield self._orders_text()

    def _orders_text(self) -> str:
        total, others = self.total, self.cheapest
        lines = [("as given", self.orders, total)]
        lines += [(CHANGES[each.change], each.orders, each.price) for each in others]
        least = min(price.seconds for *_, price in lines)
        rows = [
            (
                name,
                " → ".join(orders),
                f"{_number(price.copies_per_block):,}",
                price.way,
                f"{_duration(price.seconds)} {' ←'[price.seconds == least]}",
            )
            for name, orders, price in lines
        ]
        shown = table(("with", "orders", "moves per block", "way", "time"), rows, num_left=2)
        saved = total.seconds - least
        if not saved:
            return f"{shown}\n\n← no order is quicker than as given"
        return (
            f"{shown}\n\n← {_duration(saved)} less than as given: {saved / total.seconds:.0%} saved"
        )

    def page(self) -> str:
        """The page: every copy as a band."""
        from kvstow import __version__
        from kvstow.render.data import group_records
        from kvstow.render.page import page
        from kvstow.render.svg import layout_svg

        routes = {f"rank {self.source.ranks[each.place]}": each.route for each in self.routes}
        groups = group_records(routes, self.layout)
        data = {"kvstow": __version__, "cost": self.as_json(), "groups": groups}
        title, still = f"{self.layout.model}: route", layout_svg(self.layout)
        return page(title, data, ("route.js",), still=still)


def _number(value: Fraction) -> int | float:
    return plain(value) if value.denominator == 1 else round(float(value), 3)


def _duration(seconds: float) -> str:
    """`54.4 ms`: three digits."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


# ── the command ───────────────────────────────────────────────────────────────────────


@reporting
def route(
    source: From,
    destination: To,
    link: LinkName = "ib400",
    tokens: NumTokens = 8192,
    html: options.HtmlFile = None,
) -> RouteReport:
    """What moving blocks between two layouts costs."""
    line = _link(link)
    here, there = (
        options.named(source, one_rank=False),
        options.named(destination, one_rank=True),
    )
    report = RouteReport(
        source=here,
        destination=there,
        routes=_rank_routes(here.layouts, there.layouts[0]),
        link=line,
        tokens=tokens,
    )
    if html is not None:
        write_file(html, report.page(), "page")
    return report


def _rank_routes(layouts: Sequence[Layout], destination: Layout) -> list[RankRoute]:
    """All ranks of the source if there are several to choose from, else the one."""
    from kvstow.route.route import plan_route
    from kvstow.route.sources import sources

    if len(layouts) == 1:
        return [RankRoute(0, plan_route(layouts[0], destination), None)]
    return [
        RankRoute(each.index, each.route, each.claims) for each in sources(layouts, destination)
    ]


def _link(text: str) -> "Link":
    """A links link, or `GIGABYTES:MICROS` of a network."""
    from kvstow.route.price import LINKS, Link

    links = {link.name: link for link in LINKS}
    if text in links:
        return links[text]
    rate, _, cost = text.partition(":")
    try:
        link = Link(
            name=text, bytes_per_second=float(rate) * 1e9, seconds_per_copy=float(cost) * 1e-6
        )
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a link\n\nhint: one of {', '.join(links)}, or 12.5:5 for 12.5 GB/s "
            "and 5 µs per copy",
            param_hint="'--link'",
        ) from None
    if not (0 < link.bytes_per_second < float("inf") and 0 <= link.seconds_per_copy < 1):
        raise typer.BadParameter(
            f"{text!r}: a rate above 0 and a cost of at least 0 are needed", param_hint="'--link'"
        )
    return link
