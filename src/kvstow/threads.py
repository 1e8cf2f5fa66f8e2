"""Threads that say when they break, and the one hook into forks.

guarded_thread   a thread whose owner learns what ended it
after_fork       called in every child process, so that what belongs to the parent is left alone
"""

import logging
import os
import weakref
from collections import Counter
from collections.abc import Callable
from itertools import count
from threading import Lock, Thread
from types import MethodType

log = logging.getLogger(__name__)

_lock = Lock()
_broken: Counter[str] = Counter()
_numbers = count()
_callbacks: dict[int, Callable[[], Callable[[], None] | None]] = {}


def guarded_thread(
    name: str, target: Callable[[], None], *, on_broken: Callable[[BaseException], None]
) -> Thread:
    """A daemon thread, not started yet, that does not end unnoticed.

    Whatever `target` raises is logged with its traceback, counted in `broken_threads`, and passed
    to `on_broken`, in that thread: the owner then shows itself as broken.
    """

    def run() -> None:
        try:
            target()
        except BaseException as error:
            with _lock:
                _broken[name] += 1
            log.exception("thread %s ended with an error", name)
            on_broken(error)

    return Thread(target=run, name=name, daemon=True)


def broken_threads() -> dict[str, int]:
    """Guarded threads of this process that ended with an error, by name."""
    with _lock:
        return dict(_broken)


def after_fork(callback: Callable[[], None]) -> None:
    """Call `callback` in every child that this process forks, after those registered before it.

    A bound method is called as long as its object lives, and does not keep it alive. One that
    raises is logged, and the others are called all the same.
    """
    number = next(_numbers)
    if isinstance(callback, MethodType):
        _callbacks[number] = weakref.WeakMethod(callback, lambda _: _callbacks.pop(number, None))
    else:
        _callbacks[number] = lambda: callback


def _call_back() -> None:
    global _lock
    _lock = Lock()  # another thread of the parent may have held the old one
    for reference in tuple(_callbacks.values()):
        callback = reference()
        try:
            if callback is not None:
                callback()
        except Exception:
            log.exception("after a fork")


os.register_at_fork(after_in_child=_call_back)
