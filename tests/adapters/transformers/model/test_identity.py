"""Which computation a model in memory is: its bytes, its code, and what it made of its settings."""

import copy
import json

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from kvstow.adapters.transformers import model_identity
from kvstow.adapters.transformers.model.identity import CHUNK_BYTES, tensor_digest
from kvstow.errors import ModelError
from kvstow.testing.tiny_models import tiny_model


def differences(one, other):
    return [
        each.split(" is ")[0] for each in model_identity(one).differences(model_identity(other))
    ]


@pytest.fixture
def model():
    return tiny_model("llama")


# ── weights ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("token", [0, 7, 319])
def test_one_token_of_an_embedding_is_seen(model, token):
    before = model_identity(model)
    model.model.embed_tokens.weight.data[token] += 0.5
    assert model_identity(model).weights != before.weights


@pytest.mark.parametrize("nbytes", [0, 1, 2, 8191, 8192, 8193, CHUNK_BYTES + 3])
def test_every_bit_of_a_tensor_is_seen(nbytes):
    whole = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    told = tensor_digest(whole)
    assert tensor_digest(whole.clone()) == told
    for at in {0, nbytes // 2, nbytes - 1} if nbytes else ():
        changed = whole.clone()
        changed[at] ^= 1
        assert tensor_digest(changed) != told


@pytest.mark.parametrize("offset", [0, 1, 4])
def test_a_digest_does_not_depend_on_where_a_tensor_lies(offset):
    whole = torch.arange(5000, dtype=torch.int32)
    held = torch.zeros(5000 * 4 + offset, dtype=torch.uint8)
    held[offset:] = whole.view(torch.uint8)
    assert tensor_digest(held[offset:]) == tensor_digest(whole)
    assert tensor_digest(whole.view(50, 100).T) == tensor_digest(whole.view(50, 100).T.contiguous())


def test_a_compiled_model_is_the_same_computation(model):
    assert differences(model, torch.compile(model, backend="eager")) == []


def test_models_that_hold_one_tensor_twice_or_two_alike_differ_in_their_settings_only(model):
    tied = copy.deepcopy(model)
    tied.lm_head.weight = tied.model.embed_tokens.weight
    tied.config.tie_word_embeddings = True
    alike = copy.deepcopy(model)
    alike.lm_head.weight.data.copy_(alike.model.embed_tokens.weight.data)
    assert differences(tied, alike) == ["config tie_word_embeddings"]


# ── what modules made of the settings ─────────────────────────────────────────────────


def test_settings_that_were_edited_after_loading_are_not_those_that_compute(model):
    """The edited model still turns keys by the old rope; a model loaded with them does not."""
    model.config.rope_parameters["rope_theta"] = 77.0
    loaded = AutoModelForCausalLM.from_config(copy.deepcopy(model.config)).eval()
    loaded.load_state_dict(model.state_dict())
    ids = torch.arange(9).unsqueeze(0)
    assert not torch.equal(model(ids).logits, loaded(ids).logits)
    assert differences(model, loaded) == ["config modules"]


@pytest.mark.parametrize("change", ["rope", "scaling", "epsilon"])
def test_a_module_that_computes_otherwise_is_seen(model, change):
    changed = copy.deepcopy(model)
    match change:
        case "rope":
            changed.model.rotary_emb.inv_freq[2] *= 1.01
        case "scaling":
            changed.model.layers[3].self_attn.scaling *= 1.01
        case _:
            changed.model.layers[1].input_layernorm.variance_epsilon = 1e-3
    assert differences(model, changed) == ["config modules"]


def test_the_last_bits_of_a_rope_do_not_count(model):
    """They differ by machine: frequencies are computed when a model is loaded."""
    changed = copy.deepcopy(model)
    rope = changed.model.rotary_emb.inv_freq
    rope.copy_(torch.nextafter(rope, torch.tensor(9.0)))
    assert differences(model, changed) == []


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rope_that_has_seen_a_long_sequence_is_the_same_computation(kind):
    config = tiny_model("llama").config
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0}
    rope = {"rope_theta": 100.0, "rope_type": kind, "original_max_position_embeddings": 16}
    config.rope_parameters = rope | (factors if kind == "longrope" else {"factor": 4.0})
    config.max_position_embeddings = 16
    model = AutoModelForCausalLM.from_config(config).eval()
    before = model_identity(model)
    for length in (40, 8):
        model(torch.arange(length).unsqueeze(0))
        assert before.differences(model_identity(model)) == ()


# ── code ──────────────────────────────────────────────────────────────────────────────

REMOTE = """
from transformers import LlamaConfig, LlamaForCausalLM
from .turned import FACTOR

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, input_ids=None, **given):
        return super().forward(input_ids=input_ids * 1 + FACTOR, **given)
"""


def remote(folder, factor):
    """The same weights and settings, with modelling code of their own beside them."""
    torch.manual_seed(0)
    tiny_model("llama").save_pretrained(folder)
    (folder / "modeling_own.py").write_text(REMOTE)
    (folder / "turned.py").write_text(f"FACTOR = {factor}\n")
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "OwnConfig", "AutoModelForCausalLM": "OwnModel"}
    config["auto_map"] = {name: f"modeling_own.{each}" for name, each in classes.items()}
    config["model_type"] = "own"
    (folder / "config.json").write_text(json.dumps(config))
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


def test_remote_code_counts_with_what_it_imports_and_not_by_where_it_lies(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    one, other, same = (
        remote(tmp_path / name, factor) for name, factor in (("a", 0), ("b", 1), ("c", 0))
    )
    ids = torch.arange(9).unsqueeze(0)
    assert not torch.equal(one(ids).logits, other(ids).logits)
    assert differences(one, other) == ["config modelling_code.turned.py"]
    assert differences(one, same) == []


class OwnModel(LlamaForCausalLM):
    """A model whose class is in a file of the user's."""


def test_the_file_of_a_class_counts_whoever_wrote_it(model):
    own = OwnModel(model.config).eval()
    own.load_state_dict(model.state_dict())
    assert differences(model, own) == ["config modelling_code.test_identity.py"]
    assert "modeling_llama.py" in str(model_identity(model).config)


def test_code_that_cannot_be_read_needs_an_identity_of_its_own(model):
    made: dict[str, type] = {}
    exec("class Made(Base): pass", {"Base": LlamaForCausalLM, "__name__": "nowhere"}, made)
    with pytest.raises(ModelError, match=r"(?s)nowhere.Made cannot be read.*hint: .*identity="):
        model_identity(made["Made"](model.config))


def test_an_attention_of_the_users_own_is_another_computation(model):
    def doubled(module, query, *given, **named):
        return sdpa_attention_forward(module, 2 * query, *given, **named)

    AttentionInterface.register("doubled", doubled)
    own = copy.deepcopy(model)
    own.set_attn_implementation("doubled")
    assert differences(model, own) == ["config attention"]
    own.set_attn_implementation("eager")
    assert differences(model, own) == []
