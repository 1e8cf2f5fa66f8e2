"""The transformers adapter's parts: what a model keeps, rows written and gathered, states."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    MllamaForCausalLM,
    Qwen3_5ForConditionalGeneration,
)
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.models.mllama import MllamaTextConfig
from transformers.models.qwen3_5 import Qwen3_5Config

from kvstow.adapters.transformers import (
    Cache,
    ModelMemory,
    cache_name,
)
from kvstow.adapters.transformers.inspect import kept_layers, twin_cache
from kvstow.adapters.transformers.rows import one_stride
from kvstow.errors import BlockError, ModelError
from kvstow.plan.identity import Identity
from kvstow.plan.retention import Full, State, Window
from kvstow.plan.spec import DType
from kvstow.testing.tiny_models import FAMILIES, tiny_model

# ── what a model keeps ────────────────────────────────────────────────────────────────


def cache_layers(model, *, block_tokens=16, **more):
    return kept_layers(twin_cache(model), block_tokens=block_tokens, **more)


def test_sliding_layers_keep_their_window_and_full_layers_everything():
    specs = cache_layers(tiny_model("gemma3_text"))
    assert [spec.retention for spec in specs] == [Window(24), Window(24), Full(), Window(24)]


def test_a_mixed_layer_keeps_tokens_and_a_state():
    specs = {spec.name: spec for spec in cache_layers(tiny_model("falcon_h1"))}
    assert specs["layers.0"].retention == Full()
    state = specs["layers.0.state"]
    assert state.retention == State()
    assert {field.name: field.shape for field in state.fields} == {
        "conv0": (80, 4),
        "recurrent0": (8, 8, 8),
    }
    assert {field.dtype for field in state.fields} == {DType.FLOAT32}


def test_a_compressed_layer_keeps_a_window_entries_and_what_the_next_are_made_of():
    specs = {spec.name: spec for spec in cache_layers(tiny_model("deepseek_v4"), block_tokens=6)}
    assert [name for name in specs if name.startswith("layers.1")] == [
        "layers.1",
        "layers.1.compressor",
        "layers.1.indexer",
        "layers.1.state",
    ]
    assert specs["layers.1"].retention == Window(24)
    assert [field.name for field in specs["layers.1"].fields] == ["k"]
    for name, tokens, entries in (("layers.1", 12, 3), ("layers.0", 24, 3)):
        spec = specs[f"{name}.compressor"]
        assert (spec.retention, spec.block_tokens, spec.states) == (Full(), tokens, entries)
    assert specs["layers.1.state"].retention == State()
    assert specs["layers.1.state"].field("indexer.overlap_gate").shape == (4, 8)
    assert "layers.0.indexer" not in specs


def test_a_rank_holds_its_part_of_all_heads_and_a_latent_whole():
    heads = cache_layers(tiny_model("llama"), tp=(1, 2))[0].heads
    assert (heads.total, heads.pieces) == (2, ((1, 2),))
    latent = cache_layers(tiny_model("deepseek_v3"), tp=(1, 2))[0].heads
    assert (latent.total, latent.pieces) == (1, ((0, 1),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_twin_without_weights_keeps_what_the_model_keeps(family, dtype):
    model = tiny_model(family).to(dtype)
    ids = torch.arange(8).unsqueeze(0)
    with torch.no_grad():
        kept = model(ids, use_cache=True)[cache_name(model)]
    assert cache_layers(model, block_tokens=4) == kept_layers(kept, block_tokens=4)


def test_a_model_that_looks_for_padding_among_its_tokens_says_what_it_keeps():
    """As GPT-2 does where it has a padding token and is given no mask."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 320, "pad_token_id": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes))
    specs = cache_layers(model)
    assert [(spec.heads.size, spec.cell_bytes) for spec in specs] == [(4, 2 * 8 * 4)] * 2


def test_a_model_is_not_run_to_learn_what_it_keeps():
    model = tiny_model("llama")
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model was run"))
    ModelMemory.of(model, budget=1 << 20, identity=Identity.unverified("a test")).close()


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("rwkv", {"attention_hidden_size": 32}),
        ("recurrent_gemma", {"lru_width": 32, "num_attention_heads": 4, "head_dim": 8}),
    ],
)
def test_a_model_that_keeps_its_tokens_elsewhere_is_refused_by_name(model_type, more):
    config = AutoConfig.for_model(
        model_type,
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        **more,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ModelError, match="ForCausalLM keeps its tokens in no cache"):
        ModelMemory.of(model, budget=1 << 20)


