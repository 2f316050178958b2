"""Which operation of a training step makes the first infinite or NaN value."""

from __future__ import annotations

import inspect
import linecache
import math
import os
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_tricks.checkpoints.export import selected_weights
from lightning_tricks.checkpoints.files import PathLike, load, load_values, path_of
from lightning_tricks.checkpoints.stream import LazyTensor
from lightning_tricks.core.adapters.record import record_in
from lightning_tricks.core.batches.paths import spelled, walk
from lightning_tricks.core.checks import some
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.lightning.trainer import grad_scaler
from lightning_tricks.core.nonfinite.finite import all_finite, nonfinite_names
from lightning_tricks.core.replay.undone_fit import UndoneFit, require_undoable

__all__ = ["NonFiniteOrigin", "find_non_finite"]

_FINDS: dict[str, Callable[[Tensor], Tensor]] = {"nan": torch.isnan, "inf": torch.isinf}

_LIBRARIES = tuple(
    f"{Path(sysconfig.get_paths()['purelib']) / name}{os.sep}" for name in ("torch", "lightning", "pytorch_lightning")
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
        rows: The indices in the first dimension of the result where it is; empty if it is everywhere.

    Example:
        >>> print(NonFiniteOperation("torch.log", "inf", False, "head", "net.py:31, in forward: x.log()", (5,)))
        torch.log made inf in rows 5, in head (net.py:31, in forward: x.log())
    """

    operation: str
    made: str
    backward: bool
    module: str
    line: str
    rows: tuple[int, ...] = ()

    def __str__(self) -> str:
        what = f"the gradient of {self.operation}" if self.backward else self.operation
        rows = f" in rows {some(map(str, self.rows))}" if self.rows else ""
        return f"{what} made {self.made}{rows}, in {self.module or 'the LightningModule'} ({self.line})"


@dataclass(frozen=True)
class NonFiniteOrigin:
    """The result of ``find_non_finite``: true if the repeated step was not finite. Print it.

    Args:
        path: The file of the batch.
        batch: The parts of the batch that are not finite, with the samples.
        weights: The names of the weights that are not finite before the step.
        operations: The operations that made infinite or NaN values, in their order.
        reached: The loss, or the parameters whose gradients are not finite in the repeated step.
        error: The exception that the module raised in the step; "" if none.

    Example:
        >>> print(NonFiniteOrigin("debug/batch-rank=0.pt", ("batch[0]: samples 1",), reached=("the loss",)))
        The batch in debug/batch-rank=0.pt is not finite: batch[0]: samples 1
    """

    path: str
    batch: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    operations: tuple[NonFiniteOperation, ...] = ()
    reached: tuple[str, ...] = ()
    error: str = ""

    def __bool__(self) -> bool:
        return bool(self.reached or self.error)

    def __str__(self) -> str:
        lines = [f"The batch in {self.path} is not finite: {', '.join(self.batch)}"] if self.batch else []
        if self.weights:
            lines.append(f"Before the step these weights were not finite: {some(self.weights)}")
        lines += map(str, self.operations)
        if self.error:
            lines.append(f"The step ended with {self.error}")
        elif not self.reached:
            lines.append(
                f"The step with {self.path} is finite in this Trainer. Use the precision of the training; dropout and"
                " other random numbers are not those of then."
            )
        elif not lines:
            lines.append(
                f"Not finite: {some(self.reached)}. No operation that was seen has made it: scripted code, hooks,"
                " assignments to parts of a tensor and numbers of Python are not seen."
            )
        return "\n".join(lines)


class Watch(TorchFunctionMode):
    """Notes which operations make infinite or NaN values, in the forward and backward pass.

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
        self.found: dict[NonFiniteOperation, None] = {}  # in their order, each once
        self._names = {part: name for name, part in module.named_modules()}
        self._inside = [""]  # the paths of the modules that are being called
        self._seen: set[Node] = set()
        self._undo = ExitStack()

    @override
    def __enter__(self) -> Watch:
        entered = register_module_forward_pre_hook(
            lambda part, _: self._inside.append(self._names.get(part, self._inside[-1]))
        )
        left = register_module_forward_hook(lambda *_: self._leave(), always_call=True)
        self._undo.callback(entered.remove)
        self._undo.callback(left.remove)
        return super().__enter__()

    @override
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._undo.close()
        self._seen.clear()

    def _leave(self) -> None:
        self._inside.pop()

    @override
    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function.__name__ == "__get__":  # an attribute such as grad, which computes nothing
            return function(*args, **(kwargs or {}))
        given = _kinds((args, kwargs))  # before the call, which may write into its inputs
        result = function(*args, **(kwargs or {}))
        name = resolve_name(function) or function.__name__
        tensors = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        # Memory that nobody has written has any values, and the nodes of gradients were looked at as they ran.
        if not tensors or "empty" in name or function is torch.autograd.grad:
            return result
        place = (self._inside[-1], _line())
        self._note(name, given, tensors, False, *place)
        for tensor in tensors:
            self._follow(tensor.grad_fn, name, given | _kinds(tensors), place)
        return result

    def _follow(self, node: Node | None, name: str, values: set[str], place: tuple[str, str]) -> None:
        """Look at the gradients of the nodes that an operation has added to the graph."""
        new = [node]
        while new:
            node = new.pop()
            if node is None or node in self._seen or node.name().endswith("AccumulateGrad"):
                continue
            self._seen.add(node)
            if isinstance(node, BackwardCFunction):  # a torch.autograd.Function, which is seen at its first use
                name = node.name().removesuffix("Backward")
            node.register_hook(
                lambda inputs, outputs, name=name: self._note(name, values | _kinds(outputs), inputs, True, *place)
            )
            new += [following for following, _ in node.next_functions]

    def _note(self, name: str, given: set[str], got: Sequence[Any], backward: bool, module: str, line: str) -> None:
        for made in sorted(_kinds(got) - given):
            if made == "nan" or "nan" not in given:  # an infinite value after a NaN tells nothing
                value = next(value for value in got if made in _kinds(value))
                rows = _rows(value, _FINDS[made])
                self.found[NonFiniteOperation(name, made, backward, module, line, rows)] = None


def _kinds(values: Any) -> set[str]:
    """Whether there are NaN or infinite values in tensors and numbers."""
    kinds: set[str] = set()
    for value in tree_leaves(values):
        try:
            if isinstance(value, float) and not math.isfinite(value):
                kinds.add("nan" if math.isnan(value) else "inf")
            elif _has_floats(value) and not all_finite([value.detach()]):
                kinds.update(kind for kind, find in _FINDS.items() if find(value).any())
        except RuntimeError:  # what cannot be read: float8, nested tensors, inside vmap
            continue
    return kinds


def _has_floats(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_meta and (value.is_floating_point() or value.is_complex())


def _rows(value: Any, find: Callable[[Tensor], Tensor]) -> tuple[int, ...]:
    """The indices in the first dimension where something is found in a tensor; empty if that is everywhere."""
    if not isinstance(value, Tensor) or value.ndim == 0 or value.layout is not torch.strided:
        return ()
    bad = find(value.detach()).reshape(len(value), -1).any(1)
    return () if bad.all() else tuple(bad.nonzero().flatten().tolist())


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

    def __init__(self, checkpoint: Path) -> None:
        super().__init__()
        self._path, self._watching = checkpoint, ExitStack()
        self.watch: Watch | None = None  # once the step has begun
        self.weights: list[str] = []  # those that are not finite before the step
        self.reached: list[str] = []

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        trainer.limit_train_batches, trainer.overfit_batches = 1, 0.0  # type: ignore[attr-defined]
        # Attributes, which are removed with the module's state: the batch was kept after these hooks had changed it.
        wrap_method(pl_module, "on_before_batch_transfer", lambda _, batch, dataloader_idx: batch)
        wrap_method(pl_module, "on_after_batch_transfer", lambda _, batch, dataloader_idx: batch)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        _load(trainer, pl_module, self._path)
        self.weights = [name for name, weight in pl_module.named_parameters() if _kinds(weight)]

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.watch = self._watching.enter_context(Watch(pl_module))

    @override
    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        self._end_if(nonfinite_names({"the loss": loss.detach()}))

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if grad_scaler(trainer) is None:  # which finds its scale by infinite gradients
            named = pl_module.named_parameters()
            names = nonfinite_names({name: weight.grad for name, weight in named if weight.grad is not None})
            self._end_if([f"the gradient of {name}" for name in names])

    def _end_if(self, reached: list[str]) -> None:
        """End where ``TerminateOnNonFinite`` does: all that follows are consequences."""
        self.reached = reached
        if reached:
            raise FloatingPointError

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._watching.close()
        trainer.should_stop = True

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._watching.close()


def _load(trainer: L.Trainer, module: L.LightningModule, path: Path) -> None:
    """Load the weights that the optimizer was training, its states, the loss scale, and the counts of batches."""
    if path.is_dir():
        module.load_state_dict(_of_folder(path), strict=module.strict_loading)
        return
    checkpoint = load(path)
    module.on_load_checkpoint(checkpoint)
    adapted = record_in(checkpoint) is not None  # it has the adapters without the frozen weights
    module.load_state_dict(selected_weights(checkpoint, path, "raw"), strict=module.strict_loading and not adapted)
    trainer.strategy.load_optimizer_state_dict(checkpoint)
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
    index = counts["epoch_loop.batch_progress"]["current"]["ready"] - 1
    wrap_method(trainer.strategy, "training_step", lambda step, batch, *idx: step(batch, *(index for _ in idx)))


def _of_folder(folder: Path) -> dict[str, Tensor]:
    from lightning_tricks.checkpoints.folders import lazy_weights, sharded_averages

    if sharded_averages(folder):
        raise ValueError(
            f"{folder} has weights and averages in shards: find_non_finite reads only those without averages."
        )
    return {
        name: value.read() if isinstance(value, LazyTensor) else value for name, value in lazy_weights(folder).items()
    }


def find_non_finite(trainer: L.Trainer, module: L.LightningModule, folder: PathLike) -> NonFiniteOrigin:
    """Repeats the step at which ``TerminateOnNonFinite`` stopped, and finds the operations that made inf and NaN.

    It runs one training step with the weights, the optimizer states and the batch of the folder, by the Trainer's own
    precision and without its callbacks, up to the first loss or gradient that is not finite. All results of torch's
    functions are looked at in the forward pass, and all gradients in the backward pass. An operation is listed if its
    result has infinite or NaN values that its inputs do not have: an infinite one before a NaN often is the cause, and
    one of a metric or a mask may be meant. Compiled code runs uncompiled. With batches of several ranks it takes the
    first one that is not finite. Afterwards module and Trainer are bit for bit as before. Checkpoints that are folders
    have no optimizer states here.

    Args:
        trainer: A Trainer with one device, the precision of the training, and the callbacks that change the network;
            that of the training if the module reads its ``trainer.datamodule``.
        module: A LightningModule of the class that was trained.
        folder: The folder ``non_finite-step=N`` that ``TerminateOnNonFinite`` has left.

    Returns:
        What is not finite in the batch and the weights, and the operations that made it, in their order; false if the
        repeated step is finite. Print it.

    Raises:
        TypeError: For a value of the wrong type.
        FileNotFoundError: If the folder has no checkpoint or no batch.
        ValueError: If the checkpoint is damaged, or has shards of averages; if the batch has classes that could run
            code when it is loaded, and that torch was not told to allow.
        RuntimeError: If the module does not have the weights of the checkpoint.
        MisconfigurationException: For several devices, lazy layers, and inside a fit.

    Example:
        >>> import tempfile
        >>> from lightning_tricks.callbacks import TerminateOnNonFinite
        >>> class Net(L.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.scale = nn.Parameter(torch.zeros(()))
        ...     def training_step(self, batch, batch_idx):
        ...         return (self.scale * batch).sqrt().sum()
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     trainer = L.Trainer(max_steps=1, callbacks=[TerminateOnNonFinite(folder)], **quiet)
        ...     try:
        ...         trainer.fit(Net(), DataLoader(torch.ones(2)))
        ...     except FloatingPointError:
        ...         found = find_non_finite(L.Trainer(**quiet), Net(), f"{folder}/non_finite-step=0")
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


def _repeat(trainer: L.Trainer, module: L.LightningModule, checkpoint: Path, file: Path) -> NonFiniteOrigin:
    batch = _batch(file)
    loader: DataLoader[Any] = DataLoader([batch], batch_size=None, collate_fn=lambda batch: batch)  # type: ignore[arg-type]
    step, error = _Step(checkpoint), ""
    try:
        with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            warnings.simplefilter("ignore", PossibleUserWarning)  # on the speed of training
            step.fit(trainer, module, loader, None)
    except Exception as raised:
        if step.watch is None or not (step.watch.found or step.reached):
            raise  # no consequence of a value that is not finite
        error = "" if step.reached else f"{type(raised).__name__}: {raised}"
    if step.watch is None:
        raise MisconfigurationException("find_non_finite: no training step was made. Does the module skip the batch?")
    bad = [f"{spelled(path)}{_samples(value)}" for path, value in walk(batch) if _kinds([value])]
    return NonFiniteOrigin(
        str(file), tuple(bad), tuple(step.weights), tuple(step.watch.found), tuple(step.reached), error
    )


def _batch(file: Path) -> Any:
    unsafe: list[str] = []
    with suppress(Exception):  # of a file that cannot be read, as is told below
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    if unsafe:
        classes = ", ".join(name.rpartition(".")[2] for name in unsafe)
        raise ValueError(
            f"{file} has more than tensors, and loading could run its code: {some(unsafe)}. If it is your own, allow"
            f" that first, torch.serialization.add_safe_globals([{classes}])."
        )
    return load_values(file)


def _samples(value: Any) -> str:
    rows = _rows(value, lambda tensor: ~tensor.isfinite())
    return f": samples {some(map(str, rows))}" if rows else ""
