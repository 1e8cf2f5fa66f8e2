"""The side channel: one ROUTER that others talk to, one DEALER per agent we talk to.

Loopback needs no keys. Any other address does: CURVE on both sides, and only clients
whose public key is on the list are heard. Keys are never logged, not even in part.
"""

import ipaddress
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from kvstow.errors import TransferError
from kvstow.transfer.channel.messages import (
    MAX_FRAME,
    VERSION,
    AnyMessage,
    AskStatus,
    DropReason,
    Frame,
    Hello,
    Refused,
    Stranger,
    Unreadable,
    decode,
    encode,
)

log = logging.getLogger(__name__)

HIGH_WATER = 10_000
_READABLE = int(zmq.POLLIN)  # a flag of its own type is slower to compare
_FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """A CURVE key pair, and the public keys of those who may talk to us (Z85 text)."""

    public: str
    secret: str = field(repr=False)
    peers: frozenset[str] = field(repr=False)

    @staticmethod
    def fresh() -> "Keys":
        """A new pair that knows nobody yet."""
        public, secret = zmq.curve_keypair()
        return Keys(public=public.decode(), secret=secret.decode(), peers=frozenset())


def is_loopback(address: str) -> bool:
    """Whether a ZeroMQ address stays on this machine."""
    parts = urlsplit(address)
    if parts.scheme in ("ipc", "inproc"):
        return True
    try:
        return parts.hostname == "localhost" or ipaddress.ip_address(
            parts.hostname or ""
        ).is_loopback  # fmt: skip
    except ValueError:
        return False


class Line:
    """One conversation: the two counters, and where to send."""

    def __init__(self, session: int, identity: bytes = b"") -> None:
        self.session = session
        self.identity = identity
        self.sent = 0
        self.heard = 0
        self.socket: zmq.Socket[bytes] | None = None


OnDrop = Callable[[DropReason, str], None]


