"""The table of sizes in docs/guides/cluster.md: `python scripts/cluster_sizes.py`.

What instances write to a remote store, read from it and ask it, and how large it becomes, from a
model's own bytes per token and a stated load. With --check, nothing is written, and the exit code
is 1 if the table is not the one in the guide.

    new tokens  = requests/s × tokens of a prompt × (1 - part that is reused)
    written     = new tokens × bytes per token
    read        = requests/s × tokens of a prompt × part that is reused × part from the remote store
                  × bytes per token
    kept        = written × hours that a row is kept
    look-ups    = requests/s × ranks, each of 32 rows and those that are found
"""

import re
import sys
from pathlib import Path

from kvstow.plan.models import model_layers

PAGE = Path(__file__).resolve().parents[1] / "docs/guides/cluster.md"
BEGIN, END = "<!-- sizes: made by scripts/cluster_sizes.py -->", "<!-- /sizes -->"

REQUESTS = 0.5
PROMPT_TOKENS = 4000
REUSED = 0.6
REMOTE = 0.25
HOURS = 4.0
BLOCK_TOKENS = 16
MODELS = (("Llama-3.1-8B", 1), ("Llama-3.3-70B", 4))
INSTANCES = (10, 100, 1000)


def bytes_per_token(model: str) -> float:
    """Bytes that all layers keep of one token."""
    return sum(layer.page_bytes / layer.block_tokens for layer in model_layers(model).layers)


def line(model: str, gpus: int, instances: int) -> str:
    """One row of the table."""
    per_token = bytes_per_token(model)
    requests = REQUESTS * instances
    written = requests * PROMPT_TOKENS * (1 - REUSED) * per_token
    read = requests * PROMPT_TOKENS * REUSED * REMOTE * per_token
    kept = written * HOURS * 3600
    blocks = PROMPT_TOKENS * REUSED * REMOTE / BLOCK_TOKENS + 32
    cells = (
        f"{model} (tp {gpus})" if gpus > 1 else model,
        f"{instances:,}",
        f"{written / 1e9:,.1f} GB/s",
        f"{read / 1e9:,.1f} GB/s",
        f"{kept / 1e12:,.1f} TB",
        f"{requests * gpus:,.0f} batches, {requests * gpus * blocks:,.0f} rows",
    )
    return "| " + " | ".join(cells) + " |"


def table() -> str:
    head = "| model | instances | written | read | kept for 4 h | look-ups per second |"
    lines = [head, "|---|---|---|---|---|---|"]
    lines += [line(*model, count) for model in MODELS for count in INSTANCES]
    return "\n".join(lines)


def main() -> None:
    text = PAGE.read_text("utf-8")
    wanted = f"{BEGIN}\n\n{table()}\n\n{END}"
    fresh = re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: wanted, text, flags=re.S)
    if "--check" in sys.argv[1:]:
        sys.exit(fresh != text)
    PAGE.write_text(fresh, "utf-8")


main()
