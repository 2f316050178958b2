"""The memory of a forward and backward pass, measured on tensors without any."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torchmetrics import Metric

from lightning_tricks.advisor.memory.fake import LikeCUDA, LiveBytes, fake_mode
from lightning_tricks.core.lightning.trainer import step_arguments
from lightning_tricks.core.replay.module_state import ModuleState


class Step(nn.Module):
    """``training_step`` of a LightningModule; of another module the forward pass and a loss of its outputs.

    Args:
        model: The module.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def loss(self, weights: Mapping[str, Tensor], batch: Any) -> Tensor:
        """The loss of a batch with these parameters and buffers.

        Raises:
            ValueError: If the step fails without a Trainer and without values, or returns no loss.
        """
        try:
            loss = torch.func.functional_call(self, dict(weights), (batch,))
        except Exception as error:
            raise ValueError(
                f"a step of {type(self.model).__name__} on tensors without values and without a Trainer failed:"
                f" {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''} Pass the network inside"
                " it and its inputs as the batch, or estimate without batch=."
            ) from error
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise ValueError(
                f"a step of {type(self.model).__name__} must return a loss that depends on its weights, got"
                f" {type(loss).__name__}. With manual optimization pass the network inside it and its inputs."
            )
        return loss

    def forward(self, batch: Any) -> Any:
        """What ``loss`` runs, with the weights put in."""
        if isinstance(self.model, pl.LightningModule):
            self._silence()
            output = self.model.training_step(*step_arguments(self.model, batch, 0))
            return output["loss"] if isinstance(output, Mapping) else output
        output = self._output(batch)
        if isinstance(loss := getattr(output, "loss", None), Tensor):  # transformers
            return loss
        leaves = [leaf for leaf in tree_leaves(_plain(output)) if isinstance(leaf, Tensor) and leaf.requires_grad]
        return sum(leaf.float().sum() for leaf in leaves)

    def _silence(self) -> None:
        """Log nothing, and let metrics, which look at values, count nothing; who runs the step puts that back."""
        vars(self.model)["log"] = vars(self.model)["log_dict"] = _silent
        for metric in self.model.modules():
            if isinstance(metric, Metric):
                vars(metric)["update"] = _silent
                vars(metric)["forward"] = vars(metric)["compute"] = _zero

    def _output(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return self.model(**batch)
        if not isinstance(batch, tuple | list):
            return self.model(batch)
        kinds = [p.kind for p in inspect.signature(self.model.forward).parameters.values()]
        places = sum(
            kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds
        )
        return self.model(*(batch if inspect.Parameter.VAR_POSITIONAL in kinds else batch[:places]))  # then targets


def _plain(output: Any) -> Any:
    """An output of transformers as a dictionary, into which the tree functions look."""
    return dict(output) if isinstance(output, Mapping) else output


def _zero(*_: Any, **__: Any) -> Tensor:
    return torch.zeros(())


def _silent(*_: Any, **__: Any) -> None:
    pass


@dataclass(frozen=True)
class Activations:
    """Bytes of a step beside weights, gradients and optimizer states: the highest of lines over the batch size.

    Each moment of a step takes some bytes and some more for each sample; a larger batch has its peak at another moment.
    """

    samples: int  # in the batch that was measured
    lines: tuple[tuple[float, float], ...]  # bytes, bytes for each sample
    casts: int  # bytes of 16-bit copies of the weights, not in the lines

    def at(self, samples: int) -> int:
        """The bytes for a batch of ``samples``."""
        return max(0, round(max(fixed + slope * samples for fixed, slope in self.lines)))


@dataclass(frozen=True)
class Regime:
    """How a step is run.

    Args:
        held: The floating-point type of weights and batch; None: their own.
        autocast: The type of matrix products; None: no autocast.
        keeps_gradients: Whether gradients stay through the backward pass, as in DDP's buckets.
        cuda: Whether CUDA is meant, whatever the tensors are on.
    """

    held: torch.dtype | None
    autocast: torch.dtype | None
    keeps_gradients: bool
    cuda: bool


def batch_samples(batch: Any) -> int:
    """The number of samples in a batch: the first size of its first tensor that has one.

    Raises:
        ValueError: If there is none.
    """
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf):
            return len(leaf)
    raise ValueError(f"batch must hold a tensor with samples in its first dimension, got {type(batch).__name__}.")


def measure(model: nn.Module, batch: Any, samples: int, regime: Regime) -> Activations:
    """Measure a step on ``samples`` samples and on twice as many; nothing is allocated, the module stays as it is.

    Args:
        model: A LightningModule, of which ``training_step`` runs, or another module.
        batch: An example, of any size.
        samples: The batch size that is to be exact; others follow from the two.
        regime: How the step is run.
    """
    state, training = ModuleState(model), [(module, module.training) for module in model.modules()]
    try:
        with isolate_rng():
            model.train()
            once, twice = (_run(model, batch, size, regime) for size in (samples, 2 * samples))
    finally:
        for module, flag in training:
            module.training = flag
        state.restore()
    casts = once.casts
    return Activations(samples, _lines(samples, once.times, twice.times, casts), casts)


@dataclass(frozen=True)
class _Run:
    times: list[int]  # bytes after each function, beside those of all gradients
    casts: int


def _run(model: nn.Module, batch: Any, samples: int, regime: Regime) -> _Run:
    device = next((p.device.type for p in model.parameters() if p.device.type != "meta"), "cpu")
    step, before = Step(model), batch_samples(batch)

    def fake(tensor: Tensor, shape: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype if dtype and tensor.dtype.is_floating_point else tensor.dtype
        return torch.empty(tensor.shape if shape is None else shape, dtype=dtype, device=device)

    def sized(tensor: Tensor) -> Tensor:
        scaled = tensor.ndim and len(tensor) == before
        return fake(tensor, (samples, *tensor.shape[1:]) if scaled else None, regime.held)

    with ExitStack() as stack:
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # modes are of one thread
        # a fake tensor does not say what its LSTM keeps
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False, allow_tf32=None))
        stack.enter_context(fake_mode())
        live = stack.enter_context(LiveBytes(on_cpu=not regime.cuda))
        buffers = {name: fake(buffer, dtype=regime.held) for name, buffer in step.named_buffers()}
        weights = {
            name: nn.Parameter(fake(p, dtype=regime.held), p.requires_grad) for name, p in step.named_parameters()
        }
        for tensor in weights.values():
            tensor.grad = torch.empty_like(tensor) if tensor.requires_grad else None
        gradients = sum(p.grad.untyped_storage().nbytes() for p in weights.values() if p.grad is not None)
        for tensor in weights.values():
            live.leave_out(tensor, parameter=True)
        live.now = gradients
        live.times.clear()
        inputs = tree_map_only(Tensor, sized, batch)
        with _autocast(device, regime):
            loss = step.loss({**weights, **buffers}, inputs)
        if not regime.keeps_gradients:
            for tensor in weights.values():
                tensor.grad = None  # as Lightning does before the backward pass
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
    """The line of each moment; of those with the same slope the highest."""
    if len(once) != len(twice):  # a step that goes other ways with more samples
        once, twice = [max(once)], [max(twice)]
    pairs = {(2 * a - b - casts, (b - a) / samples) for a, b in zip(once, twice, strict=True)}
    return tuple({slope: (fixed, slope) for fixed, slope in sorted(pairs)}.values())
