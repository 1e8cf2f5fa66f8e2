"""Hypothesis profiles, Triton's interpreter, and a closing line about the tests left out."""

import gc
import importlib.util
import os
import signal
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.doctest import DoctestModule
from hypothesis import HealthCheck, settings

# Tensors of tests are tiny: torch's threads would only wait for each other, by spinning. Engines of
# vLLM, which has an environment of its own, choose themselves. (A folder of tests is called `vllm`,
# too: it has no origin.)
vllm = importlib.util.find_spec("vllm")
if vllm is None or vllm.origin is None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

OPT_IN_MARKERS = ("gpu", "slow", "vllm", "dynamo", "lmcache", "sglang", "remote")

# The same examples each time, so that a run tells about the change it is made for. `thorough`
# searches at random: HYPOTHESIS_PROFILE=thorough scripts/test tests/laws
settings.register_profile("quick", deadline=None, max_examples=10, derandomize=True)
settings.register_profile("dev", deadline=None, max_examples=50, derandomize=True)
settings.register_profile(
    "thorough",
    deadline=None,
    max_examples=5_000,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or "dev")

if TYPE_CHECKING:
    from transfer_process import Process, Zygote

left_out = pytest.StashKey[Counter[str]]()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Test files have no doctests; and one that does not import would pass as skipped."""
    collectors = yield
    return [each for each in collectors if not isinstance(each, DoctestModule)]


NOT_QUICK = (
    "adapters",
    "browser",
    "cli",
    "demo",
    "docs",
    "dynamo",
    "e2e",
    "events",
    "fuzz",
    "gpu",
    "schedules",
    "vllm",
    "laws/test_offload_jobs.py",
    "laws/test_offload_store.py",
    "memory/kernels",
    "memory/test_digest.py",
    "offload/disk",
    "offload/host",
    "offload/copies",
    "offload/remote",
    "offload/test_layouts.py",
    "offload/test_events.py",
    "offload/test_forks.py",
    "offload/test_store.py",
    "plan/models/test_against_transformers.py",
    "plan/models/test_every_family.py",
    "transfer/test_discovery.py",
    "transfer/test_faults.py",
    "transfer/test_isolation.py",
    "transfer/test_kills.py",
    "transfer/test_matrix.py",
    "transfer/test_process.py",
    "transfer/test_pull.py",
    "transfer/channel",
    "transfer/transport",
    "memory/test_allocate.py::test_another_process_maps_a_shared_arena_and_both_see_each_others_writes",
    "test_front_door.py::test_everything_can_be_imported_at_once_and_brings_no_engine",
    "test_front_door.py::test_the_api_page_is_made_from_the_code",
    "test_front_door.py::test_the_room_of_transformers_resolves_too",
    "testing/test_attention.py::test_eager_flex_attention_reads_the_whole_pool_and_is_found_out",
)
"""Tests that start processes, load models, build pages or run for seconds: not in `--quick`."""


LONG = (
    "adapters/transformers/test_families.py",
    "schedules/test_schedules.py",
    "memory/kernels/test_attention.py",
    "docs/test_site.py",
    "docs/test_docs.py",
    "adapters/transformers/test_restart.py",
    "adapters/transformers/test_compile.py",
    "memory/test_digest.py",
    "docs/test_examples.py",
    "cli/test_process.py",
    "transfer/test_faults.py",
    "transfer/transport/test_nixl.py",
    "e2e/test_transfer_hosts.py",
)
"""Files that take longest: they come first, or one process waits at the end for the other's."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Whether `--quick` leaves this file or folder out."""
    here = Path(__file__).parent
    if not config.getoption("--quick") or not collection_path.is_relative_to(here):
        return None
    return True if collection_path.relative_to(here).as_posix() in NOT_QUICK else None


def pytest_pycollect_makeitem(collector: pytest.Collector, name: str) -> list[pytest.Item] | None:
    """No item where `--quick` leaves out this one test of a file."""
    if not collector.config.getoption("--quick"):
        return None
    file = collector.path.relative_to(Path(__file__).parent).as_posix()
    return [] if f"{file}::{name}" in NOT_QUICK else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    turns = {Path(__file__).parent / file: turn for turn, file in enumerate(LONG)}
    items.sort(key=lambda item: turns.get(item.path, len(turns)))


def pytest_configure(config: pytest.Config) -> None:
    config.stash[left_out] = Counter()
    config.option.loadscopereorder = False  # else pytest-xdist sorts files by their number of tests
    if not config.getoption("numprocesses", None):  # else this process only hands out tests
        _interpret_triton_without_cuda()


def _interpret_triton_without_cuda() -> None:
    """Triton reads this once, at its first import: before any test module, or it is too late."""
    if importlib.util.find_spec("torch"):
        import torch

        if not torch.cuda.is_available():
            os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_finish() -> None:
    """What was imported and collected stays: the garbage collector need not look at it again."""
    gc.collect()
    gc.freeze()


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        markers = [name for name in OPT_IN_MARKERS if item.get_closest_marker(name)]
        item.config.stash[left_out][" and ".join(markers) or "by -k or -m"] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of several tells the first one what it has left out."""
    told: dict[str, object] | None = getattr(session.config, "workeroutput", None)
    if told is not None:
        told["left_out"] = dict(session.config.stash[left_out])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every process has chosen among all tests: what one of them says is said of all."""
    told = getattr(node, "workeroutput", {}).get("left_out")
    if told is not None:
        node.config.stash[left_out] = Counter(told)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for reason, count in sorted(config.stash[left_out].items()):
        hint = f" (run them with: scripts/test -m {reason})" if reason in OPT_IN_MARKERS else ""
        terminalreporter.write_line(f"not run, {reason}: {count}{hint}")


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where tests were started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def zygote() -> "Iterator[Zygote]":
    """Forks processes that hold agents."""
    from transfer_process import Zygote

    made = Zygote()
    yield made
    made.close()


@pytest.fixture(scope="module")
def other(zygote: "Zygote") -> "Iterator[Process]":
    """One other process, for tests that do not harm it."""
    process = zygote.process()
    yield process
    process.close()
