"""A layout as a document: canonical JSON, and its fingerprint.

Canonical means: UTF-8, keys sorted, no white space, integers only. Equal layouts give
equal bytes. `docs/reference/spec.md` describes the document to the byte.
"""

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NoReturn

import msgspec

from kvstow.errors import LayoutError, ManifestError, SpecError
from kvstow.plan.group import Group
from kvstow.plan.identity import Identity
from kvstow.plan.layout import Layout, Order, PlacedGroup, Placement
from kvstow.plan.retention import Chunk, Encoder, Full, Retention, Sink, State, Window
from kvstow.plan.spec import DType, Extent, Field, LayerSpec

VERSIONS = (1, 2, 3)
"""Version 2 is version 1 with an `identity`, version 3 either of them with pages of several
sections. A layout is written as the lowest version that can say it."""

MAX_BYTES = 16 << 20
MAX_LAYERS = 4096


class _Extent(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    name: str
    total: int
    pieces: tuple[tuple[int, int], ...]


class _Field(msgspec.Struct, forbid_unknown_fields=True, frozen=True, omit_defaults=True):
    name: str
    dtype: DType
    axes: tuple[_Extent, ...]
    section: int = 0


class _Layer(msgspec.Struct, forbid_unknown_fields=True, frozen=True, omit_defaults=True):
    name: str
    states: int
    heads: _Extent
    fields: tuple[_Field, ...]
    align: int
    place: tuple[int, int, int, int]
    further: tuple[tuple[int, int, int], ...] = ()


class _Retention(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    kind: str
    tokens: int = 0
    sink_tokens: int = 0
    checkpoints: int = 0


class _Group(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    name: str
    retention: _Retention
    block_tokens: int
    rows_per_slab: int
    layers: tuple[_Layer, ...]


class _Identity(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    model: str
    weights: str
    config: tuple[tuple[str, str], ...]
    kv_dtype: str
    interior: str
    tokenizer: str
    adapter: str
    salt: str
    unverified_because: str


class _Version(msgspec.Struct):
    kvstow: int


class _Document(msgspec.Struct, forbid_unknown_fields=True, frozen=True, omit_defaults=True):
    kvstow: int
    model: str
    order: Order
    tp: tuple[int, int]
    pp: tuple[int, int]
    num_slabs: int
    nbytes: int
    base_align: int
    groups: tuple[_Group, ...]
    identity: _Identity | None = None


def encode(layout: Layout) -> bytes:
    """The canonical document."""
    document = _Document(
        kvstow=3 if _has_sections(layout) else 1 if layout.identity is None else 2,
        model=layout.model,
        order=layout.order,
        tp=layout.tp,
        pp=layout.pp,
        num_slabs=layout.num_slabs,
        nbytes=layout.nbytes,
        base_align=layout.base_align,
        groups=tuple(_group(rows) for rows in layout.groups),
        identity=_identity(layout.identity),
    )
    plain = msgspec.to_builtins(document)
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _has_sections(layout: Layout) -> bool:
    return any(place.further for _, _, place in layout.layers.values())


def fingerprint(layout: Layout) -> str:
    """BLAKE2b-256 of the canonical document, in hexadecimal."""
    return blake2b(encode(layout), digest_size=32).hexdigest()


def decode(data: bytes) -> Layout:
    """The layout that a document describes.

    Raises ManifestError, and nothing else, for anything that is not a manifest of a
    layout that keeps the laws. White space and key order are free; canonical form is
    what `encode` writes, not what `decode` demands.
    """
    document = _parsed(data)
    layers = sum(len(group.layers) for group in document.groups)
    if layers > MAX_LAYERS:
        raise ManifestError("size", f"{layers} layers, at most {MAX_LAYERS}")
    try:
        return Layout(
            model=document.model,
            order=document.order,
            groups=tuple(_rows(group) for group in document.groups),
            num_slabs=document.num_slabs,
            nbytes=document.nbytes,
            base_align=document.base_align,
            tp=document.tp,
            pp=document.pp,
            identity=_identity_value(document.identity),
        )
    except LayoutError as error:
        kind = error.violations[0].partition(":")[0]
        raise ManifestError(kind, str(error)) from error
    except SpecError as error:
        raise ManifestError("spec", str(error)) from error


# ── reading ───────────────────────────────────────────────────────────────────────────


def _parsed(data: bytes) -> _Document:
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
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ManifestError("syntax", str(error)) from error
    except RecursionError as error:
        raise ManifestError("syntax", "nested too deeply") from error
    try:
        json.dumps(plain, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ManifestError("syntax", f"text that is no Unicode: {error}") from error
    try:
        version = msgspec.convert(plain, _Version).kvstow
        if version not in VERSIONS:
            raise ManifestError("version", f"{version} is none of {VERSIONS}, which are read here")
        document = msgspec.convert(plain, _Document)
    except msgspec.ValidationError as error:
        raise ManifestError("shape", str(error)) from error
    if version != 3 and (document.identity is not None) != (version == 2):
        there = "no" if document.identity is None else "an"
        raise ManifestError("shape", f"version {version} with {there} identity")
    several = any(layer.further for group in document.groups for layer in group.layers)
    if several != (version == 3):
        pages = "pages of several sections" if several else "no page of several sections"
        raise ManifestError("shape", f"version {version} with {pages}")
    return document


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


def _rows(group: _Group) -> PlacedGroup:
    retention = _retention_value(group.retention)
    layers = tuple(
        LayerSpec(
            name=layer.name,
            retention=retention,
            block_tokens=group.block_tokens,
            states=layer.states,
            heads=_extent_value(layer.heads),
            fields=tuple(
                Field(
                    field.name,
                    field.dtype,
                    tuple(_extent_value(axis) for axis in field.axes),
                    field.section,
                )
                for field in layer.fields
            ),
            align=layer.align,
        )
        for layer in group.layers
    )
    if not layers:
        raise SpecError(f"group {group.name!r} has no layers")
    return PlacedGroup(
        group=Group(name=group.name, layers=layers),
        rows_per_slab=group.rows_per_slab,
        placements=tuple(Placement(*layer.place, layer.further) for layer in group.layers),
    )


def _extent_value(extent: _Extent) -> Extent:
    return Extent(extent.name, extent.total, extent.pieces)


def _retention_value(value: _Retention) -> Retention:
    match value.kind:
        case "full":
            retention = Full()
        case "window":
            retention = Window(value.tokens)
        case "chunk":
            retention = Chunk(value.tokens)
        case "sink":
            retention = Sink(value.sink_tokens, value.tokens)
        case "state":
            retention = State(value.checkpoints)
        case "encoder":
            retention = Encoder(value.tokens)
        case _:
            known = "full, window, chunk, sink, state, encoder"
            raise ManifestError("shape", f"retention {value.kind!r} is none of {known}")
    if _retention(retention) != value:
        raise ManifestError("shape", f"retention {value.kind!r} takes other numbers: {value}")
    return retention


def _identity_value(value: _Identity | None) -> Identity | None:
    return None if value is None else Identity(**msgspec.structs.asdict(value))


# ── writing ───────────────────────────────────────────────────────────────────────────


def _group(rows: PlacedGroup) -> _Group:
    return _Group(
        name=rows.group.name,
        retention=_retention(rows.group.retention),
        block_tokens=rows.group.block_tokens,
        rows_per_slab=rows.rows_per_slab,
        layers=tuple(
            _Layer(
                name=layer.name,
                states=layer.states,
                heads=_extent(layer.heads),
                fields=tuple(
                    _Field(
                        field.name,
                        field.dtype,
                        tuple(_extent(axis) for axis in field.axes),
                        field.section,
                    )
                    for field in layer.fields
                ),
                align=layer.align,
                place=(place.offset, place.block_stride, place.head_stride, place.token_stride),
                further=place.further,
            )
            for layer, place in zip(rows.group.layers, rows.placements, strict=True)
        ),
    )


def _identity(identity: Identity | None) -> _Identity | None:
    if identity is None:
        return None
    return _Identity(*(getattr(identity, name) for name in _Identity.__struct_fields__))


def _extent(extent: Extent) -> _Extent:
    return _Extent(extent.name, extent.total, extent.pieces)


def _retention(retention: Retention) -> _Retention:
    match retention:
        case Full():
            return _Retention("full")
        case Window(tokens):
            return _Retention("window", tokens=tokens)
        case Chunk(tokens):
            return _Retention("chunk", tokens=tokens)
        case Sink(sink_tokens, tokens):
            return _Retention("sink", tokens=tokens, sink_tokens=sink_tokens)
        case State(checkpoints):
            return _Retention("state", checkpoints=checkpoints)
        case Encoder(tokens):
            return _Retention("encoder", tokens=tokens)
