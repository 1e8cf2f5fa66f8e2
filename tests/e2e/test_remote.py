"""A prompt prefilled by two ranks is answered by one, after all of them have ended."""

import json
import os
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest
import torch

from kvstow.adapters.transformers import ModelMemory
from kvstow.adapters.transformers.cache import Cache
from kvstow.offload.store import Store
from kvstow.testing.tiny_models import tiny_model
from servers import Mooncake, Seaweed, Valkey, free_ports

SCRIPT = Path(__file__).parent.parent / "remote_engine.py"
PROMPT = [(7 * i * i + 3 * i) % 97 + 1 for i in range(100)]


def scaled(seed):
    """A small model whose answers depend on its cache: the weights are scaled up."""
    model = tiny_model("llama", seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    model.generation_config.eos_token_id = None
    return model


def saved_at(path, seed):
    """The same in a folder."""
    scaled(seed).save_pretrained(path)
    return str(path)


def engines(url, model, ranks=1, **options):
    """What the ranks of one engine say; their processes have ended."""
    port = free_ports(1)[0]
    command = [sys.executable, str(SCRIPT), model, url, json.dumps(PROMPT)]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    started = [
        subprocess.Popen(
            [*command, f"--rank={rank}", f"--ranks={ranks}", f"--port={port}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"GLOG_minloglevel": "3", "MC_LOG_LEVEL": "ERROR"},
        )
        for rank in range(ranks)
    ]
    answers = []
    for process in started:
        out, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors.decode()[-3000:]
        answers.append(json.loads(out.splitlines()[-1]))
    return answers


def answered(url, model, **options):
    """What an engine of this process finds and answers; everything of it is closed then."""
    memory = ModelMemory.of(model, budget="8MiB", **options)
    tokens = torch.tensor([PROMPT])
    with torch.no_grad(), Store(host="4MiB", remote=url) as store, memory:
        cache = Cache(memory, store=store, tokens=tokens)
        found = cache.found_tokens
        answer = model.generate(tokens, past_key_values=cache, max_new_tokens=8, do_sample=False)
        cache.batch.release()
        assert store.flush(60)
    return found, answer[0, tokens.shape[1] :].tolist()


def prefilled(url, model, rank, ranks):
    """One rank computes the prompt and stores its own heads."""
    memory = ModelMemory.of(model, budget="8MiB", tp=(rank, ranks))
    tokens = torch.tensor([PROMPT])
    with torch.no_grad(), Store(remote=url) as store, memory:
        cache = Cache(memory, store=store, tokens=tokens)
        model(tokens, past_key_values=cache)
        cache.batch.release()
        assert store.flush(60)
        assert store.remote.counts.stored_rows == len(PROMPT) // 16


@pytest.mark.parametrize("kind", [Seaweed, pytest.param(Valkey, marks=pytest.mark.remote)])
def test_rows_of_two_ranks_are_decoded_by_one_with_the_same_weights_only(tmp_path, kind):
    model, other = scaled(0), scaled(1)
    with kind(tmp_path) as server:
        url = f"{server.url}{'&' if '?' in server.url else '?'}budget=20&load=30"
        for rank in range(2):
            prefilled(url, model, rank, 2)
        found, answer = answered(url, model, block_tokens=8, order="BHLNC")
        assert found == 96
        assert (
            answer
            == model.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)[
                0, len(PROMPT) :
            ].tolist()
        )
        found, different = answered(url, other)
        assert found == 0
        assert different != answer


@pytest.mark.remote
@pytest.mark.parametrize("kind", [Seaweed, Valkey, Mooncake])
def test_a_prompt_of_two_ranks_is_found_by_one_after_all_have_ended(tmp_path, kind):
    first, second = (saved_at(tmp_path / f"model{seed}", seed) for seed in (0, 1))
    with kind(tmp_path / "server") as server:
        joint = "&" if "?" in server.url else "?"
        url = f"{server.url}{joint}budget=20&load=30"
        prefilled = engines(url, first, ranks=2)
        assert [each["found"] for each in prefilled] == [0, 0]
        assert [(each["stored"], each["dropped"]) for each in prefilled] == [(6, {})] * 2
        assert prefilled[0]["answer"] == prefilled[1]["answer"]
        if kind is not Mooncake:  # a master that is started again knows nothing, by design
            server.kill()
            server.start()
        (alone,) = engines(f"redis://127.0.0.1:1/0?prefix={uuid4().hex}", first)
        assert alone["found"] == 0
        (decoded,) = engines(url, first, block_tokens=8, order="BHLNC")
        assert decoded["found"] == 96, (prefilled, decoded)
        assert decoded["answer"] == alone["answer"] == prefilled[0]["answer"]
        assert decoded["misses"] == {}
        (stranger,) = engines(url, second)
        assert stranger["found"] == 0
        assert stranger["answer"] != alone["answer"]
