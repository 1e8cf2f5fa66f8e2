"""`kvstow models`, `plan` and `check`: known models, the layout of one, a manifest's laws."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstow.cli import options
from kvstow.cli.options import planning
from kvstow.cli.output import (
    FAILED,
    STDOUT,
    Answer,
    Document,
    refuse,
    reporting,
    slow_progress,
    write_file,
)
from kvstow.errors import LayoutError, ManifestError
from kvstow.plan.sizing.plan import Deployment, Plan
from kvstow.plan.sizing.reports import LENGTHS, padding_fractions, plan_figures, tensor_bytes
from kvstow.text import human, plural, table

# ── models ────────────────────────────────────────────────────────────────────────────

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="WORD", help="Show only models with every WORD in their name, alias or family."
    ),
]
LEGEND = (
    "kv bytes: per token of a request, in the model's own dtype; 0 where only windows\n"
    "or states are kept. context: the most tokens of a request, as published;\n"
    "* was not compared with a second source."
)


@reporting
def models(words: Words = None) -> Answer:
    """List the known models, and what a token costs in each."""
    from kvstow.plan.models.catalogue import close_names, matching
    from kvstow.plan.sizing.reports import catalogue_figures

    names = matching(words or ())
    if not names:
        close = close_names("-".join(words or ()))
        refuse(
            f"no model has {' and '.join(map(repr, words or ()))} in its name\n\nhint: "
            + (f"did you mean {', '.join(close)}?" if close else UNKNOWN),
            code=FAILED,
        )
    figures = [catalogue_figures(name) for name in names]
    rows = [
        (
            model["name"],
            model["family"].removesuffix("_text"),
            f"{model['layers']:,}",
            f"{model['kv_bytes_per_token']:,}",
            _context(model),
        )
        for model in figures
    ]
    columns = ("model", "family", "layers", "kv bytes", "context")
    return Answer({"models": figures}, f"{table(columns, rows, num_left=2)}\n\n{LEGEND}")


UNKNOWN = "kvstow models, without a word, lists all; other commands take a config.json, too"


def _context(model: dict[str, Any]) -> str:
    if model["context"] is None:
        return "– "
    return f"{model['context']:,}{' ' if 'context' in model['checked'] else '*'}"


# ── check ─────────────────────────────────────────────────────────────────────────────

File = Annotated[Path, typer.Argument(metavar="FILE", help="A manifest; - reads stdin.")]


@reporting
def check(file: File) -> Answer:
    """Check a manifest: bounds, overlaps, alignment, capacity.

    Exits with 1 if it breaks one of the laws of a layout, or is not a manifest.
    """
    from kvstow.plan.manifest import decode, fingerprint

    try:
        layout = decode(options.read_manifest(file))
    except ManifestError as error:
        broken = error.__cause__
        lines = broken.violations if isinstance(broken, LayoutError) else (str(error),)
        name = "stdin" if file == STDOUT else str(file)
        facts = {"ok": False, "violations": list(lines)}
        return Answer(facts, "\n".join(lines), f"{name}: {plural(len(lines), 'violation')}")
    digest = fingerprint(layout)
    return Answer(
        {"ok": True, "violations": [], "model": layout.model, "fingerprint": digest},
        f"ok: {layout.model}, {plural(len(layout.layers), 'layer')} in "
        f"{plural(len(layout.groups), 'group')}, {plural(layout.num_slabs, 'slab')} of "
        f"{layout.slab_bytes:,} bytes\nfingerprint {digest}",
    )


# ── plan ──────────────────────────────────────────────────────────────────────────────

Tokens = Annotated[
    int | None,
    typer.Option(min=1, help="Length of a request in tokens.", show_default="four lengths"),
]


@dataclass(frozen=True)
class PlanReport:
    """The layout of one rank, and what fits of requests of these lengths."""

    plan: Plan
    lengths: Sequence[int]

    def as_json(self) -> dict[str, Any]:
        return self._figures

    @cached_property
    def _figures(self) -> dict[str, Any]:
        return plan_figures(self.plan, self.lengths)

    def __str__(self) -> str:
        return "\n\n".join(self._parts())

    def _parts(self) -> Iterator[str]:
        from kvstow.render.text import are_rows, rows_picture, slab_picture

        layout = self.plan.layout
        yield self._heading()
        yield self._groups()
        yield slab_picture(layout)
        if are_rows(layout) and any(rows.rows_per_slab > 1 for rows in layout.groups):
            yield rows_picture(layout)
        yield self._moving()
        yield from self._holding()

    def _heading(self) -> str:
        plan, facts, split = self.plan, self._figures, self.plan.deployment
        return (
            f"{plan.layout.model}\n"
            f"rank {plan.rank} of tp {split.tp} × pp {split.pp}, {plan.kv_dtype}, order "
            f"{facts['order']}, packing {split.packing}\n"
            f"arena {human(facts['arena_bytes'])} in one region: {facts['num_slabs']:,} slabs of "
            f"{_exact(facts['slab_bytes'])}\n"
            f"fingerprint {facts['fingerprint']}"
        )

    def _groups(self) -> str:
        paddings = padding_fractions(self.plan.layout)
        numbers = "block_tokens", "row_bytes", "rows_per_slab"
        rows = [
            (
                group["name"],
                group["retention"],
                f"{len(group['layers']):,}",
                *(f"{group[name]:,}" for name in numbers),
                f"{padding:.2%}",
            )
            for group, padding in zip(self._figures["groups"], paddings, strict=True)
        ]
        columns = ("group", "keeps", "layers", "tokens", "row bytes", "rows/slab", "padding")
        return table(columns, rows, num_left=2)

    def _moving(self) -> str:
        copies, nbytes = self._figures["transfer"].values()
        rows = [
            (
                group.name,
                f"{copies[group.name]:,}",
                f"{nbytes[group.name]:,}",
                human(nbytes[group.name]),
                f"{group.num_tensors:,}",
                human(tensor_bytes(group)),
            )
            for group in (rows.group for rows in self.plan.layout.groups)
        ]
        return table(("moving one block of", "copies", "bytes", "", "per layer", "each ≤"), rows)

    def _holding(self) -> Iterator[str]:
        plan, request, capacity = self.plan, self._figures["request"], self._figures["capacity"]
        everywhere, here = capacity["requests"], capacity["this_rank"]["requests"]
        is_less = everywhere != here
        rows = [
            (
                f"{int(n):,}",
                f"{nbytes:,}",
                human(nbytes),
                f"{everywhere[n]:,}",
                *([f"{here[n]:,}"] if is_less else []),
            )
            for n, nbytes in request["at_tokens"].items()
        ]
        most = capacity["tokens"]
        longest = "any length" if most is None else f"{most:,} tokens"
        yield f"one request: {self._cost()}\nthe longest that fits: {longest}"
        columns = ["tokens per request", "bytes", "", "requests at once"]
        yield table([*columns, f"on rank {plan.rank}"][: len(rows[0])], rows, num_left=0)
        if is_less:
            yield (
                f"A request is on all {plan.deployment.num_ranks} ranks at once: rank "
                f"{capacity['limiting_rank']} limits how many fit."
            )

    def _cost(self) -> str:
        """The part that does not grow, and the part that does, as far as there are any."""
        fixed, growth = (
            self._figures["request"][key] for key in ("fixed_bytes", "bytes_per_token")
        )
        if not growth:
            return f"{_exact(fixed)} at most, whatever its length"
        each = f"{_exact(growth)} per token"
        return f"{_exact(fixed)} fixed at most,\n             and {each}" if fixed else each


def _exact(nbytes: int | float) -> str:
    """`2,097,152 bytes (2 MiB)`."""
    text = f"{nbytes:,}" if isinstance(nbytes, int) else f"{nbytes:,.2f}"
    beside = f" ({human(nbytes)})" if nbytes >= 1024 else ""
    return f"{text} {'byte' if nbytes == 1 else 'bytes'}{beside}"


@reporting
@planning
def plan(
    deployment: Deployment,
    rank: int,
    order: options.OrderName = "BLHNC",
    packing: options.PackingName = "slab",
    tokens: Tokens = None,
    name: options.Name = None,
    manifest: options.ManifestFile = None,
    html: options.HtmlFile = None,
) -> PlanReport | Document:
    """Plan the layout of a model: what it costs and what fits."""
    deployment = replace(deployment, order=order, packing=packing, name=name)
    made = options.on_rank(deployment, rank).everywhere()
    if html is not None:
        from kvstow.render.plan_page import plan_page

        write_file(html, plan_page(made, slow_progress("plans for the page")), "page")
    if manifest is not None:
        from kvstow.plan.manifest import encode

        if manifest == STDOUT:
            return Document("--manifest", encode(made.layout))
        write_file(manifest, encode(made.layout), "manifest")
    return PlanReport(made, LENGTHS if tokens is None else (tokens,))
