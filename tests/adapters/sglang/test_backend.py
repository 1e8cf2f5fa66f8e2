"""SGLang's own factory, host pools and controller over our backend. Run by scripts/test-sglang."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch

from kvstow.errors import ModelError, PlanError, SpecError, StoreError
from servers import Mooncake, Seaweed, Valkey

if find_spec("sglang"):  # without SGLang these tests are collected, and not run
    import sglang_engine as sgl

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

CANARY = 0xA5
KEYS = [f"{k:064x}" for k in range(16)]


@pytest.fixture(autouse=True)
def running() -> Iterator[None]:
    with sgl.engine():
        yield


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with Valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def url(valkey: Valkey) -> str:
    """A remote store that nobody has written to."""
    return f"{valkey.url}?prefix={uuid4().hex}&budget=10"


@pytest.fixture(params=[Seaweed, Mooncake])
def other_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A remote store of another kind that nobody has written to."""
    with request.param(tmp_path / "server") as server:
        yield f"{server.url}&budget=10"


def on_disk(path: Path, **more: Any) -> dict[str, Any]:
    stated = {} if "model_dir" in more else {"unverified": "a test"}
    return sgl.extra_config(disk=str(path), disk_bytes="64MiB", **stated, **more)


def checkpoint(path: Path, seed: int) -> str:
    """A model's directory: equal shapes, other weights."""
    from safetensors.numpy import save_file

    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 16}))
    weights = np.random.default_rng(seed).standard_normal((16, 16), np.float32)
    save_file({"model.embed_tokens.weight": weights}, path / "model.safetensors")
    return str(path)


def memory(host: Any) -> list[np.ndarray]:
    """All bytes of a host pool."""
    buffers = host.kv_buffer if isinstance(host.kv_buffer, list | tuple) else [host.kv_buffer]
    return [each.view(torch.uint8).numpy().reshape(-1) for each in buffers]


def fill(host: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for part in memory(host):
        part[:] = rng.integers(0, 256, part.nbytes, dtype=np.uint8)


def pages_of(host: Any, starts: list[int]) -> list[np.ndarray]:
    """The bytes of pages, as SGLang itself copies them."""
    found = []
    for start in starts:
        page = host.get_data_page(start, flat=True)
        found.append(page.contiguous().view(torch.uint8).numpy().copy())
    return found


def indices(host: Any, starts: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(start, start + host.page_size) for start in starts])


POOLS = [
    *(
        ("mha", layout)
        for layout in ("layer_first", "page_first", "page_first_direct", "page_head")
    ),
    *(("mla", layout) for layout in ("layer_first", "page_first", "page_first_direct")),
]


def round_trip(host: Any, backend: Any) -> None:
    """Pages go out, and come back to other places; nothing else is touched."""
    page = host.page_size
    out, back = [0, 2 * page, 5 * page], [7 * page, 3 * page, 9 * page]
    fill(host, seed=1)
    before = pages_of(host, out)
    assert backend.batch_set_v1(KEYS[:3], indices(host, out)) == [True] * 3
    assert backend.batch_exists([*KEYS[:3], "elsewhere"]) == 3
    for part in memory(host):
        part[:] = CANARY
    assert backend.batch_get_v1(KEYS[:3], indices(host, back)) == [True] * 3
    for was, now in zip(before, pages_of(host, back), strict=True):
        assert np.array_equal(was, now)
    for start in back:
        blank = torch.full((len(before[0]),), CANARY, dtype=torch.uint8)
        host.set_from_flat_data_page(start, blank.view(host.dtype))
    assert all((part == CANARY).all() for part in memory(host))


@pytest.mark.parametrize("page", [1, 2, 4])
@pytest.mark.parametrize(("kind", "layout"), POOLS)
def test_pages_of_every_pool_and_layout_come_back_byte_for_byte(
    tmp_path: Path, kind: str, layout: str, page: int
):
    _, host = getattr(sgl, kind)(layout, page=page)
    backend = sgl.backend(host, on_disk(tmp_path), is_mla_model=kind == "mla")
    assert type(backend).__name__ == "KvstowHiCache"
    round_trip(host, backend)
    backend.close()


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_pages_of_one_or_two_layers_and_heads_come_back(
    tmp_path: Path, layout: str, layers: int, heads: int
):
    _, host = sgl.mha(layout, page=2, layers=layers, heads=heads, dim=2, v_dim=2)
    backend = sgl.backend(host, on_disk(tmp_path))
    round_trip(host, backend)
    backend.close()


