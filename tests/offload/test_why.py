"""Why a prompt is not found: every reason, from what a real store on disk and its journal say."""

import json
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import checkpoint
from kvstow.blocks.ledger import Ledger
from kvstow.blocks.pool import Pool
from kvstow.blocks.prompt import Prompt
from kvstow.errors import StoreError
from kvstow.memory.arena import Arena
from kvstow.offload.journal import FILE, Journal
from kvstow.offload.store import JournalKind, Store
from kvstow.offload.why import compared_identity
from kvstow.plan.group import grouped
from kvstow.plan.identity import Identity
from kvstow.plan.pack import packed
from kvstow.plan.retention import Full, Window
from offloading import IDENTITY, layer

LAYOUT = packed(grouped([layer("l.0", Full()), layer("l.1", Window(8))]), num_slabs=40).identified(
    IDENTITY
)
TOKENS = np.random.default_rng(3).integers(0, 50_000, 22)


def opened(path: Path, journal: JournalKind = "digests") -> Store:
    return Store(disk=path, disk_bytes="2MiB", journal=journal).bind(LAYOUT)


def saved(store: Store, tokens: np.ndarray, identity: Identity | None = None) -> None:
    prompt = Prompt.of(tokens)
    arena, ledger = Arena(LAYOUT), Ledger(Pool(LAYOUT))
    blocks = ledger.blocks(ledger.admit(len(prompt)).request)
    store.save(arena, blocks, prompt, identity=identity)


def changed(at: int) -> np.ndarray:
    other = TOKENS.copy()
    other[at] += 1
    return other


def test_a_prompt_that_is_stored_is_found(tmp_path: Path):
    with opened(tmp_path) as store:
        saved(store, TOKENS)
        found = store.why(Prompt.of(TOKENS))
        longer = store.why(Prompt.of([*TOKENS, 7]))
    assert (found.reason, found.found_tokens, found.num_tokens) == ("found", 22, 22)
    assert found.text == "all 22 tokens are stored"
    assert (longer.found_tokens, longer.text) == (20, "all 20 tokens in whole blocks are stored")


@pytest.mark.parametrize("at", [0, 3, 4, 9, 19])
def test_the_first_differing_token_is_named_where_tokens_are_kept(tmp_path: Path, at: int):
    with opened(tmp_path, "tokens") as store:
        saved(store, TOKENS)
        if at:
            saved(store, np.random.default_rng(9).integers(0, 50_000, 22))
        found = store.why(Prompt.of(changed(at)))
    assert (found.reason, found.token, found.token_before) == ("differs", at, at + 1)
    assert (found.stored_token, found.asked_token) == (int(TOKENS[at]), int(TOKENS[at]) + 1)
    assert f"token {at} is {int(TOKENS[at]) + 1}, and {int(TOKENS[at])}" in found.text


@pytest.mark.parametrize("at", [4, 9, 19])
def test_without_tokens_the_block_is_named_in_which_one_differs(tmp_path: Path, at: int):
    with opened(tmp_path) as store:
        saved(store, TOKENS)
        found = store.why(Prompt.of(changed(at)))
    block = at // 4 * 4
    assert (found.reason, found.token, found.token_before) == ("differs", block, block + 4)
    assert found.stored_token is None


def test_a_prompt_that_goes_on_where_the_stored_one_ends(tmp_path: Path):
    longer = np.concatenate((TOKENS[:20], np.arange(20)))
    with opened(tmp_path) as store:
        saved(store, TOKENS[:20])
        found = store.why(Prompt.of(longer))
    assert (found.reason, found.found_tokens) == ("never stored", 20)
    assert "ends after 20 tokens" in found.text


def test_rows_that_are_gone_were_evicted(tmp_path: Path):
    with opened(tmp_path) as store:
        saved(store, TOKENS)
        assert store.disk is not None
        store.disk.prune(0)
        found = store.why(Prompt.of(TOKENS))
    assert (found.reason, found.found_tokens) == ("evicted", 0)
    assert found.stored_at is not None
    assert abs(found.stored_at - time.time()) < 3600


