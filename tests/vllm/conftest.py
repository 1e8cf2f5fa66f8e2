"""Models and servers for tests that need vLLM."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "bench")]

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """A small real model, as a checkpoint directory."""
    from kvstow.demo.weights import SMOLLM2, unpacked

    return unpacked(SMOLLM2)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")