@pytest.mark.parametrize("place", ["host", "remote"])
def test_pages_come_back_from_host_memory_and_from_a_remote_store(place: str, url: str):
    _, host = sgl.mha("page_first")
    places = {"host": "1MiB"} if place == "host" else {"remote": url}
    backend = sgl.backend(host, sgl.extra_config(unverified="a test", **places))
    fill(host, seed=2)
    before = pages_of(host, [4, 8])
    assert backend.batch_set_v1(KEYS[:2], indices(host, [4, 8])) == [True, True]
    assert backend.chunks.flush(10)
    assert backend.batch_exists(KEYS) == 2
    fill(host, seed=3)
    assert backend.batch_get_v1(KEYS[:3], indices(host, [0, 20, 24])) == [True, True, False]
    assert all(map(np.array_equal, before, pages_of(host, [0, 20])))
    backend.close()


def test_pieces_of_a_page_that_is_contiguous_lie_in_sglangs_own_memory(tmp_path: Path):
    for kind, pieces in (("mha", 2), ("mla", 1)):
        _, host = getattr(sgl, kind)("page_first")
        backend = sgl.backend(host, on_disk(tmp_path / kind), is_mla_model=kind == "mla")
        views = backend._pages["kv"].read([4])
        first, size = host.kv_buffer.data_ptr(), host.kv_buffer.nbytes
        assert len(views) == pieces
        for view in views:
            assert first <= view.ctypes.data <= first + size - view.nbytes
        backend.close()


def test_keys_and_values_of_other_widths_come_back(tmp_path: Path):
    _, host = sgl.mha("page_first", dim=8, v_dim=4)
    assert type(host).__name__ == "AsymmetricMHATokenToKVPoolHost"
    backend = sgl.backend(host, on_disk(tmp_path))
    fill(host, seed=4)
    before = [part.copy() for part in memory(host)]
    assert all(backend.batch_set_v1(KEYS[:4], torch.arange(16)))
    for part in memory(host):
        part[:] = CANARY
    assert all(backend.batch_get_v1(KEYS[:4], torch.arange(16)))
    for was, now in zip(before, memory(host), strict=True):
        same = was == now
        assert same.sum() >= 16 * len(same) // host.size
        assert (now[~same] == CANARY).all()
    backend.close()


def test_the_launch_line_of_the_guide_is_one_that_sglang_takes(tmp_path: Path):
    guide = Path(__file__).parents[3] / "docs/guides/sglang.md"
    line = guide.read_text().split("```bash\npython -m sglang.launch_server")[1].split("```")[0]
    stated = sgl.parsed_arguments(shlex.split(line.replace("\\\n", " ")))
    options = json.loads(stated.hicache_storage_backend_extra_config)
    assert stated.hicache_storage_backend == "dynamic"
    options |= {"disk": str(tmp_path / "s"), "model_dir": checkpoint(tmp_path / "model", 0)}
    options["disk_bytes"] = "64MiB"
    _, host = sgl.mha(stated.hicache_mem_layout)
    backend = sgl.backend(host, options)
    round_trip(host, backend)
    backend.close()


# ── whose pages they are ──────────────────────────────────────────────────────────────


SECOND = """
import json, sys
import torch
import sglang_engine as sgl

with sgl.engine():
    _, host = sgl.mha("page_first")
    backend = sgl.backend(host, json.loads(sys.argv[1]))
    keys = json.loads(sys.argv[2])
    print("exists", backend.batch_exists(keys))
    print("loaded", all(backend.batch_get_v1(keys, torch.arange(8))))
    for start in (0, 4):
        page = host.get_data_page(start)
        print("page", page.view(torch.uint8).numpy().tobytes().hex())
    backend.close()
"""


