"""Streaming copies: byte-exact at every alignment and length, or not there at all."""

import platform

import numpy as np
import pytest

from kvstow.memory import host, stream
from kvstow.memory.moves import Spans
from kvstow.testing.patterns import pattern

there = pytest.mark.skipif(stream.streamer() is None, reason="no x86-64 Linux")


@there
@pytest.mark.parametrize(
    "length", [0, 64, 128, 4096, 16384 - 64, 16384, 16384 + 64, 3 * 16384 + 192]
)
@pytest.mark.parametrize("shift", [0, 1, 8, 63])
def test_the_routine_copies_whole_lines_from_anywhere(length, shift):
    source = pattern(1 << 17, 1)
    target = pattern((1 << 17) + 64, 2)
    start = -target.ctypes.data % 64
    expected = target.copy()
    places = np.array([start, start + 65536])
    expected[places[0] :][:length] = source[shift:][:length]
    expected[places[1] :][:length] = source[65536 + shift :][:length]
    routine = stream.streamer()
    assert routine is not None
    routine(
        places + target.ctypes.data,
        np.array([shift, 65536 + shift]) + source.ctypes.data,
        np.array([length, length]),
    )
    assert np.array_equal(target, expected)


@pytest.mark.parametrize("seed", range(4))
def test_long_and_short_moves_of_any_alignment_arrive_whole_and_alone(seed, monkeypatch):
    monkeypatch.setattr(host, "STREAM_BYTES", 1 << 16)
    rng = np.random.default_rng(seed)
    source, target = pattern(1 << 20, 1), pattern(1 << 20, 2)
    cuts = np.sort(rng.permutation(1 << 20)[:24])
    moves = Spans(rng.integers(0, 1 << 19, 12), cuts[::2], cuts[1::2] - cuts[::2])
    moves = moves._replace(nbytes=np.minimum(moves.nbytes, 1 << 19))
    assert (moves.nbytes >= host.LONG_BYTES).any()
    expected = target.copy()
    for start, place, size in zip(*moves, strict=True):
        expected[place : place + size] = source[start : start + size]
    host.move(source.ctypes.data, target.ctypes.data, moves)
    assert np.array_equal(target, expected)


def test_a_machine_without_the_routine_copies_all_the_same(monkeypatch):
    monkeypatch.setattr(host, "STREAM_BYTES", 0)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert stream.streamer.__wrapped__() is None
    monkeypatch.setattr(host, "streamer", stream.streamer.__wrapped__)
    source, target = pattern(1 << 17, 1), np.zeros(1 << 17, np.uint8)
    moves = Spans(np.array([0]), np.array([0]), np.array([1 << 17]))
    host.move(source.ctypes.data, target.ctypes.data, moves)
    assert np.array_equal(target, source)


def test_the_routine_fits_the_page_that_is_mapped_for_it():
    assert len(stream.machine_code()) < 4096
