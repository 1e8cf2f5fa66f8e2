"""`kvstow models`, `plan` and `check`, run as a user runs them but inside this process."""

import json
import sys
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest

from commands import document, invoke
from kvstow.plan.manifest import decode, fingerprint
from kvstow.plan.models import catalogue

KEYS = {
    "model",
    "tp",
    "pp",
    "block_tokens",
    "kv_dtype",
    "order",
    "groups",
    "slab_bytes",
    "num_slabs",
    "arena_bytes",
    "padding_bytes_per_slab",
    "regions",
    "transfer",
    "separate",
    "request",
    "capacity",
    "fingerprint",
}
GROUP_KEYS = {
    "name",
    "retention",
    "layers",
    "block_tokens",
    "row_bytes",
    "row_stride",
    "rows_per_slab",
    "placements",
}
MODEL_KEYS = {"name", "aliases", "family", "layers", "kv_bytes_per_token", "fixed_bytes", "context"}
TINY = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 64,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "torch_dtype": "bfloat16",
}
plan = partial(document, "plan")
ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


def test_the_document_has_every_stable_key():
    document = plan("gpt-oss-20b")
    assert document.keys() >= KEYS
    for group in document["groups"]:
        assert group.keys() >= GROUP_KEYS
        assert all(place.keys() >= {"layer", "offset", "nbytes"} for place in group["placements"])
    assert document["transfer"].keys() >= {"descriptors_per_block", "bytes_per_block"}
    assert document["separate"].keys() >= {
        "regions",
        "descriptors_per_block",
        "bytes_per_descriptor_max",
    }
    assert document["request"].keys() >= {"fixed_bytes", "bytes_per_token", "at_tokens"}
    assert document["capacity"].keys() >= {"tokens", "requests"}


def test_llama_in_20_gib_has_the_published_sizes():
    document = plan("llama-3.1-8b", "--memory", "20GiB")
    assert document["slab_bytes"] == document["groups"][0]["row_bytes"] == 2 * 2**20
    assert document["num_slabs"] == 10240
    assert document["arena_bytes"] == 20 * 2**30
    assert document["regions"] == 1
    assert document["transfer"] == {
        "descriptors_per_block": {"full": 1},
        "bytes_per_block": {"full": 2 * 2**20},
    }
    assert document["separate"] == {
        "regions": 64,
        "descriptors_per_block": 64,
        "bytes_per_descriptor_max": 32 * 2**10,
    }
    assert document["request"]["bytes_per_token"] == 32 * 2 * 8 * 128 * 2
    assert document["request"]["fixed_bytes"] == 0
    assert document["capacity"]["tokens"] == (10240 - 1) * 16
    assert document["capacity"]["requests"]["8192"] == (10240 - 1) // 512


