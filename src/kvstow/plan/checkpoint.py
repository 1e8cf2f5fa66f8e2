"""A checkpoint on disk: its configuration, and cheap digests of its weights, tokenizer and code.

Weights are not read whole: a digest covers every file's size, every safetensors header, samples
of every tensor, and embeddings whole, of which a tuned model may change just a few tokens: a few
GB of 100. It is kept beside the weights (`.kvstow-weights.json`) under their sizes and times,
where that can be written.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, BinaryIO, cast

import msgspec

from kvstow.errors import ModelError
from kvstow.plan.code import checkpoint_code

CACHE_NAME = ".kvstow-weights.json"
WEIGHTS = ("*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth")
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "tekken.json",
)

MAX_CONFIG_BYTES = 16 << 20
MAX_HEADER_BYTES = 100 << 20
MAX_SAMPLES = 8192
SAMPLE_BYTES = 256
SAMPLES_PER_FILE = 256
EMBEDDINGS = re.compile(r"(^|[._])(wte|tok_embeddings|embed\w*)\.")
"""Tensors with a row per token. Whoever adds or repairs tokens changes these rows only."""
CHUNK_BYTES = 8 << 20
_DIGEST_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What identifies a checkpoint: name, configuration, digests in hexadecimal."""

    name: str
    config: Mapping[str, Any]
    weights: str
    tokenizer: str
    code: Mapping[str, str]
    """Digests of the checkpoint's own modelling code by file."""


class _Cached(msgspec.Struct, frozen=True):
    version: int
    files: dict[str, tuple[int, int, int]]
    """Size, time of change, and the time of the inode's change, which nobody can set."""
    weights: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read what identifies the checkpoint in a folder. Raises ModelError where it is not one."""
    config = _config(folder)
    return Checkpoint(
        name=checkpoint_name(folder),
        config=config,
        weights=_weights(folder),
        tokenizer=_tokenizer(folder),
        code=checkpoint_code(folder, config),
    )


def checkpoint_name(folder: Path) -> str:
    """`org/name` of a hub snapshot (`models--org--name/snapshots/…`), else the folder's name."""
    for part in folder.absolute().parts:
        match = re.fullmatch(r"models--(.+?)--(.+)", part)
        if match:
            return f"{match[1]}/{match[2]}"
    return folder.absolute().name


def adapter_digest(adapter: str | Path) -> str:
    """Name and digest of a LoRA in a folder; a name that is no folder stands for itself."""
    folder = Path(adapter)
    if not str(adapter) or not folder.is_dir():
        return str(adapter)
    state = blake2b(_weights(folder).encode(), digest_size=16)
    with suppress(FileNotFoundError):
        state.update((folder / "adapter_config.json").read_bytes())
    return f"{folder.absolute().name}:{state.hexdigest()}"


