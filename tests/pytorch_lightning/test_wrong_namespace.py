"""What is of one Lightning and meets the other is refused, in words that say what to import."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import lightning.pytorch
import lightning.pytorch.demos.boring_classes
import pytest
import pytorch_lightning
import pytorch_lightning.demos.boring_classes
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_fabric.utilities.exceptions import MisconfigurationException as OtherMisconfiguration

import lightning_tricks
import pytorch_lightning_tricks
from pytorch_lightning_tricks.loader import SOURCE, rename
from tests.nets import quiet
from tests.ranks import printed, run_alone


class Mixed(NamedTuple):
    """Tricks with the Lightning that is not theirs."""

    lt: ModuleType
    pl: ModuleType

    def trainer(self, **settings: Any) -> Any:
        return self.pl.Trainer(**{**quiet, "max_steps": 1, **settings})

    def module(self, *mixins: type, **body: Any) -> Any:
        boring = importlib.import_module(f"{self.pl.__name__}.demos.boring_classes").BoringModel
        return type("Net", (*mixins, boring), body)()

    def optimizing(self, configured: Callable[[Any], Any]) -> None:
        self.trainer().fit(self.module(configure_optimizers=configured))


def sgd(module: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


MIXED = (Mixed(lightning_tricks, pytorch_lightning), Mixed(pytorch_lightning_tricks, lightning.pytorch))
MEETINGS: dict[str, tuple[Callable[[Mixed], Any], str, str]] = {  # and what of whom is refused
    "callback": (
        lambda mixed: mixed.trainer(callbacks=[mixed.lt.EMA()]).fit(mixed.module()),
        "EMA(decay=0.999)",
        "{}.Trainer",
    ),
    "callback in validation": (
        lambda mixed: mixed.trainer(callbacks=[mixed.lt.Doctor()]).validate(mixed.module(), verbose=False),
        "Doctor(silence=())",
        "{}.Trainer",
    ),
    "mixin": (
        lambda mixed: mixed.trainer().fit(mixed.module(mixed.lt.SAMMixin, sam=mixed.lt.SAM())),
        "Net with SAM(rho=0.05, adaptive=False, eta=0.01, every_n_steps=1, micro_batch_size=None, parameters=None)",
        "{}.Trainer",
    ),
    "schedule": (
        lambda mixed: mixed.optimizing(lambda module: mixed.lt.cosine(sgd(module), module)),
        "A schedule",
        "Net, a {}.LightningModule",
    ),
    "plateau": (
        lambda mixed: mixed.optimizing(lambda module: mixed.lt.reduce_on_plateau(sgd(module), module)),
        "A schedule",
        "Net, a {}.LightningModule",
    ),
    "steps": (
        lambda mixed: mixed.optimizing(lambda module: mixed.lt.optimizer_steps(module.trainer)),
        "optimizer_steps",
        "{}.Trainer",
    ),
    "optimizer": (
        lambda mixed: mixed.optimizing(lambda module: mixed.lt.adamw(module, 0.1)),
        "adamw",
        "Net, a {}.LightningModule",
    ),
    "find_lr": (lambda mixed: mixed.lt.find_lr(mixed.trainer(), mixed.module()), "find_lr", "{}.Trainer"),
    "find_batch_size": (
        lambda mixed: mixed.lt.find_batch_size(mixed.trainer(), mixed.module()),
        "find_batch_size",
        "{}.Trainer",
    ),
}


def message(mixed: Mixed, what: str, found: str) -> str:
    own, there = rename(mixed.pl.__name__), mixed.pl.__name__
    return (
        f"{what} of {mixed.lt.__name__} works with {own}, got {found}. For {there}, `import"
        f" {rename(mixed.lt.__name__)} as lt` in place of {mixed.lt.__name__}."
    )


@pytest.mark.parametrize("mixed", MIXED, ids=lambda mixed: mixed.lt.__name__)
@pytest.mark.parametrize("name", MEETINGS)
def test_what_meets_the_other_lightning_says_what_to_import(name: str, mixed: Mixed) -> None:
    meet, what, found = MEETINGS[name]
    with pytest.raises(MisconfigurationException) as caught:
        meet(mixed)
    assert str(caught.value) == message(mixed, what, found.format(mixed.pl.__name__))
    assert isinstance(caught.value, OtherMisconfiguration)  # whichever it is that a user catches


@pytest.mark.parametrize("mixed", MIXED, ids=lambda mixed: mixed.lt.__name__)
def test_a_preset_object_says_what_to_import_in_the_error_of_the_trainer(mixed: Mixed) -> None:
    right = f"for {mixed.pl.__name__} `import {rename(mixed.lt.__name__)} as lt`"
    with pytest.raises(ValueError, match=f"strategy=<ddp_bf16 of {mixed.lt.__name__}, .*; {right}>"):
        mixed.trainer(**mixed.lt.preset("ddp_bf16"))


UNREGISTERED = """
import {0} as pl
import {1}
try:
    pl.Trainer(strategy="ddp_bf16", accelerator="cpu", logger=False)
except pl.utilities.exceptions.MisconfigurationException as error:
    print(error)
import {2} as lt
print(lt.__name__ if isinstance(pl.Trainer(strategy="single_bf16", accelerator="cpu").strategy, lt.SinglePreset) else 0)
"""


UNREGISTER = """
import sys
import lightning.pytorch as pl
for name in [name for name in sys.modules if name.split(".")[0] == "lightning_tricks"]:
    del sys.modules[name]
for name in [name for name, data in pl.strategies.StrategyRegistry.items() if "tricks" in data["strategy"].__module__]:
    del pl.strategies.StrategyRegistry[name]
"""


@pytest.mark.parametrize("mixed", MIXED, ids=lambda mixed: mixed.lt.__name__)
def test_an_unregistered_preset_string_says_what_to_import(mixed: Mixed) -> None:
    """In a process that has forgotten ``lightning_tricks``; in a new interpreter with ``-m slow``."""
    right = rename(mixed.lt.__name__)
    said = run_alone(printed, UNREGISTER + UNREGISTERED.format(mixed.pl.__name__, mixed.lt.__name__, right))
    assert said.splitlines()[:2] == [message(mixed, "strategy='ddp_bf16'", f"a {mixed.pl.__name__}.Trainer"), right]


@pytest.mark.slow
@pytest.mark.parametrize("mixed", MIXED, ids=lambda mixed: mixed.lt.__name__)
def test_a_preset_string_says_what_to_import_until_that_is_imported(mixed: Mixed) -> None:
    right = rename(mixed.lt.__name__)
    program = UNREGISTERED.format(mixed.pl.__name__, mixed.lt.__name__, right)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=SOURCE.parent)
    expected = [message(mixed, "strategy='ddp_bf16'", f"a {mixed.pl.__name__}.Trainer"), right]
    assert done.stdout.splitlines()[:2] == expected, done.stderr
