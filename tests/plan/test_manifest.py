"""The reader takes what the writer wrote, and turns everything else away by name."""

import json
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstow.errors import ManifestError
from kvstow.plan.group import grouped
from kvstow.plan.identity import Identity
from kvstow.plan.layout import Layout
from kvstow.plan.manifest import MAX_BYTES, decode, encode, fingerprint
from kvstow.plan.models import model_layers
from kvstow.plan.pack import packed
from kvstow.plan.retention import Window
from planning import attention, block_bytes, layouts

REAL = packed(grouped(model_layers("gpt-oss-20b").layers), budget=1 << 30)
DOCUMENT = json.loads(encode(REAL))
GROUPS = DOCUMENT["layout"]["groups"]
KINDS = {
    "syntax",
    "version",
    "duplicate",
    "shape",
    "range",
    "size",
    "spec",
    "sharing",
    "bounds",
    "alignment",
    "order",
    "coverage",
    "slab",
}


def refused(document: object) -> ManifestError:
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    with pytest.raises(ManifestError) as caught:
        decode(data)
    assert caught.value.kind in KINDS
    return caught.value


def accepted(data: bytes) -> Layout | None:
    """The layout, or None if the document was refused by one of the named rules."""
    try:
        return decode(data)
    except ManifestError as error:
        kind = error.kind
    assert kind in KINDS
    return None


def changed(path: str, value: object) -> dict:
    """The real document with one value of its layout replaced, by a dotted path."""
    document = json.loads(json.dumps(DOCUMENT))
    put(document["layout"], path, value)
    return document


def put(node: Any, path: str, value: object) -> None:
    *parents, last = path.split(".")
    for key in parents:
        node = node[int(key)] if key.isdecimal() else node[key]
    node[int(last) if last.isdecimal() else last] = value


@given(layouts())
def test_a_layout_survives_the_round_trip(layout):
    data = encode(layout)
    again = decode(data)
    assert again == layout
    assert encode(again) == data


@given(layouts())
def test_the_document_is_canonical_and_the_fingerprint_is_its_hash(layout):
    data = encode(layout)
    plain = json.loads(data)
    canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert data == canonical.encode()
    assert fingerprint(layout) == blake2b(data, digest_size=32).hexdigest()
    assert decode(json.dumps(plain, indent=3).encode()) == layout


@pytest.mark.parametrize(
    ("document", "kind"),
    [
        (b"", "syntax"),
        (b"{", "syntax"),
        (b"[" * 100_000, "syntax"),
        (b"[]", "shape"),
        (b'{"kvstow":1,"kvstow":1}', "duplicate"),
        (b'{"kvstow":2}', "version"),
        (b'{"kvstow":1,"layout":{},"more":1}', "shape"),
        (b'{"kvstow":1,"layout":{"groups":[]}}', "shape"),
        (b'"\\ud800"', "syntax"),
        (b'{"kvstow":true}', "shape"),
        (b'{"kvstow":1.0}', "shape"),
        (b'{"kvstow":NaN}', "shape"),
        (b'{"kvstow":-1}', "range"),
        (b'{"kvstow":9223372036854775808}', "range"),
        (b" " * (MAX_BYTES + 1), "size"),
    ],
)
def test_what_is_no_manifest_has_its_own_error(document, kind):
    assert refused(document).kind == kind


@pytest.mark.parametrize(
    ("path", "value", "kind"),
    [
        ("surprise", 1, "shape"),
        ("order", "HLBNC", "shape"),
        ("nbytes", True, "shape"),
        ("nbytes", 1 << 63, "range"),
        ("nbytes", 1.5, "shape"),
        ("nbytes", 4096, "bounds"),
        ("num_slabs", 0, "slab"),
        ("num_slabs", (1 << 63) - 1, "bounds"),
        ("tp", [1, 1], "coverage"),
        ("tp", [0, 1, 2], "shape"),
        ("base_align", 0, "slab"),
        ("base_align", 1, "alignment"),
        ("groups", [], "coverage"),
        ("groups.0.group.layers", [], "spec"),
        ("groups.0.rows_per_slab", 0, "slab"),
        ("groups.0.group.layers.0.retention", {"kind": "forever"}, "shape"),
        ("groups.0.group.layers.0.retention.tokens", 7, "shape"),
        ("groups.1.group.layers.0.retention.tokens", 7, "spec"),
        ("groups.1.group.layers.0.retention.kind", "chunk", "spec"),
        ("groups.0.group.layers.0.block_tokens", 0, "spec"),
        ("groups.0.group.name", "window128", "coverage"),
        ("groups.0.group.layers.0.states", 32, "spec"),
        ("groups.0.placements.0.0.offset", 1, "alignment"),
        ("groups.0.placements.0.0.block_stride", 0, "order"),
        ("groups.0.placements.0.0.token_stride", 2, "order"),
        ("groups.0.placements.0", [], "coverage"),
        ("groups.0.group.layers.0.align", 0, "spec"),
        ("groups.0.group.layers.0.align", 7, "alignment"),
        ("groups.0.group.layers.0.heads.pieces", [[0, 9]], "spec"),
        ("groups.0.group.layers.0.fields", [], "spec"),
        ("groups.0.group.layers.0.fields.0.dtype", "float12", "shape"),
        ("groups.0.group.layers.0.fields.0.name", "v", "spec"),
        ("groups.0.group.layers.1.name", GROUPS[0]["group"]["layers"][0]["name"], "coverage"),
        ("groups.0.placements.1", GROUPS[0]["placements"][0], "sharing"),
    ],
)
def test_one_wrong_value_has_its_own_error(path, value, kind):
    assert refused(changed(path, value)).kind == kind


