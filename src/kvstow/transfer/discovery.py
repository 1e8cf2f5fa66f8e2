"""Where agents are: a list, a name in DNS, or leases in etcd.

    tcp://10.0.0.1:7000,tcp://10.0.0.2:7000     these
    dns://agents.kv.svc:7000                    every address of a name
    etcd://10.0.0.9:2379/kvstow/                whoever has a lease below a key

An agent keeps its own address in etcd with `EtcdLease`: it vanishes a few seconds after the
process has. etcd is spoken to over its HTTP gateway, so nothing has to be installed. What is found
are addresses to dial, nothing more: identities and keys are checked when agents meet.
"""

import base64
import json
import logging
import socket
import threading
import urllib.request
from typing import Any, Self
from urllib.parse import urlsplit

from kvstow.errors import TransferError
from kvstow.transfer.channel.address import check_dialled

log = logging.getLogger(__name__)

SECONDS = 5.0
MOST_AGENTS = 4096
MOST_ANSWER_BYTES = 16 << 20

HINT = "hint: tcp://HOST:PORT[,…], dns://NAME:PORT or etcd://HOST:PORT/PREFIX"


def found_agents(source: str, *, seconds: float = SECONDS) -> tuple[str, ...]:
    """Addresses of agents, sorted, each once; TransferError where a source is none or is silent."""
    match source.partition("://")[0]:
        case "dns":
            found = _in_dns(source)
        case "etcd":
            found = _in_etcd(source, seconds)
        case _:
            found = [part.strip() for part in source.split(",") if part.strip()]
    for address in found:
        check_dialled(address)
    if len(found) > MOST_AGENTS:
        raise TransferError(f"{source}: {len(found)} agents, at most {MOST_AGENTS}", kind="refused")
    return tuple(sorted(set(found)))


def check_source(source: str) -> None:
    """TransferError unless agents can be looked for there; nobody is asked."""
    if source.startswith(("dns://", "etcd://")):
        _parts(source)
        return
    for part in source.split(","):
        check_dialled(part.strip())


def _parts(source: str) -> tuple[str, int, str]:
    """Host, port and the rest."""
    try:
        parts = urlsplit(source)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise TransferError(f"{source!r}: {error}\n\n{HINT}", kind="refused") from None
    if not host or not port:
        raise TransferError(f"{source!r} has no host or no port\n\n{HINT}", kind="refused")
    return host, port, parts.path.lstrip("/")


def _in_dns(source: str) -> list[str]:
    host, port, _ = _parts(source)
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise TransferError(f"{source}: {error}", kind="refused") from None
    hosts = {str(info[4][0]) for info in infos}
    return [f"tcp://[{each}]:{port}" if ":" in each else f"tcp://{each}:{port}" for each in hosts]


# ── etcd ──────────────────────────────────────────────────────────────────────────────


def _in_etcd(source: str, seconds: float) -> list[str]:
    _, _, prefix = _parts(source)
    start, end = prefix.encode() or b"\0", _after(prefix.encode())
    answer = _asked(source, "kv/range", {"key": _b64(start), "range_end": _b64(end)}, seconds)
    try:
        return [base64.b64decode(pair["value"]).decode() for pair in answer.get("kvs", ())]
    except (KeyError, TypeError, ValueError) as error:
        raise TransferError(f"{source}: not agents: {error!r}", kind="refused") from None


def _after(prefix: bytes) -> bytes:
    """The first key behind all that begin so; a zero byte stands for the end of all keys."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else b"\0"


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _asked(source: str, method: str, body: dict[str, Any], seconds: float) -> dict[str, Any]:
    """What etcd's gateway answers; TransferError where it does not."""
    host, port, _ = _parts(source)
    named = f"[{host}]" if ":" in host else host
    request = urllib.request.Request(
        f"http://{named}:{port}/v3/{method}", json.dumps(body).encode(), method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            found: Any = json.loads(answer.read(MOST_ANSWER_BYTES))
    except (OSError, ValueError) as error:
        raise TransferError(f"{source}: {error}", kind="timeout", peer=source) from None
    if not isinstance(found, dict):
        raise TransferError(f"{source}: not an answer of etcd", kind="refused", peer=source)
    return found  # pyright: ignore[reportUnknownVariableType]


class EtcdLease:
    """An agent's address in etcd, as long as this object lives and etcd can be reached.

    `source` is etcd://HOST:PORT/PREFIX. When etcd was away for longer than `seconds`, or has lost
    its data, the address is entered again.
    """

    def __init__(
        self,
        source: str,
        name: str,
        address: str,
        *,
        seconds: int = 10,
    ) -> None:
        check_dialled(address)
        self._source = source
        self._key = _b64((_parts(source)[2] + name).encode())
        self._value = _b64(address.encode())
        self._seconds = seconds
        self._closing = threading.Event()
        self._lease = self._enter()
        self._thread = threading.Thread(target=self._keep, name="kvstow-lease", daemon=True)
        self._thread.start()

    def _enter(self) -> str:
        granted = _asked(self._source, "lease/grant", {"TTL": str(self._seconds)}, SECONDS)
        lease = str(granted.get("ID", ""))
        put = {"key": self._key, "value": self._value, "lease": lease}
        _asked(self._source, "kv/put", put, SECONDS)
        return lease

    def _keep(self) -> None:
        """Renew until the end; enter again what has run out."""
        while not self._closing.wait(self._seconds / 3):
            try:
                kept = _asked(self._source, "lease/keepalive", {"ID": self._lease}, SECONDS)
                if not int(kept.get("result", {}).get("TTL", 0)):
                    self._lease = self._enter()
            except TransferError as error:
                log.warning("%s", error)

    def close(self) -> None:
        """Take the address out of etcd, if it can be reached; once is enough."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        try:
            _asked(self._source, "lease/revoke", {"ID": self._lease}, SECONDS)
        except TransferError as error:
            log.warning("%s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
