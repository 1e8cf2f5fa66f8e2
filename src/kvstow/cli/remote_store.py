"""Stores on S3, Redis and Valkey, as `kvstow store` and `kvstow why` see them."""

from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from kvstow.cli.output import MISUSED, refuse
from kvstow.errors import StoreError
from kvstow.text import human, table

if TYPE_CHECKING:
    from kvstow.offload.remote.client import BlobClient
    from kvstow.offload.store import Store

PATIENCE = 10
"""Seconds that a look-up of the command line may take; an engine's budget is far less."""

COLUMNS = ["tenant", "model", "identity", "layout", "order", "tp", "pp", "rows", "bytes", "newest"]


@contextmanager
def client_at(url: str) -> "Generator[BlobClient]":
    """A client of the store; ends with 2 where the URL names none."""
    from kvstow.offload.remote.url import opened, parse

    try:
        parse(url)
    except StoreError as error:
        refuse(str(error), code=MISUSED)
    client, _ = opened(url)
    with closing(client):
        yield client


def open_remote_store(url: str, identity: str) -> "Store":
    """The store at a URL, as the writers of one computation see it; ends with 2 where there is
    none, or where there are several and `identity` does not choose."""
    from kvstow.offload.remote.collect import writers
    from kvstow.offload.remote.url import parse
    from kvstow.offload.store import Store

    with client_at(url) as client:
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


@dataclass(frozen=True, slots=True)
class RemoteReport:
    """What a remote store holds, by tenant and layout."""

    facts: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return self.facts

    def __str__(self) -> str:
        facts = self.facts
        head = f"{facts['url']}: {facts['rows']:,} rows, {human(facts['bytes'])}"
        if not facts["layouts"]:
            return head
        return f"{head}\n\n{table(COLUMNS, map(_line, facts['layouts']), num_left=7)}"


def inspect(url: str) -> RemoteReport:
    """What a remote store holds."""
    from kvstow.offload.remote.collect import survey

    with client_at(url) as client:
        return RemoteReport(survey(client))


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
