"""Run the GPU tests with nothing but torch: `PYTHONPATH=src python tests/gpu/run.py [--json FILE]`.

A machine with a GPU may have neither pytest nor hypothesis. Every function named test_ is
called; what it raises is printed; the exit status says whether all passed.
"""

import argparse
import importlib.util
import json
import sys
import time
import traceback
from pathlib import Path


def tests() -> list[tuple[str, object]]:
    found = []
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        if path.name == "test_sentinel.py":
            continue
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found += [
            (f"{path.stem}::{name}", function)
            for name, function in vars(module).items()
            if name.startswith("test_")
        ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    json_file = parser.parse_args().json
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from bench.machine import machine

    results = []
    for name, test in tests():
        started = time.perf_counter()
        try:
            test()
            outcome = "passed"
        except Exception as error:
            traceback.print_exc()
            outcome = f"failed: {type(error).__name__}: {error}"[:500]
        seconds = round(time.perf_counter() - started, 2)
        print(f"{outcome.split(':')[0]:<7} {seconds:7.2f} s  {name}", flush=True)
        results.append({"test": name, "outcome": outcome, "seconds": seconds})
    failed = [r["test"] for r in results if r["outcome"] != "passed"]
    print(f"{len(results) - len(failed)} passed, {len(failed)} failed", flush=True)
    if json_file:
        json_file.write_text(json.dumps({"machine": machine(), "tests": results}, indent=1))
    return 1 if failed or not results else 0


if __name__ == "__main__":
    raise SystemExit(main())
