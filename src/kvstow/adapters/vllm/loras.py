"""What a LoRA adapter is known by: its name, and a digest of its weights where they lie on disk.

Under an adapter that the engine was given in another way nothing is shared. The engine reads an
adapter's files when it loads it, and perhaps again later; we read them when a request names it. So
what is found first counts for as long as the engine runs. Files that were written anew may or may
not be what the engine has in memory: nothing is shared under them either.
"""

import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from kvstow.adapters.vllm.engine import LoraAdapter
from kvstow.errors import ModelError
from kvstow.plan.checkpoint import adapter_digest

AdapterPlace = tuple[str, str, int]
"""An adapter's name, path and number in the engine."""

FolderFacts = tuple[tuple[str, int, int, int, int], ...]
"""Name, inode, size and times of each file."""


class AdapterNames:
    """Adapters of one engine, as they were when they were first asked for. Where somebody has
    `vouched` for what is not looked at, one whose weights cannot be found is known by its path."""

    def __init__(self, *, vouched: bool = False) -> None:
        self._vouched = vouched
        self._first: dict[AdapterPlace, str | None] = {}

    def name(self, adapter: LoraAdapter) -> str | None:
        """What an adapter of vLLM's is known by; None where its weights are nowhere to be found, or
        are not those of before."""
        name, path = adapter.lora_name, adapter.lora_path
        folder = _folder(path)
        digest = _digest(folder, _as_it_lies(folder)) or (path if self._vouched else None)
        found = f"{name} {digest}" if digest else None
        first = self._first.setdefault(_place(adapter), found)
        return found if found == first else None

    def looked_at_once(self) -> Callable[[LoraAdapter | None], bool]:
        """Whether an adapter, if there is one, is known, for a moment in which none changes: files
        are looked at once, however many requests use it."""
        found: dict[AdapterPlace, bool] = {}

        def is_known(adapter: LoraAdapter | None) -> bool:
            if not adapter:
                return True
            place = _place(adapter)
            if place not in found:
                found[place] = self.name(adapter) is not None
            return found[place]

        return is_known


def _place(adapter: LoraAdapter) -> AdapterPlace:
    return adapter.lora_name, adapter.lora_path, adapter.lora_int_id


def _folder(path: str) -> str:
    """Where an adapter lies: a path, or the name of one in the hub's cache; as it is otherwise."""
    if os.path.isabs(path) or os.path.isdir(path):
        return path
    if path.startswith("~"):
        return os.path.expanduser(path)
    return _in_hub(path) or path


def _in_hub(name: str) -> str:
    try:
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(name, "adapter_config.json")
    except (ImportError, ValueError):  # not a name of the hub's
        return ""
    return str(Path(config).parent) if isinstance(config, str) else ""


def _as_it_lies(path: str) -> FolderFacts:
    """What tells whether something in a folder was written anew, empty where there is none: an
    adapter may be loaded again under its name. The latest time alone does not: files keep older
    times when they are copied, and clocks are set back."""
    try:
        found = [(entry.name, entry.stat()) for entry in os.scandir(path)]
    except OSError:
        return ()
    return tuple(sorted((n, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for n, s in found))


@lru_cache(maxsize=1024)
def _digest(folder: str, as_it_lies: FolderFacts) -> str | None:
    try:
        return adapter_digest(folder) if os.path.isdir(folder) else None
    except ModelError:
        return None
