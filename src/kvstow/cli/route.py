"""`kvstow route`: what moving blocks from one layout to another costs."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstow.cli import options
from kvstow.cli.options import Named, named
from kvstow.cli.output import (
    duration,
    emit_json,
    emit_text,
    human,
    note,
    table,
    wrapped,
    write_file,
)
from kvstow.errors import RouteError
from kvstow.plan.layout import ORDERS, Layout, Order

if TYPE_CHECKING:
    from kvstow.route.price import Link, Price, RequestPrice
    from kvstow.route.route import Claims, Route

SPEC_HELP = "A manifest, or MODEL@tp=2,pp=1,rank=0,order=BHLNC,block_tokens=64,packing=slab."

From = Annotated[str, typer.Argument(metavar="FROM", help=SPEC_HELP, show_default=False)]
To = Annotated[
    str,
    typer.Argument(
        metavar="TO", help="Likewise; rank 0 unless rank= is given.", show_default=False
    ),
]
LinkName = Annotated[
    str,
    typer.Option(
        "--link",
        help="What the bytes travel on. One node: gpu (one GPU), nvlink, pcie4, pcie5, shm (host "
        "memory). A network: ib200, ib400, ib800, tcp10, tcp25, tcp100, or GB_PER_S:MICROS, the "
        "time per copy.",
    ),
]
NumTokens = Annotated[int, typer.Option("--tokens", min=1, help="Request length in tokens.")]


def route(
    source: From,
    destination: To,
    link: LinkName = "ib400",
    tokens: NumTokens = 8192,
    html: options.HtmlFile = None,
    json: options.Json = False,
) -> None:
    """What moving blocks between two layouts costs."""
    line = link_named(link)
    here, there = named(source, one_rank=False), named(destination, one_rank=True)
    routes = _rank_routes(here.layouts, there.layouts[0])
    document = _document(here, there, routes, line, tokens)
    if html is not None:
        write_file(html, _page(document, here, there, routes))
        note(f"page written to {html}")
    if json:
        emit_json(document)
    else:
        emit_text(*_report(document))


@dataclass(frozen=True, slots=True)
class RankRoute:
    """One source rank's part: which of the layouts, the route, and what it is limited to."""

    index: int
    route: "Route"
    claims: "Claims | None"


def _rank_routes(layouts: Sequence[Layout], destination: Layout) -> tuple[RankRoute, ...]:
    """All ranks of the source if there are several to choose from, else the one."""
    from kvstow.route.route import plan_route
    from kvstow.route.sources import sources

    if len(layouts) > 1:
        try:
            found = sources(layouts, destination)
        except RouteError as error:
            raise RouteError(_said_once(error.differences)) from error
        return tuple(RankRoute(source.index, source.route, source.claims) for source in found)
    return (RankRoute(0, plan_route(layouts[0], destination), None),)


def _said_once(differences: Sequence[str]) -> tuple[str, ...]:
    """What several sources have in common, as one line."""
    ranks: dict[str, list[str]] = {}
    for text in differences:
        of_one = re.fullmatch(r"source (\d+): (.*)", text, re.DOTALL)
        if of_one is None:
            ranks[text] = []
        else:
            ranks.setdefault(of_one[2], []).append(of_one[1])
    return tuple(f"source {', '.join(of)}: {what}" if of else what for what, of in ranks.items())


def link_named(text: str) -> "Link":
    """A known link, or `GIGABYTES:MICROS` of a network."""
    from kvstow.route.price import LINKS, Link

    known = {link.name: link for link in LINKS}
    if text in known:
        return known[text]
    rate, _, cost = text.partition(":")
    try:
        link = Link(
            name=text, bytes_per_second=float(rate) * 1e9, seconds_per_copy=float(cost) * 1e-6
        )
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a link\n\nhint: one of {', '.join(known)}, or 12.5:5 for 12.5 GB/s "
            "and 5 µs per copy",
            param_hint="'--link'",
        ) from None
    if not (0 < link.bytes_per_second < float("inf") and 0 <= link.seconds_per_copy < 1):
        raise typer.BadParameter(
            f"{text!r}: a rate above 0 and a cost of at least 0 are needed", param_hint="'--link'"
        )
    return link


