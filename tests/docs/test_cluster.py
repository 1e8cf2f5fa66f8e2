"""The table of sizes in the guide on clusters is the one that its script computes."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts/cluster_sizes.py"


def test_the_table_of_sizes_is_what_the_script_computes():
    assert subprocess.run([sys.executable, str(SCRIPT), "--check"], check=False).returncode == 0
