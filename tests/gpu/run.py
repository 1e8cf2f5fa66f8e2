"""Run the GPU tests with nothing but torch: `PYTHONPATH=src python tests/gpu/run.py [NAME …]`.

A machine with a GPU may have neither pytest nor hypothesis. Every function named test_ is
called, or those with a NAME in theirs; what it raises is printed. A test that raises
`unittest.SkipTest` was not run. The exit status says whether all others passed.

A test may ask for pytest's `record_property`: what it records goes into the file of `--json`.
"""

import argparse
import importlib.util
import inspect
import json
import sys
import time
import traceback
from pathlib import Path
from unittest import SkipTest


def tests() -> list[tuple[str, object]]:
    found = []
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        found += [
            (f"{path.stem}::{name}", function)
            for name, function in vars(module).items()
            if name.startswith("test_")
        ]
    return found


def outcome(test) -> tuple[str, dict[str, object]]:
    """What became of one test, and what it recorded."""
    recorded: dict[str, object] = {}
    wanted = "record_property" in inspect.signature(test).parameters
    try:
        test(**({"record_property": recorded.__setitem__} if wanted else {}))
        return "passed", recorded
    except SkipTest as reason:
        return f"not run: {reason}"[:500], recorded
    except Exception as error:
        traceback.print_exc()
        return f"failed: {type(error).__name__}: {error}"[:500], recorded


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from bench.machine import machine

    results = []
    for name, test in tests():
        if options.names and not any(part in name for part in options.names):
            continue
        started = time.perf_counter()
        said, recorded = outcome(test)
        seconds = round(time.perf_counter() - started, 2)
        word, _, reason = said.partition(": ")
        print(f"{word:<7} {seconds:7.2f} s  {name}", flush=True)
        if word == "not run":
            print(f"        {reason}", flush=True)
        if recorded:
            print(json.dumps(recorded, indent=1), flush=True)
        result = {"test": name, "outcome": said, "seconds": seconds}
        results.append({**result, "recorded": recorded} if recorded else result)
    words = ("passed", "failed", "not run")
    counts = {word: sum(r["outcome"].startswith(word) for r in results) for word in words}
    print(", ".join(f"{count} {word}" for word, count in counts.items()), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "tests": results}, indent=1))
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
