"""The cases of transformers' own generation tests, over every class that continues text.

Each class of the installed version gets a tiny configuration and random weights. A case runs twice,
with the model's own cache and with a `Cache` of rows: tokens and scores are equal, to the bit. What
transformers itself refuses of a case is skipped with its words; classes that do not apply are in
suites.toml, with the reason. Run by scripts/test-foreign.
"""

import copy
import functools
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HCACache
from transformers.models.minimax.modeling_minimax import MiniMaxCache
from transformers.utils import logging

from kvstow.adapters.transformers import Cache, ModelMemory, cache_name
from kvstow.testing.tiny_models import VOCABULARY, tiny_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # of the models' own code
]

REASONS: dict[str, str] = tomllib.loads(
    Path(__file__).with_name("suites.toml").read_text(encoding="utf-8")
)["transformers"]["not_applicable"]

SIZES: dict[str, Any] = {
    **dict.fromkeys(("n_embd", "d_model", "hidden_dim", "dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("embedding_size", "input_embedding_size", "output_embedding_size"), 32),
    **dict.fromkeys(("n_layer", "num_layers", "n_layers", "decoder_layers"), 4),
    **dict.fromkeys(("n_head", "num_heads", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("n_inner", "ffn_dim", "d_ff", "decoder_ffn_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("dff", "expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("n_positions", "max_seq_len"), 512),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "n_group", "num_kv_heads"), 2),
    **dict.fromkeys(("topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    "linear_num_value_heads": 4,
    "attention_head_dim": 8,
    "qk_rope_head_dim": 8,
    "rotary_dim": 4,
    "is_decoder": True,
}
"""Sizes by the names that configurations have for them; each takes those that it knows."""

HEADS = {"num_key_value_heads": 4}
FURTHER: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "glm_moe_dsa", "longcat_flash", "minicpm3", "youtu"), HEADS),
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "layer_types": ["mamba", "attention"] * 2,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a type needs besides."""

PROMPT_TOKENS = 30
NEW_TOKENS = 8
MOST_PARAMETERS = 20_000_000

Outcome = list[torch.Tensor]
Case = Callable[[PreTrainedModel, Any], Outcome]


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.set_verbosity_error()
    torch.set_num_threads(1)


@functools.lru_cache(maxsize=1)
def model_of(kind: str) -> PreTrainedModel:
    """A tiny model of a type, with weights that make its text vary."""
    config = tiny_config(kind, SIZES | FURTHER.get(kind, {}))
    library: Any = transformers
    with torch.device("meta"):
        shape = library.AutoModelForCausalLM.from_config(config)
    assert sum(each.numel() for each in shape.parameters()) < MOST_PARAMETERS
    torch.manual_seed(0)
    return library.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def own_cache(model: PreTrainedModel) -> Any:
    return (
        MiniMaxCache()
        if model.config.model_type == "minimax"
        else DynamicCache(config=model.config)
    )


def prompt(batch: int, *, seed: int = 1, tokens: int = PROMPT_TOKENS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY - 70, (batch, tokens), generator=generator)


def generated(model: PreTrainedModel, ids: torch.Tensor, cache: Any, **wishes: Any) -> Any:
    wishes = {
        "attention_mask": torch.ones_like(ids),
        "do_sample": False,
        "use_cache": True,
        **wishes,
    }
    if cache is not None:
        wishes[cache_name(model)] = cache
    return model.generate(
        ids,
        max_new_tokens=NEW_TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
        **wishes,
    )


def outcome(answer: Any) -> Outcome:
    return [answer.sequences, *answer.logits]


def scores(model: PreTrainedModel, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=True, **{cache_name(model): cache}).logits


# ── cases ─────────────────────────────────────────────────────────────────────────────


def greedy(model: PreTrainedModel, cache: Any) -> Outcome:
    return outcome(generated(model, prompt(2), cache))


def left_padding(model: PreTrainedModel, cache: Any) -> Outcome:
    mask = torch.ones_like(prompt(3))
    mask[1, :5] = mask[2, :1] = 0
    return outcome(generated(model, prompt(3), cache, attention_mask=mask))


def sampling(model: PreTrainedModel, cache: Any) -> Outcome:
    torch.manual_seed(7)
    return outcome(generated(model, prompt(2), cache, do_sample=True, top_k=20))


def several_samples(model: PreTrainedModel, cache: Any) -> Outcome:
    torch.manual_seed(7)
    return outcome(generated(model, prompt(1), cache, do_sample=True, num_return_sequences=3))


def beams(model: PreTrainedModel, cache: Any) -> Outcome:
    return outcome(generated(model, prompt(2), cache, num_beams=3))


def sampled_beams(model: PreTrainedModel, cache: Any) -> Outcome:
    torch.manual_seed(7)
    return outcome(generated(model, prompt(2), cache, num_beams=3, do_sample=True))


def assisted(model: PreTrainedModel, cache: Any) -> Outcome:
    """By a model that guesses right now and then."""
    guesser = copy.deepcopy(model)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in guesser.parameters():
            weight += 0.01 * torch.randn(weight.shape, generator=noise)
    return outcome(generated(model, prompt(1), cache, assistant_model=guesser))


def prompt_lookup(model: PreTrainedModel, cache: Any) -> Outcome:
    ids = prompt(1, tokens=10).repeat(1, 3)
    return outcome(generated(model, ids, cache, prompt_lookup_num_tokens=5))


def second_turn(model: PreTrainedModel, cache: Any) -> Outcome:
    first = generated(model, prompt(2), cache)
    both = torch.cat([first.sequences, prompt(2, seed=2, tokens=1)], 1)
    if cache_name(model) != "past_key_values":
        both = both[:, -2:]
    return [first.sequences, *outcome(generated(model, both, cache))]


def in_chunks(model: PreTrainedModel, cache: Any) -> Outcome:
    return [scores(model, part, cache) for part in prompt(2).split(7, dim=1)]


def taken_back(model: PreTrainedModel, cache: Any) -> Outcome:
    before = scores(model, prompt(2), cache)
    cache.crop(-5)
    return [before, scores(model, prompt(2, seed=2, tokens=3), cache)]


def reordered(model: PreTrainedModel, cache: Any) -> Outcome:
    before = scores(model, prompt(3), cache)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    return [before, scores(model, prompt(3, seed=2, tokens=1), cache)]


CASES: list[Case] = [
    *(greedy, left_padding, sampling, several_samples, beams, sampled_beams, assisted),
    *(prompt_lookup, second_turn, in_chunks, taken_back, reordered),
]
GOES_BACK = {assisted, prompt_lookup, taken_back}


@pytest.fixture
def whole_reorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers' own caches reorder all that they keep for a beam, which two do not."""

    def compressed(layer: Any, beam_idx: torch.Tensor) -> None:
        CacheLayerMixin.reorder_cache(layer, beam_idx)
        for kept in ("buffer_kv", "buffer_gate", "compressed_kv", "overlap_kv", "overlap_gate"):
            for name, tensor in getattr(layer, kept, {}).items():
                getattr(layer, kept)[name] = None if tensor is None else tensor[beam_idx]

    def lightning(cache: Any, beam_idx: torch.Tensor) -> None:
        DynamicCache.reorder_cache(cache, beam_idx)
        cache.linear_cache = [x[beam_idx] if len(x) else x for x in cache.linear_cache]

    monkeypatch.setattr(DeepseekV4HCACache, "reorder_cache", compressed)
    monkeypatch.setattr(MiniMaxCache, "reorder_cache", lightning)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("kind", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
@pytest.mark.usefixtures("whole_reorder")
def test_tokens_and_scores_are_those_of_the_models_own_cache(kind: str, case: Case) -> None:
    reason = REASONS.get(kind) or REASONS.get(f"{kind}:{case.__name__}")
    if reason:
        pytest.skip(f"not applicable: {reason}")
    model = model_of(kind)
    try:
        theirs = case(model, own_cache(model))
    except (ValueError, NotImplementedError, AttributeError, TypeError, RuntimeError) as error:
        pytest.skip(f"transformers refuses: {error}")
    rollback = 20 if case in GOES_BACK else 0
    memory = ModelMemory.of(model, budget="16MiB", block_tokens=4, rollback_tokens=rollback)
    with memory, Cache(memory) as cache:
        if case in GOES_BACK and not cache.is_croppable:
            pytest.skip("refused in words: recurrent states do not go back")
        ours = case(model, cache)
        memory.ledger.check()
    assert len(ours) == len(theirs)
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_what_is_kept_in_static_shapes_gives_the_same_tokens(kind: str) -> None:
    if reason := REASONS.get(kind) or REASONS.get(f"{kind}:static"):
        pytest.skip(f"not applicable: {reason}")
    model = model_of(kind)
    try:
        theirs = generated(model, prompt(2), None, cache_implementation="static")
    except (ValueError, NotImplementedError, AttributeError, TypeError, RuntimeError) as error:
        pytest.skip(f"transformers refuses: {error}")
    with Cache(model, memory="16MiB", block_tokens=4) as cache:
        ours = generated(model, prompt(2), cache)
    assert torch.equal(ours.sequences, theirs.sequences)
    for mine, other in zip(ours.logits, theirs.logits, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)


def test_every_reason_is_of_a_class_that_there_is() -> None:
    assert {name.split(":")[0] for name in REASONS} <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
