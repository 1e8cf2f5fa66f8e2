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
from kvstow.cli.output import refuse, reporting, wrapped, write_file
from kvstow.plan.layout import ORDERS, Layout, Order
from kvstow.plan.sizing.reports import plain
from kvstow.text import human, table

if TYPE_CHECKING:
    from kvstow.route.price import Link, RequestPrice
    from kvstow.route.route import Claims, Route

WAYS = {
    "mapped": "each copied out of memory of the same node",
    "direct": "each move a read or a write of its own",
    "slots": "gathered into slots, which travel whole",
}
CHANGES = {
    "from": "another order in FROM",
    "to": "another order in TO",
    "both": "same order in both",
}
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

    def as_json(self) -> dict[str, Any]:
        return self._facts

    @cached_property
    def _facts(self) -> dict[str, Any]:
        from kvstow.route.price import RequestPrice

        link, prices = self.link, self._priced([each.route for each in self.routes])
        total, groups = RequestPrice.total(prices), self._groups()
        orders = self.source.layouts[0].order, self.layout.order
        sizes = [group for group in groups if group["lanes"]]
        return {
            "model": self.layout.model,
            "from": self.source.text,
            "to": self.destination.text,
            "orders": list(orders),
            "lanes": sum(group["lanes"] for group in groups),
            "moves_per_block": _number(total.copies_per_block),
            "bytes_per_block": _number(total.bytes_per_block),
            "min_move_bytes": min((group["min_move_bytes"] for group in sizes), default=0),
            "max_move_bytes": max((group["max_move_bytes"] for group in sizes), default=0),
            "groups": groups,
            "sources": [
                {
                    "rank": self.source.ranks[each.place],
                    "tp_rank": each.route.source.tp[0],
                    "pp_rank": each.route.source.pp[0],
                    "moves_per_block": _number(price.copies_per_block),
                    "bytes_per_block": _number(price.bytes_per_block),
                    "way": price.way,
                    "seconds": price.seconds,
                }
                for each, price in zip(self.routes, prices, strict=True)
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
                    "orders": list(pair),
                    "moves_per_block": _number(price.copies_per_block),
                    "request_moves": price.copies,
                    "way": price.way,
                    "seconds": price.seconds,
                    "saved_seconds": total.seconds - price.seconds,
                }
                for change, pair, price in self._cheapest(orders)
            ],
        }

    def _groups(self) -> list[dict[str, Any]]:
        """One block of each destination group, from all sources."""
        from kvstow.route.price import price

        records: list[dict[str, Any]] = []
        for g, placed in enumerate(self.layout.groups):
            pairs = [pair for each in self.routes for pair in each.route.pairs]
            pairs = [pair for pair in pairs if pair.groups[1] == g]
            block, count = price(pairs), placed.group.rows_needed(self.tokens)
            records.append(
                {
                    "name": placed.group.name,
                    "block_tokens": placed.group.block_tokens,
                    "source_block_tokens": sorted({pair.source.block_tokens for pair in pairs}),
                    "lanes": block.lanes,
                    "moves_per_block": _number(block.copies),
                    "bytes_per_block": _number(block.nbytes),
                    "min_move_bytes": block.min_copy_bytes,
                    "max_move_bytes": block.max_copy_bytes,
                    "request_moves": ceil(block.copies * count),
                    "request_bytes": ceil(block.nbytes * count),
                }
            )
        return records

    def _priced(self, routes: "Sequence[Route]") -> "list[RequestPrice]":
        """The request, by source rank."""
        from kvstow.route.price import RequestPrice

        return [RequestPrice.of(route, self.tokens, self.link) for route in routes]

    def _cheapest(
        self, present: tuple[Order, Order]
    ) -> "Iterator[tuple[str, tuple[Order, Order], RequestPrice]]":
        """The quickest orders by the way that an agent takes, where one side's may change, or both;
        the present ones, where none is quicker. Orders of more moves are no advice: slots hide what
        gathering them costs."""
        changes: dict[str, list[tuple[Order, Order]]] = {
            "from": [(order, present[1]) for order in ORDERS],
            "to": [(present[0], order) for order in ORDERS],
            "both": [(order, order) for order in ORDERS],
        }
        prices = {pair: self._reordered(*pair) for pair in {present, *chain(*changes.values())}}
        for change, pairs in changes.items():
            fewer = [pair for pair in pairs if prices[pair].copies <= prices[present].copies]
            best = min((present, *fewer), key=lambda pair: prices[pair].seconds)
            yield change, best, prices[best]

    def _reordered(self, here: Order, there: Order) -> "RequestPrice":
        """What it costs when the same parts come from the same ranks in other orders."""
        from kvstow.route.price import RequestPrice
        from kvstow.route.route import plan_route

        layouts, (destination,) = self.source.reordered(here), self.destination.reordered(there)
        routes = [
            plan_route(layouts[each.place], destination, claims=each.claims) for each in self.routes
        ]
        return RequestPrice.total(self._priced(routes))

    # ── text ──────────────────────────────────────────────────────────────────────

    def __str__(self) -> str:
        return "\n\n".join(self._parts())

    def _parts(self) -> Iterator[str]:
        facts, link, request = self._facts, self.link, self._facts["request"]
        here, there = facts["orders"]
        yield f"{facts['model']}\n{facts['from']} ({here}) → {facts['to']} ({there})"
        numbers = "moves_per_block", "bytes_per_block", "min_move_bytes", "max_move_bytes"
        groups = [
            (
                group["name"],
                f"{'/'.join(map(str, group['source_block_tokens']))} → {group['block_tokens']}",
                *(f"{group[name]:,}" for name in numbers),
            )
            for group in facts["groups"]
        ]
        yield table(("group", "tokens", "moves", "bytes", "smallest", "largest"), groups)
        yield (
            "per destination block, assuming scattered blocks;\n"
            "moves of neighbouring blocks are joined where both sides allow it"
        )
        columns = "rank", "tp_rank", "pp_rank", "moves_per_block", "bytes_per_block"
        sources = [[f"{source[name]:,}" for name in columns] for source in facts["sources"]]
        yield table(("from rank", "tp", "pp", "moves", "bytes"), sources)
        yield wrapped(
            f"{self.tokens:,} tokens: {request['moves']:,} moves, {human(request['bytes'])}, "
            f"about {_duration(facts['seconds'])} on {link.name} "
            f"({link.bytes_per_second / 1e9:g} GB/s, {link.seconds_per_copy * 1e6:g} µs per move)"
        )
        ways = [
            (f"{way} ←" if way in facts["way"] else way, WAYS[way], _duration(seconds))
            for way, seconds in facts["ways"].items()
        ]
        yield table(("way", "moves are", "time"), ways, num_left=2) + "\n\n← what an agent takes"
        yield self._orders_text()

    def _orders_text(self) -> str:
        facts, present = self._facts, self._facts["seconds"]
        lines = [("as given", facts)]
        lines += [(CHANGES[each["change"]], each) for each in facts["cheapest"]]
        least = min(each["seconds"] for _, each in lines)
        rows = [
            (
                name,
                " → ".join(each["orders"]),
                f"{each['moves_per_block']:,}",
                each["way"],
                f"{_duration(each['seconds'])} {' ←'[each['seconds'] == least]}",
            )
            if each is facts or each["orders"] != facts["orders"]
            else (name, "no better order", "", "", "")
            for name, each in lines
        ]
        shown = table(("with", "orders", "moves per block", "way", "time"), rows, num_left=2)
        if least == present:
            return f"{shown}\n\n← no order is quicker than as given"
        saved = present - least
        return f"{shown}\n\n← {_duration(saved)} less than as given: {saved / present:.0%} saved"

    def page(self) -> str:
        """The page: every copy as a band."""
        from kvstow import __version__
        from kvstow.render.data import group_records
        from kvstow.render.page import page
        from kvstow.render.text import slab_picture

        routes = {f"rank {self.source.ranks[each.place]}": each.route for each in self.routes}
        groups = group_records(routes, self.layout)
        data = {"kvstow": __version__, "cost": self._facts, "groups": groups}
        title, still = f"{self.layout.model}: route", slab_picture(self.layout)
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
    """Price moving blocks between two layouts."""
    line = _link(link)
    here = options.named(source, one_rank=False)
    there = options.named(destination, one_rank=True)
    models = here.layouts[0].model, there.layouts[0].model
    if models[0] != models[1]:
        refuse(f"FROM is {models[0]}, TO is {models[1]}: only blocks of the same model can move")
    routes = _rank_routes(here.layouts, there.layouts[0])
    report = RouteReport(source=here, destination=there, routes=routes, link=line, tokens=tokens)
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