def _document(
    here: Named, there: Named, routes: Sequence[RankRoute], link: "Link", tokens: int
) -> dict[str, Any]:
    from kvstow.route.price import RequestPrice

    destination = there.layouts[0]
    groups = [
        _group(destination, g, [each.route for each in routes], tokens)
        for g in range(len(destination.groups))
    ]
    prices = [RequestPrice.of(each.route, tokens, link) for each in routes]
    sizes = [group for group in groups if group["lanes"]]
    return {
        "model": destination.model,
        "from": here.text,
        "to": there.text,
        "orders": [here.layouts[0].order, destination.order],
        "lanes": sum(group["lanes"] for group in groups),
        "moves_per_block": _number(sum(Fraction(group["moves_per_block"]) for group in groups)),
        "bytes_per_block": _number(sum(Fraction(group["bytes_per_block"]) for group in groups)),
        "min_move_bytes": min((group["min_move_bytes"] for group in sizes), default=0),
        "max_move_bytes": max((group["max_move_bytes"] for group in sizes), default=0),
        "groups": groups,
        "sources": [
            _source(here, destination, each, price)
            for each, price in zip(routes, prices, strict=True)
        ],
        "request": {
            "tokens": tokens,
            "moves": sum(price.copies for price in prices),
            "bytes": sum(price.nbytes for price in prices),
        },
        "link": {
            "name": link.name,
            "bytes_per_second": link.bytes_per_second,
            "seconds_per_move": link.seconds_per_copy,
            "is_one_node": link.is_one_node,
        },
        "ways": _ways(prices, link),
        **_taken(prices),
        "cheapest": cheapest(here, there, routes, link, tokens),
    }


def _ways(prices: "Sequence[RequestPrice]", link: "Link") -> dict[str, float]:
    """Seconds of each way that the link has."""
    by_rank = [link.ways(price.copies, price.nbytes) for price in prices]
    return {way: sum(ways[way] for ways in by_rank) for way in by_rank[0]}


def _taken(prices: "Sequence[RequestPrice]") -> dict[str, Any]:
    """The way or ways that an agent takes, and their time in all."""
    way = " and ".join(sorted({price.way for price in prices}))
    return {"way": way, "seconds": sum(price.seconds for price in prices)}


def _group(layout: Layout, group: int, routes: "Sequence[Route]", tokens: int) -> dict[str, Any]:
    """One destination group, from all its sources."""
    from kvstow.route.price import price

    its = layout.groups[group].group
    cost = price(c for way in routes for c in way.pairs if c.groups[1] == group)
    blocks = its.rows_needed(tokens)
    return {
        "name": its.name,
        "block_tokens": its.block_tokens,
        "source_block_tokens": sorted(
            {c.source.block_tokens for way in routes for c in way.pairs if c.groups[1] == group}
        ),
        **_figures(cost),
        "request_moves": ceil(cost.copies * blocks),
        "request_bytes": ceil(cost.nbytes * blocks),
    }


def _figures(cost: "Price") -> dict[str, Any]:
    return {
        "lanes": cost.lanes,
        "moves_per_block": _number(cost.copies),
        "bytes_per_block": _number(cost.nbytes),
        "min_move_bytes": cost.min_copy_bytes,
        "max_move_bytes": cost.max_copy_bytes,
    }


def _number(value: Fraction | int) -> int | float:
    return int(value) if Fraction(value).denominator == 1 else round(float(value), 3)


def _source(
    here: Named, destination: Layout, source: RankRoute, cost: "RequestPrice"
) -> dict[str, Any]:
    from kvstow.route.price import price

    layout = here.layouts[source.index]
    costs = [
        price([c for c in source.route.pairs if c.groups[1] == group])
        for group in range(len(destination.groups))
    ]
    return {
        "rank": here.ranks[source.index],
        "tp_rank": layout.tp[0],
        "pp_rank": layout.pp[0],
        "moves_per_block": _number(sum((each.copies for each in costs), Fraction(0))),
        "bytes_per_block": _number(sum((each.nbytes for each in costs), Fraction(0))),
        "way": cost.way,
        "seconds": cost.seconds,
    }


def _page(document: dict[str, Any], here: Named, there: Named, found: Sequence[RankRoute]) -> str:
    from kvstow import __version__
    from kvstow.render.data import NamedRoute, group_records
    from kvstow.render.page import page
    from kvstow.render.svg import layout_svg

    routes = [
        NamedRoute(name=f"rank {here.ranks[source.index]}", route=source.route) for source in found
    ]
    destination = there.layouts[0]
    groups = group_records(routes, destination)
    return page(
        f"{document['model']}: route",
        {"kvstow": __version__, "cost": document, "groups": groups},
        ("route.js",),
        still=layout_svg(destination),
    )


# ── other orders ──────────────────────────────────────────────────────────────────────


def cheapest(
    here: Named, there: Named, routes: Sequence[RankRoute], link: "Link", tokens: int
) -> list[dict[str, Any]]:
    """The quickest order for the source, the destination, or both, by the way that an agent takes.

    Where none is quicker than the orders as they are, it is these.
    """
    ours, theirs = ({order: side.reordered(order) for order in ORDERS} for side in (here, there))
    present = here.layouts[0].order, there.layouts[0].order
    changes: tuple[tuple[str, list[tuple[Order, Order]]], ...] = (
        ("from", [(order, present[1]) for order in ORDERS]),
        ("to", [(present[0], order) for order in ORDERS]),
        ("both", [(order, order) for order in ORDERS]),
    )
    prices = {
        pair: _reordered(ours[pair[0]], theirs[pair[1]][0], routes, link, tokens)
        for pair in {present, *(pair for _, pairs in changes for pair in pairs)}
    }
    seconds = {pair: price["seconds"] for pair, price in prices.items()}
    best = {change: min((present, *pairs), key=seconds.__getitem__) for change, pairs in changes}
    return [
        {
            "change": change,
            "orders": list(pair),
            **prices[pair],
            "saved_seconds": seconds[present] - seconds[pair],
        }
        for change, pair in best.items()
    ]