def test_another_salt_is_named_by_digests_and_never_itself(tmp_path: Path):
    with opened(tmp_path) as store:
        saved(store, TOKENS, IDENTITY.for_request(salt="tenant-one-secret"))
        found = store.why(Prompt.of(TOKENS), IDENTITY.for_request(salt="tenant-two-secret"))
        plain = store.why(Prompt.of(TOKENS))
    assert (found.reason, plain.reason) == ("salt", "salt")
    ((name, stored, asked),) = found.differences
    assert name == "salt"
    assert stored != asked
    assert "secret" not in json.dumps(found.as_json())
    assert ("salt", stored, "") == plain.differences[0]


def test_another_adapter_is_named_with_both(tmp_path: Path):
    with opened(tmp_path) as store:
        saved(store, TOKENS, IDENTITY.for_request(adapter="poems 01"))
        found = store.why(Prompt.of(TOKENS), IDENTITY.for_request(adapter="prose 02"))
    assert found.reason == "adapter"
    assert found.differences == (("adapter", "poems 01", "prose 02"),)


def test_a_field_of_the_identity_is_named_with_both_values(tmp_path: Path):
    other = Identity(
        model=IDENTITY.model, weights=IDENTITY.weights, config=(("rope_theta", "500000"),)
    )
    with opened(tmp_path) as store:
        saved(store, TOKENS)
        found = store.why(Prompt.of(TOKENS), other)
    assert found.reason == "identity"
    assert found.differences == (("config rope_theta", "10000", "500000"),)
    assert "config rope_theta is '10000' there, '500000' here" in found.text


def test_too_few_tokens_fill_no_block(tmp_path: Path):
    with opened(tmp_path) as store:
        saved(store, TOKENS)
        assert store.why(Prompt.of(TOKENS[:3])).reason == "short"


def test_without_a_journal_nobody_knows(tmp_path: Path):
    with opened(tmp_path, "off") as store:
        saved(store, TOKENS)
        found = store.why(Prompt.of(changed(9)))
    assert (found.reason, found.found_tokens) == ("unknown", 8)
    assert not (tmp_path / FILE).exists()


def test_a_load_says_why_at_debug_level(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with opened(tmp_path) as store, caplog.at_level(logging.DEBUG, "kvstow.offload"):
        saved(store, TOKENS)
        arena, ledger = Arena(LAYOUT), Ledger(Pool(LAYOUT))
        blocks = ledger.blocks(ledger.admit(22).request)
        store.load(arena, Prompt.of(changed(9)), into=blocks)
    assert "prompt of 22 tokens: a token in [8, 12) differs" in caplog.text


# ── the journal ───────────────────────────────────────────────────────────────────────


def noted(path: Path, what: str) -> list[Any]:
    lines = (path / FILE).read_text().splitlines()
    return [json.loads(line)[what] for line in lines if line]


def test_no_tokens_are_kept_unless_the_user_wants_them(tmp_path: Path):
    for kind, name in (("digests", "a"), ("tokens", "b")):
        with opened(tmp_path / name, kind) as store:  # pyright: ignore[reportArgumentType]
            saved(store, TOKENS)
    assert noted(tmp_path / "a", "tokens") == [None]
    assert noted(tmp_path / "b", "tokens") == [TOKENS.tolist()]
    text = (tmp_path / "a" / FILE).read_text()
    assert not any(str(token) in text for token in TOKENS.tolist() if token > 9999)


def test_a_journal_beside_no_store_is_closed_to_other_users(tmp_path: Path):
    old = os.umask(0)
    try:
        Journal(tmp_path / "j", tokens=True).note(Prompt.of(TOKENS), IDENTITY, 4)
    finally:
        os.umask(old)
    files = [tmp_path / "j", *(tmp_path / "j").iterdir()]
    assert len(files) == 2
    assert [file.name for file in files if file.stat().st_mode & 0o077] == []


def test_equal_prompts_have_other_digests_in_another_journal(tmp_path: Path):
    for name in "ab":
        Journal(tmp_path / name).note(Prompt.of(TOKENS), IDENTITY, 4)
    assert noted(tmp_path / "a", "digests") != noted(tmp_path / "b", "digests")


def test_of_prompts_that_share_as_much_the_longest_one_is_compared(tmp_path: Path):
    journal = Journal(tmp_path)
    for end in (22, 4, 21, 8):
        journal.note(Prompt.of(TOKENS[:end]), IDENTITY, 4)
    alike = journal.alike(Prompt.of(changed(7)))
    assert [(each.shared_tokens, each.num_tokens) for each in alike] == [
        (4, 20),
        (4, 20),
        (4, 8),
        (4, 4),
    ]


def test_a_journal_is_bounded_and_forgets_the_oldest_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("kvstow.offload.journal.MOST_BYTES", 4096)
    prompts = [Prompt.of(np.random.default_rng(n).integers(0, 9, 8)) for n in range(100)]
    for prompt in prompts:
        Journal(tmp_path).note(prompt, IDENTITY, 4)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 3 * 4096
    recorded = [bool(Journal(tmp_path).alike(prompt)) for prompt in prompts]
    assert recorded[-4:] == [True] * 4  # in both files
    assert not all(recorded)


def test_several_processes_make_one_journal(tmp_path: Path):
    def note(number: int) -> None:
        Journal(tmp_path).note(Prompt.of([*TOKENS[:20], number] * 4), IDENTITY, 4)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(note, range(40)))
    assert len(noted(tmp_path, "at")) == 40
    assert len(Journal(tmp_path).alike(Prompt.of(TOKENS))) == 40