@pytest.mark.parametrize("place", ["disk", "remote"])
def test_another_process_finds_the_pages(tmp_path: Path, url: str, place: str):
    places = (
        {"remote": url}
        if place == "remote"
        else {"disk": str(tmp_path / "s"), "disk_bytes": "64MiB"}
    )
    check_found_by_another_process(
        sgl.extra_config(model_dir=checkpoint(tmp_path / "model", 0), **places)
    )


def test_another_process_finds_the_pages_on_s3_and_mooncake_and_other_weights_none(
    tmp_path: Path, other_url: str
):
    model, other = (checkpoint(tmp_path / f"model{seed}", seed) for seed in range(2))
    check_found_by_another_process(sgl.extra_config(model_dir=model, remote=other_url))
    _, host = sgl.mha("page_first")
    assert_finds(host, sgl.extra_config(model_dir=other, remote=other_url), 0)


def check_found_by_another_process(options: dict[str, Any]) -> None:
    """Keep two pages and let a second process read them, byte for byte."""
    _, host = sgl.mha("page_first")
    backend = sgl.backend(host, options)
    fill(host, seed=5)
    assert all(backend.batch_set_v1(KEYS[:2], indices(host, [8, 16])))
    backend.close()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SECOND, json.dumps(options), json.dumps(KEYS[:2])],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = [
        line for line in done.stdout.splitlines() if line.startswith(("exists", "loaded", "page"))
    ]
    pages = [page.tobytes().hex() for page in pages_of(host, [8, 16])]
    assert said == ["exists 2", "loaded True", *(f"page {page}" for page in pages)]


def test_other_weights_find_nothing_on_a_remote_store(tmp_path: Path, url: str):
    _, host = sgl.mha("page_first")
    own = sgl.extra_config(remote=url, model_dir=checkpoint(tmp_path / "own", 0))
    other = sgl.extra_config(remote=url, model_dir=checkpoint(tmp_path / "other", 1))
    backend = sgl.backend(host, own)
    assert all(backend.batch_set_v1(KEYS[:2], torch.arange(8)))
    backend.close()
    assert_finds(host, other, 0)
    assert_finds(host, own, 2)


def test_other_weights_are_refused_on_the_same_disk_with_what_differs(tmp_path: Path):
    _, host = sgl.mha("page_first")
    own = on_disk(tmp_path / "s", model_dir=checkpoint(tmp_path / "own", 0))
    backend = sgl.backend(host, own)
    assert all(backend.batch_set_v1(KEYS[:2], torch.arange(8)))
    backend.close()
    with pytest.raises(StoreError, match="weights"):
        sgl.backend(host, on_disk(tmp_path / "s", model_dir=checkpoint(tmp_path / "other", 1)))
    assert_finds(host, own, 2)


def assert_finds(host: Any, options: dict[str, Any], count: int, **rank: Any) -> None:
    backend = sgl.backend(host, options, **rank)
    assert backend.batch_exists(KEYS) == count
    assert sum(backend.batch_get_v1(KEYS[:4], torch.arange(16))) == count
    backend.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_dtype": "fp8_e4m3"},
        {"json_model_override_args": '{"rope_theta": 1}'},
        {"quantization": "fp8"},
        {"dtype": "float16"},
    ],
)
def test_an_engine_with_other_settings_finds_nothing(url: str, settings: dict[str, str]):
    _, host = sgl.mha("page_first")
    options = sgl.extra_config(remote=url, unverified="a test")
    backend = sgl.backend(host, options)
    assert all(backend.batch_set_v1(KEYS[:2], torch.arange(8)))
    backend.close()
    with sgl.engine(**settings):
        assert_finds(host, options, 0)
    assert_finds(host, options, 2)