def test_a_model_that_puts_tokens_of_its_own_in_front_is_refused_in_words():
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "dim_head": 8, "dim_ff": 32}
    config = AutoConfig.for_model("cpmant", num_hidden_layers=2, vocab_size=320, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ModelError, match=r"(?s)keeps 33 entries of 1 tokens.*hint: use the model"):
        Cache(model, memory="1MiB")


def test_an_unknown_tiny_family_is_refused_by_name():
    with pytest.raises(ModelError, match="no tiny model of family 'gpt5'"):
        tiny_model("gpt5")


# ── sequences ─────────────────────────────────────────────────────────────────────────


def forward(model, ids, cache):
    with torch.no_grad():
        return model(input_ids=ids, past_key_values=cache, use_cache=True).logits


def test_a_window_holds_a_bounded_number_of_rows_for_any_length():
    model = tiny_model("mistral")
    with ModelMemory.of(model, budget=1 << 20, block_tokens=4) as memory:
        group = memory.ledger.groups[0]
        bound = group.rows_bound(in_flight=1)
        with Cache(memory) as cache:
            for token in range(80):
                forward(model, torch.tensor([[token]]), cache)
                assert memory.pool.num_held(0) <= bound
            assert cache.get_seq_length() == 80


def test_a_cache_refuses_another_number_of_sequences():
    model = tiny_model("llama")
    with ModelMemory.of(model, budget=1 << 20) as memory, Cache(memory) as cache:
        forward(model, torch.zeros((2, 3), dtype=torch.long), cache)
        with pytest.raises(BlockError, match="2 sequences was given 3"):
            forward(model, torch.zeros((3, 1), dtype=torch.long), cache)


def test_a_cache_refuses_another_element_type():
    model = tiny_model("llama")
    with ModelMemory.of(model, budget=1 << 20) as memory, Cache(memory) as cache:
        keys = torch.zeros((1, 2, 3, 8), dtype=torch.float64)
        with pytest.raises(BlockError, match=r"holds torch\.float32, not torch\.float64"):
            cache.update(keys, keys, 0)


@pytest.mark.parametrize("family", ["falcon_h1", "lfm2", "nemotron_h", "qwen3_next"])
def test_layers_know_whether_they_have_a_state_as_their_own_ones_do(family):
    model = tiny_model(family)
    theirs = DynamicCache(config=model.config)
    with ModelMemory.of(model, budget=1 << 20) as memory, Cache(memory) as ours:
        for _ in range(2):
            for i, layer in enumerate(theirs.layers):
                if isinstance(layer, LinearAttentionCacheLayerMixin):
                    assert ours.has_previous_state(i) == theirs.has_previous_state(i)
            assert ours.has_previous_state() == theirs.has_previous_state()
            for cache in (ours, theirs):
                forward(model, torch.arange(5).unsqueeze(0), cache)


@pytest.mark.parametrize("family", ["falcon_h1", "deepseek_v4", "minimax"])
def test_a_reset_cache_begins_anew(family):
    model = tiny_model(family)
    ids = torch.arange(10).unsqueeze(0)
    with ModelMemory.of(model, budget=1 << 20, block_tokens=4) as memory:
        with Cache(memory) as cache:
            first = forward(model, ids, cache)
            cache.reset()
            assert cache.get_seq_length() == 0
            assert torch.equal(forward(model, ids, cache), first)
        assert len(memory.ledger) == 0


