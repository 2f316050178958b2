"""Random LightningModules, with their batches, callbacks and Trainer: each is built from a description.

A description names features out of the tables below, and prints as the call that makes it again. All that a module
remembers reaches its loss, and what it logs. So what a trick forgets to restore, or does twice, changes the weights.
"""

from __future__ import annotations

import dataclasses
import random
import types
import zlib
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytorch_lightning
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, LambdaCallback, ModelPruning
from lightning.pytorch.utilities import move_data_to_device
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, rnn
from torch.utils.data import DataLoader
from torchmetrics import Accuracy, MeanMetric, MetricCollection

from tests.callbacks.test_moe_balance import Experts
from tests.conformance.trick import Words
from tests.fuzz.states import KINDS, MOMENTS, PLACES, State, told

SAMPLES, SIZE, CLASSES = 12, 4, 3  # of the data, of a batch


@dataclass(frozen=True, repr=False)
class Spec:
    """A module and what is around it, every field a name of one of the tables below.

    Args:
        net: The layers, of ``NETS``.
        batch: The structure of its batches, of ``BATCHES``.
        loss: Of ``LOSSES``.
        optimizer: Of ``OPTIMIZERS``.
        manual: How it optimizes by hand, of ``MANUAL``; "" for automatic optimization.
        states: What it remembers.
        extras: Odd parameters, buffers and submodules, of ``EXTRAS``.
        hooks: Methods that it overrides, of ``HOOKS``.
        callbacks: Of ``CALLBACKS``, beside it.
        trainer: Settings of the Trainer, of ``TRAINERS``.
        seed: Of its weights and data.
    """

    net: str = "linear"
    batch: str = "tuple"
    loss: str = "cross entropy"
    optimizer: str = "SGD"
    manual: str = ""
    states: tuple[State, ...] = ()
    extras: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    callbacks: tuple[str, ...] = ()
    trainer: str = "plain"
    seed: int = 0

    def __repr__(self) -> str:
        pairs = [(field.name, getattr(self, field.name), field.default) for field in dataclasses.fields(self)]
        return f"Spec({', '.join(f'{name}={value!r}' for name, value, default in pairs if value != default)})"


# -- layers -----------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Takes the features for a sequence of any length, and gives its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(2, 6, batch_first=True)
        self.own = list(self.cell.parameters())

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x.unflatten(1, (-1, 2)))[0][:, -1]


class Cached(nn.Module):
    """Stores its last input, and numbers of its own, as attributes."""

    def forward(self, x: Tensor) -> Tensor:
        self.last, self.calls = x, getattr(self, "calls", 0) + 1
        return x * (1 + 0.01 * self.calls)


class Noise(nn.Module):
    """Draws from three generators."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 0.1 * random.random() + 0.1 * float(np.random.rand()) + 0.1 * torch.rand_like(x))


def _mlp(*middle: nn.Module, first: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(first or nn.Linear(8, 6), *middle, nn.Tanh(), nn.Linear(6, CLASSES))


def _convolved() -> list[nn.Module]:
    """Layers for images of any size; the convolution is without a bias, whose gradient would be rounding alone."""
    first = [nn.Conv2d(1, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU()]
    return [*first, nn.AdaptiveAvgPool2d((2, 4)), nn.Flatten()]


NETS: dict[str, Callable[[], nn.Sequential]] = {
    "linear": _mlp,
    "BatchNorm and dropout": lambda: _mlp(nn.BatchNorm1d(6), nn.Dropout(0.2)),
    "noise": lambda: _mlp(Noise()),
    "cached": lambda: _mlp(Cached()),
    "recurrent": lambda: _mlp(first=Recurrent()),
    "spectral norm": lambda: _mlp(first=parametrizations.spectral_norm(nn.Linear(8, 6))),
    "weight norm": lambda: _mlp(first=parametrizations.weight_norm(nn.Linear(8, 6))),
    "lazy": lambda: _mlp(first=nn.LazyLinear(6)),
    "double": lambda: _mlp().double(),
    "convolution": lambda: nn.Sequential(*_convolved(), nn.Linear(24, CLASSES)),
    "tokens": lambda: _mlp(Words()),
    "experts": lambda: nn.Sequential(
        *_convolved(), nn.Linear(24, 16), Experts(16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, CLASSES)
    ),
}
OF_IMAGES = ("convolution", "experts")
ASKED_FOR = ("tokens",)  # by tricks alone


# -- batches ----------------------------------------------------------------------------------------------------------


@dataclass
class Pair:
    x: Any
    y: Any


@dataclass(frozen=True)
class FrozenPair:
    x: Any
    y: Any


class OwnDict(dict[str, Any]):
    """A batch with an attribute besides its items."""

    version = 0


class Opaque:
    """A batch in a class that nobody knows."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def to(self, device: Any) -> Opaque:
        return Opaque(self.x.to(device), self.y.to(device))


