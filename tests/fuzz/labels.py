"""A second label in a batch, in every structure, every kind of integers and every kind of use."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 3


@dataclass
class Triple:
    x: Any
    y: Any
    second: Any


NamedTriple = namedtuple("NamedTriple", ["x", "y", "second"])
Path = int | str


@dataclass(frozen=True)
class Structure:
    """How a batch holds inputs and two labels.

    Args:
        make: Makes it.
        read: Gives all three.
        paths: Those of inputs and labels, as a user names them.
    """

    make: Callable[[Any, Any, Any], Any]
    read: Callable[[Any], Any]
    paths: tuple[Path, Path, Path]


def _by_name(kind: Callable[..., Any]) -> Structure:
    return Structure(
        lambda x, y, second: kind(x=x, y=y, second=second),
        lambda b: (b["x"], b["y"], b["second"]),
        ("x", "y", "second"),
    )


def _by_attribute(kind: Callable[..., Any]) -> Structure:
    return Structure(
        lambda x, y, second: kind(x=x, y=y, second=second), lambda b: (b.x, b.y, b.second), ("x", "y", "second")
    )


STRUCTURES: dict[str, Structure] = {
    "tuple": Structure(lambda x, y, second: (x, y, second), tuple, (0, 1, 2)),
    "list": Structure(lambda x, y, second: [x, y, second], tuple, (0, 1, 2)),
    "second first": Structure(lambda x, y, second: [second, x, y], lambda b: (b[1], b[2], b[0]), (1, 2, 0)),
    "dict": _by_name(dict),
    "OrderedDict": _by_name(OrderedDict),
    "UserDict": _by_name(UserDict),
    "dataclass": _by_attribute(Triple),
    "SimpleNamespace": _by_attribute(SimpleNamespace),
    "named tuple": Structure(NamedTriple, tuple, ("x", "y", "second")),
    "pair of pairs": Structure(
        lambda x, y, second: (x, (y, second)), lambda b: (b[0], b[1][0], b[1][1]), (0, "1.0", "1.1")
    ),
    "labels in a dict": Structure(
        lambda x, y, second: {"x": x, "labels": {"one": y, "two": second}},
        lambda b: (b["x"], b["labels"]["one"], b["labels"]["two"]),
        ("x", "labels.one", "labels.two"),
    ),
    "other names": Structure(
        lambda x, y, second: {"image": x, "label": y, "age": second},
        lambda b: (b["image"], b["label"], b["age"]),
        ("image", "label", "age"),
    ),
}

# -- the likelihoods of labels (B,), from those of all classes (B, C) -------------------------------------------------

Pick = Callable[[Tensor, Tensor], Tensor]


def _scattered(logp: Tensor, y: Tensor) -> Tensor:
    return (torch.zeros(logp.shape).scatter_(1, y[:, None], 1.0) * logp).sum(1)


def _set_by_index(logp: Tensor, y: Tensor) -> Tensor:
    codes = torch.zeros(logp.shape)
    codes[torch.arange(len(y)), y] = 1.0
    return (codes * logp).sum(1)


def _compared(logp: Tensor, y: Tensor) -> Tensor:
    return ((torch.arange(CLASSES) == y[:, None]) * logp).sum(1)


PICKS: dict[str, Pick] = {
    "gather": lambda logp, y: logp.gather(1, y[:, None]).squeeze(1),
    "gather by name": lambda logp, y: torch.gather(input=logp, dim=-1, index=y.unsqueeze(-1))[..., 0],
    "take_along_dim": lambda logp, y: torch.take_along_dim(logp, y.reshape(-1, 1), 1).flatten(),
    "index with a range": lambda logp, y: logp[range(len(y)), y],
    "index with numbers": lambda logp, y: logp[torch.arange(len(y)), y],
    "index of the transpose": lambda logp, y: logp.T[y, torch.arange(len(y))],
    "flat index": lambda logp, y: logp.flatten()[torch.arange(len(y)) * CLASSES + y],
    "take": lambda logp, y: logp.take(torch.arange(len(y)) * CLASSES + y),
    "diagonal": lambda logp, y: logp[:, y].diagonal(),
    "index_select": lambda logp, y: logp.index_select(1, y).diag(),
    "one-hot": lambda logp, y: (F.one_hot(y, CLASSES) * logp).sum(1),
    "one-hot by einsum": lambda logp, y: torch.einsum("bc,bc->b", logp, F.one_hot(y, CLASSES).to(logp.dtype)),
    "one-hot by bmm": lambda logp, y: (F.one_hot(y, CLASSES).to(logp.dtype)[:, None] @ logp[..., None]).flatten(),
    "one-hot as a mask": lambda logp, y: logp[F.one_hot(y, CLASSES).bool()],
    "masked_select": lambda logp, y: logp.masked_select(F.one_hot(y, CLASSES) > 0),
    "masked_fill": lambda logp, y: logp.masked_fill(F.one_hot(y, CLASSES) == 0, 0.0).sum(1),
    "where": lambda logp, y: torch.where(F.one_hot(y, CLASSES) > 0, logp, 0.0).sum(1),
    "compared with classes": _compared,
    "rows of the identity": lambda logp, y: (torch.eye(CLASSES)[y] * logp).sum(1),
    "embedding of the identity": lambda logp, y: (F.embedding(y, torch.eye(CLASSES)) * logp).sum(-1),
    "scatter": _scattered,
    "set by index": _set_by_index,
    "one by one": lambda logp, y: torch.stack([row[label] for row, label in zip(logp, y, strict=True)]),
    "index one by one": lambda logp, y: torch.stack([logp[number, y[number]] for number in range(len(y))]),
    "vmap": lambda logp, y: torch.vmap(lambda row, label: row.gather(0, label[None])[0])(logp, y),
    "nll_loss": lambda logp, y: -F.nll_loss(logp, y, reduction="none"),
    "cross_entropy": lambda logp, y: -F.cross_entropy(logp, y, reduction="none"),
    "cross_entropy one by one": lambda logp, y: (
        -torch.stack([F.cross_entropy(a, b) for a, b in zip(logp, y, strict=True)])
    ),
}
# What is made of the likelihoods, and how they become one number.
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "likelihood": lambda picked, y: -picked,
    "focal": lambda picked, y: -((1 - picked.exp()) ** 2) * picked,
    "focal without its slope": lambda picked, y: -((1 - picked.detach().exp()) ** 2) * picked,
    "weighted by class": lambda picked, y: -picked * torch.tensor([1.0, 2.0, 3.0])[y],
    "generalized": lambda picked, y: (1 - picked.exp() ** 0.7) / 0.7,
}
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda losses: losses.mean(),
    "sum": lambda losses: losses.sum() / len(losses),
    "product with ones": lambda losses: losses @ torch.ones_like(losses) / len(losses),
    "in place": lambda losses: torch.zeros(()).add_(losses.mean()),
    "smooth maximum": lambda losses: losses.logsumexp(0),
    "the two largest": lambda losses: losses.topk(2).values.mean(),
}

# -- uses as a whole --------------------------------------------------------------------------------------------------

Use = Callable[[Any, Tensor, Tensor], Tensor]  # of the module, the second head's outputs and the label: a loss


def _ctc_lengths(module: Any, z: Tensor, y: Tensor) -> Tensor:
    steps, ones = z.log_softmax(-1).expand(4, *z.shape), torch.ones(len(y), dtype=torch.long)
    return F.ctc_loss(steps, torch.tensor([[1, 2]]).expand(len(y), 2), 4 * ones, y % 2 + 1)


def _ctc_input_lengths(module: Any, z: Tensor, y: Tensor) -> Tensor:
    steps, ones = z.log_softmax(-1).expand(4, *z.shape), torch.ones(len(y), dtype=torch.long)
    return F.ctc_loss(steps, ones[:, None], y + 2, ones)


def _prototypes(module: Any, z: Tensor, y: Tensor) -> Tensor:
    """The distance of each class's mean from a corner."""
    sums = torch.zeros(CLASSES, CLASSES).index_add(0, y, z)
    return (sums / len(y) - torch.eye(CLASSES)).square().mean()


