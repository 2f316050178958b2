"""Exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, final

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from typing_extensions import override

from lightning_tricks.core.averaging.averages import Averages
from lightning_tricks.core.averaging.callback import AveragingCallback
from lightning_tricks.core.averaging.decay import Warmup, check_decay, ema_decay
from lightning_tricks.core.checks import check_choice, check_count, check_duration, check_range
from lightning_tricks.core.weights.fsdp2 import FSDP2
from lightning_tricks.core.weights.local import LocalWeights

__all__ = ["EMA", "Averager", "scale_ema_decay"]


def scale_ema_decay(decay: float, *, batch_size: int, base_batch_size: int) -> float:
    """The decay for another batch size: ``decay ** (batch_size / base_batch_size)``.

    An optimizer step with a batch k times as large goes as far as k steps did, so the average must forget as much as
    in k steps. Scale the learning rate as well.

    Args:
        decay: Decay per optimizer step that was tuned for ``base_batch_size``, in [0, 1).
        batch_size: Number of samples in an optimizer step, over all devices and accumulated batches.
        base_batch_size: Number of samples in an optimizer step of the run that the decay was tuned in.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.

    Example:
        >>> round(scale_ema_decay(0.9999, batch_size=4096, base_batch_size=1024), 6)
        0.9996

    References:
        Busbridge et al. 2023, "How to Scale Your EMA", arXiv 2307.13813.
    """
    check_range("decay", decay, 0.0, 1.0, below=True)
    check_count("batch_size", batch_size)
    check_count("base_batch_size", base_batch_size)
    return decay ** (batch_size / base_batch_size)


@final
class Averager:
    """An exponential average of tensors, for loops without a Trainer: ``average += (1-d) * (tensor - average)``.

    The averages begin as copies of the tensors, in fp32 or more, and d is that of ``ema_decay``: bit for bit they are
    those of ``EMA``.

    Args:
        tensors: The tensors, such as ``model.parameters()``, or a module for its trainable parameters. A module that
            FSDP2 shards must be given itself; each rank averages its shards.
        decay: Decay per update, in [0, 1).
        warmup: Whether young averages forget faster; "power" for ``min(decay, 1 - (1+n)**(-2/3))``.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range, and for what has no average: nothing at all, integers, lazy layers before
            their first forward pass, and shards of FSDP1, of ZeRO-3, or of FSDP2 without their module.

    Example:
        >>> import torch
        >>> weight = torch.zeros(1)
        >>> averager = Averager([weight], decay=0.75, warmup=False)
        >>> _ = weight.fill_(4.0)
        >>> averager.update()
        >>> with averager.swap():
        ...     print(weight)
        tensor([1.])
        >>> weight
        tensor([4.])
    """

    @torch.inference_mode(False)  # in which tensors are made that cannot be changed after it
    def __init__(self, tensors: nn.Module | Iterable[Tensor], decay: float = 0.999, *, warmup: Warmup = True) -> None:
        check_decay(decay, warmup, 1)
        self.decay, self.warmup = decay, warmup
        module = tensors if isinstance(tensors, nn.Module) else _Tensors(tensors)
        _require_own_weights(module)
        sharded = any(isinstance(parameter, DTensor) for parameter in module.parameters())
        self._weights = FSDP2(module) if sharded else LocalWeights(module)
        chosen = dict(module.named_buffers()) if isinstance(module, _Tensors) else self._weights.trainable()
        if not chosen:
            raise ValueError("tensors: there must be one to average, got none that requires gradients, or none at all.")
        self._averages = Averages(self._weights)
        self._averages.track(chosen)

    @torch.inference_mode(False)
    def update(self) -> None:
        """Update the averages; call it after each ``optimizer.step()``.

        Raises:
            ValueError: Inside ``swap()``, where the tensors hold the averages.
        """
        self._require_raw("update")
        self._averages.lerp(1 - ema_decay(self._averages.updates, self.decay, warmup=self.warmup))

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Put the averages into the tensors inside the ``with`` block, and the tensors' own values back after it."""
        before, show = self._averages.holds, torch.inference_mode(False)(self._averages.show)
        try:
            show("averaged")
            yield
        finally:
            show(before)

    @torch.inference_mode(False)
    def state_dict(self) -> dict[str, Any]:
        """The number of updates and the averages in their order; of a sharded module whole, in host memory.

        Where the weights are sharded, all ranks take part. Save a checkpoint to go on from outside of ``swap()``, with
        the tensors' own values.
        """
        with self._averages.showing("raw"):
            averages = self._weights.unshard(self._averages.tensors)
        return {"updates": self._averages.updates, "averages": [*averages.values()]}

    @torch.inference_mode(False)
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the averages of a ``state_dict()``; the tensors' own values are loaded by whoever saved them.

        Raises:
            ValueError: Inside ``swap()``, and for averages of other tensors.
        """
        self._require_raw("load_state_dict")
        own, saved = self._averages.tensors, state["averages"]
        averages = self._weights.shard(dict(zip(own, saved, strict=False)))
        shapes = [[tuple(average.shape) for average in each] for each in (averages.values(), own.values())]
        if len(saved) != len(own) or shapes[0] != shapes[1]:
            raise ValueError(
                f"load_state_dict needs the averages of the same tensors, got {len(saved)} for {len(own)}, of the"
                f" shapes {shapes[0]} for {shapes[1]}: make the Averager of what the saved one was made of."
            )
        self._averages.restore(averages, state["updates"], state["updates"], True)

    def _require_raw(self, method: str) -> None:
        if self._averages.holds == "averaged":
            raise ValueError(
                f"{method}() needs the tensors' own values, and swap() has put the averages there: leave it."
            )


class _Tensors(nn.Module):
    """A list of tensors as a module, which is what averages are of; each has its number for a name."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        if isinstance(tensors, Mapping) or not isinstance(tensors, Iterable):
            raise TypeError(
                f"tensors must be a module or tensors, such as module.parameters(), got {type(tensors).__name__}."
            )
        for number, tensor in enumerate({id(tensor): tensor for tensor in tensors}.values()):
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"tensors[{number}] must be Tensor, got {type(tensor).__name__}: pass the module, its parameters(),"
                    ' or of parameter groups the weights, [w for group in groups for w in group["params"]].'
                )
            if isinstance(tensor, DTensor):
                raise ValueError(f"tensors[{number}] is a shard of a module's weight, got a DTensor: pass the module.")
            if not (is_lazy(tensor) or tensor.is_floating_point() or tensor.is_complex()):
                raise ValueError(
                    f"tensors[{number}] must have floating-point numbers, got {tensor.dtype}: leave it out."
                )
            self.register_buffer(str(number), tensor)


