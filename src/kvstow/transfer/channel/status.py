"""How an agent is doing: a JSON document for `kvstow status`.

`StatusClient` reads it, which needs no handshake and no arena.
"""

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvstow.blocks.pool import Pool
from kvstow.errors import TransferError
from kvstow.transfer.channel.curve import Keys
from kvstow.transfer.channel.framing import DropReason, Session
from kvstow.transfer.channel.messages import AskStatus, TellStatus
from kvstow.transfer.channel.sockets import SocketChannel

if TYPE_CHECKING:
    from kvstow.transfer.agent import Agent
    from kvstow.transfer.peers.outgoing import Outgoing
    from kvstow.transfer.serve import Incoming

STATUS_VERSION = 1
RECENT = 30
"""Events that are told, the latest ones."""

WAY = "direction", "unmapped", "read_rate", "write_rate", "slots_rate"
"""What is null of a peer that was not met."""

NEEDS_KEYS = "an agent with keys answers only those that have some: --keys-file"


def status_document(agent: "Agent") -> bytes:
    """The document; its keys are listed in docs/reference/wire.md."""
    endpoint = agent.endpoint
    now, owner, lent = endpoint.clock(), endpoint.owner, agent.prefixes.source
    document = {
        "version": STATUS_VERSION,
        "agent": endpoint.name,
        "address": agent.address,
        "start": endpoint.start,
        "model": endpoint.layout.model,
        "fingerprint": endpoint.fingerprint,
        "memory": f"{endpoint.kind}:{endpoint.device}",
        "arena_bytes": endpoint.layout.nbytes,
        "leases": len(agent.server.leases),
        "transfers": len(agent.pulls.running),
        "quarantined_rows": agent.quarantine.rows,
        "lent_blocks": len(lent) if lent is not None else 0,
        "answers": dict(agent.prefixes.answers),
        "peers": [_outgoing(peer, now) for peer in agent.peers.every()],
        "guests": [_incoming(agent, peer, now) for peer in tuple(agent.server.incoming.values())],
        "slabs": asdict(owner.slab_map()) if isinstance(owner, Pool) else None,
        "events": [
            json.loads(event.as_json()) for event in agent.telemetry.events.recent()[-RECENT:]
        ],
        "metrics": agent.telemetry.exposition().decode(),
    }
    return json.dumps(document).encode()


def _outgoing(peer: "Outgoing", now: float) -> dict[str, Any]:
    path: dict[str, Any] = peer.way() if peer.path else dict.fromkeys(WAY)
    return {
        "name": peer.name,
        "address": peer.address,
        "state": peer.state,
        "silent_seconds": round(now - peer.heard_at, 3) if peer.heard_at else None,
        **path,
        "unmapped": peer.unmapped or None,
        "moved_bytes": peer.moved_bytes,
        "moved_seconds": round(peer.moved_seconds, 6),
        "misses": dict(peer.misses),
        "error": str(peer.error) if peer.error else None,
    }


def _incoming(agent: "Agent", peer: "Incoming", now: float) -> dict[str, Any]:
    servings = tuple(agent.server.servings.values())
    return {
        "name": peer.card.agent,
        "silent_seconds": round(now - peer.heard_at, 3),
        "reading": sum(serving.peer is peer for serving in servings),
        "moved_bytes": peer.moved_bytes,
    }


class StatusClient:
    """Asks agents for their status documents. Used from one thread; close it when done.

    `keys` are our own pair, for agents that use keys; agents that use none need none.
    """

    def __init__(self, keys: Keys | None = None) -> None:
        self._channel = SocketChannel("inproc://client", keys, _ignored)
        self._keys = sorted(keys.peers) if keys else [""]
        self._hint = "" if keys else f"\n\nhint: {NEEDS_KEYS}"

    def ask(self, address: str, *, key: str = "", seconds: float = 2.0) -> dict[str, Any]:
        """The status document of the agent at an address; TransferError if there is none.

        Without `key`, the agent may have any of the public keys that we talk to.
        """
        lines: list[Session] = []
        try:
            for each in [key] if key else self._keys:
                lines.append(self._channel.dial(address, each))
                self._channel.send(lines[-1], AskStatus())
            limit = time.monotonic() + seconds
            while (left := limit - time.monotonic()) > 0:
                for heard, message in self._channel.heard(max(1, int(left * 1000))):
                    if isinstance(message, TellStatus) and any(heard is line for line in lines):
                        return json.loads(message.document)
        finally:
            for line in lines:
                self._channel.hang_up(line)
        raise TransferError(
            f"agent at {address} did not answer in {seconds} s{self._hint}",
            kind="timeout",
            peer=address,
        )

    def close(self) -> None:
        self._channel.close()


def _ignored(reason: DropReason, detail: str) -> None:
    """A message that cannot be read is no answer."""
