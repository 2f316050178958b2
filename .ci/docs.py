"""The pages of the site that are not in docs/, as a hook of mkdocs: README, CHANGELOG, API and notebooks.

Every public name gets into the API pages and every page into the navigation by itself. Links to files of the
repository that are no pages lead to copies of them.
"""

from __future__ import annotations

import importlib
import inspect
import os
import posixpath
import re
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

from lightning_tricks.core.install import REPOSITORY
from lightning_tricks_cli.catalogue import CATALOGUE

ROOT = Path(__file__).parent.parent
TITLE = "Training tricks for PyTorch Lightning"
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
START = (
    *("your_library", "transfer", "manual_optimization", "coming_from", "your_own_ema", "faq", "troubleshooting"),
    *("why_different", "glossary"),
)
ABOUT = ("architecture", "contributing", "code_of_conduct", "security", "changelog")
ELSEWHERE = ("index", "choose", "benchmarks", "cli", "configs", *ABOUT)
INTEGRATIONS = ("hydra", "tensorboard", "wandb", "mlflow", "optuna", "jupyter", "lightning_cli", "fabric")
SCALE = ("strategies", "multi_node", "scaling", "second_life")
EVIDENCE = ("compare", "evaluation", "compatibility", "conflicts", "clients", "versions", "gpu")
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")
ATTRIBUTE = re.compile(r'\b(src|href)="(?!https?:|#)([^"#]+)')
THEMED = re.compile(r'<picture><source [^>]*srcset="([^"]+)"><img src="([^"]+)"(.*?)></picture>')
BADGE = re.compile(r'<img alt="([^"]+)" src="https://colab[^>]*>')
HREF = re.compile(r'<a href="(?!https?:|#)([^"#]+)">(.*?)</a>')


def sources() -> dict[str, Path]:
    """The Markdown pages by their place in the site."""
    pages = {"index.md": ROOT / "README.md"}
    pages |= {str(path.relative_to(ROOT / "docs")): path for path in sorted((ROOT / "docs").rglob("*.md"))}
    pages |= {f"{folder}.md": ROOT / folder / "README.md" for folder in ("configs", "benchmarks")}
    return pages | {
        f"{name}.md": ROOT / f"{name.upper()}.md"
        for name in ("contributing", "code_of_conduct", "security", "changelog")
    }


def notebooks() -> list[Path]:
    return sorted((ROOT / "notebooks").glob("*.ipynb"))


def api() -> dict[str, str]:
    """A page for each class and function, and one for each kind with their names, by their places in the site.

    A function whose name differs by its capitals only is on the page of the class: many file systems know one of them.
    """
    pages = {}
    for kind, title in KINDS.items():
        module = importlib.import_module(f"lightning_tricks.{kind}")
        uris: dict[str, str] = {}
        lines = [f"# {title}\n\n|name|what it is|\n|---|---|"]
        for name in sorted(module.__all__):  # classes first
            uri = uris.setdefault(name.lower(), f"api/{kind}/{name}.md")
            lower = "    options: {heading_level: 2}\n" if uri in pages else ""
            pages[uri] = pages.get(uri, "") + f"::: lightning_tricks.{kind}.{name}\n{lower}\n"
            what = (inspect.getdoc(getattr(module, name)) or "").split("\n")[0].replace("|", "\\|")
            lines.append(f"|[`{name}`]({posixpath.basename(uri)})|{what}|")
        pages[f"api/{kind}/index.md"] = "\n".join(lines) + "\n"
    return pages


def place(path: Path) -> str:
    """Where the site has a file of the repository."""
    pages = {source: uri for uri, source in sources().items()}
    return pages.get(path, str(path.relative_to(ROOT)))


def navigation() -> list[Any]:
    """All pages by group; one of docs/ that no group names is a guide."""
    guides = [uri for uri in sources() if uri.removesuffix(".md") not in (*START, *SCALE, *EVIDENCE, *ELSEWHERE)]
    guides = [uri for uri in guides if not uri.startswith(("tricks/", "integrations/"))]
    groups = {
        group: [{row.names[0]: f"tricks/{row.names[0]}.md"} for row in rows]
        for group, rows in groupby(CATALOGUE, lambda row: row.group)
    }
    schedules, scale = groups.pop("Schedules"), groups.pop("Scale")
    start = [
        {"Home": "index.md"},
        "choose.md",
        {"Notebooks": [f"notebooks/{path.name}" for path in notebooks()]},
        *_pages(START),
    ]
    start.insert(3, {"Integrations": _pages(f"integrations/{name}" for name in INTEGRATIONS)})
    uris = sorted((uri for uri in api() if not uri.endswith("/index.md")), key=str.lower)
    names = {kind: [{Path(uri).stem: uri} for uri in uris if uri.startswith(f"api/{kind}/")] for kind in KINDS}
    reference = [{title: [f"api/{kind}/index.md", *names[kind]]} for kind, title in KINDS.items()]
    return [
        {"Start": start},
        {"Tricks": ["tricks/README.md", *({group: cards} for group, cards in groups.items()), {"Guides": guides}]},
        {"Schedules": schedules},
        {"Scale": [*_pages(SCALE), *scale]},
        {"Evidence": ["benchmarks.md", *_pages(EVIDENCE)]},
        {"Reference": ["cli.md", "configs.md", *reference, *_pages(ABOUT)]},
    ]


