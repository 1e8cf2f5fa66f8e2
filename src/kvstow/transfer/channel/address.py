"""Addresses of agents: which of them ZeroMQ can take, and which of them stay on this machine."""

import ipaddress
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
