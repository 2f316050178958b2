"""What coding agents read: SKILL.md (`make exports`), and llms.txt and every page as Markdown, as a hook of mkdocs.

The skill is the prose of skill.md, the tables of docs/choose.md and a line for each card. In the site, a page has its
Markdown beside its HTML, llms.txt lists the pages, and llms-full.txt has the text of all but the reference.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_tricks_cli.cards import FOLDER
from lightning_tricks_cli.catalogue import CATALOGUE, Row

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.nav import Navigation
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
SKILL = ROOT / "skills" / "lightning-tricks" / "SKILL.md"
SUMMARY = "Training tricks for a stock PyTorch Lightning Trainer: a callback, a mixin or a strategy string."
LINK = re.compile(r"\[([^\]]*)\]\(([^)]+)\)")


# -- the skill --------------------------------------------------------------------------------------------------------


def skill() -> str:
    """The text of SKILL.md."""
    parts = {"SYMPTOMS": choices("By symptom"), "TASKS": choices("By task"), "CARDS": lines()}
    text = (ROOT / ".ci" / "skill.md").read_text()
    for name, part in parts.items():
        text = text.replace(f"@{name}@", part)
    return text


def choices(heading: str) -> str:
    """A table of docs/choose.md as a list, without its links."""
    table = (ROOT / "docs" / "choose.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    told = ([LINK.sub(r"\1", cell).strip(" |") for cell in row] for row in rows)
    return "\n".join(f"- {first}: {'; then '.join(filter(None, rest))}" for first, *rest in told)


def lines() -> str:
    """A line for each card, by group."""
    groups = groupby(CATALOGUE, lambda row: row.group)
    return "\n\n".join("\n".join([f"### {group}", "", *map(line, rows)]) for group, rows in groups)


def line(row: Row) -> str:
    """The line of code of a card, what it does, and its first reasons for and against."""
    text = (FOLDER / f"{row.names[0]}.md").read_text()
    others = ", ".join(f"`{name}`" for name in row.names if not re.search(rf"\b{name}\b", row.line))
    also = f" Also {others}." if others else ""
    cost = f" Cost: {row.cost}." if row.cost else ""
    return f"- `{row.line}` {row.what}{also}{cost} When: {first(text, 'When')} Not: {first(text, 'When not')}"


def first(text: str, heading: str) -> str:
    """The first item of a section, on one line, without links."""
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    item = section.strip().removeprefix("- ").split("\n- ")[0].split("\n\n")[0]
    return LINK.sub(r"\1", " ".join(item.split()))


# -- the site ---------------------------------------------------------------------------------------------------------

texts: dict[str, str] = {}  # the Markdown of the pages, by their places in the site
navigation: list[Any] = []


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keep the Markdown, whose links lead to pages of the site: this hook comes after that of docs.py."""
    uri = beside(page)
    if not uri.startswith("notebooks/"):
        texts[uri] = moved(reference(markdown) if uri.startswith("api/") else markdown)
    return markdown


def beside(page: Page) -> str:
    """The place of a page's Markdown, beside its HTML."""
    return str(Path(page.file.dest_uri).with_suffix(".md"))


def moved(text: str) -> str:
    """Markdown with links to the Markdown of notebooks and of the list of cards."""

    def told(link: re.Match[str]) -> str:
        if link[2].startswith("http"):
            return link[0]
        return re.sub(r"\.ipynb\b", ".md", link[0].replace("README.md", "index.md"))

    return LINK.sub(told, text)


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Keep the order of the pages."""
    navigation[:] = nav.items
    return nav


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Say where the Markdown of a page is."""
    name = Path(beside(page)).name
    return output.replace("</head>", f'<link rel="alternate" type="text/markdown" href="{name}"></head>', 1)


