"""The pages of the site that are not in docs/, as a hook of mkdocs: README, CHANGELOG, API and notebooks.

Every public name gets into the API pages and every page into the navigation by itself. Links to files of the
repository that are no pages lead to copies of them.
"""

from __future__ import annotations

import importlib
import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parent.parent
KINDS = {
    "callbacks": "Callbacks",
    "modules": "Modules",
    "losses": "Losses",
    "data": "Data",
    "schedules": "Schedules",
    "optimizers": "Optimizers",
    "strategies": "Strategies",
    "checkpoints": "Checkpoints",
    "evaluation": "Evaluation",
    "advisor": "Advice",
}
FIRST = (
    *("choose", "faq", "troubleshooting", "glossary"),
    *(
        "cli",
        "strategies",
        "multi_node",
        "scaling",
        "compatibility",
        "your_library",
        "clients",
        "conflicts",
        "coming_from",
        "why_different",
    ),
    "architecture",
)
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")
PICTURE = re.compile(r'\b(src|srcset)="(?!https?:)([^"]+)"')
HREF = re.compile(r'<a href="(?!https?:|#)([^"#]+)">(.*?)</a>')


def sources() -> dict[str, Path]:
    """The Markdown pages by their place in the site."""
    pages = {"index.md": ROOT / "README.md"}
    pages |= {path.name: path for path in sorted((ROOT / "docs").glob("*.md"), key=_place)}
    pages |= {f"tricks/{path.name}": path for path in sorted((ROOT / "docs" / "tricks").glob("*.md"), key=_index_first)}
    pages |= {f"{folder}.md": ROOT / folder / "README.md" for folder in ("configs", "benchmarks")}
    return pages | {"contributing.md": ROOT / "CONTRIBUTING.md", "changelog.md": ROOT / "CHANGELOG.md"}


def _place(path: Path) -> tuple[int, str]:
    return (FIRST.index(path.stem) if path.stem in FIRST else len(FIRST)), path.stem


def _index_first(path: Path) -> tuple[bool, str]:
    return path.stem != "README", path.stem.lower()


def notebooks() -> list[Path]:
    return sorted((ROOT / "notebooks").glob("*.ipynb"))


def api(kind: str) -> str:
    """The page of a kind: everything public that it has, from the docstrings."""
    names = importlib.import_module(f"lightning_tricks.{kind}").__all__
    return f"# {KINDS[kind]}\n\n" + "".join(f"::: lightning_tricks.{kind}.{name}\n\n" for name in names)


def place(path: Path) -> str:
    """Where the site has a file of the repository."""
    pages = {source: uri for uri, source in sources().items()}
    return pages.get(path, str(path.relative_to(ROOT)))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """All pages, in their order."""
    pages: list[Any] = [uri for uri in sources() if not uri.startswith("tricks/")]
    pages.insert(2, {"Tricks": [uri for uri in sources() if uri.startswith("tricks/")]})
    if notebooks():
        pages.insert(1, {"Notebooks": [f"notebooks/{path.name}" for path in notebooks()]})
    config.nav = [*pages[:-2], {"API": [f"api/{kind}.md" for kind in KINDS]}, *pages[-2:]]
    return config


@event_priority(100)  # before mkdocs-jupyter looks for notebooks
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is not in docs/."""
    for uri, source in sources().items():
        if ROOT / "docs" not in source.parents:
            files.append(File.generated(config, uri, content=source.read_text()))
    for kind in KINDS:
        files.append(File.generated(config, f"api/{kind}.md", content=api(kind)))
    for path in notebooks():
        # no generated one: mkdocs-jupyter asks where it lies
        uri = str(path.relative_to(ROOT))
        files.append(File(uri, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let the links of the repository lead somewhere in the site; folders have no place there."""
    if (source := sources().get(page.file.src_uri)) is None:
        return markdown

    def replaced(match: re.Match[str]) -> str:
        text, link, anchor = match.groups("")
        file = _found(source.parent / link, config, files)
        return f"[{text}]({_from(page, file)}{anchor})" if file else text

    def drawn(match: re.Match[str]) -> str:
        file = _found(source.parent / match[2], config, files)
        return f'{match[1]}="{get_relative_url(file.url, page.url)}"' if file else match[0]

    return PICTURE.sub(drawn, LINK.sub(replaced, markdown))


def _from(page: Page, file: File) -> str:
    """The link from one page to another, by their places in docs/."""
    return posixpath.relpath(file.src_uri, posixpath.dirname(page.file.src_uri) or ".")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The same in notebooks, which are HTML when mkdocs sees them."""
    if not page.file.src_uri.startswith("notebooks/"):
        return html

    def replaced(match: re.Match[str]) -> str:
        link, text = match.groups()
        file = _found(ROOT / "notebooks" / link, config, files)
        return f'<a href="{get_relative_url(file.url, page.url)}">{text}</a>' if file else text

    return HREF.sub(replaced, html)


def _found(path: Path, config: MkDocsConfig, files: Files) -> File | None:
    """The page of a file of the repository, or a copy; of a folder its README, if it has one."""
    path = path.resolve()
    if path.is_dir():
        return files.get_file_from_path(place(path / "README.md"))
    if files.get_file_from_path(place(path)) is None:
        files.append(File.generated(config, place(path), abs_src_path=str(path)))
    return files.get_file_from_path(place(path))


class ExampleSections(griffe.Extension):
    """Our docstrings say ``Example:``; the section that griffe knows is ``Examples:``."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
