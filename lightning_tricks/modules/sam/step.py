"""SAM in one call, for loops without a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import LBFGS, Optimizer

from lightning_tricks.core.checks import check_type
from lightning_tricks.core.lightning.optimizer_groups import weights_of
from lightning_tricks.core.random_numbers import random_numbers_of, random_state
from lightning_tricks.core.replay.rerun import Start, begin_run, replaying, run_again
from lightning_tricks.core.weights.local import LocalWeights
from lightning_tricks.core.weights.tensors import copy_, gradients_kept, hidden_from_autograd
from lightning_tricks.modules.sam.engine import gradients_of, loss_of
from lightning_tricks.modules.sam.rules import SAM, perturbed_weights

__all__ = ["sam_step"]

FULLGRAPH = (
    "sam_step must see what a module has started from, which one graph cannot show: leave fullgraph=True out, or wrap"
    " the module by torch.compile(module)"
)
WRAPPERS = ("torch.nn.parallel.", "lightning.fabric.")  # of modules, which have no state that a step may change


def sam_step(
    closure: Callable[[], Tensor],
    optimizer: Optimizer,
    *,
    rho: float = 0.05,
    adaptive: bool = False,
    backward: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """Take one optimizer step with the gradient at ``w + rho * g/||g||``, in a loop without a Trainer.

    It is the step of ``SAMMixin``, bit for bit. The closure runs twice: for g, the gradient at w, and at the perturbed
    weights for the gradient that is added to ``.grad``. Then the optimizer steps and clears its gradients. The second
    run has the random numbers and the state of the first; afterwards buffers and attributes of the modules that the
    closure calls are as the first run has left them.

    Args:
        closure: A function without arguments that runs the forward pass and returns the loss, a scalar; it leaves
            ``backward`` to this function.
        optimizer: The optimizer, whose weights are perturbed and stepped.
        rho: Radius of the perturbation, at least 0.
        adaptive: Whether to perturb large weights more (ASAM), as ``SAM(adaptive=True)`` does.
        backward: The backward pass, ``fabric.backward`` where Fabric asks for it (mixed precision); None for torch's.
            Under DDP the ranks then share one perturbation, that of their mean gradient; else each has its own.

    Returns:
        The loss at the weights themselves, detached.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range; for weights that are sharded or have 16 bits, LBFGS, a closure that calls
            ``backward``, a loss that depends on no weight of the optimizer, and ``adaptive`` with weights of no module.
        MisconfigurationException: For a closure without a loss, sparse gradients, reentrant activation checkpointing,
            and modules whose state cannot be restored.

    Example:
        >>> import torch
        >>> network = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        >>> loss = sam_step(lambda: network(torch.ones(4, 2)).square().mean(), optimizer)
        >>> loss.requires_grad
        False

    References:
        SAM: Foret et al., arXiv 2010.01412. ASAM: Kwon et al., arXiv 2102.11600.
    """
    sam = SAM(rho, adaptive)
    device = _check(closure, optimizer)
    random = random_state(device)
    begin_run()
    with _watched_modules() as starts:
        loss = loss_of(closure())
    called = nn.ModuleList(starts)
    weights = perturbed_weights(called, sam, [optimizer])
    if len(weights) < len(_trained(optimizer)):
        raise ValueError(
            "adaptive=True scales weights by their names, and the closure calls no module that has some of the"
            " optimizer's weights: make them parameters of a module and call it, or take adaptive=False."
        )
    moved, gradients = _gradients(loss, list(weights), LocalWeights(called), backward)
    if not moved:
        raise ValueError(
            "The loss of sam_step depends on no weight of the optimizer: pass that of the weights it trains."
        )
    with torch.no_grad():
        before = [weight.clone() for weight in moved]
    with hidden_from_autograd(moved), ExitStack() as undo:
        undo.callback(copy_, moved, before)  # last, since what is below restores weights as they were when perturbed
        again = [undo.enter_context(run_again(start)) for start in reversed(starts.values())]
        sam.perturb_(moved, gradients, [weights[weight] for weight in moved])
        del gradients  # frees as much memory as the weights take
        with random_numbers_of(random, device), replaying(), ExitStack() as running:
            for start in again:
                running.enter_context(start.state.watching())
            uphill = loss_of(closure())
        (torch.Tensor.backward if backward is None else backward)(uphill)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@contextmanager
def _watched_modules() -> Iterator[dict[nn.Module, Start]]:
    """The modules that are called inside the block, not those that they call, and what they have started from."""
    starts: dict[nn.Module, Start] = {}
    inner: set[nn.Module] = set()
    known: set[int] = set()  # the numbers of those, which Dynamo can compare

    @torch.compiler.disable(reason=FULLGRAPH)
    def note(module: nn.Module) -> None:
        if module not in inner and not type(module).__module__.startswith(WRAPPERS):
            inner.update(module.modules())
            known.update(map(id, inner))
            starts[module] = Start.here(module)
            undo.enter_context(starts[module].state.watching())

    def called(module: nn.Module, _: object) -> None:
        # Compiled code comes here, too, where only the outermost module of a module.compile() is not known yet.
        if not (torch.compiler.is_compiling() and (module._compiled_call_impl is None or id(module) in known)):
            note(module)

    with ExitStack() as undo:
        undo.callback(register_module_forward_pre_hook(called).remove)
        yield starts


def _gradients(
    loss: Tensor, weights: list[Tensor], local: LocalWeights, backward: Callable[[Tensor], object] | None
) -> tuple[list[Tensor], Sequence[Tensor]]:
    """The weights that the loss depends on, and their gradients; ``.grad`` is left alone."""
    try:
        if backward is None:
            return gradients_of(loss, weights, local)
        with gradients_kept([*weights, *local.module.parameters()]):
            backward(loss)
            found = [(weight, weight.grad) for weight in weights if weight.grad is not None]
        return [weight for weight, _ in found], [gradient for _, gradient in found]
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise ValueError(
            "The closure of sam_step must compute the loss and return it, got one that calls backward itself, or uses"
            " tensors of a forward pass outside of it: leave the backward pass to sam_step."
        ) from error


def _trained(optimizer: Optimizer) -> list[Tensor]:
    return [weight for weight in weights_of(optimizer) if weight.requires_grad]


def _check(closure: Callable[[], Tensor], optimizer: Optimizer) -> torch.device:
    """Check what is stepped; returns the device of its weights."""
    if not callable(closure):
        raise TypeError(f"sam_step needs a function that computes the loss, got {type(closure).__name__}.")
    check_type("optimizer", optimizer, Optimizer)
    if isinstance(optimizer, LBFGS):
        raise ValueError("sam_step steps once, and LBFGS calls a closure several times: take another optimizer.")
    weights = _trained(optimizer)
    if not weights:
        raise ValueError("sam_step perturbs the weights of the optimizer, and none of them requires gradients.")
    if any(isinstance(weight, DTensor) for weight in weights):
        raise ValueError("sam_step perturbs whole weights, got shards (DTensor): take SAMMixin in a Trainer.")
    if narrow := {str(weight.dtype) for weight in weights} - {"torch.float32", "torch.float64"}:
        raise ValueError(
            f"sam_step needs weights in fp32, since 16-bit ones round its perturbation away, got {', '.join(narrow)}:"
            " keep them in fp32, and use autocast (Fabric(precision='bf16-mixed'))."
        )
    return weights[0].device