def _pages(names: Iterable[str]) -> list[str]:
    return [f"{name}.md" for name in names]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """All pages, in their order; versions to choose from where there are several, on GitHub Pages by mike."""
    config.nav = navigation()
    config.extra["social"] = [{"icon": "fontawesome/brands/github", "link": REPOSITORY}]
    if "MIKE_DOCS_VERSION" in os.environ:
        config.extra["version"] = {"provider": "mike"}
    return config


@event_priority(100)  # before mkdocs-jupyter looks for notebooks
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is not in docs/."""
    for uri, source in sources().items():
        if ROOT / "docs" not in source.parents:
            files.append(File.generated(config, uri, content=source.read_text()))
    for uri, text in api().items():
        files.append(File.generated(config, uri, content=text))
    for path in notebooks():
        # no generated one: mkdocs-jupyter asks where it lies
        uri = str(path.relative_to(ROOT))
        files.append(File(uri, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let the links of the repository lead somewhere in the site; folders have no place there."""
    if (source := sources().get(page.file.src_uri)) is None:
        return markdown
    if page.file.src_uri == "index.md":
        page.meta["title"] = TITLE
    if page.file.src_uri.startswith("tricks/"):
        page.meta["search"] = {"boost": 4}  # a card comes before the reference
    page.edit_url = _edit(source)

    def replaced(match: re.Match[str]) -> str:
        text, link, anchor = match.groups("")
        path = (source.parent / link).resolve()
        if path.suffix == ".md" and path not in sources().values():  # beside the source that it is about: no page
            return f"[{text}]({REPOSITORY}/blob/main/{path.relative_to(ROOT)}{anchor})"
        file = _found(path, config, files)
        return f"[{text}]({_from(page, file)}{anchor})" if file else text

    def in_html(match: re.Match[str]) -> str:
        file = _found(source.parent / match[2], config, files)
        return f'{match[1]}="{get_relative_url(file.url, page.url)}' if file else match[0]

    markdown = re.sub("^<details>", '<details markdown="1">', markdown, flags=re.MULTILINE)  # GitHub needs no word
    return ATTRIBUTE.sub(in_html, LINK.sub(replaced, THEMED.sub(_themed, markdown)))


def _themed(match: re.Match[str]) -> str:
    """The picture for the chosen colours, where GitHub has that for the system's."""
    dark, light, rest = match.groups()
    return f'<img src="{light}#only-light"{rest}><img src="{dark}#only-dark"{rest}>'


def _edit(source: Path) -> str:
    """Where GitHub edits a page: a card's own part, which the rest is generated around."""
    card = ROOT / "lightning_tricks_cli" / "cards" / source.name
    path = card if source.parent.name == "tricks" and card.is_file() else source
    return f"{REPOSITORY}/edit/main/{path.relative_to(ROOT)}"


def _from(page: Page, file: File) -> str:
    """The link from one page to another, by their places in docs/."""
    return posixpath.relpath(file.src_uri, posixpath.dirname(page.file.src_uri) or ".")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The same in notebooks, which are HTML when mkdocs sees them."""
    if not page.file.src_uri.startswith("notebooks/"):
        return html
    page.meta["search"] = {"boost": 0.5}  # and a notebook, which names many tricks, after both
    page.edit_url = _edit(ROOT / "notebooks" / Path(page.file.src_uri).with_suffix(".py").name)

    def replaced(match: re.Match[str]) -> str:
        link, text = match.groups()
        file = _found(ROOT / "notebooks" / link, config, files)
        return f'<a href="{get_relative_url(file.url, page.url)}">{text}</a>' if file else text

    return BADGE.sub(r"\1", HREF.sub(replaced, html))  # a page loads nothing from elsewhere


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
