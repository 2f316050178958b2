"""docs/: its tables are those of the package, its code runs, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lightning_tricks as lt

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def test_the_presets_are_all_there() -> None:
    row = r"^\| `(\w+)` \| `(\w+)\((.*?)\)` \| (\S+) \| (.*) \|$"
    written = re.findall(row, (DOCS / "strategies.md").read_text(), re.MULTILINE)
    assert [
        {"name": name, "strategy": kind, "arguments": eval(f"dict({given})"), "precision": precision, "when": when}
        for name, kind, given, precision, when in written
    ] == lt.presets()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_inside_the_repository_resolve(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", page.read_text()) if not link.startswith("http")]
    assert not [link for link in links if not (DOCS / link).exists()]


@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`")  # Lightning, of its default logger
def test_the_code_of_the_strategies_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "strategies.md").read_text(), re.S)
    assert len(blocks) == 2
    exec("\n".join(blocks), {})
