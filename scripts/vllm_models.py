"""The table of models that vLLM serves with kvstow: `python scripts/vllm_models.py` writes it.

`scripts/test-vllm tests/vllm/test_models.py` finds out and writes bench/results/vllm_models.json;
this writes it into docs/guides/vllm.md, between two comments. With --check nothing is written, and
the exit code is 1 if the guide has another table.
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "vllm_models.json"
GUIDE = ROOT / "docs" / "guides" / "vllm.md"
START, END = "<!-- models: scripts/vllm_models.py -->", "<!-- end of models -->"


def table(found: dict[str, Any]) -> str:
    """The rows, one model each."""
    lines = ["| model | keeps | groups | handed over | came back |", "|---|---|---|---|---|"]
    for name, model in found.items():
        moved, back = model.get("handed over"), model.get("came back")
        groups = ", ".join(dict.fromkeys(model["groups"]))
        pulled = f"{moved['tokens']} tokens, {moved['descriptors']} copies" if moved else "no"
        restored = f"{back['tokens']} of {back['of']} tokens" if back else "no"
        kept = f"{len(model['groups'])}: {groups}"
        lines.append(f"| {name} | {model['what']} | {kept} | {pulled} | {restored} |")
    return "\n".join(lines)


def replaced(guide: str, found: dict[str, Any]) -> str:
    """The guide with this table."""
    before, _, rest = guide.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{table(found)}\n\n{END}{after}"


def main() -> int:
    guide = GUIDE.read_text("utf-8")
    made = replaced(guide, json.loads(RESULTS.read_text("utf-8")))
    if "--check" in sys.argv:
        return 0 if made == guide else 1
    GUIDE.write_text(made, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