@pytest.mark.parametrize("torn", [b"", b"\n", b'\n{"at": 1', b"\0" * 50, b"something else" * 100])
def test_a_line_that_was_torn_harms_none_after_it(tmp_path: Path, torn: bytes):
    (tmp_path / FILE).touch(0o600)
    (tmp_path / FILE).write_bytes(torn)
    assert Journal(tmp_path).alike(Prompt.of(TOKENS)) == []
    for _ in range(2):
        Journal(tmp_path).note(Prompt.of(TOKENS), IDENTITY, 4)
    assert len(Journal(tmp_path).alike(Prompt.of(TOKENS))) == 2
    assert [file.name for file in tmp_path.iterdir()] == [FILE]


def test_a_line_that_was_torn_is_skipped(tmp_path: Path):
    journal = Journal(tmp_path)
    for _ in range(2):
        journal.note(Prompt.of(TOKENS), IDENTITY, 4)
        with (tmp_path / FILE).open("ab") as file:
            file.write(b'{"at": 1, "ident\xff\n[]\n{}\n')
    assert [each.shared_tokens for each in journal.alike(Prompt.of(TOKENS))] == [20, 20]


def test_a_journal_that_cannot_be_written_harms_no_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with opened(tmp_path) as store:
        (tmp_path / FILE).mkdir()
        saved(store, TOKENS)
        saved(store, TOKENS)
        assert store.stored_tokens(Prompt.of(TOKENS)) == 22
        with pytest.raises(StoreError, match="cannot be read"):
            store.why(Prompt.of(changed(9)))
    assert caplog.text.count("stored prompts are not recorded") == 1


def test_a_model_in_memory_and_a_checkpoint_are_compared_as_far_as_they_can_be(tmp_path: Path):
    tensors = [("w", "f32 [2]", b"12345678")]
    config = {"rope_theta": 10000.0, "hidden_size": 64, "only_in_memory": True}
    stored = Identity.of_tensors("m", config, tensors)
    files = Identity.of(checkpoint(tmp_path, config={"rope_theta": 10000, "hidden_size": 64}))
    same, note = compared_identity(stored, files)
    assert same == stored
    assert note.startswith("a model in memory filled this store: its weights, code and tokenizer")
    assert "2 fields of the configuration were compared" in note
    other = Identity.of(checkpoint(tmp_path, config={"rope_theta": 5e5, "hidden_size": 64}))
    (difference,) = stored.differences(compared_identity(stored, other)[0])
    assert difference.startswith("config rope_theta is '10000.0' in the source, '500000.0'")
    unverified = Identity.unverified("both run the same image", model="m")
    assert compared_identity(unverified, files)[0] == unverified
    assert "(both run the same image)" in compared_identity(unverified, files)[1]


def test_checkpoints_are_compared_wholly_but_for_how_an_engine_runs_them(tmp_path: Path):
    files = Identity.of(checkpoint(tmp_path))
    run = (("run.dtype", '"float32"'),)
    stored = replace(files, config=tuple(sorted((*files.config, *run))))
    assert compared_identity(stored, files) == (stored, "")
    other = Identity.of(checkpoint(tmp_path, seed=2))
    assert compared_identity(stored, other)[0].weights == other.weights
