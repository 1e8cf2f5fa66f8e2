"""What an operator sets, and which computation makes the pages."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvstow.adapters.sglang.options import HiCacheOptions, adapters_name, rank_name
from kvstow.errors import SpecError


def config(options: dict[str, Any] | None = None, **fields: Any) -> Any:
    known = {
        "tp_rank": 0,
        "tp_size": 2,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "dcp_rank": 0,
        "dcp_size": 1,
        "is_mla_model": False,
        "model_name": "tiny",
        "tp_lcm_size": None,
        "extra_config": options,
    }
    return SimpleNamespace(**(known | fields))


def test_places_and_identity_are_told_from_what_sglang_reads_itself():
    given = {"backend_name": "kvstow", "interface_v1": 1, "host": "1MiB", "unverified": "a test"}
    options = HiCacheOptions.of(config(given))
    assert options.places == {"host": "1MiB"}
    assert options.identity == {"unverified": "a test"}
    assert options.uses_host_indices


def test_without_interface_v1_sglang_copies_pages_itself():
    assert not HiCacheOptions.of(config({"host": "1MiB"})).uses_host_indices
    assert not HiCacheOptions.of(config(None)).uses_host_indices


@pytest.mark.parametrize("name", ["capacity", "path", "disk_byte"])
def test_an_option_that_nobody_reads_is_named_with_those_that_there_are(name):
    with pytest.raises(SpecError, match=rf"has {name}\n\nhint: kvstow reads disk, disk_bytes"):
        HiCacheOptions.of(config({name: 1}))


@pytest.mark.parametrize("given", [{"disk": "/x"}, {"disk_bytes": "1GiB", "host": "1MiB"}])
def test_a_directory_without_a_size_or_a_size_without_one_is_refused(given):
    with pytest.raises(SpecError, match='"disk" and "disk_bytes"'):
        HiCacheOptions.of(config(given))


def test_pages_for_several_sizes_of_tensor_parallelism_are_refused():
    with pytest.raises(SpecError, match="tp_lcm_size is 4"):
        HiCacheOptions.of(config({}, tp_lcm_size=4))


def test_settings_of_the_engine_are_part_of_the_computation():
    options = HiCacheOptions.of(config({"unverified": "a test"}))

    def made(**changed: str):
        given = {"dtype": "auto", "kv_dtype": "bf16", "interior": "sglang page_first", **changed}
        kv_dtype, interior = given.pop("kv_dtype"), given.pop("interior")
        return options.computation(config(), given, kv_dtype=kv_dtype, interior=interior)

    assert made() == made()
    assert made().model == "tiny"
    for changed, what in (
        ({"dtype": "float16"}, "sglang dtype"),
        ({"kv_dtype": "fp8"}, "cache dtype"),
        ({"interior": "sglang layer_first"}, "page interior"),
    ):
        differences = made().differences(made(**changed))
        assert len(differences) == 1
        assert what in differences[0]


def test_ranks_of_tensor_parallelism_have_one_name_where_the_cache_is_replicated():
    ranks = [config(tp_rank=0), config(tp_rank=1)]
    assert len({rank_name(rank, is_replicated=True) for rank in ranks}) == 1
    assert len({rank_name(rank, is_replicated=False) for rank in ranks}) == 2


def test_adapters_are_known_by_what_lies_at_their_paths(tmp_path):
    def written(weights: bytes) -> str:
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a/adapter_model.bin").write_bytes(weights)
        return adapters_name([str(tmp_path / "a"), "on/the-hub"])

    assert written(b"0" * 4096) == written(b"0" * 4096)
    assert written(b"0" * 4096) != written(b"1" * 4096)
    assert adapters_name([]) == ""
