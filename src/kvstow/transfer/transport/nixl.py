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
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstow.errors import BackendMissing, FaultKind, TransferError
from kvstow.transfer.transport.base import Direction, Kinds, MemoryKind, Post, Region, Spans

UCX_DEFAULTS = {"UCX_TCP_RX_SEG_SIZE": "1m", "UCX_TCP_TX_SEG_SIZE": "1m"}
"""Set before NIXL is imported unless the user has set them: 3 to 4 times the TCP rate."""

BINDINGS = ("nixl._api", "nixl_cu13._api", "nixl_cu12._api")
INSTALL = "--no-deps nixl-cu13==1.5.1 nixl==1.5.1"
"""What runs with and without CUDA; with its dependencies it would bring a CUDA torch along."""

OPERATIONS: dict[Direction, str] = {"read": "READ", "write": "WRITE"}
GONE = ("nixlRemoteDisconnectError", "nixlConnectionError")

_HASH = 16
_MAX_METADATA = 4 << 20


def framed(metadata: bytes) -> bytes:
    """Metadata behind their length and hash."""
    return len(metadata).to_bytes(4, "big") + blake2b(metadata, digest_size=_HASH).digest() + (
        metadata
    )  # fmt: skip


def unframed(frame: bytes) -> bytes:
    """The metadata in a frame, whole and unchanged, or TransferError."""
    nbytes, body = int.from_bytes(frame[:4], "big"), frame[4 + _HASH :]
    if len(frame) < 4 + _HASH or nbytes != len(body) or nbytes > _MAX_METADATA:
        raise TransferError(f"nixl: metadata are {len(body)} bytes, not {nbytes}", kind="refused")
    if blake2b(body, digest_size=_HASH).digest() != frame[4 : 4 + _HASH]:
        raise TransferError(f"nixl: {nbytes} bytes of metadata were changed on the way",
                            kind="refused")  # fmt: skip
    return body


class NixlTransport:
    """One NIXL agent with a UCX backend, under a name that is fresh at every start.

    `num_threads` is the backend's own option: long lists of descriptors are shared out.
    """

    def __init__(self, *, num_threads: int = 0) -> None:
        api = _api()
        self._name = f"kvstow-{secrets.token_hex(8)}"
        config = api.nixl_agent_config(backends=[], enable_prog_thread=False)
        try:
            self._agent: Any = api.nixl_agent(self._name, config)
            options = {"ucx_error_handling_mode": "peer"}
            if num_threads:
                options["num_threads"] = str(num_threads)
            self._agent.create_backend("UCX", options)
        except Exception as error:
            raise _foreign("start", error) from error
        self._registered: list[Any] = []
        self._posts: dict[str, set[_NixlPost]] = {}

    @property
    def name(self) -> str:
        return self._name

    def register(self, region: Region) -> None:
        row = [(region.address, region.nbytes, region.device, "")]
        try:
            listed = self._agent.register_memory(row, region.kind)
        except Exception as error:
            raise _foreign(f"register {region.nbytes} bytes of {region.kind}", error) from error
        if listed is None:
            raise TransferError(f"nixl: did not register {region}", kind="transport")
        self._registered.append(listed)

    def metadata(self) -> bytes:
        found: bytes | None = self._agent.get_agent_metadata()
        if not found:
            raise TransferError("nixl: no metadata of its own", kind="transport")
        return framed(found)

    def connect(self, metadata: bytes) -> str:
        whole = unframed(metadata)
        try:
            name = self._agent.add_remote_agent(whole)
        except Exception as error:
            raise _foreign("connect", error) from error
        if not name:
            raise TransferError("nixl: metadata were not taken", kind="transport")
        return name.decode() if isinstance(name, bytes) else str(name)

    def disconnect(self, peer: str) -> None:
        for post in self._posts.pop(peer, set()):
            post.abandon()
        try:
            self._agent.remove_remote_agent(peer)
        except Exception as error:
            if "NotFound" not in type(error).__name__:
                raise _foreign("disconnect", error, peer) from error

    def prepare(self, direction: Direction, peer: str, kinds: Kinds, spans: Spans) -> Post:
        try:
            rows: npt.NDArray[np.uint64] = np.empty((2, len(spans), 3), np.uint64)
            rows[0, :, 0], rows[1, :, 0], rows[:, :, 1] = spans.local, spans.remote, spans.nbytes
            rows[0, :, 2], rows[1, :, 2] = kinds.local_device, kinds.remote_device
            local = self._listed(rows[0], kinds.local)
            remote = self._listed(rows[1], kinds.remote)
            handle = self._agent.initialize_xfer(OPERATIONS[direction], local, remote, peer)
        except Exception as error:
            raise _foreign(f"{direction} {len(spans)} pieces", error, peer) from error
        return _NixlPost(self._agent, handle, peer, self._posts.setdefault(peer, set()))

    def _listed(self, rows: npt.NDArray[np.uint64], kind: MemoryKind) -> Any:
        listed = self._agent.get_xfer_descs(rows, kind)
        if listed is None:
            raise TransferError(f"nixl: {len(rows)} descriptors were not taken", kind="transport")
        return listed

    def progress(self) -> None:
        try:
            self._agent.get_new_notifs()
        except Exception as error:
            raise _foreign("progress", error) from error

    @property
    def another(self) -> "Callable[[], NixlTransport]":
        return NixlTransport

    def close(self) -> None:
        for peer in list(self._posts):
            self.disconnect(peer)
        for listed in self._registered:
            self._agent.deregister_memory(listed)
        self._registered.clear()
        self._agent = None


