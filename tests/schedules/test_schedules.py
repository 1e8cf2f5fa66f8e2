"""The protocol under many schedules: one thread, one seed, everything that can go wrong.

`scripts/schedules --seeds N --first-seed S` runs more of them.
"""

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from schedules.planted import BUGS, found
from schedules.schedule import Schedule, run

SEEDS = 2000
LOT = 250


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What agents log about spoilt messages is not asked for."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("first", range(0, SEEDS, LOT))
def test_nothing_is_ever_silently_wrong(first):
    outcomes: Counter[str] = Counter()
    for seed in range(first, first + LOT):
        outcomes += run(seed).outcomes
    assert outcomes["accepted"] > LOT // 4, outcomes
    assert len(outcomes) > 4, outcomes


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name):
    assert found(name, range(SEEDS))


def told(seed: int) -> tuple[object, ...]:
    schedule = Schedule(seed)
    report = schedule.run()
    return report.trace, report.outcomes, report.injected, schedule.random.getstate()


def test_a_seed_replays_to_the_last_number_drawn():
    for seed in range(20):
        assert told(seed) == told(seed)