def test_an_absurd_number_of_layers_is_refused_by_size():
    layer = GROUPS[0]["group"]["layers"][0]
    assert refused(changed("groups.0.group.layers", [layer] * 5000)).kind == "size"


def test_an_absurd_number_of_heads_is_refused_before_anything_is_counted_out():
    document = changed(
        "groups.0.group.layers.0.heads",
        {"name": "head", "total": 1 << 60, "pieces": [[0, 1 << 60]]},
    )
    assert refused(document).kind in {"spec", "order", "alignment", "bounds", "sharing"}


NUMBERS = ("0.offset", "0.block_stride", "0.head_stride", "0.token_stride")
PATHS = st.sampled_from(
    [
        "nbytes",
        "num_slabs",
        "base_align",
        "groups.0.rows_per_slab",
        "groups.1.rows_per_slab",
        "groups.0.group.layers.0.block_tokens",
        "groups.1.group.layers.0.retention.tokens",
        *(f"groups.{g}.placements.{i}.{n}" for g in (0, 1) for i in (0, 5) for n in NUMBERS),
        *(f"groups.{g}.group.layers.{i}.states" for g in (0, 1) for i in (0, 5)),
        *(f"groups.{g}.group.layers.{i}.heads.pieces.0.1" for g in (0, 1) for i in (0, 5)),
        "groups.0.group.layers.3.fields.0.axes.0.pieces.0.1",
        "groups.0.group.layers.3.align",
    ]
)
VALUES = st.one_of(
    st.integers(0, 64),
    st.integers(0, (1 << 63) - 1),
    st.sampled_from([16, 32768, 393_216, 786_432]),
)

TINY = json.loads(
    encode(
        packed(
            grouped([attention("a"), attention("b"), attention("c", retention=Window(3), dim=4)]),
            budget=4096,
        )
    )
)


@given(st.lists(st.tuples(PATHS, VALUES), min_size=1, max_size=3))
@example([("groups.1.placements.0.0.head_stride", 1_317_624_576_693_539_402)])
def test_a_mutated_real_manifest_is_refused_or_keeps_the_laws(changes):
    document = json.loads(json.dumps(DOCUMENT))
    for path, value in changes:
        put(document["layout"], path, value)
    layout = accepted(json.dumps(document).encode())
    assert layout is None or not layout.violations()


@given(st.data())
def test_a_mutated_small_manifest_that_is_accepted_has_one_owner_per_byte(data):
    document = json.loads(json.dumps(TINY))
    path = (
        f"groups.{data.draw(st.integers(0, 1))}.placements.0.{data.draw(st.sampled_from(NUMBERS))}"
    )
    put(document["layout"], path, 4 * data.draw(st.integers(0, 80)))
    document["layout"]["num_slabs"] = data.draw(st.integers(1, 3))
    layout = accepted(json.dumps(document).encode())
    if layout is None:
        return
    for g in range(len(layout.groups)):
        claimed = [b for n in range(layout.num_blocks(g)) for b in block_bytes(layout, g, n)]
        assert len(set(claimed)) == len(claimed)
        assert max(claimed) < layout.nbytes


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_never_a_traceback(data):
    refused(data)


@given(st.integers(0, len(encode(REAL)) - 1), st.integers(1, 255))
def test_a_flipped_byte_is_refused_or_gives_a_lawful_layout(position, flip):
    data = bytearray(encode(REAL))
    data[position] ^= flip
    layout = accepted(bytes(data))
    assert layout is None or not layout.violations()


@given(st.integers(0, len(encode(REAL)) - 1))
def test_a_truncated_document_is_refused(length):
    assert refused(encode(REAL)[:length]).kind == "syntax"


def test_the_worked_example_of_the_reference_is_true():
    text = (Path(__file__).parents[2] / "docs/reference/spec.md").read_text()
    document = text.split("```json\n", 1)[1].split("```", 1)[0]
    layout = decode(document.encode())
    assert fingerprint(layout) in text


@pytest.mark.parametrize("value_section", [0, 1])
def test_every_section_is_written_with_or_without_identity(value_section):
    layer = attention("l.0", value_section=value_section)
    layout = packed(grouped([layer]), num_slabs=3)
    known = layout.identified(Identity(model="m", weights="01" * 16))
    for each in (layout, known):
        (rows,) = json.loads(encode(each))["layout"]["groups"]
        (written,), (place,) = rows["group"]["layers"], rows["placements"]
        assert [field["section"] for field in written["fields"]] == [0, value_section]
        assert [section["offset"] for section in place] == [0, 16][: 1 + value_section]
        assert decode(encode(each)) == each


def test_unknown_and_missing_keys_are_refused_wherever_they_are():
    def objects(node: Any) -> Iterator[dict[str, Any]]:
        if isinstance(node, dict):
            yield node
        for each in node.values() if isinstance(node, dict) else node:
            if isinstance(each, dict | list):
                yield from objects(each)

    known = packed(grouped([attention("l.0")]), num_slabs=3).identified(
        Identity(model="m", weights="01" * 16, config=(("a", "1"),))
    )
    document = json.loads(encode(known))
    for node in objects(document):
        node["surprise"] = 1
        assert refused(document).kind == "shape"
        del node["surprise"]
        for key in tuple(node):
            value = node.pop(key)
            # Without `base_align` or `weights`, a rule breaks before keys are compared.
            kind = {"base_align": "alignment", "weights": "spec"}.get(key, "shape")
            assert refused(document).kind == kind, key
            node[key] = value
    assert decode(json.dumps(document).encode()) == known
