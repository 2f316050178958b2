"""The command: what it prints and how it fails."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from lightning_tricks_cli.main import main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a checkpoint by FSDP2."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        dcp.save({"state_dict": {"w": torch.ones(300, 1000)}}, checkpoint_id=tmp_path / "a.ckpt", no_dist=True)
    torch.save({}, tmp_path / "a.ckpt" / "meta.pt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_tells_what_it_wrote(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["consolidate", "a.ckpt", "-o", "w.safetensors"]) == 0
    assert capsys.readouterr() == ("wrote w.safetensors (0.0012 GB)\n", "")
    assert load_file("w.safetensors")["w"].shape == (300, 1000)
    assert main(["consolidate", "a.ckpt", "-o", "w.safetensors"]) == 1
    assert main(["consolidate", "a.ckpt", "-o", "w.safetensors", "--force"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.ckpt", "-o", "w.pt"], "There is no folder none.ckpt."),
        (["a.ckpt/meta.pt", "-o", "w.pt"], "a.ckpt/meta.pt is one file already: take its weights with"),
        (
            [".", "-o", "w.pt"],
            ". is a folder, but not a checkpoint: it has neither .metadata (FSDP) nor latest (ZeRO).",
        ),
        (["a.ckpt", "-o", "w.json"], "the name of the output must end in"),
    ],
)
def test_an_error_is_one_line(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["consolidate", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert re.match(re.escape(f"lightning-tricks: {message}"), err)
    assert err.count("\n") == 1


def test_it_helps_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["consolidate", "--help"])
    assert "example: lightning-tricks consolidate" in capsys.readouterr().out


@pytest.mark.slow  # deepspeed is imported
def test_deepspeed_logs_to_stderr(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("step1")
    command = [sys.executable, "-m", "lightning_tricks_cli.main", "consolidate", tmp_path, "-o", tmp_path / "w.pt"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith("lightning-tricks: ")
