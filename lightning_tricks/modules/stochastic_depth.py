"""Stochastic depth for a network that was built without it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_tricks.core.checks import check_range
from lightning_tricks.core.output_hooks import hook_output
from lightning_tricks.core.selection import Patterns, check_patterns, select_modules

__all__ = ["add_stochastic_depth"]


def drop_path(x: Tensor, rate: float) -> Tensor:
    """Set samples to zero with probability ``rate``, and divide the others by ``1 - rate``; bit-equal to timm's.

    Args:
        x: Samples (B, ...), floating-point.
        rate: The probability, in [0, 1).

    Example:
        >>> import torch
        >>> torch.manual_seed(0) and drop_path(torch.ones(4, 2), 0.5).sum(1)
        tensor([0., 0., 4., 0.])
    """
    keep = x.new_empty((len(x),) + (1,) * (x.ndim - 1)).bernoulli_(1 - rate)
    return x * keep.div_(1 - rate)


def add_stochastic_depth(model: nn.Module, rate: float, *, modules: Patterns) -> dict[str, float]:
    r"""Stochastic depth for residual blocks: while training, ``x + f(x)`` is ``x + b f(x) / (1-p)`` with random b.

    b is drawn for every sample, 0 with probability ``p = rate * l / L`` in the l-th of L blocks (linear rule), and 1
    otherwise, so the expectation stays the same. In eval mode nothing changes. Forward hooks do this, so names in the
    ``state_dict`` stay the same. A block may have several branches, with the same rate and different b. A copy or a
    pickle of the model keeps the hooks; a model that loads the weights does not have them.

    Args:
        model: The model, or the LightningModule.
        rate: Probability p of the last block, in [0, 1).
        modules: The branches, as regular expressions searched in modules' names, or names of classes; one or a
            sequence. A branch is a module whose output is added to a skip connection and to nothing else, with the
            samples along the first dimension: for torchvision's ResNet-18 ``r"layer\d\.\d\.bn2$"``, for its ViT
            ``r"layers\.encoder_layer_\d+\.(dropout|mlp)$"``. A block is the module that holds them.

    Returns:
        The rates of the branches by name.

    Raises:
        TypeError: If ``rate`` is not a number.
        ValueError: For a rate out of range, a pattern that selects nothing, nested modules, or a module that has
            stochastic depth already.

    Example:
        >>> from torchvision.models import resnet18
        >>> rates = add_stochastic_depth(resnet18(), 0.2, modules=r"layer\d\.\d\.bn2$")
        >>> rates["layer1.0.bn2"], rates["layer4.1.bn2"]
        (0.025, 0.2)

    References:
        Huang et al., Deep Networks with Stochastic Depth, arXiv 1603.09382.
    """
    check_range("rate", rate, 0.0, 1.0, below=True)
    check_patterns("modules", modules)
    found = select_modules(model, modules)
    for name, module in found.items():
        if inside := [other for other in found if other.startswith(f"{name}.")]:
            raise ValueError(
                f"modules must not be nested, {modules!r} selects {name} and {inside[0]}: end the pattern with $."
            )
        # Torch has no public list of hooks.
        if any(isinstance(hook, StochasticDepth) for hook in module._forward_hooks.values()):
            raise ValueError(f"modules must not have stochastic depth yet, {name} has: call add_stochastic_depth once.")
    blocks = list(dict.fromkeys(name.rpartition(".")[0] for name in found))
    rates = {name: rate * (blocks.index(name.rpartition(".")[0]) + 1) / len(blocks) for name in found}
    for name in found:
        hook_output(model, name, StochasticDepth(rates[name]))
    return rates


class StochasticDepth:
    """A forward hook that drops the output of a module for some samples while it trains; can be pickled."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Return the changed output."""
        if not module.training or not self.rate:
            return output
        if isinstance(output, tuple):  # an attention layer returns its weights as well
            return (drop_path(output[0], self.rate), *output[1:])
        return drop_path(output, self.rate)
