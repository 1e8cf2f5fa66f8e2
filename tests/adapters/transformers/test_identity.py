"""Which computation a model in memory is: its bytes, its settings, and code that came with it."""

import copy
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvstow.adapters.transformers import model_identity
from kvstow.adapters.transformers.identity import CHUNK_BYTES, tensor_digest
from kvstow.testing.tiny_models import tiny_model


def differences(one, other):
    return [
        each.split(" is ")[0] for each in model_identity(one).differences(model_identity(other))
    ]


@pytest.fixture
def model():
    return tiny_model("llama")


# ── weights ───────────────────────────────────────────────────────────────────────────


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
    assert differences(one, other) == ['config modelling_code."turned.py"']
    assert differences(one, same) == []


def test_a_model_in_training_is_another_computation(model):
    assert differences(model, copy.deepcopy(model).train()) == ["config training"]
