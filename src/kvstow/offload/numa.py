"""Memory near a device: allocate while the thread runs on that node's processors."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

NODES = Path("/sys/devices/system/node")


def processors(node: int) -> set[int]:
    """The processors of a node; none where the system has no such node."""
    try:
        text = (NODES / f"node{node}" / "cpulist").read_text().strip()
    except OSError:
        return set()
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


@contextmanager
def on_node(node: int | None) -> Generator[None]:
    """The calling thread runs on the node's processors, so what it first touches lies there.

    Nothing happens for None, or where the thread may not run on any of them.
    """
    before = os.sched_getaffinity(0)
    near = set[int]() if node is None else processors(node) & before
    if not near:
        yield
        return
    os.sched_setaffinity(0, near)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
