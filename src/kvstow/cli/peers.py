"""`kvstow peers`: live agents, who they talk to, how fast, how well."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstow.cli import options
from kvstow.cli.output import FAILED, MISUSED, emit_json, emit_text, human, refuse, table
from kvstow.errors import SpecError, TransferError
from kvstow.plan.words import counted

if TYPE_CHECKING:
    from kvstow.transfer.channel.curve import Keys
    from kvstow.transfer.channel.status import Asker

Agents = Annotated[
    list[str],
    typer.Argument(
        metavar="AGENT",
        help="Agents: tcp://HOST:PORT, dns://NAME:PORT or etcd://HOST:PORT/PREFIX.",
        show_default=False,
    ),
]
Watch = Annotated[
    float | None,
    typer.Option(
        "--watch",
        min=0.1,
        max=options.MAX_WAIT,
        metavar="SECONDS",
        help="Refresh every SECONDS.",
        show_default=False,
    ),
]

MISSES = {
    "miss": "not held",
    "absent": "not held",
    "evicted": "held no longer",
    "step": "for shorter blocks than there are",
    "error": "failed",
    "identity": "of another computation",
    "states": "for recurrent states, which are not lent",
    "busy": "too many at once",
    "not told": "for reasons that it did not tell",
}
"""Why questions got no ticket."""

KeysFile = Annotated[
    Path | None,
    typer.Option(
        "--keys-file",
        metavar="FILE",
        help="Key file; needed if the agents use keys.",
        show_default=False,
    ),
]


def peers(
    agents: Agents,
    watch: Watch = None,
    keys_file: KeysFile = None,
    json: options.Json = False,
) -> None:
    """Show the status of running agents.

    Exits with 1 if one of them does not answer.
    """
    addresses = [each for agent in agents for each in _found(agent)]
    documents: list[dict[str, Any]] = []
    from kvstow.transfer.channel.status import Asker

    asker = Asker(read_keys(keys_file))
    try:
        while True:
            documents = [_asked(asker, address) for address in addresses]
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


def read_keys(file: Path | None) -> "Keys | None":
    """The keys in a file; ends with 2 where it has none."""
    from kvstow.transfer.channel.curve import Keys

    try:
        return Keys.read(file) if file is not None else None
    except SpecError as error:
        refuse(str(error), code=MISUSED)


def _found(agent: str) -> tuple[str, ...]:
    """The agents that an argument stands for; ends with 2 on what stands for none."""
    if not agent.startswith(("dns://", "etcd://")):
        options.check_agent(agent)
        return (agent,)
    from kvstow.transfer.discovery import found_agents

    try:
        return found_agents(agent)
    except TransferError as error:
        refuse(str(error), code=MISUSED)


def _asked(asker: "Asker", address: str) -> dict[str, Any]:
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
        f"{counted(document['quarantined_rows'], 'row')} in quarantine{_held(document)}"
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
        (guest["name"], "reads" if guest["reading"] else "guest", "–", "–", _served(guest))
        for guest in document["guests"]
    ]
    if not rows:
        return head
    shown = table(("peer", "health", "direction", "GB/s", "moved"), rows, num_left=3)
    return "\n\n".join([head, shown, *_missed(document)])


def _missed(document: dict[str, Any]) -> list[str]:
    """What became of this agent's own questions, a line for each peer that had no ticket."""
    misses = {peer["name"]: peer.get("misses", {}) for peer in document["peers"]}
    return [
        f"{name} had no ticket for {counted(sum(why.values()), 'question')}: {_reasons(why)}"
        for name, why in misses.items()
        if why
    ]


def _reasons(counts: dict[str, int]) -> str:
    return ", ".join(f"{n:,} {MISSES.get(kind, kind)}" for kind, n in counts.items())


def _served(guest: dict[str, Any]) -> str:
    """What it has pulled; older agents do not tell."""
    return human(guest["moved_bytes"]) if "moved_bytes" in guest else "–"


def _held(document: dict[str, Any]) -> str:
    """What may be asked for by key, and what became of questions."""
    blocks = document.get("registered_blocks", 0)  # older agents do not tell
    answers = document.get("answers", {})
    if not blocks and not answers:
        return ""
    asked = sum(answers.values())
    others = {kind: n for kind, n in answers.items() if kind != "ticket"}
    return (
        f", {counted(blocks, 'block')} to be asked for, "
        f"{answers.get('ticket', 0):,} of {counted(asked, 'question')} answered with a ticket"
        + (f" ({_reasons(others)})" if others else "")
    )


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
