"""configs/recipes/: each says when to take it and what to change, and runs as its first lines say."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_tricks.examples.tasks import accuracy
from lightning_tricks_cli.catalogue import CATALOGUE
from lightning_tricks_cli.runs.config import read_config
from tests.ranks import run_alone, run_ranks
from tests.test_configs import commands, fitted, folder

__all__ = ["folder"]  # a fixture
ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))
NAMES = ["big_model", "debug_fast", "image_finetune", "image_scratch", "llm_lora", "noisy_labels", "text_finetune"]
QUICK = ("debug_fast", "noisy_labels")  # the others import timm, transformers, peft
each = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)


def test_there_are_seven() -> None:
    assert [path.stem for path in RECIPES] == NAMES
    assert all(name in (ROOT / "configs" / "README.md").read_text() for name in NAMES)


@each
def test_two_lines_say_when_and_what_to_change(recipe: Path) -> None:
    first, second, empty, command, *rest = recipe.read_text().splitlines()
    assert first.startswith("# When: ")
    assert " Change: " in second
    assert (empty, command) == ("#", f"# lightning-tricks fit -c configs/recipes/{recipe.name}")
    cards = re.findall(r"docs/tricks/(\w+)\.md", "\n".join(rest))
    assert set(cards) <= {row.names[0] for row in CATALOGUE}
    callbacks = [part["class_path"] for part in yaml.safe_load(recipe.read_text())["trainer"]["callbacks"]]
    own = [name for name in callbacks if name != "ModelCheckpoint"]
    assert own
    assert len(re.findall(r"class_path: \w+ # docs/tricks/", "\n".join(rest))) == len(own)


@pytest.mark.few(1)
@pytest.mark.parametrize("recipe", [path for path in RECIPES if path.stem in QUICK], ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled train dataloader shuffling")
def test_it_trains(recipe: Path, folder: Path) -> None:
    trains(recipe, folder)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [path for path in RECIPES if path.stem not in QUICK], ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore:torch.utils._pytree")
def test_so_do_those_with_models_of_other_libraries(recipe: Path, folder: Path) -> None:
    trains(recipe, folder)


def trains(recipe: Path, folder: Path) -> None:
    (arguments,) = commands(recipe.read_text())
    settings = yaml.safe_load(recipe.read_text())["trainer"]
    if settings.get("devices", 1) == 2:
        fits = run_ranks(fitted, arguments, folder, nprocs=2)
    else:
        fits = [fitted(arguments, folder)]
    for fit in fits:
        assert fit.steps == 2
        assert {part["class_path"] for part in settings["callbacks"]} <= {*fit.callbacks}
        assert settings.get("strategy", "auto") in {*fit.strategy, "auto"}


def test_lightning_accepts_them() -> None:
    parser = read_config([RECIPES[NAMES.index("debug_fast")]], "--trainer.logger=false").parser
    for recipe in RECIPES:
        parser.parse_object(yaml.safe_load(recipe.read_text()))


@pytest.mark.slow
@each
@pytest.mark.filterwarnings("ignore:You requested to overfit", "ignore:Precision bf16-mixed is not supported")
def test_a_short_run_learns(recipe: Path, folder: Path) -> None:
    """Validation after it is better than before; debug_fast knows its two batches by heart."""
    alone = recipe.stem == "big_model"  # which makes a process group
    before, after, heart = run_alone(short_run, recipe, folder) if alone else short_run(recipe, folder)
    assert after.get("val_accuracy", 0) > before.get("val_accuracy", -1)
    assert after.get("val_loss", 0) < before.get("val_loss", 1)
    assert recipe.stem != "debug_fast" or heart == 1


def short_run(recipe: Path, folder: Path) -> tuple[dict[str, float], dict[str, float], float | None]:
    """Metrics of the validation before and after, and the accuracy on the first two batches of a classifier."""
    os.chdir(folder)
    quiet = [f"--trainer.{name}=false" for name in ("logger", "enable_progress_bar", "enable_model_summary")]
    short = ["--trainer.max_epochs=3", "--trainer.limit_val_batches=2", "--trainer.devices=1"]
    cli = read_config([recipe], *quiet, *([] if recipe.stem == "debug_fast" else short))
    before = evaluated(cli)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    after = evaluated(cli)
    two = cli.datamodule.data["train"][: 2 * cli.datamodule.batch_size]
    return before, after, accuracy(cli.model.network, *two).item() if hasattr(cli.model, "network") else None


def evaluated(cli: Any) -> dict[str, float]:
    """What the validation of the Trainer logs."""
    (logged,) = cli.trainer.validate(cli.model, datamodule=cli.datamodule, verbose=False)
    return dict(logged)
