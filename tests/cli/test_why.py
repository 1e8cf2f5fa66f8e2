"""`kvstow why`, run on a store that another process has made."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kvstow.blocks.ledger import Ledger
from kvstow.blocks.pool import Pool
from kvstow.blocks.prompt import Prompt
from kvstow.cli import app
from kvstow.memory.arena import Arena
from kvstow.offload.store import Store
from kvstow.plan.group import grouped
from kvstow.plan.pack import packed
from kvstow.plan.retention import Full
from offloading import IDENTITY, layer

TOKENS = list(range(300, 316))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    layout = packed(grouped([layer("l.0", Full())]), num_slabs=20).identified(IDENTITY)
    arena, ledger = Arena(layout), Ledger(Pool(layout))
    with Store(disk=tmp_path / "kv", disk_bytes="2MiB", journal="tokens") as made:
        made.save(arena, ledger.blocks(ledger.admit(16).request), Prompt.of(np.array(TOKENS)))
    return tmp_path / "kv"


def why(*arguments: object, stdin: str | None = None):
    return CliRunner().invoke(app, ["why", *map(str, arguments)], input=stdin)


def test_the_first_differing_token_is_said_and_printed_as_json(store: Path, tmp_path: Path):
    asked = [*TOKENS[:10], 7, *TOKENS[11:]]
    result = why(store, "--tokens", json.dumps(asked))
    assert result.exit_code == 0
    assert "8 of 16 tokens are found: differs" in result.stdout
    assert "token 10 is 7, and 310" in result.stdout
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(asked))
    for given, stdin in ((file, None), ("-", json.dumps(asked))):
        found = json.loads(why(store, "--tokens", given, "--json", stdin=stdin).stdout)
        assert (found["reason"], found["token"], found["found_tokens"]) == ("differs", 10, 8)
        assert (found["stored_token"], found["asked_token"]) == (310, 7)


def test_salt_and_adapter_of_the_request_are_compared(store: Path):
    found = json.loads(why(store, "--tokens", TOKENS, "--salt", "me", "--json").stdout)
    assert found["reason"] == "salt"
    found = json.loads(why(store, "--tokens", TOKENS, "--adapter", "poems", "--json").stdout)
    assert found["differences"] == [{"field": "adapter", "stored": "", "asked": "poems"}]


def test_text_is_tokenized_by_the_models_own_tokenizer(store: Path, tmp_path: Path):
    words = {f"w{i}": i for i in range(300, 316)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w300"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    result = why(store, "--text", " ".join(words), "--tokenizer", tmp_path)
    assert "16 of 16 tokens are found: found" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give the prompt once"),
        (["--tokens", "[1]", "--text", "x"], "give the prompt once"),
        (["--tokens", "{}"], "cannot be read"),
        (["--tokens", "/no/such/file"], "cannot be read"),
        (["--tokens", '["a"]'], "whole numbers"),
        (["--tokens", "[[1]]"], "whole numbers"),
        (["--tokens", "[-1]"], "not all in"),
        (["--text", "x"], "--tokenizer"),
        (["--text", "x", "--tokenizer", "/no"], "no such file"),
    ],
)
def test_a_prompt_that_is_not_one_is_refused(store: Path, arguments: list[str], said: str):
    result = why(store, *arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_directory_without_a_store_is_refused(tmp_path: Path):
    result = why(tmp_path, "--tokens", "[1]")
    assert result.exit_code == 2
    assert "no store there" in result.stderr
