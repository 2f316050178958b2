"""Throughput: samples, tokens and floating-point operations per second."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from importlib import import_module
from typing import Any, final

import lightning as L
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from lightning_tricks.core.batches.paths import INPUTS, Names, check_names, described, find, get, locate
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.lightning.trainer import log_every_n_steps, takes_dataloader_iter, will_step
from lightning_tricks.core.replay.own_batch import with_own_batch
from lightning_tricks.core.replay.rerun import Start
from lightning_tricks.core.replay.trial import LogsOnce
from lightning_tricks.core.trick import Trick

__all__ = ["Throughput"]

TOKENS = ("attention_mask", "input_ids")
WARMED_UP = 1  # batches before the one whose operations are counted: lazy layers have their weights then


def is_compiled(module: nn.Module) -> bool:
    """Whether compiled code, whose operations cannot be counted, is in a module."""
    return any(one._compiled_call_impl is not None or hasattr(one, "_orig_mod") for one in module.modules())


@final
class Throughput(Trick):
    """Logs samples, tokens and floating-point operations per second, and shows them in the progress bar.

    All are rates of all devices since the last logged value, without validation, by the clock of the first process:
    ``tricks/samples_per_second``; ``tricks/tokens_per_second`` if the batch has
    tokens, without padding if it has a mask; ``tricks/teraflops``, the operations per second by torch's
    ``FlopCounterMode``; and ``tricks/mfu``, their share of what Lightning's table says that the devices could do, where
    it knows them. The operations of one training step are counted, of forward and backward pass, recomputation
    included, and scaled by the tokens or else the samples of the others. Its results are those that it would have
    uncounted. A compiled module has no such counts, and neither has a step that fails where operations are counted.

    Lightning's ThroughputMonitor asks for functions of a batch, which no YAML has, and for the operations of a batch;
    it waits for the device in every step, has no number before 100 steps, and is not in the progress bar.

    Args:
        tokens: Key, index or path (such as "batch.0") of the mask (B, ...) whose entries other than 0 are tokens; None
            for ``"attention_mask"``, or else all of ``"input_ids"``.

    Raises:
        TypeError: For a value of the wrong type.
        MisconfigurationException: At the first batch, if ``tokens`` is not in it, or no tensor that has samples.

    Example:
        >>> trainer = L.Trainer(callbacks=[Throughput()], accelerator="cpu", logger=False)
    """

    def __init__(self, *, tokens: Names = None) -> None:
        check_names("tokens", tokens)
        super().__init__()
        self.tokens = tokens
        self._reset()

    def _reset(self) -> None:
        self._batches = 0
        self._iterates = False  # whether training_step gets its batch itself
        self._here: tuple[int, int | Tensor | None] = 0, None  # samples and tokens of the present batch
        self._samples = 0  # since the last logged value
        self._counted: int | Tensor | None = None  # tokens since the last logged value; on the device
        self._flops = 0.0  # of a token, or of a sample if there are no tokens
        self._counting = ExitStack()
        self._counter: FlopCounterMode | None = None
        self._since = self._paused = 0.0  # when the present window, or a pause in it, began

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._reset()

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._undo.push(self._counting)
        self._iterates = takes_dataloader_iter(pl_module)
        self._since = time.perf_counter()

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._iterates:  # the step may change the batch
            self._here = samples_in(batch), self._tokens_in(batch)
        if self._batches == WARMED_UP and not is_compiled(pl_module):
            self._paused = time.perf_counter()
            self._counter = FlopCounterMode(display=False)
            self._counter.mod_tracker = _NoModules()  # type: ignore[assignment]
            self._counter.flop_registry = _Formulas(self._counter.flop_registry, trainer.strategy.root_device)
            # By hand a step may have stepped the optimizers before it fails, or taken its batch from the loader.
            if pl_module.automatic_optimization and not self._iterates:
                step = partial(self._step, pl_module)
                self._counting.callback(wrap_method(trainer.strategy, "training_step", step))
            self._counting.enter_context(self._counter)

    def _step(self, module: L.LightningModule, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a training step, and once more if it fails, which may be because its operations are counted."""
        logs, again = LogsOnce(), with_own_batch(partial(original, *args, **kwargs))
        try:
            start = Start.here(module, module.device)
        except MisconfigurationException:  # it could not be run once more
            return original(*args, **kwargs)
        try:
            with logs.of(module), start.state.watching():
                return original(*args, **kwargs)
        except Exception as error:  # whatever the code of the step raises
            self._counting.close()
            self._counter = FlopCounterMode(display=False)  # which has counted nothing
            with suppress(MisconfigurationException):
                start.state.refuse_writes()
                start.set_back()
                with logs.of(module):
                    return again()
            raise error

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        samples, tokens = (samples_in(batch), self._tokens_in(batch)) if self._iterates else self._here
        self._batches += 1
        if self._counter is not None:  # such a step takes longer, and is no part of the rates
            self._counting.close()
            self._flops = self._counter.get_total_flops() / max(int(samples if tokens is None else tokens), 1)
            self._counter = None
            self._since += time.perf_counter() - self._paused
        else:
            self._samples += samples
            self._counted = tokens if self._counted is None or tokens is None else self._counted + tokens
        if will_step(trainer) and self._samples:
            log_every_n_steps(trainer, lambda: self._rates(trainer, pl_module))

    def _tokens_in(self, batch: Any) -> int | Tensor | None:
        """The number of tokens in a batch, on its device; None if there are none."""
        if self.tokens is not None:
            paths = locate(batch, self.tokens, (), 0)
            if not paths:
                raise MisconfigurationException(
                    f"Throughput(tokens={self.tokens!r}) names no tensor in the batch, which has {described(batch)}."
                )
            return sum(get(batch, path).count_nonzero() for path in paths)
        masks, ids = ([path for path in find(batch, (name,), 0) if name in path] for name in TOKENS)
        if masks:
            return sum(get(batch, path).count_nonzero() for path in masks)
        return sum(get(batch, path).numel() for path in ids) if ids else None

    def _rates(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, float]:
        """The rates since the last call."""
        seconds, now = time.perf_counter() - self._since, time.perf_counter()
        devices = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        per_second = {"samples": self._samples * devices / seconds}
        if self._counted is not None:
            per_second["tokens"] = int(self._counted) * devices / seconds
        rates = {f"tricks/{name}_per_second": rate for name, rate in per_second.items()}
        if self._flops:
            flops = self._flops * per_second.get("tokens", per_second["samples"])
            rates["tricks/teraflops"] = flops / 1e12
            if peak := peak_flops(trainer.strategy.root_device, computing_dtype(trainer)):
                rates["tricks/mfu"] = flops / (peak * devices)
        self._since, self._samples, self._counted = now, 0, None
        for name, rate in rates.items():
            # In host memory, where the progress bar shows it without waiting for the device.
            pl_module.log(name, torch.tensor(rate, device="cpu"), prog_bar=True, logger=False, batch_size=1)
        return rates

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._paused = time.perf_counter()

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._since += time.perf_counter() - self._paused


