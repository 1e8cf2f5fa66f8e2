"""`kvstow peers`: live agents, who they talk to, how fast, how well."""

import time
from typing import Annotated, Any

import typer

from kvstow.cli import options
from kvstow.cli.output import FAILED, emit_json, emit_text, human, table
from kvstow.errors import TransferError
from kvstow.plan.words import counted

Agents = Annotated[
    list[str],
    typer.Argument(
        metavar="AGENT…", help="Addresses of agents: tcp://127.0.0.1:PORT.", show_default=False
    ),
]
Watch = Annotated[
    float | None,
    typer.Option(
        "--watch", min=0.1, metavar="SECONDS", help="Ask again and again.", show_default=False
    ),
]


def peers(agents: Agents, watch: Watch = None, json: options.Json = False) -> None:
    """Show the status of running agents.

    Exit code 1 if one of them does not answer.
    """
    from kvstow.transfer.channel.status import Asker

    for address in agents:
        options.check_agent(address)
    documents: list[dict[str, Any]] = []
    asker = Asker()
    try:
        while True:
            documents = [_asked(asker, address) for address in agents]
            if json:
                emit_json(documents)
            else:
                emit_text(*(_shown(document) for document in documents))
            if watch is None:
                break
            time.sleep(watch)
    except KeyboardInterrupt:
        pass  # whoever watches ends it so
    finally:
        asker.close()
    if any("error" in document for document in documents):
        raise typer.Exit(FAILED)


def _asked(asker: Any, address: str) -> dict[str, Any]:
    try:
        return asker.ask(address)
    except TransferError as error:
        return {"address": address, "error": str(error)}


def _shown(document: dict[str, Any]) -> str:
    if "error" in document:
        return f"{document['address']}: {document['error']}"
    head = (
        f"{document['agent']} at {document['address']}: {document['model'] or 'a model'} in "
        f"{human(document['arena_bytes'])} of {document['memory']}, "
        f"{counted(document['leases'], 'lease')}, {counted(document['transfers'], 'transfer')}, "
        f"{counted(document['quarantined_rows'], 'row')} in quarantine"
    )
    rows = [
        (
            peer["name"],
            _health(peer),
            peer["direction"] or "–",
            _rate(peer),
            human(peer["moved_bytes"]),
        )
        for peer in document["peers"]
    ] + [
        (guest["name"], "reads" if guest["reading"] else "guest", "–", "–", "–")
        for guest in document["guests"]
    ]
    if not rows:
        return head
    return f"{head}\n\n{table(('peer', 'health', 'direction', 'GB/s', 'moved'), rows, num_left=3)}"


def _health(peer: dict[str, Any]) -> str:
    """Its state; how long it has been silent if that is long."""
    silent = peer["silent_seconds"]
    if peer["state"] == "ready" and silent is not None and silent > 5:
        return f"silent for {silent:.0f} s"
    return peer["state"]


def _rate(peer: dict[str, Any]) -> str:
    """What it moved per second of moving; what was measured at first contact otherwise."""
    if peer["moved_seconds"]:
        return f"{peer['moved_bytes'] / peer['moved_seconds'] / 1e9:.2f}"
    measured = peer["read_rate"] if peer["direction"] == "read" else peer["write_rate"]
    return f"({measured / 1e9:.2f})" if measured else "–"
