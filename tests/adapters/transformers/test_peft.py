"""PEFT's adapters, switched, merged and disabled: none is served with the rows of another."""

import peft
import pytest
import torch

from kvstow.adapters.transformers import Cache, ModelMemory
from kvstow.errors import ModelError, StoreError
from kvstow.offload.store import Store
from kvstow.testing.tiny_models import tiny_model

IDS = torch.arange(20, 40).unsqueeze(0)
MORE = torch.arange(50, 62).unsqueeze(0)


def tuned(kind):
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "k_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny_model("llama"), config, adapter_name="one")
    model.add_adapter("two", config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter.data, std=0.5)
    model.set_adapter("one")
    model.eval()
    return model, model if kind == "wrapped" else model.get_base_model()


@pytest.fixture(params=["wrapped", "inside"])
def models(request):
    """PEFT's model, by which adapters are switched, and the one that computes: that or its base."""
    return tuned(request.param)


@pytest.fixture
def memory(models):
    with ModelMemory.of(models[1], budget="1MiB", block_tokens=4) as memory:
        yield memory


def computed(model, memory, ids=IDS, **given):
    """How many tokens of a prompt were found, and its last logits."""
    with Cache(memory, tokens=ids, **given) as cache, torch.no_grad():
        found = cache.found_tokens
        return found, model(ids[:, found:], past_key_values=cache).logits[:, -1]


def two(model):
    model.set_adapter("two")


def both(model):
    model.base_model.set_adapter(["one", "two"])


def none(model):
    model.base_model.disable_adapter_layers()


def merged(model):
    model.merge_adapter()


def weaker(model):
    for module in model.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(0.5)


def trained(model):
    for name, parameter in model.named_parameters():
        if "lora_B.one" in name:
            with torch.no_grad():
                parameter += 0.01


CHANGES = [two, both, none, merged, weaker, trained]


@pytest.mark.parametrize("change", CHANGES)
def test_other_adapters_find_and_keep_nothing_in_this_memory(models, memory, change):
    tuner, model = models
    first = computed(model, memory)
    change(tuner)
    assert not torch.allclose(model(IDS).logits[:, -1], first[1], atol=1e-2) or change is merged
    for ids in (IDS, MORE, MORE):
        found, logits = computed(model, memory, ids)
        assert found == 0
        assert torch.allclose(logits, model(ids).logits[:, -1], atol=1e-3)


@pytest.mark.parametrize("change", [two, none, merged])
def test_other_adapters_take_no_rows_from_a_store(tmp_path, models, memory, change):
    tuner, model = models
    with Store.open(tmp_path / "store", memory.layout, capacity=4 << 20) as store:
        assert computed(model, memory, store=store)[0] == 0
        change(tuner)
        with ModelMemory.of(model, budget="1MiB", block_tokens=4) as other:
            what = "weights" if change is merged else "adapter"
            assert any(
                what in each for each in memory.layout.identity.differences(other.layout.identity)
            )
            with pytest.raises(StoreError, match=what):
                computed(model, other, store=store)
            wanted = model(IDS).logits[:, -1]
            assert torch.allclose(computed(model, other)[1], wanted, atol=1e-3)


def test_an_adapter_that_is_active_again_goes_on(models, memory):
    tuner, model = models
    _, wanted = computed(model, memory)
    tuner.set_adapter("two")
    tuner.set_adapter("one")
    with tuner.disable_adapter():
        pass
    found, again = computed(model, memory)
    assert found == 16
    assert torch.allclose(again, wanted, atol=1e-3)


@pytest.mark.parametrize("goes_back", [True, False])
def test_an_answer_of_another_adapter_is_not_found(models, memory, goes_back):
    tuner, model = models
    whole = torch.cat([IDS, MORE], 1)
    with Cache(memory, tokens=IDS) as cache, torch.no_grad():
        model(IDS, past_key_values=cache)
        tuner.set_adapter("two")
        model(MORE, past_key_values=cache)
        if goes_back:
            tuner.set_adapter("one")
    tuner.set_adapter("one")
    ids = torch.cat([whole, IDS], 1)
    found, logits = computed(model, memory, ids)
    assert found == 20
    assert torch.allclose(logits, model(ids).logits[:, -1], atol=1e-3)


def test_adapters_by_sequence_are_computed_and_not_reused(models, memory):
    _, model = models
    for _ in range(2):
        with Cache(memory, tokens=IDS) as cache, torch.no_grad():
            assert cache.found_tokens == 0
            model(IDS, past_key_values=cache, adapter_names=["two"])


def test_an_answer_with_adapters_by_sequence_is_not_found(models, memory):
    _, model = models
    with Cache(memory, tokens=IDS) as cache, torch.no_grad():
        model(IDS, past_key_values=cache)
        model(MORE, past_key_values=cache, adapter_names=["two"])
    with Cache(memory, tokens=torch.cat([IDS, MORE, IDS], 1)) as cache:
        assert cache.found_tokens == 20


def test_prefix_tuning_which_takes_no_cache_is_refused():
    config = peft.PrefixTuningConfig(
        num_virtual_tokens=3,
        task_type="CAUSAL_LM",
        num_layers=4,
        token_dim=16,
        num_attention_heads=2,
    )
    model = peft.get_peft_model(tiny_model("llama"), config).eval()
    with pytest.raises(ModelError, match=r"(?s)keys and values of its own.*hint: disable"):
        ModelMemory.of(model, budget="1MiB")


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
def test_prompt_tuning_serves_caches_that_were_not_told_their_tokens():
    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_model("llama"), config).eval()
    with ModelMemory.of(model, budget="1MiB", block_tokens=4) as memory:
        with Cache(memory) as cache:
            given = {"max_new_tokens": 4, "do_sample": False}
            ours = model.generate(input_ids=IDS, past_key_values=cache, **given)
        assert torch.equal(ours, model.generate(input_ids=IDS, **given))
        assert [computed(model, memory)[0] for _ in range(2)] == [0, 0]
