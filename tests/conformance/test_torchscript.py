"""Modules with submodules that torch.jit has compiled: scripted, traced or loaded from a file."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

import lightning_tricks as lt
from tests.nets import PlainNet, assert_close, assert_equal, build, fit, loader, trainer, weights

pytestmark = [
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    # torch's compiler, of what a traced module returns
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
FEW: dict[str, Any] = {"max_epochs": 1, "limit_val_batches": 0}


class Counts(nn.Module):
    """Changes its attributes, on which its output depends."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.carried = nn.Linear(8, 8), 0, torch.zeros(8)
        self.seen = torch.jit.Attribute([0], list[int])
        self.register_buffer("anew", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.carried = self.carried + 0.1
        self.anew = self.anew + x.mean(0).detach()
        return self.linear(x) * (1.0 + 0.1 * self.calls) + self.carried + self.anew


def loaded(module: Any) -> Any:
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return torch.jit.load(file)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))


BODIES: dict[str, Callable[[], Any]] = {
    "scripted": lambda: torch.jit.script(normed()),
    "traced": lambda: torch.jit.trace(normed(), torch.zeros(4, 8)),
    "with attributes": lambda: torch.jit.script(Counts()),
    "loaded": lambda: loaded(torch.jit.script(Counts())),
}
bodies = pytest.mark.parametrize("body", BODIES)


class Scripted(PlainNet):
    def __init__(self, body: str, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.body = BODIES[body]()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.body(x))


def ended(module: Scripted) -> tuple[dict[str, Tensor], list[Any]]:
    names = ("calls", "seen", "carried")
    held = [getattr(module.body, name).tolist() if name == "carried" else getattr(module.body, name)
            for name in names if hasattr(module.body, name)]  # fmt: skip
    return weights(module), held


TRICKS: dict[str, Callable[[], Callback]] = {
    "SAM": lambda: lt.SAMCallback(rho=0.0),
    "prune": lambda: lt.HardExampleFilter(keep=0.999),
    "ActivationCheckpointing": lambda: lt.ActivationCheckpointing(r"^layers\.2$"),
    "Compile": lambda: lt.Compile(backend="eager", fallback=False),
    "Throughput": lt.Throughput,
    "SkipNonFinite": lt.SkipNonFinite,
    "RewindOnSpike": lt.RewindOnSpike,
    "SWA": lambda: lt.SWA(recalibrate_batchnorm=False, at_end="raw", validate="raw"),
    "EMA": lambda: lt.EMA(at_end="raw", validate="raw"),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("trick", TRICKS.values(), ids=TRICKS)
@bodies
def test_a_fit_is_that_without_the_trick(body: str, trick: Callable[[], Callback]) -> None:
    plain, ours = build(Scripted, body=body), build(Scripted, body=body)
    fit(plain, train=loader(40), **FEW), fit(ours, train=loader(40), callbacks=[trick()], **FEW)
    (theirs, attributes), (mine, own) = ended(plain), ended(ours)
    assert_equal(mine, theirs)
    assert own == attributes


def test_a_real_perturbation_is_that_of_the_module_in_python() -> None:
    class Plain(Scripted):
        def __init__(self, lr: float = 0.1) -> None:
            PlainNet.__init__(self, lr)
            self.body = normed()

    ours, python = build(Scripted, body="scripted"), build(Plain)
    python.load_state_dict(ours.state_dict())
    for module in (ours, python):
        fit(module, callbacks=[lt.SAMCallback(rho=0.2)], **FEW)
    assert_close(weights(ours), weights(python))


TRIALS: dict[str, Callable[[Any], Any]] = {
    "find_lr": lambda module: lt.find_lr(trainer(), module, loader(40)),
    "find_batch_size": lambda module: lt.find_batch_size(trainer(), module, loader(40), max_size=16),
    "inspect_training": lambda module: lt.inspect_training(trainer(), module, loader(40)),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("trial", TRIALS.values(), ids=TRIALS)
@bodies
def test_a_trial_leaves_the_module_as_it_was(body: str, trial: Callable[[Any], Any]) -> None:
    module = build(Scripted, body=body)
    module(torch.randn(4, 8))
    (before, attributes) = ended(module)
    trial(module)
    assert_equal(ended(module)[0], before)
    assert ended(module)[1] == attributes


def test_an_inspection_tells_the_gradients_of_scripted_layers() -> None:
    found = {layer.name: layer for layer in TRIALS["inspect_training"](build(Scripted, body="scripted")).layers}
    assert found["body.0"].gradient > 0
    assert found["body.0"].activation is None  # TorchScript takes no hooks
    assert found["layers.0"].activation > 0


@pytest.mark.parametrize("body", ["scripted", "with attributes", "loaded"])
def test_memory_is_estimated(body: str) -> None:
    module = build(Scripted, body=body)
    before = ended(module)
    assert lt.estimate_memory(module, batch=next(iter(loader()))).total > 0
    assert_equal(ended(module)[0], before[0])
    assert ended(module)[1] == before[1]


REFUSED: dict[str, tuple[Callable[[], Callback], str]] = {
    "recompute": (lambda: lt.ActivationCheckpointing("^body$"), "torch.jit has compiled body or a part of it"),
    "offload": (lambda: lt.ActivationCheckpointing("^body$", policy="offload"), "torch.jit has compiled body"),
    "Compile": (lambda: lt.Compile("^body$"), "Compile: body is a TorchScript module"),
    "SWA": (
        lt.SWA,
        r"SWA runs training_step for .* not let it recalculate in body.1: script the module after training",
    ),
    "HiddenMixup": (lambda: lt.HiddenMixup("body"), "HiddenMixup mixes the inputs of body, which takes no hook"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_by_name_before_the_first_step(case: Any) -> None:
    (trick, message), module = case, build(Scripted, body="scripted")
    before = {name: value for name, value in weights(module).items() if "running" not in name and "num" not in name}
    with pytest.raises(MisconfigurationException, match=message):
        fit(module, callbacks=[trick()], **FEW)
    assert_equal({name: value for name, value in weights(module).items() if name in before}, before)


def test_a_scripted_backbone_whose_statistics_stand_still_may_be_averaged() -> None:
    class Still(Scripted):
        def on_train_epoch_start(self) -> None:
            self.body.eval()

    fit(build(Still, body="scripted"), callbacks=[lt.SWA(start=0)], **FEW)
