"""docs/guides/restart.md: a second process answers from disk, windows and states included."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvstow
from kvstow.adapters.transformers import ModelMemory
from kvstow.testing.tiny_models import tiny_model
from kvstow.transformers import Cache

GUIDE = Path(__file__).parents[3] / "docs/guides/restart.md"


def test_the_program_of_the_guide_answers_from_disk_in_a_second_process(tmp_path):
    (program,) = re.findall(r"```python file=answer\.py\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len([line for line in program.splitlines() if line]) <= 16
    (tmp_path / "answer.py").write_text(program)
    tiny_model("gemma3_text").save_pretrained(tmp_path / "model")
    lines = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "answer.py", "model"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=250,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        lines.append(done.stdout.strip().rpartition(" from disk: "))
    assert [line[2] for line in lines] == ["0", "48"]
    assert lines[0][0] == lines[1][0]


@pytest.mark.parametrize(
    "family", ["llama", "gemma3_text", "mistral", "falcon_h1", "qwen3_next", "lfm2", "deepseek_v32"]
)
@pytest.mark.parametrize("num_tokens", [49, 50])
def test_a_prompt_found_on_disk_gives_the_models_own_tokens(tmp_path, family, num_tokens):
    model = tiny_model(family)
    ids = torch.arange(100, 100 + num_tokens).unsqueeze(0)
    wanted = model.generate(ids, max_new_tokens=40, do_sample=False)
    for found in (0, 48):
        with (
            kvstow.Store(disk=tmp_path, disk_bytes="16MiB") as store,
            Cache(model, memory="8MiB", tokens=ids, store=store) as cache,
        ):
            assert cache.found_tokens == found
            cache.prefill(model, ids)
            got = model.generate(ids, past_key_values=cache, max_new_tokens=40, do_sample=False)
        assert torch.equal(got, wanted)


def test_chunks_of_a_prompt_leave_states_that_others_continue_from(tmp_path):
    model = tiny_model("falcon_h1")
    shared = torch.arange(100, 132)
    one, other = (torch.cat([shared, torch.arange(n, n + 9)]).unsqueeze(0) for n in (10, 40))
    for ids, found in ((one, 0), (other, 32)):
        with (
            kvstow.Store(disk=tmp_path, disk_bytes="16MiB") as store,
            Cache(ModelMemory.of(model, budget="8MiB"), tokens=ids, store=store) as cache,
        ):
            assert cache.found_tokens == found
            got = model.generate(
                ids,
                past_key_values=cache,
                max_new_tokens=20,
                do_sample=False,
                prefill_chunk_size=16,
            )
        assert torch.equal(got, model.generate(ids, max_new_tokens=20, do_sample=False))


@pytest.mark.parametrize("family", ["gemma3_text", "mistral"])
def test_what_a_window_left_behind_is_not_found_by_a_shorter_prompt(tmp_path, family):
    model = tiny_model(family)
    long = torch.arange(100, 150).unsqueeze(0)
    with (
        kvstow.Store(disk=tmp_path, disk_bytes="16MiB") as store,
        Cache(model, memory="8MiB", tokens=long, store=store) as cache,
    ):
        model.generate(long, past_key_values=cache, max_new_tokens=40, do_sample=False)
    memory = ModelMemory.of(model, budget="8MiB")  # a second process
    for ids in (long, *(long[:, :length] for length in range(17, 49, 4))):
        wanted = model.generate(ids, max_new_tokens=8, do_sample=False)
        with (
            kvstow.Store(disk=tmp_path, disk_bytes="16MiB") as store,
            Cache(memory, tokens=ids, store=store) as cache,
        ):
            got = model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False)
        assert torch.equal(got, wanted), ids.shape
