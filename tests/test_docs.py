"""docs/: its tables are those of the package, its code runs, its commands parse; all Markdown: links, languages."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import logging
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import lightning.pytorch.callbacks
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torchmetrics
import transformers
import yaml
from lightning.pytorch.cli import LightningCLI
from torchvision.transforms import v2

import lightning_tricks as lt
from lightning_tricks.core.install import SOURCE
from lightning_tricks_cli.main import parser
from tests.given import of_pages
from tests.public import KINDS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
INTEGRATIONS = sorted((DOCS / "integrations").glob("*.md"))
PAGES = sorted([*DOCS.glob("*.md"), *INTEGRATIONS])
CARDS = sorted((DOCS / "tricks").glob("*.md"))
CLIENTS = DOCS / "your_library.md"  # each block needs a library: tests/clients runs it where that is installed
MARKDOWN = sorted([*PAGES, *CARDS, *ROOT.glob("*.md"), *(ROOT / at / "README.md" for at in ("configs", "benchmarks"))])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.S | re.M)


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


DEAR = ("evaluation", "lora", "mlflow", "networks", "wandb")  # pages whose code takes seconds


def pages_with(language: str, pages: list[Path] = PAGES) -> list[Any]:
    return [
        pytest.param(page, id=named(page), marks=[pytest.mark.slow] * (page.stem in DEAR))
        for page in pages
        if blocks(page, language)
    ]


def test_the_presets_are_all_there() -> None:
    row = r"^\| `(\w+)` \| `(\w+)\((.*?)\)` \| (\S+) \| (.*) \|$"
    written = re.findall(row, (DOCS / "strategies.md").read_text(), re.MULTILINE)
    assert [
        {"name": name, "strategy": kind, "arguments": eval(f"dict({given})"), "precision": precision, "when": when}
        for name, kind, given, precision, when in written
    ] == lt.presets()


@pytest.mark.parametrize("page", MARKDOWN, ids=named)
def test_links_inside_the_repository_resolve(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'\b(?:href|src|srcset)="([^"]+)"', text)
    links = [link for link in links if not link.startswith("http")]
    assert not [link for link in links if not leads_somewhere(page, link)]


def leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not anchor or anchor in anchors(target.read_text()))


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", MARKDOWN, ids=named)
def test_every_code_block_is_of_a_kind_that_a_test_runs(page: Path) -> None:
    """Which one, for each folder.

    docs/ below, cards in test_cards, README in test_readme and newcomer/, configs/ in test_configs, walks and guide in
    test_walks.
    """
    code = {"python", "yaml", "bash"}
    kinds = {"docs": {*code, "mermaid"}, "integrations": code, "tricks": code, "configs": {"python", "bash"}}
    at_root = {"README.md": {"python", "yaml", "bash", "diff"}, "CONTRIBUTING.md": {"python"}}
    run = at_root.get(page.name, set()) if page.parent == ROOT else kinds.get(page.parent.name, set())
    fences = re.findall(r"^ *(?:```|~~~)(.*)$", page.read_text(), re.MULTILINE)
    assert set(fences[::2]) <= run
    assert set(fences[1::2]) <= {""}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is")  # of dcp.save, which makes the sharded checkpoint
def test_the_commands_run(tmp_path: Path) -> None:
    """In one folder with what they name; each is a process, as for a user."""
    text = (DOCS / "cli.md").read_text()
    commands = re.findall(r"^(lightning-tricks .*)$", text, re.MULTILINE)
    assert {command.split()[1] for command in commands} == set(parser_choices())
    (tmp_path / "configs").symlink_to(DOCS.parent / "configs")
    (tmp_path / "guard.yaml").write_text(re.findall(r"```yaml\n(.*?)```", text, re.S)[0])
    for name in "ab":
        torch.save({"network.weight": torch.ones(2)}, tmp_path / f"{name}.ckpt")
    dcp.save({"state_dict": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "sharded.ckpt", no_dist=True)
    torch.save({}, tmp_path / "sharded.ckpt" / "meta.pt")
    for command in commands:
        run = [sys.executable, "-m", "lightning_tricks_cli.main", *shlex.split(command)[1:]]
        environment = {**os.environ, "PYTHONPATH": str(DOCS.parent)}
        done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stderr[-2000:]}"


# Commands of other pages that need what a run before them has left, or train for minutes; tests of their own run them.
ELSEWHERE = ("compare", "cross-validate", "export adapters.ckpt", "export sharded.ckpt", "fit")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is")  # of dcp.save, which makes the sharded checkpoint
def test_the_commands_of_other_pages_run(tmp_path: Path) -> None:
    lines = [
        line for page in MARKDOWN if page.name != "cli.md" for line in "\n".join(blocks(page, "bash")).splitlines()
    ]
    commands = {line for line in lines if re.match(rf"lightning-tricks (?!{'|'.join(ELSEWHERE)})", line)}
    assert len(commands) >= 10
    (tmp_path / "configs").symlink_to(DOCS.parent / "configs")
    (tmp_path / "runs").mkdir()
    weights = {"state_dict": {"model.weight": torch.ones(2)}, "optimizer_states": [{}]}
    for name in ("a", "b", "best", "last"):
        torch.save(weights, tmp_path / f"{name}.ckpt")
    for name in ("sharded", "best"):
        dcp.save({"state_dict": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "runs" / f"{name}.ckpt", no_dist=True)
        torch.save({}, tmp_path / "runs" / f"{name}.ckpt" / "meta.pt")
    for command in sorted(commands):
        run = [sys.executable, "-m", "lightning_tricks_cli.main", *shlex.split(command)[1:]]
        environment = {**os.environ, "PYTHONPATH": str(DOCS.parent)}
        done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stderr[-2000:]}"


def parser_choices() -> list[str]:
    return re.findall(r"^    ([a-z-]+)(?: |$)", parser().format_help(), re.MULTILINE)


# -- code -------------------------------------------------------------------------------------------------------------


@pytest.mark.few(12)
@pytest.mark.parametrize("page", pages_with("python", [page for page in PAGES if page != CLIENTS]))
@pytest.mark.filterwarnings("ignore:Checkpoint directory")  # Lightning, where a page fits again
@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`")  # Lightning, of its default logger
@pytest.mark.filterwarnings("ignore:Precision bf16-mixed is not supported by the model summary")  # Lightning
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks transformers 5
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")  # Lightning, of a fit on all of the data
@pytest.mark.filterwarnings("ignore:Found 5 module.s. in eval mode")  # Lightning, of timm's ModelEmaV3
def test_the_code_of_a_page_runs_and_prints_the_figures_beside_it(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    starts = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)  # what is executed here is in no module that workers import
    write_files(page)
    try:
        exec("\n".join(blocks(page, "python")), of_pages())
    finally:
        multiprocessing.set_start_method(starts, force=True)
        torch.use_deterministic_algorithms(False)  # which Trainer(deterministic=True) sets for the process
        for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
            os.environ.pop(name, None)
    printed = dict(map(with_numbers_apart, capsys.readouterr().out.splitlines()))
    for line in re.findall(r"^print\(.*\)  # (.*\d\.\d.*)$", page.read_text(), re.MULTILINE):
        words, numbers = with_numbers_apart(line)
        assert printed[words] == pytest.approx(numbers, rel=0.05, abs=0.01)  # processors and versions round otherwise


FILE = re.compile(r"# (\S+\.yaml)\n")  # the first line of a block that is a file of the page's project


def write_files(page: Path) -> None:
    """The files of a page's project, which its code reads."""
    for block in blocks(page, "yaml"):
        if named := FILE.match(block):
            Path(named[1]).parent.mkdir(parents=True, exist_ok=True)
            Path(named[1]).write_text(block)


