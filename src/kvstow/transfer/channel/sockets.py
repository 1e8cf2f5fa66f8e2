"""The side channel over ZeroMQ: one ROUTER that others dial, one DEALER per agent we dial.

Loopback needs no keys. Any other address does: CURVE on both sides, and only those whose
public key is on our list are heard or dialled. Keys are never logged, not even in part.

A turn reads a bounded number of messages. The rest stays in the sockets, where ZeroMQ takes
from every connection in turn. A busy client waits; it cannot delay others.
"""

import logging
import os
from collections.abc import Iterator

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from kvstow.errors import TransferError
from kvstow.transfer.channel.address import check_dialled, check_listened, is_loopback
from kvstow.transfer.channel.curve import Keys, check_key
from kvstow.transfer.channel.framing import (
    MAX_FRAME,
    OnDrop,
    Session,
    encode_message,
    read_frame,
)
from kvstow.transfer.channel.messages import AnyMessage, AskPrefix, AskStatus, Hello

log = logging.getLogger(__name__)

HIGH_WATER = 10_000
TURN_COST = 64
"""What one turn may cost in messages; a costly one counts for several."""

COST: dict[type[AnyMessage], int] = {Hello: 16, AskPrefix: 4, AskStatus: 4}

_READABLE = int(zmq.POLLIN)  # a flag of its own type is slower to compare
_FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

Socket = zmq.Socket[bytes]


