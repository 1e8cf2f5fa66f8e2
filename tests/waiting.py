"""Waiting for something that another thread or process does."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = 60.0
"""Seconds after which a machine is not slow any more: what was waited for does not come."""


def wait_for(question: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Return when the answer is true; it is asked again and again.

    Wait for the very thing that the next line needs, not for a sign that comes before it.
    """
    limit = time.monotonic() + seconds
    while not question():
        assert time.monotonic() < limit, f"did not come true within {seconds} s"
        time.sleep(0.005)


def stop(pid: int) -> None:
    """Stop a process; returns when none of its threads runs any more.

    The signal alone is not enough: its threads go on until one of them has taken it, which
    takes a while on a busy machine.
    """
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: has_stopped(pid))


def has_stopped(pid: int) -> bool:
    """Whether a process is stopped, with all its threads."""
    try:
        stats = [task.joinpath("stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except FileNotFoundError:  # a thread has ended meanwhile
        return False
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)
