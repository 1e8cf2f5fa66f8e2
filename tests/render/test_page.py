"""Pages: one file, nothing fetched, numbers that say what the layout says."""

import json
import re
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kvstow.cli import app
from kvstow.plan.group import grouped
from kvstow.plan.layout import ORDERS
from kvstow.plan.models import model_layers
from kvstow.plan.pack import Site, packed
from kvstow.render.data import Index, group_records, layout_record
from kvstow.render.page import asset, embedded, page
from kvstow.route.route import plan_route

ROOT = Path(__file__).parents[2]


class Seen(HTMLParser):
    """What a page refers to, and the data in it."""

    def __init__(self, text):
        super().__init__()
        self.links, self.policy, self.data = [], "", ""
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        known = dict(attrs)
        self.links += [known[name] for name in ("src", "href") if name in known]
        if known.get("http-equiv") == "Content-Security-Policy":
            self.policy = known["content"]
        self._inside = known.get("id") == "data"

    def handle_data(self, data):
        if self._inside:
            self.data += data

    def handle_endtag(self, tag):
        self._inside = False


def run(*arguments):
    done = CliRunner().invoke(app, [*arguments])
    assert done.exit_code == 0, done.output
    return done


def layouts(name="gemma-3-270m", **site):
    return packed(grouped(model_layers(name).layers), budget=1 << 30, site=Site(**site))


# ── the file ──────────────────────────────────────────────────────────────────────────


def test_a_page_refers_to_nothing_outside_itself():
    seen = Seen(page("t", {"a": 1}, ("layout.js", "zoom.js", "compare.js", "plan.js")))
    assert seen.links == ["data:,"]
    assert seen.policy.startswith("default-src 'none'")
    assert "connect-src" not in seen.policy


def test_data_cannot_end_the_script_that_holds_it():
    hostile = {"name": "</script><script>alert(1)</script><!--", "line": "\u2028\u2029"}
    seen = Seen(page("</title><b>", hostile, ("route.js",)))
    assert json.loads(seen.data) == hostile
    assert "<b>" not in page("</title><b>", {}, ())
    assert "<" not in embedded(hostile)


def test_no_script_could_end_its_own_element():
    for file in (ROOT / "src/kvstow/render/assets").rglob("*.js"):
        assert "</script" not in file.read_text("utf-8").lower(), file


def test_the_vendored_library_comes_with_its_licence():
    assert "MIT" in asset("vendor/LICENSE")
    assert "v1.6.32" in asset("vendor/uplot.js")[:100]


