"""`kvstow compare`: one model under many orders, packings, splits, block sizes and dtypes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Annotated, Any, TypeVar

import typer

from kvstow.cli import options
from kvstow.cli.options import planning
from kvstow.cli.output import (
    HINT,
    command_line,
    refuse,
    reporting,
    usage,
    wrapped,
    write_file,
)
from kvstow.errors import ModelError, PlanError
from kvstow.plan.layout import ORDERS, Order
from kvstow.plan.pack import PACKINGS, Packing
from kvstow.plan.sizing.capacity import bytes_per_token
from kvstow.plan.sizing.plan import (
    USUAL_TOKENS,
    Deployment,
    Plan,
)
from kvstow.plan.sizing.reports import descriptors, padding_fractions, plain
from kvstow.text import human, table

MOST_LAYOUTS = 1000

SWEPT = {"tp": "tp", "block_tokens": "tokens", "kv_dtype": "kv dtype"}
"""What may be given several values, and its column."""

T = TypeVar("T")


def several(one: Callable[[str], T]) -> Callable[[str], list[T] | None]:
    """Reads values between commas, each by `one`; None for `all`."""

    def read(text: str) -> list[T] | None:
        if text.lower() == "all":
            return None
        return list(dict.fromkeys(one(each) for each in text.split(",")))

    return read


def whole_number(text: str) -> int:
    if text.isdecimal() and 0 < len(text) <= options.MAX_DIGITS:
        return int(text)
    raise typer.BadParameter(f"{text!r} is not a whole number, such as each of 1,2,4")


def packing_name(text: str) -> Packing:
    if text in PACKINGS:
        return text
    raise typer.BadParameter(f"{text!r} is none of {', '.join(PACKINGS)}, all")


Tps = Annotated[
    Any,
    typer.Option(
        parser=several(whole_number),
        metavar="N[,N…]",
        help="Tensor-parallel ranks; several are compared.",
    ),
]
BlockTokens = Annotated[
    Any,
    typer.Option(
        parser=several(whole_number),
        metavar="N[,N…]",
        help="Tokens per block; several are compared.",
        show_default="16, or the model's own",
    ),
]
KvDtypes = Annotated[
    Any,
    typer.Option(
        parser=several(str),
        metavar="DTYPE[,DTYPE…]",
        help="Element type of the cache; several are compared.",
        show_default="the model's own",
    ),
]
Orders = Annotated[
    Any,
    typer.Option(
        parser=several(options.order), metavar="ORDER[,ORDER…]", help="Orders of axes, or all."
    ),
]
PackingNames = Annotated[
    Any,
    typer.Option(
        parser=several(packing_name), metavar="PACKING[,…]", help="slab, union, separate, or all."
    ),
]


# ── the report ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedLayout:
    """A layout and its figures, or the reason why there are none."""

    tp: int
    block_tokens: int | None
    kv_dtype: str | None
    order: Order
    packing: Packing
    error: str | None = None
    figures: dict[str, Any] = field(default_factory=dict[str, Any])
    """As in the JSON document."""

    @staticmethod
    def of(
        deployment: Deployment, plan: Plan | str, order: Order, packing: Packing
    ) -> "ComparedLayout":
        """The layout of what a rank holds, or the reason why it can hold nothing."""
        split = {name: getattr(deployment, name) for name in SWEPT}
        error, figures = None, dict[str, Any]()
        if isinstance(plan, str):
            error = plan
        else:
            split |= {"block_tokens": plan.block_tokens, "kv_dtype": plan.kv_dtype}
            try:
                figures = _figures(plan.changed(order=order, packing=packing))
            except PlanError as problem:
                error = str(problem)
        return ComparedLayout(**split, order=order, packing=packing, error=error, figures=figures)

    @property
    def copies(self) -> int:
        """Of one block of the worst group."""
        return max(self.figures["descriptors_per_block"].values())

    @property
    def usual_requests(self) -> int:
        return self.figures["requests"][str(USUAL_TOKENS)]

    @property
    def merit(self) -> tuple[float, ...]:
        """Most requests; of equals, fewest copies; of equals, least padding."""
        if self.error is not None or not self.usual_requests:
            return ()
        return self.usual_requests, -self.copies, -self.figures["padding"]

    def as_json(self) -> dict[str, Any]:
        document = asdict(self)
        return document | document.pop("figures")


@dataclass(frozen=True, slots=True)
class OrderLine:
    """Layouts that differ in nothing but order and packing: each of these orders under each of
    these packings."""

    layout: ComparedLayout
    orders: Sequence[Order]
    packings: Sequence[Packing]


@dataclass(frozen=True, kw_only=True)
class CompareReport:
    """Layouts of one rank, side by side; `first` is what it holds in the first of them."""

    first: Plan
    layouts: Sequence[ComparedLayout]

    @property
    def failure(self) -> str | None:
        if any(each.error is None for each in self.layouts):
            return None
        return f"no layout is possible{HINT}the reasons are on stdout"

    def is_best(self, layout: ComparedLayout) -> bool:
        return () != layout.merit == self._most

    @cached_property
    def _most(self) -> tuple[float, ...]:
        return max(each.merit for each in self.layouts)

    @property
    def swept(self) -> list[str]:
        """What has several values."""
        values = {name: {getattr(each, name) for each in self.layouts} for name in SWEPT}
        return [name for name in SWEPT if len(values[name] - {None}) > 1]

    @cached_property
    def lines(self) -> list[OrderLine]:
        by_packing: dict[str, list[ComparedLayout]] = {}
        for each in self.layouts:
            by_packing.setdefault(repr(replace(each, order="BLHNC")), []).append(each)
        lines: dict[str, list[list[ComparedLayout]]] = {}
        for members in by_packing.values():
            alike = repr([replace(each, packing="slab") for each in members])
            lines.setdefault(alike, []).append(members)
        return [
            OrderLine(each[0][0], [of.order for of in each[0]], [of[0].packing for of in each])
            for each in lines.values()
        ]

    @property
    def arena(self) -> str:
        budget = self.first.deployment.budget
        if budget is None:
            return f"{self.first.deployment.num_slabs:,} slabs"
        return human(budget)

    def as_json(self) -> dict[str, Any]:
        first = self.first
        return {
            "model": first.model,
            "tp": first.deployment.tp,
            "pp": first.deployment.pp,
            "rank": first.rank,
            "block_tokens": first.block_tokens,
            "kv_dtype": first.kv_dtype,
            "layouts": [each.as_json() | {"best": self.is_best(each)} for each in self.layouts],
        }

    def __str__(self) -> str:
        return "\n\n".join(self._parts())

    def _parts(self) -> Iterator[str]:
        first, split, swept = self.first, self.first.deployment, self.swept
        where = f"rank {first.rank} of tp {split.tp} × pp {split.pp}"
        words = [f"pp {split.pp}" if "tp" in swept else where, self.arena]
        if "kv_dtype" not in swept:
            words.insert(1, first.kv_dtype)
        yield f"{first.model}\n{', '.join(words)}"
        rows = [self._cells(line) for line in self.lines if line.layout.error is None]
        if rows:
            columns = ["order", "packing", *(SWEPT[name] for name in swept)]
            columns += [*(() if swept else ("slab",)), "padding", "copies", "requests"]
            yield table(columns, rows, num_left=2 + len(swept))
            yield (
                "padding, and copies per block: of the worst group\n"
                f"requests: of {USUAL_TOKENS:,} tokens, at once; ← the best"
            )
        if reasons := self.reasons():
            yield "\n".join(map(wrapped, reasons))

    def _cells(self, line: OrderLine) -> list[str]:
        """What a line shows; the slab only where there is room for it."""
        layout, packings = line.layout, {each.packing for each in self.layouts}
        values = [str(getattr(layout, name)) for name in self.swept]
        is_any = len(packings) > 1 and len(line.packings) == len(packings)
        return [
            " ".join(line.orders),
            "any" if is_any else " ".join(line.packings),
            *(values or [human(layout.figures["slab_bytes"])]),
            f"{layout.figures['padding']:.2%}",
            f"{layout.copies:,}",
            f"{layout.usual_requests:,} {' ←'[self.is_best(layout)]}",
        ]

    def reasons(self) -> list[str]:
        """Every reason once, behind the layouts that it bars."""
        num_choices = len({(each.order, each.packing) for each in self.layouts})
        barred: dict[str, list[str]] = {}
        for line in self.lines:
            if line.layout.error is None:
                continue
            values = [(name, getattr(line.layout, name)) for name in self.swept]
            which = [f"{SWEPT[name]} {value}" for name, value in values if value is not None]
            if not which or len(line.orders) * len(line.packings) < num_choices:
                which += [*line.packings, f"({' '.join(line.orders)})"]
            barred.setdefault(line.layout.error.partition(HINT)[0], []).append(" ".join(which))
        return [f"{', '.join(names)}: {why}" for why, names in barred.items()]

    def page(self, command: str) -> str:
        """The page: a line per row, to be sorted; `command` makes it again."""
        from kvstow import __version__
        from kvstow.render.page import page

        document = self.as_json()
        lines = [
            line.layout.as_json()
            | {"best": self.is_best(line.layout), "orders": line.orders, "packings": line.packings}
            for line in self.lines
        ]
        facts = {"kvstow": __version__, "usual_tokens": USUAL_TOKENS, "command": command}
        facts |= {"lines": lines, "reasons": self.reasons(), "arena": f"arena {self.arena}"}
        return page(f"{document['model']}: layouts compared", document | facts, ("sweep.js",))


# ── the command ───────────────────────────────────────────────────────────────────────


@reporting
@planning
def compare(
    context: typer.Context,
    deployment: Deployment,
    rank: int,
    tp: Tps = "1",
    block_tokens: BlockTokens = None,
    kv_dtype: KvDtypes = None,
    order: Orders = "all",
    packing: PackingNames = "all",
    html: options.HtmlFile = None,
) -> CompareReport:
    """Compare layouts, splits and dtypes of a model.

    Exits with 1 if no layout is possible.
    """
    swept = product(tp, block_tokens or [None], kv_dtype or [None])
    with usage(PlanError):
        deployments = [
            replace(deployment, **dict(zip(SWEPT, values, strict=True))) for values in swept
        ]
    orders = order or sorted(ORDERS, key=lambda order: order[0])
    choices = list(product(orders, packing or PACKINGS))
    if len(deployments) * len(choices) > MOST_LAYOUTS:
        refuse(
            f"{len(deployments) * len(choices):,} layouts, {MOST_LAYOUTS:,} at most are compared"
            f"{HINT}name fewer values"
        )
    for each in deployments:
        each.facts()
    plans = [(each, _planned(each, rank)) for each in deployments]
    possible = (each for each, plan in plans if isinstance(plan, Plan))
    report = CompareReport(
        first=options.on_rank(next(possible, deployments[0]), rank),
        layouts=[ComparedLayout.of(*each, *choice) for each, choice in product(plans, choices)],
    )
    if html is not None:
        write_file(html, report.page(command_line(context)), "page")
    return report


def _planned(deployment: Deployment, rank: int) -> Plan | str:
    """What the rank holds, or why it can hold nothing."""
    try:
        return deployment.on_rank(rank)
    except (ModelError, PlanError) as error:
        return str(error)


def _figures(plan: Plan) -> dict[str, Any]:
    layout = plan.layout
    names = [rows.group.name for rows in layout.groups]
    return {
        "slab_bytes": layout.slab_bytes,
        "num_slabs": layout.num_slabs,
        "arena_bytes": layout.nbytes,
        "padding": max(padding_fractions(layout)),
        "descriptors_per_block": dict(zip(names, descriptors(layout), strict=True)),
        "bytes_per_token": plain(bytes_per_token(layout)),
        "requests": {str(USUAL_TOKENS): plan.max_requests(tokens=USUAL_TOKENS)},
    }
