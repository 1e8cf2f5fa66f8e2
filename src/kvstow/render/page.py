"""Pages in one file: markup, style, script and numbers together, nothing fetched.

The browser is told so, too: the page's content policy allows no connection at all.
"""

import json
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

CHARTS = ("vendor/uplot.js",)
COMMON = ("dom.js", "strip.js", "chart.js")

ALONE = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""No connection, whatever a page's script might try."""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="generator" content="kvstow">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}
</style>
</head>
<body>
<noscript>
<h1>{title}</h1>
<p>This page explains itself with a script. Without one, this is what remains:</p>
{still}
</noscript>
<main id="page"></main>
<script type="application/json" id="data">{data}</script>
{scripts}
</body>
</html>
"""


def page(
    title: str,
    data: dict[str, Any],
    scripts: Sequence[str],
    *,
    still: str = "",
    policy: str = ALONE,
) -> str:
    """A self-contained page: `scripts` are names of assets that draw `data` into it.

    `still` is markup for readers without scripts.
    """
    return _PAGE.format(
        title=escape(title),
        policy=escape(policy, quote=False),
        style="\n".join(asset(name) for name in ("base.css", "vendor/uplot.css")),
        still=still,
        data=embedded(data),
        scripts=f"<script>{_script(CHARTS)}</script>\n<script>{_wrapped(scripts)}</script>",
    )


def embedded(data: dict[str, Any]) -> str:
    """JSON that no HTML parser takes for anything else."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


@cache
def asset(name: str) -> str:
    """The text of one file of this package."""
    return files("kvstow.render").joinpath("assets", *name.split("/")).read_text("utf-8")


def _script(names: Sequence[str]) -> str:
    return "\n".join(asset(name) for name in names)


def _wrapped(names: Sequence[str]) -> str:
    """The scripts in one scope of their own."""
    return f'(() => {{\n"use strict";\n{_script((*COMMON, *names))}\n}})();'
