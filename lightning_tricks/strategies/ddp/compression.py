"""How the gradients of data parallelism travel: in 16 bits, as low-rank factors, or not beyond a node."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks.core.checks import check_choice, check_count, check_range

Compression = Literal["none", "bf16", "fp16", "powersgd", "local_sgd"]

_ARGUMENTS: dict[str, tuple[str, ...]] = {  # what each understands
    "none": (),
    "bf16": (),
    "fp16": (),
    "powersgd": ("powersgd_rank", "compression_start"),
    "local_sgd": ("local_sgd_period", "compression_start"),
}
_NEVER = sys.maxsize


@torch.no_grad()
def average(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Replace tensors by their means over the ranks, in place: what holds them keeps holding them."""
    for _, same in groupby(sorted(tensors, key=lambda each: str(each.dtype)), lambda each: each.dtype):
        parts = list(same)
        flat = torch.cat([part.reshape(-1) for part in parts]).div_(dist.get_world_size(group))
        dist.all_reduce(flat, group=group)
        means = flat.split([part.numel() for part in parts])
        torch._foreach_copy_(parts, [mean.view_as(part) for mean, part in zip(means, parts, strict=True)])


class Compressor:
    """A communication hook of torch's DDP and what has to happen around it; this one only casts.

    Args:
        hook: The communication hook.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def register(self, model: DistributedDataParallel, node_size: int) -> None:
        """Make the gradients of the model travel so; ``node_size`` ranks in a row are near to each other."""
        # torch refuses its own bf16 hook, by its name, where there is no NCCL; but gloo adds bf16 as well
        model.register_comm_hook(None, lambda group, bucket: self.hook(group, bucket))

    def begin(self, step: int) -> None:
        """Training begins, ``step`` optimizer steps of it are behind already."""

    def after_step(self, scale: float, look: bool) -> None:
        """An optimizer has stepped; ``scale`` multiplies losses from now on, somebody may ``look`` at the weights."""

    def agree(self) -> None:
        """Give all ranks the same weights."""

    def agree_on_states(self, optimizer: Optimizer) -> None:
        """Give all ranks the same optimizer states."""


@final
class PowerSGD(Compressor):
    """Gradient matrices as products of two thin ones, what that loses added to the next gradient.

    Args:
        rank: Columns of the thin matrices.
        start: Optimizer steps before which gradients travel whole.
    """

    def __init__(self, rank: int = 4, start: int = 1000) -> None:
        super().__init__(powerSGD_hook)
        check_count("powersgd_rank", rank)
        self.rank, self.start = rank, start

    @override
    def register(self, model: DistributedDataParallel, node_size: int) -> None:
        # epsilon: a gradient of zeros must not become 0/0
        self.state = PowerSGDState(None, self.rank, start_powerSGD_iter=_NEVER, orthogonalization_epsilon=1e-20)
        self.noise: dict[int, Tensor] = {}
        model.register_comm_hook(self.state, powerSGD_hook)

    @override
    def begin(self, step: int) -> None:
        self.step, self.scale = step, 0.0
        self.first = max(self.start, step + 2)  # DDP chooses its buckets anew after the first backward

    @override
    def after_step(self, scale: float, look: bool) -> None:
        self.step += 1
        if self.step == self.first:
            self.state.start_powerSGD_iter = 0
        errors = list(self.state.error_dict.values())
        if errors and not torch.stack([error.sum() for error in errors]).isfinite().all():
            for memory in (self.state.error_dict, self.state.p_memory_dict, self.state.q_memory_dict):
                memory.clear()  # an overflow would be fed back for ever; it is the same on all ranks, as is this
        elif errors and self.scale and scale != self.scale:
            torch._foreach_mul_(errors, scale / self.scale)
        self.scale = scale
        self._keep_directions()

    def _keep_directions(self) -> None:
        """Give the matrices Q, from which the next products begin, a direction where they are zeros.

        After a gradient of zeros Q is zeros, and would be for ever. The noise is the same on all ranks, and far below
        what any gradient makes of Q.
        """
        for bucket, directions in self.state.q_memory_dict.items():
            noise = self.noise.get(bucket)
            if noise is None or noise.shape != directions.shape:
                generator = torch.Generator().manual_seed(bucket)
                noise = torch.randn(directions.shape, generator=generator).to(directions) * 1e-10
                self.noise[bucket] = noise
            directions.add_(noise)


@final
class LocalSGD(Compressor):
    """Gradients averaged within a node, and every few steps the weights of all nodes.

    Args:
        period: Optimizer steps from one average of the weights to the next.
        start: Optimizer steps before which this is ordinary data parallelism.
    """

    def __init__(self, period: int = 8, start: int = 0) -> None:
        super().__init__(post_localSGD_hook)
        check_count("local_sgd_period", period)
        self.period, self.start = period, start
        self.state: PostLocalSGDState | None = None

    @override
    def register(self, model: DistributedDataParallel, node_size: int) -> None:
        if self.state is None:
            near = node_size if node_size < dist.get_world_size() else 1  # on a single node each process is its own
            self.state = PostLocalSGDState(None, dist.new_subgroups(near)[0], start_localSGD_iter=_NEVER)
        self.state.iter, self.state.start_localSGD_iter = 0, _NEVER
        self.model, self.agreed = model, True
        model.register_comm_hook(self.state, self.hook)

    @override
    def begin(self, step: int) -> None:
        self.step = step
        self._start_when_due()

    @override
    def after_step(self, scale: float, look: bool) -> None:
        self.step, self.agreed = self.step + 1, self.step < self.start
        if look or self.step % self.period == 0:
            self.agree()
        self._start_when_due()

    def _start_when_due(self) -> None:
        assert self.state is not None, "registered before"
        if self.step >= self.start:
            self.state.start_localSGD_iter = 0

    @override
    def agree(self) -> None:
        if not self.agreed:
            average(parameter for parameter in self.model.parameters() if parameter.requires_grad)
        self.agreed = True

    @override
    def agree_on_states(self, optimizer: Optimizer) -> None:
        if self.step > self.start:
            states = [value for state in optimizer.state.values() for value in state.values()]
            # one number is a count of steps, the same everywhere
            average(each for each in states if isinstance(each, Tensor) and each.is_floating_point() and each.ndim)


def make_compressor(compression: Compression, **arguments: int | None) -> Compressor | None:
    """The compressor of a name and its arguments, None where an argument is not given.

    Raises:
        ValueError: For an unknown name, an argument out of its range, and one without effect.
    """
    check_choice("compression", compression, _ARGUMENTS)
    given = {name: value for name, value in arguments.items() if value is not None}
    for name in given.keys() - set(_ARGUMENTS[compression]):
        users = " or ".join(repr(each) for each, names in _ARGUMENTS.items() if name in names)
        raise ValueError(
            f"{name} has no effect with compression={compression!r}, got {given[name]!r}. Leave it out, or pass"
            f" compression={users}."
        )
    if "compression_start" in given:
        check_range("compression_start", given["compression_start"], 0)
    short = {name.removeprefix(f"{compression}_").removeprefix("compression_"): given[name] for name in given}
    if compression == "powersgd":
        return PowerSGD(**short)
    if compression == "local_sgd":
        return LocalSGD(**short)
    if compression == "none":
        return None
    return Compressor(bf16_compress_hook if compression == "bf16" else fp16_compress_hook)
