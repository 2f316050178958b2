"""What is made of a part of a batch keeps the part's class and attributes, or is refused by its path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torchvision.transforms import v2
from torchvision.tv_tensors import Image

import lightning_tricks as lt
from lightning_tricks.core.batches.form import in_form_of
from tests.callbacks.test_mixup import feed
from tests.nets import PlainNet, assert_equal, build, data, fit, weights

X, Y = data(8).tensors
NAMES = [f"column {number}" for number in range(6)]


class Table(Tensor):
    """Rows with named columns, whose own ``clone`` keeps the names."""

    columns: list[str]

    def clone(self, **settings: Any) -> Tensor:
        return named(super().clone(**settings), Table, columns=self.columns)


class Images(Tensor):
    """Images with the size of their pixels in millimetres, which their own ``clone`` keeps."""

    spacing: tuple[float, float]

    def clone(self, **settings: Any) -> Tensor:
        return named(super().clone(**settings), Images, spacing=self.spacing)


def named(x: Tensor, kind: Any, **attributes: Any) -> Any:
    x = x.as_subclass(kind)
    vars(x).update(attributes)
    return x


def table(size: int = 8) -> Any:
    return named(X[:size, :6].as_subclass(Tensor).clone(), Table, columns=NAMES)


def images() -> Any:
    return named(torch.rand(8, 3, 8, 8, generator=torch.Generator().manual_seed(0)), Images, spacing=(0.5, 0.75))


class Reads(PlainNet):
    """Reads its inputs by what they know of themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch["x"]
        self.seen.append(x)
        if isinstance(x, Table):
            assert x.columns == NAMES
        else:
            assert x.spacing == (0.5, 0.75)
        x = x.as_subclass(Tensor)
        x = self.embedding(x).mean(1) if not x.is_floating_point() else x.flatten(1)[:, :6]
        return F.cross_entropy(self(x), batch["y"])


SIZES: list[int] = []


class Sharp(lt.SAMMixin, Reads):
    sam = lt.SAM(0.1, micro_batch_size=3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        SIZES.append(len(batch["x"]))
        return super().training_step(batch, batch_idx)


TOKENS = torch.randint(10, (8, 16), generator=torch.Generator().manual_seed(0))
TRICKS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "Mixup": (lambda: lt.Mixup(1.0), table),
    "Mixup per sample": (lambda: lt.Mixup(1.0, per_sample=True), table),
    "Mixup of images": (lambda: lt.Mixup(1.0), images),
    "CutMix": (lt.CutMix, images),
    "HiddenMixup": (lambda: lt.HiddenMixup("layers.2"), table),
    "prune": (lt.HardExampleFilter, table),
    "prune by smaller images": (lambda: lt.HardExampleFilter(score_scale=0.5), images),
    "prune by shorter tokens": (
        lambda: lt.HardExampleFilter(score_scale=0.5),
        lambda: named(TOKENS.clone(), Table, columns=NAMES),
    ),
    "loss": (lambda: lt.HardExampleFilter(mode="loss"), table),
    "SequenceLengthWarmup": (
        lambda: lt.SequenceLengthWarmup(0.5, stop=2, multiple_of=1),
        lambda: named(TOKENS.clone(), Table, columns=NAMES),
    ),
    "resize": (lambda: lt.ProgressiveResizing(0.5, stop=2, multiple_of=2), images),
    "crop": (lambda: lt.ProgressiveResizing(0.5, stop=2, multiple_of=2, mode="crop"), images),
    "BatchTransform": (lambda: lt.BatchTransform(lambda x: x + 1), table),
    "BatchTransform of torchvision": (lambda: lt.BatchTransform(v2.RandomHorizontalFlip()), images),
    "CutOut": (lambda: lt.BatchTransform(lt.CutOut()), images),
}


def trained(kind: type[Reads], make: Callable[[], Any], *tricks: Any) -> Any:
    module, batches = build(kind), [{"x": make(), "y": Y} for _ in range(2)]
    fit(module, train=feed(*batches), callbacks=list(tricks), max_epochs=1, limit_val_batches=0)
    return module


