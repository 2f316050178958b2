"""torch.compile for the modules that a training step calls, with a way back to eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any, final

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

from lightning_tricks.core.checks import check_bool, check_choice
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.replay.module_state import ModuleState
from lightning_tricks.core.replay.random_numbers import random_state, set_random_state
from lightning_tricks.core.replay.rerun import tensors_in
from lightning_tricks.core.selection import check_patterns, select_blocks
from lightning_tricks.core.trick import Conflict, Trick

__all__ = ["Compile"]

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def _run(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


@final
class Compile(Trick):
    """Trains with compiled modules: ``torch.compile`` in place, back to eager where it fails.

    The forward of each module is compiled at its first call, from training start on, and of repeated blocks only once.
    Names in ``state_dict`` stay the same; when the fit ends or fails the module is as before. The training step itself
    stays eager, so it may log, and what cannot be traced (``.item()``, other libraries) runs eagerly between compiled
    parts.

    If the compiler fails (an error of the backend, no C++ compiler), state and random numbers are put back to what they
    were before the call, the same batch goes through the eager module, and so does everything from then on; one warning
    names module and error. That holds for each new shape of the inputs. What a forward does to objects outside of its
    module it does twice then. Errors of the backward compiler come through where torch compiles the backward pass
    later (2.9 does, 2.13 does not).

    Args:
        modules: Regular expressions searched in submodules' names, or names of classes ("BertLayer"); one or a
            sequence. Of selected modules within each other the outer ones are taken. None for the network: the
            module's own ``forward`` if the training step calls that first, else each submodule that it calls.
        mode: "default", "reduce-overhead", "max-autotune" or "max-autotune-no-cudagraphs".
        fallback: Go on in eager when the compiler fails; False lets its error through.
        backend: Of ``torch.compile``, such as "inductor" or "aot_eager".

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.
        MisconfigurationException: When training starts, if there is no such module; after the first optimizer step, if
            nothing that is compiled was called.

    Example:
        >>> import lightning.pytorch as pl
        >>> trainer = pl.Trainer(callbacks=[Compile("model.encoder")], accelerator="cpu", logger=False)

    References:
        Ansel et al. 2024, "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph
        Compilation".
    """

    conflicts = (
        Conflict(
            ("Compile",),
            "both compile the same modules",
            "Leave one of them out, or name other modules",
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
        if modules is not None:
            check_patterns("modules", modules)
        check_choice("mode", mode, MODES)
        check_bool("fallback", fallback)
        check_choice("backend", backend, torch.compiler.list_backends(exclude_tags=()))
        if mode != "default" and backend != "inductor":
            raise ValueError(f"mode is of backend='inductor', got mode={mode!r}, backend={backend!r}: leave mode out.")
        super().__init__()
        self.modules = modules
        self.mode = mode
        self.fallback = fallback
        self.backend = backend
        self._unwrap: dict[str, Callable[[], None]] = {}  # by the name of the module
        self._called = self._eager = False

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._called = self._eager = False
        self._undo.callback(self._unwrap.clear)
        self._undo.enter_context(_settings(manual=not pl_module.automatic_optimization))
        # One function for equal modules, which share its code; torch keeps but a few versions of each and takes what
        # changes between them for dynamic. And it does not trace Sequential.forward itself.
        runs: dict[str, Callable[..., Any]] = {}
        # on_fit_start is over: what others have wrapped or hooked is compiled, too
        for name, module in self._found(pl_module).items():
            kind = repr(module) if _is_plain(module) else name
            if kind not in runs:
                run = FunctionType(_run.__code__.replace(co_name=name or "forward"), globals())
                runs[kind] = torch.compile(run, mode=self.mode, backend=self.backend)
            self._unwrap[name] = wrap_method(module, "forward", _Compiled(self, runs[kind], name, module))
            self._undo.callback(self._unwrap[name])

    def _found(self, pl_module: pl.LightningModule) -> dict[str, nn.Module]:
        error: object = "it has neither submodules with parameters nor a forward"
        if self.modules is None:
            found: dict[str, nn.Module] = dict(_networks(pl_module))
            if type(pl_module).forward is not pl.LightningModule.forward:
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
        """What is called first is the network: the module's own forward, or its submodules."""
        self._called = True
        for other in [each for each in self._unwrap if (each == "") != (name == "")]:
            self._unwrap.pop(other)()

    def _give_up(self, name: str, module: nn.Module, error: Exception) -> None:
        self._eager = True
        said = " ".join(str(error).split())[:400]
        rank_zero_warn(
            f"Compile: {name or 'forward'} ({type(module).__name__}) does not compile with backend={self.backend!r}:"
            f" {type(error).__name__}: {said}. Training goes on in eager, with the same batch. Name modules that do"
            " compile, as in Compile(modules=[...]), or leave Compile out."
        )

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if pl_module.automatic_optimization:  # otherwise another loss may follow
            self._require_call(pl_module)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step:
            self._require_call(pl_module)

    def _require_call(self, pl_module: pl.LightningModule) -> None:
        if not self._called:
            raise MisconfigurationException(
                f"Compile did nothing: {type(pl_module).__name__}.training_step called none of"
                f" {', '.join(repr(name or 'forward') for name in self._unwrap)}. Name modules that it calls."
            )


