"""What pages do when people look at them, in a real browser."""

import json
import re
import shlex

import pytest
from typer.testing import CliRunner

from kvstow.cli import app
from kvstow.plan.manifest import decode

MODEL = "gemma-3-270m"
MEMORY = ("--memory", "256MiB")


def run(*arguments):
    done = CliRunner().invoke(app, [*arguments])
    assert done.exit_code == 0, done.output
    return done


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """One page of each kind, made by the commands."""
    folder = tmp_path_factory.mktemp("pages")
    run(
        "plan", MODEL, *MEMORY, "--html", f"{folder}/plan.html", "--manifest", f"{folder}/plan.json"
    )
    run("plan", "deepseek-v4-flash", "--html", f"{folder}/hybrid.html")
    run(
        "route",
        "llama-3.2-1b@tp=2",
        "llama-3.2-1b@order=LBHNC,block_tokens=64",
        "--html",
        f"{folder}/route.html",
    )
    run(
        "simulate",
        MODEL,
        "--requests",
        "60",
        *MEMORY,
        "--policy",
        "union",
        "--html",
        f"{folder}/simulate.html",
    )
    run(
        "compare",
        "gemma-3-27b",
        "--tp",
        "1,2,3",
        "--memory",
        "60GiB",
        "--html",
        f"{folder}/compare.html",
    )
    return folder


# ── all of them ───────────────────────────────────────────────────────────────────────

CUT_OFF = """() => [...document.querySelectorAll('main *')].filter((node) => {
  if (node.closest('.scroll, svg, .uplot, .visually-hidden')) return false;
  const box = node.getBoundingClientRect();
  if (!box.width) return false;
  const inline = getComputedStyle(node).display === 'inline';
  return (!inline && node.scrollWidth > node.clientWidth + 1)
    || box.right > document.documentElement.clientWidth + 1 || box.left < -1;
}).map((node) => `${node.tagName} ${node.className} ${node.textContent.slice(0, 60)}`)"""

NAMES_OUTSIDE = """() => [...document.querySelectorAll('.seg-name')].filter((text) => {
  const box = text.getBoundingClientRect();
  const bar = text.closest('svg').getBoundingClientRect();
  return box.left < bar.left - 1 || box.right > bar.right + 1;
}).map((text) => text.textContent)"""

