"""How an agent is doing, as a JSON document for `kvstow peers` and for dashboards."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvstow.blocks.pool import Pool

if TYPE_CHECKING:
    from kvstow.transfer.service import Service

STATUS_VERSION = 1
RECENT = 30
"""Events that are told, the latest ones."""


def status_document(service: "Service") -> bytes:
    """The document; its keys are listed in docs/reference/wire.md."""
    home = service.home
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
            "staged_rate": contact.path.staged_rate if contact.path else None,
            "tracks": home.transport.num_engines(contact.card.start) if contact.card else None,
            "moved_bytes": contact.moved_bytes,
            "moved_seconds": round(contact.moved_seconds, 6),
            "error": str(contact.error) if contact.error else None,
        }
        for contact in tuple(service.contacts.values())
    ]
    guests = [
        {
            "name": guest.card.agent,
            "silent_seconds": round(now - guest.heard_at, 3),
            "reading": len(guest.reading),
        }
        for guest in tuple(service.serving.guests.values())
    ]
    return json.dumps({
        "version": STATUS_VERSION,
        "agent": home.name,
        "address": service.channel.address,
        "start": home.transport.name,
        "model": home.layout.model,
        "fingerprint": home.fingerprint,
        "memory": f"{home.kind}:{home.device}",
        "arena_bytes": home.layout.nbytes,
        "leases": len(service.leases),
        "transfers": sum(not transfer.done for transfer in service.transfers),
        "quarantined_rows": service.quarantined_rows,
        "peers": peers,
        "guests": guests,
        "slabs": asdict(home.owner.slab_map()) if isinstance(home.owner, Pool) else None,
        "events": [json.loads(event.as_json()) for event in home.events.recent()[-RECENT:]],
        "metrics": home.telemetry.exposition().decode(),
    }).encode()  # fmt: skip
