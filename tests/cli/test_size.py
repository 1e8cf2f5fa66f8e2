"""`kvstow size`: how many requests fit, what a load needs, the smallest cluster."""

import json
from functools import partial

import pytest

from commands import document
from commands import invoke as run_command

WHOLE = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "torch_dtype": "bfloat16",
}


invoke = partial(run_command, "size")
size = partial(document, "size")


def test_a_gpu_alone_asks_how_many_requests_fit():
    document = size("llama-3.1-8b", "--gpu", "h100", "--tokens", "4096", "--dp", "2")
    assert document["question"] == "fit"
    assert document["gpus"] == 2
    assert document["max_requests"] == 2 * document["ranks"][0]["requests"] > 0
    assert document["answer"].startswith(f"{document['max_requests']} requests of 4,096 tokens")
    low, high = document["concurrency"]  # of each replica
    assert document["max_requests"] == 2 * int(low) < 2 * high
    assert document["kv_tokens"] == pytest.approx([low * 4096, high * 4096], rel=1e-3)
    assert "--data-parallel-size 2" in document["command"]


def test_every_rank_is_shown_and_the_limiting_one_is_named():
    arguments = ("llama-3.1-8b", "--gpu", "l40s", "--pp", "5", "--tp", "2", "--tokens", "32768")
    document = size(*arguments)
    assert [rank["rank"] for rank in document["ranks"]] == list(range(10))
    assert [rank["layers"] for rank in document["ranks"]] == [6] * 4 + [7] * 4 + [6] * 2
    assert document["limiting_rank"] == 4
    assert document["max_requests"] == document["ranks"][4]["requests"]
    text = invoke(*arguments).stdout
    assert "rank 4 is the limit" in text
    assert "4–5" in text


def test_requests_alone_ask_how_much_memory_they_need():
    document = size("llama-3.1-8b", "--requests", "100", "--weights-bytes", "16GB")
    assert document["question"] == "memory"
    rows = 100 * 512 + 1  # and the slab that is nobody's
    assert document["ranks"][0]["cache_bytes"] == rows * 2 * 2**20
    assert document["bytes_per_gpu"] == rows * 2 * 2**20 + 16 * 10**9


def test_both_ask_for_the_smallest_cluster():
    document = size("llama-3.1-70b", "--gpu", "h200", "--requests", "200", "--kv-dtype", "bf16,fp8")
    assert document["question"] == "cluster"
    best, *others = document["clusters"]
    assert best["max_requests"] >= 200
    assert all(each["gpus"] >= best["gpus"] for each in others)
    assert {each["kv_dtype"] for each in document["clusters"]} == {"bf16", "fp8"}
    fixed = size("llama-3.1-70b", "--gpu", "h200", "--requests", "200", "--tp", "8", "--pp", "1")
    assert {(each["tp"], each["pp"]) for each in fixed["clusters"]} == {(8, 1)}


def test_heads_that_are_repeated_are_said():
    assert "on 2 of the 16" in invoke("llama-3.1-8b", "--gpu", "h100", "--tp", "16").stdout
    assert "tensor-parallel ranks:" not in invoke("llama-3.1-8b", "--gpu", "h100").stdout


def test_a_model_that_does_not_fit_ends_with_1_and_says_what_would_do():
    document = size("llama-3.1-70b", "--gpu", "h100", code=1)
    assert document["max_requests"] == 0
    assert "× h100 (tp" in document["answer"]
    assert size("llama-3.1-405b", "--gpu", "1GiB", "--requests", "3", code=1)["clusters"] == []


def test_of_equally_many_gpus_those_with_the_most_requests_come_first():
    """Those without pipeline stages are recommended, and what stages would add is said."""
    document = size("deepseek-v3", "--gpu", "h200", "--requests", "100")
    equal = [each for each in document["clusters"] if each["gpus"] == document["gpus"] == 8]
    assert len(equal) > 4
    counts = [each["max_requests"] for each in equal]
    assert counts == sorted(counts, reverse=True)
    plain = max(each["max_requests"] for each in equal if each["pp"] == 1)
    assert (document["max_requests"], document["pp"]) == (plain, 1)
    start, _, end = document["answer"].partition(" With pipeline stages ")
    assert start.startswith("8 × h200 (tp 1, dp 8, experts shared")
    assert end.startswith(f"8 × h200 (tp 1, pp 8, bfloat16 cache) would fit {counts[0]:,}.")
    assert "--enable-expert-parallel" in document["command"]


