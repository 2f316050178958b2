"""The site that `make docs` builds: every public name, every page and every notebook is in it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

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
    declared = re.findall(r"^::: lightning_tricks\.\w+\.(\w+)$", "".join(hook.api(kind) for kind in hook.KINDS), re.M)
    assert sorted(declared) == sorted(PUBLIC)


def test_the_navigation_has_every_page_once(hook: Any) -> None:
    class Config:
        nav: Any = None

    def flat(nav: Any) -> list[str]:
        return [page for each in nav for page in (flat(*each.values()) if isinstance(each, dict) else [each])]

    pages = flat(hook.on_config(Config()).nav)
    found = [f"api/{kind}.md" for kind in hook.KINDS] + [f"notebooks/{path.name}" for path in hook.notebooks()]
    found += [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(pages) == sorted(
        [*found, *(f"{name}.md" for name in ("index", "configs", "benchmarks", "contributing", "changelog"))]
    )


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = "".join(page.read_text() for page in (tmp_path / "api").rglob("*.html"))
    for name in PUBLIC:
        assert re.search(rf'id="lightning_tricks\.(\w+\.)*{name}"', pages), f"{name} is on no page"
    assert not dead(tmp_path)


def dead(site: Path) -> list[tuple[str, str]]:
    """The links and pictures of each page that lead nowhere in the site, anchors too."""
    pages = {page: page.read_text() for page in site.rglob("*.html") if page.name != "404.html"}
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in pages.items()}

    def found(page: Path, link: str) -> bool:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        target = target / "index.html" if target.is_dir() else target
        return target.is_file() and (not anchor or unquote(anchor) in anchors[target])

    links = [
        (page, link)
        for page, text in pages.items()
        for link in re.findall(r'<(?:a|img)\b[^>]* (?:href|src)="([^":]+)"', text)
    ]
    return [(str(page.relative_to(site)), link) for page, link in links if not found(page, link)]
