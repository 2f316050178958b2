"""Which operation of a training step makes the first infinite or NaN value."""

from __future__ import annotations

import inspect
import linecache
import math
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_tricks.checkpoints.export import raw_weights
from lightning_tricks.checkpoints.files import PathLike, load, path_of
from lightning_tricks.checkpoints.stream import LazyTensor
from lightning_tricks.core.adapters.record import record_in
from lightning_tricks.core.batches.paths import spelled, walk
from lightning_tricks.core.checks import some
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.nonfinite.finite import all_finite, nonfinite_names
from lightning_tricks.core.replay.undone_fit import UndoneFit, require_undoable

__all__ = ["NonFiniteOperation", "NonFiniteOrigin", "find_non_finite"]

_LIBRARIES = tuple(
    str(Path(sysconfig.get_paths()["purelib"]) / name) for name in ("torch", "lightning", "pytorch_lightning")
)


@dataclass(frozen=True)
class NonFiniteOperation:
    """An operation whose result has infinite or NaN values that its inputs do not have.

    Args:
        operation: The name of the function, such as ``torch.log``.
        made: What it made, "nan" or "inf".
        backward: Whether it made it in the backward pass, as a gradient.
        module: The path of the innermost submodule that called it; empty in code of the LightningModule itself.
        line: The file, the line and the function that called it, and the code there; of the forward pass.

    Example:
        >>> print(NonFiniteOperation("torch.log", "inf", False, "head", "net.py:31, in forward: x.log()"))
        torch.log made the first inf, in head (net.py:31, in forward: x.log())
    """

    operation: str
    made: str
    backward: bool
    module: str
    line: str

    def __str__(self) -> str:
        what = f"the gradient of {self.operation}" if self.backward else self.operation
        return f"{what} made the first {self.made}, in {self.module or 'the LightningModule'} ({self.line})"


@dataclass(frozen=True)
class NonFiniteOrigin:
    """The result of ``find_non_finite``; print it.

    Args:
        batch: The parts of the batch that are not finite, with the samples.
        weights: The names of the weights and buffers that are not finite before the step.
        operations: The operations that made the first infinite and the first NaN value, in their order.
        path: The file of the batch.

    Example:
        >>> print(NonFiniteOrigin(("batch[0]: samples 1",), (), (), "debug/batch-rank=0.pt"))
        The batch in debug/batch-rank=0.pt is not finite: batch[0]: samples 1
    """

    batch: tuple[str, ...]
    weights: tuple[str, ...]
    operations: tuple[NonFiniteOperation, ...]
    path: str

    def __bool__(self) -> bool:
        return bool(self.batch or self.weights or self.operations)

    def __str__(self) -> str:
        lines = [f"The batch in {self.path} is not finite: {', '.join(self.batch)}"] if self.batch else []
        if self.weights:
            lines.append(f"Before the step these weights were not finite: {some(self.weights)}")
        lines += map(str, self.operations)
        return "\n".join(lines) or (
            f"The step with {self.path} is finite in this Trainer. Use the precision of the training; dropout and other"
            " random numbers are not those of then."
        )


