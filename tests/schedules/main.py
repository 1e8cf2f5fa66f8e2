"""Runs many schedules in several processes; prints what was injected and how transfers ended."""

import argparse
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from contextlib import nullcontext

from schedules.planted import BUGS
from schedules.schedule import Schedule

Told = tuple[int, str, Counter[str], Counter[str]]


def one(job: tuple[int, str]) -> Told:
    """A seed, what is wrong with it or nothing, outcomes, what was injected."""
    seed, name = job
    logging.disable(logging.CRITICAL)
    with BUGS[name]() if name else nullcontext():
        schedule = Schedule(seed)
        wrong = ""
        try:
            schedule.run()
        except Exception as error:
            wrong = f"seed {seed}: {type(error).__name__}: {error}"
    return seed, wrong, schedule.report.outcomes, Counter(schedule.world.injected)


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--seeds", type=int, default=2000)
    ask.add_argument("--first-seed", type=int, default=0)
    ask.add_argument("--bug", default="", choices=["", *BUGS], help="plant a bug first")
    given = ask.parse_args()
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    outcomes: Counter[str] = Counter()
    injected: Counter[str] = Counter()
    wrong: list[int] = []
    started = time.monotonic()
    with multiprocessing.Pool(len(os.sched_getaffinity(0))) as workers:
        jobs = ((seed, given.bug) for seed in seeds)
        for seed, fault, ended, done in workers.imap_unordered(one, jobs, chunksize=20):
            outcomes += ended
            injected += done
            if fault:
                wrong.append(seed)
                print(fault, file=sys.stderr, flush=True)
    rate = len(seeds) / (time.monotonic() - started)
    print(f"schedules  {len(seeds)}, {rate:.0f} a second, {len(wrong)} wrong")
    print(f"transfers  {', '.join(f'{n} {what}' for what, n in outcomes.most_common())}")
    print(f"injected   {', '.join(f'{n} {what}' for what, n in injected.most_common())}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
