"""What decides a checkpoint's computation: configuration, code, tokenizer, and its weights.

Files count by their names and bytes, never by where or since when they lie. Of safetensors files a
digest covers, without reading all of them,

    header      whole: names, types, shapes
    tensors     every one: whole up to 16 KiB, else 256 bytes from each of its equal parts; a
                tensor of several experts has at least a part for each
    embeddings  whole: a tuned model may change just a few tokens

Files of other formats are read whole. The digest is kept beside the weights
(`.kvstow-weights.json`) under the files' sizes and times, where that can be written.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, BinaryIO, cast

import msgspec

from kvstow.errors import ModelError

SETTINGS = (
    "params.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "quant_model_description.json",
    "kv_cache_scales.json",
    "adapter_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files beside `config.json` that decide what is computed: quantisation, Mistral's configuration,
how images become numbers."""

TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model.*",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "vocab.bpe",
    "merges.txt",
    "normalizer.json",
    "tekken*.json",
    "*.tiktoken",
    "*.model",
    "*.spm",
)

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
"""Formats of weights. Engines load the first that is there, unless they are told otherwise."""
NO_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state\w*)\.(bin|pth?)")
"""What a trainer leaves beside weights of a similar name."""
INDEX_STEMS = {".safetensors": "model", ".bin": "pytorch_model"}
BESIDE_INDEX = ("model.safetensors", "adapter_model.safetensors")
"""Files that are loaded although an index names others."""
SPLIT = re.compile(r"-\d{5}-of-\d{5}$")
"""Behind the name of each part of a model in several GGUF files."""
CACHE_NAME = ".kvstow-weights.json"

MAX_FILE_BYTES = 16 << 20
"""Of a configuration, an index, or a file of code."""
MAX_CODE_FILES = 1024


def checkpoint_name(folder: Path) -> str:
    """`org/name` of a hub snapshot (`models--org--name/snapshots/…`), else the folder's name."""
    for part in folder.absolute().parts:
        match = re.fullmatch(r"models--(.+?)--(.+)", part)
        if match:
            return f"{match[1]}/{match[2]}"
    return folder.absolute().name


