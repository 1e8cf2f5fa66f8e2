"""LMCache's own bench of second tiers, with every byte compared. Run by scripts/test-lmcache."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.lmcache, pytest.mark.timeout(300)]


def bench(path: Path, *more: str, **params: str) -> subprocess.CompletedProcess[str]:
    adapter = {
        "type": "plugin",
        "module_path": "kvstow.adapters.lmcache",
        "class_name": "KvstowL2Adapter",
        "adapter_params": {"path": str(path), "capacity": "1GiB", **params},
    }
    program = "from lmcache.cli.main import main; main()"
    command = [sys.executable, "-c", program, "bench", "l2", "--no-skip-verify"]
    return subprocess.run(
        [*command, "--l2-adapter", json.dumps(adapter), *more],
        env={**os.environ, "LMCACHE_TRACK_USAGE": "false"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_chunk_is_stored_found_and_loaded_as_it_was(tmp_path: Path):
    done = bench(tmp_path, "--rounds", "2", unverified="a bench")
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    assert "data verified OK" in said
    assert "mismatch" not in said.lower()
    assert any(tmp_path.glob("bytes-*/layout.json"))


def test_an_adapter_that_knows_no_identity_is_refused(tmp_path: Path):
    done = bench(tmp_path)
    assert done.returncode != 0
    assert "model_dir" in done.stdout + done.stderr
