"""Ensembles: the mean output of several trained modules, in the place of one module's."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

from lightning_tricks.checkpoints.average import list_paths
from lightning_tricks.checkpoints.files import PathLike, is_lightning, load
from lightning_tricks.core.checks import check_choice, check_type, some
from lightning_tricks.core.safe_load.hyperparameters import require_values

__all__ = ["Ensemble"]

Mean = Literal["probabilities", "logits"]


def mean_logits(logits: Sequence[Tensor], mean: Mean = "probabilities", dim: int | None = None) -> Tensor:
    """Logits of the mean: ``log(mean_i(softmax(x_i)))``, or ``mean_i(x_i)`` with "logits".

    Args:
        logits: Outputs x_i of the members, of one shape.
        mean: "probabilities", or "logits" for the mean of the outputs as they are.
        dim: Dimension of the classes; None for logits (B, C).

    Raises:
        ValueError: If what should be logits are not, or do not say where the classes are.

    Example:
        >>> mean_logits([torch.tensor([[9.0, 9.0]]), torch.tensor([[0.0, 0.0]])]).exp()
        tensor([[0.5000, 0.5000]])
    """
    stacked = torch.stack([*logits])
    if mean == "logits":
        return stacked.mean(0)
    dim = require_logits(logits[0], dim)
    return torch.log_softmax(stacked.float(), dim if dim < 0 else dim + 1).logsumexp(0) - math.log(len(logits))


def require_logits(logits: Tensor, dim: int | None = None) -> int:
    """The dimension of the classes, if these may be logits.

    Raises:
        ValueError: For probabilities, for logits of one class only, and if ``dim`` is needed.
    """
    if dim is None and logits.dim() != 2:
        raise ValueError(f"logits must be (B, C), got {tuple(logits.shape)}: pass dim=, the dimension of the classes.")
    dim = 1 if dim is None else dim
    if not -logits.dim() <= dim < logits.dim():
        raise ValueError(f"dim must be a dimension of logits {tuple(logits.shape)}, got {dim}.")
    if logits.shape[dim] < 2:
        raise ValueError(
            f"logits must have two classes or more, got {tuple(logits.shape)} with dim={dim}: for a single output use"
            " mean='logits'."
        )
    sums = logits.detach().float().sum(dim)
    if logits.numel() and (logits >= 0).all() and torch.allclose(sums, torch.ones_like(sums), atol=1e-3):
        raise ValueError(
            "logits must not be probabilities, got rows that are positive and sum to 1: use the output before softmax,"
            " its logarithm, or mean='logits'."
        )
    return dim


def restored(kind: type[L.LightningModule], file: Path, settings: Mapping[str, Any]) -> L.LightningModule:
    """The module of a checkpoint, made with copies of ``settings`` and its other hyperparameters, on the CPU.

    Raises:
        ValueError: If the file is damaged, or its hyperparameters name code.
    """
    return _made(kind, file, _arguments(file, settings))


def _made(kind: type[L.LightningModule], file: Path, arguments: Mapping[str, Any]) -> L.LightningModule:
    return kind.load_from_checkpoint(file, map_location="cpu", weights_only=True, **arguments)


def _arguments(file: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``load_from_checkpoint``, by which nothing runs that the file names."""
    checkpoint = load(file)
    if not is_lightning(checkpoint) or "pytorch-lightning_version" not in checkpoint:
        raise ValueError(f"{file} is no checkpoint of Lightning: it has {some(checkpoint) or 'nothing'}.")
    return {**copy.deepcopy(dict(settings)), **require_values(checkpoint, file, settings)}