class Graph:
    """The inputs of all samples together, in a class that nobody knows."""

    def __init__(self, x: Tensor) -> None:
        self.nodes = x.repeat_interleave(2, 0)


@dataclass
class Nodes:
    """The same as a dataclass of tensors."""

    nodes: Tensor
    edges: Tensor


NamedPair = namedtuple("NamedPair", ["x", "y"])
NamedGraph = namedtuple("NamedGraph", ["graph", "Y"])


def _own_dict(x: Tensor, y: Tensor) -> OwnDict:
    batch = OwnDict(x=x, y=y)
    batch.version = 2
    return batch


def _counted(batch: OwnDict) -> Any:
    assert batch.version == 2, "a batch without its attribute"
    return batch["x"], batch["y"]


def _sized(batch: TensorDict) -> Any:
    assert batch.batch_size == batch["x"].shape[:1], "a TensorDict without its batch size"
    return batch["x"], batch["y"]


def _of_graph(batch: Any) -> Any:
    return batch.graph.nodes[::2], batch.Y


Batch = tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Any]]  # how it is made of x and y, and how it is read
BATCHES: dict[str, Batch] = {
    "tuple": (lambda x, y: (x, y), tuple),
    "list": (lambda x, y: [x, y], tuple),
    "dict": (lambda x, y: {"x": x, "y": y, "scale": 2.0, "who": "all", "none": None}, lambda b: (b["x"], b["y"])),
    "dict that is emptied": (lambda x, y: {"labels": y, "image": x}, lambda b: (b.pop("image"), b.pop("labels"))),
    "OrderedDict": (lambda x, y: OrderedDict(input=x, target=y), lambda b: tuple(b.values())),
    "UserDict": (lambda x, y: UserDict(x=x, y=y), lambda b: (b["x"], b["y"])),
    "MappingProxyType": (lambda x, y: types.MappingProxyType({"x": x, "y": y}), lambda b: (b["x"], b["y"])),
    "dict with an attribute": (_own_dict, _counted),
    "TensorDict": (lambda x, y: TensorDict({"x": x, "y": y}, batch_size=[len(x)]), _sized),
    "named tuple": (NamedPair, tuple),
    "dataclass": (Pair, lambda b: (b.x, b.y)),
    "frozen dataclass": (FrozenPair, lambda b: (b.x, b.y)),
    "opaque": (Opaque, lambda b: (b.x, b.y)),
    "SimpleNamespace": (lambda x, y: types.SimpleNamespace(x=x, y=y), lambda b: (b.x, b.y)),
    "opaque inputs": (lambda x, y: NamedGraph(Graph(x), y), _of_graph),
    "nodes and edges": (
        lambda x, y: NamedGraph(Nodes(x.repeat_interleave(2, 0), torch.zeros(2, 10, dtype=torch.long)), y),
        _of_graph,
    ),
    "nested": (
        lambda x, y: {"data": {"views": [x, x.flip(1)], "names": ["a"] * len(x)}, "target": {"labels": y}},
        lambda b: (b["data"]["views"][0] + 0.1 * b["data"]["views"][1], b["target"]["labels"]),
    ),
    "mask": (lambda x, y: {"x": x, "mask": x > 0, "y": y}, lambda b: (b["x"] * (0.5 + b["mask"]), b["y"])),
    "ragged": (
        lambda x, y: {"x": [part[: 4 + int(label)].flatten() for part, label in zip(x, y, strict=True)], "y": y},
        lambda b: (torch.stack([F.pad(part.flatten(), (0, 8 - part.numel())) for part in b["x"]]), b["y"]),
    ),
    "one sample each": (
        lambda x, y: [{"x": one, "y": label} for one, label in zip(x, y, strict=True)],
        lambda b: (torch.stack([each["x"] for each in b]), torch.stack([each["y"] for each in b])),
    ),
    "three parts": (lambda x, y: (x, y, y + 1), lambda b: (b[0], b[1])),
    "numbers and arrays": (
        lambda x, y: {"x": x, "y": y, "ids": y.numpy() + 1, "step": torch.tensor(3), "keys": {1: x + 0}},
        lambda b: (b["x"] + 0 * b["keys"][1], b["y"]),
    ),
    "one tensor": (
        lambda x, y: torch.cat([x.flatten(1), y[:, None].to(x.dtype)], 1),
        lambda b: (b[:, :-1], b[:, -1].long()),
    ),
    "nested tensor": (
        lambda x, y: {"x": torch.nested.nested_tensor(list(x)), "y": y},
        lambda b: (torch.stack(b["x"].unbind()), b["y"]),
    ),
    "packed": (
        lambda x, y: (rnn.pack_padded_sequence(x.flatten(1), [8] * len(x), batch_first=True), y),
        lambda b: (rnn.pad_packed_sequence(b[0], batch_first=True)[0], b[1]),
    ),
    "sparse": (lambda x, y: {"x": x.to_sparse(), "y": y}, lambda b: (b["x"].to_dense(), b["y"])),
    "flat nodes": (
        lambda x, y: {"nodes": x.repeat_interleave(2, 0), "counts": torch.full((len(x),), 2), "y": y},
        lambda b: (b["nodes"][b["counts"].cumsum(0) - 1], b["y"]),
    ),
}


