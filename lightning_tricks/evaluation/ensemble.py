"""Ensembles: the mean output of several trained modules, in the place of one module's."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

from lightning_tricks.checkpoints.average import list_paths
from lightning_tricks.checkpoints.files import PathLike, is_lightning, load
from lightning_tricks.core.checks import check_choice, check_type, some
from lightning_tricks.core.safe_load.hyperparameters import require_values
from lightning_tricks.evaluation.mean_output import Mean, MeanOutput, OutputMean, logits_in, with_mean

__all__ = ["Ensemble"]


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


class Ensemble(MeanOutput):
    """Several trained modules as one: mean probabilities ``mean_i(softmax(x_i))``, or mean logits ``mean_i(x_i)``.

    It is the first of them, an instance of its class, whose ``forward`` gives the logits of the mean: all that
    ``validation_step``, ``test_step`` and ``predict_step`` do with ``self(x)`` they do with it, metrics, logging and
    hooks included.

    Example:
        >>> import tempfile
        >>> import torch
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
        hook = _Mean([other.get_submodule(output) for other in others], mean, dim, of_module=not output)
        ensemble = with_mean(first, Ensemble, hook)
        ensemble.ensemble_members = nn.ModuleList(others)
        ensemble.get_submodule(output).register_forward_hook(hook, with_kwargs=True)
        return ensemble

    @override
    def configure_optimizers(self) -> Any:
        raise MisconfigurationException("an Ensemble is not trained: fit its members by themselves.")


class _Mean(OutputMean):
    """A forward hook that replaces an output by its mean with those of other modules.

    Args:
        others: The modules, which get the same inputs.
        mean: What is averaged.
        dim: Dimension of the classes.
        of_module: Whether they are whole modules.
    """

    trick = "Ensemble"
    remedy = "call it there, or pass output=, the name of the submodule that it calls with the inputs"

    def __init__(self, others: list[nn.Module], mean: Mean, dim: int | None, of_module: bool) -> None:
        super().__init__(mean, dim, of_module)
        self.others = others

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        outputs = [output, *(other(*args, **kwargs) for other in self.others)]
        if not all(isinstance(logits_in(each), Tensor) for each in outputs):
            raise MisconfigurationException(
                f"Ensemble averages tensors, got {type(output).__name__} from {type(module).__name__}: return logits"
                " from forward, or pass output=, the name of the submodule that does."
            )
        return self.of(outputs)