def _config(folder: Path) -> Mapping[str, Any]:
    path = folder / "config.json"
    try:
        config: Any = json.loads(_small_file(path))
    except (OSError, ValueError, RecursionError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise ModelError(
            f"{path}: no configuration: {why}\n\n"
            "hint: name the directory that holds a model's config.json and weights"
        ) from None
    if not isinstance(config, dict):
        raise ModelError(f"{path}: a list or a value, not the fields of a configuration")
    return cast("dict[str, Any]", config)


def _small_file(path: Path) -> bytes:
    """What an ordinary file of bounded length holds. Raises OSError for anything else."""
    if path.exists() and not path.is_file():
        raise OSError("it is no ordinary file")
    with path.open("rb") as file:
        data = file.read(MAX_CONFIG_BYTES + 1)
    if len(data) > MAX_CONFIG_BYTES:
        raise OSError(f"more than {MAX_CONFIG_BYTES} bytes")
    return data


def _tokenizer(folder: Path) -> str:
    """A digest of the tokenizer's files; empty where there are none."""
    state = blake2b(digest_size=16)
    names = [name for name in TOKENIZERS if (folder / name).is_file()]
    for name in names:
        data = (folder / name).read_bytes()
        state.update(f"{name}:{len(data)}:".encode() + data)
    return state.hexdigest() if names else ""


def _weights(folder: Path) -> str:
    """The digest of all weight files, from the cache where sizes and times are the same."""
    by_format = (sorted(folder.glob(pattern)) for pattern in WEIGHTS)
    files = next(filter(None, by_format), None)
    if files is None:
        raise ModelError(
            f"{folder}: no weights ({', '.join(WEIGHTS)}) to identify the model by\n\n"
            f"hint: name the folder that holds them, or use Identity.unverified('why')"
        )
    stats = {path.name: path.stat() for path in files}
    stamps = {
        name: (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats.items()
    }
    cache = folder / CACHE_NAME
    with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        known = msgspec.json.decode(_small_file(cache), type=_Cached)
        if known.version == _DIGEST_VERSION and known.files == stamps:
            return known.weights
    digest = _digest(files)
    with suppress(OSError):  # a folder that cannot be written to is read again next time
        fresh = cache.with_name(f"{CACHE_NAME}.{os.getpid()}")
        fresh.write_bytes(msgspec.json.encode(_Cached(_DIGEST_VERSION, stamps, digest)))
        fresh.replace(cache)
    return digest


def _digest(files: list[Path]) -> str:
    state = blake2b(digest_size=16)
    per_file = MAX_SAMPLES // len(files) + 1
    for path in files:
        size = path.stat().st_size
        state.update(f"{path.name}:{size}:".encode())
        try:
            with path.open("rb") as file:
                tensors = path.suffix == ".safetensors"
                places = _tensor_places(file, size, per_file) if tensors else _even_places(size)
                for offset, nbytes in places:
                    file.seek(offset)
                    for taken in range(0, nbytes, CHUNK_BYTES):
                        state.update(file.read(min(CHUNK_BYTES, nbytes - taken)))
        except OSError as error:
            raise ModelError(f"{path}: weights cannot be read: {error}") from None
    return state.hexdigest()


def _even_places(size: int) -> Iterator[tuple[int, int]]:
    for i in range(SAMPLES_PER_FILE):
        yield i * max(0, size - SAMPLE_BYTES) // (SAMPLES_PER_FILE - 1), SAMPLE_BYTES


def _tensor_places(file: BinaryIO, size: int, most: int) -> Iterator[tuple[int, int]]:
    """The header, embeddings, and so many samples of all other tensors, evenly chosen."""
    header_bytes = int.from_bytes(file.read(8), "little")
    if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, size - 8):
        raise ModelError(f"{file.name}: a header of {header_bytes} bytes in a file of {size}")
    start = 8 + header_bytes
    try:
        header: Any = json.loads(file.read(header_bytes))
        if not isinstance(header, dict):
            raise ValueError("a list or a value, not tensors by name")
        tensors = cast("dict[str, Any]", header)
        spans = sorted(
            (*_span(entry["data_offsets"], size - start), bool(EMBEDDINGS.search(name)))
            for name, entry in tensors.items()
            if name != "__metadata__"
        )
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise ModelError(f"{file.name}: its header cannot be read: {error!r}") from None
    yield 0, start
    embeddings = [(lo, hi) for lo, hi, whole in spans if whole]
    sampled = [(lo, hi) for lo, hi, whole in spans if not whole]
    if sum(hi - lo for lo, hi in embeddings) > size:  # only where tensors overlap
        embeddings, sampled = [], embeddings + sampled
    yield from ((start + lo, hi - lo) for lo, hi in embeddings)
    each = max(1, most // max(1, len(sampled)))
    for lo, hi in sampled[:: max(1, -(-len(sampled) // most))]:
        yield from _samples(start + lo, hi - lo, each)


def _samples(start: int, nbytes: int, count: int) -> Iterator[tuple[int, int]]:
    """The middles of `count` equal parts of a tensor, or all of it."""
    if nbytes <= count * SAMPLE_BYTES:
        yield start, nbytes
        return
    for i in range(count):
        middle = (2 * i + 1) * nbytes // (2 * count)
        yield start + middle - SAMPLE_BYTES // 2, SAMPLE_BYTES


def _span(offsets: list[Any], most: int) -> tuple[int, int]:
    """Where a tensor's bytes lie behind the header."""
    lo, hi = offsets
    if type(lo) is not int or type(hi) is not int or not 0 <= lo <= hi <= most:
        raise ValueError(f"a tensor at {offsets!r:.80}, {most} bytes are there")
    return lo, hi