@pytest.mark.parametrize("family", ["qwen3_next", "jamba", "lfm2"])
def test_states_in_scattered_rows_are_the_same_as_in_neighbouring_ones(family):
    model = tiny_model(family)
    ids = torch.arange(33).view(3, 11)
    with ModelMemory.of(model, budget=1 << 20, block_tokens=4) as memory:
        with Cache(memory) as neighbours:
            expected = [forward(model, ids[:, :10], neighbours)]
            expected += [forward(model, ids[:, 10:], neighbours)]
        taken = [memory.ledger.admit(1).request for _ in range(5)]
        for request in (taken[0], taken[1], taken[3]):
            memory.ledger.release(request)
        with Cache(memory) as scattered:
            found = [forward(model, ids[:, :10], scattered)]
            found += [forward(model, ids[:, 10:], scattered)]
            state = next(g for g, x in enumerate(memory.ledger.groups) if x.name == "state")
            running = [int(scattered.blocks(i)[state].ids[0]) for i in range(3)]
            assert one_stride(torch.tensor(running)) is None
        for mine, other in zip(found, expected, strict=True):
            assert torch.equal(mine, other)


def test_a_recurrent_model_counts_its_tokens_and_resumes_from_any_block():
    model = tiny_model("mamba2")
    ids = torch.arange(23).unsqueeze(0)

    def passes(cache, start, ends):
        with torch.no_grad():
            for end in ends:
                logits = model(ids[:, start:end], cache_params=cache, use_cache=True).logits
                start = end
                assert cache.num_tokens == cache.get_seq_length() == end
        return logits[0, -1]

    with ModelMemory.of(model, budget=1 << 20, block_tokens=4) as memory:
        with Cache(memory, tokens=ids) as cache:
            expected = passes(cache, 0, [2, *range(3, 11), 16, 18, 19, 20, 23])
        for known, hit in ((9, 8), (17, 16), (23, 20)):
            with Cache(memory, tokens=ids[:, :known]) as cache:
                assert cache.num_tokens == hit
                found = passes(cache, hit, [hit + 1, 23])
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        memory.ledger.check()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "falcon_h1", "deepseek_v4"])
def test_layers_show_the_same_keys_and_values_as_their_own_ones(family):
    model = tiny_model(family)
    theirs = DynamicCache(config=model.config)
    memory = ModelMemory.of(model, budget=1 << 20, block_tokens=4)
    with memory, Cache(memory) as ours:
        assert all(layer.keys is layer.values is None for layer in ours.layers)
        for cache in (ours, theirs):
            forward(model, torch.arange(66).view(2, 33), cache)
        for mine, other in zip(ours.layers, theirs.layers, strict=True):
            assert torch.equal(mine.keys, other.keys)
            assert torch.equal(mine.values, other.values)


# ── tokens taken back ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "deepseek_v32"])
@pytest.mark.parametrize("block_tokens", [1, 4])
@pytest.mark.parametrize("taken", [1, 6])
def test_tokens_written_over_tokens_are_as_if_they_had_come_first(family, block_tokens, taken):
    model = tiny_model(family)
    ids, other = torch.arange(60).unsqueeze(0), torch.arange(100, 160).unsqueeze(0)
    memory = ModelMemory.of(model, budget=1 << 20, block_tokens=block_tokens, rollback_tokens=6)
    with memory, Cache(memory) as cache, Cache(memory) as plain:
        forward(model, ids[:, :35], cache)
        forward(model, ids[:, :35], plain)
        for start in range(35, 50, 3):
            forward(model, other[:, start : start + taken], cache)
            cache.crop(-taken)
            assert cache.num_tokens == cache.get_seq_length() == start
            step = ids[:, start : start + 3]
            assert torch.equal(forward(model, step, cache), forward(model, step, plain))
        memory.ledger.check()


@pytest.mark.parametrize(
    ("family", "rollback_tokens", "reason"),
    [
        ("mistral", 0, r"taking back 0, not 3.*rollback_tokens=3"),
        ("mistral", 2, r"taking back 2, not 3.*rollback_tokens=3"),
        ("falcon_h1", 9, "a recurrent state does not go back"),
        ("lfm2", 9, "a recurrent state does not go back"),
        ("mamba2", 9, "a recurrent state does not go back"),
        ("deepseek_v4", 9, "a recurrent state does not go back"),
    ],
)
def test_what_cannot_go_back_is_refused_and_unchanged(family, rollback_tokens, reason):
    model = tiny_model(family)
    ids = torch.arange(32).unsqueeze(0)
    memory = ModelMemory.of(model, budget=1 << 20, rollback_tokens=rollback_tokens)
    with memory, Cache(memory) as cache:
        with torch.no_grad():
            model(ids, use_cache=True, **{cache_name(model): cache})
        cache.crop(0)
        with pytest.raises(BlockError, match=f"(?s)32 tokens cannot become 29: .*{reason}"):
            cache.crop(-3)
        assert cache.get_seq_length() == 32
        assert cache.is_croppable == (rollback_tokens == 2)