@pytest.mark.parametrize(
    "name", ["DeepSeek-R1-FP4", "DeepSeek-V3.1-NVFP4", "Kimi-K2-Thinking-NVFP4"]
)
def test_nvidias_releases_with_latents_are_sized(name):
    """Their attention stays wide: modelopt excludes it."""
    found = size(f"nvidia/{name}", "--gpu", "8xh200")
    assert found["max_requests"] > 0
    assert f"vllm serve nvidia/{name} " in found["command"]


@pytest.mark.parametrize(
    "name",
    [
        "nvidia/Qwen3.5-397B-A17B-NVFP4",
        "nvidia/DeepSeek-V3.1-NVFP4",
        "nvidia/Llama-3.1-8B-Instruct-FP8",
    ],
)
def test_a_release_whose_name_does_not_tell_the_cache_says_so_at_once(name):
    arguments = (name, "--gpu", "8xb200")
    (note,) = (each for each in size(*arguments)["notes"] if "kv_cache_quant_algo FP8" in each)
    assert "planned as bfloat16" in note
    assert "--kv-dtype fp8" in note
    head = invoke(*arguments).stdout.partition("\n\n")[0]
    assert f"note: {note}" in " ".join(head.split())
    fp8 = size(*arguments, "--kv-dtype", "fp8")
    assert not any("kv_cache_quant_algo" in each for each in fp8["notes"])
    assert any("kv_cache_quant_algo" in each for each in document("plan", name)["notes"])


def test_names_that_are_no_releases_by_modelopt_say_nothing_of_the_cache():
    for name in ("qwen3-8b", "Qwen/Qwen3-8B-FP8", "Qwen/Qwen3-8B-AWQ"):
        assert size(name, "--gpu", "h100")["notes"] == []


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4", None])
def test_what_stands_beside_the_configuration_counts_as_in_vllm(tmp_path, algorithm):
    """modelopt until 0.29 wrote hf_quant_config.json, a level deeper and without a method."""
    quantised = {"quant_algo": "NVFP4", "kv_cache_quant_algo": algorithm, "group_size": 16}
    beside = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": quantised}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": WHOLE}))
    plain = size(str(tmp_path), "--gpu", "l4")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    found = size(str(tmp_path), "--gpu", "l4")
    layers = 2 * (4 * 64 * 64 + 3 * 64 * 128)
    assert plain["weights"]["bytes"] - found["weights"]["bytes"] == layers * 2 - layers * 9 // 16
    assert found["weights"]["left_out"] == []
    explicit = (algorithm or "bfloat16").lower()
    kept = size(str(tmp_path), "--gpu", "l4", "--kv-dtype", explicit)
    assert found["kv_tokens"] == kept["kv_tokens"]
    assert ("kv_cache_quant_algo says" in found["answer"]) is (algorithm is not None)
    own = WHOLE | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    assert size(str(tmp_path), "--gpu", "l4")["weights"]["bytes"] > found["weights"]["bytes"]
    (tmp_path / "config.json").write_text(json.dumps({"text_config": own}))
    assert size(str(tmp_path), "--gpu", "l4")["weights"] == found["weights"]


def test_what_stands_beside_and_is_no_json_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(WHOLE))
    (tmp_path / "hf_quant_config.json").write_text("{")
    result = invoke(str(tmp_path), "--gpu", "l4")
    assert result.exit_code == 2
    assert "hf_quant_config.json: not JSON" in result.stderr


def test_where_only_pipeline_stages_do_it_says_what_they_cost_and_what_does_without():
    document = size("deepseek-v3", "--gpu", "h200", "--requests", "400")
    assert document["pp"] > 1
    assert "stages wait for one another, so each token takes longer." in document["answer"]
    plain = next(each for each in document["clusters"] if each["pp"] == 1)
    assert f"Without them {plain['gpus']} × h200 (tp {plain['tp']}" in document["answer"]
    fit = partial(size, "llama-3.1-8b", "--gpu", "l4", "--reserve", "4GiB", "--weights-bytes")
    hint = fit("240GB", "--tokens", "131072", code=1)["answer"]
    assert "pp 2, bfloat16 cache) would do. Its pipeline stages wait" in hint
    assert "stages" not in size("llama-3.1-8b", "--gpu", "h200", "--requests", "9")["answer"]


