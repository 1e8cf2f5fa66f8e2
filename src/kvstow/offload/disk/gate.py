"""Who may use something that is sometimes replaced: many at a time, or one alone."""

from collections.abc import Generator
from contextlib import contextmanager
from threading import Condition

from kvstow.errors import StoreError


class Gate:
    """Open, taken by one alone, or closed for good. Call from any thread; never nested."""

    def __init__(self) -> None:
        self._state = Condition()
        self._users = 0
        self._taken = False
        self._closed = False

    @contextmanager
    def entered(self, refusal: str) -> Generator[None]:
        """One of many users; StoreError with these words once the gate is closed."""
        with self._state:
            self._state.wait_for(lambda: not self._taken)
            if self._closed:
                raise StoreError(refusal)
            self._users += 1
        try:
            yield
        finally:
            with self._state:
                self._users -= 1
                self._state.notify_all()

    @contextmanager
    def alone(self) -> Generator[bool]:
        """Waits until nobody else is in; whether the gate is still open."""
        with self._state:
            self._state.wait_for(lambda: not self._taken)
            self._taken = True
            self._state.wait_for(lambda: not self._users)
        try:
            yield not self._closed
        finally:
            with self._state:
                self._taken = False
                self._state.notify_all()

    def close(self) -> bool:
        """Nobody enters any more, and nobody is in; whether it was open until now."""
        with self._state:
            self._state.wait_for(lambda: not self._taken)
            if self._closed:
                return False
            self._closed = True
            self._state.wait_for(lambda: not self._users)
            return True
