"""``lightning-tricks recommend``: every configuration is accepted, and its advice agrees with what was measured."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_tricks_cli.catalogue import CATALOGUE
from lightning_tricks_cli.commands.recommend import ADVICE, CHOICES, Case, chosen, configuration
from lightning_tricks_cli.main import main
from lightning_tricks_cli.runs.config import read_config

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CASES = [
    Case(*values)
    for values in itertools.product(
        *(CHOICES["task"], CHOICES["labels"], CHOICES["data"], (False, True), CHOICES["problem"], (None, 8))
    )
]
CARDS = {row.names[0] for row in CATALOGUE}


def covering() -> Iterator[Case]:
    """Some of the cases, in which every model and all advice occurs."""
    seen: set[Any] = set()
    for case in CASES:
        parts = {(case.task, case.pretrained), *chosen(case)}
        if not parts <= seen:
            yield case
            seen |= parts


@cache
def lightning_parser(folder: Path) -> Any:
    """The parser of a LightningCLI."""
    (folder / "config.yaml").write_text(configuration(Case("tabular")))
    return read_config([folder / "config.yaml"], "--trainer.logger=false").parser


def test_lightning_accepts_configurations_with_all_advice(tmp_path: Path) -> None:
    cases = list(covering())
    assert {name for case in cases for name in chosen(case)} == {*ADVICE}
    for case in cases:
        lightning_parser(tmp_path).parse_object(yaml.safe_load(configuration(case)))


@pytest.mark.slow
def test_lightning_makes_model_data_and_trainer_of_every_combination(tmp_path: Path) -> None:
    assert len(CASES) == 384
    distinct = {str(yaml.safe_load(configuration(case))): case for case in CASES}
    for case in distinct.values():
        (tmp_path / "config.yaml").write_text(configuration(case))
        cli = read_config([tmp_path / "config.yaml"], "--trainer.logger=false", "--trainer.accelerator=cpu")
        names = [type(callback).__name__ for callback in cli.trainer.callbacks]
        assert {part["class_path"] for part in yaml.safe_load(configuration(case))["trainer"]["callbacks"]} <= {*names}


FITTED = [
    Case("tabular", labels="noisy", problem="nan"),
    pytest.param(Case("image", data="small", pretrained=True, problem="memory"), marks=pytest.mark.slow),
    pytest.param(
        Case("text", labels="noisy", data="small", pretrained=True, problem="overfits"), marks=pytest.mark.slow
    ),
    pytest.param(Case("llm", pretrained=True, problem="memory"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", FITTED, ids=lambda case: "-".join(map(str, case)))
def test_what_is_printed_is_fitted(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", StringIO())
    flags = [
        f"--{name}={value}" for name, value in case._asdict().items() if name != "pretrained" and value is not None
    ]
    assert main(["recommend", *flags, *(["--pretrained"] if case.pretrained else [])]) == 0
    Path("config.yaml").write_text(capsys.readouterr().out)
    limits = ["max_epochs=1", "limit_train_batches=2", "limit_val_batches=1", "accelerator=cpu", "log_every_n_steps=1"]
    quiet = ["enable_progress_bar=false", "enable_model_summary=false", "logger=false"]
    arguments = [f"--trainer.{setting}" for setting in (*limits, *quiet)]
    assert main(["fit", "-c", "config.yaml", *arguments]) == 0
    assert list(tmp_path.rglob("*.ckpt"))


def test_a_reason_stands_above_every_part_and_its_card_exists() -> None:
    for advice in ADVICE.values():
        assert advice.why.endswith(".")
        assert not advice.card or advice.card in CARDS
    for case in covering():
        lines = configuration(case).splitlines()
        assert max(map(len, lines)) <= 120
        for above, line in itertools.pairwise(lines):
            if "- class_path: " in line:
                assert re.fullmatch(r" +# [A-Z][^.]*( \(docs/tricks/\w+\.md\))?\.", above)


def told(regime: str) -> dict[str, dict[str, int]]:
    """Of each task the tricks whose interval leaves out 0, with its sign."""
    found: dict[str, dict[str, int]] = {}
    for row in json.loads((RESULTS / "quality.json").read_text())["rows"]:
        sign = (row["gain"]["low"] > 0) - (row["gain"]["high"] < 0)
        if row["regime"] == regime and sign:
            found.setdefault(row["task"], {})[row["trick"]] = sign
    return found


def test_its_advice_on_labels_is_what_was_measured() -> None:
    noisy = told("40% wrong labels")
    for case in CASES:
        names = {*chosen(case)}
        if case.labels == "noisy" and case.task != "llm":
            assert len({"EMA", "flat_cos", "cosine", "linear"} & names) == 1  # both gained no more than one
            assert ("flat_cos" if case.pretrained else "EMA") in names
        assert not {"EMA", "Mixup", "CutMix", "SAM"} & names or case.labels == "noisy"
    gains = {name: [tricks.get(name, 0) for tricks in noisy.values()] for name in ("EMA", "SAM", "flat_cos")}
    fewer = [tricks.get("EMA", 0) for tricks in told("20% wrong labels").values()]
    assert (len(noisy), max(fewer.count(1), gains["EMA"].count(1))) == (4, 3)  # of EMA, "on three of our four tasks"
    assert gains["flat_cos"].count(1) == 3
    assert -1 not in [*gains["EMA"], *gains["flat_cos"], *fewer]
    assert not [advice for advice in ADVICE.values() if "HardExampleFilter" in advice.yaml]
    assert [tricks.get("HardExampleFilter") for task, tricks in noisy.items() if task != "text"] == [-1, -1, -1]
    plain = configuration(Case("image"))
    assert plain.startswith("# Clean labels: a schedule is a good start.")
    assert re.findall("class_path: ([A-Z][A-Za-z]+)", plain) == ["LRSchedule"]


def test_many_devices_get_a_preset() -> None:
    presets = {
        (task, pretrained): yaml.safe_load(configuration(Case(task, pretrained=pretrained, devices=8)))["trainer"]
        for task in ("image", "llm")
        for pretrained in (False, True)
    }
    assert {case: trainer["strategy"] for case, trainer in presets.items()} == {
        ("image", False): "ddp_bf16",
        ("image", True): "ddp_bf16",
        ("llm", False): "fsdp2_bf16",
        ("llm", True): "ddp_bf16",
    }
    assert {trainer["devices"] for trainer in presets.values()} == {8}
    unknown = yaml.safe_load(configuration(Case("image", problem="many-devices")))["trainer"]
    assert (unknown["strategy"], unknown["devices"]) == ("ddp_bf16", "auto")


def test_in_a_terminal_it_asks_for_what_no_flag_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal, user = os.openpty()
    os.write(terminal, b"pictures\nimage\nnoisy\nyes\n\nmany\n2\n")  # two answers that are none
    with os.fdopen(user, "r") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert main(["recommend", "--data", "small"]) == 0
    out, err = capsys.readouterr()
    assert out == configuration(Case("image", "noisy", "small", True, "none", 2)) + "\n"
    assert err.count("What do you train on? [image/text/tabular/llm]") == 2
    assert "How much data" not in err
    os.close(terminal)


def test_without_a_terminal_the_task_is_required(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", StringIO())
    with pytest.raises(SystemExit, match="2"):
        main(["recommend", "--labels", "noisy"])
    assert "the following arguments are required: --task" in capsys.readouterr().err
