"""Runs many schedules in several processes; prints what was injected and how transfers ended."""

import argparse
import gc
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import get_args

from kvstow.errors import FaultKind
from schedules.library import prepared
from schedules.planted import BUGS, first_found
from schedules.schedule import Broken, Report, Schedule

TRANSFERS = ("accepted", *get_args(FaultKind))
COLLECT_EVERY = 25

Told = tuple[int, str, Counter[str], Counter[str]]


def folder() -> str:
    """A place for stores in memory: what a disk loses is decided by the schedule."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


def start(bug: str, where: str) -> None:
    """Prepare the library of this process, and plant a bug in it."""
    global FOLDER
    FOLDER = where
    if multiprocessing.parent_process() is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # who has started us ends us, and sums up
    logging.disable(logging.CRITICAL)
    STACK.enter_context(prepared())
    if bug:
        STACK.enter_context(BUGS[bug]())
    gc.collect()
    gc.freeze()
    gc.disable()  # and collect now and then: the library is not to be looked through every time


STACK = ExitStack()
FOLDER = ""


def one(seed: int) -> Told:
    """A seed, what is wrong with it or nothing, outcomes, what was injected."""
    if seed % COLLECT_EVERY == 0:
        gc.collect()
    report = Report(seed)
    try:
        schedule = Schedule(seed, FOLDER)
        report = schedule.report
        schedule.run()
    except Broken as error:
        return seed, str(error), report.outcomes, report.injected
    except Exception as error:
        return seed, f"seed {seed}: {error!r}", report.outcomes, report.injected
    return seed, "", report.outcomes, report.injected


def told(seeds: range, bug: str, processes: int, where: str) -> Iterator[Told]:
    """What comes of each seed."""
    if processes == 1:
        start(bug, where)
        yield from map(one, seeds)
        return
    with multiprocessing.Pool(processes, start, (bug, where)) as workers:
        yield from workers.imap_unordered(one, seeds, chunksize=COLLECT_EVERY)


def show(seed: int, bug: str, where: str) -> int:
    """Run one seed and print what happened, line by line."""
    start(bug, where)
    report = Report(seed)
    try:
        schedule = Schedule(seed, where)
        report = schedule.report
        schedule.run()
    except AssertionError as error:
        print(*report.trace, error, sep="\n")
        return 1
    print(*report.trace, sep="\n")
    return 0


def found(job: tuple[str, range, str]) -> tuple[str, tuple[int, str] | None]:
    logging.disable(logging.CRITICAL)
    return job[0], first_found(*job)


def table(seeds: range, processes: int, where: str) -> int:
    """Print which seed finds which planted bug first."""
    missed = 0
    jobs = [(name, seeds, where) for name in BUGS]
    with multiprocessing.Pool(processes) as workers:
        for name, first in workers.imap(found, jobs):
            missed += first is None
            seed, says = first or (-1, f"not found in {len(seeds)} seeds")
            print(
                f"{name.replace('_', ' '):<58} {seed:>5}  {says.split(': ', 1)[-1][:90]}",
                flush=True,
            )
    return 1 if missed else 0


def listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.most_common()) or "none"


def summary(outcomes: Counter[str], injected: Counter[str]) -> None:
    transfers = Counter({what: outcomes[what] for what in TRANSFERS if outcomes[what]})
    rest = Counter({what: n for what, n in outcomes.items() if what not in TRANSFERS})
    share = outcomes["accepted"] / max(1, transfers.total())
    print(f"transfers  {transfers.total()}, {share:.0%} accepted: {listed(transfers)}")
    print(f"tiers      {listed(rest)}")
    print(f"injected   {listed(injected)}", flush=True)


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--seeds", type=int, default=2000)
    ask.add_argument("--first-seed", type=int, default=0)
    ask.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    ask.add_argument("--bug", default="", choices=["", *BUGS], help="plant a bug first")
    ask.add_argument("--table", action="store_true", help="the first seed that finds each bug")
    ask.add_argument("--trace", action="store_true", help="print what the first seed does")
    ask.add_argument("--every", type=int, default=0, help="a summary after so many schedules")
    given = ask.parse_args()
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    with tempfile.TemporaryDirectory(dir=folder(), prefix="kvstow-schedules-") as where:
        if given.trace:
            return show(given.first_seed, given.bug, where)
        if given.table:
            return table(seeds, given.processes, where)
        return run(seeds, given.bug, given.processes, where, given.every)


def run(seeds: range, bug: str, processes: int, where: str, every: int) -> int:
    """Run all seeds, or those that can be run until somebody interrupts; 1 if one is wrong."""
    outcomes: Counter[str] = Counter()
    injected: Counter[str] = Counter()
    wrong = number = 0
    started = time.monotonic()

    def tell() -> None:
        rate = number / (time.monotonic() - started)
        print(f"schedules  {number}, {rate:.0f} a second, {wrong} wrong")
        summary(outcomes, injected)

    try:
        for number, (_, fault, ended, done) in enumerate(told(seeds, bug, processes, where), 1):
            outcomes += ended
            injected += done
            if fault:
                wrong += 1
                print(fault, file=sys.stderr, flush=True)
            if every and number % every == 0 and number < len(seeds):
                tell()
    except KeyboardInterrupt:
        print(f"interrupted after {number} of {len(seeds)} schedules", file=sys.stderr)
    tell()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
