"""`kvstow store inspect|verify|prune URL`: stores on S3, Redis and Valkey."""

import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

import typer

from kvstow.cli.output import FAILED, MISUSED, emit_json, emit_text, human, refuse, table
from kvstow.errors import StoreError

if TYPE_CHECKING:
    from kvstow.offload.remote.client import BlobClient
    from kvstow.offload.store import Store

PATIENCE = 10
"""Seconds that a look-up of the command line may take; an engine's budget is far less."""

_AGE = re.compile(r"([0-9]{1,9})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def age(text: str) -> float:
    """The seconds that `90s`, `30m`, `12h` or `7d` are."""
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not an age: for example 90s, 30m, 12h or 7d")
    return int(match[1]) * _SECONDS[match[2]]


@contextmanager
def _opened(url: str) -> "Generator[BlobClient]":
    """A client of the store; ends with 2 where the URL names none."""
    from kvstow.offload.remote.url import opened, parse

    try:
        parse(url)
    except StoreError as error:
        refuse(str(error), code=MISUSED)
    client, _ = opened(url)
    try:
        yield client
    finally:
        client.close()


def opened_store(url: str, identity: str) -> "Store":
    """The store at a URL, as the writers of one computation see it; ends with 2 where there is
    none, or where there are several and `identity` does not choose."""
    from kvstow.offload.remote.collect import writers
    from kvstow.offload.remote.url import parse
    from kvstow.offload.store import Store

    with _opened(url) as client:
        tenant = parse(url)[2].tenant
        layouts = {
            known: writer.layout
            for (owner, known, _), writer in writers(client).items()
            if owner == tenant and known.startswith(identity)
        }
    if len(layouts) != 1:
        named = [f"{known[:8]} {layout.model}" for known, layout in sorted(layouts.items())]
        refuse(
            f"{url}: {len(layouts)} computations have written there for tenant {tenant!r}"
            + "".join(f"\n  {name}" for name in named)
            + "\n\nhint: kvstow store inspect URL; choose one with --identity",
            code=MISUSED,
        )
    (layout,) = layouts.values()
    patient = url if "budget=" in url else f"{url}{'&' if '?' in url else '?'}budget={PATIENCE}"
    return Store(remote=patient).bind(layout)


def inspect(url: str, *, json: bool) -> None:
    """Show what a remote store holds, by tenant and layout."""
    from kvstow.offload.remote.collect import survey

    with _opened(url) as client:
        found = survey(client)
    if json:
        emit_json(found)
        return
    emit_text(f"{found['url']}: {found['rows']:,} rows, {human(found['bytes'])}")
    if found["layouts"]:
        heads = ["tenant", "model", "identity", "layout", "order", "tp", "pp", "rows", "bytes"]
        emit_text(table([*heads, "newest"], [_line(one) for one in found["layouts"]]))


def _line(one: dict[str, Any]) -> list[str]:
    known = one["order"] is not None
    newest = one["newest"]
    return [
        one["tenant"],
        one["model"] or ("" if known else "no manifest"),
        one["identity"][:8],
        one["fingerprint"][:8],
        one["order"] or "",
        f"{one['tp'][0]} of {one['tp'][1]}" if known else "",
        f"{one['pp'][0]} of {one['pp'][1]}" if known else "",
        f"{one['rows']:,}",
        human(one["bytes"]),
        "" if newest is None else f"{datetime.fromtimestamp(newest):%Y-%m-%d %H:%M:%S}",
    ]


def verify(url: str, *, json: bool) -> None:
    """Read every row of a remote store; ends with 1 if some were damaged."""
    from rich.console import Console
    from rich.progress import Progress

    from kvstow.offload.remote.collect import verify as verified

    quiet = json or not sys.stderr.isatty()
    with _opened(url) as client, Progress(console=Console(stderr=True), disable=quiet) as bar:
        task = bar.add_task("rows", total=None)
        found = verified(client, lambda rows: bar.advance(task, rows))
    damaged = [{"name": name, "reason": reason} for name, reason in found.damaged]
    if json:
        facts = {"ok": not damaged, "rows": found.rows, "bytes": found.nbytes, "damaged": damaged}
        emit_json(facts)
    else:
        emit_text(f"{found.rows:,} rows, {human(found.nbytes)} read: {len(damaged):,} damaged")
        emit_text(*(f"{name}: {reason}" for name, reason in found.damaged[:20]))
    if damaged:
        raise typer.Exit(FAILED)


def prune(
    url: str, *, to: int | None, tenant_to: int | None, older_than: float | None, json: bool
) -> None:
    """Remove rows of a remote store, the oldest first, and leave the count for writers."""
    from kvstow.offload.remote.collect import collect

    with _opened(url) as client:
        done = collect(client, most=to, most_by_tenant=tenant_to, older_than=older_than)
    before, after = done.left.nbytes + done.nbytes, done.left.nbytes
    if json:
        facts = {"rows": done.rows, "bytes_before": before, "bytes_after": after}
        emit_json(facts | {"tenants": done.left.tenants})
    else:
        emit_text(f"{done.rows:,} rows dropped, {human(before)} before, {human(after)} now")
