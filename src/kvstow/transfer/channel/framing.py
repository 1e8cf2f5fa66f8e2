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
from typing import Literal, Protocol

import msgspec

from kvstow.transfer.channel.messages import (
    AnyMessage,
    AskStatus,
    Hello,
    Refused,
    UnknownSession,
)

VERSION = 4
MAGIC = b"KVSW"
MAX_FRAME = 32 << 20

MAX_CLIENTS = 4096
"""Clients that are known at once; more are not heard until others have gone."""

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


class Session:
    """One conversation. `client` is what the transport of frames calls a client; None where we
    have dialled."""

    def __init__(self, client: bytes | None = None) -> None:
        self.client = client

    @property
    def is_incoming(self) -> bool:
        return self.client is not None


def heard_from_server(data: bytes, on_drop: OnDrop) -> AnyMessage | None:
    """What a server has said to us, if it can be read."""
    try:
        return decode_message(data)
    except Unreadable as error:
        on_drop(error.reason, error.detail)
        return Refused("refused", (str(error),)) if error.reason == "version" else None


class Clients:
    """Sessions of those who have dialled us. `reply` sends a frame to a client.

    A client is heard from its hello on; before, only a question for our status is. It says
    hello once: whoever wants another session dials again.
    """

    def __init__(self, reply: Callable[[bytes, bytes], bool], on_drop: OnDrop) -> None:
        self._reply = reply
        self._on_drop = on_drop
        self._sessions: dict[bytes, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def forget(self, session: Session) -> None:
        """Hear this session no more; its client may say hello again."""
        if session.client is not None and self._sessions.get(session.client) is session:
            del self._sessions[session.client]

    def heard(self, client: bytes, data: bytes) -> tuple[Session, AnyMessage] | None:
        """What a client says, and in which session, if that is to be heard."""
        try:
            message = decode_message(data)
        except Unreadable as error:
            self._on_drop(error.reason, error.detail)
            if error.reason == "version":
                self._reply(client, encode_message(Refused("refused", (str(error),))))
            return None
        session = self._sessions.get(client)
        if isinstance(message, Hello):
            session = self._greeted(client)
        elif isinstance(message, AskStatus):
            session = session or Session(client)
        elif session is None:
            self._on_drop("session", f"{type(message).__name__} before any hello")
            self._reply(client, encode_message(UnknownSession()))
        return None if session is None else (session, message)

    def _greeted(self, client: bytes) -> Session | None:
        if client in self._sessions:
            self._on_drop("session", "a second hello of the same client")
            return None
        if len(self._sessions) >= MAX_CLIENTS:
            self._on_drop("flood", f"{MAX_CLIENTS} clients are known already")
            return None
        session = self._sessions[client] = Session(client)
        return session


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
        """Forget a line: nothing is heard on it any more."""
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
