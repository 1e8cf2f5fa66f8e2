"""Pages in one file: markup, style, script and numbers together, nothing fetched.

The browser is told so, too: the page's content policy allows no connection at all.
"""

import json
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

COMMON = ("dom.js", "strip.js", "chart.js")

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'; img-src data:">
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
<pre>
{still}
</pre>
</noscript>
<main id="page"></main>
<script type="application/json" id="data">{data}</script>
<script>{charts}</script>
<script>{script}</script>
</body>
</html>
"""


def page(title: str, data: dict[str, Any], scripts: Sequence[str], *, still: str = "") -> str:
    """A self-contained page: `scripts` are names of assets that draw `data` into it.

    `still` is text for readers without scripts.
    """
    drawing = "\n".join(map(asset, (*COMMON, *scripts)))
    return _PAGE.format(
        title=escape(title),
        style="\n".join(map(asset, ("base.css", "vendor/uplot.css"))),
        still=escape(still),
        data=embedded(data),
        charts=asset("vendor/uplot.js"),
        script=f'(() => {{\n"use strict";\n{drawing}\n}})();',
    )


def embedded(data: dict[str, Any]) -> str:
    """JSON that no HTML parser takes for anything else."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


@cache
def asset(name: str) -> str:
    """The text of one file of this package."""
    return files("kvstow.render").joinpath("assets", *name.split("/")).read_text("utf-8")
