"""Tricks that change batches: the gradient is that of the project's own step on the batch that they should make."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.clients.base import Base, Seeded, assert_gradients, assert_same, trick
from tests.clients.recast import get, in_parts, paths, put, stepping


class OfBatches(Base):
    @property
    def names(self) -> dict[str, Any]:
        """As a trick is told where inputs and targets are."""
        return {"inputs": self.inputs, "target": self.target}

    @property
    def input_paths(self) -> list[str]:
        return paths(self.inputs or "0")

    @property
    def target_paths(self) -> list[str]:
        return paths(self.target or "1")

    def with_partners(self, batch: Any, index: Tensor) -> Any:
        """The batch with the targets of each sample's partner."""
        for path in self.target_paths:
            batch = put(batch, path, get(batch, path)[index])
        return batch

    def assert_steps_like(
        self, callback: Any, step: Callable[[Any, Any, Any, int], Tensor], seen: list[Any] | None = None
    ) -> None:
        """The first gradient is that of ``step``; batches that are trained on are kept in ``seen``."""
        own = self.fit(callback, kind=stepping(kept_in([] if seen is None else seen)), max_steps=1, **self.double)
        naive = self.fit(kind=stepping(step), max_steps=1, **self.double)
        assert_gradients(own.watch.gradients[0], naive.watch.gradients[0])

    @trick("Mixup")
    def test_mixup(self) -> None:
        mix = self.lt.Mixup(alpha=1.0, **self.names)
        self.refuses(mix)

        def step(module: Any, plain: Any, batch: Any, number: int) -> Tensor:
            lam, index = mix.drawn.lam, mix.drawn.index
            assert 0 < lam < 1
            for path in self.input_paths:
                x = get(batch, path)
                batch = put(batch, path, lam * x + (1 - lam) * x[index])
            return lam * plain(batch) + (1 - lam) * plain(self.with_partners(batch, index))

        self.assert_steps_like(mix, step)
        self.assert_plain(self.fit(self.lt.Mixup(alpha=0, **self.names)))

    @trick("CutMix")
    def test_cutmix(self) -> None:
        if not self.images:
            pytest.skip("none: the inputs are no images")
        mix, seen = self.lt.CutMix(alpha=1.0, **self.names), list[Any]()
        self.refuses(mix)

        def step(module: Any, plain: Any, batch: Any, number: int) -> Tensor:
            index, cut = mix.drawn.index, get(seen[0], self.input_paths[0])
            x, y = get(batch, self.input_paths[0]), get(batch, self.target_paths[0])
            box = (cut != x).any(1).any(0)  # of random pixels; the same in all samples
            assert torch.equal(cut, torch.where(box, x[index], x))
            batch = put(batch, self.input_paths[0], cut)
            if y.shape[-2:] == x.shape[-2:]:
                return plain(put(batch, self.target_paths[0], torch.where(box, y[index], y)))
            share = box.float().mean().item()
            return (1 - share) * plain(batch) + share * plain(self.with_partners(batch, index))

        self.assert_steps_like(mix, step, seen)
        self.assert_plain(self.fit(self.lt.CutMix(alpha=0, **self.names)))

    @trick("HiddenMixup")
    def test_hidden_mixup(self) -> None:
        if not self.layer and self.name not in self.refused:
            pytest.skip("none: no layer whose input is one vector a sample")
        mix = self.lt.HiddenMixup(self.layer, alpha=1.0, target=self.target)
        self.refuses(mix)

        def step(module: Any, plain: Any, batch: Any, number: int) -> Tensor:
            lam, index = mix.drawn.lam, mix.drawn.index
            assert 0 < lam < 1

            def blend(layer: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                return lam * given[0] + (1 - lam) * given[0][index], *given[1:]

            handle = module.get_submodule(self.layer).register_forward_pre_hook(blend)
            loss = lam * plain(batch) + (1 - lam) * plain(self.with_partners(batch, index))
            handle.remove()
            return loss

        self.assert_steps_like(mix, step)
        self.assert_plain(self.fit(self.lt.HiddenMixup(self.layer, alpha=0, target=self.target)))

    @trick("HardExampleFilter")
    def test_hard_examples(self) -> None:
        self._hard_examples("prune")

    @trick('HardExampleFilter(mode="loss")')
    def test_hard_losses(self) -> None:
        self._hard_examples("loss")

    def _hard_examples(self, mode: str) -> None:
        def make(keep: float) -> Any:
            return self.lt.HardExampleFilter(keep, mode=mode, **self.names)

        self.refuses(make(0.5))

        def step(module: Any, plain: Any, batch: Any, number: int) -> Tensor:
            if mode == "loss":
                return self.hard_loss(module, batch, plain)
            losses = self.sample_losses(module, batch)  # with the random numbers of the step
            return plain(self.subset(batch, losses.detach().topk(len(losses) // 2).indices.sort().values))

        self.assert_steps_like(make(0.5), step)
        self.assert_plain(self.fit(make(1.0)))

    @trick("BatchTransform")
    def test_batch_transform(self) -> None:
        """Everything is turned around, with what torchvision makes follow."""
        if self.images:
            from torchvision.transforms.v2 import RandomHorizontalFlip

            transform: Any = RandomHorizontalFlip(p=1.0)
        else:
            transform = turned
        self.refuses(self.lt.BatchTransform(transform, **self.names))

        def step(module: Any, plain: Any, batch: Any, number: int) -> Tensor:
            spatial = [path for path in self.target_paths if self.images and get(batch, path).ndim > 2]
            for path in (*self.input_paths, *spatial):
                batch = put(batch, path, turned(get(batch, path)))
            return plain(batch)

        self.assert_steps_like(self.lt.BatchTransform(transform, **self.names), step)
        self.assert_plain(self.fit(self.lt.BatchTransform(transform, stop=0, **self.names)))

    @trick("CutOut")
    def test_cutout(self) -> None:
        if not self.images:
            pytest.skip("none: the inputs are no images")
        transform, seen = self.lt.BatchTransform(self.lt.CutOut(0.5), **self.names), list[Any]()
        self.refuses(transform)

        def step(module: Any, plain: Any, batch: Any, number: int) -> Tensor:
            x, cut = get(batch, self.input_paths[0]), get(seen[0], self.input_paths[0])
            for image, before in zip(cut, x, strict=True):
                hole = (image != before).all(0)  # of random pixels
                rows, columns = hole.any(1).sum(), hole.any(0).sum()
                assert 0 < hole.sum() == rows * columns <= (min(hole.shape) // 2) ** 2
                assert torch.equal(image, torch.where(hole, 0.0, before))
            return plain(put(batch, self.input_paths[0], cut))

        self.assert_steps_like(transform, step, seen)
        self.assert_plain(self.fit(self.lt.BatchTransform(self.lt.CutOut(0.0), **self.names)))

    @trick("ProgressiveResizing")
    def test_progressive_resizing(self) -> None:
        """From half of the sides to all of them in two steps."""
        if not self.images:
            pytest.skip("none: the inputs are no images")

        def make(initial: float) -> Any:
            return self.lt.ProgressiveResizing(initial, stop=2, multiple_of=8, **self.names)

        self.refuses(make(0.5))

        def step(module: Any, plain: Any, batch: Any, number: int) -> Tensor:
            x, y = get(batch, self.input_paths[0]), get(batch, self.target_paths[0])
            sides = [int(side * (0.5, 0.75, 1.0)[min(number, 2)]) for side in x.shape[-2:]]
            batch = put(batch, self.input_paths[0], F.interpolate(x, sides, mode="bilinear", antialias=True))
            if y.shape[-2:] == x.shape[-2:]:
                small = F.interpolate(y[:, None].to(x), sides, mode="nearest-exact")[:, 0].to(y)
                batch = put(batch, self.target_paths[0], small)
            return plain(batch)

        self._grows(make(0.5), step)
        self.assert_plain(self.fit(make(1.0)))

    @trick("SequenceLengthWarmup")
    def test_sequence_length_warmup(self) -> None:
        """From two tokens to all seven in two steps."""
        if not self.sequences and self.name not in self.refused:
            pytest.skip("none: the inputs are no sequences of which a beginning is one")

        def make(initial: float) -> Any:
            return self.lt.SequenceLengthWarmup(initial, stop=2, multiple_of=1, **self.names)

        self.refuses(make(0.25))

        def step(module: Any, plain: Any, batch: Any, number: int) -> Tensor:
            length = (2, 4, 7)[min(number, 2)]
            return plain({key: part[:, :length] if part.ndim == 2 else part for key, part in batch.items()})

        self._grows(make(0.25), step)
        self.assert_plain(self.fit(make(1.0)))

    def _grows(self, callback: Any, step: Callable[[Any, Any, Any, int], Tensor]) -> None:
        """Four steps are those of ``step``, from the same weights as far as they are."""
        own = self.fit(callback, Seeded(), max_steps=4, **self.double).watch
        naive = self.fit(Seeded(), kind=stepping(step), max_steps=4, **self.double).watch
        assert own.losses == pytest.approx(naive.losses, rel=1e-3)
        assert_gradients(own.gradients[0], naive.gradients[0])

    @trick("LengthBuckets")
    def test_length_buckets(self) -> None:
        """Batches are those of the sorted lengths, and what is trained is that of a loader which has those batches."""
        if not self.sequences:
            pytest.skip("none: the samples have one length")
        samples, (_, validation) = ragged(self.loaders()[0].dataset), self.loaders()
        lengths = [len(sample["input_ids"]) for sample in samples]
        sampler = self.lt.LengthBuckets(lengths, 4)
        loaders: list[Any] = [DataLoader(samples, 4, sampler=sampler, collate_fn=padded), validation]
        self.loaders = lambda: loaders  # type: ignore[method-assign,assignment,return-value]
        seen: list[Any] = []
        own = self.fit(Seeded(), kind=stepping(kept_in(seen)))
        for epoch in (seen[:5], seen[5:]):
            ranges = sorted(minmax(batch["attention_mask"].sum(1)) for batch in epoch)
            assert sorted(int(n) for batch in epoch for n in batch["attention_mask"].sum(1)) == sorted(lengths)
            assert all(before[1] <= after[0] for before, after in pairwise(ranges))
        assert ids(seen[:5]) != ids(seen[5:]), "epochs have one order"
        loaders[0] = DataLoader(Epochs(seen[:5], seen[5:]), batch_size=None)
        assert_same(own, self.fit(Seeded()))

    @trick("DistributedWeightedSampler")
    def test_weighted_sampler(self) -> None:
        """An epoch has the samples at which the cumulated weights pass random numbers."""
        if not self.folds:
            pytest.skip("none: its loaders need more than a part of a data set")
        loader, validation = self.loaders()
        weights = torch.arange(1.0, len(loader.dataset) + 1).double()

        def loaded_by(sampler: Any) -> Any:
            return type(loader)(loader.dataset, batch_size=4, sampler=sampler), validation

        def drawn(epoch: int) -> list[int]:
            numbers = torch.rand(len(weights), generator=torch.Generator().manual_seed(3 + epoch), dtype=torch.double)
            return [int((weights.cumsum(0) > number * weights.sum()).nonzero()[0]) for number in numbers]

        given = loaded_by(self.lt.DistributedWeightedSampler(weights, seed=3))
        self.loaders = lambda: given  # type: ignore[method-assign]
        own = self.fit(Seeded())
        given = loaded_by(Epochs(drawn(0), drawn(1)))
        assert_same(own, self.fit(Seeded()))

    @trick("FitsMemory")
    def test_fits_memory(self) -> None:
        """A batch that does not fit has the gradient of the project's own steps on its two halves."""

        def fails(module: Any, plain: Any, batch: Any, number: int) -> Tensor:
            loss = plain(batch)
            if number == 0:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return loss

        def halves(batch: Any) -> list[Any]:
            samples = torch.arange(len(get(batch, self.target_paths[0])))
            return [self.subset(batch, part) for part in samples.chunk(2)]

        def make() -> Any:
            return self.lt.FitsMemory(count=self.count)

        self.refuses(make(), kind=stepping(fails))
        own = self.fit(make(), kind=stepping(fails), max_steps=1, **self.double)
        naive = self.fit(kind=in_parts(halves), max_steps=1, **self.double)
        assert_gradients(own.watch.gradients[0], naive.watch.gradients[0])
        self.assert_plain(self.fit(make()))

    @trick("BatchSizeWarmup")
    def test_batch_size_warmup(self) -> None:
        """One batch makes a step in the first epoch, two in the second, as by Lightning's own accumulation."""
        self.refuses(self.lt.BatchSizeWarmup(1, final=2, over=1))
        grown = self.fit(self.lt.BatchSizeWarmup(1, final=2, over=1))
        by_hand = self.fit(self.pl.callbacks.GradientAccumulationScheduler({1: 2}))
        assert len(grown.watch.gradients) < len(grown.watch.weights), "no step had two batches"
        assert_same(grown, by_hand)
        self.assert_plain(self.fit(self.lt.BatchSizeWarmup(1, final=1, over=1)))


def kept_in(seen: list[Any]) -> Callable[[Any, Any, Any, int], Tensor]:
    """The project's own step, which keeps the batches."""

    def step(module: Any, plain: Any, batch: Any, number: int) -> Tensor:
        seen.append(copied(batch))
        return plain(batch)

    return step


def copied(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.detach().clone()
    if isinstance(batch, dict):
        return {key: copied(part) for key, part in batch.items()}
    return type(batch)(map(copied, batch)) if type(batch) in (list, tuple) else batch


def turned(x: Tensor) -> Tensor:
    """Backwards along the last dimension."""
    return x.flip(-1)


def ragged(samples: Any) -> list[dict[str, Tensor]]:
    """Sequences of two to seven tokens."""
    return [
        {key: part[: 2 + number % 6] if part.ndim else part for key, part in sample.items()}
        for number, sample in enumerate(samples)
    ]


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch, with labels at the end that do not count."""
    longest = max(len(sample["input_ids"]) for sample in samples)

    def whole(key: str, part: Tensor) -> Tensor:
        fill = -100 if key == "labels" else 0
        return F.pad(part, (0, longest - len(part)), value=fill) if part.ndim else part

    return {key: torch.stack([whole(key, sample[key]) for sample in samples]) for key in samples[0]}


def minmax(lengths: Tensor) -> tuple[int, int]:
    return int(lengths.min()), int(lengths.max())


def ids(batches: list[Any]) -> list[Any]:
    return [batch["input_ids"].tolist() for batch in batches]


class Epochs(torch.utils.data.IterableDataset[Any]):
    """Other batches in each epoch."""

    def __init__(self, *epochs: list[Any]) -> None:
        self.epochs = iter(epochs)
        self.batches = len(epochs[0])

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        return iter(next(self.epochs))
