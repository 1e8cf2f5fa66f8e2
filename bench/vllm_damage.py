"""Rows that were damaged in host memory or on disk, inside vLLM: found, counted, computed again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_engines import EngineOptions, Prompts, Remote, connector

WHAT = ("restored_tokens", "restore_failures", "damaged_rows")
EVERY = 1 << 16
"""A few bytes are overwritten in every so many: no row stays whole."""


def tier_engines(
    model: str, options: EngineOptions, shared: str, folder: Path, row_room: int
) -> list[Remote]:
    """An engine whose host tier others can write to, and one with a disk below a small host tier:
    `row_room` bytes hold the prompt that is asked for, and no more."""
    settings = (
        {"host_bytes": 8 * row_room, "host_shared": shared},
        {"host_bytes": row_room, "disk_path": str(folder), "disk_bytes": 32 * row_room},
    )
    return [
        Remote(6100 + 100 * i, model, options, connector("kvstow", **each))
        for i, each in enumerate(settings)
    ]


def measured(
    engine: Remote, prompts: Prompts, length: int, forget: Callable[[Remote], None], files: Any
) -> dict[str, Any]:
    """A prompt whose rows are damaged must be computed, with the text of one that is computed; the
    next time it comes back whole, with the text of one that is cached."""
    prompt = prompts(length + 1)
    texts = [engine.first({"prompt": prompt})["text"] for _ in ("computed", "cached")]
    result = {}
    for name, right in zip(("damaged", "whole"), texts, strict=True):
        forget(engine)
        written = damage(files()) if name == "damaged" else 0
        before = engine.counts()
        job = engine.first({"prompt": prompt})
        after = engine.counts()
        result[name] = {
            "first_token_s": round(job["first"], 3),
            "counted": {x: after[x] - before.get(x, 0.0) for x in WHAT if after.get(x)},
            "text_is_right": job["text"] == right,
            "places_overwritten": written,
        }
    return result


def damage(files: list[Path]) -> int:
    """Overwrite a few bytes in every row of these files; in how many places."""
    places = 0
    for path in files:
        with path.open("r+b") as file:
            for offset in range(4096, path.stat().st_size, EVERY):
                file.seek(offset)
                file.write(b"\xa5" * 64)
                places += 1
    return places


def host_files(shared: str) -> list[Path]:
    """The files of a shared host tier."""
    from kvstow.offload.host.shared import shared_path

    return disk_files(shared_path(shared))


def disk_files(folder: Path) -> list[Path]:
    """Data files of a disk tier."""
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 1 << 16]
