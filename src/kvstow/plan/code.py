"""Code that computes a model, as digests of its files: which of them, and what they hold.

A checkpoint may bring its own modelling code (`auto_map` in its configuration, run with
`trust_remote_code`). Equal weights and equal configurations then prove nothing: the code decides
what is cached. Files count by their names and bytes, never by where or since when they lie.
"""

import ast
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

from kvstow.errors import ModelError

MAX_CODE_BYTES = 16 << 20
"""Of one file."""


def checkpoint_code(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """What a checkpoint's own modelling code is, by file: empty where it brings none.

    Code in another repository (`org/name--module.Class`) stands as that name.
    """
    named: Any = config.get("auto_map")
    if not isinstance(named, Mapping):
        return {}
    classes = [
        str(each)
        for name, value in cast("Mapping[str, Any]", named).items()
        if str(name) == "AutoConfig" or str(name).startswith("AutoModel")
        for each in (cast("list[Any]", value) if isinstance(value, list) else [value])
        if each is not None
    ]
    elsewhere = {each.rpartition(".")[2]: each for each in classes if "--" in each}
    found: dict[str, str] = {}
    for each in classes:
        entry = folder / f"{each.partition('.')[0]}.py"
        if "--" not in each and entry.is_file():
            found |= code_digests(entry)
    return found | elsewhere


def code_digests(entry: Path) -> dict[str, str]:
    """A file, and those beside it that it imports: a digest of each, by name.

    Raises ModelError where a file cannot be read.
    """
    folder, waiting = entry.parent, [entry]
    found: dict[str, str] = {}
    while waiting:
        path = waiting.pop()
        name = path.relative_to(folder).as_posix()
        if name not in found:
            source = _source(path)
            found[name] = blake2b(source, digest_size=16).hexdigest()
            imported = _relative_imports(path, source)
            waiting += [each for each in imported if each.is_relative_to(folder) and each.is_file()]
    return found


def _source(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            source = file.read(MAX_CODE_BYTES + 1)
    except OSError as error:
        raise ModelError(f"{path}: code of the model cannot be read: {error}") from None
    if len(source) > MAX_CODE_BYTES:
        raise ModelError(f"{path}: code of the model has more than {MAX_CODE_BYTES} bytes")
    return source


def _relative_imports(path: Path, source: bytes) -> Iterator[Path]:
    """Where the relative imports of a file may lie; none of a file that is not Python."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in nodes:
        if not isinstance(node, ast.ImportFrom) or not 0 < node.level <= len(path.parents):
            continue
        base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
        for each in (base, *(base / alias.name for alias in node.names)):
            yield each.with_suffix(".py")
            yield each / "__init__.py"