def with_numbers_apart(line: str) -> tuple[str, list[float]]:
    number = r"\d+(?:\.\d+)?"
    return re.sub(number, "#", line), [*map(float, re.findall(number, line))]


def my_project(page: Path) -> ModuleType:
    """A module with the classes of a page."""
    project = ModuleType("my_project")
    vars(project).update({"lt": lt, "L": L, "torch": torch})
    for block in blocks(page, "python"):
        if "class " in block and "Trainer(" not in block:
            exec(block, vars(project))
    return project


@pytest.mark.parametrize("page", pages_with("yaml"))
def test_the_yaml_of_a_page_configures_a_trainer(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.yaml"
    if any("my_project." in block for block in blocks(page, "yaml")):
        monkeypatch.setitem(sys.modules, "my_project", my_project(page))
    for block in [block for block in blocks(page, "yaml") if not FILE.match(block)]:
        config = {"model": "tests.nets.Net", **yaml.safe_load(block)}
        config["trainer"] = {**config.get("trainer", {}), "accelerator": "cpu", "logger": False}
        file.write_text(yaml.safe_dump(config))
        monkeypatch.setattr("sys.argv", ["fit.py", "--config", str(file)])
        LightningCLI(save_config_callback=None, seed_everything_default=0, run=False)


@pytest.mark.parametrize("page", pages_with("bash", MARKDOWN))
def test_the_commands_of_a_page_exist(page: Path) -> None:
    folder = ROOT
    for line in "\n".join(blocks(page, "bash")).splitlines():
        words = [word for word in shlex.split(line, comments=True) if not re.fullmatch(r"[A-Z]+=\S*", word)]
        if words[:1] == ["cd"]:
            folder = ROOT / words[1]
            assert folder.is_dir()
        elif words:
            check_command(words, folder)


def check_command(words: list[str], folder: Path) -> None:
    """Ours is parsed; a script is a file of the repository, an extra or a target of make one that there is."""
    match words:
        case ["lightning-tricks", ("fit" | "validate" | "test" | "predict") as command, *arguments]:
            parser().parse_known_args([command, *arguments])  # the rest is LightningCLI's
        case ["lightning-tricks", *arguments]:
            parser().parse_args(arguments)
        case ["python" | "bash" | "sbatch", script, *_]:
            assert (folder / script).is_file(), f"{folder / script} does not exist"
        case ["pip", "install", what]:
            extras = re.search(r"optional-dependencies\](.*?)\n\[", (ROOT / "pyproject.toml").read_text(), re.S)[1]
            named = re.fullmatch(rf"(?:\.|lightning-tricks)(?:\[(.*)\])?(?:{re.escape(SOURCE)})?", what)
            for extra in re.findall(r"\w+", named[1] or ""):
                assert re.search(rf"^{extra} = ", extras, re.MULTILINE), f"there is no extra {extra}"
        case ["make", *targets]:
            for target in targets:
                assert "=" in target or re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case _:
            pytest.fail(f"a command that no test knows: {words}")


@pytest.mark.parametrize("page", MARKDOWN, ids=named)
def test_the_names_of_a_page_are_ours(page: Path) -> None:
    names = set(re.findall(r"\blt\.(\w+)", page.read_text()))
    assert not names - {*lt.__all__, *KINDS, "Jitter"}  # the worked example of CONTRIBUTING.md


COMING = DOCS / "coming_from.md"
# What the tables name without the module that it is in.
KNOWN: dict[str, Any] = {
    **{name: getattr(lightning.pytorch.callbacks, name) for name in lightning.pytorch.callbacks.__all__},
    **{"lt": lt, "L": L, "Trainer": L.Trainer, "DataLoader": torch.utils.data.DataLoader, "torch": torch},
    **{"F": torch.nn.functional, "seed_everything": L.seed_everything, "torchmetrics": torchmetrics},
    **{"T5Config": transformers.T5Config, "logging": logging, "v2": v2},
}
FREE = ("optimizer", "preset")  # whose further arguments are those of what they make


def tables(page: Path, heading: str = "") -> list[list[str]]:
    """The cells of the rows of a page, or of one of its sections."""
    text = page.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0] if heading else page.read_text()
    rows = [re.split(r"(?<!\\) \| ", line.strip("| ") + " ") for line in text.splitlines() if line.startswith("| ")]
    return [row for row in rows if row[1].strip() != "here" and not set(row[0]) <= {"-"}]


