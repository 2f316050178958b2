"""torch.compile for the modules that a training step calls, with a way back to eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from types import FunctionType, MethodType
from typing import Any, final

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

from lightning_tricks.core.checks import check_bool, check_choice
from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.replay.own_batch import tensors_in
from lightning_tricks.core.replay.rerun import Start
from lightning_tricks.core.selection import check_patterns, is_called, select_blocks
from lightning_tricks.core.trick import Trick
from lightning_tricks.core.weights.fsdp2 import is_split

__all__ = ["Compile"]

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def _run(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


@final
class Compile(Trick):
    """Trains with compiled modules: ``torch.compile`` in place, falling back to eager mode if it fails.

    The forward pass of a module is compiled at its first call after training has started, and that of equal blocks only
    once. Names in the ``state_dict`` stay the same, and the module is restored when the fit ends or fails. The training
    step itself stays eager, so it may log. Code that cannot be traced (``.item()``, other libraries) runs in eager mode
    between compiled parts.

    If the compiler fails (an error of the backend, no C++ compiler), state and random numbers are restored. The same
    batch and all later ones run in eager mode, and one warning names module and error. This also holds for inputs of a
    new shape. What the forward pass does to objects outside of its module is then done twice. Errors of the backward
    compiler are raised where torch compiles the backward pass later (2.9 does, 2.13 does not).

    Args:
        modules: Regular expressions searched in submodules' names, or names of classes ("BertLayer"); one or a
            sequence. Of nested modules only the outermost are taken. None for the network: the module's own
            ``forward`` if the training step calls that first, else every submodule that it calls.
        mode: The mode of ``torch.compile``: "default", "reduce-overhead", "max-autotune" or
            "max-autotune-no-cudagraphs".
        fallback: Whether to go on in eager mode when the compiler fails; False raises its error.
        backend: The backend of ``torch.compile``, such as "inductor" or "aot_eager".

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.
        MisconfigurationException: When training starts, if there is no such module; after the first optimizer step, if
            nothing that is compiled was called.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[Compile("model.encoder")], accelerator="cpu", logger=False)

    References:
        Ansel et al. 2024, "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph
        Compilation".
    """

    compiles = True
    conflicts = (
        Conflict(
            ("Compile",),
            "both compile the same modules",
            "Remove one of them, or name other modules",
            lambda one, other: one.modules == other.modules,
        ),
    )

    def __init__(
        self,
        modules: str | Sequence[str] | None = None,
        *,
        mode: str = "default",
        fallback: bool = True,
        backend: str = "inductor",
    ) -> None:
        check_patterns("modules", modules, optional=True)
        check_choice("mode", mode, MODES)
        check_bool("fallback", fallback)
        check_choice("backend", backend, torch.compiler.list_backends(exclude_tags=()))
        if mode != "default" and backend != "inductor":
            raise ValueError(f"mode needs backend='inductor', got mode={mode!r}, backend={backend!r}: leave mode out.")
        super().__init__()
        self.modules = modules
        self.mode = mode
        self.fallback = fallback
        self.backend = backend
        self._unwrap: dict[str, Callable[[], None]] = {}  # undoes the wrapping, by the name of the module
        self._called = self._eager = False

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._called = self._eager = False
        self._undo.callback(self._unwrap.clear)
        self._undo.enter_context(_settings(manual=not pl_module.automatic_optimization))
        # Equal modules share one function: torch keeps only a few compiled versions of a function, and makes sizes that
        # differ between them dynamic. The function is also needed because torch does not trace Sequential.forward.
        runs: dict[str, Callable[..., Any]] = {}
        # The wrappers and hooks that other callbacks add in on_fit_start are compiled, too.
        for name, module in self._found(pl_module).items():
            if isinstance(module, torch.jit.ScriptModule):
                raise MisconfigurationException(
                    f"Compile: {name} is a TorchScript module, which torch.jit has compiled: name other modules, or use"
                    " the module that was compiled."
                )
            if any(isinstance(child, nn.Embedding) and is_split(child.weight) for child in module.modules()):
                raise MisconfigurationException(
                    f"Compile: {name or 'forward'} has an nn.Embedding that tensor_parallel splits, which torch.compile"
                    " cannot trace. Name other modules, such as the class of the repeated blocks."
                )
            kind = repr(module) if _is_plain(module) else name
            if kind not in runs:
                run = FunctionType(_run.__code__.replace(co_name=name or "forward"), globals())
                runs[kind] = torch.compile(run, mode=self.mode, backend=self.backend)
            self._unwrap[name] = wrap_method(module, "forward", _Compiled(self, runs[kind], name, module))
            self._undo.callback(self._unwrap[name])

    def _found(self, pl_module: L.LightningModule) -> dict[str, nn.Module]:
        error: object = "it has neither submodules with parameters nor a forward"
        if self.modules is None:
            found: dict[str, nn.Module] = dict(_networks(pl_module))
            if type(pl_module).forward is not L.LightningModule.forward:
                found[""] = pl_module
        else:
            try:
                found = select_blocks(pl_module, self.modules)
            except ValueError as unknown:
                found, error = {}, unknown
        if not found:
            raise MisconfigurationException(
                f"Compile(modules={self.modules!r}) finds nothing in {type(pl_module).__name__}: {error}"
            )
        return found

    def _first(self, name: str) -> None:
        """Unwrap either the module's own forward or the submodules, whichever is not called first."""
        self._called = True
        for other in [wrapped for wrapped in self._unwrap if (wrapped == "") != (name == "")]:
            self._unwrap.pop(other)()

    def _give_up(self, name: str, module: nn.Module, error: Exception) -> None:
        self._eager = True
        message = " ".join(str(error).split())[:400]
        rank_zero_warn(
            f"Compile: {name or 'forward'} ({type(module).__name__}) does not compile with backend={self.backend!r}:"
            f" {type(error).__name__}: {message}. Training goes on in eager, with the same batch. Name modules that do"
            " compile, as in Compile(modules=[...]), or remove Compile."
        )

    @override
    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        if pl_module.automatic_optimization:  # in manual optimization another loss may follow
            self._require_call(pl_module)

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step:
            self._require_call(pl_module)

    def _require_call(self, pl_module: L.LightningModule) -> None:
        if not self._called:
            raise MisconfigurationException(
                f"Compile did nothing: {type(pl_module).__name__}.training_step called none of"
                f" {', '.join(repr(name or 'forward') for name in self._unwrap)}. Name modules that it calls."
            )


