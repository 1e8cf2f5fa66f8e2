"""scripts/setup: what it refuses. That it installs is seen by every run of scripts/test."""

import shutil
import subprocess
from pathlib import Path

SETUP = Path(__file__).parents[1] / "scripts/setup"


def test_an_environment_behind_a_link_is_refused_and_not_touched(tmp_path):
    checkout, elsewhere = tmp_path / "checkout", tmp_path / "elsewhere"
    (checkout / "scripts").mkdir(parents=True)
    elsewhere.mkdir()
    shutil.copy(SETUP, checkout / "scripts")
    (checkout / ".venv").symlink_to(elsewhere)
    done = subprocess.run([checkout / "scripts/setup"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f".venv is a link to {elsewhere}" in done.stderr
    assert "hint: remove the link" in done.stderr
    assert not list(elsewhere.iterdir())
