"""`kvstow store`: look into a store, verify, convert and shrink it."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstow.cli import options, remote_store
from kvstow.cli.output import (
    FAILED,
    MISUSED,
    CommandGroup,
    emit_json,
    emit_text,
    human,
    note,
    refuse,
    table,
)
from kvstow.errors import ManifestError

if TYPE_CHECKING:
    from kvstow.offload.disk.convert import Converted
    from kvstow.offload.disk.inspect import Verified
    from kvstow.plan.layout import Layout

store = typer.Typer(help="Inspect, verify, convert or prune stores of rows.", cls=CommandGroup)

Place = Annotated[
    str,
    typer.Argument(
        metavar="DIR|URL",
        help="The store's directory, or s3://…, redis://…",
        show_default=False,
    ),
]


Directories = Annotated[
    list[Path], typer.Argument(metavar="DIR", help="The stores of all ranks.", show_default=False)
]
NewStore = Annotated[
    Path, typer.Option("--to", metavar="DIR", help="The new store.", show_default=False)
]
NewLayout = Annotated[
    Path,
    typer.Option(
        "--layout", metavar="FILE", help="Manifest of the new layout.", show_default=False
    ),
]
Capacity = Annotated[
    int | None,
    typer.Option(
        "--capacity",
        parser=options.size,
        metavar="SIZE",
        help="Capacity of the new store.",
        show_default="that of all old stores together",
    ),
]
PruneTo = Annotated[
    int | None,
    typer.Option(
        "--to",
        parser=options.size,
        metavar="SIZE",
        help="Largest size of the data files, or of all rows of a remote store.",
        show_default=False,
    ),
]
TenantTo = Annotated[
    int | None,
    typer.Option(
        "--tenant-to",
        parser=options.size,
        metavar="SIZE",
        help="Largest size of each tenant's rows (remote).",
        show_default=False,
    ),
]
OlderThan = Annotated[
    float | None,
    typer.Option(
        "--older-than",
        parser=remote_store.age,
        metavar="AGE",
        help="Drop rows older than AGE, such as 12h or 7d (remote).",
        show_default=False,
    ),
]


@store.command()
def inspect(place: Place, json: options.Json = False) -> None:
    """What a store holds, and who writes to it.

    Reads only: nothing is repaired or written.
    """
    from kvstow.offload.disk.inspect import survey

    if "://" in place:
        remote_store.inspect(place, json=json)
        return
    directory = Path(place)
    options.check_store(directory)
    found = survey(directory)
    if json:
        emit_json(found)
    else:
        emit_text(*_inspected(found))


@store.command()
def verify(place: Place, json: options.Json = False) -> None:
    """Compare every row with its checksum, and drop damaged ones.

    Exits with 1 if there were any.
    """
    if "://" in place:
        remote_store.verify(place, json=json)
        return
    found = _verified(Path(place), shows_bar=not json and sys.stderr.isatty())
    damaged = [{"group": group, "key": key.hex()} for group, key in found.damaged]
    ok = not damaged
    if json:
        emit_json(
            {
                "ok": ok,
                "rows": found.rows,
                "bytes": found.nbytes,
                "damaged": damaged,
            }
        )
    else:
        emit_text(f"{found.rows:,} rows, {human(found.nbytes)} read: {len(damaged):,} damaged")
    if not ok:
        raise typer.Exit(FAILED)


def _verified(directory: Path, *, shows_bar: bool) -> "Verified":
    """What reading every row of a store found."""
    from rich.console import Console
    from rich.progress import Progress

    from kvstow.offload.disk.inspect import verify as verified
    from kvstow.offload.disk.tier import DiskTier

    options.check_store(directory)
    tier = DiskTier(directory)
    try:
        with Progress(console=Console(stderr=True), disable=not shows_bar) as bar:
            task = bar.add_task("rows", total=tier.usage.rows)
            return verified(tier, lambda rows: bar.advance(task, rows))
    finally:
        tier.close()


@store.command()
def convert(
    directories: Directories,
    to: NewStore,
    layout: NewLayout,
    capacity: Capacity = None,
    json: options.Json = False,
) -> None:
    """Write a store's rows into a new store of another layout.

    `kvstow plan --manifest FILE` makes the layout. Order, alignment and tensor parallelism
    may differ; tokens per block may be a multiple. Rows that fit in no block of the new size are
    counted. Exits with 1 if rows could not be read and were left out. A conversion that fails
    leaves nothing behind.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        what = "a store" if (to / "layout.json").exists() else "something else"
        refuse(f"{to}: there is {what} already\n\nhint: name a new directory", code=FAILED)
    wanted = _layout(layout)
    for directory in directories:
        options.check_store(directory)
    done = _converted(directories, to, wanted, capacity)
    if json:
        emit_json(
            {"written": done.written, "incomplete": done.incomplete, "left_out": done.left_out}
        )
    else:
        emit_text(f"{done.written:,} rows written, {done.incomplete:,} left behind")
        if done.left_out:
            note(
                f"{done.left_out:,} rows of the old store are in no block of the new size: none "
                "ends where they end, their neighbours are gone, or they were stored without links"
            )
    if done.incomplete:
        raise typer.Exit(FAILED)