def test_an_adapter_that_changed_where_it_lies_is_another_one(tmp_path: Path):
    _, host = sgl.mha("page_first")
    folder = tmp_path / "adapter"
    for seed in (0, 1):
        checkpoint(folder, seed)
        lora = sgl.LoRARef(lora_id="same", lora_name="a", lora_path=str(folder))
        with sgl.engine(lora_paths=[lora]):
            assert_finds(host, on_disk(tmp_path / "s"), 0)
            backend = sgl.backend(host, on_disk(tmp_path / "s"))
            assert all(backend.batch_set_v1(KEYS[:2], torch.arange(8)))
            backend.close()
            assert_finds(host, on_disk(tmp_path / "s"), 2)
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    "rank",
    [
        {"tp_rank": 1, "tp_size": 2},
        {"tp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"attn_cp_rank": 1, "attn_cp_size": 2},
    ],
)
def test_another_rank_finds_nothing_of_pages_that_are_sharded(tmp_path: Path, rank: dict[str, int]):
    _, host = sgl.mha("page_first")
    backend = sgl.backend(host, on_disk(tmp_path))
    assert all(backend.batch_set_v1(KEYS[:2], torch.arange(8)))
    backend.close()
    assert_finds(host, on_disk(tmp_path), 0, **rank)
    assert_finds(host, on_disk(tmp_path), 2)


def test_ranks_share_the_pages_of_a_latent_cache(tmp_path: Path):
    _, host = sgl.mla("page_first")
    first = {"tp_rank": 0, "tp_size": 2, "is_mla_model": True}
    backend = sgl.backend(host, on_disk(tmp_path), **first)
    assert all(backend.batch_set_v1(KEYS[:2], torch.arange(8)))
    backend.close()
    assert_finds(host, on_disk(tmp_path), 2, **(first | {"tp_rank": 1}))
    assert_finds(host, on_disk(tmp_path), 0, **(first | {"is_mla_model": False}))


@pytest.mark.parametrize("other", [("layer_first", {}), ("page_first", {"heads": 1, "dim": 16})])
def test_pages_of_another_geometry_and_equal_size_are_not_found(url: str, other: Any):
    _, host = sgl.mha("page_first")
    options = sgl.extra_config(remote=url, unverified="a test")
    backend = sgl.backend(host, options)
    assert all(backend.batch_set_v1(KEYS[:2], torch.arange(8)))
    backend.close()
    layout, shape = other
    _, second = sgl.mha(layout, **({"v_dim": 16} | shape if shape else shape))
    assert_finds(second, options, 0)


# ── what goes wrong ───────────────────────────────────────────────────────────────────


def test_a_page_that_was_flipped_on_disk_is_a_miss_and_can_be_stored_again(tmp_path: Path):
    _, host = sgl.mha("page_first")
    backend = sgl.backend(host, on_disk(tmp_path))
    fill(host, seed=6)
    before = pages_of(host, [4])[0]
    assert all(backend.batch_set_v1(KEYS[:3], torch.arange(12)))
    backend.close()
    flip(tmp_path, before[:64].tobytes())
    backend = sgl.backend(host, on_disk(tmp_path))
    assert backend.batch_exists(KEYS) == 3
    assert backend.batch_get_v1(KEYS[:3], torch.arange(20, 32)) == [True, False, True]
    assert backend.misses == {"damaged": 1}
    assert backend.batch_exists(KEYS) == 1
    assert backend.batch_set_v1([KEYS[1]], torch.arange(4, 8)) == [True]
    assert backend.batch_get_v1([KEYS[1]], torch.arange(40, 44)) == [True]
    assert np.array_equal(pages_of(host, [40])[0], before)
    backend.close()


def flip(path: Path, found: bytes) -> None:
    """Change one bit of the only place where these bytes lie."""
    for file in path.rglob("*"):
        data = file.read_bytes() if file.is_file() else b""
        at = data.find(found)
        if at >= 0:
            with file.open("r+b") as changed:
                changed.seek(at)
                changed.write(bytes([data[at] ^ 1]))
            return
    raise AssertionError("the page is not on disk")


def test_a_page_that_is_not_there_is_counted(tmp_path: Path):
    _, host = sgl.mla("page_first")
    backend = sgl.backend(host, on_disk(tmp_path), is_mla_model=True)
    assert backend.batch_get_v1(KEYS[:2], torch.arange(8)) == [False, False]
    assert backend.misses == {"absent": 2}
    backend.close()


