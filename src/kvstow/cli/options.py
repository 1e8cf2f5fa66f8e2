"""What users write: options that several commands share, values, models and layouts.

options     `Tp`, `Memory`, `Json` …: annotations of a command's arguments
values      `parse_bytes`, `order`, `alignment`: what their text means
models      `on_rank`: the model that a command plans, with what was assumed said on stderr
shorthand   `named`: a manifest, or `MODEL@tp=2,order=BHLNC`
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from inspect import signature
from math import lcm
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstow.cli.output import STDOUT, note, refuse, usage, with_options
from kvstow.errors import ManifestError, PlanError
from kvstow.plan.layout import Layout, Order, parse_order
from kvstow.plan.pack import Alignment, Demand, Packing
from kvstow.plan.sizing.plan import MAX_BLOCK_TOKENS, Deployment, Plan, repacked
from kvstow.plan.view import parse_size

_USUAL = Alignment()


def parse_bytes(text: str) -> int:
    """The bytes that `20GiB`, `512MB` or `1.5TiB` are; a number below 1,024 lacks its unit."""
    try:
        nbytes = parse_size(text)
    except PlanError as error:
        raise typer.BadParameter(str(error)) from error
    if nbytes < 1024 and text.strip().isdecimal():
        raise typer.BadParameter(f"{text!r} lacks a unit\n\nhint: {text.strip()}GiB, for example")
    return nbytes


size_option = partial(typer.Option, parser=parse_bytes, metavar="SIZE")


def order(text: str) -> Order:
    """The order that `BLHNC`, `blhnc`, `HND` or `NHD` is."""
    try:
        return parse_order(text)
    except PlanError as error:
        raise typer.BadParameter(str(error)) from error


def alignment(wishes: Iterable[str]) -> Alignment:
    """What `--align` asks for: `SIZE`, `page=SIZE`, `row=SIZE`, `base=SIZE`, `LAYERS=SIZE`.

    A bare size is one for pages, and so for rows. The base becomes a multiple of all of
    them: an offset in the arena is only as aligned as the arena is.
    """
    multiples = {"page": _USUAL.page, "row": _USUAL.row, "base": _USUAL.base}
    demands: list[Demand] = []
    for wish in wishes:
        what, _, text = wish.rpartition("=")
        try:
            multiple = parse_size(text)
        except PlanError as error:
            raise typer.BadParameter(f"{wish}: {error}", param_hint="'--align'") from error
        if (what or "page") in multiples:
            multiples[what or "page"] = multiple
        else:
            demands.append(Demand(layers=what, multiple=multiple))
    return Alignment(
        page=multiples["page"],
        row=multiples["row"],
        base=lcm(*multiples.values(), *(demand.multiple for demand in demands)),
        demands=tuple(demands),
    )


MAX_SLABS = (1 << 63) - 1
MODEL_HELP = "A catalogue name, a config.json or a directory that holds one."


def complete_model(start: str) -> list[str]:
    """The known names that begin so, for the shell."""
    from kvstow.plan.models import catalogue

    return [name for name in catalogue() if name.startswith(start.lower())]


ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help=MODEL_HELP, autocompletion=complete_model)
]
Tp = Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")]
Pp = Annotated[int, typer.Option(min=1, help="Pipeline stages.")]
Rank = Annotated[
    int, typer.Option(min=0, help="The rank to plan: stage × tp + tensor-parallel rank.")
]
BlockTokens = Annotated[
    int | None,
    typer.Option(
        min=1, max=MAX_BLOCK_TOKENS, help="Tokens per block.", show_default="16, or the model's own"
    ),
]
KvDtype = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        help="Element type of the cache: bfloat16, fp8, int8_per_token_head, nvfp4 …",
        show_default="the model's own",
    ),
]
OrderName = Annotated[
    Order,
    typer.Option(
        parser=order,
        metavar="ORDER",
        help="Axes, outermost first, Layer Block Head tokeN Content: BLHNC, BLNHC, BHLNC, LBHNC, "
        "LBNHC, LHBNC; HND and NHD are BLHNC and BLNHC.",
    ),
]
PackingName = Annotated[
    Packing,
    typer.Option(
        help="slab: tight rows in shared slabs; union: one row per slab; separate: nothing shared."
    ),
]
Memory = Annotated[
    int | None, size_option(help="Memory for the arena, such as 20GiB.", show_default="16GiB")
]
NumSlabs = Annotated[
    int | None, typer.Option(min=2, max=MAX_SLABS, help="Slabs of the arena, in place of --memory.")
]
Align = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[WHAT=]SIZE",
        help="Alignment of pages; or page=SIZE, row=SIZE, base=SIZE, LAYERS=SIZE. Repeatable.",
        show_default=f"page={_USUAL.page} row={_USUAL.row} base={_USUAL.base}",
    ),
]
Name = Annotated[str | None, typer.Option(help="Name to show in place of the model's own.")]
ManifestFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write the layout's manifest to FILE; - is stdout, in place of the report.",
    ),
]
HtmlFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a self-contained HTML page to FILE.")
]


def planning(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with the options of a deployment, but for those that it has of its own: it gets
    them as `deployment` and `rank`. Ends with 2 on values that contradict each other."""

    def run(**values: Any) -> Any:
        options = {name: values.pop(name) for name in shared if name not in own}
        rank = options.pop("rank")
        options["alignment"] = alignment(options.pop("align") or ())
        with usage(PlanError):
            deployment = Deployment(**options)
        return command(deployment=deployment, rank=rank, **values)

    own = dict(signature(command).parameters)
    del own["deployment"], own["rank"]
    shared = signature(_deployment_options).parameters
    return with_options(run, command, {**own, **shared, **own})


