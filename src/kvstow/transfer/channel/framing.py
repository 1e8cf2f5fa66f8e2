"""Frames, to the byte, the conversations that they belong to, and what brings them.

    offset  bytes
    0       4      magic, "KVSW"
    4       2      version, big endian
    6       …      MessagePack, one array that starts with the message's name

A frame that is too large, of another version or no message is dropped and counted. Whether it came
whole, once, in order and from whom it says is the business of what carries it: TCP, or CURVE.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, Protocol

import msgspec

from kvstow.transfer.channel.messages import AnyMessage, Refused

VERSION = 4
MAGIC = b"KVSW"
MAX_FRAME = 32 << 20

_HEADER = struct.Struct(">4sH")
_PREFIX = _HEADER.pack(MAGIC, VERSION)

DropReason = Literal["magic", "oversized", "version", "body", "session", "flood"]
OnDrop = Callable[[DropReason, str], None]

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


class Unreadable(Exception):
    """A frame that is dropped, and why."""

    def __init__(self, reason: DropReason, detail: str) -> None:
        self.reason: DropReason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}")


def encode_message(message: AnyMessage) -> bytes:
    """The message as a frame."""
    return _PREFIX + _encoder.encode(message)


def decode_message(data: bytes) -> AnyMessage:
    """The message in a frame; Unreadable, and nothing else, where there is none."""
    if len(data) > MAX_FRAME:
        raise Unreadable("oversized", f"{len(data)} bytes, at most {MAX_FRAME}")
    if not data.startswith(_PREFIX):
        if len(data) < _HEADER.size or not data.startswith(MAGIC):
            raise Unreadable("magic", f"{data[:8]!r} does not begin with {MAGIC!r}")
        raise Unreadable("version", f"{_HEADER.unpack_from(data)[1]}, {VERSION} is spoken here")
    try:
        return _decoder.decode(memoryview(data)[_HEADER.size :])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise Unreadable("body", str(error)[:200]) from None


# ── conversations ─────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation: `client` is what the transport of frames calls a client; where we have
    dialled it is empty, and `number` tells our sessions apart."""

    client: bytes = b""
    number: int = field(default_factory=count().__next__)

    @staticmethod
    def of_client(client: bytes) -> "Session":
        """The conversation with a client, equal for all its messages."""
        return Session(client, -1)

    @property
    def is_incoming(self) -> bool:
        return bool(self.client)


def read_frame(data: bytes, on_drop: OnDrop) -> AnyMessage | None:
    """The message in a frame, if it can be read; one of another version counts as a refusal."""
    try:
        return decode_message(data)
    except Unreadable as error:
        on_drop(error.reason, error.detail)
        return Refused("refused", (str(error),)) if error.reason == "version" else None


class Channel(Protocol):
    """All conversations of one agent; used from one thread. `sockets` has the one over ZeroMQ; a
    simulation brings its own. Messages may be lost: whoever needs an answer asks again, or gives up
    after a while."""

    @property
    def address(self) -> str:
        """Where others dial us."""
        ...

    def dial(self, address: str, key: str) -> Session:
        """A line to the agent at an address, whose public key this is where keys are used.

        Raises TransferError for an address or a key that cannot be, or may not be, dialled.
        Nobody need be there yet.
        """
        ...

    def hang_up(self, line: Session) -> None:
        """Forget a line that we have dialled: nothing is heard on it any more."""
        ...

    def send(self, line: Session, message: AnyMessage) -> bool:
        """Whether the message is on its way; not if the other side has left."""
        ...

    def watch(self, fd: int) -> None:
        """Let `heard` also return when this event descriptor is written to, and reset it."""
        ...

    def heard(self, timeout_ms: int) -> Iterator[tuple[Session, AnyMessage]]:
        """Messages that have come, each with its line, a bounded number of them; waits at
        most so long for the first."""
        ...

    def close(self) -> None:
        """Let go of everything, at once."""
        ...
