"""Min-SNR weights: the formulas, and that all predictions weight the same error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lightning_tricks as lt
from tests.refusals import assert_refused

ALPHAS = torch.cumprod(1 - torch.linspace(1e-4, 2e-2, 1000, dtype=torch.float64), 0)
PREDICTIONS = ["epsilon", "sample", "v"]


def naive(a: float, gamma: float, prediction: str) -> float:
    snr = a / (1 - a)
    return min(snr, gamma) / {"epsilon": snr, "sample": 1.0, "v": snr + 1}[prediction]


@pytest.mark.parametrize("gamma", [1, 5.0])
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_they_are_the_formula(prediction: Any, gamma: float) -> None:
    t = torch.tensor([[0, 10, 100], [300, 600, 999]])
    found = lt.min_snr_weight(ALPHAS, t, gamma=gamma, prediction=prediction)
    expected = [[naive(float(ALPHAS[n]), gamma, prediction) for n in row] for row in t.tolist()]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert lt.functional.min_snr_weight is lt.min_snr_weight


def test_they_weight_the_same_error() -> None:
    """A guess of the sample, told as a guess of the noise or of v, has the same weighted squared error."""
    sample, guess, noise = torch.randn(3, 50, 4, dtype=torch.float64)
    t = torch.arange(0, 1000, 20)
    a = ALPHAS[t, None]
    noisy = a.sqrt() * sample + (1 - a).sqrt() * noise
    guessed_noise = (noisy - a.sqrt() * guess) / (1 - a).sqrt()
    v, guessed_v = (a.sqrt() * e - (1 - a).sqrt() * x for e, x in ((noise, sample), (guessed_noise, guess)))
    pairs = {"epsilon": (noise, guessed_noise), "sample": (sample, guess), "v": (v, guessed_v)}
    squared = {name: (one - other).square().mean(1) for name, (one, other) in pairs.items()}
    errors = [lt.min_snr_weight(ALPHAS, t, prediction=name) * error for name, error in squared.items()]
    torch.testing.assert_close(errors[0], errors[1])
    torch.testing.assert_close(errors[0], errors[2])


def test_they_are_finite_at_both_ends() -> None:
    ends, t = torch.tensor([1.0, 0.0]), torch.tensor([0, 1])
    found = [lt.min_snr_weight(ends, t, prediction=prediction).tolist() for prediction in PREDICTIONS]
    assert found == [[0, 1], [5, 0], [0, 0]]


def test_wrong_arguments_raise() -> None:
    cases = [
        (ValueError, {"prediction": "v_prediction"}, "prediction must be one of 'epsilon', 'sample', 'v'"),
        (ValueError, {"gamma": 0.0}, "gamma must be above 0"),
        (ValueError, {"gamma": -1.0}, "gamma must be in"),
        (TypeError, {"t": torch.tensor([0.5])}, "t must be integer timesteps, got torch.float32"),
        (TypeError, {"t": 3}, "t must be Tensor"),
        (IndexError, {"t": torch.tensor([-1])}, "out of range"),
        (IndexError, {"t": torch.tensor([1000])}, "out of range"),
        (ValueError, {"alphas_cumprod": 1 / ALPHAS}, r"alphas_cumprod must be in \[0, 1\], got values from 1"),
        (ValueError, {"alphas_cumprod": ALPHAS[None]}, r"alphas_cumprod must be floating-point numbers \(T,\)"),
    ]
    assert_refused(
        lambda **given: lt.min_snr_weight(**{"alphas_cumprod": ALPHAS, "t": torch.tensor([3]), **given}), cases
    )