def _deployment_options(
    model: ModelName,
    tp: Tp = 1,
    pp: Pp = 1,
    rank: Rank = 0,
    block_tokens: BlockTokens = None,
    kv_dtype: KvDtype = None,
    memory: Memory = None,
    num_slabs: NumSlabs = None,
    align: Align = None,
) -> None:
    """What `planning` adds to a command."""


# ── models ──────────────────────────────────────────────────────────────────────────


def on_rank(deployment: Deployment, rank: int) -> Plan:
    """What the rank holds. Ends with 2 on options that name no model, rank or layer."""
    with usage(PlanError):
        deployment.check_rank(rank)
    note_shadowed(deployment.model)
    plan = deployment.on_rank(rank)
    for line in plan.notes:
        note(line)
    _check_patterns(deployment.alignment, [layer.name for layer in plan.held.layers])
    if deployment.memory is None and deployment.num_slabs is None:
        note("planned for 16 GiB; use --memory SIZE or --num-slabs N for another size")
    return plan


def note_shadowed(model: object) -> None:
    """Say so where a local file or folder has the name of a known model, and is read."""
    from kvstow.plan.models.catalogue import is_known

    if isinstance(model, str) and is_known(model) and Path(model).exists():
        note(f"{model}: read from {Path(model).absolute()}, not from the catalogue")


def _check_patterns(alignment: Alignment, names: list[str]) -> None:
    """Ends with 2 on a pattern that matches no layer: it is probably misspelt."""
    for demand in alignment.demands:
        if not any(fnmatchcase(name, demand.layers) for name in names):
            refuse(
                f"--align {demand.layers}={demand.multiple} matches none of the "
                f"{len(names)} layers\n\nhint: page, row, base, or a pattern of names like "
                f"{names[0]!r}"
            )


def check_url(url: str) -> None:
    """Ends with 2 on what is no address of an HTTP server."""
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(url)
        is_fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_fine = False
    if not is_fine:
        refuse(f"{url!r} is not a URL\n\nhint: for example http://127.0.0.1:8100")


# ── shorthand ───────────────────────────────────────────────────────────────────────


NUM_SLABS = 16
"""Slabs of each arena, unless the text says otherwise: a route's price does not depend on it."""

