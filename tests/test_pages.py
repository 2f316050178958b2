"""README, cards and guide in a browser, as wide as GitHub shows them: nothing is cut off, every picture is there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.browser import WIDTH, as_on_github, browser
from tests.test_docs import MARKDOWN, named

ROOT = Path(__file__).parent.parent
CARDS = ROOT / "docs" / "tricks"
SCROLLING = {  # tables of many columns, which do not have to fit
    f"docs/{name}.md" for name in ("clients", "coming_from", "compatibility", "optimizers", "versions")
}
WIDE = """() => [...document.querySelectorAll("body *")].filter(thing => !thing.matches("pre *, table *")
    && (thing.getBoundingClientRect().right > innerWidth + 1
        || thing.tagName == "TABLE" && thing.scrollWidth > thing.clientWidth + 1)).map(thing => thing.outerHTML)"""
MISSING = "() => [...document.images].filter(image => !image.naturalWidth).map(image => image.src)"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tab() -> Iterator[Any]:
    with browser() as opened:
        yield opened.new_page(viewport={"width": WIDTH, "height": 900})


def show(tab: Any, page: Path, folder: Path) -> None:
    (file := folder / "page.html").write_text(as_on_github(page))
    tab.goto(file.as_uri())


@pytest.mark.parametrize("page", [page for page in MARKDOWN if named(page) not in SCROLLING], ids=named)
def test_a_page_fits_the_column(page: Path, tab: Any, tmp_path: Path) -> None:
    show(tab, page, tmp_path)
    assert tab.evaluate("document.documentElement.scrollWidth") == WIDTH
    assert not tab.evaluate(WIDE)
    assert not tab.evaluate(MISSING)


@pytest.mark.parametrize("name", sorted(SCROLLING))
def test_of_a_page_with_many_columns_the_tables_alone_are_wide(name: str, tab: Any, tmp_path: Path) -> None:
    show(tab, ROOT / name, tmp_path)
    assert tab.evaluate("document.documentElement.scrollWidth") == WIDTH
    assert any(found.startswith("<table") for found in tab.evaluate(WIDE))
    assert not [found for found in tab.evaluate(WIDE) if not found.startswith("<table")]
    assert not tab.evaluate(MISSING)


def test_what_is_too_wide_or_missing_is_seen(tab: Any, tmp_path: Path) -> None:
    """The measure itself: a long name in a table, a wide box, a picture that is not there."""
    bad = tmp_path / "bad.md"
    table = f"|a|b|\n|---|---|\n|`{'x' * 120}`|b|\n"
    bad.write_text(f"{table}\n<div style='width: 900px'>wide</div>\n\n![none](none.svg)\n")
    show(tab, bad, tmp_path)
    assert [found[:4] for found in tab.evaluate(WIDE)] == ["<tab", "<div"]
    assert len(tab.evaluate(MISSING)) == 1
    assert tab.evaluate("document.documentElement.scrollWidth") > WIDTH


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_logo_can_be_seen_on_its_background(scheme: str, tab: Any, tmp_path: Path) -> None:
    """The shares of light and dark pixels: a name in the background's colour would be lost."""
    from PIL import Image

    tab.emulate_media(color_scheme=scheme)
    show(tab, ROOT / "README.md", tmp_path)
    tab.add_style_tag(content=f"body {{ background: {'#fff' if scheme == 'light' else '#0d1117'} }}")
    tab.locator("img").first.screenshot(path=str(tmp_path / "logo.png"))
    tab.emulate_media(color_scheme="light")
    grey = np.asarray(Image.open(tmp_path / "logo.png").convert("L"), dtype=int)
    name = grey[:, grey.shape[1] // 4 :]
    assert (abs(name - name[0, 0]) > 150).mean() > 0.03