def _contrast(module: Any, z: Tensor, y: Tensor) -> Tensor:
    same = y[:, None] == y[None]
    return -((z @ z.T).log_softmax(1) * same).sum(1).div(same.sum(1)).mean()


def _ranked(module: Any, z: Tensor, y: Tensor) -> Tensor:
    larger = y[:, None] > y[None]
    return (F.softplus(z[None, :, 0] - z[:, None, 0]) * larger).mean()


def _of_classes(module: Any, z: Tensor, y: Tensor) -> Tensor:
    first = y == 0
    return (F.softplus(-z[:, 0][first]).sum() + F.softplus(z[:, 0][~first]).sum()) / len(y)


def _adaptive(module: Any, z: Tensor, y: Tensor) -> Tensor:
    return module.adaptive(z, y).loss


def _margin(module: Any, z: Tensor, y: Tensor) -> Tensor:
    right = z.gather(1, y[:, None])
    return (1 + z - right).clamp(min=0).mean()


def _ordinal(module: Any, z: Tensor, y: Tensor) -> Tensor:
    """A label is above each of the classes before it."""
    above = (y[:, None] > torch.arange(CLASSES)).to(z.dtype)
    return F.softplus((1 - 2 * above) * z).mean()


USES: dict[str, Use] = {
    "regression": lambda module, z, y: (z[:, 0] - y).square().mean(),
    "huber by hand": lambda module, z, y: torch.where((z[:, 0] - y).abs() < 1, (z[:, 0] - y) ** 2, z[:, 0]).mean(),
    "MSE": lambda module, z, y: F.mse_loss(z[:, 0], y.to(z.dtype)),
    "L1": lambda module, z, y: nn.L1Loss()(z[:, 0], y.to(z.dtype)),
    "Poisson": lambda module, z, y: F.poisson_nll_loss(z[:, 0], y.to(z.dtype)),
    "hinge": lambda module, z, y: (1 - (2 * (y > 0).to(z.dtype) - 1) * z[:, 0]).clamp(min=0).mean(),
    "logistic": lambda module, z, y: F.softplus(-(2 * (y > 0) - 1) * z[:, 0]).mean(),
    "binary": lambda module, z, y: F.binary_cross_entropy_with_logits(z[:, 0], (y > 0).to(z.dtype)),
    "margin": lambda module, z, y: F.multi_margin_loss(z, y),
    "margin by hand": _margin,
    "cosine": lambda module, z, y: F.cosine_embedding_loss(z, torch.ones_like(z), 2 * (y > 0).long() - 1),
    "correlation": lambda module, z, y: -((z[:, 0] - z[:, 0].mean()) * (y - y.to(z.dtype).mean())).mean(),
    "ordinal": _ordinal,
    "CTC, lengths of targets": _ctc_lengths,
    "CTC, lengths of inputs": _ctc_input_lengths,
    "prototypes": _prototypes,
    "contrast": _contrast,
    "ranking": _ranked,
    "by class": _of_classes,
    "adaptive": _adaptive,
}
# Where the network sees the integers, they stay those of the sample itself; what is only logged may be anything.
SEEN: dict[str, Use] = {
    "category": lambda module, z, y: 0.1 * (z + module.table(y)).square().mean(),
    "one-hot input": lambda module, z, y: _adapted(module, z, F.one_hot(y, CLASSES)),
    "scale of features": lambda module, z, y: _adapted(module, z, z * (1 + y[:, None])),
    "logged": lambda module, z, y: _logged(module, z, y),
}


