"""A real headless Chromium, and pages that fail the test when they complain.

The tests are skipped, and say so, where there is no Chromium; `scripts/test-browser` installs it.
"""

import shutil
from contextlib import contextmanager

import pytest

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def chromium():
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("no Chromium here: scripts/test-browser installs one")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium):
    """`with opened(url, width=…, scheme=…) as page`: whatever it logs or fetches is a failure."""

    @contextmanager
    def open_page(url, *, width=1000, scheme="light", allowed=("file:", "data:"), **context):
        page = chromium.new_page(
            viewport={"width": width, "height": 900}, color_scheme=scheme, **context
        )
        complaints = []
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on(
            "request",
            lambda request: (
                request.url.startswith(tuple(allowed))
                or complaints.append(f"fetched {request.url}")
            ),
        )
        try:
            page.goto(url)
            page.wait_for_timeout(150)
            yield page
            assert complaints == []
        finally:
            page.close()

    return open_page
