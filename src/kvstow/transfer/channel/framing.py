"""Frames, to the byte, and the sessions that they belong to.

    offset  bytes
    0       4      magic, "KVSW"
    4       2      version, big endian
    6       8      session: 0 before the handshake, then what the server drew
    14      8      sequence: grows with every frame of one sender in one session
    22      4      length of the body
    26      4      CRC-32 of all the other bytes
    30      …      body: MessagePack, one array that starts with the message's name

The version is at the same place in every version, so that two versions can tell each other apart. A
frame that is not whole, of another session, or not newer than the last one of its sender, is
dropped and counted. How frames travel is no concern of this module.
"""

import struct
from collections.abc import Callable
from random import Random
from typing import Literal, NamedTuple
from zlib import crc32

import msgspec

from kvstow.transfer.channel.messages import (
    AnyMessage,
    AskStatus,
    Hello,
    Refused,
    Stranger,
)

VERSION = 3
MAGIC = b"KVSW"
MAX_FRAME = 32 << 20

MAX_CLIENTS = 4096
"""Clients that are known at once; more are not heard until others have gone."""

_HEADER = struct.Struct(">4sHQQI")
_CHECKSUM = struct.Struct(">I")
_BODY = _HEADER.size + _CHECKSUM.size

DropReason = Literal[
    "magic", "truncated", "oversized", "version", "checksum", "body", "replayed", "session", "flood"
]
OnDrop = Callable[[DropReason, str], None]

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


class Frame(NamedTuple):
    """A message with what its header says."""

    session: int
    sequence: int
    message: AnyMessage


class Unreadable(Exception):
    """A frame that is dropped; `version` is the sender's where the header could be read."""

    def __init__(self, reason: DropReason, detail: str, version: int | None = None) -> None:
        self.reason: DropReason = reason
        self.version = version
        super().__init__(f"{reason}: {detail}")


def encode(frame: Frame) -> bytes:
    """The frame as bytes."""
    body = _encoder.encode(frame.message)
    header = _HEADER.pack(MAGIC, VERSION, frame.session, frame.sequence, len(body))
    return header + _CHECKSUM.pack(crc32(body, crc32(header))) + body


def decode(data: bytes) -> Frame:
    """The frame in these bytes; Unreadable, and nothing else, where there is none."""
    if len(data) > MAX_FRAME:
        raise Unreadable("oversized", f"{len(data)} bytes, at most {MAX_FRAME}")
    if len(data) < _BODY:
        raise Unreadable("truncated", f"{len(data)} bytes, at least {_BODY}")
    magic, version, session, sequence, nbytes = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise Unreadable("magic", f"{magic!r} is not {MAGIC!r}")
    if version != VERSION:
        raise Unreadable("version", f"{version} is not {VERSION}, the version spoken here", version)
    if nbytes != len(data) - _BODY:
        raise Unreadable("truncated", f"body of {len(data) - _BODY} bytes, not {nbytes}")
    body = memoryview(data)[_BODY:]
    (checksum,) = _CHECKSUM.unpack_from(data, _HEADER.size)
    if checksum != crc32(body, crc32(data[: _HEADER.size])):
        raise Unreadable("checksum", "it was changed on the way")
    try:
        message = _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise Unreadable("body", str(error)[:200], version) from None
    return Frame(session, sequence, message)


# ── sessions ──────────────────────────────────────────────────────────────────────────


class Session:
    """One conversation: its number, the counters of both directions, and where it goes.

    `client` is what the transport of frames calls a client; None where we have dialled.
    """

    def __init__(self, session: int, client: bytes | None = None) -> None:
        self.session = session
        self.client = client
        self._sent = 0
        self._heard = 0

    @property
    def is_incoming(self) -> bool:
        return self.client is not None

    def framed(self, message: AnyMessage) -> bytes:
        """The next frame of ours."""
        self._sent += 1
        return encode(Frame(self.session, self._sent, message))

    def takes(self, frame: Frame, on_drop: OnDrop) -> bool:
        """Whether a frame of the other side belongs here and is new; it counts from now on."""
        name = type(frame.message).__name__
        if frame.session != self.session:
            on_drop("session", f"{name} of another session")
            return False
        if frame.sequence <= self._heard:
            on_drop("replayed", f"{name} {frame.sequence}, after {self._heard}")
            return False
        self._heard = frame.sequence
        return True


def answered(session: Session, data: bytes, on_drop: OnDrop) -> AnyMessage | None:
    """What a server has said to us on a session that we dialled, if it belongs there."""
    try:
        frame = decode(data)
    except Unreadable as error:
        on_drop(error.reason, str(error))
        return Refused(0, "refused", (str(error),)) if error.reason == "version" else None
    if isinstance(frame.message, Stranger):
        return frame.message
    if session.session == 0:
        session.session = frame.session
    return frame.message if session.takes(frame, on_drop) else None


class Clients:
    """Sessions of those who have dialled us. `reply` sends a frame to a client.

    A client is heard from its hello on; before, only a question for our status is. It says
    hello once: whoever wants another session dials again.
    """

    def __init__(
        self,
        reply: Callable[[bytes, bytes], bool],
        on_drop: OnDrop,
        *,
        random: Random,
    ) -> None:
        self._reply = reply
        self._on_drop = on_drop
        self._random = random
        self._sessions: dict[bytes, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def forget(self, session: Session) -> None:
        """Hear this session no more; its client may say hello again."""
        if session.client is not None and self._sessions.get(session.client) is session:
            del self._sessions[session.client]

    def said(self, client: bytes, data: bytes) -> tuple[Session, AnyMessage] | None:
        """What a client says, and in which session, if that is to be heard."""
        try:
            frame = decode(data)
        except Unreadable as error:
            self._on_drop(error.reason, str(error))
            if error.reason == "version":
                reason = f"wire version {VERSION} there, {error.version} here"
                self._reply(client, Session(0).framed(Refused(0, "refused", (reason,))))
            return None
        session = self._session(client, frame)
        return None if session is None else (session, frame.message)

    def _session(self, client: bytes, frame: Frame) -> Session | None:
        match frame.message:
            case Hello():
                return self._greeted(client)
            case AskStatus():
                return self._sessions.get(client) or Session(0, client)
            case _:
                session = self._sessions.get(client)
        if session is None:
            self._on_drop("session", f"{type(frame.message).__name__} before any hello")
            self._reply(client, Session(0).framed(Stranger()))
            return None
        if frame.session != session.session:
            self._reply(client, Session(0).framed(Stranger()))
        return session if session.takes(frame, self._on_drop) else None

    def _greeted(self, client: bytes) -> Session | None:
        if client in self._sessions:
            self._on_drop("replayed", "a second hello of the same client")
            return None
        if len(self._sessions) >= MAX_CLIENTS:
            self._on_drop("flood", f"{MAX_CLIENTS} clients are known already")
            return None
        session = Session(self._random.getrandbits(63) | 1, client)
        self._sessions[client] = session
        return session