class _Compiled:
    """Calls of one module. A copy of the module, or a pickle, has the eager forward."""

    def __init__(self, owner: Compile, run: Callable[..., Any], name: str, module: nn.Module) -> None:
        self.owner, self.run, self.name, self.module = owner, run, name, module
        self.seen: set[Any] = set()

    def __reduce__(self) -> Any:
        return partial, (_run,)

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            self.owner._called = True  # by a function that is compiled
            return forward(*args, **kwargs)
        if self.owner._eager:
            return forward(*args, **kwargs)
        if not self.owner._called:
            self.owner._first(self.name)
        call = self._with_fallback if self.owner.fallback else self._compiled
        return call(forward, *args, **kwargs)

    def _compiled(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(forward, MethodType):  # which torch 2.9 compiles anew for each of several equal modules
            return self.run(forward.__func__, forward.__self__, *args, **kwargs)
        return self.run(forward, *args, **kwargs)

    def _with_fallback(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.exc import TorchDynamoException  # has no public name

        key = _signature(self.module, args, kwargs)
        undo: list[Callable[[], None]] = []
        if key not in self.seen:
            device = next(self.module.parameters(), torch.empty(0)).device
            undo = [ModuleState(self.module).restore, partial(set_random_state, random_state(device), device)]
        try:
            result = self._compiled(forward, *args, **kwargs)
        except Exception as error:
            # of a call like one before only the compiler's, which it may meet again for another value of an attribute
            if not undo and not isinstance(error, TorchDynamoException):
                raise
            for each in undo:
                each()
            result = forward(*args, **kwargs)  # an error of the module's own comes again
            self.owner._give_up(self.name, self.module, error)
        self.seen.add(key)
        return result


def _networks(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost submodules with parameters that can be called."""
    for name, child in module.named_children():
        if next(child.parameters(), None) is None:
            continue  # a metric, a loss
        if type(child).forward is nn.Module.forward:  # a ModuleList
            yield from ((f"{name}.{inner}", each) for inner, each in _networks(child))
        else:
            yield name, child


def _is_plain(module: nn.Module) -> bool:
    """Whether it has neither hooks nor a forward of its own, by which torch does not tell modules apart."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return not any("forward" in vars(m) or any(getattr(m, name) for name in hooks) for m in module.modules())


def _signature(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """What torch mostly compiles anew for."""
    given = (*args, *kwargs.values())
    found = [x for each in given for x in ([each] if isinstance(each, Tensor) else tensors_in(each))]
    inputs = tuple((x.shape, x.dtype, x.requires_grad) for x in found)
    return inputs, module.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def _settings(*, manual: bool) -> Any:
    """Of torch, while training."""
    from torch._functorch import config  # has no public name

    # The backward pass is compiled with the forward, so that its errors come while there is a way back; older versions
    # compile it in the first backward pass. And several passes through one graph need its buffers.
    wanted = {"force_non_lazy_backward_lowering": True, **({"donated_buffer": False} if manual else {})}
    return config.patch({name: value for name, value in wanted.items() if hasattr(config, name)})
