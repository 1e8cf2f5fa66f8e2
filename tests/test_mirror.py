"""Tests lie where their modules lie, or this page says where they are."""

from pathlib import Path

import kvstow

TESTS = Path(__file__).parent
SOURCE = Path(kvstow.__file__).parent

ELSEWHERE = {
    "adapters/transformers/inspect.py": "adapters/transformers/test_cache.py",
    "adapters/transformers/layers.py": "adapters/transformers/test_cache.py",
    "adapters/transformers/prefixes.py": "adapters/transformers/test_restart.py",
    "adapters/vllm/bases.py": "vllm/test_plugin.py",
    "adapters/vllm/scheduler/handovers.py": "adapters/vllm/scheduler/test_side.py",
    "adapters/vllm/scheduler/offers.py": "adapters/vllm/scheduler/test_side.py",
    "adapters/vllm/scheduler/parts.py": "adapters/vllm/scheduler/test_early.py",
    "adapters/vllm/secondary.py": "vllm/test_secondary.py",
    "adapters/vllm/worker/offers.py": "adapters/vllm/worker/test_side.py",
    "child.py": "demo/test_story.py",
    "cli/demo.py": "demo/test_story.py",
    "cli/output.py": "cli/test_process.py",
    "cli/route_requests.py": "adapters/test_router.py",
    "demo/engine.py": "demo/test_story.py",
    "demo/report.py": "demo/test_story.py",
    "demo/weights.py": "adapters/transformers/test_families.py",
    "errors.py": "test_front_door.py",
    "memory/digest_keys.py": "memory/test_digest.py",
    "memory/kernels/copy.py": "memory/test_copy.py",
    "memory/kernels/sums.py": "memory/test_digest.py",
    "offload/copies/jobs.py": "offload/copies/test_mover.py",
    "offload/disk/convert.py": "offload/test_layouts.py",
    "offload/disk/files.py": "offload/disk/test_tree.py",
    "offload/disk/inspect.py": "offload/disk/test_opening.py",
    "offload/journal.py": "offload/test_why.py",
    "offload/remote/calls.py": "offload/remote/test_tier.py",
    "offload/remote/directory.py": "offload/remote/test_reading.py",
    "offload/remote/writes.py": "offload/remote/test_tier.py",
    "offload/rows.py": "offload/test_layouts.py",
    "offload/tier.py": "offload/test_store.py",
    "plan/slab.py": "laws/test_slab_law.py",
    "render/plan_page.py": "render/test_page.py",
    "testing/bench_transfer.py": "cli/test_bench.py",
    "testing/strides.py": "testing/test_attention.py",
    "testing/timed_agent.py": "cli/test_bench.py",
    "testing/tiny_models.py": "adapters/transformers/test_families.py",
    "transfer/channel/curve.py": "transfer/channel/test_sockets.py",
    "transfer/channel/messages.py": "transfer/channel/test_framing.py",
    "transfer/channel/status.py": "cli/test_status.py",
    "transfer/metrics.py": "offload/test_metrics.py",
    "transfer/pulls.py": "transfer/test_pull.py",
    "transfer/serve.py": "transfer/test_kills.py",
    "transfer/source.py": "transfer/test_pull.py",
    "transfer/transport/base.py": "transfer/transport/test_local.py",
    "transformers.py": "test_front_door.py",
    "vllm.py": "test_front_door.py",
}
"""Modules without a test file of their own name, and the file that tests them: to be shortened."""


def modules_without_tests() -> set[str]:
    modules = {path.relative_to(SOURCE) for path in SOURCE.rglob("*.py") if path.name[:2] != "__"}
    return {
        str(path) for path in modules if not (TESTS / path.parent / f"test_{path.name}").exists()
    }


def test_every_module_has_a_test_file_of_its_name_or_is_listed():
    assert modules_without_tests() - ELSEWHERE.keys() == set()


def test_no_module_is_listed_that_has_a_test_file_of_its_name_or_is_gone():
    assert ELSEWHERE.keys() - modules_without_tests() == set()


def test_the_files_that_test_other_modules_are_there():
    assert [file for file in ELSEWHERE.values() if not (TESTS / file).exists()] == []