def _require_own_weights(module: nn.Module) -> None:
    """Raise for weights that a process does not hold itself, or does not hold yet."""
    held = [*module.parameters(), *module.buffers()]
    if any(map(is_lazy, held)):
        raise ValueError("tensors: a lazy layer has no weights before its first forward pass: run one first.")
    if any(hasattr(tensor, "ds_id") for tensor in held):
        raise ValueError("tensors: ZeRO-3 gathers weights only where they are used: take another stage.")
    if any(isinstance(submodule, FullyShardedDataParallel) for submodule in module.modules()):
        raise ValueError("tensors: FSDP1 flattens its weights: shard by fully_shard (FSDP2).")


@final
class EMA(AveragingCallback):
    """Averaged weights for validation, checkpoints and the end: ``average += (1-d) * (weight - average)``.

    The average starts as a copy of the weights, in fp32 or more, once ``start`` is reached; at step 0 as a copy of what
    hooks (``on_train_start``) and the first forward pass have made of them. It is updated after every training batch in
    which an optimizer stepped. d is ``decay``, with warm-up
    ``min(decay, (1+n)/(10+n))`` after n updates. Trainable parameters are averaged; a parameter unfrozen later joins at
    the next epoch. Before the first update the averaged weights *are* the raw weights.

    The ``state_dict`` of a checkpoint holds the weights that were validated, and this callback's state the others. So
    the file loads anywhere without this package, and a resumed fit continues exactly. Exceptions and Ctrl-C leave the
    raw weights in the module. One object can serve several fits; with another Trainer or module it starts anew. List
    callbacks that read weights in their validation hooks after this one.

    What ``on_load_checkpoint`` and the hooks of ``load_state_dict`` do to the weights of an older class is done to both
    kinds of them. A fit also goes on from a checkpoint of Lightning's ``EMAWeightAveraging`` or ``WeightAveraging``,
    and these from one of ours. From an average of another kind the raw weights train on, and a new average begins.

    ``validate="both"`` validates twice. The metrics of the averaged weights keep their names, and those of the raw
    weights end in ``_raw`` (``val_loss_raw``). Callbacks see one validation, with both metrics. A ModelCheckpoint that
    monitors a ``_raw`` metric saves the raw weights, any other the averaged weights.

    Under FSDP2 and DeepSpeed ZeRO a rank averages its own shard (under ZeRO of the fp32 master weights), and nothing is
    gathered. Under local SGD and DiLoCo a rank averages its own weights, and the mean over the ranks is taken before
    the average is validated, saved or read, which is the average of the mean weights. Several averages can run together
    if their decays differ and all but one have ``validate="raw", at_end="raw"``.
    ``tricks/ema_decay`` and ``tricks/ema_distance``, the averages' distance from the weights over the weights' norm,
    are logged every ``log_every_n_steps``.

    Args:
        decay: Decay per optimizer step, in [0, 1).
        warmup: Whether young averages forget faster; "power" for ``min(decay, 1 - (1+n)**(-2/3))``.
        every_n_steps: Optimizer steps between updates, at least 1; the decay is then ``decay**every_n_steps``.
        start: When averaging begins (int optimizer steps, float fraction of training).
        buffers: "copy" for the module's current buffers, or "average" to average the floating-point ones over time and
            over ranks.
        validate: The weights to validate: "averaged", "raw" or "both".
        at_end: The weights in the module after training: "averaged" or "raw".
        device: The device of the average: None for that of the weights, or "cpu". Weights on a GPU are then copied
            while the next forward pass runs, which must not write to them.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.
        MisconfigurationException: At setup, under a strategy whose shards are not accessible (FSDP1, NVMe offload), and
            if two averages would be validated or left in the module; when training starts, if ``start`` is a
            fraction of an unknown length; on resume, if several averages of the checkpoint could be this one, if its
            raw weights are lost, or if the module's hooks change weights in a way that cannot be done to both kinds.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[EMA(decay=0.999)], accelerator="cpu", logger=False)

    References:
        Polyak and Juditsky 1992; warm-up as in TensorFlow's ``ExponentialMovingAverage(num_updates=...)`` and, for
        "power", the inverse gamma schedule of Crowson's k-diffusion.
    """

    kinds = ("EMAWeightAveraging", "WeightAveraging")

    def __init__(
        self,
        decay: float = 0.999,
        *,
        warmup: Warmup = True,
        every_n_steps: int = 1,
        start: int | float = 0,
        buffers: Literal["copy", "average"] = "copy",
        validate: Literal["averaged", "raw", "both"] = "averaged",
        at_end: Literal["averaged", "raw"] = "averaged",
        device: Literal["cpu"] | None = None,
    ) -> None:
        check_decay(decay, warmup, every_n_steps)
        check_duration("start", start)
        check_choice("buffers", buffers, ("copy", "average"))
        check_choice("validate", validate, ("averaged", "raw", "both"))
        check_choice("at_end", at_end, ("averaged", "raw"))
        if device is not None:
            check_choice("device", device, ("cpu",))
        super().__init__()
        self.decay = decay
        self.warmup = warmup
        self.every_n_steps = every_n_steps
        self.start = start
        self.buffers = buffers
        self.validate = validate
        self.at_end = at_end
        self.device = device
        self.label = str(decay)

    @override
    def _update(self, trainer: L.Trainer, averages: Averages) -> None:
        averages.steps += 1
        if averages.steps % self.every_n_steps == 0:
            averages.lerp(1 - self._decay(averages.updates))

    @override
    def _metrics(self, averages: Averages) -> dict[str, float]:
        return {"decay": self._decay(max(averages.updates - 1, 0))}

    def _decay(self, updates: int) -> float:
        return ema_decay(updates, self.decay, warmup=self.warmup, every_n_steps=self.every_n_steps)

    @property
    @override
    def state_key(self) -> str:
        return f"EMA(decay={self.label})"
