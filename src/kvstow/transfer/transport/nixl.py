"""NIXL, wrapped: the only module that imports it.

Whatever it returns or raises on trouble becomes a `TransferError` here. Its progress
thread stays off (it would spin a core for good): whoever owns this transport calls
`progress`. Metadata travel with their length and hash, because NIXL crashes on some
garbled ones and bars a peer's name for good on others.
"""

import importlib
import logging
import os
import secrets
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstow.errors import BackendMissing, FaultKind, TransferError
from kvstow.route.copies import Copies
from kvstow.transfer.channel.address import is_loopback
from kvstow.transfer.transport.base import (
    Direction,
    Kinds,
    MemoryKind,
    Post,
    Region,
    disconnected,
)

log = logging.getLogger(__name__)

UCX_DEFAULTS = {
    "UCX_TCP_RX_SEG_SIZE": "1m",
    "UCX_TCP_TX_SEG_SIZE": "1m",
    "UCX_LOG_FILE": "stderr",
}
"""Set before NIXL is imported unless the user has set them: 3 to 4 times the TCP rate, and no
warnings on stdout, which is for data."""

RDMA_DEVICES = Path("/sys/class/infiniband")
WITHOUT_RDMA = {"UCX_MODULES": "^ib"}
"""Set likewise where the machine has no RDMA device. UCX would load the libraries for them all the
same; where the system has its own beside those of the NIXL wheel, the process then crashes in
libnl when it ends, after all its work."""

BINDINGS = ("nixl._api", "nixl_cu13._api", "nixl_cu12._api")
INSTALL = "--no-deps nixl-cu13==1.5.1 nixl==1.5.1"
"""What runs with and without CUDA; with its dependencies it would bring a CUDA torch along."""

OPERATIONS: dict[Direction, str] = {"read": "READ", "write": "WRITE"}
GONE = ("nixlRemoteDisconnectError", "nixlConnectionError")

LOOPBACK = "lo"
_SIGN = b"nixlSerDes|Agent"
_MAX_NAME = 256
_HASH = 16
_MAX_METADATA = 4 << 20


def framed(metadata: bytes) -> bytes:
    """Metadata behind their length and hash."""
    checksum = blake2b(metadata, digest_size=_HASH).digest()
    return len(metadata).to_bytes(4, "big") + checksum + metadata


def unframed(frame: bytes) -> bytes:
    """The metadata in a frame, whole and unchanged, or TransferError."""
    nbytes, body = int.from_bytes(frame[:4], "big"), frame[4 + _HASH :]
    if len(frame) < 4 + _HASH or nbytes != len(body) or nbytes > _MAX_METADATA:
        raise TransferError(f"nixl: metadata are {len(body)} bytes, not {nbytes}", kind="refused")
    if blake2b(body, digest_size=_HASH).digest() != frame[4 : 4 + _HASH]:
        raise TransferError(
            f"nixl: {nbytes} bytes of metadata were changed on the way", kind="refused"
        )
    return body


def name_in(metadata: bytes) -> str:
    """Whose metadata these are, without loading them; TransferError if that cannot be said."""
    at = len(_SIGN)
    nbytes = int.from_bytes(metadata[at : at + 8], "little")
    raw = metadata[at + 8 : at + 8 + nbytes]
    if not metadata.startswith(_SIGN) or nbytes > _MAX_NAME or len(raw) != nbytes:
        raise TransferError("nixl: metadata do not start with a name", kind="refused")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise TransferError(f"nixl: {raw!r} in metadata is not a name", kind="refused") from None


