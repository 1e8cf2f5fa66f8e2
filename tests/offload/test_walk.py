"""What a warm save and a warm load cost: modules of kvstow that run, and calls."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

WALK = Path(__file__).resolve().parents[2] / "scripts" / "walk"


@pytest.fixture(scope="module")
def walk():
    done = subprocess.run([sys.executable, WALK, "--json"], capture_output=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize(("what", "modules", "calls"), [("save", 25, 700), ("load", 18, 300)])
def test_a_warm_save_and_a_warm_load_walk_through_few_modules(walk, what, modules, calls):
    """Of the thread that waits; `scripts/walk` prints those of all threads, too."""
    assert walk[what]["modules"] <= modules
    assert walk[what]["calls"] <= calls


def test_a_load_makes_few_calls_in_all_threads_together(walk):
    assert walk["load"]["all_calls"] <= 300
