"""Layouts of real models, changed only on purpose.

After a change on purpose: `python tests/golden/test_layouts.py` writes the file anew.
"""

import json
from pathlib import Path

import pytest

from kvstow.plan.group import grouped
from kvstow.plan.manifest import fingerprint
from kvstow.plan.models import catalogue, model_layers
from kvstow.plan.pack import Site, packed

FILE = Path(__file__).with_name("layouts.json")
BUDGET = 40 << 30


def figures(name: str) -> dict[str, object]:
    layout = packed(grouped(model_layers(name).layers), budget=BUDGET, site=Site(model=name))
    return {
        "slab_bytes": layout.slab_bytes,
        "num_slabs": layout.num_slabs,
        "groups": {
            rows.group.name: {
                "layers": len(rows.group.layers),
                "block_tokens": rows.group.block_tokens,
                "row_bytes": layout.row_bytes(g),
                "rows_per_slab": rows.rows_per_slab,
            }
            for g, rows in enumerate(layout.groups)
        },
        "fingerprint": fingerprint(layout),
    }


@pytest.mark.parametrize("name", catalogue())
def test_the_layout_of_a_catalogue_model_is_what_it_was(name):
    assert figures(name) == json.loads(FILE.read_text())[name]


def test_the_file_holds_exactly_the_catalogue():
    assert sorted(json.loads(FILE.read_text())) == sorted(catalogue())


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: figures(name) for name in sorted(catalogue())}, indent=1))
