"""A headless Chromium for the tests of pages, and what GitHub makes of Markdown."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

WIDTH = 815  # of the column in which GitHub shows a README
# What decides about widths in GitHub's own sheet: a table is as wide as its content, up to the column, then it scrolls.
STYLE = """
body { margin: 0; font: 16px/1.5 "Noto Sans", Helvetica, Arial, sans-serif; overflow-wrap: break-word }
table { display: block; width: max-content; max-width: 100%; overflow: auto; border-collapse: collapse }
th, td { padding: 6px 13px; border: 1px solid #d1d9e0 }
code { padding: .2em .4em; font: 85% ui-monospace, "Liberation Mono", monospace; white-space: break-spaces }
pre { padding: 16px; overflow: auto }
pre > code { padding: 0; white-space: pre }
img { max-width: 100% }
ul, ol { padding-left: 2em }
"""


@contextmanager
def browser() -> Iterator[Any]:
    """The Chromium that is named, one of the system, or playwright's own; the test is skipped where there is none."""
    remedy = "pip install playwright && playwright install chromium, or CHROMIUM=/path/to/chromium"
    sync_api = pytest.importorskip("playwright.sync_api", reason=f"needs a browser: {remedy}")
    with sync_api.sync_playwright() as playwright:
        system = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
        paths = (os.environ.get("CHROMIUM"), *system, playwright.chromium.executable_path)
        path = next((path for path in paths if path and Path(path).exists()), None)
        if path is None:
            pytest.skip(f"needs a browser: {remedy}")
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


def as_on_github(page: Path) -> str:
    """The HTML of a Markdown file, with its pictures beside it."""
    from markdown_it import MarkdownIt

    html = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(page.read_text())
    return f'<!doctype html><meta charset="utf-8"><base href="{page.parent.as_uri()}/"><style>{STYLE}</style>{html}'