def _converted(
    directories: list[Path], to: Path, wanted: "Layout", capacity: int | None
) -> "Converted":
    """Write the rows of stores into a new one, which is removed again if that fails."""
    from contextlib import ExitStack

    from kvstow.offload.disk.convert import convert as converted
    from kvstow.offload.disk.tier import DiskTier

    with ExitStack() as stack:
        old: list[DiskTier] = []
        for directory in directories:
            old.append(DiskTier(directory))
            stack.callback(old[-1].close)
        if wanted.identity is None and old[0].layout.identity is not None:
            wanted = wanted.identified(old[0].layout.identity)  # a plan does not know the weights
        most = capacity or sum(tier.usage.capacity for tier in old)
        cleaning = stack.enter_context(ExitStack())
        cleaning.callback(_remove, to, itself=not to.exists())
        new = DiskTier(to, wanted, capacity=most)
        cleaning.callback(new.close)
        done = converted(old, new)
        new.close()
        cleaning.pop_all()
    return done


def _layout(file: Path) -> "Layout":
    """The layout in a manifest; ends with 2 where there is none."""
    from kvstow.plan.manifest import MAX_BYTES, decode

    try:
        with file.open("rb") as stream:
            return decode(stream.read(MAX_BYTES + 1))
    except OSError as error:
        refuse(f"{file}: cannot be read: {error.strerror}", code=MISUSED)
    except ManifestError as error:
        refuse(f"{file}: {error}", code=MISUSED)


def _remove(directory: Path, *, itself: bool) -> None:
    """Remove what a conversion has written; the directory too, if that made it."""
    import shutil

    for path in directory.iterdir() if directory.is_dir() else ():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if itself and directory.is_dir():
        directory.rmdir()


@store.command()
def prune(
    place: Place,
    to: PruneTo = None,
    tenant_to: TenantTo = None,
    older_than: OlderThan = None,
    json: options.Json = False,
) -> None:
    """Drop rows until the rest fits, those used longest ago first.

    A remote store drops the oldest, and may be in use meanwhile. Writers with limits learn from
    this command how much it holds, so run it every few minutes.
    """
    from kvstow.offload.disk.tier import DiskTier

    if "://" in place:
        remote_store.prune(place, to=to, tenant_to=tenant_to, older_than=older_than, json=json)
        return
    if to is None or tenant_to is not None or older_than is not None:
        refuse("a store on disk is pruned --to SIZE, and by nothing else", code=MISUSED)
    directory = Path(place)
    options.check_store(directory)
    tier = DiskTier(directory)
    try:
        before = tier.usage.nbytes
        rows = tier.prune(to)
        after = tier.usage.nbytes
    finally:
        tier.close()
    if json:
        emit_json({"rows": rows, "bytes_before": before, "bytes_after": after})
    else:
        emit_text(f"{rows:,} rows dropped, {human(before)} before, {human(after)} now")


def _inspected(found: dict[str, Any]) -> list[str]:
    head = (
        f"{found['path']}: {found['model'] or 'a model'}, {found['order']}, tp rank "
        f"{found['tp'][0]} of {found['tp'][1]}\n"
        f"{found['rows']:,} rows in {human(found['data_bytes'])}{_capacity(found)}\n"
        f"fingerprint {found['fingerprint']}"
    )
    groups = table(
        ["group", "tokens", "row", "rows", "files", "bytes"],
        [
            [
                g["name"],
                str(g["block_tokens"]),
                human(g["row_bytes"]),
                f"{g['rows']:,}",
                f"{g['files']:,}",
                human(g["bytes"]),
            ]
            for g in found["groups"]
        ],
    )
    writers = "\n".join(
        f"written by process {w['pid']}" + ("" if w["alive"] else ", which died")
        for w in found["writers"]
    )
    return [part for part in (head, groups, writers) if part]


def _capacity(found: dict[str, Any]) -> str:
    return "" if found["capacity"] is None else f" of {human(found['capacity'])}"
