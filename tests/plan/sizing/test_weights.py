"""Bytes of weights, against the parameters that are published."""

import pytest

from kvstow.errors import ModelError
from kvstow.plan.models import load_model, model_layers
from kvstow.plan.models.catalogue import entries
from kvstow.plan.sizing.weights import model_weights, parameters

DENSE = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
EXPERTS = {
    "model_type": "mixtral",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}
LATENT = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8"},
}
DELTA = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
JAMBA = {
    "model_type": "jamba",
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 16,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "vocab_size": 65536,
}
GEMMA_3N = {
    "model_type": "gemma3n_text",
    "hidden_size": 2048,
    "intermediate_size": [16384] * 35,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "altup_num_inputs": 4,
    "laurel_rank": 64,
    "hidden_size_per_layer_input": 256,
    "vocab_size": 262400,
}
T5 = {
    "model_type": "t5",
    "is_encoder_decoder": True,
    "d_model": 1024,
    "d_ff": 4096,
    "d_kv": 64,
    "num_heads": 16,
    "num_layers": 24,
    "vocab_size": 32128,
}
WHISPER = {
    "model_type": "whisper",
    "is_encoder_decoder": True,
    "d_model": 1280,
    "decoder_layers": 32,
    "encoder_layers": 32,
    "decoder_ffn_dim": 5120,
    "decoder_attention_heads": 20,
    "vocab_size": 51866,
}


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (DENSE, 8.03e9),
        (EXPERTS, 46.7e9),
        (LATENT, 671e9),
        (DELTA, 79.7e9),  # Qwen3-Next-80B-A3B
        (JAMBA, 51.6e9),  # Jamba 1.5 Mini
        (GEMMA_3N, 6.87e9),  # Gemma 3n E4B, its text model
        (T5, 738e6),  # T5 large
        (WHISPER, 1.54e9),  # Whisper large v3
        ("gemma-3n-e2b", 4.46e9),  # its text model
        ("gemma-4-31b", 30.7e9),
        ("gemma-4-26b-a4b", 25.2e9),
        ("qwen3-vl-30b-a3b", 31.1e9),
    ],
)
def test_the_formula_comes_within_half_a_percent_of_what_is_published(config, published):
    assert sum(parameters(load_model(config))) == pytest.approx(published, rel=0.005)


def test_a_tied_output_head_counts_once():
    counted = parameters(load_model(DENSE))
    assert counted.embeddings == 2 * 128256 * 4096
    tied = parameters(load_model(DENSE | {"tie_word_embeddings": True}))
    assert tied == counted._replace(embeddings=counted.embeddings // 2)


def test_quantised_layers_count_narrow_and_embeddings_do_not():
    counted = parameters(load_model(LATENT))
    assert model_weights(LATENT).nbytes == sum(counted) + counted.embeddings
    assert model_weights(DENSE).nbytes == 2 * sum(parameters(load_model(DENSE)))


def test_the_part_of_routed_experts_is_known_from_the_configuration_or_as_published():
    assert float(model_weights(LATENT).expert_part) == pytest.approx(0.975, abs=0.001)
    assert float(model_weights("deepseek-v3").expert_part) == pytest.approx(0.975, abs=0.001)
    assert model_weights(DENSE).expert_part == 0
    given = model_weights("deepseek-v3", nbytes=700 * 10**9)
    assert (given.nbytes, given.how) == (700 * 10**9, "as given")
    assert given.expert_part == model_weights("deepseek-v3").expert_part


@pytest.mark.parametrize(
    ("quantised", "bits"),
    [
        ({"quant_method": "gptq", "bits": 4}, 4.25),
        ({"quant_method": "gptq", "bits": 8}, 8.25),
        ({"quant_method": "awq"}, 4.25),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.25),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8.25),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 4}},
                    "group_1": {"weights": {"num_bits": 8}},
                    "group_2": {"weights": None},
                },
            },
            8.25,
        ),
    ],
)
def test_a_quantised_layer_has_the_bits_that_its_configuration_gives(quantised, bits):
    counted = parameters(load_model(DENSE))
    found = model_weights(DENSE | {"quantization_config": quantised})
    assert (
        found.nbytes
        == round((counted.attention + counted.dense) * bits / 8) + 2 * counted.embeddings
    )