def test_the_size_of_the_cache_depends_on_neither_replicas_nor_what_requests_share():
    arguments = ("llama-3.1-8b", "--gpu", "h100")
    usual = size(*arguments)
    more = ("--dp", "2", "--shared-tokens", "4096", "--output-tokens", "4096")
    several = size(*arguments, *more, "--max-num-seqs", "1024")
    for key in ("concurrency", "kv_tokens"):
        assert several[key] == usual[key]
    assert several["max_requests"] > 2 * usual["max_requests"]
    low, high = usual["kv_tokens"]
    assert f"GPU KV cache size: {low:,} to {high:,} tokens" in invoke(*arguments).stdout


@pytest.mark.parametrize(
    "arguments", [("deepseek-v4-flash", "--tp", "4"), ("qwen3-8b", "--engine", "none")]
)
def test_what_is_not_counted_in_vllms_blocks_says_so(arguments):
    text = invoke(*arguments, "--gpu", "h200").stdout
    assert "counted in kvstow's own packing, not in vLLM's blocks:\nGPU KV cache" in text


def test_no_more_requests_fit_than_may_run():
    document = size(
        *("llama-3.1-8b", "--gpu", "h100", "--tokens", "512", "--max-num-seqs", "16", "--dp", "2")
    )
    assert document["max_requests"] == document["max_requests_at_most"] == 32
    assert "--max-num-seqs 16 is the limit" in document["answer"]


@pytest.mark.parametrize(("gpu", "most"), [("a100", 256), ("h200", 1024)])
def test_no_more_requests_fit_than_vllm_runs_unless_it_is_told_otherwise(gpu, most):
    arguments = ("qwen3-0.6b", "--gpu", gpu, "--tokens", "256")
    document = size(*arguments)
    assert document["max_requests"] == document["max_requests_at_most"] == most
    assert f"--max-num-seqs {most} is the limit" in document["answer"]
    assert document["concurrency"][0] > most
    assert size(*arguments, "--max-num-seqs", "1100")["max_requests"] == 1100
    assert size(*arguments, "--requests", str(most + 1))["dp"] == 2
    cluster = size(
        *("llama-3.1-8b", "--gpu", "h100", "--requests", "100", "--max-num-seqs", "16"),
        *("--tp", "1", "--pp", "1"),
    )
    assert cluster["dp"] == 7


def test_what_only_may_fit_is_no_error():
    """Of 80 GB with 61 GiB of weights, 1.7 to 8.6 GiB are left."""
    result = invoke("qwen2.5-32b", "--gpu", "h100", "--tokens", "16384")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert "may fit on 1 × h100" in result.stdout
    assert "vllm serve" in result.stdout
    assert "vllm serve" not in invoke("qwen2.5-32b", "--gpu", "h100", "--tokens", "99999").stdout


def test_nvidias_largest_gpus_compute_more_tokens_per_step():
    few, usual = (
        size("llama-3.1-8b", "--gpu", "b200", *more)["overhead"]["activations"][0]
        for more in (("--max-batched-tokens", "8192"), ())
    )
    assert usual == 2 * few
    assert size("llama-3.1-8b", "--gpu", "b200")["utilization"] == 0.92


@pytest.mark.parametrize(
    "arguments",
    [
        ["llama-3.1-8b"],
        ["llama-3.1-8b", "--gpu", "h100", "--pp", "4"],
        ["deepseek-v3", "--gpu", "h200", "--requests", "500"],
        ["jamba-mini", "--gpu", "80GiB", "--tp", "2"],
        ["gpt-oss-120b", "--gpu", "a100,h200"],
        ["llama-3.1-70b", "--gpu", "h100"],
    ],
)
def test_answers_fit_80_columns(arguments):
    text = invoke(*arguments).stdout
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("\n\n") >= 2


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["gpt4"], 2, ["gpt-oss-20b"]),
        (["llama-3.1-8b", "--gpu", "h10"], 2, ["'h10'", "h100", "hint:"]),
        (["llama-3.1-8b", "--gpu", "80"], 2, ["80 bytes", "'80'", "hint:", "80GiB"]),
        (["llama-3.1-8b", "--gpu", "3090"], 2, ["3,090 bytes", "did you mean rtx-3090?"]),
        (["llama-3.1-8b", "--gpu", "h100", "--kv-dtype", "fp8,bf16"], 2, ["fp8,bf16", "hint:"]),
        (["llama-3.1-8b", "--requests", "4", "--kv-dtype", "fp8,bf16"], 2, ["fp8,bf16", "hint:"]),
        (["llama-3.1-8b", "--kv-dtype", "fp9"], 2, ["fp9", "hint:"]),
        (["llama-3.1-8b", "--tp", "3", "--gpu", "h100"], 2, ["32", "3", "hint:"]),
        (["llama-3.1-8b", "--tp", "4", "--gpu", "8xh100"], 2, ["tp 4", "not 8"]),
        (["llama-3.1-8b", "--gpu", "8xh100", "--requests", "9"], 2, ["hint: --gpu h100"]),
        (["glm-4.7-flash", "--gpu", "h100"], 2, ["--weights-bytes"]),
        (["llama-3.1-8b", "--utilization", "1.5"], 2, ["--utilization"]),
        (["llama-3.1-8b", "--requests", "0"], 2, ["--requests"]),
    ],
)
def test_what_cannot_be_asked_is_refused_with_a_reason(arguments, code, words):
    result = invoke(*arguments)
    assert result.exit_code == code
    assert result.stdout == ""
    assert all(word in result.stderr for word in words)