NOT_MOVED = ("frozen dataclass", "UserDict", "MappingProxyType", "dict with an attribute")  # whole, by Lightning itself


def samples(spec: Spec) -> tuple[Tensor, Tensor]:
    """Inputs and targets of all samples."""
    generator = torch.Generator().manual_seed(spec.seed)
    shape = (1, 2, 4) if spec.net in OF_IMAGES else (8,)
    x = torch.randn(SAMPLES, *shape, generator=generator, dtype=torch.double if spec.net == "double" else torch.float)
    return x, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def loader(spec: Spec, spoiled: bool = False) -> DataLoader[Any]:
    """Batches of the structure, in the same order in every epoch; in a spoiled one a sample is not finite."""
    x, y = samples(spec)
    if spoiled:
        x[SIZE + 1] = torch.nan
    make = BATCHES[spec.batch][0]
    return DataLoader(range(SAMPLES), SIZE, collate_fn=lambda ids: make(x[ids], y[ids]))


# -- losses -----------------------------------------------------------------------------------------------------------

Loss = Callable[[Any, Tensor, Tensor], Any]  # of the module, the logits and the targets


class Squares(torch.autograd.Function):
    """A loss with a backward pass of its own."""

    @staticmethod
    def forward(context: Any, logits: Tensor, y: Tensor) -> Tensor:
        context.save_for_backward(logits - F.one_hot(y, CLASSES))
        return (logits - F.one_hot(y, CLASSES)).square().mean()

    @staticmethod
    def backward(context: Any, slope: Tensor) -> Any:
        (off,) = context.saved_tensors
        return 2 * slope * off / off.numel(), None


def _ctc(module: Any, logits: Tensor, y: Tensor) -> Tensor:
    steps = logits.log_softmax(-1).expand(4, *logits.shape)
    ones = torch.ones(len(y), dtype=torch.long)
    return F.ctc_loss(steps, (y % 2 + 1)[:, None], 4 * ones, ones)


