"""Processes that integration tests talk to."""

from collections.abc import Iterator

import pytest

from transfer_process import Process, Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks processes that hold agents."""
    made = Zygote()
    yield made
    made.close()


@pytest.fixture(scope="module")
def other(zygote: Zygote) -> Iterator[Process]:
    """One other process, for tests that do not harm it."""
    process = zygote.process()
    yield process
    process.close()