@pytest.mark.parametrize(("model", "gpu"), [("mamba2-2.7b", "h100"), ("qwen3-next-80b", "h200")])
def test_recurrent_layers_have_no_kv_heads_to_repeat(model, gpu):
    arguments = (model, "--gpu", gpu, "--tp", "2")
    assert size(*arguments)["head_copies"] == 1
    assert "Every kv head" not in invoke(*arguments).stdout


def test_a_request_longer_than_the_model_is_published_for_is_noted():
    arguments = ("llama-3.1-8b", "--gpu", "h200", "--tokens")
    (note,) = size(*arguments, "200000")["notes"]
    assert "131,072 tokens at most; counted with 200,000; the command" in note
    assert size(*arguments, "131072")["notes"] == []
    assert "note: llama-3.1-8b is published for" in invoke(*arguments, "200000").stdout


def test_several_gpus_are_answered_one_by_one():
    both = size("llama-3.1-8b", "--gpu", "l40s,h100")
    assert [each["gpu"]["name"] for each in both] == ["l40s", "h100"]
    assert both == [size("llama-3.1-8b", "--gpu", gpu) for gpu in ("l40s", "h100")]


def test_the_engine_takes_its_part_and_says_which():
    document = size("llama-3.1-8b", "--gpu", "h100")
    assert {"activations", "sampling", "outside", "graphs"} == set(document["overhead"])
    bare = size("llama-3.1-8b", "--gpu", "h100", "--engine", "none")
    assert bare["max_requests"] == bare["max_requests_at_most"] > document["max_requests_at_most"]
    told = size("llama-3.1-8b", "--gpu", "h100", "--reserve", "3GiB")
    assert told["overhead"] == {"reserve": [3 << 30, 3 << 30]}


def test_weights_may_be_counted_in_another_dtype():
    own, fp8 = (
        size("qwen3-8b", *more)["weights"]["bytes"] for more in ((), ("--weights-dtype", "fp8"))
    )
    assert fp8 == own // 2 + 2 * 151_936 * 4096  # the embeddings stay as they are
    assert "nvfp4" in invoke("qwen3-8b", "--weights-dtype", "q4").stderr


def test_models_with_latents_say_that_their_usual_deployment_is_not_counted():
    assert any(
        "data-parallel" in note
        for note in size("deepseek-v3", "--gpu", "h200", "--tp", "8")["notes"]
    )


def test_half_of_what_is_generated_counts_for_what_fits_at_most():
    plain = size("llama-3.1-8b", "--gpu", "h100", "--reserve", "3GiB")
    split = size("llama-3.1-8b", "--gpu", "h100", "--reserve", "3GiB", "--output-tokens", "4096")
    assert plain["max_requests"] == plain["max_requests_at_most"] == split["max_requests"]
    assert split["max_requests_at_most"] == int(plain["concurrency"][1] * 8192 / 6144)
    assert invoke("llama-3.1-8b", "--gpu", "h100", "--output-tokens", "8192").exit_code == 2


def test_a_prefix_that_all_requests_share_is_counted_once():
    arguments = ("llama-3.1-8b", "--gpu", "h100", "--reserve", "3GiB")
    shared = size(*arguments, "--shared-tokens", "4096")
    assert shared["max_requests"] > 1.9 * size(*arguments)["max_requests"]
    assert "8,192 tokens that share the first 4,096 fit" in shared["answer"]
    assert invoke(*arguments, "--shared-tokens", "8192").exit_code == 2


