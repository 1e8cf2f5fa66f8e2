"""The harness of the transfer tests: a process that is gone says what it said."""

import os
import signal
from collections.abc import Callable
from typing import NoReturn

import pytest

from kvstow.plan.manifest import encode
from transfer_node import hybrid_layout
from transfer_process import Ended, Zygote


def again_and_again(call: Callable[[], object]) -> NoReturn:
    """Until it raises: a signal takes its time."""
    while True:
        call()


def test_a_process_that_has_ended_reports_its_stderr(zygote: Zygote):
    process = zygote.process()
    node = process.node(encode(hybrid_layout()), "one")
    assert node.held() == 0
    with pytest.raises(RuntimeError, match="KeyError"):
        process.call("nobody", "held")
    process.call("one", "say", "a last word")
    process.kill()
    for _ in range(2):  # at once, and again
        with pytest.raises(Ended, match="a last word"):
            again_and_again(node.held)
    process.close()
    another = zygote.process()
    assert another.pid != process.pid
    another.close()


def test_a_zygote_that_cannot_start_reports_its_stderr(monkeypatch):
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    zygote = Zygote()
    try:
        for _ in range(2):
            with pytest.raises(Ended, match=r"zygote.*\n.*Python"):
                zygote.process()
    finally:
        zygote.close()


def test_a_zygote_that_was_killed_says_so():
    zygote = Zygote()
    try:
        zygote.process().close()
        os.kill(zygote.pid, signal.SIGKILL)
        with pytest.raises(Ended, match="zygote"):
            again_and_again(lambda: zygote.process().close())
    finally:
        zygote.close()
