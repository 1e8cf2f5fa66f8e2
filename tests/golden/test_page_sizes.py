"""Page sizes of real models: published figures, ours where those are wrong, and every
catalogue model as it is today.

`page_sizes.json` holds, per catalogue model, how many layers of which page keep what.
It changes only on purpose: `python tests/golden/test_page_sizes.py` writes it anew.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from kvstow.plan.models import catalogue, model_layers
from kvstow.plan.retention import Full, State

GOLDEN = Path(__file__).with_name("page_sizes.json")
KIB, MIB = 1024, 1024 * 1024

# model, tp, tokens per block, bytes of one per-layer tensor, bytes of the packed row
PUBLISHED = [
    ("deepseek-r1-distill-qwen-32b", 2, 16, 16 * KIB, 2 * MIB),
    ("deepseek-v2-lite", 1, 64, 72 * KIB, 27 * 72 * KIB),
    ("llama-3.1-8b", 1, 16, 32 * KIB, 2 * MIB),
    ("llama-3.2-1b", 1, 16, 16 * KIB, MIB // 2),
    ("llama-3.1-70b", 4, 16, 8 * KIB, 5 * MIB // 4),
    ("mistral-7b-v0.2", 1, 16, 32 * KIB, 2 * MIB),
    ("mistral-small-24b", 1, 16, 32 * KIB, 5 * MIB // 2),
    ("qwen2.5-3b", 1, 16, 8 * KIB, 9 * MIB // 16),
    ("qwen3-0.6b", 1, 16, 32 * KIB, 7 * MIB // 4),
    ("qwen2.5-7b", 1, 16, 16 * KIB, 7 * MIB // 8),
    ("qwen3-4b", 1, 16, 32 * KIB, 9 * MIB // 4),
    ("qwen2.5-1.5b", 1, 16, 8 * KIB, 7 * MIB // 16),
    ("qwen3-1.7b", 1, 16, 32 * KIB, 7 * MIB // 4),
    ("qwen3-32b", 2, 16, 16 * KIB, 2 * MIB),
]


# Ours, from the released config.json: 36 layers of 8 kv heads of 128 elements. Published for
# this model are 28 KB and 1.97 MB, which is what 7 kv heads would take.
OURS = [("qwen3-8b", 1, 16, 32 * KIB, 9 * MIB // 4)]


@pytest.mark.parametrize(("name", "tp", "tokens", "tensor", "row"), PUBLISHED + OURS)
def test_sizes_per_tensor_and_per_row_come_out(
    name: str, tp: int, tokens: int, tensor: int, row: int
) -> None:
    layers = model_layers(name, tp=tp, tp_rank=tp - 1, block_tokens=tokens).layers
    assert {layer.page_bytes // layer.num_tensors for layer in layers} == {tensor}
    assert sum(layer.page_bytes for layer in layers) == row


def full_bytes(name: str) -> int:
    return sum(x.page_bytes for x in model_layers(name).layers if x.retention == Full())


def test_the_full_caches_of_v4_flash_make_1002240_bytes() -> None:
    assert full_bytes("deepseek-v4-flash") == 21 * (37_440 + 8_640) + 20 * 1_728 == 1_002_240


def test_the_full_caches_of_v4_pro_make_1435968_bytes() -> None:
    assert full_bytes("deepseek-v4-pro") == 30 * (37_440 + 8_640) + 31 * 1_728 == 1_435_968


def test_gpt_oss_20b_has_two_rows_of_393216_bytes() -> None:
    rows: Counter[object] = Counter()
    for layer in model_layers("gpt-oss-20b").layers:
        rows[layer.retention] += layer.page_bytes
    assert list(rows.values()) == [393_216, 393_216]


# What an engine that sizes attention blocks by the recurrent page plans: model, its tokens
# per block, their granularity there, bytes of one attention page.
INFLATED = [
    ("qwen3-next-80b", 544, 16, 13_369_344 // 12),
    ("jamba-mini", 128, 128, 2_097_152 // 4),
    ("falcon-h1-0.5b", 896, 128, 16_515_072 // 36),
    ("lfm2-350m", 128, 128, 1_572_864 // 6),
]


@pytest.mark.parametrize(("name", "tokens", "multiple", "page"), INFLATED)
def test_state_pages_explain_the_blocks_that_other_planners_inflate(
    name: str, tokens: int, multiple: int, page: int
) -> None:
    layers = model_layers(name, block_tokens=tokens).layers
    state = max(x.page_bytes for x in layers if x.retention == State())
    attention = {x.page_bytes for x in layers if x.retention == Full()}
    assert attention == {page}
    per_token = page // tokens
    assert -(-state // (per_token * multiple)) * multiple == tokens


def summary(name: str) -> dict[str, int]:
    """How many layers there are of each retention, tokens per block and page size."""
    layers = model_layers(name).layers
    counts = Counter(f"{x.retention} / {x.block_tokens} / {x.page_bytes}" for x in layers)
    return dict(sorted(counts.items()))


def test_every_catalogue_model_keeps_what_it_kept() -> None:
    golden = json.loads(GOLDEN.read_text("utf-8"))
    assert {name: summary(name) for name in catalogue()} == golden


if __name__ == "__main__":
    text = json.dumps({name: summary(name) for name in catalogue()}, indent=1)
    GOLDEN.write_text(text + "\n", "utf-8")