def checked(code: str) -> bool:
    """Whether a piece of code names something of ours, Lightning's or torch's; it must exist, with its arguments."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return False
    found = False
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and root(node) in KNOWN:
            thing = functools.reduce(getattr, ast.unparse(node).split(".")[1:], KNOWN[root(node)])
            assert thing is not None
            found = True
        if isinstance(node, ast.Call) and root(node.func) in KNOWN:
            called = functools.reduce(getattr, ast.unparse(node.func).split(".")[1:], KNOWN[root(node.func)])
            given = [keyword.arg for keyword in node.keywords]
            if getattr(called, "__name__", "") not in FREE:
                inspect.signature(called).bind_partial(*node.args, **dict.fromkeys(given))
    return found


def root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def test_what_the_tables_of_other_libraries_lead_to_exists_with_its_arguments() -> None:
    rows = [row for row in tables(COMING) if row[0].startswith("`")]
    assert len(rows) > 150
    for theirs, ours, *_ in rows:
        presets = re.findall(r'(?:strategy=|lt\.preset\()"(\w+)"', ours)
        assert set(presets) <= {row["name"] for row in lt.presets()}
        codes = [checked(code) for code in re.findall(r"`([^`]+)`", ours)]
        assert any(codes) or presets, f"{theirs} leads to {ours}"


def test_every_argument_of_transformers_is_answered() -> None:
    rows = tables(COMING, "transformers")
    named = [
        name
        for row in rows[: [row[1] for row in rows].index("`Trainer(devices=8, num_nodes=2)`") + 1]
        for name in re.findall(r"`(\w+)`", row[0])
    ]
    fields = [field.name for field in dataclasses.fields(transformers.TrainingArguments)]
    assert not set(fields) - {*named}, "transformers has new arguments: answer them in docs/coming_from.md"
    assert len(named) == len({*named})
    if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24):
        assert not {*named} - set(fields), "transformers has dropped arguments"