def test_a_remote_store_that_is_not_there_costs_its_budget_and_is_counted():
    _, host = sgl.mla("page_first")
    options = sgl.extra_config(remote="redis://127.0.0.1:9/0?budget=0.2", unverified="a test")
    backend = sgl.backend(host, options, is_mla_model=True)
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_get_v1(KEYS[:2], torch.arange(8)) == [False, False]
    assert sum(n for reason, n in backend.misses.items() if "unreachable" in reason) == 2
    backend.close()


@pytest.mark.parametrize("wrong", [torch.arange(7), torch.arange(1, 9), torch.arange(0, 16, 2)])
def test_indices_that_are_no_pages_are_neither_stored_nor_loaded(tmp_path: Path, wrong: Any):
    _, host = sgl.mha("page_first")
    backend = sgl.backend(host, on_disk(tmp_path))
    assert backend.batch_set_v1(KEYS[:2], wrong) == [False, False]
    assert backend.batch_get_v1(KEYS[:2], wrong) == [False, False]
    assert backend.batch_exists(KEYS) == 0
    assert backend.misses == {"not loaded": 2, "not stored": 2}
    backend.close()


@pytest.mark.parametrize(
    ("options", "error", "what"),
    [
        ({"unverified": "a test"}, StoreError, "without a place"),
        ({"host": "1MiB"}, SpecError, "model_dir"),
        ({"host": "1MiB", "model_dir": "/", "unverified": "x"}, SpecError, "model_dir"),
        ({"host": "1MiB", "model_dir": "/nowhere"}, ModelError, "/nowhere"),
        ({"host": "a lot", "unverified": "x"}, PlanError, "a lot"),
        ({"host": "1MiB", "unverified": "x", "size": 3}, SpecError, "has size"),
        ({"remote": "ftp://host/x", "unverified": "x"}, StoreError, "ftp"),
    ],
)
def test_a_bad_option_is_an_error_that_names_it(options: Any, error: Any, what: str):
    _, host = sgl.mha("page_first")
    with pytest.raises(error, match=what):
        sgl.backend(host, sgl.extra_config(**options))


def test_pages_for_several_sizes_of_tensor_parallelism_are_refused(tmp_path: Path):
    _, host = sgl.mha("page_head")
    with pytest.raises(SpecError, match="tp_lcm_size is 4"):
        sgl.backend(host, on_disk(tmp_path), tp_lcm_size=4)


# ── several pools ─────────────────────────────────────────────────────────────────────


def hybrid(path: Path) -> tuple[Any, Any, Any, Any]:
    _, kv = sgl.mha("page_first")
    _, indexer = sgl.mla("layer_first")
    states = sgl.mamba()
    backend = sgl.backend(kv, on_disk(path))
    backend.register_mem_host_pool_v2(kv, sgl.PoolName.KV)
    backend.register_mem_host_pool_v2(indexer, sgl.PoolName.INDEXER)
    backend.register_mem_host_pool_v2(states, sgl.PoolName.MAMBA)
    return backend, kv, indexer, states


def test_pages_of_several_pools_go_and_come_together(tmp_path: Path):
    backend, kv, indexer, states = hybrid(tmp_path)
    pools = {sgl.PoolName.KV: kv, sgl.PoolName.INDEXER: indexer, sgl.PoolName.MAMBA: states}
    before = {}
    for seed, (name, pool) in enumerate(pools.items()):
        fill(pool, seed)
        before[name] = pages_of(pool, [0, 2 * pool.page_size])
    sent = [
        sgl.PoolTransfer(
            name=name, keys=KEYS[:2], host_indices=indices(pool, [0, 2 * pool.page_size])
        )
        for name, pool in pools.items()
    ]
    assert backend.batch_set_v2(sent) == {name: [True, True] for name in pools}
    assert backend.batch_get_v1(KEYS[:2], torch.arange(8)) == [True, True]
    wanted = []
    for name, pool in pools.items():
        for part in memory(pool):
            part[:] = CANARY
        starts = [5 * pool.page_size, 3 * pool.page_size]
        wanted.append(
            sgl.PoolTransfer(name=name, keys=KEYS[:2], host_indices=indices(pool, starts))
        )
    assert backend.batch_get_v2(wanted) == {name: [True, True] for name in pools}
    for name, pool in pools.items():
        got = pages_of(pool, [5 * pool.page_size, 3 * pool.page_size])
        assert all(map(np.array_equal, before[name], got))
        assert (np.concatenate(pages_of(pool, [0, 6 * pool.page_size])) == CANARY).all()
    unknown = sgl.PoolTransfer(name=sgl.PoolName.DRAFT, keys=KEYS[:2], host_indices=torch.arange(8))
    assert backend.batch_get_v2([unknown]) == {sgl.PoolName.DRAFT: [False, False]}
    backend.close()


