"""Manifests of peers are decoded and compared once."""

import pytest

from kvstow.errors import RouteError
from kvstow.plan.manifest import encode, fingerprint
from kvstow.transfer.peers import layouts
from kvstow.transfer.peers.layouts import PeerLayouts
from transfer_node import IDENTITY, hybrid_layout

MINE = hybrid_layout(num_slabs=12).identified(IDENTITY)
OTHER = hybrid_layout(num_slabs=30).identified(IDENTITY)
STRANGER = hybrid_layout(num_slabs=12)


@pytest.fixture
def decoded(monkeypatch) -> list[bytes]:
    """Every manifest that is decoded."""
    seen: list[bytes] = []
    real = layouts.decode

    def noted(manifest: bytes):
        seen.append(manifest)
        return real(manifest)

    monkeypatch.setattr(layouts, "decode", noted)
    return seen


def test_a_manifest_is_decoded_once_for_each_side(decoded):
    known = PeerLayouts(MINE)
    for _ in range(5):
        assert known.source(encode(OTHER)) == (OTHER, fingerprint(OTHER))
        assert known.target(encode(OTHER)).layout == OTHER
    assert len(decoded) == 2


@pytest.mark.parametrize("manifest", [b"{}", b"", encode(STRANGER)])
def test_one_that_is_none_or_does_not_fit_is_refused_each_time_and_decoded_once(manifest, decoded):
    known = PeerLayouts(MINE)
    said = set()
    for _ in range(3):
        with pytest.raises(RouteError) as caught:
            known.target(manifest)
        said.add(str(caught.value))
    assert len(said) == len(decoded) == 1


def test_no_more_is_remembered_than_there_is_room_for(decoded, monkeypatch):
    monkeypatch.setattr(layouts, "MOST_REMEMBERED", 3)
    known = PeerLayouts(MINE)
    for number in range(20):
        with pytest.raises(RouteError):
            known.source(b"%d" % number)
        assert known._compared.cache_info().currsize <= 3
    assert known.source(encode(MINE)).layout == MINE