class Watch(TorchFunctionMode):
    """Notes which operations make the first infinite and the first NaN value, in the forward and backward pass.

    Args:
        module: The module whose submodules are named.

    Example:
        >>> with Watch(nn.Identity()) as watch:
        ...     _ = torch.zeros(2).log() * 0.0
        >>> [(found.operation, found.made) for found in watch.found]
        [('torch.Tensor.log', 'inf'), ('torch.Tensor.mul', 'nan')]
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.found: list[NonFiniteOperation] = []
        self._names = {part: name for name, part in module.named_modules()}
        self._inside: list[str] = []  # the paths of the modules that are being called
        self._seen: set[Node] = set()
        self._undo = ExitStack()

    @override
    def __enter__(self) -> Watch:
        entered = register_module_forward_pre_hook(lambda part, _: self._enter(part))
        left = register_module_forward_hook(lambda part, *_: self._leave(part), always_call=True)
        self._undo.callback(entered.remove)
        self._undo.callback(left.remove)
        return super().__enter__()

    @override
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._undo.close()
        self._seen.clear()

    def _enter(self, part: nn.Module) -> None:
        self._inside.append(self._names.get(part, ""))

    def _leave(self, part: nn.Module) -> None:
        self._inside.pop()

    @override
    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function.__name__ == "__get__":  # an attribute such as grad, which computes nothing
            return function(*args, **(kwargs or {}))
        given = _kinds((args, kwargs))  # before the call, which may write into its inputs
        result = function(*args, **(kwargs or {}))
        tensors = [value for value in _leaves(result) if isinstance(value, Tensor)]
        name = resolve_name(function) or function.__name__
        if not tensors or "empty" in name:  # memory that nobody has written has any values
            return result
        place, got = (self._inside[-1] if self._inside else "", _line()), _kinds(tensors)
        self._note(name, given, got, False, *place)
        for tensor in tensors:
            self._follow(tensor.grad_fn, name, given | got, place)
        return result

    def _follow(self, node: Node | None, name: str, values: set[str], place: tuple[str, str]) -> None:
        """Look at the gradients of the nodes that an operation has added to the graph."""
        new = [node]
        while new:
            node = new.pop()
            if node is None or node in self._seen or node.name().endswith("AccumulateGrad"):
                continue
            self._seen.add(node)
            node.register_hook(
                lambda inputs, outputs: self._note(name, values | _kinds(outputs), _kinds(inputs), True, *place)
            )
            new += [following for following, _ in node.next_functions]

    def _note(self, name: str, given: set[str], got: set[str], backward: bool, module: str, line: str) -> None:
        known = {operation.made for operation in self.found}
        new = got - given - known
        if "nan" in given | known:  # an infinite value behind a NaN tells nothing
            new.discard("inf")
        for made in sorted(new):
            self.found.append(NonFiniteOperation(name, made, backward, module, line))


def _leaves(values: Any) -> list[Any]:
    found: list[Any] = []
    apply_to_collection(values, (Tensor, float), found.append)
    return found


def _kinds(values: Any) -> set[str]:
    """Whether there are NaN or infinite values in tensors and numbers."""
    kinds: set[str] = set()
    for value in _leaves(values):
        if isinstance(value, float):
            nan, inf = math.isnan(value), math.isinf(value)
        elif not _has_floats(value) or all_finite([value.detach()]):
            continue
        else:
            nan, inf = bool(value.isnan().any()), bool(value.isinf().any())
        kinds.update(["nan"] * nan, ["inf"] * inf)
    return kinds


def _has_floats(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_meta and (value.is_floating_point() or value.is_complex())


def _line() -> str:
    """The innermost line that is not in torch, Lightning or this file."""
    for frame, number in traceback.walk_stack(inspect.currentframe()):
        file = frame.f_code.co_filename
        if file != __file__ and not file.startswith(_LIBRARIES):
            code = linecache.getline(file, number).strip()
            return f"{file}:{number}, in {frame.f_code.co_name}" + (f": {code}" if code else "")
    return "no line of Python"


class _Step(UndoneFit):
    """One training step with the kept state and batch."""

    def __init__(self, checkpoint: Path, watch: Watch) -> None:
        super().__init__()
        self._path, self._watch = checkpoint, watch
        self.weights: list[str] = []  # those that are not finite before the step
        self.operations: tuple[NonFiniteOperation, ...] | None = None

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        trainer.limit_train_batches, trainer.overfit_batches = 1, 0.0  # type: ignore[attr-defined]
        # Attributes, which are removed with the module's state: the batch was kept after these hooks had changed it.
        wrap_method(pl_module, "on_before_batch_transfer", lambda _, batch, dataloader_idx: batch)
        wrap_method(pl_module, "on_after_batch_transfer", lambda _, batch, dataloader_idx: batch)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _load(trainer, pl_module, self._path)
        self.weights = nonfinite_names(
            {name: value for name, value in pl_module.state_dict().items() if _has_floats(value)}
        )

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._watch.found.clear()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.operations = tuple(self._watch.found)
        trainer.should_stop = True

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self.operations = tuple(self._watch.found) or None


def _load(trainer: pl.Trainer, module: pl.LightningModule, path: Path) -> None:
    """Load the weights that the optimizer was training, the loss scale, and the counts of steps and epochs."""
    if path.is_dir():
        module.load_state_dict(_of_folder(path), strict=module.strict_loading)
        return
    checkpoint = load(path)
    adapted = record_in(checkpoint) is not None  # it has the adapters without the frozen weights
    module.load_state_dict(raw_weights(checkpoint, path), strict=module.strict_loading and not adapted)
    if scale := checkpoint.get(type(trainer.precision_plugin).__qualname__):
        trainer.precision_plugin.load_state_dict(scale)
    counts, loop = checkpoint["loops"]["fit_loop"], trainer.fit_loop
    loop.epoch_progress.load_state_dict(counts["epoch_progress"])
    epoch = loop.epoch_loop
    epoch.automatic_optimization.optim_progress.load_state_dict(
        counts["epoch_loop.automatic_optimization.optim_progress"]
    )
    epoch.manual_optimization.optim_step_progress.load_state_dict(
        counts["epoch_loop.manual_optimization.optim_step_progress"]
    )


def _of_folder(folder: Path) -> dict[str, Tensor]:
    from lightning_tricks.checkpoints.folders import lazy_weights, sharded_averages

    if sharded_averages(folder):
        raise ValueError(
            f"{folder} has weights and averages in shards: find_non_finite reads only those without averages."
        )
    return {
        name: value.read() if isinstance(value, LazyTensor) else value for name, value in lazy_weights(folder).items()
    }


def find_non_finite(trainer: pl.Trainer, module: pl.LightningModule, folder: PathLike) -> NonFiniteOrigin:
    """Repeat the step at which ``TerminateOnNonFinite`` stopped, and find the operation that made the first NaN.

    It runs one training step with the weights and the batch of the folder, by the Trainer's own precision and without
    its callbacks, and looks at the results of all operations of torch in the forward pass, and at all gradients in the
    backward pass. The infinite value before a NaN is told, too: it often is the cause. Compiled code runs uncompiled.
    With batches of several ranks it takes the first one with a finding. Afterwards module and Trainer are bit for bit
    as before. The batch is unpickled: open only folders of your own.

    Args:
        trainer: A Trainer with one device, the precision of the training, and the callbacks that change the network.
        module: A LightningModule of the class that was trained.
        folder: The folder ``non_finite-step=N`` that ``TerminateOnNonFinite`` has left.

    Returns:
        What is not finite in the batch and the weights, and the operations that made the first infinite and the first
        NaN value; false if there is nothing. Print it.

    Raises:
        TypeError: For a value of the wrong type.
        FileNotFoundError: If the folder has no checkpoint or no batch.
        ValueError: If the checkpoint is damaged, or has shards of averages.
        RuntimeError: If the module does not have the weights of the checkpoint.
        MisconfigurationException: For several devices, lazy layers, and inside of a fit.

    Example:
        >>> import tempfile
        >>> from lightning_tricks.callbacks import TerminateOnNonFinite
        >>> class Net(pl.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.scale = nn.Parameter(torch.zeros(()))
        ...     def training_step(self, batch, batch_idx):
        ...         return (self.scale * batch).sqrt().sum()
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     trainer = pl.Trainer(max_steps=1, callbacks=[TerminateOnNonFinite(folder)], **quiet)
        ...     try:
        ...         trainer.fit(Net(), DataLoader(torch.ones(2)))
        ...     except FloatingPointError:
        ...         found = find_non_finite(pl.Trainer(**quiet), Net(), f"{folder}/non_finite-step=0")
        >>> [(operation.operation, operation.made, operation.backward) for operation in found.operations]
        [('torch.Tensor.sqrt', 'inf', True)]
    """
    require_undoable(trainer, module, [], "find_non_finite")
    if not isinstance(trainer.strategy, SingleDeviceStrategy):
        raise MisconfigurationException(
            f"find_non_finite repeats the step on one device, got {type(trainer.strategy).__name__}: pass a Trainer"
            " with devices=1, and without a strategy."
        )
    kept = path_of("folder", folder)
    files = sorted(kept.glob("batch-rank=*.pt"), key=lambda file: int(file.stem.rpartition("=")[2]))
    if not files or not (kept / "last_good.ckpt").exists():
        raise FileNotFoundError(f"{kept} has no last_good.ckpt with a batch: pass a folder of TerminateOnNonFinite.")
    for file in files:
        found = _repeat(trainer, module, kept / "last_good.ckpt", file)
        if found:
            break
    return found


def _repeat(trainer: pl.Trainer, module: pl.LightningModule, checkpoint: Path, file: Path) -> NonFiniteOrigin:
    batch = torch.load(file, map_location="cpu", weights_only=False)  # of any class
    bad = [f"{spelled(path)}{_samples(value)}" for path, value in walk(batch) if _kinds([value])]
    watch = Watch(getattr(module, "_orig_mod", module))
    step = _Step(checkpoint, watch)
    try:
        with torch.compiler.set_stance("force_eager"), warnings.catch_warnings(), watch:
            warnings.simplefilter("ignore", PossibleUserWarning)  # on the speed of training
            loader: DataLoader[Any] = DataLoader([batch], batch_size=None, collate_fn=_same)  # type: ignore[arg-type]
            step.fit(trainer, module, loader, None)
    except Exception:
        if step.operations is None:
            raise  # not a consequence of a value that is not finite
    if step.operations is None:
        raise MisconfigurationException("find_non_finite: no training step was made. Does the module skip the batch?")
    return NonFiniteOrigin(tuple(bad), tuple(step.weights), step.operations, str(file))


def _same(batch: Any) -> Any:
    return batch


def _samples(value: Tensor | float) -> str:
    """Which entries of the first dimension are not finite."""
    if not isinstance(value, Tensor) or value.ndim == 0 or value.is_sparse:
        return ""
    rows = (~value.isfinite()).flatten(1).any(1) if value.ndim > 1 else ~value.isfinite()
    return f": samples {some(map(str, rows.nonzero().flatten().tolist()))}"
