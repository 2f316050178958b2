"""Every trick trains on an XLA device what it trains on the CPU, or is refused by name before the first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_tricks.callbacks.neftune import noisy_embeddings
from tests.conformance.runs import refusal
from tests.conformance.settings import SETTINGS
from tests.device.devices import CPU, Device
from tests.device.runs import fit
from tests.nets import assert_close

REFUSED = {
    "ActivationCheckpointing": "ActivationCheckpointing: torch recomputes and moves activations on cuda, mps, xpu",
    "Float8": "rounds by float64 and float8, which torch does not do on a device of type 'xla'",
}
TOLERANCES = {
    "Distill": 1e-3,  # the teacher computes by running variances, which have another formula there
    "QAT": 1e-3,  # a number near the border between two steps may be rounded to the other one
}
OTHER_FORMULA = "running_var"  # torch_xla's BatchNorm averages the variance of the batch without Bessel's correction


def with_noise_of_the_host(x: Tensor, alpha: float) -> Tensor:
    """The device's own generator draws other numbers from the same seed."""
    return x + noisy_embeddings(torch.zeros_like(x, device="cpu"), alpha).to(x.device)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_trick_trains_there_what_it_trains_on_the_cpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, xla: Device, cell: Callable[..., None]
) -> None:
    trick = SETTINGS[name]
    monkeypatch.setattr("lightning_tricks.callbacks.neftune.noisy_embeddings", with_noise_of_the_host)
    if name in REFUSED:
        message = refusal(trick, accelerator=xla.accelerator)
        assert REFUSED[name] in message
        cell(name, "refused", message)
        return
    found, expected = fit(trick, "fp32", tmp_path / "a", xla), fit(trick, "fp32", tmp_path / "b", CPU)
    for weights in (found.weights, expected.weights):
        for buffer in [buffer for buffer in weights if buffer.endswith(OTHER_FORMULA)]:
            del weights[buffer]
    assert_close(found.weights, expected.weights, TOLERANCES.get(name, 1e-4))
    assert found.devices == {"xla"}
    cell(name)
