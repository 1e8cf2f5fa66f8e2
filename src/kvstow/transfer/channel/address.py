"""Addresses of agents: which of them ZeroMQ can take, which stay on this machine, and where to look
for them: in a list, or behind a name in DNS.

    tcp://10.0.0.1:7000,tcp://10.0.0.2:7000     these
    dns://agents.kv.svc:7000                    every address of a name

What is found are addresses to dial, nothing more: identities and keys are checked when agents meet.
"""

import ipaddress
import socket
from urllib.parse import urlsplit

from kvstow.errors import TransferError

MOST_CHARACTERS = 512
SCHEMES = ("tcp://", "ipc://", "inproc://")
NO_SCHEME = "does not begin with tcp://, ipc:// or inproc://"


def is_loopback(address: str) -> bool:
    """Whether a ZeroMQ address stays on this machine."""
    try:
        parts = urlsplit(address)
        if parts.scheme in ("ipc", "inproc"):
            return True
        host = parts.hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_listened(address: str) -> None:
    """TransferError unless this looks like an address that an agent can listen at."""
    if not address.startswith(SCHEMES):
        raise TransferError(
            f"cannot listen on {address!r}: it {NO_SCHEME}\n\n"
            "hint: tcp://127.0.0.1:* is any free port of this machine",
            kind="refused",
        )


def check_dialled(address: str) -> None:
    """TransferError unless this is an address that an agent may be dialled at.

    ZeroMQ takes some that it never reaches, and hangs on others.
    """
    why = _fault(address)
    if why:
        raise TransferError(
            f"address {address[:80]!r}: {why}\n\nhint: an agent's address looks like "
            f"tcp://127.0.0.1:5555",
            kind="refused",
            peer=address[:80],
        )


def _fault(address: str) -> str:
    if len(address) > MOST_CHARACTERS:
        return f"{len(address)} characters, at most {MOST_CHARACTERS}"
    if not address.isascii() or not address.isprintable() or " " in address:
        return "has characters that no address has"
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        return str(error)
    if parts.scheme == "tcp":
        if parts.path or parts.query or parts.fragment or parts.username is not None:
            return "has more than a host and a port"
        return "" if host and port else "has no host or no port"
    if parts.scheme in ("ipc", "inproc"):
        return "" if address.removeprefix(f"{parts.scheme}://") else "has no name"
    return NO_SCHEME


# ── where agents are ──────────────────────────────────────────────────────────────────

MOST_AGENTS = 4096

HINT = "hint: tcp://HOST:PORT[,…] or dns://NAME:PORT"


def find_agents(source: str) -> tuple[str, ...]:
    """Addresses of agents, sorted, each once; TransferError where a source is none or is silent."""
    addresses = _resolve(source) if source.startswith("dns://") else _split(source)
    for address in addresses:
        check_dialled(address)
    if len(addresses) > MOST_AGENTS:
        raise TransferError(
            f"{source}: {len(addresses)} agents, at most {MOST_AGENTS}", kind="refused"
        )
    return tuple(sorted(set(addresses)))


def check_source(source: str) -> None:
    """TransferError unless agents can be looked for there; nobody is asked."""
    if source.startswith("dns://"):
        _host_and_port(source)
    else:
        for address in _split(source):
            check_dialled(address)


def _split(source: str) -> list[str]:
    return [part.strip() for part in source.split(",") if part.strip()]


def _host_and_port(source: str) -> tuple[str, int]:
    try:
        parts = urlsplit(source)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise TransferError(f"{source!r}: {error}\n\n{HINT}", kind="refused") from None
    if not host or not port:
        raise TransferError(f"{source!r} has no host or no port\n\n{HINT}", kind="refused")
    return host, port


def _resolve(source: str) -> list[str]:
    host, port = _host_and_port(source)
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise TransferError(f"{source}: {error}", kind="refused") from None
    hosts = {str(info[4][0]) for info in infos}
    return [f"tcp://[{each}]:{port}" if ":" in each else f"tcp://{each}:{port}" for each in hosts]
