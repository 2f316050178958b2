"""What the graph of a loss tells: whether it is there, and which operations are in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor


def has_graph(loss: Tensor) -> bool:
    """Whether a loss is that of a step with a graph, and not a leaf that a trick has returned in its place."""
    node: Any = loss.grad_fn
    while node is not None and len(before := [each for each, _ in node.next_functions if each is not None]) == 1:
        (node,) = before  # it was divided, or scaled
    return not (loss.grad_fn is None or (hasattr(node, "variable") and node.variable.ndim == 0))


@contextmanager
def naming_reentrant_checkpoints(loss: Tensor, trick: str) -> Iterator[None]:
    """Name a trick that takes the gradients of a loss by themselves, which torch's reentrant checkpoints do not allow.

    Raises:
        MisconfigurationException: In place of torch's error.
    """
    try:
        yield
    except RuntimeError as error:
        if find_graph_node(loss, "CheckpointFunctionBackward".__eq__):
            raise reentrant_checkpoint(trick) from error
        raise


def reentrant_checkpoint(trick: str) -> MisconfigurationException:
    """The error of a trick that needs gradients inside a reentrant checkpoint."""
    return MisconfigurationException(
        f"{trick} sees no gradient in a reentrant checkpoint: pass use_reentrant=False to torch.utils.checkpoint, or to"
        ' transformers as gradient_checkpointing_enable({"use_reentrant": False}).'
    )


def find_graph_node(loss: Tensor, wanted: Callable[[str], bool]) -> str | None:
    """The name of a ``wanted`` node in the graph of the loss; None if there is none."""
    return next((node.name() for node in nodes_of(loss) if wanted(node.name())), None)


def nodes_of(loss: Tensor) -> Iterator[Any]:
    """All nodes in the graph of a loss."""
    seen, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        todo.extend(following for following, _ in node.next_functions)