MAX_DIGITS = 40
_NUMBERS = ("tp", "pp", "rank", "block_tokens", "num_slabs")
_SETTINGS = (*_NUMBERS, "order", "packing", "kv_dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What was named: every rank of a deployment, one rank of it, or the one in a manifest."""

    text: str
    layouts: tuple[Layout, ...]
    ranks: tuple[int, ...]
    packing: Packing

    def reordered(self, order: Order) -> tuple[Layout, ...]:
        """The same ranks in another order."""
        return tuple(
            layout if layout.order == order else repacked(layout, order, self.packing)
            for layout in self.layouts
        )


def named(text: str, *, one_rank: bool) -> Named:
    """The layouts that `text` names. Without a `rank`, all of them, or rank 0 of them
    where one is wanted. Ends with 2 on a text that names none."""
    document = _manifest(text)
    if document is not None:
        rank = document.pp[0] * document.tp[1] + document.tp[0]
        return Named(text=text, layouts=(document,), ranks=(rank,), packing="slab")
    deployment, rank = _deployment(text)
    if rank is None and one_rank:
        rank = 0
        if deployment.num_ranks > 1:
            note(f"{text}: rank 0 of {deployment.num_ranks}; add rank=R for another")
    ranks = tuple(range(deployment.num_ranks)) if rank is None else (rank,)
    plans = [deployment.on_rank(rank) for rank in ranks]
    for line in plans[0].notes:
        note(line)
    layouts = tuple(plan.layout for plan in plans)
    return Named(text=text, layouts=layouts, ranks=ranks, packing=deployment.packing)


def _manifest(text: str) -> Layout | None:
    """The layout in a file, if the text is the path of a manifest."""
    path = Path(text)
    if "@" in text or not path.is_file() or b'"kvstow"' not in read_manifest(path):
        return None
    return layout_in(path)


def read_manifest(path: Path) -> bytes:
    """As much of a file, or of stdin for `-`, as a manifest may have; ends with 2 where it cannot
    be read."""
    from kvstow.plan.manifest import MAX_BYTES

    try:
        if path == STDOUT:
            return typer.get_binary_stream("stdin").read(MAX_BYTES + 1)
        with path.open("rb") as stream:
            return stream.read(MAX_BYTES + 1)
    except OSError as error:
        refuse(f"{path}: cannot be read: {error.strerror}")


def layout_in(path: Path) -> Layout:
    """The layout in a manifest; ends with 2 where there is none."""
    from kvstow.plan.manifest import decode

    with usage(ManifestError, about=path):
        return decode(read_manifest(path))


def _deployment(text: str) -> tuple[Deployment, int | None]:
    """The deployment that a shorthand names, and the rank, if it names one."""
    from kvstow.plan.models import load_model

    model, _, rest = text.partition("@")
    settings: dict[str, Any] = {}
    with usage(PlanError, about=text):
        for setting in filter(None, rest.split(",")):
            key, _, value = setting.partition("=")
            if key in settings:
                raise PlanError(f"{key} is given twice, as {settings[key]} and as {value}")
            settings[key] = _value(key, value)
        rank = settings.pop("rank", None)
        settings.setdefault("num_slabs", NUM_SLABS)
        deployment = Deployment(model=load_model(model), **settings)
        if rank is not None:
            deployment.check_rank(rank)
    return deployment, rank


def _value(key: str, value: str) -> int | str:
    """The value of one setting. Raises PlanError if that is none."""
    if key in _NUMBERS:
        if not (value.isascii() and value.isdecimal() and len(value) <= MAX_DIGITS):
            raise PlanError(f"{key}={value} is not a whole number")
        return int(value)
    if key == "order":
        return parse_order(value)
    if key not in _SETTINGS:
        raise PlanError(
            f"{key}={value} is not a setting\n\nhint: settings are {', '.join(_SETTINGS)}, as in "
            "llama-3.1-8b@tp=2,order=BHLNC"
        )
    return value