@pytest.mark.parametrize("make", [lambda memory: Cache(memory), lambda memory: DynamicCache()])
def test_a_positive_number_of_tokens_to_remove_is_refused_as_in_transformers(make):
    model = tiny_model("llama")
    with ModelMemory.of(model, budget=1 << 20) as memory:
        cache = make(memory)
        forward(model, torch.arange(9).unsqueeze(0), cache)
        with pytest.raises(ValueError, match="positive"):
            cache.crop(5)
        assert cache.get_seq_length() == 9


@pytest.mark.parametrize("make", [lambda memory: Cache(memory), lambda memory: DynamicCache()])
def test_taking_back_more_than_there_is_leaves_nothing_as_in_transformers(make):
    model = tiny_model("llama")
    ids = torch.arange(9).unsqueeze(0)
    with ModelMemory.of(model, budget=1 << 20) as memory:
        cache = make(memory)
        cache.crop(-3)
        forward(model, ids, cache)
        cache.crop(-12)
        assert cache.get_seq_length() == 0
        assert torch.equal(forward(model, ids, cache), model(ids).logits)


def test_known_tokens_and_those_of_beams_that_have_split_are_not_taken_back():
    model = tiny_model("llama")
    ids = torch.arange(9).unsqueeze(0)
    with ModelMemory.of(model, budget=1 << 20, block_tokens=4) as memory:
        with Cache(memory, tokens=ids) as cache:
            forward(model, torch.arange(12).unsqueeze(0), cache)
            cache.crop(-3)
            with pytest.raises(BlockError, match="9 tokens cannot become 8: the first 9 are"):
                cache.crop(-1)
        with Cache(memory) as cache:
            forward(model, ids, cache)
            cache.batch_repeat_interleave(2)
            with pytest.raises(BlockError, match="9 tokens cannot become 8: the first 9 are"):
                cache.crop(-1)


# ── generate's own caches ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["dynamic", "offloaded", "static", "quantized"])
def test_generate_refuses_to_make_a_cache_beside_this_one(kind):
    """By its argument, and where the model's own settings ask for one."""
    model = tiny_model("llama")
    ids = torch.arange(9).unsqueeze(0)
    with ModelMemory.of(model, budget=1 << 20) as memory, Cache(memory, tokens=ids) as cache:
        given = {"past_key_values": cache, "max_new_tokens": 2}
        with pytest.raises(ValueError, match="both `cache_implementation`"):
            model.generate(ids, cache_implementation=kind, **given)
        model.generation_config.cache_implementation = kind
        with pytest.raises(ValueError, match="both `cache_implementation`"):
            model.generate(ids, **given)
        assert cache.num_tokens == 0


def test_models_that_attend_to_an_encoder_are_refused_in_words():
    bart = BartForConditionalGeneration(
        BartConfig(
            vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16,
            decoder_ffn_dim=16, encoder_attention_heads=2, decoder_attention_heads=2,
        )
    )  # fmt: skip
    text = MllamaTextConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, cross_attention_layers=[1], pad_token_id=0,
    )  # fmt: skip
    for model in (bart, MllamaForCausalLM(text)):
        with pytest.raises(
            ModelError, match=r"attends to an encoder.*\n\nhint: use the model's own"
        ):
            Cache(model, memory="1MiB")


def test_positions_that_the_last_batch_left_on_a_model_do_not_hinder_a_cache():
    """Models of Qwen's that see images keep `rope_deltas` of their last batch."""
    text = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen3_5Config(text_config=text, vision_config=vision)
    model = Qwen3_5ForConditionalGeneration(config).eval()
    ids = torch.arange(100, 110).repeat(3, 1)
    theirs = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert model.model.rope_deltas.shape == (3, 1)
    for batch in (ids, ids[:1]):
        with Cache(model, memory="8MiB") as cache:
            ours = model.generate(batch, past_key_values=cache, max_new_tokens=3, do_sample=False)
        assert torch.equal(ours, theirs[: len(batch)])
