"""Tiny models of tests: their text tells whether a cache was right."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import checkpoint
from vllm_engines import MODELS, SMALL, Prompts

pytestmark = pytest.mark.vllm

LENGTH, BLOCK = 300, 32


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS.keys())
def test_a_text_depends_on_every_block_of_the_prompt(tmp_path: Path, config: dict[str, Any]):
    from transformers import AutoModelForCausalLM

    folder = checkpoint(tmp_path, config)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def text(prompt: list[int]) -> list[int]:
        made = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
        return made[0, LENGTH:].tolist()

    draw = Prompts(SMALL["vocab_size"])
    prompt = draw(LENGTH)
    whole = text(prompt)
    assert len(set(whole)) > 6, "it repeats itself"
    for first in range(0, LENGTH - BLOCK, BLOCK):
        changed = [*prompt[:first], *draw(BLOCK), *prompt[first + BLOCK :]]
        assert text(changed) != whole, first