@pytest.mark.parametrize("seed", range(12))
def test_prefixes_are_restorable_where_sglangs_own_file_backend_says_so(tmp_path: Path, seed: int):
    backend, kv, indexer, states = hybrid(tmp_path / "kvstow")
    options = {"file_storage_path": str(tmp_path / "files")}
    files = sgl.HiCacheFile(sgl.storage_config(options))
    files.register_mem_pool_host(kv)
    rng = np.random.default_rng(seed)
    for name, pool in (
        (sgl.PoolName.KV, kv),
        (sgl.PoolName.INDEXER, indexer),
        (sgl.PoolName.MAMBA, states),
    ):
        files.register_mem_host_pool_v2(pool, name)
        first = 6 if name == sgl.PoolName.KV else 0
        present = [k for k in range(8) if k < first or rng.random() < 0.6]
        keys = [KEYS[k] for k in present]
        starts = indices(pool, [k * pool.page_size for k in present])
        for each in (backend, files):
            each.batch_set_v2([sgl.PoolTransfer(name=name, keys=keys, host_indices=starts)])
    asked = [
        sgl.PoolTransfer(
            name=sgl.PoolName.MAMBA,
            keys=KEYS[: 1 + seed % 3],
            hit_policy=sgl.PoolHitPolicy.TRAILING_PAGES,
        )
    ]
    if seed % 2:
        asked.append(
            sgl.PoolTransfer(name=sgl.PoolName.INDEXER, hit_policy=sgl.PoolHitPolicy.ALL_PAGES)
        )
    assert backend.batch_exists_v2(KEYS[:8], asked) == files.batch_exists_v2(KEYS[:8], asked)
    assert backend.batch_exists_v2(KEYS[:8]) == files.batch_exists_v2(KEYS[:8])
    assert backend.batch_exists(KEYS[:8]) == files.batch_exists(KEYS[:8])
    backend.close()


# ── SGLang's controller ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize("interface", [0, 1])
@pytest.mark.parametrize(("kind", "layout"), POOLS)
def test_sglangs_controller_backs_pages_up_and_fetches_them_after_a_restart(
    tmp_path: Path, kind: str, layout: str, interface: int
):
    tokens = list(range(100, 124))
    options = on_disk(tmp_path / "store", interface_v1=interface)
    device, host = getattr(sgl, kind)(layout)
    first = sgl.controller(device, host, options, tmp_path)
    fill(host, seed=7)
    before = pages_of(host, [8 + 4 * k for k in range(6)])
    hashes = first.get_hash_str(tokens, None, 4)
    first.write_storage(torch.arange(8, 32), tokens, hash_value=hashes)
    assert first.ack_backup_queue.get(timeout=30).completed_tokens == 24
    first.detach_storage_backend()

    device, host = getattr(sgl, kind)(layout)
    second = sgl.controller(device, host, options, tmp_path)
    operation = second.prefetch("request", [*tokens, 1, 2, 3, 4])
    assert second.prefetch_hit_queue.get(timeout=30).storage_hit_count == 24
    operation.host_indices = second.alloc_prefetch_host_buffers(operation, 24)
    second.prefetch_buffer.put(operation)
    acks = [second.ack_prefetch_queue.get(timeout=30) for _ in range(2)]
    assert acks[0].completed_tokens == 24
    assert acks[1].completed_req
    got = pages_of(host, operation.host_indices.tolist()[::4])
    assert all(map(np.array_equal, before, got))
    second.detach_storage_backend()


