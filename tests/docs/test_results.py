"""The table of results is the one that bench/results makes."""

import json
from pathlib import Path
from runpy import run_path

import pytest

ROOT = Path(__file__).parents[2]
results = run_path(str(ROOT / "scripts" / "results.py"))


def line(kvstow, file="a.json", what="x"):
    return {"what": what, "file": file, "kvstow": kvstow}


def test_the_tables_are_made_from_bench_results():
    for file, text in results["pages"]().items():
        assert file.read_text("utf-8") == text, "hint: python scripts/results.py"


def test_a_line_has_figure_machine_and_date():
    document = {"machine": {"gpu": "H200", "date": "2026-11-15"}, "r": {"x": 2.54}}
    made = results["table"]([line("{r>x:.1f} ×")], {"a.json": document})
    assert made.splitlines()[-1] == "| x | 2.5 × |  |  | H200, 2026-11-15 |"


def test_files_that_are_not_there_have_no_lines():
    assert results["table"]([line("{r:.1f}")], {}) == results["NOTHING"]


def test_a_figure_that_its_file_does_not_have_is_an_error():
    with pytest.raises(SystemExit, match=r"a\.json: no 'y' .*there is \['x'\]"):
        results["table"]([line("{r>y:.1f}")], {"a.json": {"r": {"x": 1}}})


def test_a_page_without_marks_is_refused():
    with pytest.raises(SystemExit, match="the page has no"):
        results["replaced"]("nothing", "table")


def test_headlines_name_things_that_exist():
    for each in json.loads((ROOT / "bench" / "headlines.json").read_text("utf-8")):
        needed = {"what", "file", "kvstow"}
        assert needed <= set(each) <= needed | {"baseline", "limit", "in_readme"}
        assert (ROOT / "bench" / "results" / each["file"]).is_file()


def test_the_guide_has_the_table_of_models_that_was_found():
    script = run_path(str(ROOT / "scripts" / "vllm_models.py"))
    guide = script["GUIDE"].read_text("utf-8")
    found = script["results"]("vllm_models.json")
    assert script["replaced"](guide) == guide, "hint: python scripts/vllm_models.py"
    assert {"gpt-oss", "Llama 4", "Gemma 3n", "DeepSeek-V3", "Qwen3-Next"} <= set(found)
    for model in found.values():
        assert model["handed over"]["descriptors"] > 0
        assert model["came back"]["tokens"] > 0
