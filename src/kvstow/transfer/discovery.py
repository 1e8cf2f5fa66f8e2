"""Where agents are: a list, or a name in DNS.

    tcp://10.0.0.1:7000,tcp://10.0.0.2:7000     these
    dns://agents.kv.svc:7000                    every address of a name

What is found are addresses to dial, nothing more: identities and keys are checked when agents meet.
"""

import socket
from urllib.parse import urlsplit

from kvstow.errors import TransferError
from kvstow.transfer.channel.address import check_dialled

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
