"""The cards of the tricks: complete, current, and every block of code in them runs."""

from __future__ import annotations

import importlib
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI

import lightning_tricks as lt
from lightning_tricks_cli.cards import FOLDER, card, cards, every_name, row_of
from lightning_tricks_cli.catalogue import CATALOGUE, Row, row_in
from lightning_tricks_cli.logged import LOGGED
from tests.given import of_cards
from tests.public import PUBLIC

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "tricks"
SLOW = {"compare", "Compile", "LoRA", "QAT", "environment_report"}  # several fits, a compiler, imports of seconds


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (FOLDER / f"{name}.md").read_text(), re.S | re.M)


@pytest.mark.few(30)
@pytest.mark.parametrize("name", [name for name in cards() if name not in SLOW])
@pytest.mark.filterwarnings("ignore")  # of Lightning, of fits of two batches
def test_the_code_of_a_card_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(name, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SLOW))
@pytest.mark.filterwarnings("ignore")
def test_the_dear_code_of_a_card_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(name, tmp_path, monkeypatch)


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    precision = torch.get_float32_matmul_precision()
    given = of_cards()
    try:
        for code in blocks(name, "python"):
            exec(compile(code, f"{name}.md", "exec"), given)
    finally:
        torch.set_float32_matmul_precision(precision)


