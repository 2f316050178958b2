"""The module, data and Trainer that the tests share."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

TORCH_2_9 = torch.__version__.startswith("2.9.")  # the oldest, of which some tests know a limit


def spelled(value: Any) -> str:
    """A name for a test's settings that is the same in every process: without addresses of objects."""
    return re.sub(r" at 0x\w+", "", str(value))


def data(size: int = 44, seed: int = 0) -> TensorDataset:
    """A learnable two-class problem in eight dimensions."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 8, generator=generator)
    return TensorDataset(x, (x[:, 0] + 0.3 * torch.randn(size, generator=generator) > 0).long())


def loader(size: int = 44, batch_size: int = 8, shuffle: bool = False) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(data(size), batch_size, shuffle=shuffle)


def rank_loader() -> DataLoader[tuple[Tensor, ...]]:
    """This rank's part of ``loader(48, 16)``: the ranks' batches of a step are one batch of one process."""
    rank, size = int(os.environ["RANK"]), 16 // int(os.environ["WORLD_SIZE"])
    mine = [16 * step + size * rank + number for step in range(3) for number in range(size)]
    return DataLoader(Subset(data(48), mine), batch_size=size)


TWO: dict[str, Any] = {"devices": 2, "use_distributed_sampler": False}  # settings of a fit with rank_loader()


class Net(L.LightningModule):
    """A stock module with BatchNorm and dropout, so that buffers and random numbers matter."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("test_loss", F.cross_entropy(self(x), y))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, weight_decay=1e-3)


class NormNet(Net):
    """Without dropout: Lightning saves no random state, so only such a module can resume exactly."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


class PlainNet(Net):
    """Without BatchNorm and dropout: several ranks equal one process on their batches together."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


class Resumable:
    """A loader of batches that goes on in mid-epoch, as that of torchdata does."""

    def __init__(self, batches: list[Any] | None = None) -> None:
        self.batches = list(loader()) if batches is None else batches
        self.at = self.skip = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        first, self.skip = self.skip, 0
        for index in range(first, len(self)):
            self.at = index + 1
            yield self.batches[index]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = self.skip = state["at"]


class SteppedByHand(L.LightningModule):
    """Optimizes by hand, with the loss of the class that comes next."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class ShardedLayers(L.LightningModule):
    """With layers that Lightning's strategy for FSDP2 shards."""

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])


class Stream(IterableDataset[Any]):
    """Samples, or batches, whose number nobody knows before."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


class Steps(L.Callback):
    """Counts the optimizer steps that were made before an error."""

    made = 0

    def on_exception(self, trainer: Any, *_: Any) -> None:
        self.made = trainer.global_step


class SaveAt(L.Callback):
    """Saves at the end of an epoch, or after the batch that makes an optimizer step."""

    def __init__(self, path: Any, *, epoch: int = -1, step: int = -1) -> None:
        self.path, self.epoch, self.step = path, epoch, step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)


quiet: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 2,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def trainer(**settings: Any) -> L.Trainer:
    """A quiet CPU Trainer that writes nothing unless asked to."""
    return L.Trainer(**{**quiet, **settings})


def fit(
    module: L.LightningModule, *, train: Any = None, val: Any = None, ckpt_path: Any = None, **settings: Any
) -> L.Trainer:
    """Seed, fit and hand back the Trainer. Build the module after a seed of its own."""
    run = trainer(**settings)
    L.seed_everything(7, verbose=False)
    train, val = loader() if train is None else train, loader(24) if val is None else val
    run.fit(module, train, val, ckpt_path=ckpt_path)
    return run


def build(kind: type[L.LightningModule] = Net, **arguments: Any) -> Any:
    """A module with seeded initial weights."""
    L.seed_everything(3, verbose=False)
    return kind(**arguments)


def weights(module: nn.Module) -> dict[str, Tensor]:
    """A copy of parameters and buffers; of sharded ones the whole, for which all ranks ask."""
    state = {name: value.detach() for name, value in module.state_dict().items()}
    return {name: v.full_tensor() if isinstance(v, DTensor) else v.clone() for name, v in state.items()}


def trained(kind: type[L.LightningModule] = Net, *callbacks: Any, **settings: Any) -> dict[str, Tensor]:
    """The end weights of a module that is built and fitted with callbacks."""
    module = build(kind)
    fit(module, callbacks=[*callbacks], **settings)
    return weights(module)


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Bit equality of two sets of weights."""
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, f"not bit-equal: {different}"


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
