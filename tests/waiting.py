"""Waiting for something that another thread or process does."""

import time
from collections.abc import Callable

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
