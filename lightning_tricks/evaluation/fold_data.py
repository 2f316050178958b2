"""The data of a fold: subsets of a data set or of a LightningDataModule, and their loaders."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from lightning_tricks.evaluation.folds import Fold, fingerprint
from lightning_tricks.evaluation.fresh import caller_unchanged

MakeLoader = Callable[[Any, bool], Any]  # from a subset, and whether it is for training, to a DataLoader

HOOK = (
    "Give the data module a method fold_dataset(train) that returns the data set of all samples, with the transforms"
    " for training or for validation"
)


class FoldData:
    """The samples of a cross-validation, as two views that differ in their transforms.

    Args:
        dataset: A data set, or a LightningDataModule: what its ``fold_dataset(train)`` returns for True and for False,
            or the samples of its training and validation loaders, if their data sets are Subsets of one data set, or of
            two of the same type and length, that have no sample in common.
        loader: Function of a subset and of whether it is for training that makes its DataLoader. None for a copy of the
            data module's own loaders, or batches of 32 of a data set, shuffled for training.

    Raises:
        TypeError: For a data set without length or items, and a loader that is no function.
        ValueError: For a data module whose samples cannot be told, or whose loaders cannot be copied.
    """

    def __init__(self, dataset: Any, loader: MakeLoader | None = None) -> None:
        if loader is not None and not callable(loader):
            raise TypeError(f"loader must be None or a function that makes a DataLoader, got {loader!r}.")
        self._datamodule: Any = None
        self._loader: Any = loader or _default
        if isinstance(dataset, L.LightningDataModule):
            self._datamodule = dataset
            dataset.prepare_data()
            dataset.setup("fit")
            given = hasattr(dataset, "fold_dataset") and loader
            loaders = {} if given else {True: dataset.train_dataloader(), False: dataset.val_dataloader()}
            self.train, self.validation, self.samples = _views(dataset, loaders)
            self._loader = loader or partial(_copied, loaders)
        else:
            sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
            if not sized or isinstance(dataset, IterableDataset):
                raise TypeError(
                    f"dataset needs __len__ and __getitem__, to be split, got {type(dataset).__name__}: read a stream"
                    " into a list first."
                )
            self.train = self.validation = dataset
            self.samples = range(len(dataset))

    def __len__(self) -> int:
        return len(self.samples)

    def of(self, fold: Fold) -> dict[str, Any]:
        """The arguments of ``trainer.fit`` for a fold: training and validation loader, or a data module with these.

        Raises:
            ValueError: If a loader is not one of the subset that it was made for, or the validation loader has another
                order than the subset.
        """
        train = self._loader(Subset(self.train, [self.samples[i] for i in fold.train]), True)
        validation = self.validation_loader(fold)
        if (found := _size(train)) not in (None, len(fold.train)):
            raise ValueError(
                f"loader must make the training loader of its subset, which has {len(fold.train)} samples, got one of"
                f" {found}: pass the subset to DataLoader."
            )
        if self._datamodule is None:
            return {"train_dataloaders": train, "val_dataloaders": validation}
        data = copy.copy(self._datamodule)  # keeps its hooks for batches
        data.prepare_data = data.setup = _done_before
        data.train_dataloader = partial(_given, train)
        data.val_dataloader = data.predict_dataloader = partial(_given, validation)
        return {"datamodule": data}

    def checksum(self, fold: Fold) -> str | None:
        """Checksum of the fold's first validation batch; None if the batch is random."""
        found = []
        for _ in range(2):
            with caller_unchanged():
                L.seed_everything(0, workers=True, verbose=False)
                found.append(re.sub(r" at 0x\w+", "", repr(next(iter(self.validation_loader(fold))))))
        return fingerprint(found) if found[0] == found[1] else None

    def validation_loader(self, fold: Fold) -> Any:
        """The validation loader of a fold, which has its samples in their order."""
        loader = self._loader(Subset(self.validation, [self.samples[i] for i in fold.validation]), False)
        _require_order(loader, len(fold.validation))
        return loader