@pytest.mark.parametrize("name", TRICKS)
def test_a_trick_hands_on_the_class_of_a_part_and_its_attributes(name: str) -> None:
    trick, make = TRICKS[name]
    module, plain = trained(Reads, make, trick()), trained(Plainly, lambda: make().as_subclass(Tensor), trick())
    assert {type(x) for x in module.seen} == {type(make())}
    assert_equal(weights(module), weights(plain))


class Plainly(Reads):
    """The same of a plain tensor."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch["x"]
        assert type(x) is Tensor
        x = self.embedding(x).mean(1) if not x.is_floating_point() else x.flatten(1)[:, :6]
        return F.cross_entropy(self(x), batch["y"])


def test_sam_hands_it_on_in_micro_batches() -> None:
    SIZES.clear()
    trained(Sharp, table)
    assert set(SIZES) == {8, 3, 2}


def test_tv_tensors_stay_such() -> None:
    class Looks(PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert type(batch[0]) is Image
            return F.cross_entropy(self(batch[0].as_subclass(Tensor).flatten(1)[:, :8]), batch[1])

    for trick in (lt.Mixup(1.0), lt.CutMix(), lt.HardExampleFilter(), lt.BatchTransform(v2.RandomHorizontalFlip())):
        fit(build(Looks), train=feed((Image(images()), Y)), callbacks=[trick], max_epochs=1, limit_val_batches=0)


def test_an_attribute_of_each_sample_is_refused_by_its_path() -> None:
    ids = [f"sample {number}" for number in range(8)]
    for trick in (lt.Mixup(1.0), lt.HardExampleFilter()):
        module = build(Reads)
        batch = {"x": named(table().as_subclass(Tensor), Table, columns=NAMES, ids=ids), "y": Y}
        message = rf"{type(trick).__name__} changes batch\['x'\], a Table with 8 entries in its attribute ids"
        with pytest.raises(MisconfigurationException, match=message):
            fit(module, train=feed(batch), callbacks=[trick], max_epochs=1, limit_val_batches=0)


class Follows(Tensor):
    """Has a name for each sample, which follows it."""

    ids: list[int]

    def __getitem__(self, index: Any) -> Any:
        new = super().__getitem__(index)
        new.ids = [self.ids[number] for number in torch.arange(len(self))[index].tolist()]
        return new


def test_a_class_that_sees_to_its_attributes_is_left_alone() -> None:
    class Looks(PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert torch.equal(batch[0], X[batch[0].ids])
            return F.cross_entropy(self(batch[0].as_subclass(Tensor)), batch[1])

    batch = (named(X.clone(), Follows, ids=list(range(8))), Y)
    fit(build(Looks), train=feed(batch), callbacks=[lt.HardExampleFilter()], max_epochs=1, limit_val_batches=0)


@pytest.mark.parametrize(
    "trick",
    [lt.Mixup, lambda: lt.HiddenMixup("layers.2"), lt.HardExampleFilter, lambda: lt.HardExampleFilter(mode="loss")],
)
def test_a_target_with_attributes_is_refused_by_its_path(trick: Callable[[], Any]) -> None:
    class Classes(Reads):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert batch["y"].columns == NAMES
            return super().training_step(batch, batch_idx)

    batch, made = {"x": table(), "y": named(Y.clone(), Table, columns=NAMES)}, trick()
    message = rf"{type(made).__name__} .*batch\['y'\], a Table"
    with pytest.raises(MisconfigurationException, match=message):
        fit(build(Classes), train=feed(batch), callbacks=[made], max_epochs=1, limit_val_batches=0)


def test_the_memory_format_is_kept() -> None:
    x = torch.rand(2, 3, 8, 8)
    assert in_form_of(x[..., 2:4, 1:7], x, "x", "Test").is_contiguous()
    last = x.contiguous(memory_format=torch.channels_last)
    assert in_form_of(last[..., 2:4, 1:7], last, "x", "Test").is_contiguous(memory_format=torch.channels_last)
    turned = x.transpose(1, 3)
    assert in_form_of(turned[:1], turned, "x", "Test").stride() == turned.stride()
