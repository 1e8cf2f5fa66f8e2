"""The machine a figure was measured on, and how figures are printed and kept.

Scripts here run as `PYTHONPATH=src python bench/NAME.py --json FILE`.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path


def machine() -> dict[str, object]:
    """Processor, cores, memory, versions and GPU, with today's date."""
    import numpy
    import torch

    found: dict[str, object] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "torch": torch.__version__,
        "libc": " ".join(platform.libc_ver()),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
        found["gpu_memory_bytes"] = torch.cuda.get_device_properties(0).total_memory
        found["cuda"] = torch.version.cuda
        found["driver"] = _driver()
        found["triton"] = _triton()
    return found


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _driver() -> str:
    question = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(question, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _triton() -> str:
    import triton

    return triton.__version__


def arguments(
    description: str, more: Callable[[argparse.ArgumentParser], object] = lambda parser: None
) -> argparse.Namespace:
    """What every script takes: where to write, and how often to repeat; `more` adds options."""
    parser = argparse.ArgumentParser(description=description)
    more(parser)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--bytes", type=int, default=1 << 30, help="bytes moved per repeat")
    options = parser.parse_args()
    print("machine:", ", ".join(f"{k} {v}" for k, v in machine().items()), flush=True)
    return options


def interleaved(
    actions: dict[str, Callable[[], object]],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of each action, all of them once per round, so that drift hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for round_ in range(repeats + 1):
        for name, action in actions.items():
            started = clock()
            action()
            if round_:
                seconds[name].append(clock() - started)
    return {name: statistics.median(found) for name, found in seconds.items()}


def as_text(results: Mapping[str, object]) -> str:
    """JSON in which a dictionary of plain values is one line, as the row of a table is."""
    text = json.dumps(results, indent=1, ensure_ascii=False)
    return re.sub(r"\{[^{}]*\}", lambda row: " ".join(row[0].split()), text) + "\n"


def write(path: Path | None, results: dict[str, object]) -> None:
    """Keep the results, with the machine beside them."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_text({"machine": machine(), **results}))