def test_the_yaml_of_the_cards_configures_trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callbacks of different classes share a configuration, so that few are parsed."""
    configs: list[dict[str, Any]] = []
    classes = set()
    for name in cards():
        for block in blocks(name, "yaml"):
            trainer = yaml.safe_load(block)["trainer"]
            callbacks = trainer.pop("callbacks", [])
            if trainer:
                configs.append(trainer)
            for callback in callbacks:
                assert issubclass(getattr(lt, callback["class_path"]), L.Callback)
                callback["class_path"] = f"lightning_tricks.{callback['class_path']}"  # a test module may have the name
                classes.add(callback["class_path"])
                free = (each for each in configs if callback["class_path"] not in kinds(each) and "callbacks" in each)
                if (config := next(free, None)) is None:
                    configs.append(config := {"callbacks": []})
                config["callbacks"].append(callback)
    assert len(classes) > 25
    file = tmp_path / "config.yaml"
    monkeypatch.setattr("sys.argv", ["fit.py", "--config", str(file)])
    for config in configs:
        file.write_text(
            yaml.safe_dump({"model": "tests.nets.Net", "trainer": {**config, "accelerator": "cpu", "logger": False}})
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            LightningCLI(save_config_callback=None, seed_everything_default=0, run=False)


def kinds(trainer: dict[str, Any]) -> set[str]:
    return {callback["class_path"] for callback in trainer.get("callbacks", [])}


@pytest.mark.parametrize("row", CATALOGUE, ids=lambda row: row.names[0])
def test_the_front_matter_is_yaml(row: Row) -> None:
    """As a viewer of Markdown reads it, which is how the catalogue does."""
    _, front, _ = (FOLDER / f"{row.names[0]}.md").read_text().split("---\n", 2)
    lists = {"names": ", ".join(row.names), "beside": ", ".join(row.beside)}
    said = {**row._asdict(), **lists}
    assert yaml.safe_load(front) == {field: said[field] for field in yaml.safe_load(front)}


def test_a_card_without_its_row_is_named(tmp_path: Path) -> None:
    (card := tmp_path / "Jitter.md").write_text("Noise.\n")
    with pytest.raises(ValueError, match=r"begins with names:.*got Noise\. in .*Jitter\.md"):
        row_in(card)


def test_every_name_of_the_top_level_has_a_card() -> None:
    names = every_name()
    assert len(names) == len(set(names))
    assert {*lt.__all__} - {"functional", "lr_scheduler"} <= {*names} <= {*PUBLIC}
    assert sorted(path.stem for path in FOLDER.glob("*.md")) == sorted(cards())


@pytest.mark.parametrize("name", cards())
def test_a_card_says_what_a_reader_needs(name: str) -> None:
    text = card(name)
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    order = ("When", "When not", "Code", "Starting values", "Pitfalls", "What it logs", "Cost", "Evidence")
    order += ("Works with", "Conflicts", "Papers")
    assert headings == [heading for heading in order if heading in headings]
    logged = {metric for each in row_of(name).names for metric in LOGGED.get(each, {})}
    assert logged == set(re.findall(r"^- `(tricks/\w+)`", text, re.MULTILINE))
    assert {"When", "When not", "Code"} <= {*headings}
    assert f"`{row_of(name).line}`" in text
    callbacks = [each for each in row_of(name).names if isinstance(getattr(lt, each), type)]
    if "callbacks=" in row_of(name).line and callbacks:
        assert blocks(name, "yaml"), "a callback is shown in YAML, too"
        assert "manual optimization" in text.lower(), "and what manual optimization does with it"


def test_a_card_has_the_figures_conflicts_and_regimes_of_its_trick() -> None:
    text = " ".join(card("SAMMixin").split())
    assert card("SAM") == card("SAMCallback") == card("SAMMixin")
    assert "| glosses, 40% wrong labels | **+1.9** (+1.1 to +2.7) | **+7.6** (" in text
    assert "- `SAM` is better than plain training in 5 of 27 settings, and worse in 3; its calibration error" in text
    assert "A step of a ResNet-50 takes 2.10 times as long." in text
    assert "is refused with ZeRO-3: " in text
    assert "`SAMMixin`, `SAMCallback` with `HardExampleFilter` raises" in text
    assert "arXiv 2010.01412" in text
    with pytest.raises(ValueError, match=r"no trick 'EMMA'\. Did you mean 'EMA'\?"):
        card("EMMA")


def words(picture: Path) -> list[str]:
    """The text in an SVG."""
    return re.findall(r">([^<>\n]+)</text>", picture.read_text())


def part(name: str, patch: pytest.MonkeyPatch) -> Any:
    patch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module(name)


def test_what_make_tables_writes_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    evidence, readme = (part(name, monkeypatch) for name in ("evidence", "readme"))
    assert evidence.FILE.read_text() == evidence.text(), "run make tables"
    pages = readme.pages()
    assert {path: path.read_text() for path in readme.FOLDER.glob("*.md")} == pages, "run make tables"
    assert all(len(row.what) <= 74 and row.what.endswith(".") for row in CATALOGUE)


@pytest.mark.slow
def test_the_pictures_that_make_tables_draws_are_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("evidence", "quality_report", "forest", "curves", "ema_curve", "illustrations", "card_forest")
    evidence, quality_report, forest, curves, ema_curve, illustrations, card_forest = (
        part(name, monkeypatch) for name in names
    )
    quality = evidence.result("quality")
    for picture, draw in (
        (quality_report.PICTURE, partial(quality_report.draw, result=quality)),
        *((quality_report.RESULTS / name, partial(forest.draw, result=quality)) for name in forest.SCHEMES),
        (curves.PICTURE, curves.draw),
        *(
            (ema_curve.DOCS / name, partial(ema_curve.draw, result=evidence.result("ema_curve")))
            for name in ema_curve.SCHEMES
        ),
        *(
            (PAGES / card_forest.name(row), partial(card_forest.draw, row=row))
            for row in CATALOGUE
            if card_forest.name(row)
        ),
        *((illustrations.FOLDER / f"{name}.svg", illustrations.draw) for name in illustrations.PICTURES),
    ):
        draw(tmp_path / picture.name)
        assert words(tmp_path / picture.name) == words(picture), "run make tables"
    assert len(lt.optimizers()) == int(row_of("optimizer").what.split()[0])


def test_the_pictures_are_small_have_a_text_and_are_all_shown() -> None:
    shown = [picture for path in PAGES.glob("*.md") for picture in re.findall(r"!\[(.*?)\]\((.*?)\)", path.read_text())]
    links = {link for _, link in shown if "/" not in link}
    links |= {
        name
        for page in (*PAGES.parent.glob("*.md"), *PAGES.parent.glob("integrations/*.md"))
        for name in re.findall(r"\((?:\.\./)?tricks/(\w+\.svg)\)", page.read_text())
    }
    assert links == {path.name for path in PAGES.glob("*.svg")}
    assert all(len(text) > 40 for text, _ in shown)
    assert all(path.stat().st_size < 60_000 for path in PAGES.glob("*.svg"))
