"""The site that `make docs` builds: every public name, page and notebook is in it, and it works in a browser."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from tests.browser import browser
from tests.public import PUBLIC

ROOT = Path(__file__).parent.parent
pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")


@pytest.fixture(scope="module")
def hook() -> Any:
    spec = importlib.util.spec_from_file_location("docs_hook", ROOT / ".ci" / "docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_api_has_every_public_name(hook: Any) -> None:
    declared = re.findall(r"^::: lightning_tricks\.\w+\.(\w+)$", "".join(hook.api().values()), re.M)
    assert sorted(declared) == sorted(PUBLIC)


def test_no_two_pages_differ_by_capitals_only(hook: Any) -> None:
    assert len({uri.lower() for uri in hook.api()}) == len(hook.api())


def test_the_navigation_has_every_page_once(hook: Any) -> None:
    def flat(nav: Any) -> list[str]:
        return [page for each in nav for page in (_values(each) if isinstance(each, dict) else [each])]

    def _values(group: dict[str, Any]) -> list[str]:
        (pages,) = group.values()
        return [pages] if isinstance(pages, str) else flat(pages)

    found = [*hook.api(), *(f"notebooks/{path.name}" for path in hook.notebooks())]
    found += [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(flat(hook.navigation())) == sorted(
        [
            *found,
            *("index.md", "configs.md", "benchmarks.md", "contributing.md", "code_of_conduct.md"),
            *("security.md", "changelog.md"),
        ]
    )
    assert [*hook.navigation()[0]] == ["Start"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built without a warning."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_site_has_every_name_and_its_links_lead_somewhere(site: Path) -> None:
    pages = "".join(page.read_text() for page in (site / "api").rglob("*.html"))
    for name in PUBLIC:
        assert re.search(rf'id="lightning_tricks\.(\w+\.)*{name}"', pages), f"{name} is on no page"
    assert not dead(site)


@pytest.mark.slow
def test_every_page_is_markdown_too_and_llms_txt_lists_them(site: Path) -> None:
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    assert not [page for page in pages if not page.with_suffix(".md").is_file()]
    for page in pages:
        assert f'type="text/markdown" href="{page.stem}.md"' in page.read_text()
    texts = {page.with_suffix(".md"): page.with_suffix(".md").read_text() for page in pages}
    listed, full = (site / "llms.txt").read_text(), (site / "llms-full.txt").read_text()
    links = re.findall(r"^- \[.*?\]\((\S+)\)(?:: \S|$)", listed, re.MULTILINE)
    assert {*links} == {
        str(page.relative_to(site)) for page in texts if page.parent.parent.name != "api" or page.stem == "index"
    } | {"SKILL.md"}
    for page, text in texts.items():
        code = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
        for link in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", code) if "api" not in page.parts else ():
            assert (page.parent / unquote(link)).exists(), f"{page.relative_to(site)}: {link}"
        if str(page.relative_to(site)) in links:
            assert text.strip() in full
    assert "::: " not in full
    assert 500_000 < len(full) < 3_000_000


@pytest.fixture(scope="module")
def tab() -> Iterator[Any]:
    """A tab of a browser; pages are opened as files, as whoever has run `make docs` does."""
    with browser() as opened:
        yield opened.new_page()


WIDE = """() => [...document.querySelectorAll(".md-content *")].filter(thing => thing.getClientRects().length
    && thing.getBoundingClientRect().right > innerWidth + 1
    && !thing.closest(".md-typeset__scrollwrap, pre, .jp-RenderedHTMLCommon table, .headerlink"))
    .map(thing => thing.outerHTML.slice(0, 200))"""
MISSING = "() => [...document.images].filter(x => x.complete && !x.naturalWidth).map(x => x.src)"


@pytest.mark.slow
def test_the_pages_fit_a_phone_and_larger_and_load_nothing_from_elsewhere(site: Path, tab: Any) -> None:
    errors: list[str] = []
    tab.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on(
        "request", lambda request: None if request.url.startswith(("file:", "data:")) else errors.append(request.url)
    )
    pages = [page for page in site.rglob("*.html") if page.parent.parent.name != "api" and page.name != "404.html"]
    assert len(pages) > 90
    pages += [site / "api" / "callbacks" / "index.html", site / "api" / "callbacks" / "EMA.html"]
    for page in pages:
        tab.goto(page.as_uri())
        tab.add_style_tag(content="* { transition: none !important }")
        for width in (390, 815, 1440):
            tab.set_viewport_size({"width": width, "height": 900})
            assert tab.evaluate("document.documentElement.scrollWidth") == width, f"{page} at {width}"
            assert not tab.evaluate(WIDE), f"{page} at {width}"
        assert not tab.evaluate(MISSING), page
        assert not errors, page


@pytest.mark.slow
def test_what_is_folded_is_shown_as_a_table(site: Path) -> None:
    for page in ("benchmarks.html", "tricks/EMA.html"):
        folded = re.findall(r"<details>(.*?)</details>", (site / page).read_text(), re.DOTALL)
        assert folded
        assert all("<td" in each and "|---" not in each for each in folded)


@pytest.mark.slow
def test_the_search_finds_a_card_without_a_server(site: Path, tab: Any) -> None:
    tab.set_viewport_size({"width": 1440, "height": 900})
    tab.goto((site / "index.html").as_uri())
    tab.locator("input.md-search__input").click()
    tab.keyboard.type("EMA")
    found = tab.locator(".md-search-result__item a")
    found.first.wait_for(state="attached")
    assert found.first.get_attribute("href").endswith("tricks/EMA.html?h=ema")


@pytest.mark.slow
def test_dark_is_chosen_by_the_system_and_by_hand(site: Path, tab: Any) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    logo = "[...document.querySelectorAll('h1 img')].filter(x => x.offsetWidth).map(x => x.src.split('/').pop())"
    tab = tab.context.browser.new_page(color_scheme="dark")
    tab.goto((site / "index.html").as_uri())
    dark, at_night = tab.evaluate(background), tab.evaluate(logo)
    tab.locator("label[title='Light mode']").click()
    assert tab.evaluate(background) == "rgb(255, 255, 255)" != dark
    assert (at_night, tab.evaluate(logo)) == (["logo-dark.svg#only-dark"], ["logo.svg#only-light"])


@pytest.mark.slow
def test_the_first_column_of_a_wide_table_stays(site: Path, tab: Any) -> None:
    tab.set_viewport_size({"width": 815, "height": 900})
    tab.goto((site / "compatibility.html").as_uri())
    table = tab.locator(".md-typeset__scrollwrap").last
    cells = [table.locator("tbody tr").first.locator("td").nth(index) for index in (0, 5)]
    before = [cell.bounding_box()["x"] for cell in cells]
    table.evaluate("wrap => wrap.scrollLeft = 200")
    after = [cell.bounding_box()["x"] for cell in cells]
    assert after[0] == pytest.approx(before[0], abs=1)  # a border
    assert after[1] == before[1] - 200


def dead(site: Path) -> list[tuple[str, str]]:
    """The links and pictures of each page that lead nowhere in the site, anchors too."""
    pages = {page: page.read_text() for page in site.rglob("*.html") if page.name != "404.html"}
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in pages.items()}

    def found(page: Path, link: str) -> bool:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        target = target / "index.html" if target.is_dir() else target
        return target.is_file() and (not anchor or target not in anchors or unquote(anchor) in anchors[target])

    links = [
        (page, link)
        for page, text in pages.items()
        for link in re.findall(r'<(?:a|img)\b[^>]* (?:href|src)="([^":]+)"', text)
    ]
    return [(str(page.relative_to(site)), link) for page, link in links if not found(page, link)]