class NixlTransport:
    """One NIXL agent with a UCX backend, under a name that is fresh at every start.

    The engine has data ports of its own. With a `listen` address on loopback they are only
    there on loopback too; otherwise, or where `UCX_NET_DEVICES` is set, on whatever UCX uses.
    `num_threads` is the backend's own option: threads share long lists of descriptors.
    """

    def __init__(self, *, listen: str = "tcp://127.0.0.1:*", num_threads: int = 0) -> None:
        api = _api()
        self._name = f"kvstow-{secrets.token_hex(8)}"
        self._listen = listen
        self._num_threads = num_threads
        config = api.nixl_agent_config(backends=[], enable_prog_thread=False)
        with _faults("start"):
            self._agent: Any = api.nixl_agent(self._name, config)
            self._agent.create_backend("UCX", backend_options(listen, num_threads))
        self._registered: list[Any] = []
        self._peers: dict[str, bytes] = {}
        self._posts: dict[str, set[_NixlPost]] = {}

    @property
    def name(self) -> str:
        return self._name

    @property
    def engine(self) -> Any:
        """The NIXL agent; TransferError when it was closed."""
        if self._agent is None:
            raise TransferError(f"nixl: {self._name} was closed", kind="transport")
        return self._agent

    @property
    def is_closed(self) -> bool:
        return self._agent is None

    def register(self, region: Region) -> None:
        row = [(region.address, region.nbytes, region.device, "")]
        with _faults(f"register {region.nbytes} bytes of {region.kind}"):
            listed = self.engine.register_memory(row, region.kind)
        if listed is None:
            raise TransferError(f"nixl: did not register {region}", kind="transport")
        self._registered.append(listed)

    def metadata(self) -> bytes:
        with _faults("metadata"):
            own: bytes | None = self.engine.get_agent_metadata()
        if not own:
            raise TransferError("nixl: no metadata of its own", kind="transport")
        return framed(own)

    def connect(self, peer: str, metadata: bytes) -> None:
        whole = unframed(metadata)
        if (name := name_in(whole)) != peer:
            raise TransferError(
                f"nixl: metadata are those of {name!r}, not of {peer!r}", kind="refused", peer=peer
            )
        if self._peers.get(peer, whole) != whole:
            raise TransferError(
                f"nixl: peer {peer!r} is connected already, with other metadata",
                kind="refused",
                peer=peer,
            )
        with _faults("connect", peer):
            taken = self.engine.add_remote_agent(whole)
        if not taken:
            raise TransferError("nixl: metadata were not accepted", kind="transport", peer=peer)
        self._peers[peer] = whole

    def disconnect(self, peer: str) -> None:
        for post in self._posts.pop(peer, set()):
            post.give_up(disconnected(peer))
        if self._peers.pop(peer, None) is None:
            return
        with _faults("disconnect", peer):
            try:
                self.engine.remove_remote_agent(peer)
            except Exception as error:
                if "NotFound" not in type(error).__name__:
                    raise

    def prepare(self, direction: Direction, peer: str, kinds: Kinds, copies: Copies) -> Post:
        here, there = copies.destination, copies.source
        if direction == "write":
            here, there = there, here
        with _faults(f"{direction} {len(copies)} pieces", peer):
            rows: npt.NDArray[np.uint64] = np.empty((2, len(copies), 3), np.uint64)
            rows[0, :, 0], rows[1, :, 0], rows[:, :, 1] = here, there, copies.nbytes
            rows[0, :, 2], rows[1, :, 2] = kinds.local_device, kinds.remote_device
            local = self._listed(rows[0], kinds.local)
            remote = self._listed(rows[1], kinds.remote)
            handle = self.engine.initialize_xfer(OPERATIONS[direction], local, remote, peer)
        post = _NixlPost(self, handle, peer)
        self._posts.setdefault(peer, set()).add(post)
        return post

    def forget(self, post: "_NixlPost") -> None:
        """A post was released."""
        self._posts.get(post.peer, set()).discard(post)

    def _listed(self, rows: npt.NDArray[np.uint64], kind: MemoryKind) -> Any:
        listed = self.engine.get_xfer_descs(rows, kind)
        if listed is None:
            raise TransferError(
                f"nixl: {len(rows)} descriptors were not accepted", kind="transport"
            )
        return listed

    def progress(self) -> None:
        with _faults("progress"):
            self.engine.get_new_notifs()

    def fresh(self) -> "NixlTransport":
        return NixlTransport(listen=self._listen, num_threads=self._num_threads)

    def close(self) -> None:
        """Destroy the NIXL agent, whatever it says while it is taken down."""
        if self._agent is None:
            return
        steps: list[Callable[[], None]] = [partial(self.disconnect, peer) for peer in self._peers]
        steps += [partial(self._agent.deregister_memory, listed) for listed in self._registered]
        for step in steps:
            try:
                step()
            except Exception as error:
                log.warning("nixl: close: %s", error)
        self._registered.clear()
        self._agent.agent = None  # destroyed even if somebody keeps an error and its frames
        self._agent = None


