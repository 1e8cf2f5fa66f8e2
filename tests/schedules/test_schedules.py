"""Transfers and tiers under many schedules: one thread, one seed, everything that can go wrong.

`scripts/schedules --seeds N --first-seed S` runs more of them, `scripts/schedules --table` shows
which seed finds which planted bug.
"""

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from schedules.library import prepared
from schedules.main import folder
from schedules.planted import BUGS, first_found
from schedules.schedule import Broken, Schedule, run

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
    with prepared():
        for seed in range(first, first + LOT):
            outcomes += run(seed, folder()).outcomes
    assert outcomes["accepted"] > LOT // 2, outcomes
    assert outcomes["loaded"] > LOT // 100, outcomes
    assert len(outcomes) > 8, outcomes


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name):
    assert first_found(name, range(SEEDS), folder())


@pytest.mark.parametrize(
    "name",
    [
        "rows_are_free_before_they_are_quiet",
        "written_is_believed_before_it_is_true",
        "a_key_does_not_name_the_computation",
    ],
)
def test_a_planted_bug_is_found_soon_and_each_time_by_the_same_seed(name):
    found = first_found(name, range(SEEDS), folder())
    assert found is not None
    seed, says = found
    assert first_found(name, range(seed, seed + 1), folder()) == (seed, says)


def told(seed: int) -> tuple[object, ...]:
    schedule = Schedule(seed, folder())
    report = schedule.run()
    return report.trace, report.outcomes, report.injected, schedule.random.getstate()


def test_a_seed_replays_to_the_last_number_drawn():
    with prepared():
        for seed in range(20):
            assert told(seed) == told(seed)


def test_what_is_not_true_names_the_seed_and_the_step():
    with prepared():
        schedule = Schedule(3, folder())
        node = next(iter(schedule.world.nodes.values()))
        node.memory[-1] ^= 1
        with pytest.raises(Broken, match=r"seed 3, step \d+: a: bytes \[\d+\] have changed"):
            schedule.run()
