"""How long prompts take to compute: what is measured, and what a rate makes of it."""

import torch

from kvstow.adapters import prefill
from kvstow.adapters.prefill import PrefillMeter
from kvstow.adapters.transformers import Cache
from kvstow.offload.remote.prices import HALF_LIFE_TOKENS, PrefillRate
from kvstow.offload.store import Store
from kvstow.testing.servers import Valkey
from kvstow.testing.tiny_models import tiny_model

CPU = torch.device("cpu")


def test_passes_over_prompts_are_measured_from_their_beginning_to_the_last_mark(monkeypatch):
    told, clock = [], iter([10.0, 11.0, 13.0])
    monkeypatch.setattr(prefill.time, "perf_counter", lambda: next(clock))
    meter = PrefillMeter(lambda tokens, seconds: told.append((tokens, seconds)), CPU)
    meter.mark()  # nothing has begun
    meter.begin(100)
    meter.mark()
    meter.mark()
    assert told == []
    meter.begin(1)
    assert told == [(100, 3.0)]
    meter.mark()  # decoding is not measured
    meter.begin(0)
    assert told == [(100, 3.0)]


def test_a_pass_of_which_nothing_more_was_heard_is_not_measured():
    told = []
    meter = PrefillMeter(lambda *measured: told.append(measured), CPU)
    meter.begin(100)
    meter.begin(100)
    assert told == []


def test_long_passes_count_more_than_short_ones_and_old_ones_are_forgotten():
    rate = PrefillRate()
    assert (rate.tokens_per_second, rate.seconds(5)) == (0.0, float("inf"))
    rate.note(4096, 1.0)
    assert rate.tokens_per_second == 4096
    rate.note(16, 0.1)  # a short pass costs its overhead
    assert 3700 < rate.tokens_per_second < 4096
    for _ in range(20):
        rate.note(HALF_LIFE_TOKENS, 1.0)
    assert abs(rate.tokens_per_second - HALF_LIFE_TOKENS) < 1
    assert rate.seconds(2 * HALF_LIFE_TOKENS) - 2 < 0.001


def test_a_rate_that_is_given_is_not_measured():
    rate = PrefillRate(50.0)
    rate.note(4096, 1.0)
    assert (rate.tokens_per_second, rate.seconds(100)) == (50.0, 2.0)


def test_a_cache_tells_a_remote_store_how_fast_prompts_are_computed(tmp_path):
    model, tokens = tiny_model("llama"), torch.arange(40)[None]
    with torch.no_grad(), Valkey(tmp_path) as server, Store(remote=server.url) as store:
        with Cache(model, memory="4MiB", store=store, tokens=tokens) as cache:
            rate = store.remote.prefill_rate
            assert rate.tokens_per_second == 0
            model(tokens, past_key_values=cache)
            model(tokens[:, :1], past_key_values=cache)
            measured = rate.tokens_per_second
            assert measured > 0
            model(tokens[:, :1], past_key_values=cache)
        assert rate.tokens_per_second == measured
