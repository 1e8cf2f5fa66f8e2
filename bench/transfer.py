# ruff: noqa: E402
"""Pulls between two processes over NIXL against NIXL alone, on one host and over TCP.

    PYTHONPATH=src python bench/transfer.py --json bench/results/transfer.json

Each path runs in a process of its own: what NIXL may use is fixed when it is loaded.
"""

import os
import sys

sys.path[0] = os.path.dirname(sys.path[0])  # for bench.machine

import json
import subprocess

from bench.machine import arguments, write


def run(*options: str) -> dict[str, object]:
    """One `kvstow bench transfer`, as a document."""
    command = [sys.executable, "-m", "kvstow", "bench", "transfer", "--json", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    options = arguments(__doc__.partition("\n")[0])
    repeats = ("--repeats", str(options.repeats))
    found: dict[str, object] = {}
    for name, more in (("one host", ()), ("tcp", ("--tcp",))):
        one = run(*repeats, *more)
        found[name] = one
        print(f"{name}: {one['ratio_to_raw']:.2f} of raw NIXL, {one['ratio_to_per_layer']:.2f} "
              f"times per-layer pieces, {one['ratio_to_per_layer_built']:.2f} if listed per "
              f"request, {one['ratio_to_per_layer_by_threads']:.2f} if NIXL has "
              f"{one['engine_threads']} threads, "
              f"{one['overhead_us_per_pull']:.0f} µs of our own, sample costs "
              f"{100 * one['digest_sample_cost']:.1f} %, contact "
              f"{one['contact_ms']:.1f} ms, {one['direction']}")  # fmt: skip
    write(options.json, found)


if __name__ == "__main__":
    main()
