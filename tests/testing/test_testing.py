"""What the library ships for tests imports lightly, and is all there."""

import subprocess
import sys

import pytest

import kvstow.testing

LIGHT = """
import sys
absent = ("torch", "hypothesis", "transformers", "numpy")
sys.modules.update(dict.fromkeys(absent))  # importing None is a ModuleNotFoundError
import kvstow.testing
assert "check_attention" in kvstow.testing.__all__
"""


def test_the_package_imports_without_what_its_modules_need():
    run = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("name", kvstow.testing.__all__)
def test_every_name_that_the_package_lists_is_there(name):
    found = getattr(kvstow.testing, name)
    assert found.__name__ == name
    assert found.__module__.startswith("kvstow.testing.")


def test_a_name_that_the_package_does_not_list_is_missing():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kvstow.testing.nothing
