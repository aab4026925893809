"""A browser, and pages in it: what it says on its console, or asks a network for, is a fault."""

import os
import shutil

import pytest
from playwright.sync_api import sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def browser():
    path = os.environ.get("BROWSER_PATH") or next(filter(None, map(shutil.which, NAMES)), None)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def show(browser, tmp_path):
    opened, faults = [], []

    def show(page, **context):
        path = tmp_path / f"{len(opened)}.html"
        path.write_bytes(page)
        opened.append(browser.new_context(**{"viewport": {"width": 1300, "height": 800}} | context))
        tab = opened[-1].new_page()
        tab.on("console", lambda message: faults.append(message.text))
        tab.on("pageerror", lambda error: faults.append(str(error)))
        tab.on("request", lambda asked: asked.url == path.as_uri() or faults.append(asked.url))
        tab.goto(path.as_uri())
        tab.wait_for_selector("#page[data-ready]")
        return tab

    yield show
    for context in opened:
        context.close()
    assert faults == []
