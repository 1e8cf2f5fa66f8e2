"""How is that agent doing? A question that needs no handshake and no arena."""

import json
import time
from typing import Any

from kvstow.errors import TransferError
from kvstow.transfer.channel.messages import AskStatus, DropReason, TellStatus
from kvstow.transfer.channel.sockets import Channel, Keys


class Asker:
    """Asks agents for their status documents. Used from one thread; close it when done.

    `keys` are our own pair, for agents that use keys.
    """

    def __init__(self, keys: Keys | None = None) -> None:
        self._channel = Channel("inproc://asker", keys, _ignored)

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
        raise TransferError(f"agent at {address} did not answer in {seconds} s", kind="timeout",
                            peer=address)  # fmt: skip

    def close(self) -> None:
        self._channel.close()


def _ignored(reason: DropReason, detail: str) -> None:
    """A message that cannot be read is no answer."""
