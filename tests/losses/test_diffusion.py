"""Min-SNR weights: the formulas, and that all predictions weight the same error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lightning_tricks as lt

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
    errors = [
        lt.min_snr_weight(ALPHAS, t, prediction=name) * (one - other).square().mean(1)
        for name, (one, other) in pairs.items()
    ]
    torch.testing.assert_close(errors[0], errors[1])
    torch.testing.assert_close(errors[0], errors[2])


def test_they_are_finite_at_both_ends() -> None:
    ends, t = torch.tensor([1.0, 0.0]), torch.tensor([0, 1])
    found = [lt.min_snr_weight(ends, t, prediction=prediction).tolist() for prediction in PREDICTIONS]
    assert found == [[0, 1], [5, 0], [0, 0]]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"prediction": "v_prediction"}, ValueError, "prediction must be one of 'epsilon', 'sample', 'v'"),
        ({"gamma": 0.0}, ValueError, "gamma must be above 0"),
        ({"gamma": -1.0}, ValueError, "gamma must be in"),
        ({"t": torch.tensor([0.5])}, TypeError, "t must be integer timesteps, got torch.float32"),
        ({"t": 3}, TypeError, "t must be Tensor"),
        ({"t": torch.tensor([-1])}, IndexError, "out of range"),
        ({"t": torch.tensor([1000])}, IndexError, "out of range"),
        ({"alphas_cumprod": 1 / ALPHAS}, ValueError, r"alphas_cumprod must be in \[0, 1\], got values from 1"),
        ({"alphas_cumprod": ALPHAS[None]}, ValueError, r"alphas_cumprod must be floating-point numbers \(T,\)"),
    ],
)
def test_wrong_arguments_raise(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        lt.min_snr_weight(**{"alphas_cumprod": ALPHAS, "t": torch.tensor([3]), **arguments})
