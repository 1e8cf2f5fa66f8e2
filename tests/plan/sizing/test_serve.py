"""The `vllm serve` line: never one that is wrong."""

import json
from functools import partial

import pytest

from commands import document

WHOLE = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "torch_dtype": "bfloat16",
}

size = partial(document, "size")


@pytest.mark.parametrize(
    ("model", "served"),
    [
        ("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B"),
        ("qwen3-235b-a22b-fp8", "Qwen/Qwen3-235B-A22B-FP8"),
        ("glm-4.6", "zai-org/GLM-4.6"),
        ("glm-4.7", "zai-org/GLM-4.7"),
        ("llama-3.1-8b-instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("GLM-4.7-FP8", "zai-org/GLM-4.7-FP8"),
        ("nvidia/Llama-3.1-8B-Instruct-FP8", "nvidia/Llama-3.1-8B-Instruct-FP8"),
    ],
)
def test_the_model_that_was_sized_is_the_one_that_is_served(model, served):
    command = size(model, "--gpu", "b300", "--tp", "4")["command"]
    assert command.split()[:3] == ["vllm", "serve", served]


def test_weights_that_vllm_makes_narrower_when_it_loads_them_are_in_the_command():
    arguments = ("qwen3-8b", "--gpu", "h100", "--weights-dtype")
    assert "--quantization fp8" in size(*arguments, "fp8")["command"]
    assert "--quantization" not in size(*arguments, "bfloat16")["command"]


@pytest.mark.parametrize("dtype", ["int4", "nvfp4", "mxfp4", "int8", "float32"])
def test_no_command_is_given_that_loads_other_weights_than_were_counted(dtype):
    document = size("qwen3-8b", "--gpu", "h100", "--weights-dtype", dtype)
    assert "command" not in document
    assert any(f"would not load the weights as {dtype}" in note for note in document["notes"])


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["t5-large"], "vLLM has no t5"),
        (["llama-3.1-8b", "--weights-bytes", "4GiB"], "vLLM would load 14.96 GiB of weights"),
        (["llama-3.1-8b", "--kv-dtype", "float32"], "vLLM keeps no float32 cache"),
    ],
)
def test_no_command_is_given_for_what_vllm_does_not_do(arguments, why):
    document = size(*arguments, "--gpu", "h100")
    assert "command" not in document
    assert any(note.startswith(f"no vllm serve line: {why}") for note in document["notes"])


@pytest.mark.parametrize(
    ("kv_dtype", "spelled"),
    [
        ("int8", "int8_per_token_head"),
        ("float8_e4m3fn", "fp8"),
        ("fp8_e5m2", "fp8_e5m2"),
        ("bf16", "bfloat16"),
        ("nvfp4", "nvfp4"),
    ],
)
def test_the_cache_dtype_is_spelled_as_vllm_does(kv_dtype, spelled):
    command = size("llama-3.1-8b", "--gpu", "h100", "--kv-dtype", kv_dtype)["command"]
    assert command.endswith(f"--kv-cache-dtype {spelled}")


@pytest.mark.parametrize(("model", "dtype"), [("gpt-oss-20b", "fp8"), ("qwen3-8b-fp8", "bfloat16")])
def test_a_checkpoint_that_is_quantised_is_not_loaded_otherwise(model, dtype):
    assert "command" not in size(model, "--gpu", "h100", "--weights-dtype", dtype)
    assert "command" in size(model, "--gpu", "h100")


def test_a_quantised_release_is_served_under_its_whole_name():
    for name in ("qwen3-8b-awq", "llama-3.1-8b-fp8", "qwen2.5-7b-fp8"):
        document = size(name, "--gpu", "h100")
        assert any("give its whole name" in note for note in document["notes"])
        assert "command" not in document
    assert "vllm serve Qwen/Qwen3-8B-AWQ" in size("Qwen/Qwen3-8B-AWQ", "--gpu", "h100")["command"]


def test_the_command_keeps_to_the_models_own_limit(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(WHOLE | {"max_position_embeddings": 4096}))
    for model, limit in (("llama-3.1-8b", 131_072), (str(tmp_path), 4096)):
        document = size(model, "--gpu", "h200", "--tokens", "200000")
        assert f"--max-model-len {limit} " in document["command"]
        (note,) = document["notes"]
        assert f"{limit:,} tokens at most" in note
        assert "the command keeps to that limit" in note
    assert f"serve {tmp_path} " in size(str(tmp_path / "config.json"), "--gpu", "h200")["command"]
