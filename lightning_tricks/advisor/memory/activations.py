"""The memory of a forward and backward pass, measured on fake tensors; apart from the estimate, which computes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torchmetrics import Metric

from lightning_tricks.advisor.memory.fake import LikeCUDA, LiveBytes, fake_mode
from lightning_tricks.advisor.memory.parts import Parts
from lightning_tricks.core.lightning.trainer import step_arguments
from lightning_tricks.core.replay.module_state import ModuleState


class Step(nn.Module):
    """The training step of a module: ``training_step``, or a forward pass and a loss of its outputs.

    Args:
        model: A LightningModule or another module.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def loss(self, weights: Mapping[str, Tensor], batch: Any) -> Tensor:
        """Compute the loss of a batch with other parameters and buffers.

        Raises:
            ValueError: If the step fails on fake tensors without a Trainer, or returns no loss.
        """
        try:
            loss = torch.func.functional_call(self, dict(weights), (batch,))
        except Exception as error:
            raise ValueError(
                f"a step of {type(self.model).__name__} on fake tensors and without a Trainer failed:"
                f" {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''} Pass the inner network"
                " and its inputs as the batch, or estimate without batch=."
            ) from error
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise ValueError(
                f"a step of {type(self.model).__name__} must return a loss that depends on its weights, got"
                f" {type(loss).__name__}. With manual optimization pass the inner network and its inputs."
            )
        return loss

    def forward(self, batch: Any) -> Any:
        """Run the step; ``loss`` calls it with the weights replaced."""
        if isinstance(self.model, L.LightningModule):
            self._disable_logging()
            output = self.model.training_step(*step_arguments(self.model, batch, 0))
            return output["loss"] if isinstance(output, Mapping) else output
        output = self._call_model(batch)
        if isinstance(loss := getattr(output, "loss", None), Tensor):  # Set in the outputs of transformers.
            return loss
        if isinstance(output, Mapping):  # The tree functions do not look into the outputs of transformers.
            output = dict(output)
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        return sum(leaf.float().sum() for leaf in leaves)

    def _disable_logging(self) -> None:
        """Replace logging and metrics, which need values. The caller restores them with ``ModuleState``."""
        vars(self.model)["log"] = vars(self.model)["log_dict"] = _silent
        for metric in self.model.modules():
            if isinstance(metric, Metric):
                vars(metric)["update"] = _silent
                vars(metric)["forward"] = vars(metric)["compute"] = lambda *_, **__: torch.zeros(())

    def _call_model(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return self.model(**batch)
        if not isinstance(batch, tuple | list):
            return self.model(batch)
        kinds = [p.kind for p in inspect.signature(self.model.forward).parameters.values()]
        if inspect.Parameter.VAR_POSITIONAL in kinds:
            return self.model(*batch)
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        count = sum(kind in positional for kind in kinds)
        return self.model(*batch[:count])  # The rest of the batch are targets.


def _silent(*_: Any, **__: Any) -> None:
    pass


@dataclass(frozen=True)
class Activations:
    """Bytes of a step besides weights, gradients and optimizer states, as a function of the batch size.

    At each moment of a step the bytes are a linear function of the batch size. The peak is the maximum of these lines;
    for another batch size it may be at another moment.

    Args:
        samples: The number of samples in the measured batch.
        lines: The lines, as pairs of a number of bytes and a number of bytes per sample.
        casts: Bytes of 16-bit copies of the weights, which the lines do not include.
    """

    samples: int
    lines: tuple[tuple[float, float], ...]
    casts: int

    def at(self, samples: int) -> int:
        """The bytes for a batch of ``samples``."""
        return max(0, round(max(fixed + slope * samples for fixed, slope in self.lines)))


@dataclass(frozen=True)
class Regime:
    """The conditions under which a step runs.

    Args:
        dtype: The dtype of floating-point weights and of the batch; None if they keep their own.
        autocast: The dtype of matrix products; None without autocast.
        keeps_gradients: Whether gradients stay in memory during the backward pass, as in DDP's buckets.
        cuda: Whether the estimate is for CUDA, wherever the tensors are.
        parts: The layers of which a process has a part.
    """

    dtype: torch.dtype | None
    autocast: torch.dtype | None
    keeps_gradients: bool
    cuda: bool
    parts: Parts = field(default_factory=Parts)


def batch_samples(batch: Any) -> int:
    """The number of samples in a batch: the first dimension of its first tensor with samples.

    Raises:
        ValueError: If there is no such tensor.
    """
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf):
            return len(leaf)
    raise ValueError(f"batch must hold a tensor with samples in its first dimension, got {type(batch).__name__}.")