def test_a_window_group_adds_a_fixed_part_and_the_full_group_the_growth():
    document = plan("gpt-oss-20b")
    row = 12 * 16 * 2 * 8 * 64 * 2
    most_window_blocks = 9  # 128 tokens that do not start with a block touch 9 blocks of 16
    assert document["request"]["fixed_bytes"] == most_window_blocks * row
    assert document["request"]["bytes_per_token"] == row // 16
    assert document["request"]["at_tokens"]["8192"] == (8192 // 16 + most_window_blocks) * row


def check_consistent(document: dict, packing: str) -> None:
    """What has to add up, whatever the model."""
    names = [group["name"] for group in document["groups"]]
    assert len(set(names)) == len(names)
    for group in document["groups"]:
        pages = sum(place["nbytes"] for place in group["placements"])
        assert [place["layer"] for place in group["placements"]] == group["layers"]
        assert pages <= group["row_bytes"] <= group["row_stride"]
        assert document["transfer"]["bytes_per_block"][group["name"]] == group["row_bytes"]
        padding = document["padding_bytes_per_slab"][group["name"]]
        assert padding >= 0
        if packing != "separate" and document["order"].startswith("B"):
            assert group["rows_per_slab"] * group["row_stride"] == document["slab_bytes"]
            assert group["rows_per_slab"] * pages + padding == document["slab_bytes"]
    assert document["num_slabs"] * document["slab_bytes"] <= document["arena_bytes"]
    if document["order"].startswith("B"):
        assert set(document["transfer"]["descriptors_per_block"].values()) == {1}
    for n, nbytes in document["request"]["at_tokens"].items():
        blocks = max(g["block_tokens"] for g in document["groups"])
        growth = Fraction(document["request"]["bytes_per_token"]) * (int(n) + blocks)
        assert nbytes <= document["request"]["fixed_bytes"] + growth
        if document["capacity"]["requests"][n] > 1:
            assert document["capacity"]["requests"][n] * nbytes <= document["arena_bytes"]


@pytest.mark.parametrize("name", catalogue())
def test_every_catalogue_model_adds_up_and_fits_80_columns(name):
    check_consistent(plan(name, "--memory", "64GiB"), "slab")
    result = invoke("plan", name, "--memory", "64GiB")
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert all(line == line.rstrip() for line in result.stdout.splitlines())
    titles = next(line for line in result.stdout.splitlines() if line.startswith("group "))
    assert titles.endswith("padding")  # no title is folded into two lines


@pytest.mark.parametrize("packing", ["slab", "union", "separate"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["deepseek-v4-flash", "jamba-mini"])
def test_every_order_and_packing_adds_up_and_fits_80_columns(name, order, packing):
    options = ("--order", order, "--packing", packing, "--memory", "64GiB")
    check_consistent(plan(name, *options), packing)
    result = invoke("plan", name, *options)
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_the_rank_counts_tensor_parallel_ranks_first():
    whole = plan("llama-3.1-8b")["groups"][0]["layers"]
    ranks = [plan("llama-3.1-8b", "--tp", "2", "--pp", "2", "--rank", str(r)) for r in range(4)]
    layers = [rank["groups"][0]["layers"] for rank in ranks]
    assert layers[0] == layers[1] == whole[:16]
    assert layers[2] == layers[3] == whole[16:]
    assert len({rank["fingerprint"] for rank in ranks}) == 4
    assert {(rank["tp"], rank["pp"]) for rank in ranks} == {(2, 2)}


def test_the_fingerprint_is_that_of_the_manifest_which_is_written(tmp_path):
    file = tmp_path / "layout.json"
    document = plan("gpt-oss-20b", "--num-slabs", "7", "--manifest", str(file))
    layout = decode(file.read_bytes())
    assert fingerprint(layout) == document["fingerprint"]
    assert layout.num_slabs == document["num_slabs"] == 7


def test_alignment_is_met():
    document = plan("deepseek-v3.2", "--align", "row=64KiB", "--align", "*.indexer=4096")
    group = document["groups"][0]
    assert group["row_stride"] % 65536 == 0
    indexers = [p["offset"] for p in group["placements"] if p["layer"].endswith("indexer")]
    assert indexers
    assert all(offset % 4096 == 0 for offset in indexers)


def test_a_directory_and_a_file_are_models_too(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    by_folder, by_file = plan(str(folder)), plan(str(folder / "config.json"))
    assert by_folder == by_file
    assert by_folder["model"] == "tiny"
    assert by_folder["groups"][0]["row_bytes"] == 2 * 16 * 2 * 2 * 64 * 2


def test_talk_goes_to_stderr_and_data_to_stdout():
    result = invoke("plan", "llama-3.1-8b", "--json")
    json.loads(result.stdout)
    assert result.stderr.startswith("note: planned for 16 GiB")
    assert json.loads(result.stdout)["arena_bytes"] == 16 * 2**30
    assert invoke("plan", "llama-3.1-8b", "--memory", "16GiB", "--json").stderr == ""


def test_notes_of_the_model_go_to_stderr(tmp_path):
    config = {
        "model_type": "never_heard_of",
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 128,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = invoke("plan", str(tmp_path), "--memory", "1GiB", "--json")
    assert result.exit_code == 0
    assert "never_heard_of" in result.stderr
    json.loads(result.stdout)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["lama-3.1-8b"], 2, ["error: no model is called 'lama-3.1-8b'", "hint:", "llama-3.1-8b"]),
        (["qqqqqqqqqqqq"], 2, ["error:", "hint: give the path of a config.json"]),
        (["./nowhere/config.json"], 2, ["error:", "nowhere", "No such file"]),
        (["llama-3.1-8b", "--memory", "20 gigs"], 2, ["'20 gigs' is not a size", "hint:"]),
        (["llama-3.1-8b", "--memory", "1GiB", "--num-slabs", "9"], 2, ["1073741824", "9", "hint:"]),
        (["llama-3.1-8b", "--rank", "4", "--tp", "4"], 2, ["rank 4", "4 ranks", "hint:"]),
        (["llama-3.1-8b", "--tp", "0"], 2, ["--tp"]),
        (["llama-3.1-8b", "--order", "NHCLB"], 2, ["--order", "BLHNC"]),
        (["llama-3.1-8b", "--packing", "loose"], 2, ["--packing", "union"]),
        (["llama-3.1-8b", "--num-slabs", "1"], 2, ["--num-slabs"]),
        (["llama-3.1-8b", "--align", "*.nothing=64"], 2, ["*.nothing=64", "hint:", "model.layers"]),
        (["llama-3.1-8b", "--unknown"], 2, ["--unknown"]),
        ([], 2, ["MODEL"]),
        (["llama-3.1-8b", "--memory", "3MB"], 1, ["3,000,000", "2,097,152", "hint:"]),
        (["llama-3.1-8b", "--tp", "3"], 2, ["error:", "3"]),
        (["llama-3.1-8b", "--pp", "33"], 2, ["32", "33", "hint:"]),
        (["llama-3.1-8b", "--kv-dtype", "fp9"], 2, ["fp9", "hint:"]),
    ],
)
def test_what_cannot_be_is_refused_with_a_reason_and_no_data(arguments, code, words):
    result = invoke("plan", *arguments, "--json")
    assert result.exit_code == code
    assert result.stdout == ""
    for word in words:
        assert word in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v4-flash"])
def test_the_cost_of_planning_does_not_grow_with_the_number_of_blocks(name):
    def calls(memory: str) -> int:
        count = 0

        def profile(frame, event, argument):
            nonlocal count
            count += event in ("call", "c_call")

        previous = sys.getprofile()
        sys.setprofile(profile)
        try:
            plan(name, "--memory", memory)
        finally:
            sys.setprofile(previous)
        return count

    small, large = (plan(name, "--memory", memory) for memory in ("1GiB", "100TiB"))
    assert large["arena_bytes"] > 90_000 * small["arena_bytes"]
    assert large["num_slabs"] > 10_000 * small["num_slabs"]
    assert calls("100TiB") < 1.5 * calls("1GiB")


def test_capacity_is_that_of_the_rank_on_which_least_fits():
    document = plan("llama-3.1-8b", "--pp", "5", "--memory", "16GiB")
    alone = [
        plan("llama-3.1-8b", "--pp", "5", "--rank", str(rank), "--memory", "16GiB")["capacity"]
        for rank in range(5)
    ]
    counts = [each["this_rank"]["requests"]["8192"] for each in alone]
    assert counts == [85, 85, 73, 73, 85]
    assert document["capacity"]["requests"]["8192"] == 73
    assert document["capacity"]["limiting_rank"] == 2
    assert {each["tokens"] for each in alone} == {min(e["this_rank"]["tokens"] for e in alone)}
    text = invoke("plan", "llama-3.1-8b", "--pp", "5", "--memory", "16GiB").stdout
    assert "rank 2 limits how many fit" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_manifest_may_go_to_stdout_alone(tmp_path):
    file = tmp_path / "layout.json"
    assert invoke("plan", "qwen3-8b", "--memory", "1G", "--manifest", str(file)).exit_code == 0
    result = invoke("plan", "qwen3-8b", "--memory", "1G", "--manifest", "-")
    assert result.exit_code == 0
    assert result.stdout_bytes == file.read_bytes()
    both = invoke("plan", "qwen3-8b", "--memory", "1G", "--manifest", "-", "--json")
    assert both.exit_code == 2
    assert both.stdout == ""


def test_a_folder_with_the_name_of_a_known_model_is_read_and_noted(tmp_path, monkeypatch):
    folder = tmp_path / "llama-3.1-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    monkeypatch.chdir(tmp_path)
    result = invoke("plan", "llama-3.1-8b", "--memory", "1G", "--json")
    assert f"note: llama-3.1-8b: read from {folder}, not from the catalogue" in result.stderr
    assert json.loads(result.stdout)["groups"][0]["row_bytes"] == 2 * 16 * 2 * 2 * 64 * 2


def test_a_hub_snapshot_is_called_by_its_organisation_and_name(tmp_path):
    snapshot = tmp_path / "models--org--tiny-model" / "snapshots" / "0123abcd"
    blob = tmp_path / "models--org--tiny-model" / "blobs" / "feed"
    snapshot.mkdir(parents=True)
    blob.parent.mkdir()
    blob.write_text(json.dumps(TINY))
    (snapshot / "config.json").symlink_to(blob)  # as the hub's cache has it
    assert plan(str(snapshot))["model"] == "org/tiny-model"
    assert plan(str(snapshot / "config.json"))["model"] == "org/tiny-model"
    assert plan(str(snapshot), "--name", "mine")["model"] == "mine"


@pytest.mark.parametrize(
    ("written", "meant"), [("blhnc", "BLHNC"), ("HND", "BLHNC"), ("nhd", "BLNHC")]
)
def test_orders_and_sizes_are_read_as_people_write_them(written, meant):
    assert plan("qwen3-8b", "--order", written, "--memory", "20G") == plan(
        "qwen3-8b", "--order", meant, "--memory", "20GiB"
    )


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("llama-3.1-8b", "one request: 131,072 bytes (128 KiB) per token\n"),
        ("mistral-7b-v0.1", "one request: 538,968,064 bytes (514 MiB) at most, whatever its"),
        ("gpt-oss-20b", "fixed at most,\n             and 24,576 bytes (24 KiB) per token\n"),
    ],
)
def test_what_a_request_costs_is_said_in_words_that_fit_the_model(model, words):
    assert words in invoke("plan", model, "--memory", "16GiB").stdout


