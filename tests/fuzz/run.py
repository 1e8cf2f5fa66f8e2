"""Fuzz readers for a while: `scripts/fuzz --seconds 60 --seed 7 frames tickets`.

Each reader runs in a process of its own, within limits of memory and time. An input whose outcome,
numbers and names aside, was not seen before becomes a document to damage further. An input that
breaks a reader is kept in `tests/fuzz/corpus/<reader>/`, and the run ends with 1.
"""

import argparse
import json
import logging
import mmap
import os
import re
import resource
import secrets
import select
import signal
import sys
import time
import traceback
from collections import Counter
from hashlib import blake2b
from random import Random
from typing import Any

from fuzzing import CORPUS, Reader, readers

HANG_SECONDS = 120
MOST_DOCUMENTS = 2000
MOST_INPUT = 8 << 20


def shape(said: str) -> str:
    """An outcome without the numbers and names in it."""
    return re.sub(r"\d+|'[^']*'", "·", said)[:160]


def fuzz(reader: Reader, seed: int, seconds: float, current: mmap.mmap) -> dict[str, Any]:
    """Damage documents until the time is over or one breaks the reader."""
    random = Random(seed)
    documents = list(reader.documents)
    seen: set[str] = set()
    counts: Counter[str] = Counter()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        known = random.choice((reader.documents, documents))
        data = reader.damaged(random, known)[:MOST_INPUT]
        current.seek(0)
        current.write(len(data).to_bytes(8, "little") + data)
        try:
            said = reader.outcome(data)
        except BaseException:
            return {"counts": counts, "why": traceback.format_exc()}
        counts[said.partition(" | ")[0]] += 1
        if shape(said) not in seen or (said == "accepted" and not random.randrange(50)):
            seen.add(shape(said))
            documents.append(data)
            del documents[len(reader.documents) : -MOST_DOCUMENTS]
    return {"counts": counts, "why": ""}


def in_a_child(reader: Reader, seed: int, seconds: float) -> tuple[dict[str, Any], bytes]:
    """What `fuzz` found, and the last input; a child that dies or hangs is a failure too."""
    current = mmap.mmap(-1, MOST_INPUT + 8)
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            found = fuzz(reader, seed, seconds, current)
        except BaseException:  # it must not go through the parent's own end
            found = {"counts": {}, "why": traceback.format_exc()}
        os.write(theirs, json.dumps(found).encode()[:60_000])
        os._exit(0)
    os.close(theirs)
    ready, _, _ = select.select([ours], [], [], seconds + HANG_SECONDS)
    if not ready:
        os.kill(child, signal.SIGKILL)
    said = os.read(ours, 65_536) if ready else b""
    os.close(ours)
    _, status = os.waitpid(child, 0)
    nbytes = int.from_bytes(current[:8], "little")
    why = "no end" if not ready else f"ended with status {status}"
    found = json.loads(said) if said else {"counts": {}, "why": why}
    return found, current[8 : 8 + nbytes]


def main() -> int:
    logging.disable()  # what a store has lost is said thousands of times
    known = readers()
    words = argparse.ArgumentParser(prog="scripts/fuzz", description="Damaged input for readers.")
    words.add_argument("--seconds", type=float, default=60.0, help="per reader")
    words.add_argument("--seed", type=int, default=secrets.randbits(32))
    words.add_argument("readers", nargs="*", metavar="READER", help=", ".join(known))
    asked = words.parse_args()
    unknown = set(asked.readers) - set(known)
    if unknown:
        words.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(known)}")
    print(f"seed {asked.seed}, {asked.seconds:g} s each")
    failed = 0
    for name in asked.readers or known:
        found, last = in_a_child(known[name], asked.seed, asked.seconds)
        counts = Counter(found["counts"])
        kinds = ", ".join(f"{kind} {count}" for kind, count in counts.most_common())
        print(f"{name:12} {counts.total():8} inputs: {kinds}", flush=True)
        if found["why"]:
            failed += 1
            file = CORPUS / name / blake2b(last, digest_size=6).hexdigest()
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(last)
            print(f"{found['why']}\n{name}: broken by {file}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
