"""Manifests: whatever document arrives is a layout that keeps the laws, or a ManifestError."""

from itertools import pairwise

from fuzzing import Reader, damaged_json, fuzzed
from kvstow.errors import ManifestError
from kvstow.plan.group import grouped
from kvstow.plan.identity import Identity
from kvstow.plan.layout import Layout, PlacedGroup
from kvstow.plan.manifest import decode, encode
from kvstow.plan.models import model_layers
from kvstow.plan.pack import Site, packed, separate
from kvstow.plan.retention import Chunk, Encoder, Window
from planning import attention, section_numbers


def layouts() -> list[Layout]:
    kinds = (None, Window(8), Chunk(8), Encoder(6))
    layers = [attention(f"l.{i}", retention=kind) for i, kind in enumerate(kinds)]
    small = packed(grouped(layers), num_slabs=4, site=Site(model="small", order="BHLNC"))
    known = Identity(model="small", weights="01" * 16, config=(("rope_theta", "10000"),))
    hybrid = grouped(model_layers("qwen3-next-80b").layers[:4])
    return [
        small,
        small.identified(known),
        separate(grouped(layers[:2]), num_slabs=3),
        packed(hybrid, num_slabs=2, site=Site(order="BLNHC")),
        packed(grouped([attention("l.0", value_section=1), *layers[1:2]]), num_slabs=3),
    ]


def check_pages(layout: Layout, rows: PlacedGroup) -> None:
    """Pages lie inside the arena, and those of the first two blocks apart from each other."""
    blocks = layout.num_slabs * rows.rows_per_slab
    cells: list[tuple[int, int]] = []
    for layer, place in zip(rows.group.layers, rows.placements, strict=True):
        heads, states = layer.heads.size, layer.states
        for number, section in enumerate(layer.sections):
            offset, head_stride, token_stride = section_numbers(place, number)
            last = (heads - 1) * head_stride + (states - 1) * token_stride
            end = offset + (blocks - 1) * place[0].block_stride + last + section.cell_bytes
            assert 0 <= offset < end <= layout.nbytes < 2**63
            cells += [
                (offset + b * place[0].block_stride + h * head_stride, section.cell_bytes)
                for b in range(min(2, blocks))
                for h in range(min(4, heads))
            ]
    ordered = sorted(cells)
    for (start, nbytes), (after, _) in pairwise(ordered):
        assert start + nbytes <= after


def read(data: bytes) -> str:
    try:
        layout = decode(data)
    except ManifestError as error:
        return f"refused: {error.kind} | {error}"
    for rows in layout.groups:
        check_pages(layout, rows)
    again = encode(layout)
    assert decode(again) == layout
    assert encode(decode(again)) == again
    return "accepted"


READER = Reader(
    name="manifests",
    read=read,
    valid=lambda: [encode(layout) for layout in layouts()],
    mutate=damaged_json,
    times=4,
)


@fuzzed(READER)
def test_a_damaged_manifest_is_a_lawful_layout_or_refused(data):
    READER.outcome(data)
