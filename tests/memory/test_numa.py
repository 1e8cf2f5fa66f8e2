"""Memory near a device, by policy."""

import ctypes

import numpy as np
import pytest
import torch

from kvstow.memory import numa
from kvstow.memory.numa import on_node


def policy() -> tuple[int, int]:
    """The thread's policy, and the first of its nodes as bits."""
    mode, mask = ctypes.c_int(0), numa._Mask()
    if not numa._call(2, ctypes.byref(mode), mask, numa.MAX_NODES, ctypes.c_void_p(None), 0):
        pytest.skip("the system has no memory policies, or forbids them")
    return mode.value, mask[0]


def test_memory_is_preferred_on_a_node_meanwhile_where_the_system_lets_us():
    before = policy()
    with on_node(0):
        assert policy() == (1, 1)
    assert policy() == before
    for nothing in (None, 9999):
        with on_node(nothing):
            assert policy() == before
    memory = np.zeros(1 << 20, np.uint8)
    assert numa.bind(memory.ctypes.data, memory.nbytes, 0)
    assert not numa.bind(memory.ctypes.data, memory.nbytes, 9999)
    assert numa.node_of(torch.device("cpu")) is None


def test_without_policies_nothing_happens(monkeypatch):
    monkeypatch.setattr(numa, "_call", lambda *arguments: False)
    with on_node(0):
        pass
    assert not numa.bind(0, 4096, 0)
