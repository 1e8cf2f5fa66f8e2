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
from kvstow.cli.route_ways import link_named, prices_named, ways_document, ways_text
from kvstow.errors import RouteError
from kvstow.plan.layout import ORDERS, Layout, Order

if TYPE_CHECKING:
    from kvstow.route.price import LinkSpeed, Price
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
        help="What the bytes travel on: pcie4, pcie5, nvlink, shm (one host), ib200, ib400, ib800, "
        "tcp10, tcp25, tcp100, or GB_PER_S:MICROS, the time per copy.",
    ),
]
MemoryName = Annotated[
    str,
    typer.Option(
        "--rows-in",
        help="Memory that holds the rows of both sides: device or host; append :GB_PER_S:MICROS "
        "to set its copy speed.",
    ),
]
NumTokens = Annotated[int, typer.Option("--tokens", min=1, help="Request length in tokens.")]


def route(
    source: From,
    destination: To,
    link: LinkName = "ib400",
    memory: MemoryName = "device",
    tokens: NumTokens = 8192,
    html: options.HtmlFile = None,
    json: options.Json = False,
) -> None:
    """What moving blocks between two layouts costs."""
    way, prices = link_named(link), prices_named(link, memory)
    here, there = named(source, one_rank=False), named(destination, one_rank=True)
    found = _rank_routes(here.layouts, there.layouts[0])
    document = _document(here, there, found, way, tokens)
    by_rank = {here.ranks[each.index]: each.route for each in found}
    document["ways"] = ways_document(by_rank, tokens, prices)
    if html is not None:
        write_file(html, _page(document, here, there, found))
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
    from kvstow.route.route import route as route_between
    from kvstow.route.sources import sources

    if len(layouts) > 1:
        try:
            found = sources(layouts, destination)
        except RouteError as error:
            raise RouteError(_said_once(error.differences)) from error
        return tuple(RankRoute(source.index, source.route, source.claims) for source in found)
    return (RankRoute(0, route_between(layouts[0], destination), None),)


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


def _document(
    here: Named, there: Named, found: Sequence[RankRoute], link: "LinkSpeed", tokens: int
) -> dict[str, Any]:
    destination = there.layouts[0]
    routes = [source.route for source in found]
    groups = [_group(destination, g, routes, tokens) for g in range(len(destination.groups))]
    moves = sum(group["request_moves"] for group in groups)
    nbytes = sum(group["request_bytes"] for group in groups)
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
        "sources": [_source(here, destination, source) for source in found],
        "request": {"tokens": tokens, "moves": moves, "bytes": nbytes},
        "link": {
            "name": link.name,
            "bytes_per_second": link.bytes_per_second,
            "seconds_per_move": link.seconds_per_copy,
            "seconds": link.seconds(moves, nbytes),
            "seconds_of_copies": moves * link.seconds_per_copy,
        },
        "cheapest": [
            best
            | {
                "seconds": link.seconds(best["request_moves"], nbytes),
                "saved_seconds": (moves - best["request_moves"]) * link.seconds_per_copy,
            }
            for best in cheapest(here, there, found, tokens)
        ],
    }


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
        "rows": {
            "reads_per_block": _number(cost.reads),
            "bytes_per_block": _number(cost.read_bytes),
            "request_reads": ceil(cost.reads * blocks),
            "request_bytes": ceil(cost.read_bytes * blocks),
        },
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


def _source(here: Named, destination: Layout, source: RankRoute) -> dict[str, Any]:
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
        "moves_per_block": _number(sum((cost.copies for cost in costs), Fraction(0))),
        "bytes_per_block": _number(sum((cost.nbytes for cost in costs), Fraction(0))),
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
    here: Named, there: Named, found: Sequence[RankRoute], tokens: int
) -> list[dict[str, Any]]:
    """The order with the fewest moves per block for the source, the destination, or both."""
    ours, theirs = ({order: side.reordered(order) for order in ORDERS} for side in (here, there))
    mine, yours = here.layouts[0].order, there.layouts[0].order
    changes: tuple[tuple[str, list[tuple[Order, Order]]], ...] = (
        ("from", [(order, yours) for order in ORDERS]),
        ("to", [(mine, order) for order in ORDERS]),
        ("both", [(order, order) for order in ORDERS]),
    )
    best: list[dict[str, Any]] = []
    for change, pairs in changes:
        costs = {pair: _moves(ours[pair[0]], theirs[pair[1]][0], found, tokens) for pair in pairs}
        (one, other), (moves, of_request) = min(
            costs.items(), key=lambda item: (item[1], item[0] != (mine, yours))
        )
        best.append(
            {
                "change": change,
                "orders": [one, other],
                "moves_per_block": _number(moves),
                "request_moves": of_request,
            }
        )
    return best


def _moves(
    layouts: Sequence[Layout], destination: Layout, found: Sequence[RankRoute], tokens: int
) -> tuple[Fraction, int]:
    """Moves per block, and of a request, when the same parts come from the same ranks."""
    from kvstow.route.price import price
    from kvstow.route.route import route as route_between

    ways = [
        route_between(layouts[source.index], destination, claims=source.claims) for source in found
    ]
    total, of_request = Fraction(0), 0
    for group, rows in enumerate(destination.groups):
        copies = price([c for way in ways for c in way.pairs if c.groups[1] == group]).copies
        total += copies
        blocks = rows.group.rows_needed(tokens)
        of_request += ceil(copies * blocks)
    return total, of_request


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
        ways_text(document["ways"]),
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
    part = link["seconds_of_copies"] / link["seconds"] if link["seconds"] else 0.0
    return wrapped(
        f"{request['tokens']:,} tokens: {request['moves']:,} moves, {human(request['bytes'])}, "
        f"about {duration(link['seconds'])} on {link['name']} "
        f"({link['bytes_per_second'] / 1e9:g} GB/s, {link['seconds_per_move'] * 1e6:g} µs per "
        f"move: {part:.0%} of the time)"
    )


def _orders_text(document: dict[str, Any]) -> str:
    named = {"from": "another order in FROM", "to": "another order in TO", "both": "one in both"}
    given = document["link"]["seconds"]
    least = min((given, *(best["seconds"] for best in document["cheapest"])))
    rows = [_order_row("as given", document, given, least)]
    rows += [
        _order_row(named[best["change"]], best, best["seconds"], least)
        for best in document["cheapest"]
    ]
    saved = given - least
    words = (
        f"← {duration(saved)} less than as given: {saved / given:.0%} saved" if saved > 0 else ""
    )
    shown = table(("cheapest with", "orders", "moves per block", "time"), rows, num_left=2)
    return f"{shown}\n\n{words}" if words else shown


def _order_row(name: str, line: dict[str, Any], seconds: float, least: float) -> tuple[str, ...]:
    mark = "←" if seconds == least else " "
    orders = " → ".join(line["orders"])
    return (name, orders, f"{line['moves_per_block']:,}", f"{duration(seconds)} {mark}")
