"""A store in use: many threads at a time, and none of them while a broken index is replaced."""

import logging
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import Condition
from typing import TypeVar

from kvstow.errors import StoreError
from kvstow.offload.disk.files import store_errors
from kvstow.offload.disk.index import IndexBroken
from kvstow.offload.disk.opening import OpenStore
from kvstow.offload.tier import check_process

log = logging.getLogger("kvstow.offload")

LOOK_SECONDS = 1.0
"""How often somebody looks whether an index is to be made again, or can be."""

_T = TypeVar("_T")


class Attachment:
    """Uses of an open store. A broken index is let go of, and made again when nobody has it.

    `replaced` is called, alone, whenever there is a new index.
    """

    def __init__(
        self, store: OpenStore, clock: Callable[[], float], replaced: Callable[[], None]
    ) -> None:
        self._store, self._clock, self._replaced = store, clock, replaced
        self._opener = os.getpid()
        self._gate = _Gate()
        self._looked = clock()
        self.is_attached = True
        self._tries = 0
        """How often somebody has let go of the index, to make it again."""

    def retried(self, work: Callable[[], _T]) -> _T:
        """Do something with the index; once more if it broke and was made again.

        IndexBroken where it cannot be made again now, StoreError where the store is closed.
        """
        try:
            with self.using():
                return work()
        except IndexBroken:
            if not self.is_attached:
                raise
        with self.using():
            return work()

    @contextmanager
    def using(self) -> Generator[None]:
        """The index is usable meanwhile, unless it breaks. What the system refuses becomes a
        StoreError."""
        check_process(self._opener, f"store {self._store.path}")
        with store_errors(self._store.path):
            seen = self._tries
            if self._is_due() and (not self.is_attached or self._store.is_marked):
                self._reattach(seen, found_broken=False)
            was_usable = False
            try:
                with self._gate.entered(f"store {self._store.path} is closed"):
                    if not self.is_attached:
                        what = "the index is being made again"
                        raise IndexBroken(f"store {self._store.path}: {what}")
                    seen, was_usable = self._tries, True
                    yield
            except IndexBroken:
                if was_usable:
                    self._reattach(seen, found_broken=True)
                raise

    def close(self) -> bool:
        """Nobody uses the store any more; whether somebody could until now. To a process that was
        forked it never belonged."""
        return os.getpid() == self._opener and self._gate.close()

    def _is_due(self) -> bool:
        now = self._clock()
        if 0 <= now - self._looked < LOOK_SECONDS:  # a clock that was set back is due as well
            return False
        self._looked = now
        return True

    def _reattach(self, seen: int, *, found_broken: bool) -> None:
        """Let go of a broken index and, if no other process has it, make it again.

        Nothing happens where another thread has done so after so many tries were `seen`.
        """
        with self._gate.alone() as is_open:
            if not is_open or self._tries != seen:
                return
            self._tries += 1
            if self.is_attached:
                log.warning("store %s: the index is broken and is made again", self._store.path)
                self._store.detach(mark=found_broken)
                self.is_attached = False
            try:
                self._store.attach(seconds=0)
            except StoreError as error:
                log.warning("store %s: %s", self._store.path, error)
                return
            self._replaced()
            self.is_attached = True


class _Gate:
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
