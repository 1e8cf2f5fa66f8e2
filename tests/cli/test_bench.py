"""`kvstow bench transfer`, run as a user runs it."""

import json
import subprocess
import sys


def kvstow(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvstow", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


def test_bench_transfer_prints_its_stable_keys():
    done = kvstow("bench", "transfer", "--rows", "8", "--layers", "2", "--repeats", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert "note: round 2 of 2" in done.stderr
    assert "not verified" not in done.stderr
    found = json.loads(done.stdout)
    assert {"ratio_to_raw", "ratio_to_per_layer", "overhead_us_per_pull", "machine"} <= set(found)
    assert found["descriptors"]["prepared"] == found["descriptors"]["built"] == 8 * 2 * 2
    assert found["descriptors"]["contiguous"] == 1
    assert 1 < found["descriptors"]["rows"] <= 8
    assert found["row_bytes"] == 2 * 2 * 16384
    times = (
        "ratio_to_per_layer",
        "ratio_to_per_layer_built",
        "producer_us_per_pull",
        "contact_ms",
    )
    assert all(isinstance(found[name], float) for name in times)
