"""`kvstow models`: what is known by name, and what is near to a name that is not."""

import json

import pytest
from typer.testing import CliRunner, Result

from kvstow.cli import app
from kvstow.plan.models import catalogue

KEYS = {"name", "aliases", "family", "layers", "kv_bytes_per_token", "fixed_bytes", "context"}


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["models", *arguments])


def found(*words: str) -> dict[str, dict]:
    result = invoke(*words, "--json")
    assert result.exit_code == 0, result.stderr
    return {model["name"]: model for model in json.loads(result.stdout)["models"]}


def test_every_model_of_the_catalogue_is_listed_once_within_80_columns():
    shown = found()
    assert tuple(shown) == catalogue()
    assert all(model.keys() >= KEYS for model in shown.values())
    text = invoke().stdout
    assert max(map(len, text.splitlines())) <= 80
    assert all(f"\n{name} " in text for name in catalogue())


def test_a_token_costs_keys_and_values_of_every_layer_that_keeps_it():
    shown = found()
    assert shown["llama-3.1-8b"]["kv_bytes_per_token"] == 32 * 2 * 8 * 128 * 2
    assert shown["deepseek-v3"]["kv_bytes_per_token"] == 61 * (512 + 64) * 2
    assert shown["gpt-oss-20b"]["kv_bytes_per_token"] == 12 * 2 * 8 * 64 * 2
    assert shown["gpt-oss-20b"]["fixed_bytes"] == 9 * 16 * 12 * 2 * 8 * 64 * 2
    assert shown["mistral-7b-v0.1"]["kv_bytes_per_token"] == 0
    assert shown["llama-3.1-8b"]["context"] == 131072


def test_words_filter_by_name_alias_and_family_and_all_of_them_have_to_be_there():
    assert set(found("qwen3_MOE")) == {"qwen3-30b-a3b", "qwen3-235b-a22b"}
    assert set(found("llama", "70b")) == {"llama-3.1-70b", "llama-3.3-70b"}
    assert set(found("deepseek-r1")) == {"deepseek-r1-distill-qwen-32b", "deepseek-v3"}


@pytest.mark.parametrize("command", ["models", "plan", "compare"])
def test_a_name_that_is_not_known_is_answered_with_those_that_are_near(command):
    result = CliRunner().invoke(app, [command, "gpt4"])
    assert result.exit_code == (1 if command == "models" else 2)
    assert result.stdout == ""
    assert "did you mean gpt-oss-20b, gpt-oss-120b?" in result.stderr


def test_nothing_near_is_suggested_for_a_name_that_is_like_no_other():
    result = invoke("qqqqqqqqqq")
    assert result.exit_code == 1
    assert "did you mean" not in result.stderr
    assert "hint: kvstow models, without a word, lists all" in result.stderr
