"""Datagrams between an engine's scheduler and its workers, on one machine: sooner than a step.

What is sent has a mark that only somebody with the inbox's secret can make, which vLLM alone
carries. What does not arrive (another machine, a message of more than some 200 KB, a full queue)
was not sent: `send` says so.
"""

import pickle
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from hmac import compare_digest
from secrets import token_bytes, token_hex
from time import monotonic
from typing import Any
from weakref import finalize

MARK_BYTES = 32
MAX_BYTES = 1 << 20


def _mark(secret: bytes, body: bytes) -> bytes:
    return blake2b(body, digest_size=MARK_BYTES, key=secret, person=b"kvstow mail").digest()


@dataclass(frozen=True, slots=True)
class MailAddress:
    """Where an inbox of this machine is, and what opens it."""

    name: str = ""
    secret: bytes = field(default=b"", repr=False)

    def send(self, message: object) -> bool:
        """Send, and wait for nothing. Whether it lies in the inbox now."""
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        return self._send(_mark(self.secret, body) + body)

    def wake(self) -> None:
        """Have a `receive` return that waits."""
        self._send(b"")

    def _send(self, data: bytes) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, suppress(OSError):
            return sender.sendto(data, socket.MSG_DONTWAIT, self.name) >= 0
        return False


NOWHERE = MailAddress()


class Inbox:
    """An inbox of this process."""

    def __init__(self) -> None:
        self.address = MailAddress(f"\0kvstow-{token_hex(16)}", token_bytes(16))
        """A name, not a file: nothing is left behind."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address.name)
        finalize(self, self._socket.close)

    def receive(self, seconds: float | None = None) -> Any:
        """The next message; None after so many seconds, or when somebody has sent nothing."""
        until = None if seconds is None else monotonic() + seconds
        while True:
            left = None if until is None else max(0.0, until - monotonic())
            self._socket.settimeout(left)
            try:
                data = self._socket.recv(MAX_BYTES)
            except (TimeoutError, BlockingIOError):
                return None
            mark, body = data[:MARK_BYTES], data[MARK_BYTES:]
            if not data:
                return None
            if compare_digest(mark, _mark(self.address.secret, body)):
                return pickle.loads(body)

    def close(self) -> None:
        self._socket.close()
