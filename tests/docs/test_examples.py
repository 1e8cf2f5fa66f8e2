"""Every example runs, and says what it promises."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

SAYS = {
    "adopt_tensors.py": ["adopted 6 tensors", "identical", "each is 1 piece"],
    "check_kernel.py": ["attention: can read", "flattened: CANNOT", "block stride         NOT"],
    "offload.py": ["10 rows of", "160 tokens came back, identical"],
    "plan_a_model.py": ["window128", "in 1 piece, not 24", "fit"],
    "serve_rows.py": ["fence passed, digest passed", "says 62, the producer wrote 62"],
    "simulate_load.py": ["slab", "union", "completed"],
}


def test_every_example_is_tested():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs_without_a_word_of_complaint(name):
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        # UCX itself writes to stderr when a peer closes while it is still connecting to it.
        env={**os.environ, "UCX_LOG_LEVEL": "fatal"},
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    for words in SAYS[name]:
        assert words in run.stdout
