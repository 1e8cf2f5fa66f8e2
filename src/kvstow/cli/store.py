"""`kvstow store`: look into a store on disk or behind a URL, verify, convert and shrink it."""

import re
import shutil
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstow.cli import options, remote_store
from kvstow.cli.output import FAILED, MISUSED, CommandGroup, note, refuse, reporting
from kvstow.text import human, table

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstow.offload.disk.convert import Converted
    from kvstow.plan.layout import Layout

store = typer.Typer(help="Inspect, verify, convert or prune stores of rows.", cls=CommandGroup)

MOST_NAMED = 20
"""Damaged rows that are named in the text."""

_AGE = re.compile(r"([0-9]{1,9})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _age(text: str) -> float:
    """The seconds that `90s`, `30m`, `12h` or `7d` are."""
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not an age: for example 90s, 30m, 12h or 7d")
    return int(match[1]) * _SECONDS[match[2]]


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
        parser=_age,
        metavar="AGE",
        help="Drop rows older than AGE, such as 12h or 7d (remote).",
        show_default=False,
    ),
]


# ── inspect ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What a store on disk holds, and who writes to it."""

    facts: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return self.facts

    def __str__(self) -> str:
        facts = self.facts
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


@store.command()
@reporting
def inspect(place: Place) -> "StoreReport | remote_store.RemoteReport":
    """What a store holds, and who writes to it.

    Reads only: nothing is repaired or written.
    """
    from kvstow.offload.disk.inspect import survey

    if "://" in place:
        return remote_store.inspect(place)
    return StoreReport(survey(options.check_store(Path(place))))


# ── verify ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """How many rows were read, and which of them were damaged."""

    rows: int
    nbytes: int
    damaged: list[dict[str, Any]]

    @property
    def failure(self) -> str | None:
        return f"{len(self.damaged):,} damaged rows" if self.damaged else None

    def as_json(self) -> dict[str, Any]:
        ok = not self.damaged
        return {"ok": ok, "rows": self.rows, "bytes": self.nbytes, "damaged": self.damaged}

    def __str__(self) -> str:
        lines = [f"{self.rows:,} rows, {human(self.nbytes)} read: {len(self.damaged):,} damaged"]
        return "\n".join(
            [*lines, *(": ".join(map(str, each.values())) for each in self.damaged[:20])]
        )


@store.command()
@reporting
def verify(place: Place) -> VerifyReport:
    """Compare every row with its checksum, and drop damaged ones.

    Exits with 1 if there were any.
    """
    if "://" in place:
        from kvstow.offload.remote.collect import verify as verify_objects

        with remote_store.client_at(place) as client, _bar(None) as advance:
            done = verify_objects(client, advance)
        damaged = [{"name": name, "reason": reason} for name, reason in done.damaged]
        return VerifyReport(done.rows, done.nbytes, damaged)
    from kvstow.offload.disk.inspect import verify as verify_rows
    from kvstow.offload.disk.tier import DiskTier

    with (
        closing(DiskTier(options.check_store(Path(place)))) as tier,
        _bar(tier.usage.rows) as advance,
    ):
        found = verify_rows(tier, advance)
    damaged = [{"group": group, "key": key.hex()} for group, key in found.damaged]
    return VerifyReport(found.rows, found.nbytes, damaged)


