"""`kvstow compare`: every order and packing of one model."""

import json
import re
from functools import partial
from itertools import product

import pytest

from commands import document, invoke
from kvstow.plan.models import catalogue

ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
PACKINGS = ("slab", "union", "separate")


compare = partial(document, "compare")


def by_choice(document: dict) -> dict[tuple[str, str], dict]:
    return {(layout["order"], layout["packing"]): layout for layout in document["layouts"]}


def test_every_order_and_packing_is_there_once():
    document = compare("gpt-oss-20b")
    assert len(document["layouts"]) == 18
    assert by_choice(document).keys() == set(product(ORDERS, PACKINGS))


def test_each_layout_has_the_figures_that_plan_gives_for_it():
    layouts = by_choice(compare("deepseek-v4-flash", "--memory", "60GiB"))
    for order, packing in (("BLHNC", "slab"), ("BHLNC", "union"), ("LBHNC", "separate")):
        options = ("--order", order, "--packing", packing, "--memory", "60GiB")
        planned = json.loads(invoke("plan", "deepseek-v4-flash", *options, "--json").stdout)
        layout = layouts[order, packing]
        assert layout["slab_bytes"] == planned["slab_bytes"]
        assert layout["num_slabs"] == planned["num_slabs"]
        assert layout["requests"]["8192"] == planned["capacity"]["requests"]["8192"]
        assert layout["bytes_per_token"] == planned["request"]["bytes_per_token"]
        assert layout["descriptors_per_block"] == planned["transfer"]["descriptors_per_block"]


def test_a_layout_that_cannot_be_says_why_beside_those_that_can():
    document = compare("deepseek-v4-flash", "--memory", "10MB")
    refused = [layout for layout in document["layouts"] if layout["error"] is not None]
    assert {layout["packing"] for layout in refused} == {"separate"}
    assert all("10,000,000 bytes" in layout["error"] for layout in refused)
    text = invoke("compare", "deepseek-v4-flash", "--memory", "10MB")
    assert text.exit_code == 0
    assert "a budget of 10,000,000" in " ".join(text.stdout.split())
    assert text.stdout.count("at least 2 are") == 1  # one reason, for all that it bars
    assert max(map(len, text.stdout.splitlines())) <= 80


def test_when_nothing_can_be_the_exit_code_is_1():
    result = invoke("compare", "deepseek-v4-flash", "--memory", "1MB")
    assert result.exit_code == 1
    assert "error: no layout is possible" in result.stderr
    assert "hint:" in result.stderr


@pytest.mark.parametrize("name", catalogue())
def test_the_table_of_every_catalogue_model_fits_80_columns(name):
    result = invoke("compare", name, "--memory", "640GiB")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line for line in lines if line.split() and line.split()[0] in ORDERS]
    assert len(rows) == len({line.rstrip(" ←") for line in rows}) <= 18


def test_rows_that_differ_only_in_order_or_packing_are_one_and_the_best_is_marked():
    lines = invoke("compare", "deepseek-v4-flash", "--memory", "60GiB").stdout.splitlines()
    rows = [line for line in lines if line.startswith(ORDERS)]
    assert len(rows) == 5
    (best,) = [line for line in rows if "←" in line]
    assert best.startswith("BLHNC BLNHC BHLNC   slab")
    document = compare("deepseek-v4-flash", "--memory", "60GiB")
    marked = {(each["order"], each["packing"]) for each in document["layouts"] if each["best"]}
    assert marked == {(order, "slab") for order in ("BLHNC", "BLNHC", "BHLNC")}


def test_where_packing_makes_no_difference_any_of_them_is_one_row():
    lines = invoke("compare", "llama-3.1-8b", "--memory", "20GiB").stdout.splitlines()
    rows = [line.split("  ")[0] for line in lines if "any" in line]
    assert rows == ["BLHNC BLNHC BHLNC", "LBHNC LBNHC", "LHBNC"]


def test_a_split_that_cannot_be_is_named_once_with_its_reason():
    done = invoke("compare", "llama-3.1-8b", "--memory", "20GiB", "--tp", "1,3")
    assert done.stdout.count("32 attention heads cannot be split") == 1
    assert "tp 3: 32 attention heads" in done.stdout


def test_several_values_are_all_compared():
    document = compare(
        "llama-3.1-8b",
        "--tp",
        "1,2",
        "--block-tokens",
        "16,64",
        "--kv-dtype",
        "fp8,bf16",
        "--order",
        "hnd,lbhnc",
        "--packing",
        "slab",
        "--memory",
        "20G",
    )
    asked = [
        tuple(each[name] for name in ("tp", "block_tokens", "kv_dtype", "order"))
        for each in document["layouts"]
    ]
    assert asked == list(product((1, 2), (16, 64), ("fp8", "bf16"), ("BLHNC", "LBHNC")))
    by_asked = dict(zip(asked, document["layouts"], strict=True))
    half, whole = by_asked[1, 16, "fp8", "BLHNC"], by_asked[1, 16, "bf16", "BLHNC"]
    assert 2 * half["slab_bytes"] == whole["slab_bytes"] == 2 * 2**20


def test_a_split_that_cannot_be_bars_its_own_lines_only():
    document = compare("llama-3.1-8b", "--tp", "3,2", "--memory", "20G")
    assert document["tp"] == 2
    for layout in document["layouts"]:
        assert (layout["error"] is not None) == (layout["tp"] == 3)
    text = invoke("compare", "llama-3.1-8b", "--tp", "3,2", "--memory", "20G").stdout
    assert text.count("cannot be split") == 1
    assert max(map(len, text.splitlines())) <= 80


def test_requests_are_those_of_the_limiting_rank():
    layouts = by_choice(compare("llama-3.1-8b", "--pp", "5", "--memory", "16GiB"))
    planned = json.loads(
        invoke("plan", "llama-3.1-8b", "--pp", "5", "--memory", "16GiB", "--json").stdout
    )
    assert layouts["BLHNC", "slab"]["requests"]["8192"] == planned["capacity"]["requests"]["8192"]


def test_the_page_has_the_lines_of_the_table(tmp_path):
    page = tmp_path / "a.html"
    document = compare("gpt-oss-20b", "--html", str(page), "--memory", "1G")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)[1])
    assert data["layouts"] == document["layouts"]
    lines = [
        (order, packing)
        for line in data["lines"]
        for order in line["orders"]
        for packing in line["packings"]
    ]
    assert sorted(lines) == sorted(by_choice(document))
    assert "layouts compared" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tp", "0"], ["tp is 0", "65536"]),
        (["--tp", "1,x"], ["--tp"]),
        (["--tp", "1,1000000"], ["tp is 1000000", "65536"]),
        (["--tp", "1,65536", "--pp", "2"], ["131072"]),
        (["--block-tokens", "16,2000000"], ["block_tokens is 2000000", "1048576"]),
        (["--block-tokens", "1e3"], ["--block-tokens"]),
        (["--order", "BLHN"], ["--order", "HND"]),
        (["--packing", "loose"], ["--packing", "union"]),
        (["--kv-dtype", "bf16,fp9"], ["fp9"]),
        (["--html", "-"], ["stdout", "hint: name a file"]),
        (["--block-tokens", ",".join(map(str, range(1, 99)))], ["1,764", "1,000"]),
    ],
)
def test_values_that_are_none_are_refused(arguments, words):
    result = invoke("compare", "llama-3.1-8b", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert all(word in result.stderr for word in words)
