"""What the protocol needs from a side channel, and nothing about sockets.

`sockets.SocketChannel` is the one over ZeroMQ; a simulation brings its own. Messages may be
lost: whoever needs an answer asks again, or gives up after a while.
"""

from collections.abc import Iterator
from typing import Protocol

from kvstow.transfer.channel.messages import AnyMessage


class Line(Protocol):
    """One conversation with another agent; equal to itself only."""

    @property
    def is_incoming(self) -> bool:
        """Whether the other side has dialled us."""
        ...


class Channel(Protocol):
    """All conversations of one agent; used from one thread."""

    @property
    def address(self) -> str:
        """Where others dial us."""
        ...

    def dial(self, address: str, key: str) -> Line:
        """A line to the agent at an address, whose public key this is where keys are used.

        Raises TransferError for an address or a key that cannot be, or may not be, dialled.
        Nobody need be there yet.
        """
        ...

    def hang_up(self, line: Line) -> None:
        """Forget a line: nothing is heard on it any more."""
        ...

    def send(self, line: Line, message: AnyMessage) -> bool:
        """Whether the message is on its way; not if the other side has left."""
        ...

    def watch(self, fd: int) -> None:
        """Let `heard` also return when this event descriptor is written to, and reset it."""
        ...

    def heard(self, timeout_ms: int) -> Iterator[tuple[Line, AnyMessage]]:
        """Messages that have come, each with its line, a bounded number of them; waits at
        most so long for the first."""
        ...

    def close(self) -> None:
        """Let go of everything, at once."""
        ...
