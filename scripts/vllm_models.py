"""The tables of what works in vLLM, of the guide and README: `python scripts/vllm_models.py` writes
them.

`scripts/test-vllm` finds out, and writes bench/results/vllm_matrix.json (what has worked, by kind
of model, feature and version) and vllm_models.json (what some models move); benches on a GPU have
files of their own. This writes both tables into docs/guides/vllm.md and the signs of the first into
README.md, each between two comments. With --check nothing is written, and the exit code is 1 if
there are other tables.
"""

import json
import sys
from pathlib import Path
from textwrap import fill
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
GUIDE, README = ROOT / "docs" / "guides" / "vllm.md", ROOT / "README.md"

FEATURES = (
    "hand-over",
    "other tp",
    "other block size",
    "offload",
    "drafts",
    "context parallel",
    "sleep",
)
KINDS = ("full attention", "latents (MLA)", "windows, chunks", "DeepSeek-V4", "recurrent states")

NOTES = {
    "kernels": "Where [the kernels' source was read](../decisions/0023-token-order.md): on CUDA "
    "FlashAttention, FlashInfer, Triton, FlexAttention, the MLA kernels, and DeepSeek-V4's, "
    "index-key and NVFP4 pages. On CPUs and ROCm blocks must be equal, except for latents.",
    "windows": "As before; prefill's block size should be a multiple of decode's (64 to 16): the "
    "other way round, most pulls are refused and computed.",
    "copies": "Every rank has the whole of a latent: any rank serves any other.",
    "states": "Gated delta nets, Mamba-1 and -2, short convolutions and linear attention, where "
    "ranks share channels and heads out evenly and both sides have the same block size.",
    "state": "A state is that after a block's last token: other blocks have other states.",
    "drafts": "EAGLE and MTP: rows are keyed by the next token, too, and of a prompt that goes on "
    "differently the block before the difference is computed. Run with EAGLE and full attention; "
    "acceptance with and without kvstow was not compared.",
    "accepted": "Refused at start: which of several states is accepted is not certain.",
    "context": "Refused at start: a block's tokens are spread over ranks.",
    "sleep": "From 0.33, refused at start before. Kinds without a version were run with vLLM's "
    "calls alone, not on a GPU.",
}

ALL = {(kind, "context parallel"): ("❌", "context") for kind in KINDS}
ALL |= {(kind, "sleep"): ("🟠", "sleep") for kind in KINDS}
ALL |= {(kind, "drafts"): ("🟠", "drafts") for kind in KINDS[1:]}
LIMITS = ALL | {
    ("full attention", "drafts"): ("✅", "drafts"),
    ("full attention", "sleep"): ("✅", "sleep"),
    ("recurrent states", "drafts"): ("❌", "accepted"),
    ("recurrent states", "other block size"): ("❌", "state"),
    ("recurrent states", "other tp"): ("✅", "states"),
    ("full attention", "other block size"): ("🟠", "kernels"),
    ("latents (MLA)", "other block size"): ("✅", "kernels"),
    ("windows, chunks", "other block size"): ("🟠", "windows"),
    ("DeepSeek-V4", "other block size"): ("🟠", "kernels"),
    ("latents (MLA)", "other tp"): ("🟠", "copies"),
    ("DeepSeek-V4", "other tp"): ("🟠", "copies"),
}
"""What works in part, with conditions, or not at all, and the note that says why."""

BENCHES = {
    ("full attention", "hand-over"): ("vllm_gpu.json", "dense"),
    ("windows, chunks", "hand-over"): ("vllm_gpu_hybrid.json", "hybrid"),
    ("full attention", "offload"): ("vllm_offload_gpu.json", "dense"),
    ("full attention", "other block size"): ("vllm_block_sizes.json", "dense"),
    ("full attention", "sleep"): ("vllm_gpu.json", "dense"),
}
"""Results of benches that compare texts on a GPU, too."""


def results(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text("utf-8"))


def releases(matrix: dict[str, Any], kind: str, feature: str) -> list[str]:
    """Versions with which it has worked, and where."""
    found = set(matrix.get(kind, {}).get(feature, {}))
    if bench := BENCHES.get((kind, feature)):
        release = ".".join(results(bench[0])["versions"]["vllm"].split(".")[:2])
        found.add(f"{release} on a GPU")
    return sorted(found)


def judgement(matrix: dict[str, Any], kind: str, feature: str) -> tuple[str, list[str], str]:
    """A sign, the versions with which it has worked, and the name of a note."""
    shown = releases(matrix, kind, feature)
    sign, note = LIMITS.get((kind, feature), ("✅" if shown else "–", ""))
    return sign if shown or sign != "✅" else "🟠", shown, note


def signs_table(matrix: dict[str, Any]) -> str:
    """The signs alone, of what most people need."""
    features = FEATURES[:4]
    lines = [f"| | {' | '.join(features)} |", "|---" * (len(features) + 1) + "|"]
    for kind in KINDS:
        signs = [judgement(matrix, kind, feature)[0] for feature in features]
        lines.append(f"| {kind} | {' | '.join(signs)} |")
    return "\n".join(lines)


def matrix_table(matrix: dict[str, Any]) -> str:
    """A row for each kind of model, and the notes."""
    numbers: dict[str, int] = {}
    lines = [f"| | {' | '.join(FEATURES)} |", "|---" * (len(FEATURES) + 1) + "|"]
    for kind in KINDS:
        cells: list[str] = []
        for feature in FEATURES:
            sign, shown, note = judgement(matrix, kind, feature)
            text = f"{sign} {', '.join(shown)}".strip()
            if note:
                text += f" <sup>{numbers.setdefault(note, len(numbers) + 1)}</sup>"
            cells.append(text)
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    notes = [
        fill(f"{number}. {NOTES[note]}", 120, subsequent_indent="   ", break_on_hyphens=False)
        for note, number in numbers.items()
    ]
    return "\n".join([*lines, "", *notes])


def models_table(found: dict[str, Any]) -> str:
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


def replaced(page: str) -> str:
    """The page with those of the tables that it has."""
    matrix = results("vllm_matrix.json")
    for name, table in (
        ("signs", signs_table(matrix)),
        ("matrix", matrix_table(matrix)),
        ("models", models_table(results("vllm_models.json"))),
    ):
        start, end = f"<!-- {name}: scripts/vllm_models.py -->", f"<!-- end of {name} -->"
        before, found, rest = page.partition(start)
        if found:
            page = f"{before}{start}\n\n{table}\n\n{end}{rest.partition(end)[2]}"
    return page


def main() -> int:
    made = {page: replaced(page.read_text("utf-8")) for page in (GUIDE, README)}
    if "--check" in sys.argv:
        return int(any(page.read_text("utf-8") != text for page, text in made.items()))
    for page, text in made.items():
        page.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
