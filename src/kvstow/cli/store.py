"""`kvstow store`: look into a store on disk or behind a URL, verify, convert and shrink it."""

import re
import shutil
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstow.cli import options
from kvstow.cli.output import (
    Answer,
    CommandGroup,
    refuse,
    reporting,
    say,
    slow_progress,
    usage,
)
from kvstow.errors import StoreError
from kvstow.text import human, table

if TYPE_CHECKING:
    from kvstow.offload.disk.convert import Converted
    from kvstow.offload.remote.client import BlobClient
    from kvstow.plan.layout import Layout

store = typer.Typer(help="Inspect, verify, convert or prune stores of rows.", cls=CommandGroup)

MOST_NAMED = 20
"""Damaged rows that are named in the text."""

COLUMNS = ["tenant", "model", "identity", "layout", "order", "tp", "pp", "rows", "bytes", "newest"]
"""Of a remote store's layouts."""

_AGE = re.compile(r"([0-9]{1,9})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _age(text: str) -> float:
    """The seconds that `90s`, `30m`, `12h` or `7d` are."""
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not an age: for example 90s, 30m, 12h or 7d")
    return int(match[1]) * _SECONDS[match[2]]


Place = Annotated[
    str, typer.Argument(metavar="DIR|URL", help="The store's directory, or s3://…, redis://…")
]

Directories = Annotated[list[Path], typer.Argument(metavar="DIR", help="The stores of all ranks.")]
NewStore = Annotated[Path, typer.Option(metavar="DIR", help="The new store.")]
NewLayout = Annotated[Path, typer.Option(metavar="FILE", help="Manifest of the new layout.")]
Capacity = Annotated[
    int | None,
    options.size_option(
        help="Capacity of the new store.", show_default="that of all old stores together"
    ),
]
PruneTo = Annotated[
    int | None,
    options.size_option(help="Largest size of the data files, or of all rows of a remote store."),
]
TenantTo = Annotated[
    int | None, options.size_option(help="Largest size of each tenant's rows (remote).")
]
OlderThan = Annotated[
    float | None,
    typer.Option(
        parser=_age, metavar="AGE", help="Drop rows older than AGE, such as 12h or 7d (remote)."
    ),
]


# ── places ────────────────────────────────────────────────────────────────────────────


def check_store(path: Path) -> Path:
    """The directory of a store; ends with 2 where there is none."""
    if not (path / "layout.json").exists():
        what = "no store there (layout.json is missing)" if path.is_dir() else "no such directory"
        inside = ", ".join(store.name for store in _stores_of_ranks(path)[:8])
        hint = f"one of those in it: {inside}" if inside else "name the directory of a store"
        refuse(f"{path}: {what}\n\nhint: {hint}")
    return path


def stores_in(path: Path) -> list[Path]:
    """The store in a directory, or those in its folders. Ends with 2 where there is none."""
    return _stores_of_ranks(path) or [check_store(path)]


def _stores_of_ranks(path: Path) -> list[Path]:
    """The stores in the folders of a directory that is not a store itself: those of ranks, or of
    sizes of chunks."""
    if (path / "layout.json").exists():
        return []
    return sorted(manifest.parent for manifest in path.glob("*/layout.json"))


@contextmanager
def client_at(url: str) -> "Generator[BlobClient]":
    """A client of a remote store; ends with 2 where the URL names none."""
    from kvstow.offload.remote.client import open_client, parse

    with usage(StoreError):
        parse(url)
    client, _ = open_client(url)
    with closing(client):
        yield client


# ── inspect ───────────────────────────────────────────────────────────────────────────


@store.command()
@reporting
def inspect(place: Place) -> Answer:
    """Show what a store holds, and who writes to it.

    Reads only: nothing is repaired or written.
    """
    if "://" in place:
        from kvstow.offload.remote.collect import survey as survey_objects

        with client_at(place) as client:
            facts = survey_objects(client)
        return Answer(facts, _remote_text(facts))
    from kvstow.offload.disk.inspect import survey

    facts = survey(check_store(Path(place)))
    return Answer(facts, _disk_text(facts))


def _disk_text(facts: dict[str, Any]) -> str:
    of = "" if facts["capacity"] is None else f" of {human(facts['capacity'])}"
    head = (
        f"{facts['path']}: {facts['model'] or 'a model'}, {facts['order']}, tp rank "
        f"{facts['tp'][0]} of {facts['tp'][1]}\n"
        f"{facts['rows']:,} rows in {human(facts['data_bytes'])}{of}\n"
        f"fingerprint {facts['fingerprint']}"
    )
    groups = [
        (
            group["name"],
            str(group["block_tokens"]),
            human(group["row_bytes"]),
            f"{group['rows']:,}",
            f"{group['files']:,}",
            human(group["bytes"]),
        )
        for group in facts["groups"]
    ]
    writers = [
        f"written by process {writer['pid']}" + ("" if writer["alive"] else ", which died")
        for writer in facts["writers"]
    ]
    columns = ("group", "tokens", "row", "rows", "files", "bytes")
    return "\n\n".join(filter(None, (head, table(columns, groups), "\n".join(writers))))


def _remote_text(facts: dict[str, Any]) -> str:
    head = f"{facts['url']}: {facts['rows']:,} rows, {human(facts['bytes'])}"
    if not facts["layouts"]:
        return head
    return f"{head}\n\n{table(COLUMNS, map(_layout_line, facts['layouts']), num_left=7)}"


def _layout_line(one: dict[str, Any]) -> list[str]:
    has_manifest, newest = one["order"] is not None, one["newest"]
    return [
        one["tenant"],
        one["model"] or ("" if has_manifest else "no manifest"),
        one["identity"][:8],
        one["fingerprint"][:8],
        one["order"] or "",
        f"{one['tp'][0]} of {one['tp'][1]}" if has_manifest else "",
        f"{one['pp'][0]} of {one['pp'][1]}" if has_manifest else "",
        f"{one['rows']:,}",
        human(one["bytes"]),
        "" if newest is None else f"{datetime.fromtimestamp(newest):%Y-%m-%d %H:%M:%S}",
    ]


# ── verify ────────────────────────────────────────────────────────────────────────────


@store.command("verify")
@reporting
def verify_store(place: Place) -> Answer:
    """Compare every row with its checksum, and drop damaged ones.

    Exits with 1 if there were any.
    """
    if "://" in place:
        from kvstow.offload.remote.collect import verify as verify_objects

        with client_at(place) as client:
            checked = verify_objects(client, _row_progress(None))
    else:
        from kvstow.offload.disk.inspect import verify as verify_rows
        from kvstow.offload.disk.tier import DiskTier

        with closing(DiskTier(check_store(Path(place)))) as tier:
            checked = verify_rows(tier, _row_progress(tier.usage.rows))
    damaged = list(checked.damaged)
    head = f"{checked.rows:,} rows, {human(checked.nbytes)} read: {len(damaged):,} damaged"
    names = [": ".join(map(str, each.values())) for each in damaged[:MOST_NAMED]]
    return Answer(
        {"ok": not damaged, "rows": checked.rows, "bytes": checked.nbytes, "damaged": damaged},
        "\n".join([head, *names]),
        f"{len(damaged):,} damaged rows" if damaged else None,
    )


def _row_progress(total: int | None) -> Callable[[int], None]:
    """Is told of rows that were read; says now and then how many there were."""
    say, done = slow_progress("rows"), 0

    def advance(rows: int) -> None:
        nonlocal done
        done += rows
        say(done, total)

    return advance


# ── convert ───────────────────────────────────────────────────────────────────────────


@store.command("convert")
@reporting
def convert_store(
    directories: Directories, to: NewStore, layout: NewLayout, capacity: Capacity = None
) -> Answer:
    """Write a store's rows into a new store of another layout.

    `kvstow plan --manifest FILE` makes the layout. Order, alignment and tensor parallelism
    may differ; tokens per block may be a multiple. Rows that fit in no block of the new size are
    counted. Exits with 1 if rows could not be read and were left out. A conversion that fails
    leaves nothing behind.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        what = "a store" if (to / "layout.json").exists() else "something else"
        refuse(f"{to}: there is {what} already\n\nhint: name a new directory")
    new_layout, is_there = options.layout_in(layout), to.exists()
    old = [check_store(directory) for directory in directories]
    try:
        done = _convert_into(to, old, new_layout, capacity)
    except BaseException:
        shutil.rmtree(to, ignore_errors=True)
        if is_there:
            to.mkdir()
        raise
    if done.left_out:
        say(
            f"{done.left_out:,} rows of the old store are in no block of the new size: none "
            "ends where they end, their neighbours are gone, or they were stored without links"
        )
    lost = f"{done.incomplete:,} rows could not be read and were left out"
    return Answer(
        {"written": done.written, "incomplete": done.incomplete, "left_out": done.left_out},
        f"{done.written:,} rows written, {done.incomplete:,} left behind",
        lost if done.incomplete else None,
    )


def _convert_into(
    to: Path, directories: list[Path], layout: "Layout", capacity: int | None
) -> "Converted":
    from kvstow.offload.disk.convert import convert
    from kvstow.offload.disk.tier import DiskTier

    with ExitStack() as stack:
        old = [stack.enter_context(closing(DiskTier(directory))) for directory in directories]
        identity = old[0].layout.identity
        if layout.identity is None and identity is not None:
            layout = layout.identified(identity)  # a plan does not know the weights
        most = capacity or sum(tier.usage.capacity for tier in old)
        with closing(DiskTier(to, layout, capacity=most)) as new:
            return convert(old, new)


# ── prune ─────────────────────────────────────────────────────────────────────────────


@store.command()
@reporting
def prune(
    place: Place, to: PruneTo = None, tenant_to: TenantTo = None, older_than: OlderThan = None
) -> Answer:
    """Drop rows until the rest fits, those used longest ago first.

    A remote store drops the oldest, and may be in use meanwhile. Writers with limits learn from
    this command how much it holds, so run it every few minutes.
    """
    tenants: dict[str, Any] = {}
    if "://" in place:
        from kvstow.offload.remote.collect import collect

        with client_at(place) as client:
            done = collect(client, most=to, most_by_tenant=tenant_to, older_than=older_than)
        rows, after, tenants = done.rows, done.left.nbytes, {"tenants": done.left.tenants}
        before = after + done.nbytes
    else:
        from kvstow.offload.disk.tier import DiskTier

        if to is None or tenant_to is not None or older_than is not None:
            refuse("a store on disk takes only --to SIZE")
        with closing(DiskTier(check_store(Path(place)))) as tier:
            before = tier.usage.nbytes
            rows, after = tier.prune(to), tier.usage.nbytes
    return Answer(
        {"rows": rows, "bytes_before": before, "bytes_after": after, **tenants},
        f"{rows:,} rows dropped, {human(before)} before, {human(after)} now",
    )
