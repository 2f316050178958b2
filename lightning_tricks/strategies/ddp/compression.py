"""Compressed gradients, by communication hooks of torch; apart from the preset, which installs one at most."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks.core.checks import check_choice, check_count, check_range
from lightning_tricks.strategies.ddp.outer import OuterOptimizer, State, fragments

Compression = Literal["none", "bf16", "fp16", "powersgd", "local_sgd"]

# The arguments of DDPPreset that each compression takes.
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "none": (),
    "bf16": (),
    "fp16": (),
    "powersgd": ("powersgd_rank", "compression_start"),
    "local_sgd": ("local_sgd_period", "outer_lr", "outer_momentum", "fragments", "compression_start"),
}
_NEVER = sys.maxsize


@torch.no_grad()
def average(tensors: Iterable[Tensor]) -> None:
    """Replace tensors by their means over the ranks, in place, with one reduction per dtype."""
    by_dtype = groupby(sorted(tensors, key=lambda tensor: str(tensor.dtype)), lambda tensor: tensor.dtype)
    for _, of_one_dtype in by_dtype:
        parts = list(of_one_dtype)
        flat = torch.cat([part.reshape(-1) for part in parts]).div_(dist.get_world_size())
        dist.all_reduce(flat)
        means = flat.split([part.numel() for part in parts])
        torch._foreach_copy_(parts, [mean.view_as(part) for mean, part in zip(means, parts, strict=True)])


class Compressor:
    """A communication hook of torch's DDP and its bookkeeping during training; this base class has none.

    Args:
        hook: The communication hook, called as ``hook(process_group, bucket)``.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def register(self, model: DistributedDataParallel, node_size: int) -> None:
        """Register the hook with the model; ``node_size`` consecutive ranks are on one node."""
        # torch refuses its own bf16 hook by name without NCCL, although gloo can add bf16. A lambda has another name.
        model.register_comm_hook(None, lambda group, bucket: self.hook(group, bucket))

    def begin(self, step: int) -> None:
        """Prepare for training that starts at optimizer step ``step``."""

    def after_step(self, loss_scale: float, average_now: bool) -> None:
        """Update the compressor after an optimizer step.

        Args:
            loss_scale: The factor of losses from now on, 1.0 without a GradScaler.
            average_now: Whether weights that differ between ranks must be averaged, for validation or a checkpoint.
        """

    def average_weights(self) -> None:
        """Average the weights over all ranks, if they differ."""

    def average_states(self, optimizer: Optimizer) -> None:
        """Average the optimizer states over all ranks, if they differ."""

    def outer_state(self) -> State | None:
        """The state of the outer optimizer, which a checkpoint holds; None if there is none."""
        return None

    def load_outer_state(self, state: State) -> None:
        """Go on from the state of the outer optimizer in a checkpoint."""

    def end(self) -> None:
        """Free the devices, when training has ended."""