def checkpoint_config(folder: Path) -> Mapping[str, Any]:
    """The fields of `config.json`; none where Mistral's `params.json` stands in its place.

    Raises ModelError where neither can be read.
    """
    path = folder / "config.json"
    if not path.exists() and (folder / "params.json").is_file():
        return {}
    try:
        config: Any = json.loads(small_file(path))
    except (OSError, ValueError, RecursionError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise ModelError(
            f"{path}: no configuration: {why}\n\n"
            "hint: name the directory that holds a model's config.json and weights"
        ) from None
    if not isinstance(config, dict):
        raise ModelError(f"{path}: a list or a value, not the fields of a configuration")
    return cast("dict[str, Any]", config)


def deciding_fields(
    folder: Path, config: Mapping[str, Any], *, trust_remote_code: bool
) -> dict[str, str]:
    """Digests of the files that decide what is computed, by name, without weights and tokenizer.

    With any `auto_map`, in the configuration or in a file beside it, at any depth, each Python
    file below the folder is one of them: which it imports nobody can tell. Which class the
    configuration builds, of which file or of which other repository, stands beside.
    """
    paths = [path for name in SETTINGS if (path := folder / name).is_file()]
    names = [path.name for path in paths]
    digests = {name: _file_digest(folder / name) for name in names}
    if trust_remote_code:
        classes = _auto_maps(config)
        if classes or any(map(_names_code, (*paths, folder / "tokenizer_config.json"))):
            digests |= code_digests(folder)
        return {f"file {k}": v for k, v in digests.items()} | classes
    return {f"file {name}": digest for name, digest in digests.items()}


def code_digests(folder: Path) -> dict[str, str]:
    """A digest of each Python file below a folder, by its path there."""
    digests: dict[str, str] = {}
    for where, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = [Path(where, name) for name in sorted(names) if name.endswith(".py")]
        digests |= {path.relative_to(folder).as_posix(): _file_digest(path) for path in paths}
        if len(digests) > MAX_CODE_FILES:
            raise ModelError(
                f"{folder}: more than {MAX_CODE_FILES} Python files below it\n\n"
                "hint: all of them are part of the identity; keep only the model's own code there"
            )
    return digests


def tokenizer_digest(folder: Path) -> str:
    """A digest of the tokenizer's files; empty where there are none.

    How a chat becomes text is not among them: prompts are compared as token ids.
    """
    state = blake2b(digest_size=16)
    paths = sorted({path for name in TOKENIZERS for path in folder.glob(name) if path.is_file()})
    for path in paths:
        data = path.read_bytes()
        if path.name == "tokenizer_config.json":
            data = _without_chat(data)
        state.update(f"{path.name}:{len(data)}:".encode() + data)
    return state.hexdigest() if paths else ""


def adapter_digest(adapter: str | Path) -> str:
    """Name and digest of a LoRA in a folder; a name that is no folder stands for itself."""
    folder = Path(adapter)
    if not str(adapter) or not folder.is_dir():
        return str(adapter)
    state = blake2b(weights_digest(folder).encode(), digest_size=16)
    with suppress(FileNotFoundError):
        state.update((folder / "adapter_config.json").read_bytes())
    return f"{folder.absolute().name}:{state.hexdigest()}"


def _without_chat(data: bytes) -> bytes:
    with suppress(ValueError, RecursionError):
        fields: Any = json.loads(data)
        if isinstance(fields, dict):
            kept = {k: v for k, v in cast("dict[str, Any]", fields).items() if k != "chat_template"}
            return json.dumps(kept, sort_keys=True).encode()
    return data


def _names_code(path: Path) -> bool:
    with suppress(OSError, ValueError, RecursionError):
        return bool(_auto_maps(json.loads(small_file(path))))
    return False


def _auto_maps(value: Any, where: str = "", *, inside: bool = False) -> dict[str, str]:
    """The texts below `auto_map` in a configuration and in all parts of it, by their places."""
    if isinstance(value, str):
        return {f"code {where[1:]}": value} if inside and value else {}
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
    elif isinstance(value, list):
        items = enumerate(cast("list[Any]", value))
    texts: dict[str, str] = {}
    for key, each in items:
        name = key if str(key).isidentifier() else json.dumps(key)
        texts |= _auto_maps(each, f"{where}.{name}", inside=inside or key == "auto_map")
    return texts


def small_file(path: Path) -> bytes:
    """What an ordinary file of bounded length holds. Raises OSError for anything else."""
    if path.exists() and not path.is_file():
        raise OSError("it is no ordinary file")
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise OSError(f"more than {MAX_FILE_BYTES} bytes")
    return data


def _file_digest(path: Path) -> str:
    try:
        return blake2b(small_file(path), digest_size=16).hexdigest()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None


# ── weights ───────────────────────────────────────────────────────────────────────────

MAX_HEADER_BYTES = 100 << 20
MAX_SAMPLES = 8192
"""Of all tensors together, unless there are more tensors than that."""
SAMPLE_BYTES = 256
WHOLE_BYTES = 16 << 10
"""Tensors up to this size are read whole."""
EMBEDDINGS = re.compile(r"(^|[._])(wte|tok_embeddings|token_embd|embed\w*)\.")
"""Tensors with a row per token. Whoever adds or repairs tokens changes these rows only."""
CHUNK_BYTES = 8 << 20
NUM_READERS = 16
"""Files that are read at the same time: samples wait for the disk, not for the processor."""
_DIGEST_VERSION = 5


class _Cached(msgspec.Struct, frozen=True):
    version: int
    files: dict[str, tuple[int, int, int]]
    """Size, time of change, and the time of the inode's change, which nobody can set."""
    weights: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


def weight_files(folder: Path, pattern: str = "") -> list[Path]:
    """The files that an engine loads weights from; none where there are none.

    `pattern` is what it looks for, if it was told to. An index, which is among them, says which
    safetensors files count, wherever they lie: not `consolidated.safetensors` beside `model-…`.
    """
    for each in (pattern,) if pattern else WEIGHTS:
        suffix = Path(each).suffix
        files = {path for path in folder.glob(each) if not NO_WEIGHTS.fullmatch(path.name)}
        stem = "consolidated" if each.startswith("consolidated") else INDEX_STEMS.get(suffix)
        index = folder / f"{stem}{suffix}.index.json"
        if not index.is_file():
            if files:
                return sorted(files)
            continue
        listed = {path for name in _indexed_names(index) if (path := folder / name).is_file()}
        if listed and suffix == ".safetensors":
            files = {path for path in files if path.name in BESIDE_INDEX}
        if files | listed:
            return [*sorted(files | listed), index]
    return []


def weights_digest(folder: Path, pattern: str = "") -> str:
    """The format of the weights and a digest of them, from the cache where files are unchanged.

    Raises ModelError where there are none, and where a file is damaged.
    """
    files = weight_files(folder, pattern)
    if not files:
        raise ModelError(
            f"{folder}: no weights ({pattern or ', '.join(WEIGHTS)}) to identify the model by\n\n"
            f"hint: name the folder that holds them, or use Identity.unverified('why')"
        )
    parts = {SPLIT.sub("", path.stem) for path in files if not path.name.startswith("mmproj")}
    if files[0].suffix == ".gguf" and len(parts) > 1:
        raise ModelError(
            f"{folder}: {len(parts)} models in GGUF files ({', '.join(sorted(parts))})\n\n"
            "hint: say which one is loaded, as in Identity.of(folder, weight_files='*Q4_K_M*')"
        )
    stats = {os.path.relpath(path, folder): path.stat() for path in files}
    stamps = {
        name: (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats.items()
    }
    cache = folder / CACHE_NAME
    with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        cached = msgspec.json.decode(small_file(cache), type=_Cached)
        if cached.version == _DIGEST_VERSION and cached.files == stamps:
            return cached.weights
    digest = f"{files[0].suffix[1:]}:{_digest(files)}"
    with suppress(OSError):  # a folder that cannot be written to is read again next time
        fresh = cache.with_name(f"{CACHE_NAME}.{os.getpid()}")
        fresh.write_bytes(msgspec.json.encode(_Cached(_DIGEST_VERSION, stamps, digest)))
        fresh.replace(cache)
    return digest


def _indexed_names(index: Path) -> set[str]:
    try:
        names: Any = json.loads(small_file(index))["weight_map"].values()
        return {str(name) for name in names}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index}: its files cannot be read: {error!r}") from None


def _digest(files: list[Path]) -> str:
    state = blake2b(digest_size=16)
    with ThreadPoolExecutor(min(NUM_READERS, len(files))) as readers:
        for digest in readers.map(partial(_file_of_weights, num_files=len(files)), files):
            state.update(digest)
    return state.hexdigest()


def _file_of_weights(path: Path, num_files: int) -> bytes:
    state = blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            state.update(f"{path.name}:{size}:".encode())
            is_sampled = path.suffix == ".safetensors"
            for offset, nbytes in _samples(file, size, num_files) if is_sampled else [(0, size)]:
                for start in range(offset, offset + nbytes, CHUNK_BYTES):
                    length = min(CHUNK_BYTES, offset + nbytes - start)
                    state.update(os.pread(file.fileno(), length, start))
    except OSError as error:
        raise ModelError(f"{path}: weights cannot be read: {error}") from None
    return state.digest()


def _samples(file: BinaryIO, size: int, num_files: int) -> Iterator[tuple[int, int]]:
    """Which bytes of a safetensors file count, as offset and length."""
    header_bytes = int.from_bytes(file.read(8), "little")
    if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, size - 8):
        raise ModelError(f"{file.name}: a header of {header_bytes} bytes in a file of {size}")
    yield 0, 8 + header_bytes
    try:
        tensors: dict[str, Any] = json.loads(file.read(header_bytes))
        tensors.pop("__metadata__", None)
        spans = sorted(
            (lo, hi, name) for name, each in tensors.items() for lo, hi in [each["data_offsets"]]
        )
        parts = {name: _num_parts(each.get("shape")) for name, each in tensors.items()}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file.name}: its header cannot be read: {error!r}") from None
    share = MAX_SAMPLES // (num_files * len(spans) or 1)
    first, end = 8 + header_bytes, 0
    for lo, hi, name in spans:
        if type(lo) is not int or type(hi) is not int or not end <= lo <= hi <= size - first:
            raise ModelError(
                f"{file.name}: its header cannot be read: tensor {name!r} is at {[lo, hi]!r:.80}, "
                f"behind one that ends at {end}, of {size - first} bytes"
            )
        start, nbytes, end = first + lo, hi - lo, hi
        count = max(1, share, min(parts[name], nbytes // WHOLE_BYTES))
        if EMBEDDINGS.search(name) or nbytes <= max(WHOLE_BYTES, count * SAMPLE_BYTES):
            yield start, nbytes
            continue
        for i in range(count):
            middle = (2 * i + 1) * nbytes // (2 * count)
            yield start + middle - SAMPLE_BYTES // 2, SAMPLE_BYTES


def _num_parts(shape: Any) -> int:
    """Things in a tensor that somebody may change alone: experts."""
    sizes = cast("list[Any]", shape if isinstance(shape, list) else [])
    return sizes[0] if len(sizes) > 2 and type(sizes[0]) is int else 1
