"""How an agent is doing: a JSON document for `kvstow peers` and for dashboards.

`Asker` asks for it; that needs no handshake and no arena. Whoever asks again and again gets
the same document for a while.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvstow.blocks.pool import Pool
from kvstow.errors import TransferError
from kvstow.transfer.channel.curve import Keys
from kvstow.transfer.channel.framing import DropReason
from kvstow.transfer.channel.messages import AskStatus, TellStatus
from kvstow.transfer.channel.sockets import SocketChannel

if TYPE_CHECKING:
    from kvstow.transfer.service import Service

STATUS_VERSION = 1
RECENT = 30
"""Events that are told, the latest ones."""

FRESH_SECONDS = 0.2
"""So long a document is told again: making one takes milliseconds."""


class CachedStatus:
    """A status document that is made when it is asked for, and not again for a while."""

    def __init__(self, make: Callable[[], bytes], clock: Callable[[], float]) -> None:
        self._make = make
        self._clock = clock
        self._made_at = -FRESH_SECONDS
        self._document = b""

    def document(self) -> bytes:
        """The document, at most `FRESH_SECONDS` old."""
        now = self._clock()
        if now - self._made_at >= FRESH_SECONDS:
            self._made_at, self._document = now, self._make()
        return self._document


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


class Asker:
    """Asks agents for their status documents. Used from one thread; close it when done.

    `keys` are our own pair, for agents that use keys.
    """

    def __init__(self, keys: Keys | None = None) -> None:
        self._channel = SocketChannel("inproc://asker", keys, _ignored)

    def ask(self, address: str, *, key: str = "", seconds: float = 2.0) -> dict[str, Any]:
        """The status document of the agent at an address; TransferError if there is none."""
        line = self._channel.dial(address, key)
        try:
            self._channel.send(line, AskStatus())
            limit = time.monotonic() + seconds
            while (left := limit - time.monotonic()) > 0:
                for heard, message in self._channel.heard(max(1, int(left * 1000))):
                    if heard is line and isinstance(message, TellStatus):
                        return json.loads(message.document)
        finally:
            self._channel.hang_up(line)
        raise TransferError(
            f"agent at {address} did not answer in {seconds} s", kind="timeout", peer=address
        )

    def close(self) -> None:
        self._channel.close()


def _ignored(reason: DropReason, detail: str) -> None:
    """A message that cannot be read is no answer."""
