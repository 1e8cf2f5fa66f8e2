"""Threads whose owners learn what ended them, and callbacks in forked children."""

import gc
import logging
import os

import pytest

from kvstow.threads import after_fork, broken_threads, guarded_thread


def test_what_a_guarded_thread_raises_is_logged_counted_and_passed_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reasons: list[BaseException] = []

    def fail() -> None:
        raise ValueError("the reason")

    before = broken_threads().get("kvstow-fails", 0)
    with caplog.at_level(logging.ERROR, logger="kvstow.threads"):
        thread = guarded_thread("kvstow-fails", fail, on_broken=reasons.append)
        assert thread.daemon
        thread.start()
        thread.join()
    assert [str(reason) for reason in reasons] == ["the reason"]
    assert broken_threads()["kvstow-fails"] == before + 1
    assert "kvstow-fails" in caplog.text
    assert "ValueError: the reason" in caplog.text


def test_leaving_a_guarded_thread_with_sys_exit_breaks_it_too() -> None:
    reasons: list[BaseException] = []

    def leave() -> None:
        raise SystemExit(3)

    thread = guarded_thread("kvstow-leaves", leave, on_broken=reasons.append)
    thread.start()
    thread.join()
    assert isinstance(reasons[0], SystemExit)


def test_a_thread_that_returns_is_not_broken() -> None:
    reasons: list[BaseException] = []
    thread = guarded_thread("kvstow-returns", lambda: None, on_broken=reasons.append)
    thread.start()
    thread.join()
    assert not reasons
    assert "kvstow-returns" not in broken_threads()


class Owner:
    """Something that only its own process may use."""

    def __init__(self) -> None:
        self.is_forked = False
        after_fork(self.mark_forked)

    def mark_forked(self) -> None:
        self.is_forked = True


def exit_code_in_child(owner: Owner) -> int:
    child = os.fork()
    if not child:
        os._exit(7 if owner.is_forked else 0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_child_is_told_and_its_parent_is_not() -> None:
    owner = Owner()
    assert exit_code_in_child(owner) == 7
    assert not owner.is_forked


def test_a_callback_that_fails_keeps_no_other_from_being_called() -> None:
    class Failing:
        def fail(self) -> None:
            raise RuntimeError

    failing = Failing()
    after_fork(failing.fail)
    owner = Owner()
    assert exit_code_in_child(owner) == 7
    del failing


def test_registering_a_method_does_not_keep_its_object() -> None:
    from kvstow import threads

    gc.collect()
    before = len(threads._callbacks)
    for _ in range(100):
        Owner()
    gc.collect()
    assert len(threads._callbacks) <= before
