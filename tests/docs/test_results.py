"""The tables of results are the ones that bench/results makes."""

from pathlib import Path
from runpy import run_path

import pytest

ROOT = Path(__file__).parents[2]
results = run_path(str(ROOT / "scripts" / "results.py"))

DOCUMENT = {"machine": {"gpu": "H200", "date": "2026-11-15"}, "r": {"x": 2.54, "1000": 7.0}}


def table(**more):
    made = {
        "title": "Rows",
        "question": "How fast?",
        "file": "a.json",
        "command": "bench/a.py",
        "needs": "one H200",
        "columns": ["", "kvstow"],
        "baseline": "layers",
        "limit": "one copy",
    }
    return made | more


def section(**more):
    return results["section"](table(**more), {"a.json": DOCUMENT})


def test_the_tables_are_made_from_bench_results():
    for file, text in results["pages"]().items():
        assert file.read_text("utf-8") == text, "hint: python scripts/results.py"


def test_a_table_has_its_figures_command_machine_date_baseline_and_limit():
    text = section(rows=[["rate", "{r>x:.1f} ×"]])
    assert "| rate | 2.5 × |" in text
    assert "`bench/a.py`, H200, 2026-11-15." in text
    assert "Baseline: layers. Limit: one copy." in text


def test_a_row_is_repeated_for_each_name():
    assert "| 1,000 tokens | 7 |\n| x tokens | 3 |" in section(
        each=["1000", "x"], row=["@ tokens", "{r>@:.0f}"]
    )


def test_a_table_whose_file_is_not_there_says_that_it_was_not_measured():
    text = results["section"](table(rows=[["rate", "{r:.1f}"]]), {})
    assert "**Not measured.** It takes `bench/a.py` on one H200." in text


def test_a_figure_that_its_file_does_not_have_is_an_error_but_in_a_partial_table():
    with pytest.raises(SystemExit, match=r"a\.json: no figure at r > y"):
        section(rows=[["rate", "{r>y:.1f}"]])
    assert "| rate | – |" in section(rows=[["rate", "{r>y:.1f}"]], partial=True)


def test_a_page_without_marks_is_refused():
    with pytest.raises(SystemExit, match="the page has no"):
        results["replaced"]("nothing", "table")


def test_every_file_of_results_has_a_table_and_three_are_in_the_readme():
    tables = results["read_tables"]()
    shown = {each["file"] for each in tables}
    kept = {path.name for path in (ROOT / "bench" / "results").glob("*.json")}
    assert kept - shown == {"vllm_matrix.json"}, "the guide's table is made of that one"
    assert sum("readme" in each for each in tables) == 3
    for each in tables:
        assert each["file"] in kept or each["needs"], each["title"]


def test_the_guide_and_readme_have_the_tables_of_what_has_worked():
    script = run_path(str(ROOT / "scripts" / "vllm_models.py"))
    for page, number in (("GUIDE", 2), ("README", 1)):
        text = script[page].read_text("utf-8")
        assert text.count(": scripts/vllm_models.py -->") == number
        assert script["replaced"](text) == text, "hint: python scripts/vllm_models.py"
    found = script["results"]("vllm_models.json")
    assert {"gpt-oss", "Llama 4", "Gemma 3n", "DeepSeek-V3", "Qwen3-Next"} <= set(found)
    for model in found.values():
        assert model["handed over"]["descriptors"] > 0
        assert model["came back"]["tokens"] > 0
