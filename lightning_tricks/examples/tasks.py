"""Parts that the tasks share: a classifier for any network, a data module, and labels with noise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

import lightning_tricks as lt
from lightning_tricks.core.checks import check_range

Split = dict[str, tuple[Tensor, Tensor]]  # Inputs and labels of "train", "val" and "test".

# Arguments of a Trainer for many small fits, which writes and prints nothing.
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


class Classifier(L.LightningModule):
    """Ordinary training of a network: cross entropy, one optimizer, no schedule.

    Args:
        network: A network from a batch of inputs to logits.
        lr: The learning rate.
        optimizer: "sgd" (with momentum 0.9) or "adamw".
        weight_decay: The optimizer's weight decay.
        label_smoothing: The label smoothing of the training loss, in [0, 1].
    """

    def __init__(
        self,
        network: nn.Module,
        lr: float = 0.1,
        optimizer: Literal["sgd", "adamw"] = "sgd",
        weight_decay: float = 0.0,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        self.network = network
        self.lr, self.optimizer, self.weight_decay = lr, optimizer, weight_decay
        self.label_smoothing = label_smoothing

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.network(inputs), labels, label_smoothing=self.label_smoothing)

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_accuracy", accuracy(self.network, *batch), sync_dist=True)

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_accuracy", accuracy(self.network, *batch), sync_dist=True)

    @override
    def configure_optimizers(self) -> Any:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), self.lr, weight_decay=self.weight_decay)
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9, weight_decay=self.weight_decay)


class SharpClassifier(lt.SAMMixin, Classifier):
    """A ``Classifier`` with sharpness-aware minimization."""

    def __init__(self, network: nn.Module, sam: lt.SAM | None = None, **settings: Any) -> None:
        super().__init__(network, **settings)
        self.sam = sam or lt.SAM()


class TaskData(L.LightningDataModule, ABC):
    """Base of the tasks' data modules.

    Args:
        noise: The fraction of wrong training labels, in [0, 1].
        batch_size: The training batch size on each device.
    """

    def __init__(self, noise: float = 0.0, batch_size: int = 64) -> None:
        super().__init__()
        check_range("noise", noise, 0.0, 1.0)
        self.noise = noise
        self.batch_size = batch_size

    @abstractmethod
    def load(self) -> Split:
        """Load the split, with ``self.noise`` as the fraction of wrong training labels."""

    @override
    def setup(self, stage: str) -> None:
        self.data = {part: TensorDataset(*tensors) for part, tensors in self.load().items()}

    def fold_dataset(self, train: bool) -> TensorDataset:
        """All samples but those of the test, for cross-validation; there are no transforms."""
        parts = zip(self.data["train"].tensors, self.data["val"].tensors, strict=True)
        return TensorDataset(*map(torch.cat, parts))

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data["train"], self.batch_size, shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data["val"], batch_size=300)

    @override
    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data["test"], batch_size=300)


@torch.no_grad()
def accuracy(net: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """The fraction of inputs whose highest logit is that of their label."""
    return (net(inputs).argmax(-1) == labels).float().mean()


def mislabel(labels: Tensor, noise: float, *, classes: int, generator: torch.Generator) -> Tensor:
    """Replace a fraction ``noise`` of the labels by other classes, all equally likely."""
    wrong = torch.rand(len(labels), generator=generator) < noise
    others = (labels + torch.randint(1, classes, labels.shape, generator=generator)) % classes
    return torch.where(wrong, others, labels)
