"""LMCache's own bench of second tiers, with every byte compared, and chunks of LMCache's own kind
that differ in nothing but what their elements are. Run by scripts/test-lmcache."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvstow.errors import SpecError, StoreError
from waiting import wait_for

if TYPE_CHECKING:
    from kvstow.adapters.lmcache import KvstowL2Adapter

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
    done = bench(tmp_path, "--rounds", "2", unverified="a bench", kv_dtype="bytes")
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    assert "data verified OK" in said
    assert "mismatch" not in said.lower()
    assert any(tmp_path.glob("bytes-*/layout.json"))


def test_an_adapter_that_knows_no_identity_is_refused(tmp_path: Path):
    done = bench(tmp_path)
    assert done.returncode != 0
    assert "model_dir" in done.stdout + done.stderr


# ── what elements are ─────────────────────────────────────────────────────────────────

NBYTES = 64
CANARY = 0xA5


@contextmanager
def adapter(path: Path, **params: str) -> "Iterator[KvstowL2Adapter]":
    from kvstow.adapters.lmcache import KvstowL2Adapter

    made = KvstowL2Adapter(
        {"path": str(path), "capacity": "16MiB", "unverified": "a test", **params}
    )
    try:
        yield made
    finally:
        made.close()


def key(number: int = 1, group: int = 0) -> Any:
    from lmcache.v1.distributed.api import ObjectKey

    return ObjectKey(number.to_bytes(4, "big"), "m", 0, group)


def chunk(dtype: torch.dtype, fill: int) -> Any:
    """A chunk of 64 bytes."""
    from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj

    raw = torch.full((NBYTES,), fill, dtype=torch.uint8)
    shape = torch.Size([NBYTES // dtype.itemsize])
    about = MemoryObjMetadata(shape, dtype, 0, NBYTES, ref_count=1)
    about.shapes, about.dtypes = [shape], [dtype]
    return TensorMemoryObj(raw, about, None)


def stored(made: "KvstowL2Adapter", dtype: torch.dtype, fill: int, number: int = 1) -> bool:
    task = made.submit_store_task([key(number)], [chunk(dtype, fill)])
    done: dict[int, Any] = {}
    wait_for(lambda: done.update(made.pop_completed_store_tasks()) or task in done)
    return done[task].is_successful()


def found(made: "KvstowL2Adapter", *described: torch.dtype, number: int = 1) -> bool:
    from lmcache.v1.distributed.api import MemoryLayoutDesc

    about = MemoryLayoutDesc([torch.Size([1]) for _ in described], list(described))
    task = made.submit_lookup_and_lock_task([key(number)], {0: about})
    return answer(made.query_lookup_and_lock_result, task)


def loaded(made: "KvstowL2Adapter", dtype: torch.dtype) -> int | None:
    """What every byte of the chunk is; None where it was not given, and nothing was written."""
    room = chunk(dtype, CANARY)
    is_here = answer(made.query_load_result, made.submit_load_task([key()], [room]))
    (content,) = set(room.raw_data.tolist())
    assert is_here or content == CANARY
    return content if is_here else None


def answer(query: Any, task: int) -> bool:
    answers: list[Any] = []
    wait_for(lambda: answers.append(query(task)) or answers[-1] is not None)
    return answers[-1].popcount() == 1


@pytest.mark.parametrize("kind", ["", "auto"])
def test_bytes_of_which_nobody_says_what_they_are_are_neither_stored_nor_loaded(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
):
    with adapter(tmp_path, kv_dtype=kind) as made:
        assert not stored(made, torch.uint8, 1)
        assert "kv_dtype does not say what they are" in caplog.text
        assert "hint: " in caplog.text
        assert not found(made, torch.uint8)
        assert loaded(made, torch.uint8) is None
        assert stored(made, torch.bfloat16, 2)
        assert loaded(made, torch.bfloat16) == 2


def test_fp8_without_its_kind_is_refused_at_the_start(tmp_path: Path):
    with pytest.raises(SpecError, match="which fp8"), adapter(tmp_path, kv_dtype="fp8"):
        pass


def test_a_directory_of_one_fp8_is_refused_by_an_engine_of_the_other(tmp_path: Path):
    with adapter(tmp_path, kv_dtype="fp8_e4m3") as made:
        assert stored(made, torch.uint8, 3)
        assert found(made, torch.uint8)
    with adapter(tmp_path, kv_dtype="fp8_e4m3") as made:
        assert loaded(made, torch.uint8) == 3
    for other in ("fp8_e5m2", "", "fp8_e4m3 serde aesgcm"):
        with pytest.raises(StoreError, match="cache dtype"), adapter(tmp_path, kv_dtype=other):
            pass


def test_engines_of_two_element_types_share_a_directory_and_no_chunk(tmp_path: Path):
    with adapter(tmp_path) as made:
        assert stored(made, torch.bfloat16, 4)
        assert (found(made, torch.bfloat16), found(made, torch.float16)) == (True, False)
        assert loaded(made, torch.float16) is None
        assert stored(made, torch.float16, 5)
        assert stored(made, torch.float8_e5m2, 6)
        assert loaded(made, torch.float8_e4m3fn) is None
    with adapter(tmp_path) as made:
        assert [loaded(made, each) for each in (torch.bfloat16, torch.float16)] == [4, 5]


def test_chunks_that_a_serde_has_made_bytes_of_are_found_by_the_types_of_the_engine(
    tmp_path: Path,
):
    with adapter(tmp_path, kv_dtype="serde fp8 float8_e4m3fn") as made:
        assert stored(made, torch.uint8, 7)
        assert found(made, torch.bfloat16)
        assert loaded(made, torch.uint8) == 7


def test_chunks_are_found_and_forgotten_by_a_process_that_is_not_told_what_their_elements_are(
    tmp_path: Path,
):
    with adapter(tmp_path) as made:
        assert stored(made, torch.bfloat16, 8)
        assert stored(made, torch.float16, 9)
    with adapter(tmp_path) as made:
        assert found(made)
        made.delete([key()])
        assert not any(found(made, *each) for each in ((), (torch.bfloat16,), (torch.float16,)))


# ── what LMCache is told ──────────────────────────────────────────────────────────────


def listener(of: "KvstowL2Adapter") -> list[Any]:
    """The keys that LMCache hears are gone."""
    from lmcache.v1.distributed.internal_api import L2AdapterListener

    gone: list[Any] = []

    class Listener(L2AdapterListener):
        def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None: ...

        def on_l2_keys_accessed(self, keys: list[Any]) -> None: ...

        def on_l2_keys_deleted(self, keys: list[Any]) -> None:
            gone.extend(keys)

    of.register_listener(Listener())
    return gone


def test_bytes_are_accounted_for_once_and_those_of_another_process_not_at_all(tmp_path: Path):
    with adapter(tmp_path) as made:
        assert stored(made, torch.float16, 1)
        assert stored(made, torch.float16, 1)
        assert made.get_usage().total_bytes_used == NBYTES
        assert made.get_usage().total_capacity_bytes == 16 << 20
    with adapter(tmp_path) as made:
        assert stored(made, torch.float16, 1, number=2)
        gone = listener(made)
        made.delete([key(1), key(3)])
        assert gone == [key(1)]
        assert made.get_usage().total_bytes_used == NBYTES


def test_what_the_store_evicts_by_itself_is_no_longer_accounted_for(tmp_path: Path):
    with adapter(tmp_path, capacity="64KiB") as made:
        gone = listener(made)
        numbers = range(100)
        assert all(stored(made, torch.float16, 1, number=i) for i in numbers)
        here = [key(i) for i in numbers if found(made, number=i)]
        assert 0 < len(here) < len(numbers)
        assert made.get_usage().total_bytes_used == len(here) * NBYTES
        assert {*gone, *here} == {key(i) for i in numbers}


def test_its_medium_is_a_disk_of_this_host(tmp_path: Path):
    api = pytest.importorskip("lmcache.v1.distributed.api")
    if not hasattr(api, "MemoryTags"):
        pytest.skip("asked for since 0.5.7")
    with adapter(tmp_path) as made:
        assert made.get_memory_tags() == api.MemoryTags(
            api.MemorySegment.STORAGE, api.MemoryResidency.LOCAL
        )