def _reordered(
    layouts: Sequence[Layout],
    destination: Layout,
    routes: Sequence[RankRoute],
    link: "Link",
    tokens: int,
) -> dict[str, Any]:
    """What a request costs when the same parts come from the same ranks in other orders."""
    from kvstow.route.price import RequestPrice, price
    from kvstow.route.route import plan_route

    ways = [plan_route(layouts[each.index], destination, claims=each.claims) for each in routes]
    prices = [RequestPrice.of(way, tokens, link) for way in ways]
    by_group = (
        price(pair for way in ways for pair in way.pairs if pair.groups[1] == g).copies
        for g in range(len(destination.groups))
    )
    return {
        "moves_per_block": _number(sum(by_group, Fraction(0))),
        "request_moves": sum(each.copies for each in prices),
        **_taken(prices),
    }


# ── text ──────────────────────────────────────────────────────────────────────────────


def _report(document: dict[str, Any]) -> list[str]:
    orders = document["orders"]
    heading = (
        f"{document['model']}\n{document['from']} ({orders[0]}) → {document['to']} ({orders[1]})"
    )
    columns = ("group", "tokens", "moves", "bytes", "smallest", "largest")
    groups = [
        (
            group["name"],
            f"{'/'.join(map(str, group['source_block_tokens']))} → {group['block_tokens']}",
            f"{group['moves_per_block']:,}",
            f"{group['bytes_per_block']:,}",
            f"{group['min_move_bytes']:,}",
            f"{group['max_move_bytes']:,}",
        )
        for group in document["groups"]
    ]
    return [
        heading,
        table(columns, groups),
        "per destination block that has no neighbour of its request beside it;\n"
        "moves of neighbouring blocks are joined where both sides allow it",
        _sources_text(document["sources"]),
        _time_text(document),
        _ways_text(document),
        _orders_text(document),
    ]


def _sources_text(sources: list[dict[str, Any]]) -> str:
    rows = [
        (
            str(source["rank"]),
            str(source["tp_rank"]),
            str(source["pp_rank"]),
            f"{source['moves_per_block']:,}",
            f"{source['bytes_per_block']:,}",
        )
        for source in sources
    ]
    return table(("from rank", "tp", "pp", "moves", "bytes"), rows)


def _time_text(document: dict[str, Any]) -> str:
    link, request = document["link"], document["request"]
    return wrapped(
        f"{request['tokens']:,} tokens: {request['moves']:,} moves, {human(request['bytes'])}, "
        f"about {duration(document['seconds'])} on {link['name']} "
        f"({link['bytes_per_second'] / 1e9:g} GB/s, {link['seconds_per_move'] * 1e6:g} µs per move)"
    )


WAYS = {
    "mapped": "each copied out of memory of the same node",
    "direct": "each move a read or a write of its own",
    "slots": "gathered into slots, which travel whole",
}


def _ways_text(document: dict[str, Any]) -> str:
    taken = document["way"].split(" and ")
    rows = [
        (f"{way} ←" if way in taken else way, WAYS[way], duration(seconds))
        for way, seconds in document["ways"].items()
    ]
    return table(("way", "moves are", "time"), rows, num_left=2) + "\n\n← what an agent takes"


def _orders_text(document: dict[str, Any]) -> str:
    present = document["seconds"]
    least = min(document["cheapest"], key=lambda best: best["seconds"])
    names = {"from": "another order in FROM", "to": "another order in TO", "both": "one in both"}
    lines = [
        ("as given", document),
        *((names[best["change"]], best) for best in document["cheapest"]),
    ]
    is_quicker = least["seconds"] < present
    marked = min(least["seconds"], present)
    rows = [
        (
            name,
            " → ".join(line["orders"]),
            f"{line['moves_per_block']:,}",
            line["way"],
            f"{duration(line['seconds'])} {'←' if line['seconds'] == marked else ' '}",
        )
        for name, line in lines
    ]
    shown = table(("with", "orders", "moves per block", "way", "time"), rows, num_left=2)
    if not is_quicker:
        return f"{shown}\n\n← no order is quicker than as given"
    saved = least["saved_seconds"]
    return f"{shown}\n\n← {duration(saved)} less than as given: {saved / present:.0%} saved"