def on_post_build(config: MkDocsConfig) -> None:
    """Write the Markdown of all pages, and the lists of them."""
    site = Path(config.site_dir)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        texts[f"notebooks/{path.stem}.md"] = notebook(path)
    for uri, text in texts.items():
        (site / uri).parent.mkdir(parents=True, exist_ok=True)
        (site / uri).write_text(text)
    (site / "SKILL.md").write_text(SKILL.read_text())
    sections = [(item.title, [*pages_of(item)]) for item in navigation]
    (site / "llms.txt").write_text(listed(sections, texts))
    (site / "llms-full.txt").write_text(in_full([uri for _, pages in sections for _, uri in pages], texts))


def pages_of(item: Any) -> Iterator[tuple[str, str]]:
    """Titles and places of the pages below an entry of the navigation."""
    if getattr(item, "children", None):
        for child in item.children:
            yield from pages_of(child)
    else:
        uri = beside(item)
        heading = re.search(r"^# (.+)$", texts[uri], re.MULTILINE)
        yield heading[1] if heading else str(item.title), uri


def listed(sections: list[tuple[str, list[tuple[str, str]]]], texts: dict[str, str]) -> str:
    """The text of llms.txt: a link to the Markdown of each page, and what it is about."""
    rows = {f"tricks/{row.names[0]}.md": row.what for row in CATALOGUE}
    blocks = [f"# lightning_tricks\n\n> {SUMMARY}\n\n- [SKILL.md](SKILL.md): which trick, and its line, in one file"]
    for heading, pages in sections:
        kept = [(title, uri) for title, uri in pages if not uri.startswith("api/") or uri.endswith("/index.md")]
        told = (f"- [{title}]({uri}): {rows.get(uri) or about(texts[uri])}".removesuffix(": ") for title, uri in kept)
        blocks.append("\n".join([f"## {heading}", "", *told]))
    return "\n\n".join(blocks) + "\n"


def in_full(uris: list[str], texts: dict[str, str]) -> str:
    """The text of llms-full.txt: all pages but those of single names of the reference."""
    kept = [uri for uri in uris if not uri.startswith("api/") or uri.endswith("/index.md")]
    return "\n\n".join(f"<!-- {uri} -->\n\n{texts[uri].strip()}" for uri in kept) + "\n"


def about(text: str) -> str:
    """The first sentence of a page, without headings, tables, code and pictures."""
    text = re.sub(r"```.*?```|<[^>]*>", "", text, flags=re.DOTALL)
    text = re.sub(r"^([#|>]|!?\[!?\[).*$", "", text, flags=re.MULTILINE)
    sentences = re.split(r"(?<=[.:?]) |\n\n", LINK.sub(r"\1", text))
    return next((" ".join(each.split()) for each in sentences if len(each.split()) > 3), "")


def reference(markdown: str) -> str:
    """A page of the reference with signatures and docstrings in place of mkdocstrings' directives."""

    def told(found: re.Match[str]) -> str:
        module, _, name = found[1].rpartition(".")
        thing = getattr(importlib.import_module(module), name)
        return f"## {name}\n\n```python\n{name}{signature(thing)}\n```\n\n{inspect.getdoc(thing) or ''}\n"

    return re.sub(r"^::: ([\w.]+)\n(?:    .*\n)*", told, markdown, flags=re.MULTILINE)


def signature(thing: Any) -> str:
    try:
        return str(inspect.signature(thing))
    except (TypeError, ValueError):  # of classes such as named tuples of C
        return ""


def notebook(path: Path) -> str:
    """The cells of a notebook, without what they print."""
    cells = json.loads(path.read_text())["cells"]
    sources = ((cell["cell_type"], "".join(cell["source"]).strip()) for cell in cells)
    text = "\n\n".join(source if kind == "markdown" else f"```python\n{source}\n```" for kind, source in sources)
    return moved(text.replace("/README.md)", ".md)").replace("](../docs/", "](../")) + "\n"


if __name__ == "__main__":
    SKILL.parent.mkdir(parents=True, exist_ok=True)
    SKILL.write_text(skill())