class _NixlPost:
    """A NIXL transfer request. It holds the engine only through its transport, so that
    closing that destroys it."""

    def __init__(self, owner: NixlTransport, handle: Any, peer: str) -> None:
        self.peer = peer
        self._owner = owner
        self._handle: Any = handle
        self._runs = False
        self._error: TransferError | None = None

    @property
    def ended(self) -> bool:
        """An error is never the last word: it may be that of one copy among many."""
        return self._owner.is_closed or not self._runs

    def start(self) -> None:
        if self._error is None:
            self._runs = True
            self._note("start", lambda: self._owner.engine.transfer(self._handle))
        if self._error is not None:
            raise self._error

    def poll(self) -> bool:
        if self._error is None and self._runs:
            self._note("poll", lambda: self._owner.engine.check_xfer_state(self._handle))
        if self._error is not None:
            raise self._error
        return not self._runs

    def _note(self, what: str, call: Callable[[], str | None]) -> None:
        """Take in the state that a call reports, or its error."""
        try:
            state = call()
        except Exception as error:
            self._error = _foreign(what, error, self.peer)
            return
        if state == "DONE":
            self._runs = False
        elif state != "PROC":
            text = f"nixl: peer {self.peer!r}: transfer state {state!r}"
            self._error = TransferError(text, kind="transport", peer=self.peer)

    def release(self) -> None:
        self._owner.forget(self)
        if self._handle is not None and not self._owner.is_closed:
            with _faults("release", self.peer):
                self._handle.release()
        self._handle = None

    def give_up(self, error: TransferError) -> None:
        """Fail; what it has under way goes on."""
        self._error = self._error or error
        try:
            self.release()
        except TransferError as why:
            log.warning("%s", why)
        self._handle = None


def backend_options(listen: str, num_threads: int) -> dict[str, str]:
    """What the UCX backend is made with."""
    options = {"ucx_error_handling_mode": "peer"}
    if num_threads:
        options["num_threads"] = str(num_threads)
    if is_loopback(listen) and "UCX_NET_DEVICES" not in os.environ:
        options["engine_config"] = f"NET_DEVICES={LOOPBACK}"
    return options


def ucx_defaults() -> dict[str, str]:
    """What UCX is told on this machine, unless the user has told it otherwise."""
    has_rdma = RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())
    return UCX_DEFAULTS if has_rdma else UCX_DEFAULTS | WITHOUT_RDMA


def _api() -> Any:
    """The NIXL bindings, imported with the environment they need."""
    for name, value in ucx_defaults().items():
        os.environ.setdefault(name, value)
    for module in BINDINGS:
        try:
            api = importlib.import_module(module)
        except ImportError:
            continue
        quiet = logging.getLogger("nixl")
        if "NIXL_LOG_LEVEL" not in os.environ:
            quiet.setLevel(logging.WARNING)
        for handler in quiet.handlers:
            own: Any = handler
            if getattr(own, "stream", None) in (sys.stdout, sys.__stdout__):
                own.setStream(sys.stderr)  # stdout is for data
        return api
    raise BackendMissing("nixl", install=INSTALL)


@contextmanager
def _faults(what: str, peer: str = "") -> Generator[None]:
    """Whatever NIXL raises inside becomes a TransferError."""
    try:
        yield
    except Exception as error:
        fault = _foreign(what, error, peer)
        raise fault from (None if fault is error else error)


def _foreign(what: str, error: Exception, peer: str) -> TransferError:
    if isinstance(error, TransferError):
        return error
    kind: FaultKind = "peer" if type(error).__name__ in GONE else "transport"
    where = f"peer {peer!r}: " if peer else ""
    text = f"nixl: {where}{what}: {type(error).__name__}: {error}"
    return TransferError(text, kind=kind, peer=peer)