def test_a_length_that_is_asked_for_stands_in_place_of_the_usual_ones():
    document = plan("llama-3.1-8b", "--tokens", "5000")
    assert list(document["request"]["at_tokens"]) == ["5000"]
    assert list(document["capacity"]["requests"]) == ["5000"]
    assert "5,000" in invoke("plan", "llama-3.1-8b", "--tokens", "5000").stdout


# ── check ──────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    file = tmp_path / "layout.json"
    options = ("--num-slabs", "5", "--manifest", str(file))
    assert invoke("plan", "gpt-oss-20b", *options).exit_code == 0
    return file


def edited(manifest: Path, change) -> Path:
    document = json.loads(manifest.read_bytes())
    change(document)
    manifest.write_text(json.dumps(document))
    return manifest


def test_a_planned_layout_is_ok(manifest):
    result = invoke("check", str(manifest), "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["ok"] is True
    assert document["violations"] == []
    assert document["model"] == "gpt-oss-20b"


def test_the_text_names_model_and_fingerprint(manifest):
    result = invoke("check", str(manifest))
    assert result.exit_code == 0
    assert result.stdout.startswith("ok: gpt-oss-20b, 24 layers in 2 groups, 5 slabs")
    assert result.stderr == ""


def test_a_manifest_may_come_from_stdin(manifest):
    assert invoke("check", "-", stdin=manifest.read_bytes()).exit_code == 0
    broken = invoke("check", "-", stdin=b"{}")
    assert broken.exit_code == 1
    assert "stdin" in broken.stderr


def test_every_broken_law_is_listed(manifest):
    def shrink(document):
        document["layout"]["nbytes"] = 4096

    result = invoke("check", str(edited(manifest, shrink)), "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["ok"] is False
    assert len(document["violations"]) == 2  # one for each group
    assert all(line.startswith("bounds: ") for line in document["violations"])


def test_broken_laws_are_data_and_the_verdict_is_talk(manifest):
    def collide(document):
        places = document["layout"]["groups"][0]["placements"]
        places[1] = places[0]

    result = invoke("check", str(edited(manifest, collide)))
    assert result.exit_code == 1
    assert "sharing" in result.stdout
    assert result.stderr.startswith("error: ")
    assert "violation" in result.stderr


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "syntax"),
        (b"\xff\xfe", "syntax"),
        (b"[]", "shape"),
        (b'{"kvstow": 99}', "version"),
        (b'{"kvstow": 1}', "shape"),
        (b'{"kvstow": 1, "kvstow": 1}', "duplicate"),
        (b'{"kvstow": -1}', "range"),
        (b"[" * 100_000, "syntax"),
        (b" " * (16 * 2**20 + 1), "size"),
    ],
    ids=["empty", "not text", "a list", "version", "shape", "duplicate", "range", "deep", "large"],
)
def test_a_malformed_manifest_has_its_own_error(tmp_path, content, kind):
    file = tmp_path / "layout.json"
    file.write_bytes(content)
    result = invoke("check", str(file), "--json")
    assert result.exit_code == 1
    (violation,) = json.loads(result.stdout)["violations"]
    assert violation.startswith(f"{kind}: ")


