"""The ways of `kvstow route`: what each would take, and which one an agent takes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from kvstow.cli.output import duration, human, table, wrapped

if TYPE_CHECKING:
    from kvstow.route.price import LinkSpeed
    from kvstow.route.route import Route
    from kvstow.route.ways import Amount, Choice, Way, WayCounts, WayName, WayPrices


# ── what users write ──────────────────────────────────────────────────────────────────


def link_named(text: str) -> "LinkSpeed":
    """A known link, or `GIGABYTES:MICROS`."""
    from kvstow.route.price import LINKS

    known = {link.name: link for link in LINKS}
    hint = f"one of {', '.join(known)}, or 12.5:5 for 12.5 GB/s and 5 µs per copy"
    return known.get(text) or _speed(text, f"{text!r} is not a link\n\nhint: {hint}", "--link")


def prices_named(link: str, memory: str) -> "WayPrices":
    """Prices for rows in `device` or `host` memory, which may have a price of its own:
    `host:GIGABYTES:MICROS`. Without its name, that is the price of a device."""
    from kvstow.route.price import MEMORIES
    from kvstow.route.ways import WayPrices

    known = {speed.name: speed for speed in MEMORIES}
    name, _, price = memory.partition(":")
    if name not in known:
        name, price = "device", memory
    hint = "device, host, or host:12.5:5 for 12.5 GB/s and 5 µs per copy"
    wrong = f"{memory!r} is not a kind of memory\n\nhint: {hint}"
    speed = replace(_speed(price, wrong, "--rows-in"), name=memory) if price else known[name]
    return WayPrices.assumed(link_named(link), speed, on_device=name == "device")


def _speed(text: str, wrong: str, option: str) -> "LinkSpeed":
    """`GIGABYTES:MICROS`; typer's error with the text `wrong` where it is not."""
    from kvstow.route.price import LinkSpeed

    rate, _, cost = text.partition(":")
    try:
        speed = LinkSpeed(
            name=text, bytes_per_second=float(rate) * 1e9, seconds_per_copy=float(cost) * 1e-6
        )
    except ValueError:
        raise typer.BadParameter(wrong, param_hint=f"'{option}'") from None
    if not (0 < speed.bytes_per_second < float("inf") and 0 <= speed.seconds_per_copy < 1):
        raise typer.BadParameter(
            f"{text!r}: a rate above 0 and a cost of at least 0 are needed",
            param_hint=f"'{option}'",
        )
    return speed


# ── what each way takes ───────────────────────────────────────────────────────────────


def ways_document(
    routes: "Mapping[int, Route]", num_tokens: int, prices: "WayPrices"
) -> dict[str, Any]:
    """All ways from these ranks together, and what an agent does with each of them."""
    from kvstow.route.ways import PREFER_DIRECT, chosen, counted

    counts = {rank: counted(route, num_tokens) for rank, route in routes.items()}
    choices = {
        rank: chosen(counts[rank], prices, is_same_layout=route.source == route.destination)
        for rank, route in routes.items()
    }
    ways = _ways(_sum(list(counts.values())), prices)
    direct, rows = ways["direct"]["seconds"], ways["rows"]["seconds"]
    memory = prices.cutting
    return {
        **ways,
        "memory": {
            "name": memory.name,
            "kind": "device" if prices.on_device else "host",
            "bytes_per_second": memory.bytes_per_second,
            "seconds_per_copy": memory.seconds_per_copy,
        },
        "taken": "rows" if PREFER_DIRECT * rows < direct else "direct",
        "agent": _agent(choices),
    }


def _sum(counts: "Sequence[WayCounts]") -> "WayCounts":
    from kvstow.route.ways import Amount, WayCounts

    def added(amounts: "Iterable[Amount]") -> Amount:
        num, nbytes = zip(*amounts, strict=True)
        return Amount(sum(num), sum(nbytes))

    return WayCounts(
        pieces=added(each.pieces for each in counts),
        num_stretches=sum(each.num_stretches for each in counts),
        rows=added(each.rows for each in counts),
        num_slots=sum(each.num_slots for each in counts),
    )


def _ways(counts: "WayCounts", prices: "WayPrices") -> dict[str, dict[str, Any]]:
    """By way, what crosses the link, what is copied on either side, and the time."""
    pieces, rows = counts.pieces, counts.rows
    moved: dict[WayName, tuple[int, int, dict[str, int]]] = {
        "direct": (pieces.num, pieces.nbytes, {}),
        "rows": (rows.num, rows.nbytes, {"copies_here": pieces.num}),
        "gathered": (counts.num_stretches, pieces.nbytes, {"copies_at_source": pieces.num}),
        "staged": (
            counts.num_slots,
            pieces.nbytes,
            {"copies_here": pieces.num, "copies_at_source": pieces.num},
        ),
    }
    return {
        way: {"moves": moves, "bytes": nbytes, **copies, "seconds": prices.seconds(way, counts)}
        for way, (moves, nbytes, copies) in moved.items()
    }


def _agent(choices: "Mapping[int, Choice]") -> list[dict[str, Any]]:
    """What an agent takes from which ranks; one entry unless it does not treat them alike."""
    ranks: dict[tuple[WayName, Way], list[int]] = {}
    for rank, choice in choices.items():
        ranks.setdefault((choice.way, choice.direction), []).append(rank)
    return [
        {"way": way, "direction": direction, "why": choices[alike[0]].why, "ranks": alike}
        for (way, direction), alike in ranks.items()
    ]


# ── text ──────────────────────────────────────────────────────────────────────────────


def ways_text(ways: dict[str, Any]) -> str:
    """The table of ways, and in a line what an agent does."""
    memory, agent = ways["memory"], ways["agent"]
    taken = {choice["way"] for choice in agent}
    rows = [
        (
            f"{name} ←" if name in taken else name,
            f"{ways[name]['moves']:,}",
            human(ways[name]["bytes"]),
            f"{sum(ways[name].get(key, 0) for key in ('copies_here', 'copies_at_source')):,}",
            "—" if ways[name]["seconds"] is None else duration(ways[name]["seconds"]),
        )
        for name in ("direct", "rows", "gathered", "staged")
    ]
    shown = table(("way", "moves", "bytes", "local copies", "time"), rows)
    lines = [
        f"← with rows in {memory['kind']} memory an agent takes {_named(choice, len(agent))}: "
        f"{choice['why']}"
        for choice in agent
    ]
    note = (
        f"local copies at {memory['bytes_per_second'] / 1e9:,g} GB/s and "
        f"{memory['seconds_per_copy'] * 1e6:g} µs each; agents measure their own prices"
    )
    return "\n\n".join([shown, "\n".join(wrapped(line) for line in (*lines, note))])


def _named(choice: dict[str, Any], num_choices: int) -> str:
    """A way in words, and from which ranks if not from all."""
    way = f"direct {choice['direction']}s" if choice["way"] == "direct" else choice["way"]
    ranks = ", ".join(map(str, choice["ranks"]))
    return way if num_choices == 1 else f"{way} from rank {ranks}"