class _Formulas(dict[Any, Any]):
    """torch's formulas, by operation; the operations that a device has a kernel for count as known.

    The counter takes unknown ones apart where it can, and their results would be rounded in another way.
    """

    def __init__(self, formulas: dict[Any, Any], device: torch.device) -> None:
        super().__init__(formulas)
        self._key = getattr(torch._C.DispatchKey, device.type.upper())

    @override
    def __contains__(self, operation: Any) -> bool:
        if super().__contains__(operation):
            return True
        has_kernel = getattr(operation, "has_kernel_for_dispatch_key", None)
        return has_kernel is not None and has_kernel(self._key)


class _NoModules(nullcontext[None]):
    """In place of torch's tracker of modules, whose hooks need the gradient of every output: LeanLoss's has none."""

    parents = ("Global",)


def samples_in(batch: Any) -> int:
    """The number of samples in a batch: of its inputs, or else of its first tensor."""
    inputs = find(batch, INPUTS, 0)
    try:
        return extract_batch_size(get(batch, inputs[0]) if inputs else batch)
    except MisconfigurationException as error:
        raise MisconfigurationException(
            f"Throughput finds no tensor in the batch, which has {described(batch)}: it cannot count samples. Have the"
            " collate function return a dict or a tuple, or remove Throughput."
        ) from error


def peak_flops(device: torch.device, dtype: torch.dtype) -> int | None:
    """The operations per second that a device can do; None for one that Lightning does not know."""
    # Of any other device of XLA, too, Lightning asks Google's cloud which TPU it is.
    if device.type == "xla" and import_module("torch_xla.runtime").device_type() != "TPU":
        return None
    return get_available_flops(device, dtype)


def computing_dtype(trainer: L.Trainer) -> torch.dtype:
    """The type in which a Trainer's precision multiplies matrices."""
    for name, dtype in (("bf16", torch.bfloat16), ("16", torch.float16), ("64", torch.float64)):
        if str(trainer.precision).startswith(name):
            return dtype
    return torch.float32
