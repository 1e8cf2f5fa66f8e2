"""`kvstow compare`: every order and packing of one model."""

import json
from itertools import product

import pytest
from typer.testing import CliRunner, Result

from kvstow.cli import app
from kvstow.plan.models import catalogue

ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
PACKINGS = ("slab", "union", "separate")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def compare(*arguments: str) -> dict:
    result = invoke("compare", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


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


def test_slabs_waste_less_and_hold_more_than_one_row_per_slab():
    layouts = by_choice(compare("deepseek-v4-flash", "--memory", "60GiB"))
    slab, union = layouts["BLHNC", "slab"], layouts["BLHNC", "union"]
    assert slab["padding"] <= 0.04
    assert union["padding"] > 0.3  # rows of the largest group, filled to 66 % by the smallest
    assert slab["requests"]["8192"] > union["requests"]["8192"]


def test_a_layout_that_cannot_be_says_why_beside_those_that_can():
    document = compare("deepseek-v4-flash", "--memory", "10MB")
    refused = [layout for layout in document["layouts"] if layout["error"] is not None]
    assert {layout["packing"] for layout in refused} == {"separate"}
    assert all("10000000 bytes" in layout["error"] for layout in refused)
    text = invoke("compare", "deepseek-v4-flash", "--memory", "10MB")
    assert text.exit_code == 0
    assert "BLHNC separate: a budget of 10000000 bytes holds 0 slabs" in text.stdout
    assert max(map(len, text.stdout.splitlines())) <= 80


def test_when_nothing_can_be_the_exit_code_is_1():
    result = invoke("compare", "deepseek-v4-flash", "--memory", "1MB")
    assert result.exit_code == 1
    assert "error: no order and packing can be" in result.stderr
    assert "hint:" in result.stderr


@pytest.mark.parametrize("name", catalogue())
def test_the_table_of_every_catalogue_model_fits_80_columns(name):
    result = invoke("compare", name, "--memory", "640GiB")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.split()[0] in ORDERS for line in lines if line.split()) == 18
