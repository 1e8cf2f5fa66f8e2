"""A layout as a document: canonical JSON, and its fingerprint.

Beside a version the document has a `Layout`, field by field, by their names. Canonical means:
UTF-8, keys sorted, no white space, integers only. Equal layouts give equal bytes.
`docs/reference/spec.md` describes the document to the byte.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from hashlib import blake2b
from itertools import repeat
from types import UnionType
from typing import Any, Literal, NoReturn, cast, get_args, get_origin, get_type_hints

import msgspec

from kvstow.errors import LayoutError, ManifestError, SpecError
from kvstow.plan.layout import Layout
from kvstow.plan.retention import Retention

VERSION = 1
MAX_BYTES = 16 << 20
MAX_LAYERS = 4096

_RETENTIONS: dict[str, type] = {kind.__name__.lower(): kind for kind in get_args(Retention)}


def encode(layout: Layout) -> bytes:
    """The canonical document."""
    return msgspec.json.encode({"kvstow": VERSION, "layout": layout}, order="sorted")


def fingerprint(layout: Layout) -> str:
    """BLAKE2b-256 of the canonical document, in hexadecimal."""
    return blake2b(encode(layout), digest_size=32).hexdigest()


def decode(data: bytes) -> Layout:
    """The layout that a document describes.

    Raises ManifestError, and nothing else, for anything that is not a manifest of a
    layout that keeps the laws. White space and key order are free; canonical form is
    what `encode` writes, not what `decode` demands.
    """
    document = _object(_parsed(data), "the document")
    if type(version := document.get("kvstow")) is not int:
        raise ManifestError("shape", f"the version under 'kvstow' is {version!r:.80}")
    if version != VERSION:
        raise ManifestError("version", f"{version} is not {VERSION}, which is read here")
    _checked(len(document) == 2, document, "the document", "an object of kvstow and layout")
    try:
        values = _values(Layout, document.get("layout"), "layout")
        layers = sum(len(rows.group.layers) for rows in values["groups"])
        if layers > MAX_LAYERS:
            raise ManifestError("size", f"{layers} layers, at most {MAX_LAYERS}")
        return Layout(**values)
    except LayoutError as error:
        kind = error.violations[0].partition(":")[0]
        raise ManifestError(kind, str(error)) from error
    except SpecError as error:
        raise ManifestError("spec", str(error)) from error


def _parsed(data: bytes) -> Any:
    if len(data) > MAX_BYTES:
        raise ManifestError("size", f"{len(data)} bytes, at most {MAX_BYTES}")
    try:
        plain: Any = json.loads(
            data.decode(),
            object_pairs_hook=_unique,
            parse_int=_bounded,
            parse_float=_no_fraction,
            parse_constant=_no_fraction,
        )
        json.dumps(plain, ensure_ascii=False).encode()
    except (UnicodeError, json.JSONDecodeError) as error:  # of bytes, or of escapes in texts
        raise ManifestError("syntax", str(error)) from error
    except RecursionError as error:
        raise ManifestError("syntax", "nested too deeply") from error
    return plain


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise ManifestError("duplicate", f"keys {twice} are there more than once")
    return result


def _bounded(digits: str) -> int:
    if digits.startswith("-") or len(digits) > 19 or int(digits) >> 63:
        raise ManifestError("range", f"{digits[:40]} is not in [0, 2^63)")
    return int(digits)


def _no_fraction(text: str) -> NoReturn:
    raise ManifestError("shape", f"{text[:40]} is not a whole number")


# ── from JSON to values ───────────────────────────────────────────────────────────────


Reader = Callable[[Any, str], Any]
"""Makes a value of what stands in the document, and says where that is if it cannot."""


@cache
def _reader(kind: Any) -> Reader:
    """What reads values of that type."""
    if kind == Retention:
        return _retention
    if is_dataclass(kind):
        return lambda plain, where: cast("type", kind)(**_values(kind, plain, where))
    inner = get_args(kind)
    if get_origin(kind) is tuple:
        readers = tuple(_reader(each) for each in inner if each is not Ellipsis)
        size = None if inner[-1] is Ellipsis else len(inner)
        return lambda plain, where: _tuple(readers, size, plain, where)
    if get_origin(kind) is UnionType:  # something or null
        value = _reader(inner[0])
        return lambda plain, where: None if plain is None else value(plain, where)
    if kind is int or kind is str:
        return lambda plain, where: _checked(type(plain) is kind, plain, where, kind.__name__)
    make, choices = (str, inner) if get_origin(kind) is Literal else (kind, tuple(kind))
    expected = f"one of {', '.join(choices)}"
    return lambda plain, where: make(_checked(plain in choices, plain, where, expected))


@cache
def _fields(kind: Any) -> dict[str, Reader]:
    """What reads each field of a dataclass."""
    hints = get_type_hints(kind)
    return {field.name: _reader(hints[field.name]) for field in fields(kind)}


def _values(kind: Any, plain: Any, where: str) -> dict[str, Any]:
    """The fields of a dataclass; missing and unknown ones are refused."""
    entries, readers = _object(plain, where), _fields(kind)
    is_whole = entries.keys() == readers.keys()
    _checked(is_whole, plain, where, f"an object of {', '.join(readers)}")
    return {name: read(entries[name], f"{where}.{name}") for name, read in readers.items()}


def _retention(plain: Any, where: str) -> Any:
    kind: Any = _object(plain, where).get("kind")
    _checked(kind in [*_RETENTIONS], kind, f"{where}.kind", f"one of {', '.join(_RETENTIONS)}")
    values = _values(_RETENTIONS[kind], plain, where)
    return _RETENTIONS[values.pop("kind")](**values)


def _tuple(readers: Sequence[Reader], size: int | None, plain: Any, where: str) -> tuple[Any, ...]:
    entries: list[Any] = _checked(type(plain) is list, plain, where, "a list")
    if size is not None:
        _checked(len(entries) == size, plain, where, f"a list of {size}")
    pairs = zip(entries, readers if size else repeat(readers[0]), strict=False)
    return tuple(read(each, f"{where}[{i}]") for i, (each, read) in enumerate(pairs))


def _object(plain: Any, where: str) -> dict[str, Any]:
    return _checked(type(plain) is dict, plain, where, "an object")


def _checked(is_right: bool, plain: Any, where: str, expected: str) -> Any:
    if not is_right:
        raise ManifestError("shape", f"{where} is not {expected}, but {json.dumps(plain):.80}")
    return plain