class _Compiled:
    """Calls the compiled code of a module. A copy or a pickle of the module has the eager forward."""

    def __init__(self, owner: Compile, run: Callable[..., Any], name: str, module: nn.Module) -> None:
        self.owner, self.run, self.name, self.module = owner, run, name, module
        self.seen: set[Any] = set()

    def __reduce__(self) -> Any:
        return partial, (_run,)

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            self.owner._called = True  # called by code that is being compiled
            return forward(*args, **kwargs)
        if self.owner._eager:
            return forward(*args, **kwargs)
        if not self.owner._called:
            self.owner._first(self.name)
        call = self._with_fallback if self.owner.fallback else self._compiled
        return call(forward, *args, **kwargs)

    def _compiled(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        # Torch 2.9 would compile a bound method anew for every one of equal modules.
        if isinstance(forward, MethodType):
            return self.run(forward.__func__, forward.__self__, *args, **kwargs)
        return self.run(forward, *args, **kwargs)

    def _with_fallback(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.exc import TorchDynamoException  # it has no public name

        key = _signature(self.module, args, kwargs)
        start = None if key in self.seen else Start.here(self.module, deep=True)
        try:
            with nullcontext() if start is None else start.state.watching():
                result = self._compiled(forward, *args, **kwargs)
        except Exception as error:
            # After a successful call of this kind only an error of the compiler counts, which may compile again if an
            # attribute has another value.
            if start is None and not isinstance(error, TorchDynamoException):
                raise
            if start is not None:
                start.state.refuse_writes()
                start.set_back()
            result = forward(*args, **kwargs)  # raises the module's own error again
            self.owner._give_up(self.name, self.module, error)
        self.seen.add(key)
        return result


def _networks(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost submodules with parameters that can be called."""
    for name, child in module.named_children():
        if next(child.parameters(), None) is None or isinstance(child, torch.jit.ScriptModule):
            continue  # a metric or a loss, or one that is compiled already
        if not is_called(child):  # a ModuleList
            yield from ((f"{name}.{inner}", grandchild) for inner, grandchild in _networks(child))
        else:
            yield name, child


def _is_plain(module: nn.Module) -> bool:
    """Whether a module has neither hooks nor an own forward attribute, by which compiled code would differ."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return not any("forward" in vars(m) or any(getattr(m, name) for name in hooks) for m in module.modules())


def _signature(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """The properties of a call for which torch usually compiles anew."""
    given = (*args, *kwargs.values())
    found = [x for value in given for x in ([value] if isinstance(value, Tensor) else tensors_in(value))]
    inputs = tuple((x.shape, x.dtype, x.requires_grad) for x in found)
    return inputs, module.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def _settings(*, manual: bool) -> Any:
    """A context with settings of torch's compiler for training."""
    from torch._functorch import config  # it has no public name

    # The backward pass is compiled with the forward pass, so that its errors come while eager mode can still take over;
    # older versions compile it later. In manual optimization several passes through one graph need its buffers.
    wanted = {"force_non_lazy_backward_lowering": True, **({"donated_buffer": False} if manual else {})}
    return config.patch({name: value for name, value in wanted.items() if hasattr(config, name)})
