"""What coding agents read: SKILL.md is current, its names exist and its code runs; the site's lists are complete."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

import lightning_tricks as lt
from lightning_tricks_cli.catalogue import CATALOGUE
from lightning_tricks_cli.main import parser
from tests.public import KINDS, PUBLIC

ROOT = Path(__file__).parent.parent


def hook() -> Any:
    spec = importlib.util.spec_from_file_location("agents_hook", ROOT / ".ci" / "agents.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


AGENTS = hook()
SKILL = AGENTS.SKILL.read_text()
_, FRONT, BODY = SKILL.split("---\n", 2)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", BODY, re.S | re.M)


def section(heading: str) -> str:
    return BODY.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def test_the_skill_is_current() -> None:
    assert AGENTS.skill() == SKILL, "run make exports"
    assert "@" not in SKILL.replace("@final", "")


def test_its_head_is_what_agents_expect_of_a_skill() -> None:
    head = yaml.safe_load(FRONT)
    assert {*head} == {"name", "description"}
    assert head["name"] == AGENTS.SKILL.parent.name
    assert re.fullmatch(r"[a-z0-9-]{1,64}", head["name"])
    assert 100 < len(head["description"]) <= 1024
    assert len(SKILL.splitlines()) < 500


def test_every_card_has_a_line_and_every_name_is_ours() -> None:
    lines = section("Every trick")
    for row in CATALOGUE:
        (line,) = [line for line in lines.splitlines() if line.startswith(f"- `{row.line}` ")]
        assert all(re.search(rf"\b{name}\b", line) for name in row.names), f"{row.names} are not all in the line"
        assert re.search(r" When: \S.* Not: \S", line)
    assert not set(re.findall(r"\blt\.(\w+)", BODY)) - {*lt.__all__, *KINDS}
    assert not re.search(r"\]\(", BODY), "a link leads nowhere where a skill is copied to"


def test_what_it_takes_first_for_a_symptom_or_a_task_exists() -> None:
    told = section("By symptom") + section("By task")
    assert len(told.splitlines()) > 25
    names = {re.sub(r"\(.*", "", name) for name in re.findall(r"`([A-Za-z_]\w*(?:\([\d.]*\))?)`", told)}
    assert len(names) > 25
    assert not names - {*PUBLIC} - {"bf16"}


@pytest.mark.filterwarnings("ignore:The number of training batches")  # Lightning, of a fit of four batches
@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`")  # Lightning, of its default logger
def test_its_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks("python"):
        exec(block, names)
    trainer = names["trainer"]
    assert trainer.global_step == 8
    assert Path(names["best"].best_model_path).is_file()
    file = tmp_path / "config.yaml"
    (text,) = blocks("yaml")
    config = yaml.safe_load(text)
    config["trainer"] |= {"accelerator": "cpu", "logger": False}
    file.write_text(yaml.safe_dump({"model": "tests.nets.Net", **config}))
    monkeypatch.setattr("sys.argv", ["fit.py", "--config", str(file)])
    made = LightningCLI(save_config_callback=None, seed_everything_default=0, run=False)
    assert {"EMA", "LRSchedule"} <= {type(callback).__name__ for callback in made.trainer.callbacks}


def test_its_commands_parse() -> None:
    words = [shlex.split(line) for line in "\n".join(blocks("bash")).splitlines()]
    assert len(words) >= 5
    for command, *arguments in words:
        assert command == "lightning-tricks"
        parser().parse_args(arguments)


def test_a_list_of_pages_has_their_markdown_and_what_they_are_about() -> None:
    home = "# Us\n\nA promise of [ours](a.md). More."
    texts = {"index.md": home, "tricks/EMA.md": "# EMA\n\nx", "api/a/A.md": "# A"}
    sections = [("Start", [("Home", "index.md")]), ("Tricks", [("EMA", "tricks/EMA.md"), ("A", "api/a/A.md")])]
    listed = AGENTS.listed(sections, texts)
    assert listed.startswith("# lightning_tricks\n\n> Training tricks")
    assert "## Start\n\n- [Home](index.md): A promise of ours.\n" in listed
    assert "- [EMA](tricks/EMA.md): Validates, saves and keeps an exponential average of the weights." in listed
    assert "api/a/A.md" not in listed
    full = AGENTS.in_full(["index.md", "tricks/EMA.md", "api/a/A.md"], texts)
    assert full == f"<!-- index.md -->\n\n{home}\n\n<!-- tricks/EMA.md -->\n\n# EMA\n\nx\n"


def test_what_a_page_is_about_is_its_first_sentence_of_prose() -> None:
    text = "# Q\n\n[![B](b)](c)\n\n|a|b|\n|---|---|\n\n## Do I?\n\nNo. Tricks are\ncallbacks of [ours](a.md). More."
    assert AGENTS.about(text) == "Tricks are callbacks of ours."
    assert AGENTS.about("# Glossary\n\n| word | meaning |\n") == ""


def test_the_reference_has_signatures_and_docstrings() -> None:
    text = AGENTS.reference(
        "::: lightning_tricks.callbacks.EMA\n\n::: lightning_tricks.callbacks.Mixup\n    options: {}\n"
    )
    assert ":::" not in text
    assert re.search(r"## EMA\n\n```python\nEMA\(decay: .*\n```\n\n\S", text)
    assert "## Mixup" in text
    assert "Raises:" in text


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_markdown_with_all_of_its_code(path: Path) -> None:
    text = AGENTS.notebook(path)
    code = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(re.findall(r"^```python$", text, re.MULTILINE)) == len(code)
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    assert links
    assert not [link for link in links if link.endswith(".ipynb") or link.startswith("../docs/")]
