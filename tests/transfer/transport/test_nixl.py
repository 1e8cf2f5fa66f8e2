"""NIXL: what it is told, what it is not told, and what is left of it after close."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvstow.errors import TransferError
from kvstow.route.copies import Copies
from kvstow.transfer.transport import nixl
from kvstow.transfer.transport.base import Kinds, Region
from kvstow.transfer.transport.nixl import (
    NixlTransport,
    backend_options,
    framed,
    name_in,
    unframed,
)

LATE = Path(__file__).with_name("late_bytes.py")


def listening() -> set[str]:
    """Addresses at which this process listens, as hexadecimal words of the kernel."""
    mine = {
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    }
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
                found.add(words[1].split(":")[0])
    return found


LOOPBACK = "0100007F"


def test_data_ports_are_on_loopback_where_listen_is(monkeypatch):
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    before = listening()
    engine = NixlTransport(listen="tcp://127.0.0.1:*")
    opened = listening() - before
    engine.close()
    assert opened <= {LOOPBACK}


def test_what_the_user_sets_and_other_addresses_are_left_to_ucx(monkeypatch):
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    assert backend_options("tcp://127.0.0.1:*", 0)["engine_config"] == "NET_DEVICES=lo"
    assert "engine_config" not in backend_options("tcp://10.0.0.1:5", 0)
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    assert "engine_config" not in backend_options("tcp://127.0.0.1:*", 0)


def test_libraries_for_rdma_are_loaded_where_there_are_devices(monkeypatch, tmp_path):
    """With those of the system beside those of the wheel, a process crashes when it ends."""
    monkeypatch.setattr(nixl, "RDMA_DEVICES", tmp_path / "none")
    assert nixl.ucx_defaults()["UCX_MODULES"] == "^ib"
    (tmp_path / "none").mkdir()
    assert nixl.ucx_defaults()["UCX_MODULES"] == "^ib"
    (tmp_path / "none" / "mlx5_0").mkdir()
    assert "UCX_MODULES" not in nixl.ucx_defaults()
    monkeypatch.undo()
    program = (
        "from kvstow.transfer.transport.nixl import NixlTransport as T; T().close();"
        "print('libibverbs' in open('/proc/self/maps').read())"
    )
    env = {name: value for name, value in os.environ.items() if name != "UCX_MODULES"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    has_rdma = "UCX_MODULES" not in nixl.ucx_defaults()
    assert has_rdma or (done.returncode, done.stdout) == (0, "False\n"), done


def pair() -> tuple[NixlTransport, NixlTransport, np.ndarray, np.ndarray]:
    here, there = NixlTransport(), NixlTransport()
    mine, theirs = np.zeros(4096, np.uint8), np.full(4096, 7, np.uint8)
    here.register(Region(mine.ctypes.data, 4096))
    there.register(Region(theirs.ctypes.data, 4096))
    return here, there, mine, theirs


def test_close_destroys_the_engine_even_while_somebody_keeps_an_error_of_it():
    here, there, mine, theirs = pair()
    kept = []
    for peer in ("nobody", there.name):
        try:
            here.connect(there.name, there.metadata())
            outside = Copies.one(theirs.ctypes.data, 4096, 4096)
            here.prepare("read", peer, Kinds(), outside).start()
        except TransferError as error:
            kept.append(error)
    assert len(kept) == 2
    before = len(os.listdir("/proc/self/fd"))
    here.close()
    there.close()
    assert len(os.listdir("/proc/self/fd")) < before, "its sockets and events are gone"
    for call in (here.progress, here.metadata, lambda: here.connect("x", framed(b""))):
        with pytest.raises(TransferError):
            call()
    here.close()
    assert mine.sum() == 0


def test_a_name_that_is_not_utf8_is_refused_before_the_engine_sees_it():
    here, there, *_ = pair()
    raw = unframed(there.metadata())
    assert name_in(raw) == there.name
    name = there.name.encode()
    bad = raw.replace(name, b"\xf3\x28" + name[2:])
    for metadata in (bad, b"", b"nixlSerDes|Agent", raw[:20], b"nixlSerDes|Agent" + b"\xff" * 8):
        with pytest.raises(TransferError) as caught:
            here.connect(there.name, framed(metadata))
        assert caught.value.kind == "refused"
    here.connect(there.name, there.metadata())
    here.close()
    there.close()


def test_other_metadata_under_the_name_of_a_peer_are_refused():
    here, there, _, theirs = pair()
    here.connect(there.name, there.metadata())
    there.register(Region(theirs.ctypes.data, 64))
    with pytest.raises(TransferError, match="with other metadata") as caught:
        here.connect(there.name, there.metadata())
    assert caught.value.kind == "refused"
    here.close()
    there.close()


@pytest.mark.parametrize("then", ["disconnect", "close"])
def test_only_a_closed_engine_keeps_late_bytes_of_a_stopped_peer_out(then):
    """A peer is stopped in the middle of a read over TCP, given up, and goes on."""
    env = {**os.environ, "UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    reader = subprocess.Popen(
        [sys.executable, str(LATE), then], env=env, text=True, stdout=subprocess.PIPE
    )
    try:
        out, _ = reader.communicate(timeout=240)
    finally:
        reader.send_signal(signal.SIGKILL)
    ended, landed = out.splitlines()[-1].split()  # UCX talks before that
    if then == "disconnect":
        assert ended == "False", f"{landed} bytes have landed since"
    else:
        assert (ended, landed) == ("True", "0")


def test_metadata_that_nixl_does_not_give_are_an_error_of_ours():
    class Broken:
        agent = None

        def get_agent_metadata(self) -> bytes:
            raise RuntimeError("nixlBackendError")

    engine = NixlTransport()
    whole, engine._agent = engine._agent, Broken()
    try:
        with pytest.raises(TransferError, match="nixl: metadata: RuntimeError"):
            engine.metadata()
    finally:
        engine._agent = whole
        engine.close()


def test_a_post_to_a_peer_that_we_have_disconnected_does_not_call_it_dead():
    one, other = NixlTransport(), NixlTransport()
    memory = [np.zeros(4096, np.uint8) for _ in range(2)]
    for engine, region in zip((one, other), memory, strict=True):
        engine.register(Region(region.ctypes.data, region.nbytes))
    one.connect(other.name, other.metadata())
    copies = Copies.one(memory[1].ctypes.data, memory[0].ctypes.data, 64)
    post = one.prepare("read", other.name, Kinds(), copies)
    one.disconnect(other.name)
    with pytest.raises(TransferError) as caught:
        post.start()
    assert caught.value.kind == "transport"
    for engine in (one, other):
        engine.close()