@contextmanager
def _bar(total: int | None) -> "Generator[Callable[[int], None]]":
    """A bar on stderr, if that is a terminal, which is told rows."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("rows", total=total)
        yield lambda rows: bar.advance(task, rows)


# ── convert ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """How many rows a new store has of an old one."""

    done: "Converted"

    @property
    def failure(self) -> str | None:
        left = self.done.incomplete
        return f"{left:,} rows could not be read and were left out" if left else None

    def as_json(self) -> dict[str, Any]:
        done = self.done
        return {"written": done.written, "incomplete": done.incomplete, "left_out": done.left_out}

    def __str__(self) -> str:
        return f"{self.done.written:,} rows written, {self.done.incomplete:,} left behind"


@store.command()
@reporting
def convert(
    directories: Directories, to: NewStore, layout: NewLayout, capacity: Capacity = None
) -> ConvertReport:
    """Write a store's rows into a new store of another layout.

    `kvstow plan --manifest FILE` makes the layout. Order, alignment and tensor parallelism
    may differ; tokens per block may be a multiple. Rows that fit in no block of the new size are
    counted. Exits with 1 if rows could not be read and were left out. A conversion that fails
    leaves nothing behind.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        what = "a store" if (to / "layout.json").exists() else "something else"
        refuse(f"{to}: there is {what} already\n\nhint: name a new directory", code=FAILED)
    new_layout = options.layout_in(layout)
    old = [options.check_store(directory) for directory in directories]
    done = _converted(old, to, new_layout, capacity)
    if done.left_out:
        note(
            f"{done.left_out:,} rows of the old store are in no block of the new size: none "
            "ends where they end, their neighbours are gone, or they were stored without links"
        )
    return ConvertReport(done)


def _converted(
    directories: list[Path], to: Path, layout: "Layout", capacity: int | None
) -> "Converted":
    """Write the rows of stores into a new one, which is removed again if that fails."""
    from kvstow.offload.disk.convert import convert
    from kvstow.offload.disk.tier import DiskTier

    with ExitStack() as stack:
        old = [stack.enter_context(closing(DiskTier(directory))) for directory in directories]
        identity = old[0].layout.identity
        if layout.identity is None and identity is not None:
            layout = layout.identified(identity)  # a plan does not know the weights
        cleaning = stack.enter_context(ExitStack())
        cleaning.callback(_remove, to, itself=not to.exists())
        most = capacity or sum(tier.usage.capacity for tier in old)
        with closing(DiskTier(to, layout, capacity=most)) as new:
            done = convert(old, new)
        cleaning.pop_all()
    return done


def _remove(directory: Path, *, itself: bool) -> None:
    """Remove what a conversion has written; the directory too, if that made it."""
    for path in directory.iterdir() if directory.is_dir() else ():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if itself and directory.is_dir():
        directory.rmdir()


# ── prune ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class PruneReport:
    """How many rows went, and what is left; by tenant in a remote store."""

    rows: int
    before: int
    after: int
    tenants: dict[str, int] | None = None

    def as_json(self) -> dict[str, Any]:
        facts = {"rows": self.rows, "bytes_before": self.before, "bytes_after": self.after}
        return facts if self.tenants is None else facts | {"tenants": self.tenants}

    def __str__(self) -> str:
        return f"{self.rows:,} rows dropped, {human(self.before)} before, {human(self.after)} now"


@store.command()
@reporting
def prune(
    place: Place,
    to: PruneTo = None,
    tenant_to: TenantTo = None,
    older_than: OlderThan = None,
) -> PruneReport:
    """Drop rows until the rest fits, those used longest ago first.

    A remote store drops the oldest, and may be in use meanwhile. Writers with limits learn from
    this command how much it holds, so run it every few minutes.
    """
    if "://" in place:
        from kvstow.offload.remote.collect import collect

        with remote_store.client_at(place) as client:
            done = collect(client, most=to, most_by_tenant=tenant_to, older_than=older_than)
        left = done.left
        return PruneReport(done.rows, left.nbytes + done.nbytes, left.nbytes, left.tenants)
    from kvstow.offload.disk.tier import DiskTier

    if to is None or tenant_to is not None or older_than is not None:
        refuse("a store on disk is pruned --to SIZE, and by nothing else", code=MISUSED)
    with closing(DiskTier(options.check_store(Path(place)))) as tier:
        before = tier.usage.nbytes
        return PruneReport(tier.prune(to), before, tier.usage.nbytes)
