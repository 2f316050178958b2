"""Weights of diffusion losses."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lightning_tricks.core.checks import check_choice, check_range, check_type

__all__ = ["min_snr_weight"]


def min_snr_weight(
    alphas_cumprod: Tensor, t: Tensor, *, gamma: float = 5.0, prediction: Literal["epsilon", "sample", "v"] = "epsilon"
) -> Tensor:
    """The Min-SNR weight of the squared error at each timestep, by what the network predicts.

    With ``a = alphas_cumprod[t]``, a noisy sample ``sqrt(a) * sample + sqrt(1 - a) * epsilon`` and ``snr = a / (1-a)``:
    ``min(snr, gamma)`` for the error of the sample, ``min(snr, gamma) / snr`` for that of epsilon, and
    ``min(snr, gamma) / (snr + 1)`` for that of ``v = sqrt(a) * epsilon - sqrt(1 - a) * sample``. These are the same
    weight of the same error, so the three are not interchangeable. All are finite, also where a is 0 or 1.

    Args:
        alphas_cumprod: The share of the sample in the variance at each timestep (T,), in [0, 1].
        t: Timesteps of the samples, integers in [0, T), of any shape.
        gamma: The largest weight of the error of the sample, above 0.
        prediction: What the network predicts, and whose squared error is weighted.

    Returns:
        The weights, of the shape of ``t``; multiply them by the mean squared error of each sample.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range, or another shape.
        IndexError: For a timestep out of range.

    Example:
        >>> alphas_cumprod = torch.tensor([0.9, 0.5, 0.1])  # snr 9, 1 and 1/9
        >>> min_snr_weight(alphas_cumprod, torch.tensor([0, 1, 2]))
        tensor([0.5556, 1.0000, 1.0000])
        >>> min_snr_weight(alphas_cumprod, torch.tensor([0, 1, 2]), prediction="v")
        tensor([0.5000, 0.5000, 0.1000])

    References:
        Hang et al., arXiv 2303.09556.
    """
    check_type("alphas_cumprod", alphas_cumprod, Tensor)
    check_type("t", t, Tensor)
    check_range("gamma", gamma, 0.0)
    check_choice("prediction", prediction, ("epsilon", "sample", "v"))
    if gamma == 0:
        raise ValueError(f"gamma must be above 0, got {gamma}: no sample would have a weight.")
    if t.is_floating_point() or t.is_complex() or t.dtype == torch.bool:
        raise TypeError(f"t must be integer timesteps, got {t.dtype}: for continuous times pass their own alphas.")
    if alphas_cumprod.ndim != 1 or not alphas_cumprod.is_floating_point():
        shape = tuple(alphas_cumprod.shape)
        raise ValueError(f"alphas_cumprod must be floating-point numbers (T,), got {alphas_cumprod.dtype} {shape}.")
    if alphas_cumprod.device.type == "cpu" and not ((alphas_cumprod >= 0) & (alphas_cumprod <= 1)).all():
        raise ValueError(
            f"alphas_cumprod must be in [0, 1], got values from {alphas_cumprod.min()} to {alphas_cumprod.max()}."
        )
    # index_select takes no negative timesteps; on a GPU the alphas of a schedule on the CPU follow the timesteps.
    a = alphas_cumprod.to(t.device).index_select(0, t.flatten()).view(t.shape)
    if prediction == "epsilon":
        return (gamma * (1 - a) / a).clamp(max=1)
    if prediction == "sample":
        return (a / (1 - a)).clamp(max=gamma)
    return torch.minimum(a, gamma * (1 - a))