@final
class PowerSGD(Compressor):
    """Gradient matrices as products of two thin matrices; the error is added to the next gradient.

    Args:
        rank: The number of columns of the thin matrices, at least 1.
        start: The number of optimizer steps with uncompressed gradients.
    """

    def __init__(self, rank: int = 4, start: int = 1000) -> None:
        super().__init__(powerSGD_hook)
        check_count("powersgd_rank", rank)
        self.rank, self.start = rank, start

    @override
    def register(self, model: DistributedDataParallel, node_size: int) -> None:
        # The epsilon keeps a gradient of zeros from becoming 0/0.
        self.state = PowerSGDState(None, self.rank, start_powerSGD_iter=_NEVER, orthogonalization_epsilon=1e-20)
        self.noise: dict[int, Tensor] = {}
        model.register_comm_hook(self.state, powerSGD_hook)

    @override
    def begin(self, step: int) -> None:
        self.step, self.loss_scale = step, 0.0
        # DDP rebuilds its buckets after the first backward pass, and the errors of the old ones would fit no bucket.
        self.first_compressed = max(self.start, step + 2)

    @override
    def after_step(self, loss_scale: float, average_now: bool) -> None:
        self.step += 1
        if self.step == self.first_compressed:
            self.state.start_powerSGD_iter = 0
        if errors := list(self.state.error_dict.values()):
            # An overflow would be added to every later gradient. All ranks see it and clear their state together, on
            # the device, which nobody waits for.
            overflow = ~torch.stack([error.sum() for error in errors]).isfinite().all()
            for memory in (*errors, *self.state.q_memory_dict.values()):
                memory.masked_fill_(overflow, 0.0)
            if self.loss_scale and loss_scale != self.loss_scale:
                torch._foreach_mul_(errors, loss_scale / self.loss_scale)
        self.loss_scale = loss_scale
        self._perturb_directions()

    def _perturb_directions(self) -> None:
        """Add tiny noise to the matrices Q, from which the next products start.

        A gradient of zeros makes Q zero, and it would stay zero forever. The noise is the same on all ranks and far
        below what any gradient contributes to Q.
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
    """Local SGD: gradients are averaged within a node, and every few steps the weights over all nodes.

    Args:
        period: The number of optimizer steps between two synchronisations of a weight, at least 1.
        start: The number of optimizer steps of ordinary data parallelism before that.
        outer_lr: The learning rate of the outer optimizer, above 0; at 1 without momentum there is none.
        outer_momentum: The Nesterov momentum of the outer optimizer, in [0, 1).
        fragments: The number of parts of the model, at most ``period``, that are synchronised in turn.
    """

    def __init__(
        self, period: int = 8, start: int = 0, outer_lr: float = 1.0, outer_momentum: float = 0.0, fragments: int = 1
    ) -> None:
        super().__init__(post_localSGD_hook)
        check_count("local_sgd_period", period)
        check_range("outer_lr", outer_lr, sys.float_info.min)
        check_range("outer_momentum", outer_momentum, 0.0, 1.0, below=True)
        check_count("fragments", fragments)
        if fragments > period:
            raise ValueError(
                f"fragments must be at most local_sgd_period={period}, since one is synchronised at a time, got"
                f" {fragments}. Take fewer fragments, or a longer period."
            )
        self.period, self.start, self.fragments = period, start, fragments
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        self.state: PostLocalSGDState | None = None
        self.outer: OuterOptimizer | None = None

    @property
    def has_outer(self) -> bool:
        """Whether an outer optimizer does more than to take the mean."""
        return (self.outer_lr, self.outer_momentum) != (1.0, 0.0)

    @override
    def register(self, model: DistributedDataParallel, node_size: int) -> None:
        if not all(fragments(model, self.fragments)):
            raise MisconfigurationException(
                f"fragments={self.fragments} are more than {type(model.module).__name__} has layers to train, which are"
                " its repeated blocks and the modules outside of them. Take fewer fragments."
            )
        if self.state is None:
            # With a single node, each process averages gradients with nobody else.
            group_size = node_size if node_size < dist.get_world_size() else 1
            self.state = PostLocalSGDState(None, dist.new_subgroups(group_size)[0], start_localSGD_iter=_NEVER)
        self.state.iter, self.state.start_localSGD_iter = 0, _NEVER
        self.model = model
        self.moved: set[nn.Parameter] = set()  # those that ranks have trained by themselves since their last average
        self.outer = OuterOptimizer(self.outer_lr, self.outer_momentum) if self.has_outer else None
        model.register_comm_hook(self.state, self.hook)

    @override
    def begin(self, step: int) -> None:
        self.step = step
        self._start_when_due()

    @override
    def after_step(self, loss_scale: float, average_now: bool) -> None:
        self.step += 1
        if self.step > self.start:
            self.moved.update(self._trained())
            self._synchronise()
        if average_now:
            self.average_weights()
        self._start_when_due()

    def _start_when_due(self) -> None:
        assert self.state is not None, "the state is made in register()"
        if self.step >= self.start and self.state.start_localSGD_iter == _NEVER:
            self.state.start_localSGD_iter = 0
            if self.outer is not None:
                self.outer.follow(self._trained())

    def _synchronise(self) -> None:
        """Synchronise the fragment whose turn it is, if any: fragment i at step (i + 1) / fragments of a period."""
        turns = [(number + 1) * self.period // self.fragments % self.period for number in range(self.fragments)]
        if (step := self.step % self.period) not in turns:
            return
        parameters = fragments(self.model, self.fragments)[turns.index(step)]
        frozen = [p for p in self.model.parameters() if p in self.moved and not p.requires_grad]  # amid the period
        average([*parameters, *frozen])
        if self.outer is not None and parameters:  # all layers of a fragment may have been frozen since
            self.outer.step(parameters)
        self.moved.difference_update(parameters, frozen)

    def _trained(self) -> Iterable[nn.Parameter]:
        return (parameter for parameter in self.model.parameters() if parameter.requires_grad)

    @override
    def average_weights(self) -> None:
        average(parameter for parameter in self.model.parameters() if parameter in self.moved)
        self.moved.clear()

    @override
    def average_states(self, optimizer: Optimizer) -> None:
        if self.step > self.start:
            states = [value for state in optimizer.state.values() for value in state.values()]
            # A scalar is a count of steps, which is equal on all ranks.
            average(s for s in states if isinstance(s, Tensor) and s.is_floating_point() and s.ndim)

    @override
    def outer_state(self) -> State | None:
        if self.outer is None or not self.outer.last:
            return None
        return self.outer.state_dict({p: name for name, p in self.model.module.named_parameters()})

    @override
    def load_outer_state(self, state: State) -> None:
        if self.outer is not None:
            self.outer.load_state_dict(state, dict(self.model.module.named_parameters()))

    @override
    def end(self) -> None:
        if self.outer is not None:
            self.outer.to_host()


def make_compressor(compression: Compression, **arguments: float | None) -> Compressor | None:
    """Make the compressor of a name.

    Args:
        compression: The name.
        **arguments: The compression arguments of ``DDPPreset``; None stands for the default.

    Raises:
        ValueError: If the name is unknown, or an argument is out of range or has no effect.
    """
    check_choice("compression", compression, _ARGUMENTS)
    given: dict[str, Any] = {name: value for name, value in arguments.items() if value is not None}
    for name in given.keys() - set(_ARGUMENTS[compression]):
        users = " or ".join(repr(user) for user, names in _ARGUMENTS.items() if name in names)
        raise ValueError(
            f"{name} has no effect with compression={compression!r}, got {given[name]!r}. Leave it out, or pass"
            f" compression={users}."
        )
    if "compression_start" in given:
        check_count("compression_start", given["compression_start"], least=0)
    settings = {name.removeprefix(f"{compression}_").removeprefix("compression_"): given[name] for name in given}
    if compression == "powersgd":
        return PowerSGD(**settings)
    if compression == "local_sgd":
        return LocalSGD(**settings)
    if compression == "none":
        return None
    return Compressor(bf16_compress_hook if compression == "bf16" else fp16_compress_hook)