def test_a_file_that_cannot_be_read_is_a_usage_error(tmp_path):
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file")):
        result = invoke("check", str(path), "--json")
        assert result.exit_code == 2
        assert result.stdout == ""
        assert reason in result.stderr
        assert str(path) in result.stderr


def test_a_configuration_is_not_a_manifest(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "llama"}')
    result = invoke("check", str(file))
    assert result.exit_code == 1
    assert result.stdout.startswith("shape: ")


# ── models ─────────────────────────────────────────────────────────────────────────────


def found(*words: str) -> dict[str, dict]:
    result = invoke("models", *words, "--json")
    assert result.exit_code == 0, result.stderr
    return {model["name"]: model for model in json.loads(result.stdout)["models"]}


def test_every_model_of_the_catalogue_is_listed_once_within_80_columns():
    shown = found()
    assert tuple(shown) == catalogue()
    assert all(model.keys() >= MODEL_KEYS for model in shown.values())
    text = invoke("models").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert all(f"\n{name} " in text for name in catalogue())


def test_a_token_costs_keys_and_values_of_every_layer_that_keeps_it():
    shown = found()
    assert shown["llama-3.1-8b"]["kv_bytes_per_token"] == 32 * 2 * 8 * 128 * 2
    assert shown["deepseek-v3"]["kv_bytes_per_token"] == 61 * (512 + 64) * 2
    assert shown["gpt-oss-20b"]["kv_bytes_per_token"] == 12 * 2 * 8 * 64 * 2
    assert shown["gpt-oss-20b"]["fixed_bytes"] == 9 * 16 * 12 * 2 * 8 * 64 * 2
    assert shown["mistral-7b-v0.1"]["kv_bytes_per_token"] == 0
    assert shown["llama-3.1-8b"]["context"] == 131072


def test_words_filter_by_name_alias_and_family_and_all_of_them_have_to_be_there():
    assert set(found("qwen3_MOE")) == {"qwen3-30b-a3b", "qwen3-235b-a22b"}
    assert set(found("llama", "70b")) == {"llama-3.1-70b", "llama-3.3-70b"}
    assert set(found("deepseek-r1")) == {"deepseek-r1-distill-qwen-32b", "deepseek-v3"}


@pytest.mark.parametrize("command", ["models", "plan", "compare"])
def test_a_name_that_is_not_known_is_answered_with_those_that_are_near(command):
    result = invoke(command, "gpt4")
    assert result.exit_code == (1 if command == "models" else 2)
    assert result.stdout == ""
    assert "did you mean gpt-oss-20b, gpt-oss-120b?" in result.stderr


def test_nothing_near_is_suggested_for_a_name_that_is_like_no_other():
    result = invoke("models", "qqqqqqqqqq")
    assert result.exit_code == 1
    assert "did you mean" not in result.stderr
    assert "hint: kvstow models, without a word, lists all" in result.stderr