def _default(subset: Any, train: bool) -> DataLoader[Any]:
    return DataLoader(subset, batch_size=32, shuffle=train)


def _given(loader: Any) -> Any:
    return loader


def _done_before(stage: str | None = None) -> None:
    pass


def _size(loader: Any) -> int | None:
    dataset: Any = getattr(loader, "dataset", None)
    return len(dataset) if hasattr(dataset, "__len__") else None


def _require_order(loader: Any, size: int) -> None:
    """Raise unless a loader has all samples of its data set once, the first first."""
    batches = getattr(loader, "batch_sampler", None)
    order: Sequence[Any] | None = None
    if getattr(loader, "sampler", None) is not None:
        with isolate_rng(include_cuda=False):
            order = list(loader.sampler) if batches is None else [sample for batch in batches for sample in batch]
    if order != list(range(size)) or _size(loader) != size:
        found = (
            type(loader).__name__ if order is None else f"samples {order[:5]} ... of {_size(loader)}".replace("]", "")
        )
        raise ValueError(
            f"loader must make a validation loader with the {size} samples of its subset once, in their order, got"
            f" {found}: return DataLoader(subset, ..., shuffle=train), without drop_last for validation."
        )


def _views(data: Any, loaders: dict[bool, Any]) -> tuple[Any, Any, Sequence[int]]:
    """The views of a data module for training and for validation, and the positions of its samples in both."""
    if hasattr(data, "fold_dataset"):
        train, validation = data.fold_dataset(True), data.fold_dataset(False)
        if len(train) != len(validation):
            raise ValueError(
                f"fold_dataset must return the same samples for train=True and train=False, got {len(train)} and"
                f" {len(validation)}: only their transforms may differ."
            )
        return train, validation, range(len(train))
    name = type(data).__name__
    subsets: list[Any] = [getattr(loader, "dataset", None) for loader in loaders.values()]
    if not all(isinstance(subset, Subset) for subset in subsets):
        kinds = " and ".join(type(subset).__name__ for subset in subsets)
        raise ValueError(
            f"{name} must have Subsets of one data set in its training and validation loader, as random_split makes"
            f" them, got {kinds}. {HOOK}."
        )
    train, validation = subsets
    samples = sorted({*train.indices, *validation.indices})
    same = type(train.dataset) is type(validation.dataset) and len(train.dataset) == len(validation.dataset)
    if not same or len(samples) < len(train) + len(validation):
        raise ValueError(
            f"{name} has Subsets of {'one data set that overlap' if same else 'different data sets'}, so that which"
            f" samples there are cannot be told. {HOOK}."
        )
    return train.dataset, validation.dataset, samples


def _copied(loaders: dict[bool, Any], subset: Any, train: bool) -> DataLoader[Any]:
    """A loader of a subset like the data module's own; one that validates does not shuffle."""
    own = loaders[train]
    sampler = getattr(own, "sampler", None)
    plain = type(own) is DataLoader and type(own.batch_sampler) is BatchSampler and own.generator is None
    if not plain or type(sampler) not in (RandomSampler, SequentialSampler) or getattr(sampler, "replacement", False):
        raise ValueError(
            f"the data module's {'train' if train else 'val'}_dataloader cannot be copied for a fold, got a"
            f" {type(own).__name__} with {type(sampler).__name__}: only a DataLoader with batch_size and shuffle can."
            " Pass loader=, a function of a subset and of whether it is for training that makes its DataLoader."
        )
    return DataLoader(
        subset,
        batch_size=own.batch_size,
        shuffle=type(sampler) is RandomSampler,
        num_workers=own.num_workers,
        collate_fn=own.collate_fn,
        pin_memory=own.pin_memory,
        drop_last=own.drop_last,
        timeout=own.timeout,
        worker_init_fn=own.worker_init_fn,
        multiprocessing_context=own.multiprocessing_context,
        prefetch_factor=own.prefetch_factor,
        persistent_workers=own.persistent_workers,
    )