class Ensemble(L.LightningModule):
    """Several trained modules as one: mean probabilities ``mean_i(softmax(x_i))``, or mean logits ``mean_i(x_i)``.

    It is the first of them, an instance of its class, whose ``forward`` gives the logits of the mean: all that
    ``validation_step``, ``test_step`` and ``predict_step`` do with ``self(x)`` they do with it, metrics, logging and
    hooks included.

    Example:
        >>> import tempfile
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in "ab":
        ...         trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
        ...         trainer.strategy.connect(BoringModel())
        ...         trainer.save_checkpoint(f"{folder}/{name}.ckpt", weights_only=True)
        ...     net = Ensemble.from_checkpoints([f"{folder}/a.ckpt", f"{folder}/b.ckpt"], BoringModel)
        >>> isinstance(net, BoringModel), round(net(torch.ones(1, 32)).exp().sum().item(), 4)
        (True, 1.0)

    References:
        Lakshminarayanan et al., Deep ensembles, arXiv 1612.01474.
    """

    ensemble_members: nn.ModuleList
    _ensemble_mean: _Mean

    @staticmethod
    def from_checkpoints(
        paths: Iterable[PathLike],
        kind: type[L.LightningModule],
        *,
        mean: Mean = "probabilities",
        output: str = "",
        dim: int | None = None,
        **settings: Any,
    ) -> Ensemble:
        """Load checkpoints of one class, executing nothing in them; those of ``EMA`` hold averages.

        Hyperparameters are values. Those that name code (``_instantiator``, ``_class_path``, a dictionary with
        ``class_path``), as LightningCLI saves them, are refused: pass the arguments in their place.

        Args:
            paths: The checkpoints, two or more.
            kind: Their class, which ``load_from_checkpoint`` makes with the hyperparameters of each.
            mean: "probabilities", or "logits", also for outputs that are none.
            output: Name of the submodule whose outputs are averaged, tensors or what has ``logits`` as the models of
                transformers return it; it must have all parameters. "" for the module itself, whose steps must call
                ``self(...)`` then.
            dim: Dimension of the classes; None for logits (B, C).
            **settings: Arguments of the class that the checkpoints lack, or that replace their hyperparameters; each
                member gets a copy.

        Returns:
            The ensemble, in eval mode on the CPU.

        Raises:
            TypeError: For a value of the wrong type.
            ValueError: For fewer than two files, a file twice, damaged files, hyperparameters that name code, and
                ``output`` that is no submodule with all parameters.
            OSError: If a file does not exist, or is a folder.
        """
        check_choice("mean", mean, get_args(Mean))
        check_type("output", output, str)
        if isinstance(dim, bool) or not isinstance(dim, int | NoneType):
            raise TypeError(f"dim must be an integer or None, got {dim!r}.")
        files = list_paths(paths)
        if len({file.resolve() for file in files}) < max(2, len(files)):
            raise ValueError(f"paths must be two files or more, each once, got {some(map(str, files))}.")
        arguments = [_arguments(file, settings) for file in files]  # all files are looked at before a module is made
        members = [_made(kind, file, given).eval() for file, given in zip(files, arguments, strict=True)]
        first, *others = members
        prefix = f"{output}." if output else ""
        if output not in dict(first.named_modules()):
            raise ValueError(f"output must be the name of a submodule of {kind.__name__}, got {output!r}.")
        if outside := [name for name, _ in first.named_parameters() if not name.startswith(prefix)]:
            raise ValueError(
                f"output={output!r} must name a submodule with all parameters, for each member computes its inputs, got"
                f" others in {some(outside)}: leave output out."
            )
        first.__class__ = _class_of(type(first))  # type: ignore[arg-type]
        first.ensemble_members = nn.ModuleList(others)
        assert isinstance(first, Ensemble)
        first._ensemble_mean = _Mean([other.get_submodule(output) for other in others], mean, dim)
        first.get_submodule(output).register_forward_hook(first._ensemble_mean, with_kwargs=True)
        return first

    @override
    def on_validation_epoch_end(self) -> None:
        self._require_mean("validation_step")
        super().on_validation_epoch_end()

    @override
    def on_test_epoch_end(self) -> None:
        self._require_mean("test_step")
        super().on_test_epoch_end()

    @override
    def on_predict_epoch_end(self) -> None:
        self._require_mean("predict_step")
        super().on_predict_epoch_end()

    def _require_mean(self, step: str) -> None:
        if not self._ensemble_mean.calls:
            raise MisconfigurationException(
                f"Ensemble averages what the module returns, but {step} does not call self(...): call it there, or pass"
                " output=, the name of the submodule that it calls with the inputs."
            )
        self._ensemble_mean.calls = 0

    @override
    def configure_optimizers(self) -> Any:
        raise MisconfigurationException("an Ensemble is not trained: fit its members by themselves.")

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty, (type(self).__mro__[2],), self.__getstate__()


class _Mean:
    """A forward hook that replaces an output by its mean with those of other modules.

    Args:
        others: The modules, which get the same inputs.
        mean: What is averaged.
        dim: Dimension of the classes.
    """

    def __init__(self, others: list[nn.Module], mean: Mean, dim: int | None) -> None:
        self.others, self.mean, self.dim, self.calls = others, mean, dim, 0

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        self.calls += 1
        outputs = [
            getattr(each, "logits", each) for each in (output, *(other(*args, **kwargs) for other in self.others))
        ]
        if not all(isinstance(each, Tensor) for each in outputs):
            raise MisconfigurationException(
                f"Ensemble averages tensors, got {type(output).__name__} from {type(module).__name__}: return logits"
                " from forward, or pass output=, the name of the submodule that does."
            )
        logits = mean_logits(outputs, self.mean, self.dim)
        return logits if isinstance(output, Tensor) else type(output)(logits=logits)  # without a loss: it is no mean


@cache
def _class_of(kind: type[L.LightningModule]) -> type[L.LightningModule]:
    return type(f"EnsembleOf{kind.__name__}", (Ensemble, kind), {"__module__": kind.__module__})


def _empty(kind: type[L.LightningModule]) -> L.LightningModule:
    """An ensemble without state, for pickle: its class has no name of its own."""
    made = _class_of(kind)  # type: ignore[arg-type]
    return made.__new__(made)