class _NixlPost:
    """A NIXL transfer request."""

    def __init__(self, agent: Any, handle: Any, peer: str, live: "set[_NixlPost]") -> None:
        self._agent = agent
        self._handle: Any = handle
        self._peer = peer
        self._live = live
        self._done = False
        self._error: TransferError | None = None
        live.add(self)

    def start(self) -> None:
        if self._error is not None:
            raise self._error
        self._done = False
        try:
            self._note(self._agent.transfer(self._handle))
        except Exception as error:
            self._error = _foreign("start", error, self._peer)
            raise self._error from error

    def poll(self) -> bool:
        if self._done:
            return True
        if self._error is not None:
            raise self._error
        try:
            state = self._agent.check_xfer_state(self._handle)
        except Exception as error:
            self._error = _foreign("poll", error, self._peer)
            raise self._error from error
        self._note(state)
        return self._done

    def _note(self, state: str | None) -> None:
        """Take in a state that NIXL has reported."""
        if state == "DONE":
            self._done = True
        elif state != "PROC":
            self._error = TransferError(f"nixl: peer {self._peer!r}: transfer state {state!r}",
                                        kind="transport", peer=self._peer)  # fmt: skip

    def release(self) -> None:
        self._live.discard(self)
        if self._handle is not None:
            try:
                self._handle.release()
            except Exception as error:
                raise _foreign("release", error, self._peer) from error
            self._handle = None

    def abandon(self) -> None:
        """Its peer is being removed: it will never copy again."""
        self._error = TransferError(f"peer {self._peer!r} is gone: disconnected here",
                                    kind="peer", peer=self._peer)  # fmt: skip
        try:
            self._handle.release()
            self._handle = None
        except Exception as error:
            logging.getLogger(__name__).warning("nixl: release: %s", error)


def _api() -> Any:
    """The NIXL bindings, imported with the environment they need."""
    for name, value in UCX_DEFAULTS.items():
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


def _foreign(what: str, error: Exception, peer: str = "") -> TransferError:
    if isinstance(error, TransferError):
        return error
    kind: FaultKind = "peer" if type(error).__name__ in GONE else "transport"
    where = f"peer {peer!r}: " if peer else ""
    return TransferError(f"nixl: {where}{what}: {type(error).__name__}: {error}",
                         kind=kind, peer=peer)  # fmt: skip
