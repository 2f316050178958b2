"""Faster settings for torch and the Trainer."""

from __future__ import annotations

from typing import Any, Literal

import torch

from lightning_tricks.core.checks import check_bool, check_choice

__all__ = ["speed_preset"]


def speed_preset(
    matmul: Literal["highest", "high", "medium"] = "high", *, cudnn_benchmark: bool = True
) -> dict[str, Any]:
    """Set torch's matmul precision and return faster Trainer arguments: ``Trainer(**speed_preset(), ...)``.

    It calls ``torch.set_float32_matmul_precision`` for the whole process. On recent GPUs, fp32 matrix products then use
    TensorFloat32 ("high", 10 bits of mantissa) or bfloat16 ("medium").

    With the Trainer argument ``benchmark``, cuDNN tries its convolutions for each new input size and keeps the fastest,
    which pays off for inputs of few sizes. No progress bar and a log every 500 steps matter for steps of about a
    millisecond: they save 0.15 of 1.14 ms on a CPU, where ``self.log`` takes 0.42 (``benchmarks/cost/speed.py``).
    Checkpoints, the logger and ``self.log`` stay; ``Trainer(barebones=True)`` drops them.

    Args:
        matmul: The precision of fp32 matrix products: "highest", "high" or "medium".
        cudnn_benchmark: Whether cuDNN tries its convolutions.

    Returns:
        Arguments of the Trainer; override them with ``{**speed_preset(), "log_every_n_steps": 50}``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``matmul`` is unknown.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(**speed_preset("highest"), max_epochs=1, accelerator="cpu", logger=False)
        >>> trainer.log_every_n_steps
        500
    """
    check_choice("matmul", matmul, ("highest", "high", "medium"))
    check_bool("cudnn_benchmark", cudnn_benchmark)
    torch.set_float32_matmul_precision(matmul)
    return {
        "benchmark": cudnn_benchmark,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 500,
    }