def test_sglangs_hybrid_controller_restores_a_prefix_up_to_a_recurrent_state(tmp_path: Path):
    tokens, options = list(range(100, 124)), on_disk(tmp_path / "store")
    device, host = sgl.mha("page_first")
    states = sgl.mamba()
    first = sgl.hybrid_controller(device, host, states, options, tmp_path)
    fill(host, seed=8)
    fill(states, seed=9)
    before, state = pages_of(host, [8, 12, 16, 20]), pages_of(states, [5])
    hashes = first.get_hash_str(tokens, None, 4)
    checkpoint = sgl.PoolTransfer(
        name=sgl.PoolName.MAMBA,
        host_indices=torch.tensor([5]),
        keys=[hashes[3]],
        hit_policy=sgl.PoolHitPolicy.TRAILING_PAGES,
    )
    first.write_storage(torch.arange(8, 32), tokens, hash_value=hashes, extra_pools=[checkpoint])
    assert first.ack_backup_queue.get(timeout=30).completed_tokens == 24
    first.detach_storage_backend()

    device, host = sgl.mha("page_first")
    states = sgl.mamba()
    second = sgl.hybrid_controller(device, host, states, options, tmp_path)
    wanted = sgl.PoolTransfer(
        name=sgl.PoolName.MAMBA,
        host_indices=states.alloc(1),
        keys=["the last page"],
        hit_policy=sgl.PoolHitPolicy.TRAILING_PAGES,
    )
    handle = sgl.CacheRequestHandle("request", 0)
    operation = second.prefetch(handle, tokens, extra_pools=[wanted])
    assert second.prefetch_hit_queue.get(timeout=30).storage_hit_count == 16
    operation.host_indices = second.alloc_prefetch_host_buffers(operation, 16)
    second.prefetch_buffer.put(operation)
    acks = [second.ack_prefetch_queue.get(timeout=30) for _ in range(3)]
    assert acks[0].completed_tokens == 16
    assert acks[1].pool_hits[sgl.PoolName.MAMBA] == 1
    assert acks[2].completed_req
    assert all(map(np.array_equal, before, pages_of(host, operation.host_indices.tolist()[::4])))
    assert np.array_equal(state[0], pages_of(states, wanted.host_indices.tolist())[0])
    second.detach_storage_backend()


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_two_ranks_at_once_keep_and_find_their_pages_in_one_directory(tmp_path: Path, kind: str):
    options = json.dumps(on_disk(tmp_path / "store"))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", sgl.RANK_PROGRAM, str(rank), kind, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    with ThreadPoolExecutor(2) as threads:
        said = list(threads.map(lambda each: each.communicate(options, timeout=280), ranks))
    for rank, (out, err) in zip(ranks, said, strict=True):
        assert rank.returncode == 0, err[-3000:]
        assert "stored 24 tokens, fetched 24, equal" in out


def test_statistics_are_those_of_calls_since_the_last_time(tmp_path: Path):
    _, host = sgl.mla("page_first")
    backend = sgl.backend(host, on_disk(tmp_path), is_mla_model=True)
    backend.batch_set_v1(KEYS[:3], torch.arange(12))
    backend.batch_get_v1(KEYS[:2], torch.arange(8))
    stats = backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [2])
    assert all(rate > 0 for rate in stats.backup_bandwidth + stats.prefetch_bandwidth)
    assert backend.get_stats().backup_pgs == []
    backend.close()


def test_clearing_forgets_pages_on_disk_and_the_store_can_be_used_on(tmp_path: Path):
    _, host = sgl.mha("page_first")
    backend = sgl.backend(host, on_disk(tmp_path))
    backend.batch_set_v1(KEYS[:3], torch.arange(12))
    assert backend.clear()
    assert backend.batch_exists(KEYS) == 0
    assert all(backend.batch_set_v1(KEYS[:3], torch.arange(12)))
    assert backend.batch_exists(KEYS) == 3
    backend.close()
