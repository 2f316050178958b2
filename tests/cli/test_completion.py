"""``lightning-tricks completion``: what a real shell offers after the words that were typed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_tricks as lt
from lightning_tricks.core.install import pip_install
from lightning_tricks_cli.catalogue import CATALOGUE
from lightning_tricks_cli.commands.plot_schedule import CURVES
from lightning_tricks_cli.main import main, parser
from tests.cli.test_main import COMMANDS

ROOT = Path(__file__).parents[2]
NAMES = json.loads((ROOT / "lightning_tricks_cli" / "names.json").read_text())
PRESETS = {row["name"] for row in NAMES["presets"]}
CALLBACKS = {*NAMES["callbacks"], *NAMES["lightning_callbacks"]}
TYPED: dict[str, set[str]] = {
    "": {*COMMANDS, "--version", "--help", "--debug"},
    "f": {"fit", "find-lr", "find-workers"},
    "fit --trainer.max_": {"--trainer.max_epochs", "--trainer.max_steps", "--trainer.max_time"},
    "fit -c a.yaml --trainer.strategy zero3_o": {name for name in PRESETS if name.startswith("zero3_o")},
    "fit --trainer.strategy = ": PRESETS,
    "fit --trainer.callbacks+ = Mi": {"Mixup"},
    "fit --trainer.callbacks+ = ": CALLBACKS,
    "compare -c a.yaml --with SA": {"SAMCallback"},
    "memory 7B --strategy tp": {"tp_bf16"},
    "tricks Flo": {"Float8"},
    "tricks ": {name for row in CATALOGUE for name in (*row.names, *row.beside)},
    "plot-schedule ": set(CURVES),
    "export a.ckpt --which ": {"averaged", "raw"},
    "export a.ckpt --st": {"--strip-prefix"},
    "recommend --problem m": {"memory", "many-devices"},
    "fit -c conf": set(),  # then the shell completes files
}
OFFERED = """
for typed in "${TYPED[@]}"; do
    COMP_WORDS=(lightning-tricks $typed)
    [[ "$typed" == "" || "$typed" == *" " ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _lightning_tricks
    echo "${COMPREPLY[*]}"
done
"""


def test_bash_offers_commands_flags_presets_callbacks_and_tricks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    typed = "TYPED=(" + " ".join(f'"{line}"' for line in TYPED) + ")\n"
    script = capsys.readouterr().out + typed + OFFERED
    shown = subprocess.run(["bash", "-uc", script], capture_output=True, text=True, check=True)
    offered = [set(line.split()) for line in shown.stdout.splitlines()]
    assert dict(zip(TYPED, offered, strict=True)) == TYPED


def test_a_flag_and_its_value_in_one_word_are_completed_as_zsh_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "autoload -U +X bashcompinit && bashcompinit"
    words = "COMP_WORDS=(lightning-tricks fit --trainer.strategy=ddp_b)\nCOMP_CWORD=2\n"
    script = "\n".join([*rest, f'{words}_lightning_tricks\necho "${{COMPREPLY[*]}}"'])
    shown = subprocess.run(["bash", "-uc", script], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["--trainer.strategy=ddp_bf16"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh_reads_the_script_and_offers_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    call = "words=(lightning-tricks fit --trainer.strategy=ddp_b)\nCURRENT=3\ncompadd() { print -l -- $@ }\n"
    script = (
        f"autoload -U compinit && compinit -D -u\n{capsys.readouterr().out}{call}_bash_complete -F _lightning_tricks"
    )
    shown = subprocess.run(["zsh", "-fc", script], capture_output=True, text=True)
    assert "--trainer.strategy=ddp_bf16" in shown.stdout, shown.stderr


IN_FISH: dict[str, set[str]] = {
    "": {*COMMANDS},
    "f": {"fit", "find-lr", "find-workers"},
    "fit --trainer.max_": TYPED["fit --trainer.max_"],
    "fit -c a.yaml --trainer.strategy zero3_o": TYPED["fit -c a.yaml --trainer.strategy zero3_o"],
    "fit --trainer.strategy=tp": {"--trainer.strategy=tp_bf16"},
    "fit --trainer.callbacks+=Mi": {"--trainer.callbacks+=Mixup"},
    "tricks Flo": {"Float8"},
    "plot-schedule ": set(CURVES),
    "export a.ckpt --st": {"--strip-prefix"},
    "recommend --problem m": {"memory", "many-devices"},
}


def test_what_fish_shows_of_a_command_is_its_line_of_help_and_nothing_is_cut(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["completion", "fish"]) == 0
    shown = {}
    for line in capsys.readouterr().out.splitlines():
        words = shlex.split(line) if line.startswith("complete ") else []
        if "-a" in words and "-d" in words:
            shown[words[words.index("-a") + 1]] = words[words.index("-d") + 1]
    commands = parser()._subparsers._group_actions[0]._choices_actions
    assert shown.items() >= {action.dest: action.help for action in commands}.items()


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_fish_offers_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["completion", "fish"]) == 0
    asked = [f"complete -C 'lightning-tricks {line}' | string split -f1 \\t | string join ' '" for line in IN_FISH]
    script = tmp_path / "typed.fish"
    script.write_text("\n".join([capsys.readouterr().out, *asked]))
    command = ["fish", "--no-config", str(script)]
    shown = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "HOME": str(tmp_path)}
    )
    offered = [set(line.split()) for line in shown.stdout.splitlines()]
    assert dict(zip(IN_FISH, offered, strict=True)) == IN_FISH


def test_without_shtab_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "fish"]) == 1
    assert capsys.readouterr().err == f"lightning-tricks: completion in fish needs shtab: {pip_install('cli')}\n"


def test_the_names_that_it_knows_are_those_of_the_package() -> None:
    spec = importlib.util.spec_from_file_location("names", ROOT / ".ci" / "names.py")
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    current = module.names()
    assert NAMES["presets"] == current["presets"] == lt.presets(), "make exports writes names.json"
    assert NAMES["callbacks"] == current["callbacks"], "make exports writes names.json"
    for key in ("lightning_callbacks", "trainer"):  # of the Lightning in use when it was written
        assert set(NAMES[key]) <= set(current[key])
    assert not re.search(r"[^\w]", "".join(NAMES["callbacks"] + NAMES["trainer"]))