def test_a_wheel_holds_every_asset(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assets = ROOT / "src" / "kvstow" / "render" / "assets"
    for file in assets.rglob("*"):
        if file.is_file():
            assert f"kvstow/render/assets/{file.relative_to(assets).as_posix()}" in names


# ── what is in it ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["gemma-3-270m", "jamba-mini", "deepseek-v3.2"])
def test_a_record_has_the_numbers_of_the_address_law(name, order):
    layout, index = layouts(name, order=order), Index()
    record, known = layout_record(layout, index), index.record()
    for g, group in enumerate(record["groups"]):
        for i, number in enumerate(group["layers"]):
            layer, _, _ = known["names"][number].partition(" ")
            kind = known["kinds"][group["kinds"][i]]
            section = layout.layers[layer][1].field(kind["fields"][0]["name"]).section
            view = layout.view(layer, section)
            block, head, token = group["strides"][group["stride_of"][i]]
            assert group["offsets"][i] == view.offset
            assert (block, head, token) == view.strides[:3]
            assert (kind["heads"], kind["states"]) == view.shape[1:3]
            for field in kind["fields"]:
                there = layout.field(layer, field["name"])
                assert view.offset + field["offset"] == there.offset
                size = np.prod(there.shape[3:]) * there.unit
                assert field["nbytes"] == size
        assert group["row_bytes"] == sum(run.nbytes for run in layout.runs(g, 1))
        assert group["num_layers"] == len(layout.groups[g].group.layers)


def test_the_plan_page_holds_what_plan_says_for_every_variant(tmp_path):
    file = tmp_path / "page.html"
    run("plan", "gemma-3-270m", "--memory", "1GiB", "--html", str(file))
    text = file.read_text("utf-8")
    assert len(text) < 2_000_000
    data = json.loads(Seen(text).data)
    assert {each["tp"] for each in data["variants"]} >= {1}
    for each in data["variants"]:
        if each["block_tokens"] not in (8, 32):
            continue
        asked = ("--tp", str(each["tp"]), "--block-tokens", str(each["block_tokens"]))
        for chosen, planned in data["planned"][each["planned"]]["layouts"].items():
            order, packing = chosen.split()
            said = json.loads(
                run(
                    "plan",
                    "gemma-3-270m",
                    "--memory",
                    "1GiB",
                    *asked,
                    "--order",
                    order,
                    "--packing",
                    packing,
                    "--json",
                ).stdout
            )
            assert planned["slab_bytes"] == said["slab_bytes"]
            assert planned["num_slabs"] == said["num_slabs"]
            assert planned["copies"] == list(said["transfer"]["descriptors_per_block"].values())
            assert (
                dict(zip(data["lengths"], planned["requests"], strict=True))[8192]
                == (said["capacity"]["requests"]["8192"])
            )


def test_a_page_without_scripts_still_shows_the_picture(tmp_path):
    file = tmp_path / "page.html"
    run("plan", "gemma-3-270m", "--html", str(file))
    still = re.search(r"<noscript>(.*?)</noscript>", file.read_text("utf-8"), re.DOTALL)[1]
    assert "one slab, " in still


# ── bands ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ({"order": "BLHNC"}, {"order": "BLHNC"}),
        ({"order": "LBNHC"}, {"order": "BHLNC"}),
        ({"order": "LHBNC"}, {"order": "BLNHC"}),
    ],
)
def test_bands_carry_every_byte_of_every_page_once(here, there):
    source, destination = layouts(**here), layouts(**there)
    records = group_records({"rank 0": plan_route(source, destination)}, destination)
    assert [record["name"] for record in records] == [
        rows.group.name for rows in destination.groups
    ]
    for g, record in enumerate(records):
        pages = sum(layer.page_bytes for layer in destination.groups[g].group.layers)
        if record["every"] == 1:
            carried = np.zeros(record["destination"]["block_bytes"], np.int64)
            for _, _, _, place, nbytes, _, _ in record["bands"]:
                carried[place : place + nbytes] += 1
            assert carried.max() == 1
            assert sum(band[6] for band in record["bands"]) >= pages
        assert record["source_bytes"] == sum(
            side["num_blocks"] * side["block_bytes"] for side in record["sources"]
        )


def test_blocks_of_one_period_stand_side_by_side():
    def of(tokens, pack=packed):
        groups = grouped(model_layers("llama-3.2-1b", block_tokens=tokens).layers)
        return pack(groups, num_slabs=4)

    (record,) = group_records({"r": plan_route(of(16), of(24))}, of(24))
    assert record["tokens"] == 48
    assert record["sources"][0]["num_blocks"] == 3
    assert record["destination"]["num_blocks"] == 2
    ends = max(band[3] + band[4] for band in record["bands"])
    assert ends == 2 * record["destination"]["block_bytes"]


def test_the_route_page_holds_the_document_of_route(tmp_path):
    file = tmp_path / "page.html"
    asked = ("route", "llama-3.2-1b@tp=2", "llama-3.2-1b@order=BHLNC")
    run(*asked, "--html", str(file))
    data = json.loads(Seen(file.read_text("utf-8")).data)
    document = json.loads(run(*asked, "--json").stdout)
    assert data["cost"] | {"notes": []} == document
    assert data["groups"][0]["copies"] == data["cost"]["lanes"]


def test_the_simulation_page_holds_what_simulate_says(tmp_path):
    file = tmp_path / "page.html"
    asked = ("simulate", "gemma-3-270m", "--requests", "20", "--memory", "64MiB")
    run(*asked, "--policy", "union", "--html", str(file))
    data = json.loads(Seen(file.read_text("utf-8")).data)
    said = json.loads(run(*asked, "--policy", "union", "--json").stdout)["policies"]
    assert {name: policy["figures"] for name, policy in data["policies"].items()} == said
    for policy in data["policies"].values():
        assert max(policy["curves"]["requests"]) == policy["figures"]["peak_requests"]
        assert len(policy["history"]["slabs"]) == len(policy["history"]["seconds"]) > 1
        assert len(set(policy["history"]["slabs"])) > 1
