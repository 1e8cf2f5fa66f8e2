"""Memory near a device: by policy, or by where a thread runs."""

import os

import numpy as np
import pytest
import torch

from kvstow.memory import numa
from kvstow.memory.numa import on_node, processors


def test_memory_is_preferred_on_a_node_meanwhile_where_the_system_lets_us():
    before = numa._policy()
    if before is None:
        pytest.skip("the system has no memory policies, or forbids them")
    with on_node(0):
        mode, nodes = numa._policy()
        assert (mode, nodes[0]) == (1, 1)
    assert numa._policy()[0] == before[0]
    memory = np.zeros(1 << 20, np.uint8)
    assert numa.bind(memory.ctypes.data, memory.nbytes, 0)
    assert not numa.bind(memory.ctypes.data, memory.nbytes, 9999)
    assert numa.node_of(torch.device("cpu")) is None


def test_without_policies_the_thread_runs_on_the_node_meanwhile(monkeypatch):
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(numa, "_call", lambda *arguments: False)
    monkeypatch.setattr(numa, "processors", lambda node: {min(before)})
    with on_node(0):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before
    assert not numa.bind(0, 4096, 0)


def test_work_on_a_node_that_is_not_there_stays_where_it_is():
    before = os.sched_getaffinity(0)
    assert processors(9999) == set()
    with on_node(9999):
        assert os.sched_getaffinity(0) == before
    with on_node(0):
        assert os.sched_getaffinity(0) <= before
    assert os.sched_getaffinity(0) == before
