"""Says in every run whether the GPU tests were part of it."""

import pytest
import torch


def test_the_gpu_tests_can_run_here():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: tests/gpu did not run; scripts/bench-gpu runs them")
