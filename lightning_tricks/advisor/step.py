"""One training step of a module without a Trainer, on weights that are not its own."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric

from lightning_tricks.core.trial import step_arguments


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
