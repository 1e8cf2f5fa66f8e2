"""How an agent is doing, as a JSON document for `kvstow peers` and for dashboards."""

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstow.transfer.agent import Agent

STATUS_VERSION = 1


def status_document(agent: "Agent") -> bytes:
    """The document; its keys are listed in docs/reference/wire.md."""
    home = agent.home
    now = home.clock()
    peers = [
        {
            "name": contact.name,
            "address": contact.address,
            "state": contact.state,
            "silent_seconds": round(now - contact.heard_at, 3) if contact.heard_at else None,
            "direction": contact.path.direction if contact.path else None,
            "read_rate": contact.path.read_rate if contact.path else None,
            "write_rate": contact.path.write_rate if contact.path else None,
            "moved_bytes": contact.moved_bytes,
            "moved_seconds": round(contact.moved_seconds, 6),
            "error": str(contact.error) if contact.error else None,
        }
        for contact in tuple(agent.contacts.values())
    ]
    guests = [
        {
            "name": guest.card.agent,
            "silent_seconds": round(now - guest.heard_at, 3),
            "reading": len(guest.reading),
        }
        for guest in tuple(agent.serving.guests.values())
    ]
    failed = [transfer for transfer in agent.transfers if transfer.done]
    return json.dumps({
        "version": STATUS_VERSION,
        "agent": agent.name,
        "address": agent.address,
        "start": home.transport.name,
        "model": home.layout.model,
        "fingerprint": home.fingerprint,
        "memory": f"{home.kind}:{home.device}",
        "arena_bytes": home.layout.nbytes,
        "leases": len(agent.leases),
        "transfers": len(agent.transfers) - len(failed),
        "quarantined_rows": sum(len(b) for t in failed for b in t.goal.into.values()),
        "peers": peers,
        "guests": guests,
    }).encode()  # fmt: skip
