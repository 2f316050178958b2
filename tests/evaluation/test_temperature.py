"""Temperature scaling: against a grid search, torchmetrics' calibration error and data with a known temperature."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassCalibrationError

from lightning_tricks.evaluation import Temperature, fit_temperature
from lightning_tricks.evaluation.temperature import best_temperature
from tests.nets import Net, build, fit, loader, trainer


def sampled(size: int, classes: int, temperature: float, spread: float = 2.0) -> tuple[Tensor, Tensor]:
    """Logits whose probabilities at ``temperature`` are those that the targets are drawn with."""
    generator = torch.Generator().manual_seed(size)
    logits = spread * torch.randn(size, classes, generator=generator)
    targets = torch.multinomial((logits / temperature).softmax(1), 1, generator=generator).squeeze(1)
    return logits, targets


@pytest.mark.parametrize("temperature", [0.05, 0.5, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("classes", [2, 7])
def test_it_is_the_best_of_a_grid_search(temperature: float, classes: int) -> None:
    logits, targets = sampled(1000, classes, temperature, spread=2 * temperature)
    found = best_temperature(logits, targets)
    for width in (1, 1e-4):
        grid = found * torch.logspace(-width, width, 201, dtype=torch.double)  # its middle is what was found
        losses = [F.cross_entropy(logits.double() / each, targets).item() for each in grid]
        assert abs(losses.index(min(losses)) - 100) <= 1
    assert found == pytest.approx(temperature, rel=0.2)


@pytest.mark.parametrize("factor", [1e-4, 1e5])
def test_it_scales_with_the_logits(factor: float) -> None:
    logits, targets = sampled(1000, 5, 2.0)
    assert best_temperature(logits * factor, targets) == pytest.approx(factor * best_temperature(logits, targets), 1e-4)


def test_the_errors_are_those_of_torchmetrics() -> None:
    logits, targets = sampled(4000, 5, 2.5)
    found = fit_temperature(nn.Identity(), DataLoader(TensorDataset(logits, targets), 300))
    error = MulticlassCalibrationError(5, n_bins=15)
    assert found.ece[0] == pytest.approx(error(logits.softmax(1), targets).item(), abs=1e-6)
    assert found.ece[1] == pytest.approx(error((logits / found.temperature).softmax(1), targets).item(), abs=1e-6)
    assert found.nll[0] == pytest.approx(F.cross_entropy(logits, targets).item(), abs=1e-6)
    assert found.nll[1] == pytest.approx(F.cross_entropy(found.scale(logits), targets).item(), abs=1e-6)
    assert found.ece[1] < 0.03 < 0.2 < found.ece[0]
    for bins, ece in zip(found.reliability, found.ece, strict=True):
        assert sum(count for *_, count in bins) == 4000
        assert sum(count * abs(sure - right) for sure, right, count in bins) / 4000 == pytest.approx(ece, abs=1e-6)
    figure, axes = found.plot()
    assert [line.get_label().split(",")[0] for line in axes.lines] == ["calibrated", "before", "after"]
    assert found.plot(axes)[0] is figure
    assert str(found).startswith(f"temperature {found.temperature:.3f}: NLL")


def test_a_module_stays_as_it_is_and_may_be_scaled() -> None:
    module = build(Net)
    fit(module, max_epochs=3)
    module.train()
    module.layers[1].eval()
    before, modes = copy.deepcopy(module.state_dict()), [each.training for each in module.modules()]
    data = loader(240)
    found = fit_temperature(module, data)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert [each.training for each in module.modules()] == modes
    plain = torch.cat(trainer().predict(module, data))
    (row,) = trainer().validate(module, data, verbose=False)
    handle = found.apply(module)
    torch.testing.assert_close(torch.cat(trainer().predict(copy.deepcopy(module), data)), plain / found.temperature)
    (scaled,) = trainer().validate(module, data, verbose=False)
    assert scaled["val_loss"] == pytest.approx(found.nll[1], rel=1e-5)
    assert row["val_loss"] == pytest.approx(found.nll[0], rel=1e-5)
    handle.remove()
    assert torch.equal(torch.cat(trainer().predict(module, data)), plain)


def test_batches_of_any_kind() -> None:
    logits, targets = sampled(400, 3, 2.0)
    batches = [{"x": logits[:100], "y": targets[:100]}, {"x": logits[100:], "y": targets[100:]}]
    found = fit_temperature(nn.Identity(), batches, lambda module, batch: (module(batch["x"]), batch["y"]))
    assert found.temperature == best_temperature(logits, targets)
    with pytest.raises(TypeError, match=r"batches must be pairs .* got dict: pass predict="):
        fit_temperature(nn.Identity(), batches)


LOGITS, TARGETS = sampled(50, 3, 2.0)


@pytest.mark.parametrize(
    ("logits", "targets", "message"),
    [
        (LOGITS.softmax(1), TARGETS, "must not be probabilities"),
        (LOGITS[:, :1], TARGETS * 0, "two classes or more"),
        (LOGITS[:, 0], TARGETS, r"logits must be \(B, C\), got \(50,\)"),
        (LOGITS, LOGITS.argmax(1), "needs samples that are misclassified, got none"),
        (LOGITS, LOGITS.argmin(1), "needs logits that say something of the targets"),
        (torch.ones(50, 3), TARGETS, "needs samples that are misclassified|say something"),
        (LOGITS, TARGETS.float(), r"targets must be classes \(N,\)"),
        (LOGITS, F.one_hot(TARGETS), r"targets must be classes \(N,\)"),
        (LOGITS, TARGETS - 1, r"targets must be in \[0, 3\), got -1 to 1"),
        (LOGITS, TARGETS + 1, r"targets must be in \[0, 3\), got 1 to 3"),
        (LOGITS.index_fill(0, torch.tensor([3]), torch.inf), TARGETS, "logits must be finite"),
    ],
)
def test_what_has_no_temperature_is_refused(logits: Tensor, targets: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        best_temperature(logits, targets)


def test_a_loader_without_batches_and_outputs_that_are_no_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="loader must yield batches"):
        fit_temperature(nn.Identity(), [])

    class Two(L.LightningModule):
        def forward(self, x: Tensor) -> Any:
            return x, x

    module = Two()
    Temperature(2.0, (1, 1), (0, 0), ([], [])).apply(module)
    with pytest.raises(TypeError, match="divides logits, got tuple from Two"):
        module(LOGITS)
