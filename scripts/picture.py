"""The picture in README.md and docs: one slab of a compressed hybrid, drawn by kvstow itself."""

from pathlib import Path

from kvstow.plan.group import grouped
from kvstow.plan.models import model_layers
from kvstow.plan.pack import Site, packed
from kvstow.render.svg import layout_svg

model = model_layers("deepseek-v4-flash")
layout = packed(grouped(model.layers), budget=8 << 30, site=Site(model=model.name))
file = Path(__file__).resolve().parents[1] / "docs" / "assets" / "slab.svg"
file.write_text(layout_svg(layout), "utf-8")
