"""Simulations as one self-contained page: a table and a few plots, drawn as SVG."""

from collections.abc import Callable, Mapping, Sequence
from html import escape

from kvstow.blocks.simulate.replay import Sample
from kvstow.blocks.simulate.report import Report

WIDTH, HEIGHT, LEFT, BOTTOM = 760, 220, 64, 28
COLOURS = {"slab": "#1b6ca8", "union": "#c8553d"}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 800px; margin: 2em auto; color: #222; }
h2 { font-size: 1.1em; margin-bottom: 0; }
svg text { font: 12px system-ui, sans-serif; fill: #555; }
table { border-collapse: collapse; } td, th { padding: .2em .8em; text-align: right; }
th:first-child, td:first-child { text-align: left; }
"""

Reading = Callable[[Sample], float]

PLOTS: tuple[tuple[str, Reading], ...] = (
    ("Requests at once", lambda s: s.requests),
    ("Requests waiting", lambda s: s.waiting),
    ("GiB in use", lambda s: s.waste.in_use / 2**30),
    ("GiB cached", lambda s: s.cached_bytes / 2**30),
    ("Padding and fragmentation, % of bytes in use", lambda s: 100
     * (s.waste.padding + s.waste.fragmentation) / max(1.0, s.waste.in_use)),
    ("Block rounding, % of bytes in use", lambda s: 100
     * s.waste.rounding / max(1.0, s.waste.in_use)),
)  # fmt: skip


def page(model: str, trace: str, reports: Mapping[str, Report]) -> str:
    """The whole page; it loads nothing from anywhere."""
    title = f"{escape(model)}: {escape(trace)}"
    plots = "\n".join(
        f"<h2>{escape(name)}</h2>\n{_plot({p: r.samples for p, r in reports.items()}, reading)}"
        for name, reading in PLOTS
    )
    return (
        f"<!doctype html>\n<html lang='en'><meta charset='utf-8'><title>{title}</title>\n"
        f"<style>{STYLE}</style>\n<h1>{title}</h1>\n{_table(reports)}\n{_legend(reports)}\n"
        f"{plots}\n</html>\n"
    )


def _table(reports: Mapping[str, Report]) -> str:
    rows: list[tuple[str, Callable[[Report], str]]] = [
        ("requests at once, mean", lambda r: f"{r.mean_requests:,.1f}"),
        ("requests at once, peak", lambda r: f"{r.peak_requests:,}"),
        ("completed", lambda r: f"{r.completed:,}"),
        ("preemptions", lambda r: f"{r.preemptions:,}"),
        ("padding", lambda r: f"{100 * r.waste['padding']:.2f} %"),
        ("slab fragmentation", lambda r: f"{100 * r.waste['fragmentation']:.2f} %"),
        ("block rounding", lambda r: f"{100 * r.waste['rounding']:.2f} %"),
        ("prompt tokens found cached", lambda r: f"{100 * r.hit_rate:.2f} %"),
        ("rows per run", lambda r: f"{r.mean_run_rows:.1f}"),
    ]
    head = "".join(f"<th>{escape(name)}</th>" for name in ("", *reports))
    body = "".join(
        f"<tr><td>{name}</td>{''.join(f'<td>{of(r)}</td>' for r in reports.values())}</tr>"
        for name, of in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _legend(reports: Mapping[str, Report]) -> str:
    parts = [f"<b style='color:{_colour(name)}'>— {escape(name)}</b>" for name in reports]
    return f"<p>{' '.join(parts)}, over simulated seconds</p>"


def _colour(policy: str) -> str:
    return COLOURS.get(policy, "#444")


def _plot(samples: Mapping[str, Sequence[Sample]], reading: Reading) -> str:
    lines = {name: [(s.seconds, reading(s)) for s in part] for name, part in samples.items()}
    points = [point for line in lines.values() for point in line]
    most_x = max((x for x, _ in points), default=0.0) or 1.0
    most_y = max((y for _, y in points), default=0.0) or 1.0
    across, up = WIDTH - LEFT - 10, HEIGHT - BOTTOM - 10

    def at(x: float, y: float) -> str:
        return f"{LEFT + x / most_x * across:.1f},{HEIGHT - BOTTOM - y / most_y * up:.1f}"

    drawn = "".join(
        f"<polyline fill='none' stroke='{_colour(name)}' stroke-width='1.5' "
        f"points='{' '.join(at(x, y) for x, y in line)}'/>"
        for name, line in lines.items()
    )
    axes = (
        f"<polyline fill='none' stroke='#999' points='{at(0, most_y)} {at(0, 0)} {at(most_x, 0)}'/>"
        f"<text x='{LEFT - 6}' y='18' text-anchor='end'>{most_y:.4g}</text>"
        f"<text x='{LEFT - 6}' y='{HEIGHT - BOTTOM}' text-anchor='end'>0</text>"
        f"<text x='{WIDTH - 10}' y='{HEIGHT - 8}' text-anchor='end'>{most_x:.4g} s</text>"
    )
    return f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img'>{axes}{drawn}</svg>"