@pytest.mark.parametrize("model", ["kimi-k2-thinking", "kimi-k2.5"])
def test_experts_alone_are_narrow_where_the_rest_is_ignored(model):
    """moonshotai/Kimi-K2-Thinking: INT4 in groups of 32 with a scale each, 594 GB in all."""
    counted, found = parameters(load_model(model)), model_weights(model)
    wide = sum(counted) - counted.experts
    assert found.nbytes == counted.experts * 9 // 16 + 2 * wide
    assert found.nbytes - 2 * counted.vision == pytest.approx(594e9, rel=0.001)


@pytest.mark.parametrize(
    ("ignored", "wide"),
    [
        ({"exclude_modules": ["model.layers.60.self_attn*", "lm_head"]}, {"attention"}),
        ({"ignore": ["language_model.layers.60.mlp.shared_experts"]}, {"dense"}),
        ({"ignore": [r"re:.*layers\.\d+\.mlp\.experts.*"]}, {"experts"}),
        ({"ignore": ["model.layers.59.self_attn*", "model.layers.60.mlp.gate", "re:("]}, set()),
        ({"ignore": ["re:(.*o+)+$", "re:" + 20 * ".*o" + "$"]}, set()),  # would take for ever
    ],
)
def test_what_a_checkpoint_does_not_quantise_counts_in_the_models_own_dtype(ignored, wide):
    quantised = {"quant_method": "modelopt", "quant_algo": "NVFP4", **ignored}
    found = model_weights(LATENT | {"quantization_config": quantised}).nbytes
    counted = parameters(load_model(LATENT))._asdict()
    sizes = {name: 2 if name in wide | {"embeddings", "vision"} else 9 / 16 for name in counted}
    assert found == round(sum(number * sizes[name] for name, number in counted.items()))


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v3.2", "kimi-k2", "kimi-k2-thinking"])
def test_what_the_catalogue_counts_is_what_is_published(name):
    assert sum(parameters(load_model(name))) == pytest.approx(
        entries()[name]["published"]["parameters"], rel=0.005
    )


VISION = [name for name in entries() if name.startswith(("qwen3.5-", "qwen3-vl-"))]


@pytest.mark.parametrize("name", VISION)
def test_models_that_see_count_their_towers_and_name_their_draft_layers(name):
    found = model_weights(name)
    assert "in the vision tower" in found.how
    assert found.left_out == (("draft (MTP) layers",) if "3.5" in name else ())


def test_a_quantisation_that_is_not_known_is_left_out_and_said():
    found = model_weights(DENSE | {"quantization_config": {"quant_method": "quark"}})
    assert found.nbytes == model_weights(DENSE).nbytes
    assert found.left_out == ("quantisation 'quark'",)


def test_files_are_measured_where_they_are(tmp_path):
    import json

    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    (tmp_path / "a.safetensors").write_bytes(bytes(100))
    (tmp_path / "b.safetensors").write_bytes(bytes(23))
    (tmp_path / "tokenizer.bin").write_bytes(bytes(1000))
    assert model_weights(str(tmp_path)).nbytes == 123
    assert model_weights(str(tmp_path / "config.json")).nbytes == 123
    assert "files" in model_weights(tmp_path).how


def test_the_catalogue_tells_what_its_configurations_do_not():
    assert model_weights("llama-3.1-8b").nbytes == 2 * 8_030_000_000
    assert model_weights("gpt-oss-120b").nbytes == 65_300_000_000
    with pytest.raises(ModelError, match="--weights-bytes"):
        model_weights("glm-4.7-flash")


def test_a_configuration_too_short_to_count_says_what_it_lacks():
    short = {name: fact for name, fact in DENSE.items() if name != "vocab_size"}
    with pytest.raises(ModelError, match="no 'vocab_size' in the configuration"):
        model_weights(short)


def test_models_with_other_layers_are_not_counted():
    with pytest.raises(ModelError, match=r"no formula for such layers(.|\n)*--weights-bytes"):
        model_weights(DENSE | {"mamba_d_state": 16})


def test_a_fact_that_is_wrong_is_named():
    with pytest.raises(ModelError, match=r"vocab_size is 'x'(.|\n)*--weights-bytes"):
        model_weights(DENSE | {"vocab_size": "x"})