NAMELESS = """() => {
  const kinds = '[role=option], [role=listbox], [role=img], input, button, canvas';
  return [...document.querySelectorAll(kinds)].filter((node) =>
    !(node.getAttribute('aria-label') || node.labels?.length || node.textContent.trim()))
    .map((node) => node.outerHTML.slice(0, 120));
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 800, 1600])
@pytest.mark.parametrize("name", ["plan", "hybrid", "route", "simulate", "compare"])
def test_a_page_opens_quietly_and_nothing_is_cut_off(opened, pages, name, width, scheme):
    with opened(f"file://{pages}/{name}.html", width=width, scheme=scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(CUT_OFF) == []
        assert page.evaluate(NAMES_OUTSIDE) == []
        assert page.evaluate(NAMELESS) == []


@pytest.mark.parametrize("name", ["plan", "hybrid", "route", "simulate"])
def test_every_rectangle_can_be_focused_and_says_what_it_is(opened, pages, name):
    with opened(f"file://{pages}/{name}.html") as page:
        silent = page.evaluate("""() => [...document.querySelectorAll('.seg')].filter((node) => {
            node.focus();
            return document.activeElement !== node || !node.getAttribute('aria-label')
              || document.getElementById('tip').hidden;
        }).length""")
        assert silent == 0
        assert name == "simulate" or page.locator(".seg").count() > 20


CONTRAST = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const paper = parse(getComputedStyle(document.documentElement).backgroundColor);
  return [...document.querySelectorAll('.seg')].map((node) => {
    const style = getComputedStyle(node);
    if (!style.fill.startsWith('rgb')) return 21;
    const alpha = Number(style.fillOpacity);
    const mixed = parse(style.fill).slice(0, 3).map((v, i) => v * alpha + paper[i] * (1 - alpha));
    const ink = parse(getComputedStyle(document.documentElement).color);
    const [a, b] = [light(mixed), light(ink)].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  }).reduce((least, each) => Math.min(least, each), 21);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_names_on_rectangles_have_enough_contrast(opened, pages, scheme):
    with opened(f"file://{pages}/hybrid.html", scheme=scheme) as page:
        assert page.evaluate(CONTRAST) >= 4.5


def test_the_switch_of_colours_changes_them(opened, pages):
    with opened(f"file://{pages}/plan.html") as page:
        before = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        page.get_by_role("button", name="Switch to dark colours").click()
        after = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert before != after


def test_a_printed_page_has_no_controls(opened, pages):
    with opened(f"file://{pages}/plan.html") as page:
        assert page.locator(".controls").is_visible()
        page.emulate_media(media="print")
        assert not page.locator(".controls").is_visible()
        assert page.locator(".bar").first.is_visible()
        assert page.pdf()[:4] == b"%PDF"


# ── plan ──────────────────────────────────────────────────────────────────────────────


def test_the_command_on_the_page_makes_the_same_layout(opened, tmp_path):
    asked = [MODEL, *MEMORY, "--align", "page=256", "--align", "*.0.*=512", "--name", "it's mine"]
    manifest = run("plan", *asked, "--html", f"{tmp_path}/plan.html", "--manifest", "-").stdout
    with opened(f"file://{tmp_path}/plan.html") as page:
        command = page.locator("code", has_text="kvstow plan").first.text_content()
    words = shlex.split(command)
    assert words[:3] == ["kvstow", "plan", MODEL]
    assert run(*words[1:], "--manifest", "-").stdout == manifest


def test_rows_are_drawn_to_scale(opened, pages):
    layout = decode((pages / "plan.json").read_bytes())
    with opened(f"file://{pages}/plan.html", width=1600) as page:
        for g, rows in enumerate(layout.groups):
            bar = page.locator('[data-level="slab"] .bar').nth(g)
            whole = bar.bounding_box()["width"]
            boxes = [each.bounding_box() for each in bar.locator(".seg:not(.padding)").all()]
            assert len(boxes) == rows.rows_per_slab
            part = layout.row_bytes(g) / layout.slab_bytes
            for box in boxes:
                assert box["width"] / whole == pytest.approx(part, abs=3 / whole)


def test_hovering_a_page_tells_layer_offset_bytes_and_retention(opened, pages):
    layout = decode((pages / "plan.json").read_bytes())
    with opened(f"file://{pages}/plan.html") as page:
        page.locator('[data-level="row"] .seg').nth(1).hover()
        told = page.locator("#tip").inner_text()
    rows = layout.groups[0]
    layer, (place,) = rows.group.layers[1], rows.placements[1]
    block = rows.rows_per_slab  # the first row of slab 1
    assert layer.name in told
    assert f"{place.offset + block * place.block_stride:,} bytes" in told
    assert f"{layer.page_bytes:,} bytes" in told
    assert "every token, as long as the request lives" in told


def test_arrow_keys_move_and_enter_zooms(opened, pages):
    layout = decode((pages / "plan.json").read_bytes())
    with opened(f"file://{pages}/plan.html") as page:
        page.locator('[data-level="row"] [tabindex="0"]').focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        focused = page.evaluate("document.activeElement.getAttribute('aria-label')")
        assert focused.startswith(layout.groups[0].group.layers[2].name)
        page.keyboard.press("Enter")
        assert layout.groups[0].group.layers[2].name in (
            page.locator('[data-level="page"] h3').inner_text()
        )
        page.keyboard.press("ArrowDown")
        inside = page.evaluate("document.activeElement.closest('[data-level]').dataset.level")
        assert inside == "page"
        page.keyboard.press("Escape")
        assert not page.locator("#tip").is_visible()


@pytest.mark.parametrize(("level", "which"), [("row", 2), ("page", 7), ("cell", 1)])
def test_the_address_on_the_page_is_that_of_the_view(opened, pages, level, which):
    layout = decode((pages / "plan.json").read_bytes())
    with opened(f"file://{pages}/plan.html", width=1600) as page:
        page.locator(f'[data-level="{level}"] .seg').nth(which).click()
        text = page.locator(".address").inner_text().replace(",", "")
    numbers = re.search(
        r"block (\d+) .*head (\d+) .*(?:state|token) (\d+) × \d+ \+ (\w+) \d+ = (\d+)", text
    )
    block, head, token = (int(n) for n in numbers.group(1, 2, 3))
    layer = layout.groups[0].group.layers[2 if level == "row" else 0]
    view = layout.field(layer.name, numbers[4])
    expected = (
        view.offset
        + block * view.axis("block").stride
        + head * view.axis("head").stride
        + token * view.axis("token").stride
    )
    assert int(numbers[5]) == expected
    if level == "page":
        assert (head, token) == (0, 7)
    if level == "cell":
        assert numbers[4] == "v"


@pytest.mark.parametrize(
    ("slider", "option"), [("block_tokens", "--block-tokens"), ("order", "--order")]
)
def test_a_slider_plans_again(opened, pages, slider, option):
    with opened(f"file://{pages}/plan.html") as page:
        control = page.locator(f"#{slider}")
        control.focus()
        page.keyboard.press("End")
        chosen = page.locator(f'output[for="{slider}"]').inner_text()
        said = json.loads(run("plan", MODEL, *MEMORY, option, chosen, "--json").stdout)
        told = page.locator(".tiles").inner_text()
        assert f"{max(said['transfer']['descriptors_per_block'].values())} cop" in told
        assert f"{said['capacity']['requests']['8192']}\nrequests of 8,192" in told
        assert f"{said['num_slabs']:,} slabs" in told
        assert f"{option} {chosen}" in page.locator("footer").inner_text()


def test_packing_union_shows_its_padding(opened, pages):
    with opened(f"file://{pages}/hybrid.html") as page:
        page.get_by_role("button", name="union").click()
        assert page.locator('[data-level="slab"] .padding').count() > 0
        said = json.loads(run("plan", "deepseek-v4-flash", "--packing", "union", "--json").stdout)
        worst = max(said["padding_bytes_per_slab"].values()) / said["slab_bytes"]
        assert f"{100 * worst:.1f} %" in page.locator(".tiles").inner_text()


def test_every_choice_of_every_slider_draws_something(opened, pages):
    with opened(f"file://{pages}/hybrid.html", width=800) as page:
        for packing in ("slab", "union", "separate"):
            page.get_by_role("button", name=packing, exact=True).click()
            for slider in ("order", "block_tokens", "tp"):
                most = int(page.locator(f"#{slider}").get_attribute("max"))
                for value in range(most + 1):
                    page.locator(f"#{slider}").fill(str(value))
                    assert page.locator(".bar .seg").count() > 10
                    assert page.locator("[role=alert]").inner_text() == ""


# ── compare, route and simulate ────────────────────────────────────────────────────────────────


VISIBLE = """(node) => {
  const box = node.getBoundingClientRect();
  return box.width > 0 && box.left >= 0 && box.right <= document.documentElement.clientWidth;
}"""


def test_a_narrow_screen_shows_memory_command_answer_and_that_there_is_more(opened, pages):
    with opened(f"file://{pages}/compare.html", width=400) as page:
        assert "arena 60 GiB" in page.locator("header").inner_text()
        assert "tokens per block 16, kv dtype bfloat16" in page.locator("header").inner_text()
        assert page.locator("header p").evaluate(VISIBLE)
        assert page.locator("code", has_text="kvstow compare gemma-3-27b").evaluate(VISIBLE)
        answers = page.locator("thead th", has_text="requests of 8,192")
        assert answers.evaluate(VISIBLE)
        best = page.locator("tr.chosen td").nth(1)
        assert best.evaluate(VISIBLE)
        hint = "(node) => getComputedStyle(node, '::before').content"
        assert "Scroll sideways" in page.locator(".scroll").evaluate(hint)


def test_a_band_tells_both_of_its_ends(opened, pages):
    with opened(f"file://{pages}/route.html") as page:
        page.locator(".band").first.focus()
        told = page.locator("#tip").inner_text()
        assert "rank 0" in told
        assert re.search(r"block 0, byte 0 of it", told)
        page.keyboard.press("End")
        assert "rank 1" in page.evaluate("document.activeElement.getAttribute('aria-label')")


def test_the_way_that_an_agent_takes_is_marked(opened, pages):
    with opened(f"file://{pages}/route.html") as page:
        cost = json.loads(page.locator("script[type='application/json']").inner_text())["cost"]
        (way,) = cost["way"].split(" and ")
        rows = page.locator("tbody tr", has_text=way)
        marked = page.locator("tbody tr.chosen", has_text=way)
        assert marked.count() >= 1
        assert rows.count() >= marked.count()
        assert marked.first.inner_text().startswith(way)


def test_the_scrubber_moves_the_slabs(opened, pages):
    with opened(f"file://{pages}/simulate.html") as page:
        told = set()
        most = int(page.locator("#scrubber").get_attribute("max"))
        for value in range(0, most + 1, max(1, most // 6)):
            page.locator("#scrubber").fill(str(value))
            told.add(page.locator(".level canvas").first.get_attribute("aria-label"))
        assert len(told) > 2
        assert all(re.search(r"(nobody|full|window512) [\d.]+ %", each) for each in told)


def test_play_moves_the_scrubber(opened, pages):
    with opened(f"file://{pages}/simulate.html") as page:
        page.locator("#scrubber").fill("0")
        page.get_by_role("button", name="Play").click()
        for _ in range(100):
            if int(page.locator("#scrubber").input_value()) > 3:
                break
            page.wait_for_timeout(50)
        assert int(page.locator("#scrubber").input_value()) > 3
        page.get_by_role("button", name="Pause").click()


def test_a_chart_s_numbers_can_be_read_as_a_table(opened, pages):
    with opened(f"file://{pages}/plan.html") as page:
        page.get_by_text("the numbers").first.click()
        table = page.locator("details[open] table").first.inner_text()
        said = json.loads(run("plan", MODEL, *MEMORY, "--json").stdout)
        assert re.search(rf"8,192\s+{said['capacity']['requests']['8192']}\s", table)
