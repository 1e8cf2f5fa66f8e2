"""`kvstow route`: what it prints, what it refuses."""

from functools import partial
from pathlib import Path

import pytest

from commands import document, invoke

route = partial(document, "route")


def test_the_stable_keys_are_there():
    found = route("llama-3.1-70b@tp=4", "llama-3.1-70b@tp=8,rank=3")
    assert found["lanes"] == 80
    assert found["moves_per_block"] == 80
    assert found["bytes_per_block"] == 80 * 16 * 2 * 128 * 2
    assert found["min_move_bytes"] == found["max_move_bytes"] == 16 * 2 * 128 * 2
    assert [(s["rank"], s["moves_per_block"]) for s in found["sources"]] == [(1, 80)]


@pytest.mark.parametrize("order", ["LBHNC", "BLNHC"])
def test_no_change_is_advised_that_needs_more_moves(order):
    """Slots cost no more for more moves: 2,048 of them looked quicker than 32 direct ones."""
    found = route(f"llama-3.1-8b@order={order}", "llama-3.1-8b@tp=2", "--link", "ib400")
    assert all(best["request_moves"] <= found["request"]["moves"] for best in found["cheapest"])


def test_the_time_is_moves_and_bytes_at_the_stated_rates():
    arguments = ("llama-3.1-8b@order=LBHNC", "llama-3.1-8b", "--tokens", "1024")
    found = route(*arguments, "--link", "10:2")
    assert found["request"] == {"tokens": 1024, "moves": 64 * 32, "bytes": 64 * 2 * 1024**2}
    expected = 64 * 32 * 2e-6 + 64 * 2 * 1024**2 / 10e9
    assert found["ways"]["direct"] == pytest.approx(expected)
    assert found["ways"]["slots"] == pytest.approx(64 * 2 * 1024**2 / 7e9)
    assert found["seconds"] == found["ways"][found["way"]]


GUIDE = "gpt-oss-20b", "gpt-oss-20b@block_tokens=64"


@pytest.mark.parametrize("link", ["ib400", "pcie5", "gpu"])
def test_no_change_is_advised_that_is_slower_by_the_way_an_agent_takes(link):
    """Direct reads alone would be four times as fast in another order; no agent takes them."""
    found = route(*GUIDE, "--link", link)
    assert found["way"] == ("slots" if link == "ib400" else "mapped")
    for best in found["cheapest"]:
        assert best["orders"] == found["orders"]
        assert best["saved_seconds"] == 0
    text = invoke("route", *GUIDE, "--link", link).stdout
    assert "no order is quicker than as given" in text
    assert text.count("no better order") == 3
    assert "saved" not in text


def test_manifests_are_read(tmp_path: Path):
    files = []
    for tp in ("1", "2"):
        file = tmp_path / f"tp{tp}.json"
        plan = ["plan", "gpt-oss-20b", "--tp", tp, "--num-slabs", "9", "--manifest", str(file)]
        assert invoke(*plan).exit_code == 0
        files.append(str(file))
    assert route(*files)["moves_per_block"] == 2 * 12
    assert route(files[1], files[0])["sources"][0]["tp_rank"] == 0


def test_the_report_fits_80_columns_and_says_what_was_assumed():
    result = invoke("route", "deepseek-v4-flash@tp=8", "deepseek-v4-flash@tp=4", "--link", "tcp10")
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "1.25 GB/s, 5 µs per" in " ".join(result.stdout.split())
    assert "rank 0 of 4" in result.stderr


def test_differences_end_with_1_and_are_all_named():
    result = invoke("route", "llama-3.1-8b", "llama-3.1-8b@kv_dtype=fp8")
    assert result.exit_code == 1
    assert "'k': dtype is bfloat16 in the source, float8_e4m3fn" in result.stderr
    assert "'v': dtype is bfloat16 in the source, float8_e4m3fn" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("llama-3.1-8b@tp=two", "llama-3.1-8b"), "tp=two is not a whole number"),
        (("llama-3.1-8b@tp=8,tp=4", "llama-3.1-8b"), "tp is given twice"),
        (("llama-3.1-8b@tp=" + "9" * 5000, "llama-3.1-8b"), "is not a whole number"),
        (("llama-3.1-8b@rank=5", "llama-3.1-8b"), "is 1 rank"),
        (("llama-3.1-8b@order=NHC", "llama-3.1-8b"), "is none of LBHNC"),
        (("llama-3.1-8b@colour=red", "llama-3.1-8b"), "colour=red is not a setting"),
        (("llama-3.1-8b@kv_dtype=foo", "llama-3.1-8b"), "'foo'"),
        (("no-such-model", "llama-3.1-8b"), "no model is called"),
        (("llama-3.1-8b", "llama-3.1-8b", "--link", "carrier-pigeon"), "is not a link"),
        (("llama-3.1-8b", "llama-3.1-8b", "--link", "-1:0"), "a rate above 0"),
    ],
)
def test_what_is_not_understood_ends_with_2(arguments, text):
    result = invoke("route", *arguments)
    assert result.exit_code == 2
    assert text in " ".join(result.stderr.split())


def test_a_broken_manifest_ends_with_2(tmp_path: Path):
    file = tmp_path / "broken.json"
    file.write_text('{"kvstow": 1}')
    result = invoke("route", str(file), "llama-3.1-8b")
    assert result.exit_code == 2
    assert "broken.json" in result.stderr


def test_orders_are_read_as_people_write_them():
    def orders(here: str, there: str) -> list[str]:
        return route(f"qwen3-0.6b@{here}", f"qwen3-0.6b@{there}")["orders"]

    assert orders("order=bhlnc", "order=NHD") == ["BHLNC", "BLNHC"]
    assert orders("order=HND", "order=nhd") == ["BLHNC", "BLNHC"]


def test_the_quickest_order_is_marked_with_the_time_that_it_saves():
    specs = ("llama-3.1-8b@tp=2", "llama-3.1-8b@tp=4")
    found = route(*specs)
    both = found["cheapest"][-1]
    assert both["request_moves"] == 8192 // 16  # one move per block instead of 32
    assert both["seconds"] == pytest.approx(found["seconds"] - both["saved_seconds"])
    lines = invoke("route", *specs).stdout.splitlines()
    (marked,) = [line for line in lines if line.endswith("ms ←")]
    assert marked.startswith("same order in both")
    assert any("less than as given" in line for line in lines)


def test_pieces_of_16_kib_go_through_slots_at_ib400_as_an_agent_takes_them():
    found = route("llama-3.1-8b@tp=4", "llama-3.1-8b@tp=2")
    assert (found["max_move_bytes"], found["way"]) == (16 << 10, "slots")
    assert found["cheapest"][-1]["saved_seconds"] / found["seconds"] == pytest.approx(
        0.27, abs=0.01
    )