WHOLE = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "torch_dtype": "bfloat16",
}
LAYERS = 2 * (4 * 64 * 64 + 3 * 64 * 128)
EMBEDDINGS = 2 * 2 * 1000 * 64  # bytes, in and out


@pytest.mark.parametrize(("algorithm", "sixteenths"), [("FP8", 16), ("NVFP4", 9), ("W4A8_AWQ", 32)])
def test_modelopt_checkpoints_count_by_their_algorithm(algorithm, sixteenths):
    quantised = {"quant_method": "modelopt", "quant_algo": algorithm}
    found = model_weights(WHOLE | {"quantization_config": quantised})
    assert found.nbytes == LAYERS * sixteenths // 16 + EMBEDDINGS
    assert found.left_out == (("quantisation 'w4a8_awq'",) if sixteenths == 32 else ())


@pytest.mark.parametrize(("dtype", "sixteenths"), [("fp8", 16), ("nvfp4", 9), ("float32", 64)])
def test_layers_may_be_counted_in_another_dtype(dtype, sixteenths):
    assert model_weights(WHOLE, dtype).nbytes == LAYERS * sixteenths // 16 + EMBEDDINGS
    with pytest.raises(ModelError, match="unknown dtype of weights 'q4'"):
        model_weights(WHOLE, "q4")


def test_a_vision_tower_is_counted_and_draft_layers_are_named():
    vision = {"hidden_size": 32, "intermediate_size": 64, "depth": 3}
    found = model_weights(WHOLE | {"vision_config": vision, "num_nextn_predict_layers": 1})
    assert found.nbytes - model_weights(WHOLE).nbytes == 2 * 3 * (4 * 32 * 32 + 3 * 32 * 64)
    assert "in the vision tower" in found.how
    assert found.left_out == ("draft (MTP) layers",)


def test_towers_that_cannot_be_counted_are_named():
    towers = model_weights(WHOLE | {"vision_config": {}, "audio_config": {}})
    assert towers.left_out == ("the vision tower", "the audio tower")
    assert towers.nbytes == model_weights(WHOLE).nbytes


def test_weights_that_are_not_those_of_the_checkpoint_are_known_to_differ():
    own = model_weights("qwen3-8b").nbytes
    assert model_weights("qwen3-8b", nbytes=own + own // 20).loads is None
    assert model_weights("qwen3-8b", nbytes=own // 2).loads == own
    assert model_weights("glm-4.7-flash", nbytes=own).loads is None


@pytest.mark.parametrize(
    ("suffix", "sixteenths"),
    [("FP8", 16), ("NVFP4", 9), ("AWQ", 8.5), ("GPTQ", 8.5), ("GPTQ-Int8", 16.5)],
)
def test_a_quantised_release_of_a_known_model_has_narrower_layers_and_the_same_cache(
    suffix, sixteenths
):
    embeddings = 2 * 151_936 * 4096
    found = model_weights(f"Qwen/Qwen3-8B-{suffix}").nbytes
    assert found == round((8_190_000_000 - embeddings) * sixteenths / 16) + 2 * embeddings
    assert model_layers(f"qwen3-8b-{suffix}").layers == model_layers("qwen3-8b").layers


_FLOAT8 = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}


@pytest.mark.parametrize(
    ("named", "bits"),
    [
        (_FLOAT8 | {"quant_method": "compressed-tensors"}, 8),
        (_FLOAT8 | {"quant_method": "modelopt"}, 8),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, 8),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "NVFP4"}}, 4),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "INT8"}, 16),
        ({"quant_method": "quark", "kv_cache_scheme": {"num_bits": 8}}, 16),
    ],
)
def test_a_cache_that_the_checkpoint_names_is_planned_as_vllm_reads_it_and_said(named, bits):
    config = WHOLE | {"quantization_config": named}
    for kv_dtype in (None, "auto"):
        model = model_layers(config, kv_dtype=kv_dtype)
        assert model.layers[0].field("k").dtype.bits == bits
        (note,) = model.notes
        assert "kv_cache_" in note
    assert model_layers(config, kv_dtype="bfloat16").layers[0].field("k").dtype.bits == 16
    assert model_layers(config, kv_dtype="fp8").notes == ()
