"""`kvstow store inspect|verify|prune URL`, as their users run them."""

import json

import pytest
from typer.testing import CliRunner

from kvstow.blocks.prompt import Prompt
from kvstow.cli import app
from kvstow.offload.journal import Journal
from kvstow.offload.keys import block_keys
from kvstow.offload.remote import collect as collecting
from kvstow.offload.remote.client import Blob, open_client, whole_objects
from kvstow.offload.remote.directory import WriterLayout
from kvstow.offload.store import Store
from kvstow.plan.identity import Identity
from offloading import IDENTITY
from remote_stores import PROMPT, filled, layout_of


@pytest.fixture
def url(listing_url):
    """Mooncake cannot list its objects."""
    return listing_url


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def saved(url, layout, prompt=PROMPT):
    arena, blocks = filled(layout)
    with Store(remote=url) as store:
        count = store.save(arena, blocks, prompt)
        assert store.flush(20)
    return count


@pytest.fixture
def rows(url):
    """Two ranks' rows of one tenant."""
    return sum(saved(url, layout_of(tp=(rank, 2))) for rank in range(2))


def test_inspect_counts_rows_by_layout_and_tenant(url, rows):
    saved(f"{url}&tenant=acme", layout_of())
    found = json.loads(run("store", "inspect", url, "--json").stdout)
    assert found["rows"] == sum(one["rows"] for one in found["layouts"])
    assert set(found["tenants"]) == {"acme", "shared"}
    mine = [one for one in found["layouts"] if one["tenant"] == "shared"]
    assert sum(one["rows"] for one in mine) == rows
    assert sorted(one["tp"] for one in mine) == [[0, 2], [1, 2]]
    assert {one["identity"] for one in mine} == {IDENTITY.digest.hex()[:32]}
    prints = {WriterLayout.of(layout_of(tp=(rank, 2))).fingerprint for rank in range(2)}
    assert {one["fingerprint"] for one in mine} == prints
    assert mine[0]["block_tokens"] == {"full": 4, "window8": 4, "state": 4}
    text = run("store", "inspect", url)
    assert text.exit_code == 0
    assert "0 of 2" in text.stdout
    assert "secret" not in text.stdout


def test_an_empty_store_is_inspected_and_verified(url):
    assert json.loads(run("store", "inspect", url, "--json").stdout)["rows"] == 0
    assert run("store", "inspect", url).exit_code == 0
    assert run("store", "verify", url).exit_code == 0


def test_a_bucket_that_is_not_there_is_an_error_that_says_so(s3_url):
    missing = s3_url.replace("//kvstow-rows/", "//nobody-made-this/")
    for command in ("inspect", "verify"):
        done = run("store", command, missing)
        assert done.exit_code == 1
        assert "there is no such bucket" in done.output


def test_verify_finds_a_flipped_bit_and_removes_the_row(url, rows):
    done = run("store", "verify", url, "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["rows"] == rows
    client, _ = open_client(url)
    victim = next(collecting.rows_in(client)).facts.name
    blob = whole_objects(client, [victim], 1 << 20)[0].copy()
    blob[-1] ^= 1
    client.delete([victim])
    client.put([Blob(victim, blob)])
    done = run("store", "verify", url, "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["damaged"] == [{"name": victim, "reason": "damaged"}]
    assert not client.exists([victim]).any()
    assert run("store", "verify", url).exit_code == 0
    client.close()


def test_prune_removes_rows_and_leaves_the_count(url, rows, monkeypatch):
    done = json.loads(run("store", "prune", url, "--to", "1MB", "--json").stdout)
    assert done["rows"] == 0
    monkeypatch.setattr(collecting, "YOUNG_SECONDS", -60.0)  # the server's clock may be ahead
    done = json.loads(run("store", "prune", url, "--to", "4KiB", "--json").stdout)
    assert 0 < done["rows"] < rows
    assert done["bytes_after"] <= 4096 < done["bytes_before"]
    assert done["tenants"] == {"shared": done["bytes_after"]}
    done = json.loads(run("store", "prune", url, "--tenant-to", "1KiB", "--json").stdout)
    assert done["bytes_after"] <= 1024
    assert "rows dropped" in run("store", "prune", url, "--older-than", "7d").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inspect", "ftp://host/x"), "not a store URL"),
        (("verify", "s3://b/p?what=1"), "no option 'what'"),
        (("prune", "redis://h:1/0", "--older-than", "soon"), "is not an age"),
        (
            (
                "prune",
                ".",
            ),
            "--to SIZE",
        ),
        (("prune", ".", "--to", "1GiB", "--older-than", "7d"), "--to SIZE"),
    ],
)
def test_what_cannot_be_understood_ends_with_2(arguments, message):
    done = run("store", *arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())


def test_a_store_that_does_not_answer_ends_with_1():
    done = run("store", "inspect", "redis://127.0.0.1:1/0")
    assert done.exit_code == 1
    assert "127.0.0.1:1" in done.stderr


# ── why ───────────────────────────────────────────────────────────────────────────────


PLAIN = Prompt.of(PROMPT.tokens)
"""Without a salt, as the command line names a prompt."""


def why(url, tokens, *more):
    return run("why", url, "--tokens", tokens, "--json", *more)


def test_why_says_where_reuse_ends_in_a_remote_store(url, tmp_path):
    saved(url, layout_of(), PLAIN)
    Journal(tmp_path).note(PLAIN, IDENTITY, 4)
    tokens = PLAIN.tokens.tolist()
    assert json.loads(why(url, tokens).stdout)["reason"] == "found"
    salted = json.loads(why(url, tokens, "--journal", tmp_path, "--salt", "me").stdout)
    assert (salted["reason"], salted["found_tokens"]) == ("salt", 0)
    assert json.loads(why(url, tokens, "--salt", "me").stdout)["reason"] == "unknown"
    assert "no journal" in json.loads(why(url, tokens, "--salt", "me").stdout)["text"]


def test_a_store_without_a_disk_notes_prompts_where_it_is_told(url, tmp_path):
    arena, blocks = filled(layout_of())
    with Store(remote=url, journal_path=tmp_path / "noted") as store:
        assert store.save(arena, blocks, PLAIN) > 0
        assert store.flush(20)
        assert store.remote.evict(0, block_keys(IDENTITY, PLAIN, 4)) == 6
        assert store.why(PLAIN).reason == "evicted"
        assert store.why(Prompt.of([5, 5, 5, 5])).reason == "never stored"
    tokens = PLAIN.tokens.tolist()
    said = json.loads(why(url, tokens, "--journal", tmp_path / "noted").stdout)
    assert said["reason"] == "evicted"
    with Store(remote=url).bind(layout_of()) as store:
        unknown = store.why(PLAIN)
        assert unknown.reason == "unknown"
        assert "there is no journal" in unknown.text


def test_why_asks_which_computation_is_meant_where_several_have_written(url, tmp_path):
    assert why(url, [1]).exit_code == 2
    saved(url, layout_of(), PLAIN)
    other = Identity(model="other", weights="ef" * 16)
    saved(url, layout_of(identity=other), PLAIN)
    refused = why(url, PLAIN.tokens.tolist())
    assert refused.exit_code == 2
    assert "2 computations" in refused.stderr
    assert f"{other.digest.hex()[:8]} " in refused.stderr
    chosen = why(url, PLAIN.tokens.tolist(), "--identity", other.digest.hex()[:8])
    assert json.loads(chosen.stdout)["reason"] == "found"