def measure(model: nn.Module, batch: Any, samples: int, regime: Regime) -> Activations:
    """Measure a step on ``samples`` samples and on twice as many, without allocating memory or changing the module.

    Args:
        model: A LightningModule, whose ``training_step`` runs, or another module.
        batch: An example batch of any size.
        samples: The batch size for which the result is exact; other sizes follow from the two measurements.
        regime: The conditions under which the step runs.
    """
    state, training = ModuleState(model, deep=True), [(module, module.training) for module in model.modules()]
    try:
        with isolate_rng():
            model.train()
            once, twice = (_run(model, batch, size, regime) for size in (samples, 2 * samples))
    finally:
        for module, flag in training:
            module.training = flag
        state.restore()
    return Activations(samples, _lines(samples, once.times, twice.times, once.casts), once.casts)


@dataclass(frozen=True)
class _Run:
    """Bytes after each function, without those of all gradients; and bytes of casts at their peak."""

    times: list[int]
    casts: int


def _run(model: nn.Module, batch: Any, samples: int, regime: Regime) -> _Run:
    device = next((p.device.type for p in model.parameters() if p.device.type != "meta"), "cpu")
    step, example_samples = Step(model), batch_samples(batch)

    def fake(tensor: Tensor, shape: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype if dtype and tensor.dtype.is_floating_point else tensor.dtype
        return torch.empty(tensor.shape if shape is None else shape, dtype=dtype, device=device)

    def sized(tensor: Tensor) -> Tensor:
        has_samples = tensor.ndim and len(tensor) == example_samples
        return fake(tensor, (samples, *tensor.shape[1:]) if has_samples else None, regime.dtype)

    with ExitStack() as stack:
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # The modes below apply to one thread.
        # Fake tensors do not report what oneDNN's LSTM keeps.
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False, allow_tf32=None))
        stack.enter_context(fake_mode())
        live = stack.enter_context(LiveBytes(on_cpu=not regime.cuda))
        buffers = {name: fake(buffer, dtype=regime.dtype) for name, buffer in step.named_buffers()}
        weights = {
            name: nn.Parameter(fake(p, regime.parts.shapes.get(id(p)), regime.dtype), p.requires_grad)
            for name, p in step.named_parameters()
        }
        for tensor in weights.values():
            tensor.grad = torch.empty_like(tensor) if tensor.requires_grad else None
        gradients = sum(p.grad.untyped_storage().nbytes() for p in weights.values() if p.grad is not None)
        for tensor in weights.values():
            live.leave_out(tensor, parameter=True)
        live.now = gradients
        live.times.clear()
        inputs = tree_map_only(Tensor, sized, batch)
        with _autocast(device, regime), regime.parts.running():
            loss = step.loss({**weights, **buffers}, inputs)
        if not regime.keeps_gradients:
            for tensor in weights.values():
                tensor.grad = None  # Lightning sets gradients to None before the backward pass.
        loss.backward()
        return _Run([now - gradients for now in live.times], live.casts)


@contextmanager
def _autocast(device: str, regime: Regime) -> Iterator[None]:
    with ExitStack() as stack:
        if regime.autocast is not None:
            stack.enter_context(torch.autocast(device, dtype=regime.autocast))
        if regime.cuda and device != "cuda":
            stack.enter_context(LikeCUDA(autocast=regime.autocast is not None))
        yield


def _lines(samples: int, once: list[int], twice: list[int], casts: int) -> tuple[tuple[float, float], ...]:
    """The lines through two measurements at each moment; only the highest of those with the same slope."""
    if len(once) != len(twice):  # The step runs other functions with more samples.
        once, twice = [max(once)], [max(twice)]
    pairs = {(2 * a - b - casts, (b - a) / samples) for a, b in zip(once, twice, strict=True)}
    return tuple({slope: (fixed, slope) for fixed, slope in sorted(pairs)}.values())
