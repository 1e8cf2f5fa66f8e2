"""A layout as a document: canonical JSON, and its fingerprint.

Beside a version the document has a `Layout`, field by field, by their names. Canonical means:
UTF-8, keys sorted, no white space, integers only. Equal layouts give equal bytes.
`docs/reference/spec.md` describes the document to the byte.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Any, NoReturn, cast

import msgspec

from kvstow.errors import LayoutError, ManifestError, SpecError
from kvstow.plan.layout import Layout
from kvstow.plan.retention import Kind

VERSION = 1
MAX_BYTES = 16 << 20


@dataclass(frozen=True)
class _Document:
    kvstow: int
    layout: Layout


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
    plain = _parsed(data)
    version = cast("Any", plain).get("kvstow") if isinstance(plain, dict) else None
    if type(version) is int and version != VERSION:
        raise ManifestError("version", f"{version} is not {VERSION}, the only version that is read")
    try:
        document = msgspec.convert(plain, _Document)
    except msgspec.ValidationError as error:
        raise ManifestError("shape", str(error)) from error
    except LayoutError as error:
        kind = error.violations[0].partition(":")[0]
        raise ManifestError(kind, str(error)) from error
    except SpecError as error:
        raise ManifestError("spec", str(error)) from error
    _check_keys(plain, document, "$")
    return document.layout


def _check_keys(plain: Any, value: Any, where: str) -> None:
    """Refuses keys that are unknown or missing: fields with defaults are written too."""
    if isinstance(plain, dict):
        keys = cast("dict[str, Any]", plain)
        is_kind = isinstance(value, Kind)
        names = {"kind", *value.__struct_fields__} if is_kind else {f.name for f in fields(value)}
        if keys.keys() != names:
            expected, seen = ", ".join(sorted(names)), ", ".join(sorted(keys))
            raise ManifestError("shape", f"{where} is not an object of {expected}, but of {seen}")
        for name in names - {"kind"}:
            _check_keys(keys[name], getattr(value, name), f"{where}.{name}")
    elif isinstance(plain, list):
        for i, pair in enumerate(zip(cast("list[Any]", plain), value, strict=True)):
            _check_keys(*pair, f"{where}[{i}]")


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
        raise ManifestError("duplicate", f"keys {twice} appear more than once")
    return result


def _bounded(digits: str) -> int:
    if digits.startswith("-") or len(digits) > 19 or int(digits) >> 63:
        raise ManifestError("range", f"{digits[:40]} is not in [0, 2^63)")
    return int(digits)


def _no_fraction(text: str) -> NoReturn:
    raise ManifestError("shape", f"{text[:40]} is not a whole number")
