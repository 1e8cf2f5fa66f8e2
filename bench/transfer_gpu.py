# ruff: noqa: E402
"""Rows in device memory between two processes on one GPU, against pieces and one buffer.

    PYTHONPATH=src python bench/transfer_gpu.py --json bench/results/transfer_gpu.json

Says which direction first contact chose, then measures both. Needs a CUDA device, torch,
nixl-cu13, msgspec, pyzmq, prometheus-client.
"""

import os
import sys

sys.path[0] = os.path.dirname(sys.path[0])  # for bench.machine

from dataclasses import replace

from bench.machine import arguments, write

from kvstow.testing.measure.transfer import Setting, measured


def main() -> None:
    options = arguments(__doc__.partition("\n")[0])
    base = Setting(device="cuda:0", repeats=options.repeats)
    found: dict[str, object] = {}
    chosen = measured(base)
    found["512 rows, direction chosen"] = chosen
    show("512 rows, chosen", chosen)
    write(options.json, found)
    for rows, direction in ((512, "write"), (64, "read")):
        few = replace(base, rows=rows, repeats=2 if direction == "read" else base.repeats)
        name = f"{rows} rows, {direction}"
        found[name] = measured(few, direction)
        show(name, found[name])
        write(options.json, found)
    rows = chosen["gigabytes_per_second"]["rows"]
    ratio = chosen["ratio_to_per_layer"]
    print(f"rows {rows:.1f} GB/s (asked for: 120), {ratio:.1f} times the pieces (asked for: 60)")
    if chosen["direction"] != "write":
        print("first contact chose to read", file=sys.stderr)


def show(name: str, one: dict[str, object]) -> None:
    rates = ", ".join(f"{k} {v:.2f}" for k, v in one["gigabytes_per_second"].items())
    print(f"{name}: {one['direction']}: GB/s {rates}; probe {one['probe']}; "
          f"{one['overhead_us_per_pull']:.0f} µs own", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
