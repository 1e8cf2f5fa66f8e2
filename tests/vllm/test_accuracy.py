"""lm-eval gives prefill and decode, behind our router, the score that it gives one engine.

A local task (`questions.py`), real weights, greedy answers. Every answer is compared, not only the
score: two engines could be wrong in different questions. `KVSTOW_VLLM_ACCURACY` names a file for
the scores.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machine import machine
from questions import questions, write
from serving import Launch, Server, running
from test_router import router
from vllm_engines import versions

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]

AT_ONCE = 4


@pytest.fixture(scope="module")
def servers(smollm2: Path, logs: Path) -> Iterator[list[Server]]:
    """A prefill and a decode server. The first one alone is the one engine."""
    launch = Launch(model=smollm2, name="smollm2", settings={"digest": "always"})
    with running(launch, launch, logs=logs) as made:
        yield made


def evaluated(url: str, task: Path) -> tuple[float, list[str]]:
    """The score that lm-eval gives whoever answers there, and the answers in the task's order."""
    from lm_eval import simple_evaluate

    config = {
        "task": "questions",
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(task)},
            "cache_dir": str(task.parent / "datasets"),
        },
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "temperature": 0},
        "filter_list": [
            {
                "name": "stripped",
                "filter": [
                    {"function": "regex", "regex_pattern": r"^\s*(.*?)[\s.]*$"},
                    {"function": "take_first"},
                ],
            }
        ],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    result: dict[str, Any] = simple_evaluate(
        model="local-completions",
        model_args={
            "model": "smollm2",
            "base_url": f"{url}/v1/completions",
            "tokenizer_backend": None,
            "num_concurrent": AT_ONCE,
            "max_retries": 1,
            "timeout": 600,
        },
        tasks=[config],
        bootstrap_iters=0,
    )
    samples = sorted(result["samples"]["questions"], key=lambda each: each["doc_id"])
    answers = [each["resps"][0][0] for each in samples]
    return result["results"]["questions"]["exact_match,stripped"], answers


def test_lm_eval_gives_prefill_and_decode_the_score_of_one_engine(
    servers: list[Server], logs: Path, tmp_path: Path
):
    task = write(tmp_path / "questions.jsonl")
    count = len(questions())
    prefill, decode = servers
    alone, answers = evaluated(prefill.url, task)
    assert 0.2 < alone < 0.95, "the questions are too hard or too easy to show anything"
    before = decode.counts().get("pulls accepted", 0)
    with router(logs, [prefill.url], [decode.url]) as url:
        apart, same = evaluated(url, task)
    assert same == answers
    assert apart == alone
    assert decode.await_count("pulls accepted", before + count) == before + count
    if file := os.environ.get("KVSTOW_VLLM_ACCURACY"):
        scores = {"questions": count, "one engine": alone, "prefill and decode": apart}
        document = {"machine": machine(), "versions": versions(), **scores}
        Path(file).write_text(json.dumps(document, indent=1) + "\n")