class SocketChannel:
    """All sockets of one agent; used from one thread."""

    def __init__(self, listen: str, keys: Keys | None, on_drop: OnDrop) -> None:
        check_listened(listen)
        if keys is None and not is_loopback(listen):
            raise TransferError(
                f"{listen} can be reached from other machines, and there are no keys\n\n"
                f"hint: give keys=Keys(...), or listen on tcp://127.0.0.1:*",
                kind="refused",
            )
        self._keys = keys
        self._on_drop = on_drop
        self._context: zmq.Context[Socket] = zmq.Context()
        self._sockets: list[Socket] = []
        self._dialled: dict[Socket, Session] = {}
        self._socket_of: dict[Session, Socket] = {}
        self._poller = zmq.Poller()
        self._wake = -1
        try:
            self._gate = self._opened_gate() if keys else None
            self._router = self._opened_router(listen)
            self._monitor = self._router.get_monitor_socket(_FAILED_HANDSHAKES)
            self._sockets.append(self._monitor)
            self._poller.register(self._monitor, zmq.POLLIN)
            self._router.bind(listen)
            self.address: str = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
            _close_to_others(self.address)
        except (zmq.ZMQError, OSError, ValueError, TypeError) as error:
            self.close()
            raise TransferError(f"cannot listen on {listen}: {error}", kind="transport") from None

    # ── talking ───────────────────────────────────────────────────────────────────

    def dial(self, address: str, key: str) -> Session:
        """A line to the agent at `address`, whose public key is `key` where keys are used."""
        check_dialled(address)
        check_key(key, self._keys, address)
        if not key and not is_loopback(address):
            raise TransferError(
                f"{address} is on another machine, and its public key is not known\n\n"
                f"hint: pass the key to connect(), pull with a ticket that carries it, or give "
                f"kvstow status a --keys-file",
                kind="refused",
                peer=address,
            )
        socket = self._open_socket(zmq.DEALER)
        try:
            if key and self._keys is not None:
                socket.curve_serverkey = key.encode()
                socket.curve_publickey = self._keys.public.encode()
                socket.curve_secretkey = self._keys.secret.encode()
            socket.connect(address)
        except (zmq.ZMQError, ValueError, TypeError) as error:
            self._shut(socket)
            raise TransferError(
                f"cannot dial {address}: {error}", kind="refused", peer=address
            ) from None
        line = Session()
        self._dialled[socket] = line
        self._socket_of[line] = socket
        return line

    def hang_up(self, line: Session) -> None:
        socket = self._socket_of.pop(line, None)
        if socket is not None:
            del self._dialled[socket]
            self._shut(socket)

    def send(self, line: Session, message: AnyMessage) -> bool:
        data = encode_message(message)
        if line.is_incoming:
            return _sent(self._router, [line.client, data])
        socket = self._socket_of.get(line)
        return socket is not None and _sent(socket, [data])

    # ── listening ─────────────────────────────────────────────────────────────────

    def watch(self, fd: int) -> None:
        self._wake = fd
        self._poller.register(fd, zmq.POLLIN)

    def heard(self, timeout_ms: int) -> Iterator[tuple[Session, AnyMessage]]:
        for socket, _ in self._poller.poll(timeout_ms):
            if socket is self._router:
                yield from self._from_clients()
            elif socket is self._monitor:
                self._note_failed_handshakes()
            elif socket is self._gate:
                self._keep_gate()
            elif socket == self._wake:
                os.eventfd_read(self._wake)
            elif socket in self._dialled:
                yield from self._from_server(self._dialled[socket])

    def _from_server(self, line: Session) -> Iterator[tuple[Session, AnyMessage]]:
        for parts in _received(self._socket_of[line]):
            if line not in self._socket_of:  # hung up meanwhile
                return
            message = read_frame(parts[-1], self._on_drop)
            if message is not None:
                yield line, message

    def _from_clients(self) -> Iterator[tuple[Session, AnyMessage]]:
        cost = 0
        for parts in _received(self._router):
            cost += 1
            if len(parts) != 2:
                self._on_drop("body", f"{len(parts)} parts, not 2")
                message = None
            else:
                message = read_frame(parts[1], self._on_drop)
            if message is not None:
                cost += COST.get(type(message), 1) - 1
                yield Session.of_client(parts[0]), message
            if cost >= TURN_COST:
                return

    # ── who may come in ───────────────────────────────────────────────────────────

    def _keep_gate(self) -> None:
        """Answer ZeroMQ's question (RFC 27, ZAP) whether a client may come in."""
        assert self._keys is not None
        assert self._gate is not None
        gate = self._gate
        parts = gate.recv_multipart()
        version, request, _, source, _, mechanism, *credentials = parts
        is_listed = False
        if mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == 32:
            is_listed = z85.encode(credentials[0]).decode() in self._keys.peers
        if not is_listed:
            where = source.decode(errors="replace")
            self._on_drop("session", f"client at {where} is not known")
            log.warning("refused a client at %s: its key is not on the list", where)
        status = (b"200", b"OK") if is_listed else (b"400", b"")
        gate.send_multipart([version, request, *status, b"", b""])

    def _note_failed_handshakes(self) -> None:
        for _ in range(TURN_COST):
            if not self._monitor.poll(0):
                return
            event = recv_monitor_message(self._monitor)
            self._on_drop("session", "a key exchange failed")
            log.warning("a key exchange on %s failed", event["endpoint"].decode(errors="replace"))

    # ── sockets ───────────────────────────────────────────────────────────────────

    def _open_socket(self, kind: int) -> Socket:
        socket = self._context.socket(kind)
        socket.linger = 0
        self._sockets.append(socket)
        self._poller.register(socket, zmq.POLLIN)
        socket.maxmsgsize = MAX_FRAME + 1024
        socket.sndhwm = socket.rcvhwm = HIGH_WATER
        socket.tcp_keepalive = 1
        return socket

    def _opened_router(self, listen: str) -> Socket:
        router = self._open_socket(zmq.ROUTER)
        router.router_mandatory = True
        if self._keys:
            router.curve_server = True
            router.curve_publickey = self._keys.public.encode()
            router.curve_secretkey = self._keys.secret.encode()
        return router

    def _opened_gate(self) -> Socket:
        gate = self._open_socket(zmq.REP)
        gate.bind("inproc://zeromq.zap.01")
        return gate

    def _shut(self, socket: Socket) -> None:
        self._sockets.remove(socket)
        self._poller.unregister(socket)
        socket.close()

    def close(self) -> None:
        for socket in self._sockets:
            if socket.type == zmq.ROUTER:
                socket.disable_monitor()
            socket.close(linger=0)
        self._sockets.clear()
        self._dialled.clear()
        self._socket_of.clear()
        self._context.term()


def _close_to_others(address: str) -> None:
    """A socket that is a file is for its own user only, whatever the umask."""
    path = address.removeprefix("ipc://")
    if path != address and not path.startswith("@"):
        os.chmod(path, 0o600)


def _sent(socket: Socket, parts: list[bytes]) -> bool:
    try:
        socket.send_multipart(parts, zmq.NOBLOCK)
    except zmq.ZMQError as error:
        log.info("a message was not sent: %s", error)
        return False
    return True


def _received(socket: Socket) -> Iterator[list[bytes]]:
    """Messages that have come, so many as one turn reads, until there is none or the socket is
    closed."""
    ready = _READABLE  # it was polled
    for _ in range(TURN_COST):
        if not ready & _READABLE:
            return
        try:
            parts = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.ZMQError:
            return
        yield parts
        ready = 0 if socket.closed else int(socket.get(zmq.EVENTS))