def _focal(module: Any, logits: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(logits, y, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def _some(module: Any, logits: Tensor, y: Tensor) -> Tensor | None:
    return None if not module.spec.manual and module.trainer.fit_loop.batch_idx == 1 else F.cross_entropy(logits, y)


LOSSES: dict[str, Loss] = {
    "cross entropy": lambda module, logits, y: F.cross_entropy(logits, y),
    "module": lambda module, logits, y: nn.CrossEntropyLoss()(logits, y),
    "smoothed": lambda module, logits, y: F.cross_entropy(logits, y, label_smoothing=0.1),
    "weighted": lambda module, logits, y: F.cross_entropy(logits, y, weight=logits.new_tensor([1.0, 2.0, 3.0])),
    "ignored class": lambda module, logits, y: F.cross_entropy(logits, y, ignore_index=0, reduction="sum") / len(y),
    "dict": lambda module, logits, y: {"loss": F.cross_entropy(logits, y), "logits": logits.detach(), "y": y},
    "by hand": lambda module, logits, y: -logits.log_softmax(-1)[range(len(y)), y].mean(),
    "gathered": lambda module, logits, y: -logits.log_softmax(-1).gather(1, y[:, None]).mean(),
    "focal": _focal,
    "one-hot": lambda module, logits, y: F.cross_entropy(logits, F.one_hot(y, CLASSES).to(logits.dtype)),
    "binary": lambda module, logits, y: F.binary_cross_entropy_with_logits(logits[:, 0], (y == 0).to(logits.dtype)),
    "MSE": lambda module, logits, y: F.mse_loss(logits[:, 0], y.to(logits.dtype)),
    "several": lambda module, logits, y: F.cross_entropy(logits, y) + 0.1 * F.mse_loss(logits[:, 0], y.float()),
    "CTC": _ctc,
    "margin": lambda module, logits, y: F.multi_margin_loss(logits, y),
    "own Function": lambda module, logits, y: Squares.apply(logits, y),
    "library": lambda module, logits, y: torch.linalg.vector_norm(logits.sum(0) - F.one_hot(y, CLASSES).float().sum(0)),
    "NumPy": lambda module, logits, y: F.mse_loss(logits[:, 0], torch.from_numpy(y.numpy() * 0.5).to(logits.dtype)),
    "without targets": lambda module, logits, y: logits.square().mean(),
    "sometimes None": _some,
}


# -- optimizers -------------------------------------------------------------------------------------------------------


class OwnOptimizer(torch.optim.Optimizer):
    """Plain gradient descent, written by a user."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.data -= group["lr"] * weight.grad
        return loss


def _trained(module: Any) -> list[nn.Parameter]:
    return [weight for weight in module.parameters() if weight.requires_grad]


def _sgd(module: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(_trained(module), lr=0.1, momentum=0.9)


def _groups(module: Any) -> Any:
    head, body = list(module.layers[-1].parameters()), []
    body = [weight for weight in _trained(module) if not any(weight is each for each in head)]
    return torch.optim.AdamW([{"params": head, "lr": 0.1}, {"params": body, "lr": 0.01}])


def _scheduled(interval: str) -> Callable[[Any], Any]:
    def make(module: Any) -> Any:
        optimizer = _sgd(module)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": interval}}

    return make


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": _sgd,
    "Adam": lambda module: torch.optim.Adam(_trained(module), lr=0.05),
    "groups": _groups,
    "step schedule": _scheduled("step"),
    "epoch schedule": _scheduled("epoch"),
    "LBFGS": lambda module: torch.optim.LBFGS(_trained(module), lr=0.1, max_iter=2),
    "own": lambda module: OwnOptimizer(_trained(module)),
    "tuple of lists": lambda module: ([optimizer := _sgd(module)], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]),
    "none": lambda module: None,
}


# -- odd parameters, buffers and submodules ---------------------------------------------------------------------------

Extra = tuple[Callable[[Any], None], Callable[[Any, Tensor], Any]]  # what __init__ makes, and what it adds to the loss


def _set(name: str, make: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda module: setattr(module, name, make())


def _buffer(name: str, make: Callable[[], Any], persistent: bool = True) -> Callable[[Any], None]:
    return lambda module: module.register_buffer(name, make(), persistent=persistent)


def _weight(*shape: int, **settings: Any) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.ones(shape, **settings))


def _listed(module: Any) -> None:
    module.outside = [nn.Parameter(torch.ones(3)), torch.ones(3)]


def _teach(module: Any) -> None:
    module.teacher = nn.Linear(8, CLASSES).requires_grad_(False)


def _memo(module: Any, x: Tensor) -> Any:
    module.memo = module.memo + x.detach().float().mean()
    return 0.01 * module.memo.sum()


def _counts(module: Any, x: Tensor) -> Any:
    module.count += 1
    return 0.01 * module.count.float() / (1 + module.count)


def _late(module: Any, x: Tensor) -> Any:
    if module.late is None:
        module.late = torch.zeros(3)
    module.late = module.late + 1
    return 0.01 * module.late.sum()


def _metric(module: Any, x: Tensor) -> Any:
    module.mean.update(x.detach().float())
    return 0.01 * module.mean.compute()


def _shared(module: Any) -> None:
    module.first = nn.Linear(8, 8)
    module.second = module.first
    module.heads = nn.ModuleDict({"a": module.first})


def _tied(module: Any) -> None:
    module.one, module.two = nn.Linear(4, 4), nn.Linear(4, 4)
    module.two.weight = module.one.weight


def _flat(x: Tensor) -> Tensor:
    return x.float().flatten(1)


EXTRAS: dict[str, Extra] = {
    "tied": (_tied, lambda module, x: module.two(module.one(_flat(x)[:, :4])).square().mean()),
    "frozen": (_teach, lambda module, x: module.teacher(_flat(x)).square().mean()),
    "complex": (
        _set("wave", _weight(2, dtype=torch.cfloat)),
        lambda module, x: (module.wave * torch.view_as_complex(_flat(x)[:, :2].contiguous())[:, None]).abs().mean(),
    ),
    "scalar": (_set("scale", _weight()), lambda module, x: (module.scale * _flat(x)).square().mean()),
    "empty": (_set("empty", _weight(0)), lambda module, x: module.empty.sum()),
    "unused": (_set("unused", _weight(3)), lambda module, x: 0),
    "parameters in a list": (_listed, lambda module, x: 0.1 * (module.outside[0] * module.outside[1]).sum()),
    "ParameterList": (
        _set("several", lambda: nn.ParameterList([torch.ones(2), torch.ones(1)])),
        lambda module, x: 0.1 * sum((each * 2).sum() for each in module.several),
    ),
    "integer parameter": (
        _set("places", lambda: nn.Parameter(torch.arange(3), requires_grad=False)),
        lambda module, x: 0.01 * module.places.sum(),
    ),
    "sparse embedding": (
        _set("table", lambda: nn.Embedding(3, 2, sparse=True)),
        lambda module, x: module.table(torch.tensor([0, 1])).square().mean(),
    ),
    "embedding with max_norm": (
        _set("words", lambda: nn.Embedding(3, 2, max_norm=0.5)),
        lambda module, x: module.words(torch.tensor([0, 1])).sum(),
    ),
    "replaced buffer": (_buffer("memo", lambda: torch.zeros(2)), _memo),
    "buffer not saved": (_buffer("count", lambda: torch.tensor(0), persistent=False), _counts),
    "buffer made late": (_buffer("late", lambda: None), _late),
    "metric in the loss": (_set("mean", MeanMetric), _metric),
    "shared submodule": (_shared, lambda module, x: module.heads["a"](module.second(_flat(x))).square().mean()),
}


# -- overridden methods -----------------------------------------------------------------------------------------------

Super = pl.LightningModule  # whose methods the overriding ones call


def _step_past(self: Any, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
    closure()
    optimizer.optimizer.step() if hasattr(optimizer, "optimizer") else type(optimizer).step(optimizer)


def _step(self: Any, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
    optimizer.step(closure=closure)


def _every_other(self: Any, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
    if batch_idx % 2 == 0:
        Super.optimizer_step(self, epoch, batch_idx, optimizer, closure)
    else:
        closure()


def _backward(self: Any, loss: Tensor, *args: Any, **kwargs: Any) -> None:
    Super.backward(self, loss * 1.5, *args, **kwargs)


def _noisy(self: Any, optimizer: Any) -> None:
    for weight in _trained(self):
        if weight.grad is not None and weight.grad.layout == torch.strided:
            weight.grad += 1e-3 * torch.randn_like(weight.grad)


def _scaled_gradients(self: Any) -> None:
    for weight in _trained(self):
        if weight.grad is not None:
            weight.grad.mul_(0.9)


def _clip(self: Any, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
    given = [weight for weight in _trained(self) if weight.grad is not None]
    if given and not any(weight.grad.is_sparse or weight.grad.is_complex() for weight in given):
        torch.nn.utils.clip_grad_value_(given, 0.1)


def _left_out(self: Any, batch: Any, batch_idx: int) -> int | None:
    return -1 if self.current_epoch == 1 and batch_idx == 1 else None


def _moved(self: Any, batch: Any, device: Any, dataloader_idx: int) -> Any:
    return (
        batch
        if isinstance(batch, FrozenPair | OwnDict | UserDict | types.MappingProxyType)
        else move_data_to_device(batch, device)
    )


def _read_early(self: Any, batch: Any, dataloader_idx: int) -> Any:
    x, y = BATCHES[self.spec.batch][1](batch)
    return BATCHES[self.spec.batch][0](x + 0.1 * torch.randn_like(x), y)


def _own_state(self: Any, *args: Any, **kwargs: Any) -> Any:
    return {**Super.state_dict(self, *args, **kwargs), "version": torch.tensor(1)}


def _drop_version(self: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    return Super.load_state_dict(
        self, {name: each for name, each in state.items() if name != "version"}, *args, **kwargs
    )


def _save(self: Any, checkpoint: dict[str, Any]) -> None:
    checkpoint["extra"] = {"classes": CLASSES, "kind": Opaque}
    self.saved = getattr(self, "saved", 0) + 1


def _follow(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
    """A teacher that follows the student, as in self-distillation."""
    if hasattr(self, "teacher"):
        with torch.no_grad():
            self.teacher.bias.lerp_(self.layers[-1].bias.detach().float(), 0.5)


def _of_iterator(self: Any, dataloader_iter: Any) -> Any:
    batch, batch_idx, _ = next(dataloader_iter)
    return Generated.training_step(self, batch, batch_idx)


def _frozen_at_start(self: Any) -> None:
    self.layers[-1].bias.requires_grad_(self.current_epoch > 0)


HOOKS: dict[str, dict[str, Callable[..., Any]]] = {
    "optimizer_step": {"optimizer_step": _step},
    "optimizer_step past Lightning": {"optimizer_step": _step_past},
    "optimizer_step that steps every other time": {"optimizer_step": _every_other},
    "lr_scheduler_step": {"lr_scheduler_step": lambda self, scheduler, metric: scheduler.step()},
    "backward": {"backward": _backward},
    "backward of torch": {"backward": lambda self, loss, *args, **kwargs: loss.backward()},
    "noise on gradients": {"on_before_optimizer_step": _noisy},
    "scaled gradients": {"on_after_backward": _scaled_gradients},
    "configure_gradient_clipping": {"configure_gradient_clipping": _clip},
    "a batch left out": {"on_train_batch_start": _left_out},
    "transfer_batch_to_device": {"transfer_batch_to_device": _moved},
    "on_before_batch_transfer": {"on_before_batch_transfer": _read_early},
    "on_after_batch_transfer": {"on_after_batch_transfer": _read_early},
    "state_dict": {"state_dict": _own_state, "load_state_dict": _drop_version},
    "on_save_checkpoint": {"on_save_checkpoint": _save},
    "teacher": {"on_train_batch_end": _follow},
    "training_step(dataloader_iter)": {"training_step": _of_iterator},
    "training_step(batch)": {"training_step": lambda self, batch: Generated.training_step(self, batch, 0)},
    "configure_callbacks": {"configure_callbacks": lambda self: [Brought()]},
    "one configure_callbacks": {"configure_callbacks": lambda self: Brought()},
    "frozen at start": {"on_train_epoch_start": _frozen_at_start},
    "zero_grad to zeros": {
        "optimizer_zero_grad": lambda self, epoch, batch_idx, optimizer: optimizer.zero_grad(set_to_none=False)
    },
}


# -- manual optimization ----------------------------------------------------------------------------------------------

Optimize = Callable[[Any, Callable[[], Any]], Any]  # of the module, and what computes the loss


def _loss(output: Any) -> Any:
    return output.get("loss") if isinstance(output, dict) else output


def _by_hand(module: Any, compute: Callable[[], Any]) -> Any:
    optimizer = module.optimizers()
    optimizer.zero_grad()
    output = compute()
    if output is not None:
        module.manual_backward(_loss(output))
        optimizer.step()
    return output


def _by_closure(module: Any, compute: Callable[[], Any]) -> None:
    optimizer = module.optimizers()

    def closure() -> Any:
        optimizer.zero_grad()
        loss = _loss(compute())
        module.manual_backward(loss)
        return loss

    optimizer.step(closure=closure)


def _both(module: Any, compute: Callable[[], Any]) -> None:
    for optimizer in module.optimizers():
        module.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        module.manual_backward(_loss(compute()))
        optimizer.step()
        module.untoggle_optimizer(optimizer)


def _past(module: Any, compute: Callable[[], Any]) -> None:
    optimizer = module.optimizers(use_pl_optimizer=False)
    optimizer.zero_grad()
    _loss(compute()).backward()
    optimizer.step()


def _by_sam(module: Any, compute: Callable[[], Any]) -> None:
    """As users of the mixin write it; without it, the plain twin."""
    if not hasattr(module, "sam_backward"):
        _by_hand(module, compute)
        return
    optimizer = module.optimizers()
    optimizer.zero_grad()
    module.sam_backward(lambda: _loss(compute()))
    optimizer.step()


def _two(module: Any) -> list[torch.optim.Optimizer]:
    head = list(module.layers[-1].parameters())
    body = [weight for weight in _trained(module) if not any(weight is each for each in head)]
    return [torch.optim.SGD(head, lr=0.1), torch.optim.Adam(body, lr=0.01)]


MANUAL: dict[str, Optimize] = {
    "one optimizer": _by_hand,
    "closure": _by_closure,
    "two optimizers": _both,
    "past Lightning": _past,
    "sam_backward": _by_sam,
}


# -- callbacks and Trainers -------------------------------------------------------------------------------------------


class Planned(Exception):
    """What a callback of a user raises, and must arrive as it is."""


class Seen(Callback):
    """Notes its hooks, and changes nothing."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(("start", batch_idx, trainer.global_step))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen.append(("optimizer", trainer.global_step))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = _loss(outputs)
        self.seen.append(("end", batch_idx, trainer.global_step, None if loss is None else float(loss)))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append("end")


class Counts(Seen):
    """Is given to the Trainer."""


class Brought(Seen):
    """Comes with the module, where Lightning lets a subclass take the place of its base."""


class OldKey(Seen):
    """Has a class for its key, as Lightning itself had once."""

    @property
    def state_key(self) -> Any:
        return type(self)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": len(self.seen)}


class Foreign(pytorch_lightning.Callback):
    """A callback of the package's other name."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(trainer.global_step)


class Raises(Callback):
    """Fails in mid-fit."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and batch_idx == 1:
            raise Planned("of a user")


class Renames(Callback):
    """Gives a weight another name in mid-fit."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and batch_idx == 0:
            parametrize.register_parametrization(pl_module.layers[-1], "weight", nn.Identity())


class Draws(Callback):
    """Draws random numbers beside the module."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        torch.rand(1), random.random(), np.random.rand()


def _stop() -> Any:
    return pytorch_lightning.callbacks.EarlyStopping("loss", patience=0, min_delta=1e9, check_on_train_epoch_end=True)


def _step_saved() -> Any:
    return LambdaCallback(on_train_batch_end=lambda trainer, module, *_: trainer.callback_metrics.get("loss"))


CALLBACKS: dict[str, Callable[[], Any]] = {
    "counts": Counts,
    "old key": OldKey,
    "foreign": Foreign,
    "foreign early stopping": _stop,
    "raises": Raises,
    "renames": Renames,
    "draws": Draws,
    "lambda": _step_saved,
    "pruning": lambda: ModelPruning("l1_unstructured", amount=0.3, verbose=0),
    "accumulation": lambda: GradientAccumulationScheduler({0: 1, 1: 2}),
    "checkpoint": lambda: pl.callbacks.ModelCheckpoint(every_n_train_steps=2, save_weights_only=True),
}

TRAINERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate_grad_batches": 2},
    "clip": {"gradient_clip_val": 0.5},
    "steps": {"max_epochs": 3, "max_steps": 5},
    "bf16": {"precision": "bf16-mixed"},
    "few batches": {"limit_train_batches": 2},
    "reload": {"reload_dataloaders_every_n_epochs": 1},
    "resumes": {},
}


# -- the module -------------------------------------------------------------------------------------------------------


class Generated(pl.LightningModule):
    """A module as its description says; a subclass has the description, and the methods that are overridden."""

    spec: Spec

    def __init__(self) -> None:
        super().__init__()
        spec = self.spec
        self.automatic_optimization = not spec.manual
        self.layers = NETS[spec.net]()
        self.accuracy = MetricCollection({"accuracy": Accuracy("multiclass", num_classes=CLASSES)})
        for name in spec.extras:
            EXTRAS[name][0](self)
        for place, state in enumerate(spec.states):
            setattr(self._owner(state), f"state{place}", state.make())
        moments = {state.moment for state in spec.states}
        if "forward hook" in moments:
            self.layers.register_forward_hook(lambda *_: self.change("forward hook"))
        if "backward hook" in moments:
            self.layers[-1].register_full_backward_hook(lambda *_: self.change("backward hook"))
        if "gradient hook" in moments:
            self.layers[-1].bias.register_hook(lambda _: self.change("gradient hook"))
        if "accumulation hook" in moments:
            self.layers[-1].bias.register_post_accumulate_grad_hook(lambda _: self.change("accumulation hook"))

    def _owner(self, state: State) -> Any:
        return self.layers[-1] if state.place == "layer" else self

    def change(self, moment: str) -> None:
        """Change the states that change now."""
        for place, state in enumerate(self.spec.states):
            if state.moment == moment:
                owner, name = self._owner(state), f"state{place}"
                setattr(owner, name, state.changed(getattr(owner, name), self.trainer.global_step + 1))

    def memory(self) -> list[Any]:
        """All that the module remembers, in plain Python."""
        states = [getattr(self._owner(state), f"state{place}") for place, state in enumerate(self.spec.states)]
        return [told(state) for state in states]

    def forward(self, x: Tensor) -> Tensor:
        self.change("forward")
        return self.layers(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return self.compute(batch)
        output = MANUAL[self.spec.manual](self, lambda: self.compute(batch))
        return _loss(output) if self.spec.manual == "one optimizer" else None

    def compute(self, batch: Any) -> Any:
        """What the step returns in automatic optimization."""
        return self.contrast(*self.embed(batch))

    def embed(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The logits, inputs and targets; with ``contrast`` what GradCacheMixin asks for."""
        self.change("step")
        x, y = BATCHES[self.spec.batch][1](batch)
        if self.spec.net in OF_IMAGES and x.ndim == 2:
            x = x.reshape(len(x), 1, 2, 4)
        return self(x).to(x.dtype), x, y

    def contrast(self, logits: Tensor, x: Tensor, y: Tensor) -> Any:
        """The loss, or a dictionary with it."""
        output = LOSSES[self.spec.loss](self, logits, y)
        if output is None:
            return None
        self.accuracy.update(logits.detach(), y)
        extra = sum(EXTRAS[name][1](self, x) for name in self.spec.extras)
        self.log("loss", _loss(output).detach(), on_step=True, on_epoch=True, batch_size=len(y))
        self.log_dict(self.accuracy, on_epoch=True, on_step=False, batch_size=len(y))
        self.change("log")
        factor = 1 + zlib.crc32(repr(self.memory()).encode()) / 2**33 if self.spec.states else 1
        loss = (_loss(output) + extra) * factor if self.spec.extras else _loss(output) * factor
        return {**output, "loss": loss} if isinstance(output, dict) else loss

    def configure_optimizers(self) -> Any:
        return _two(self) if self.spec.manual == "two optimizers" else OPTIMIZERS[self.spec.optimizer](self)


def module_of(spec: Spec) -> type[Generated]:
    """The class of the module."""
    body: dict[str, Any] = {"spec": spec}
    if spec.batch in NOT_MOVED:
        body["transfer_batch_to_device"] = _moved
    for name in spec.hooks:
        body |= HOOKS[name]
    overriding = type("Overriding", (Generated,), body)
    moments = {state.moment for state in spec.states if hasattr(pl.LightningModule, state.moment)}
    return type("Net", (overriding,), {name: _changing(overriding, name) for name in moments - {"forward", "log"}})


def _changing(kind: type, name: str) -> Callable[..., Any]:
    """A method that changes states, and then does what the one of ``kind`` does."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.change(name)
        return getattr(kind, name)(self, *args, **kwargs)

    return method


# -- random descriptions ----------------------------------------------------------------------------------------------


def _mostly(first: str, others: Any) -> st.SearchStrategy[Any]:
    return st.one_of(st.just(first), st.sampled_from(sorted({*others} - {first})))


def _few(table: Any) -> st.SearchStrategy[Any]:
    return st.lists(st.sampled_from(list(table)), max_size=3, unique=True).map(tuple)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """A description; features that do not suit each other are left out."""
    states = st.builds(State, st.sampled_from(sorted(KINDS)), _mostly("attribute", PLACES), _mostly("step", MOMENTS))
    return suited(
        Spec(
            net=draw(st.sampled_from([name for name in NETS if name not in ASKED_FOR])),
            batch=draw(_mostly("tuple", BATCHES)),
            loss=draw(st.sampled_from(list(LOSSES))),
            optimizer=draw(_mostly("SGD", OPTIMIZERS)),
            manual=draw(st.one_of(st.just(""), st.just(""), st.just(""), st.sampled_from(sorted(MANUAL)))),
            states=tuple(draw(st.lists(states, max_size=3))),
            extras=draw(_few(EXTRAS)),
            hooks=draw(_few(HOOKS)),
            callbacks=draw(_few(CALLBACKS)),
            trainer=draw(_mostly("plain", TRAINERS)),
            seed=draw(st.integers(0, 9)),
        )
    )


def suited(spec: Spec) -> Spec:
    """The description without what Lightning or torch refuse themselves, so that every module trains without tricks."""
    without: set[str] = set()
    if spec.manual:
        without |= {"accumulation"}
        if spec.trainer in ("accumulate", "clip"):
            spec = replace(spec, trainer="plain")
        if spec.optimizer == "none" or (spec.optimizer == "LBFGS" and spec.manual != "closure"):
            spec = replace(spec, optimizer="SGD")
    if spec.optimizer == "LBFGS":  # which needs Lightning's closure, and a loss from it, and calls it several times
        unfit = ("optimizer_step past Lightning", "training_step(dataloader_iter)")
        spec = replace(spec, hooks=tuple(name for name in spec.hooks if name not in unfit))
        spec = replace(spec, loss="cross entropy") if spec.loss == "sometimes None" else spec
    if spec.batch == "dict that is emptied" and (spec.manual or spec.optimizer == "LBFGS"):  # it is read twice
        spec = replace(spec, batch="dict")
    if "renames" in spec.callbacks or spec.net == "lazy":  # pruning needs weights that exist, and stay
        without |= {"pruning"}
    if spec.trainer == "accumulate":
        without |= {"accumulation"}
    if spec.trainer == "resumes":  # a checkpoint with a buffer that a new module does not have yet
        without |= {"buffer made late"}
    if (
        spec.optimizer in ("Adam", "groups", "LBFGS", "own")
        or spec.manual == "two optimizers"
        or spec.trainer == "clip"
    ):
        without |= {"sparse embedding"}
    callbacks = tuple(name for name in spec.callbacks if name not in without)
    if spec.trainer == "resumes" and "old key" not in callbacks:  # which only a checkpoint shows
        callbacks += ("old key",)
    return replace(spec, callbacks=callbacks, extras=tuple(name for name in spec.extras if name not in without))
