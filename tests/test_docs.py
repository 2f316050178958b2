"""docs/: its tables are those of the package, its code runs, its links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import lightning_tricks as lt
from lightning_tricks_cli.main import parser

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


def parser_choices() -> list[str]:
    return re.findall(r"^    ([a-z-]+)(?: |$)", parser().format_help(), re.MULTILINE)


@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`")  # Lightning, of its default logger
def test_the_code_of_the_strategies_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "strategies.md").read_text(), re.S)
    assert len(blocks) == 2
    exec("\n".join(blocks), {})
