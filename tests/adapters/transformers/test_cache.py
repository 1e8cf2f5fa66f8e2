"""The transformers adapter's parts: what a model keeps, rows written and gathered, states."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.utils import logging

from kvstow.adapters.transformers import (
    Cache,
    HeadShard,
    ModelMemory,
    cache_layers,
    cache_name,
)
from kvstow.adapters.transformers.inspect import trial
from kvstow.adapters.transformers.prompts import prompts_of
from kvstow.adapters.transformers.rows import one_stride
from kvstow.errors import BlockError, ModelError, OutOfBlocks
from kvstow.plan.retention import Full, State, Window
from kvstow.plan.spec import DType
from kvstow.testing.tiny_models import tiny_model


@pytest.fixture(autouse=True)
def quiet():
    logging.set_verbosity_error()
    torch.set_num_threads(1)


# ── what a model keeps ────────────────────────────────────────────────────────────────


def test_a_dense_model_keeps_keys_and_values_of_its_kv_heads():
    specs = cache_layers(tiny_model("llama"), block_tokens=4)
    assert [spec.name for spec in specs] == [f"layers.{i}" for i in range(4)]
    assert {spec.retention for spec in specs} == {Full()}
    assert {spec.heads.size for spec in specs} == {2}
    assert {spec.cell_bytes for spec in specs} == {(8 + 8) * 4}


def test_sliding_layers_keep_their_window_and_full_layers_everything():
    specs = cache_layers(tiny_model("gemma3_text"))
    assert [spec.retention for spec in specs] == [Window(24), Window(24), Full(), Window(24)]


def test_a_latent_model_is_described_by_what_the_engine_stores():
    model = tiny_model("deepseek_v3")
    stored = trial(model).layers[0]
    spec = cache_layers(model)[0]
    assert spec.heads.size == stored.keys.shape[1]
    assert spec.field("k").shape == stored.keys.shape[3:]
    assert spec.field("v").shape == stored.values.shape[3:]
    assert spec.payload_bytes == 16 * (stored.keys.nbytes + stored.values.nbytes)


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


def test_a_layer_of_lightning_attention_keeps_a_state_and_nothing_else():
    specs = cache_layers(tiny_model("minimax"))
    assert [(spec.name, spec.retention) for spec in specs] == [
        ("layers.0", Full()),
        ("layers.2", Full()),
        ("layers.1.state", State()),
        ("layers.3.state", State()),
    ]


@pytest.mark.parametrize("computes_all", [False, True])
def test_a_shard_holds_its_part_of_all_heads(computes_all):
    shard = HeadShard(1, 2, computes_all=computes_all)
    heads = cache_layers(tiny_model("llama"), shard=shard)[0].heads
    held = 1 if computes_all else 2
    assert (heads.total, heads.pieces) == (2 * held, ((held, 2 * held),))


def test_a_latent_is_held_whole_by_every_rank():
    heads = cache_layers(tiny_model("deepseek_v3"), shard=HeadShard(1, 2, computes_all=True))[
        0
    ].heads
    assert (heads.total, heads.pieces) == (1, ((0, 1),))


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


def test_an_unknown_tiny_family_is_refused_by_name():
    with pytest.raises(ModelError, match="no tiny 'gpt5'"):
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


def test_sequences_that_do_not_all_fit_are_not_admitted_at_all():
    model = tiny_model("llama")
    with ModelMemory.of(model, budget=80 << 10, block_tokens=16) as memory:
        free = memory.pool.num_free(0)
        cache = Cache(memory)
        with pytest.raises(OutOfBlocks):
            forward(model, torch.zeros((free + 1, 3), dtype=torch.long), cache)
        assert len(memory.ledger) == 0
        assert memory.pool.num_free(0) == free


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


def test_kept_sequences_go_on_as_if_the_others_had_never_been():
    model = tiny_model("falcon_h1")
    ids = torch.arange(33).view(3, 11)
    with ModelMemory.of(model, budget=1 << 20, block_tokens=4) as memory:
        with Cache(memory) as cache:
            forward(model, ids[:, :10], cache)
            cache.batch_select_indices(torch.tensor([2, 0]))
            cache.batch_repeat_interleave(2)
            found = forward(model, ids[[2, 2, 0, 0], 10:], cache)
        assert len(memory.ledger) == 0
        for row, origin in enumerate([2, 2, 0, 0]):
            with Cache(memory) as alone:
                forward(model, ids[origin : origin + 1, :10], alone)
                expected = forward(model, ids[origin : origin + 1, 10:], alone)
            torch.testing.assert_close(found[row], expected[0], rtol=1e-5, atol=1e-4)


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


# ── known tokens ──────────────────────────────────────────────────────────────────────


def test_equal_tokens_behind_different_padding_are_different_prompts():
    ids = torch.tensor([[7, 1, 2, 3], [7, 1, 2, 3]])
    plain, padded = prompts_of(ids, torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]]))
    assert plain.hashes(2).tolist() != padded.hashes(2).tolist()


def test_a_mask_with_a_hole_is_refused():
    with pytest.raises(BlockError, match="not padding on the left"):
        prompts_of(torch.tensor([[1, 2, 3]]), torch.tensor([[1, 0, 1]]))


def test_sequences_without_tokens_cannot_be_remembered():
    model = tiny_model("llama")
    with ModelMemory.of(model, budget=1 << 20) as memory, Cache(memory) as cache:
        forward(model, torch.zeros((1, 3), dtype=torch.long), cache)
        with pytest.raises(BlockError, match="tokens=input_ids"):
            cache.remember(torch.zeros((1, 3), dtype=torch.long))


def test_a_remembered_answer_is_a_prefix_of_the_next_prompt():
    model = tiny_model("llama")
    ids = torch.arange(20).unsqueeze(0)
    with ModelMemory.of(model, budget=1 << 20, block_tokens=4) as memory:
        with Cache(memory, tokens=ids) as cache:
            answer = model.generate(ids, past_key_values=cache, max_new_tokens=9, do_sample=False)
            cache.remember(answer)
        with Cache(memory, tokens=torch.cat([answer, ids], 1)) as cache:
            assert cache.get_seq_length() == 28  # 29 tokens, the last of which was never computed


def test_prompts_with_different_hits_share_none():
    model = tiny_model("llama")
    one, other = torch.arange(16), torch.arange(100, 116)
    with ModelMemory.of(model, budget=1 << 20, block_tokens=4) as memory:
        with Cache(memory, tokens=one.unsqueeze(0)) as cache:
            forward(model, one.unsqueeze(0), cache)
        with Cache(memory, tokens=torch.stack([one, one])) as cache:
            assert cache.get_seq_length() == 12
        with Cache(memory, tokens=torch.stack([one, other])) as cache:
            assert cache.get_seq_length() == 0


# ── tokens that are not those of the rows ─────────────────────────────────────────────


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (lambda answer: answer[:, 8:], "tokens do not begin like|tokens are told of"),
        (lambda answer: answer.flip(1), "do not begin like"),
        (lambda answer: answer[:, :12], "12 tokens are told of sequences that hold 31"),
        (lambda answer: answer[0], r"1 sequences, tokens are \(32,\)"),
        (lambda answer: answer.repeat(2, 1), r"1 sequences, tokens are \(2, 32\)"),
    ],
    ids=["answer alone", "other prompt", "too few", "no batch", "another batch"],
)
def test_tokens_that_cannot_be_those_of_the_rows_are_not_remembered(told, reason):
    model = tiny_model("llama")
    ids = torch.arange(20, 28).unsqueeze(0)
    with ModelMemory.of(model, budget=1 << 20, block_tokens=4) as memory:
        with Cache(memory, tokens=ids) as cache:
            answer = model.generate(ids, past_key_values=cache, max_new_tokens=24, do_sample=False)
            with pytest.raises(BlockError, match=reason):
                cache.remember(told(answer))
        with Cache(memory, tokens=answer) as cache:
            assert cache.found_tokens == 8  # the prompt, and nothing of what was told


def test_the_answers_of_a_beam_search_are_not_taken_for_the_rows_of_its_beams():
    model = tiny_model("llama")
    ids = torch.arange(20, 40).unsqueeze(0)
    with ModelMemory.of(model, budget=1 << 20, block_tokens=4) as memory:
        with Cache(memory, tokens=ids.repeat(3, 1)) as cache:
            answers = model.generate(
                ids,
                past_key_values=cache,
                num_beams=3,
                num_return_sequences=3,
                max_new_tokens=12,
                do_sample=False,
            )
            with pytest.raises(BlockError, match=r"(?s)beams cannot be remembered.*hint"):
                cache.remember(answers)
        for answer in answers.unsqueeze(1):
            with Cache(memory, tokens=answer) as cache:
                assert cache.found_tokens == 20


def test_a_prompt_that_comes_again_behind_a_found_prefix_is_refused():
    """As in assisted generation, which computes whole prompts whatever the cache holds."""
    model = tiny_model("llama")
    ids = torch.arange(10).repeat(1, 3)
    with ModelMemory.of(model, budget=1 << 20, block_tokens=4) as memory:
        for found in (0, 28):
            with Cache(memory, tokens=ids) as cache:
                assert cache.found_tokens == found
                given = {"max_new_tokens": 6, "do_sample": False, "prompt_lookup_num_tokens": 5}
                if not found:
                    model.generate(ids, past_key_values=cache, **given)
                    continue
                with pytest.raises(BlockError, match=r"(?s)28 of 30 tokens were found.*hint"):
                    model.generate(ids, past_key_values=cache, **given)
        with Cache(memory, tokens=ids) as cache:  # what was refused has left nothing behind
            rest = forward(model, ids[:, cache.found_tokens :], cache)
        assert torch.allclose(rest[:, -1], model(ids).logits[:, -1], atol=1e-4)


@pytest.mark.parametrize("num_tokens", [-3, 0, 19, 21, 31])
def test_a_request_is_continued_from_the_tokens_that_it_holds(num_tokens):
    memory = ModelMemory.of(tiny_model("gemma3_text"), budget=1 << 20, block_tokens=16)
    request = memory.ledger.admit(20).request
    with pytest.raises(BlockError, match=f"request {request} holds 20 tokens, not {num_tokens}\n"):
        Cache(memory, requests=[request], num_tokens=num_tokens)