def test_a_model_of_latents_and_experts_gets_replicas_that_share_the_experts():
    document = size("deepseek-v3", "--gpu", "h200", "--requests", "300", "--pp", "1")
    assert document["shares_experts"]
    assert document["tp"] == 1
    assert "--enable-expert-parallel" in document["command"].replace("\\\n", "").split()
    assert "experts shared" in document["answer"]


@pytest.mark.parametrize(
    ("arguments", "split"),
    [
        (["8xh100"], (8, 1)),
        (["8 × NVIDIA H100 80GB HBM3", "--tp", "4", "--dp", "2"], (4, 2)),
        (["8x80GiB", "--dp", "2"], (4, 2)),
    ],
)
def test_a_number_of_gpus_is_split_as_is_said_or_by_tensor_parallelism(arguments, split):
    document = size("llama-3.1-8b", "--gpu", *arguments)
    assert (document["tp"], document["dp"]) == split
    assert document["gpus"] == 8


def test_more_gpus_than_a_node_has_are_said_to_be_several_nodes():
    arguments = ("llama-3.1-8b", "--gpu", "h100", "--tp", "8")
    assert any("16 GPUs are several nodes" in n for n in size(*arguments, "--dp", "2")["notes"])
    assert not any("several nodes" in note for note in size(*arguments)["notes"])


def test_a_store_takes_the_rows_of_all_requests_of_some_hours():
    """128 KiB a token of Llama-3.1-8B; 500 blocks of 16, the first 100 once for all."""
    row = 16 * 128 * 1024
    arguments = ("llama-3.1-8b", "--requests-per-hour", "720", "--tokens", "8000")
    document = size(*arguments, "--store-hours", "3", "--shared-tokens", "1610", "--tp", "2")
    assert document["question"] == "store"
    assert document["store_bytes"] == (3 * 720 * 400 + 100) * row
    assert document["store_bytes_per_rank"] == document["store_bytes"] // 2
    assert document["write_bytes_per_second"] == 400 * row * 720 // 3600
    assert size(*arguments)["store_bytes"] == 24 * 720 * 500 * row
    assert invoke(*arguments, "--gpu", "h100").exit_code == 2


def test_of_windows_and_states_a_store_needs_what_the_next_token_sees():
    short, long = (
        size(model, "--requests-per-hour", "1", "--tokens", "4096")["bytes_per_request"]
        for model in ("gpt-oss-20b", "mamba2-2.7b")
    )
    layers = 24 * 2 * 8 * 64 * 2  # bytes a token, half of the layers with a window of 128
    assert short == layers // 2 * 4096 + layers // 2 * 128
    assert long == size("mamba2-2.7b", "--requests-per-hour", "1")["bytes_per_request"]
    assert "weights" not in invoke("glm-4.7-flash", "--requests-per-hour", "1").stdout


def test_a_narrower_cache_that_the_checkpoint_names_is_in_the_answer(tmp_path):
    quantised = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
    }
    config = WHOLE | {"quantization_config": quantised}
    (tmp_path / "config.json").write_text(json.dumps(config))
    own, fp8, wide = (
        size(str(tmp_path), "--gpu", "l4", *more)
        for more in ((), ("--kv-dtype", "fp8"), ("--kv-dtype", "bfloat16"))
    )
    assert "float8_e4m3fn cache as the checkpoint's kv_cache_quant_algo says)" in own["answer"]
    assert own["max_requests"] == fp8["max_requests"] == pytest.approx(2 * wide["max_requests"], 1)
    assert "checkpoint" not in wide["answer"] + fp8["answer"]
    assert "--kv-cache-dtype" not in own["command"]


def test_what_the_weights_are_counted_without_is_in_the_answer(tmp_path):
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 1000,
        "torch_dtype": "bfloat16",
        "num_nextn_predict_layers": 1,
        "quantization_config": {"quant_method": "quark"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert size("deepseek-v3", "--gpu", "h200", "--tp", "8")["answer"].endswith(
        "The weights do not include draft (MTP) layers."
    )
    answer = size(str(tmp_path), "--gpu", "l4")["answer"]
    assert answer.endswith("do not include quantisation 'quark' and draft (MTP) layers.")
