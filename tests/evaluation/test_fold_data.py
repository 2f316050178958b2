"""The data of a fold: a data module's transforms for training and validation stay apart, its hooks and loaders too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, WeightedRandomSampler, random_split

from lightning_tricks.evaluation import cross_validate
from lightning_tricks.evaluation.fold_data import FoldData
from lightning_tricks.evaluation.folds import Fold
from tests.evaluation.recipes import Scored
from tests.nets import trainer


class View(Dataset[tuple[Tensor, Tensor]]):
    """Samples 0 to n - 1, with a transform."""

    def __init__(self, size: int = 20, transform: float = 1.0) -> None:
        self.size, self.transform = size, transform

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return torch.full((8,), self.transform * i), torch.tensor(i % 2)


class Data(L.LightningDataModule):
    """Loaders of the data sets that it is given."""

    def __init__(self, train: Any, validation: Any, **settings: Any) -> None:
        super().__init__()
        self.train, self.validation, self.settings = train, validation, settings

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, **{"batch_size": 4, "shuffle": True, **self.settings})

    def val_dataloader(self) -> Any:
        return DataLoader(self.validation, batch_size=5)


class WithHook(Data):
    """Its data sets are of other files, but it says what the samples are."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(View(3), View(4), **settings)

    def fold_dataset(self, train: bool) -> Any:
        return View(10, -1.0 if train else 1.0)


def values(loader: Any) -> list[float]:
    return [x[0].item() for batch, _ in loader for x in batch]


def test_transforms_of_training_and_validation_stay_apart() -> None:
    """Two views of the same samples, of which the data module has left out 3 and 4 for a test."""
    samples = [i for i in range(20) if i not in (3, 4)]
    data = FoldData(Data(Subset(View(transform=-1.0), samples[4:]), Subset(View(), samples[:4])))
    assert len(data) == 18
    loaders = data.of(Fold(list(range(6, 18)), list(range(6))))["datamodule"]
    assert sorted(values(loaders.train_dataloader())) == [-float(i) for i in reversed(samples[6:])]
    assert values(loaders.val_dataloader()) == values(loaders.predict_dataloader()) == samples[:6]
    assert [len(x) for x, _ in loaders.train_dataloader()] == [4, 4, 4]
    assert [len(x) for x, _ in loaders.val_dataloader()] == [5, 1]
    assert values(loaders.train_dataloader()) != values(loaders.train_dataloader())


def test_what_random_split_makes_is_taken_together() -> None:
    train, validation, test = random_split(View(), [12, 4, 4], torch.Generator().manual_seed(0))
    data = FoldData(Data(train, validation))
    assert len(data) == 16
    loaders = data.of(Fold(list(range(8)), list(range(8, 16))))["datamodule"]
    seen = values(loaders.train_dataloader()) + values(loaders.val_dataloader())
    assert sorted(seen) == [i for i in range(20) if i not in test.indices]


def test_a_data_module_may_say_what_its_samples_are() -> None:
    data = FoldData(WithHook())
    loaders = data.of(Fold([1, 2], [0, 5]))["datamodule"]
    assert sorted(values(loaders.train_dataloader())) == [-2, -1]
    assert values(loaders.val_dataloader()) == [0, 5]
    own = FoldData(WithHook(), lambda subset, train: DataLoader(subset, 1))
    assert len(own.of(Fold([1, 2], [0, 5]))["datamodule"].train_dataloader()) == 2


def test_the_hooks_of_a_data_module_change_the_batches_of_every_stage(tmp_path: Path) -> None:
    calls: list[str] = []

    class Hooked(WithHook):
        def prepare_data(self) -> None:
            calls.append("prepare_data")

        def setup(self, stage: str) -> None:
            calls.append(stage)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch[0] + 100, batch[1]

    class Seeing(Scored):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert ((batch[0] > 80) & (batch[0] <= 100)).all()
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert (batch[0] >= 100).all()
            super().validation_step(batch, batch_idx)

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return batch[0][:, 0]

    found = cross_validate(
        lambda fold: Seeing(),
        Hooked(batch_size=5),
        lambda fold, folder: trainer(max_epochs=1),
        splitter=2,
        folder=tmp_path,
    )
    assert found.predictions.tolist() == [100.0 + i for i in range(10)]
    assert calls == ["prepare_data", "fit"]


def test_a_data_set_has_batches_of_32_by_default() -> None:
    loaders = FoldData(View(90)).of(Fold(list(range(50)), list(range(50, 90))))
    assert [len(x) for x, _ in loaders["train_dataloaders"]] == [32, 18]
    assert values(loaders["train_dataloaders"]) != list(range(50))
    assert values(loaders["val_dataloaders"]) == list(range(50, 90))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Data(TensorDataset(torch.ones(3)), TensorDataset(torch.ones(2))), "got TensorDataset and TensorDataset"),
        (Data(Subset(View(), [0, 1]), Subset(View(), [1, 2])), "Subsets of one data set that overlap"),
        (Data(Subset(View(), [0, 1]), Subset(View(19), [2])), "Subsets of different data sets"),
        (Data(Subset(View(), [0, 1]), Subset(TensorDataset(torch.ones(20)), [2])), "Subsets of different data sets"),
    ],
)
def test_samples_that_cannot_be_told_are_refused(data: Data, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        FoldData(data)
    assert "Give the data module a method fold_dataset(train)" in str(refused.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"sampler": WeightedRandomSampler([1.0] * 3, 3), "shuffle": False},
        {"generator": torch.Generator()},
        {"batch_sampler": [[0, 1], [2]], "batch_size": 1, "shuffle": False},
    ],
)
def test_a_loader_that_cannot_be_copied_is_refused(settings: dict[str, Any]) -> None:
    data = FoldData(WithHook(**settings))
    with pytest.raises(ValueError, match=r"train_dataloader cannot be copied for a fold.* Pass loader="):
        data.of(Fold([0], [1]))


def test_views_of_other_lengths_are_refused() -> None:
    class Wrong(WithHook):
        def fold_dataset(self, train: bool) -> Any:
            return View(10 if train else 9)

    with pytest.raises(ValueError, match="got 10 and 9: only their transforms may differ"):
        FoldData(Wrong())
