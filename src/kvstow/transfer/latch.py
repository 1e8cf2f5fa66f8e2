"""A latch: set once, for good, by one thread; any others may wait for it."""

import threading


class Latch:
    """What an `Event` is to those who only wait for its first `set`, and made in a fifth of its
    time: transfers make several."""

    def __init__(self) -> None:
        self.is_set = False
        self._closed = threading.Lock()
        self._closed.acquire()

    def set(self) -> None:
        """Let everybody pass from now on; only ever called in one thread at a time."""
        if not self.is_set:
            self.is_set = True
            self._closed.release()

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it is set, at the latest after so long."""
        if self.is_set:
            return True
        if not self._closed.acquire(timeout=-1 if seconds is None else max(seconds, 0)):
            return False
        self._closed.release()
        return True