def _adapted(module: Any, z: Tensor, others: Tensor) -> Tensor:
    return 0.1 * module.adapter(torch.cat([z, others], 1)).square().mean()


def _logged(module: Any, z: Tensor, y: Tensor) -> Tensor:
    module.log("second", (z.argmax(1) == y).float().mean(), batch_size=len(y))
    return 0.1 * z.square().mean()


DTYPES = {"int64": torch.int64, "int32": torch.int32, "uint8": torch.uint8, "float": torch.float32}


@dataclass(frozen=True)
class Second:
    """A second label.

    Args:
        use: What a loss is computed by, of ``PICKS``, ``USES`` or ``SEEN``.
        structure: That of the batch, of ``STRUCTURES``.
        loss: What is made of the likelihood that a pick gives, of ``LOSSES``.
        reduction: How that becomes one number, of ``REDUCTIONS``.
        dtype: The kind of numbers in the batch, of ``DTYPES``.
        column: Whether the batch has a column of labels, (B, 1).
        named: What ``target=`` says: "nothing", "first" for the first label alone, or "both".
    """

    use: str
    structure: str = "tuple"
    loss: str = "likelihood"
    reduction: str = "mean"
    dtype: str = "int64"
    column: bool = False
    named: str = "nothing"

    def make(self, module: Any) -> None:
        """Set up what the use needs in a module."""
        module.other_head = nn.Linear(CLASSES, CLASSES)
        if self.use == "adaptive":
            module.adaptive = nn.AdaptiveLogSoftmaxWithLoss(CLASSES, CLASSES, [2], div_value=1.0)
        if self.use == "category":
            module.table = nn.Embedding(CLASSES, CLASSES)
        if self.use in ("one-hot input", "scale of features"):
            module.adapter = nn.Linear(2 * CLASSES, CLASSES)

    def batch(self, x: Tensor, y: Tensor) -> Any:
        """A batch with another label than the first one, which depends on its samples alone."""
        second = (x.flatten(1)[:, 0] > 0).long() + (x.flatten(1)[:, 1] > 0.5)
        second = second.to(DTYPES[self.dtype])
        return STRUCTURES[self.structure].make(x, y, second[:, None] if self.column else second)

    def read(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs and labels, in the numbers that indices need."""
        x, y, second = STRUCTURES[self.structure].read(batch)
        second = second.squeeze(1) if self.column else second
        return x, y, second if second.dtype == torch.int64 else second.long()

    def term(self, module: Any, logits: Tensor, y: Tensor) -> Tensor:
        """What it adds to the loss."""
        z = module.other_head(logits)
        if self.use in PICKS:
            losses = LOSSES[self.loss](PICKS[self.use](z.log_softmax(1), y), y)
            return 0.5 * REDUCTIONS[self.reduction](losses)
        return 0.5 * {**USES, **SEEN}[self.use](module, z, y)

    @property
    def target(self) -> Any:
        """What a user passes as ``target=``."""
        _, first, second = STRUCTURES[self.structure].paths
        return {"nothing": None, "first": first, "both": [first, second]}[self.named]

    @property
    def inputs(self) -> Any:
        """What a user passes as ``inputs=``: their place in a tuple of three, where they are not found."""
        path = STRUCTURES[self.structure].paths[0]
        return path if self.named != "nothing" and isinstance(path, int) else None

    @property
    def is_mixed(self) -> bool:
        """Whether a trick that mixes labels must mix this one, too."""
        return self.use not in SEEN
