"""What every transport must do, asked of the local one and of NIXL."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstow.errors import BackendMissing, TransferError
from kvstow.route.copies import Copies
from kvstow.transfer.transport import nixl
from kvstow.transfer.transport.base import Kinds, Region
from kvstow.transfer.transport.local import Fabric, LocalTransport
from kvstow.transfer.transport.nixl import NixlTransport, framed, unframed

BYTES = 4096
KINDS = Kinds()


class Side:
    """A transport with some memory."""

    def __init__(self, transport: Any) -> None:
        self.transport = transport
        self.memory = np.zeros(BYTES, np.uint8)
        transport.register(Region(self.memory.ctypes.data, BYTES))

    def at(self, *offsets: int) -> np.ndarray:
        return self.memory.ctypes.data + np.array(offsets, np.int64)


@pytest.fixture(params=["local", "nixl"])
def sides(request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side]]:
    fabric = Fabric()
    made = [
        LocalTransport(fabric) if request.param == "local" else NixlTransport() for _ in range(2)
    ]
    here, there = (Side(transport) for transport in made)
    here.transport.connect(there.transport.name, there.transport.metadata())
    yield here, there
    for side in (here, there):
        side.transport.close()


def finished(post: Any, there: Side) -> None:
    limit = time.monotonic() + 20
    post.start()
    while not post.poll():
        there.transport.progress()
        assert time.monotonic() < limit
    post.release()


def copies(source: np.ndarray, destination: np.ndarray, *nbytes: int) -> Copies:
    return Copies(source, destination, np.array(nbytes, np.int64))


def test_a_read_brings_exactly_the_bytes_that_were_asked_for(sides):
    here, there = sides
    there.memory[:] = np.arange(BYTES) % 251
    here.memory[:] = 255
    wanted = copies(there.at(300, 7), here.at(10, 1000), 5, 1)
    finished(here.transport.prepare("read", there.transport.name, KINDS, wanted), there)
    expected = np.full(BYTES, 255, np.uint8)
    expected[10:15] = there.memory[300:305]
    expected[1000] = there.memory[7]
    assert (here.memory == expected).all()


def test_a_write_changes_exactly_the_bytes_that_were_meant(sides):
    here, there = sides
    here.memory[:] = np.arange(BYTES) % 251
    there.memory[:] = 255
    wanted = copies(here.at(10, 1000), there.at(300, 7), 5, 1)
    finished(here.transport.prepare("write", there.transport.name, KINDS, wanted), there)
    expected = np.full(BYTES, 255, np.uint8)
    expected[300:305] = here.memory[10:15]
    expected[7] = here.memory[1000]
    assert (there.memory == expected).all()


def test_memory_that_was_not_registered_is_refused(sides):
    here, there = sides
    outside = copies(there.at(BYTES - 4), here.at(0), 8)
    with pytest.raises(TransferError) as caught:
        finished(here.transport.prepare("read", there.transport.name, KINDS, outside), there)
    assert caught.value.peer == there.transport.name
    assert (here.memory == 0).all()


def test_an_unknown_peer_is_refused(sides):
    here, there = sides
    with pytest.raises(TransferError):
        here.transport.prepare("read", "nobody", KINDS, copies(there.at(0), here.at(0), 8))


def test_a_peer_that_was_disconnected_can_be_connected_again(sides):
    here, there = sides
    name = there.transport.name
    one = copies(there.at(0), here.at(0), 8)
    for _ in range(3):
        there.memory[:8] += 1
        here.transport.disconnect(name)
        with pytest.raises(TransferError):
            here.transport.prepare("read", name, KINDS, one)
        here.transport.connect(name, there.transport.metadata())
        finished(here.transport.prepare("read", name, KINDS, one), there)
        assert (here.memory[:8] == there.memory[:8]).all()


def test_nothing_moves_before_a_post_is_started_nor_after_its_peer_was_disconnected(sides):
    here, there = sides
    there.memory[:] = 9
    one = copies(there.at(0), here.at(0), 8)
    first, second, third = (
        here.transport.prepare("read", there.transport.name, KINDS, one) for _ in range(3)
    )
    for _ in range(20):
        here.transport.progress()
        there.transport.progress()
    assert (here.memory == 0).all()
    second.release()
    here.transport.disconnect(there.transport.name)
    with pytest.raises(TransferError):
        first.start()
    third.release()
    assert (here.memory == 0).all()


def test_without_nixl_the_hint_is_what_is_known_to_install_it(monkeypatch):
    monkeypatch.setattr(nixl, "BINDINGS", ("no_such_nixl._api",))
    with pytest.raises(BackendMissing, match=f"pip install {nixl.INSTALL}$"):
        NixlTransport()
    pinned = (Path(__file__).parents[3] / "requirements" / "no-deps.txt").read_text()
    flag, *packages = nixl.INSTALL.split()
    assert flag == "--no-deps"
    assert packages
    assert all(f"\n{package};" in pinned for package in packages)


@pytest.mark.parametrize("spoil", ["cut", "flip", "garbage", "empty"])
def test_metadata_that_are_not_whole_never_reach_the_engine(spoil):
    whole = framed(b"metadata of an engine" * 9)
    spoilt = {
        "cut": whole[:-1],
        "flip": whole[:40] + bytes([whole[40] ^ 1]) + whole[41:],
        "garbage": b"\xff" * 64,
        "empty": b"",
    }[spoil]
    with pytest.raises(TransferError) as caught:
        unframed(spoilt)
    assert caught.value.kind == "refused"
    assert unframed(whole) == b"metadata of an engine" * 9


# ── faults of the local one ───────────────────────────────────────────────────────────


@pytest.fixture
def pair() -> tuple[Fabric, Side, Side]:
    fabric = Fabric()
    here, there = (Side(LocalTransport(fabric, step_bytes=1)) for _ in range(2))
    here.transport.connect(there.transport.name, there.transport.metadata())
    return fabric, here, there


def begun(here: Side, there: Side) -> Any:
    """A read of two pieces, started; none of them is there yet."""
    there.memory[:] = 9
    two = copies(there.at(0, 16), here.at(0, 16), 8, 8)
    post = here.transport.prepare("read", there.transport.name, KINDS, two)
    post.start()
    return post


@pytest.mark.parametrize("how", ["released", "disconnected"])
def test_a_post_that_was_given_up_may_land_as_long_as_its_transport_lives(pair, how):
    fabric, here, there = pair
    fabric.cut(here.transport.name, there.transport.name)
    post = begun(here, there)
    if how == "released":
        post.release()
    else:
        here.transport.disconnect(there.transport.name)
    assert not post.ended
    here.transport.progress()
    assert (here.memory == 0).all()
    fabric.reconnect(here.transport.name, there.transport.name)
    here.transport.progress()
    here.transport.progress()
    assert here.memory[[0, 7, 16, 23]].tolist() == [9] * 4
    assert post.ended == (how == "released"), "who was disconnected is never told"


def test_nothing_lands_once_the_transport_is_closed(pair):
    _, here, there = pair
    post = begun(here, there)
    here.transport.disconnect(there.transport.name)
    assert not post.ended
    here.transport.close()
    assert post.ended
    here.transport.progress()
    assert (here.memory == 0).all()


def test_a_fabric_decides_when_late_bytes_land():
    lands = False
    fabric = Fabric(lands=lambda: lands)
    here, there = (Side(LocalTransport(fabric)) for _ in range(2))
    here.transport.connect(there.transport.name, there.transport.metadata())
    begun(here, there)
    here.transport.disconnect(there.transport.name)
    here.transport.progress()
    assert (here.memory == 0).all()
    lands = True
    here.transport.progress()
    assert here.memory[16] == 9


def test_a_fresh_engine_has_another_name_and_nothing_registered(sides):
    here, there = sides
    fresh = here.transport.fresh()
    assert fresh.name != here.transport.name
    fresh.connect(there.transport.name, there.transport.metadata())
    one = copies(there.at(0), here.at(0), 8)
    with pytest.raises(TransferError):
        finished(fresh.prepare("read", there.transport.name, KINDS, one), there)
    fresh.close()


def test_metadata_of_another_than_the_one_named_are_refused(sides):
    here, there = sides
    with pytest.raises(TransferError, match="metadata are those of") as caught:
        here.transport.connect("somebody", there.transport.metadata())
    assert caught.value.kind == "refused"
    one = copies(there.at(0), here.at(0), 8)
    there.memory[:] = 3
    finished(here.transport.prepare("read", there.transport.name, KINDS, one), there)
    assert here.memory[0] == 3, "who was connected stays so"