class Channel:
    """All sockets of one agent; used from one thread."""

    def __init__(self, listen: str, keys: Keys | None, on_drop: OnDrop) -> None:
        if keys is None and not is_loopback(listen):
            raise TransferError(
                f"{listen} can be reached from other machines, and there are no keys\n\n"
                f"hint: give keys=Keys(...), or listen on tcp://127.0.0.1:*",
                kind="refused",
            )
        self._keys = keys
        self._on_drop = on_drop
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._guests: dict[bytes, Line] = {}
        self._lines: dict[zmq.Socket[bytes], Line] = {}
        self._poller = zmq.Poller()
        self._wake = -1
        self._gate = self._made_gate() if keys else None
        self._router = self._made(zmq.ROUTER)
        self._router.router_mandatory = True
        if keys:
            self._router.curve_server = True
            self._router.curve_publickey = keys.public.encode()
            self._router.curve_secretkey = keys.secret.encode()
        self._monitor = self._router.get_monitor_socket(
            _FAILED_HANDSHAKES[0] | _FAILED_HANDSHAKES[1] | _FAILED_HANDSHAKES[2]
        )
        for socket in (self._router, self._monitor):
            self._poller.register(socket, zmq.POLLIN)
        try:
            self._router.bind(listen)
        except zmq.ZMQError as error:
            self.close()
            raise TransferError(f"cannot listen on {listen}: {error}", kind="transport") from None
        self.address: str = self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    def _made(self, kind: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.maxmsgsize = MAX_FRAME + 1024
        socket.sndhwm = socket.rcvhwm = HIGH_WATER
        socket.tcp_keepalive = 1
        return socket

    # ── talking ───────────────────────────────────────────────────────────────────

    def dial(self, address: str, key: str) -> Line:
        """A line to the agent at `address`, whose public key is `key` where keys are used."""
        if not key and not is_loopback(address):
            raise TransferError(
                f"{address} is on another machine, and its public key is not known\n\n"
                f"hint: pass the key to connect(), or pull with a ticket that carries it",
                kind="refused",
            )
        socket = self._made(zmq.DEALER)
        if key:
            if self._keys is None:
                raise TransferError(f"{address} wants keys, and this agent has none",
                                    kind="refused")  # fmt: skip
            socket.curve_serverkey = key.encode()
            socket.curve_publickey = self._keys.public.encode()
            socket.curve_secretkey = self._keys.secret.encode()
        socket.connect(address)
        line = Line(session=0)
        line.socket = socket
        self._lines[socket] = line
        self._poller.register(socket, zmq.POLLIN)
        return line

    def hang_up(self, line: Line) -> None:
        """Forget a line."""
        if line.socket is None:
            self._guests.pop(line.identity, None)
            return
        self._poller.unregister(line.socket)
        self._lines.pop(line.socket, None)
        line.socket.close()

    def send(self, line: Line, message: AnyMessage) -> bool:
        """Whether the message is on its way; not if the other side has left."""
        line.sent += 1
        data = encode(Frame(line.session, line.sent, message))
        try:
            if line.socket is not None:
                line.socket.send(data, zmq.NOBLOCK)
            else:
                self._router.send_multipart([line.identity, data], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.info("message %s not sent: %s", type(message).__name__, error)
            return False
        return True

    # ── listening ─────────────────────────────────────────────────────────────────

    def watch(self, fd: int) -> None:
        """Let `heard` also wake up when this event descriptor is written to."""
        self._wake = fd
        self._poller.register(fd, zmq.POLLIN)

    def heard(self, timeout_ms: int) -> Iterator[tuple[Line, AnyMessage]]:
        """Messages that have come, each with its line; waits at most so long for the first."""
        for socket, _ in self._poller.poll(timeout_ms):
            if socket is self._router:
                yield from self._from_guests()
            elif socket is self._monitor:
                self._note_failed_handshakes()
            elif socket is self._gate:
                self._keep_gate()
            elif socket == self._wake:
                os.eventfd_read(self._wake)
            elif isinstance(socket, zmq.Socket) and socket in self._lines:
                yield from self._from_line(self._lines[socket])

    def _from_line(self, line: Line) -> Iterator[tuple[Line, AnyMessage]]:
        assert line.socket is not None
        for parts in _received(line.socket):
            try:
                frame = decode(parts[-1])
            except Unreadable as error:
                self._on_drop(error.reason, str(error))
                if error.reason == "version":
                    yield line, Refused(0, "refused", (str(error),))
                continue
            if line.session == 0:
                line.session = frame.session
            if self._in_order(line, frame):
                yield line, frame.message

    def _from_guests(self) -> Iterator[tuple[Line, AnyMessage]]:
        for parts in _received(self._router):
            if len(parts) != 2:
                self._on_drop("body", f"{len(parts)} parts, not 2")
                continue
            identity, data = parts
            try:
                frame = decode(data)
            except Unreadable as error:
                self._on_drop(error.reason, str(error))
                if error.reason == "version":
                    self.send(Line(0, identity), Refused(0, "refused", (
                        f"wire version {VERSION} there, {error.version} here",)))  # fmt: skip
                continue
            line = self._guest(identity, frame)
            if line is not None:
                yield line, frame.message

    def _guest(self, identity: bytes, frame: Frame) -> Line | None:
        """The guest's line, if the frame belongs to it and is new."""
        if isinstance(frame.message, Hello):
            line = Line(secrets.randbits(63) + 1, identity)
            self._guests[identity] = line
            return line
        if isinstance(frame.message, AskStatus):
            return self._guests.get(identity) or Line(0, identity)
        line = self._guests.get(identity)
        if line is None:
            self._on_drop("session", f"{type(frame.message).__name__} before any hello")
            self.send(Line(0, identity), Stranger())
            return None
        return line if self._in_order(line, frame) else None

    def _in_order(self, line: Line, frame: Frame) -> bool:
        if frame.session != line.session:
            if isinstance(frame.message, Stranger):
                return True
            self._on_drop("session", f"{type(frame.message).__name__} of another session")
            return False
        if frame.sequence <= line.heard:
            self._on_drop("replayed", f"{type(frame.message).__name__} {frame.sequence}, after "
                                      f"{line.heard}")  # fmt: skip
            return False
        line.heard = frame.sequence
        return True

    # ── who may come in ───────────────────────────────────────────────────────────

    def _made_gate(self) -> "zmq.Socket[bytes]":
        gate = self._context.socket(zmq.REP)
        gate.linger = 0
        gate.bind("inproc://zeromq.zap.01")
        self._poller.register(gate, zmq.POLLIN)
        return gate

    def _keep_gate(self) -> None:
        """Answer ZeroMQ's question (RFC 27, ZAP) whether a client may come in."""
        assert self._gate is not None
        assert self._keys is not None
        parts = self._gate.recv_multipart()
        version, request, _, source, _, mechanism, *credentials = parts
        known = False
        if mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == 32:
            known = z85.encode(credentials[0]).decode() in self._keys.peers
        if not known:
            self._on_drop("session", f"client at {source.decode(errors='replace')} is not known")
            log.warning("refused a client at %s: its key is not on the list",
                        source.decode(errors="replace"))  # fmt: skip
        status = (b"200", b"OK") if known else (b"400", b"")
        self._gate.send_multipart([version, request, *status, b"", b""])

    def _note_failed_handshakes(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            self._on_drop("session", "a key exchange failed")
            log.warning("a key exchange on %s failed", event["endpoint"].decode())

    def close(self) -> None:
        """Close every socket."""
        self._router.disable_monitor()
        for socket in (*self._lines, self._router, self._monitor, self._gate):
            if socket is not None:
                socket.close()
        self._lines.clear()
        self._context.term()


def _received(socket: "zmq.Socket[bytes]") -> Iterator[list[bytes]]:
    """Messages that have come, until there is none or the socket is closed."""
    ready = _READABLE  # it was polled
    while ready & _READABLE:
        try:
            parts = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        yield parts
        ready = 0 if socket.closed else int(socket.get(zmq.EVENTS))
