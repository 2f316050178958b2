"""Cases that fresh eyes and random modules found after the first eleven."""

from __future__ import annotations

import array
import copy
import io
import itertools
import pickle
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator, MutableMapping
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, StepLR
from torch.utils.data import DataLoader

import lightning_tricks as lt
from lightning_tricks.core.batches.cutting import select_samples
from tests.core.batches.test_mixing import Watch, naive_loss, naive_mixup, train_by_hand
from tests.nets import PlainNet, assert_close, assert_equal, build, data, fit, loader, trainer, weights


class AttrDict(dict[str, Any]):
    """A dictionary whose keys are attributes, as many projects have one."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


def batches(collate: Callable[[Tensor, Tensor], Any]) -> DataLoader[Any]:
    return DataLoader(data(24), 8, collate_fn=lambda rows: collate(*torch.utils.data.default_collate(rows)))


def refused(kind: type[PlainNet], message: str, callbacks: list[Callback], **settings: Any) -> None:
    """A fit is refused before its first optimizer step."""
    module = build(kind)
    before = weights(module)
    with pytest.raises(MisconfigurationException, match=message):
        fit(module, callbacks=callbacks, limit_val_batches=0, **settings)
    assert_equal(weights(module), before)


# -- state ------------------------------------------------------------------------------------------------------------


class Counts(PlainNet):
    """Its loss depends on what it has counted, in objects of several kinds."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.settings, self.seen = AttrDict(lr=lr), types.SimpleNamespace(steps=0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.steps += 1
        return super().training_step(batch, batch_idx) * self.seen.steps * self.settings.lr


@pytest.mark.parametrize("trick", [lambda: lt.SAMCallback(rho=0.0), lambda: lt.HardExampleFilter(keep=1.0)])
def test_attribute_dictionaries_and_namespaces_are_restored(trick: Callable[[], Callback]) -> None:
    plain, tricked = build(Counts), build(Counts)
    fit(plain)
    fit(tricked, callbacks=[trick()])
    assert_equal(weights(tricked), weights(plain))
    assert tricked.seen.steps == plain.seen.steps


class AverageMeter:
    """A mean as many projects compute it, in an object of a class of their own."""

    def __init__(self) -> None:
        self.total, self.values = 0.0, list[float]()

    def update(self, value: float) -> None:
        self.total += value
        self.values.append(value)


class LockedMeter(AverageMeter):
    """One that threads may share; a lock has no state that Python can restore."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def metered(kind: type[AverageMeter]) -> type[PlainNet]:
    class Metered(PlainNet):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__(lr)
            self.meters = {"loss": kind()}

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss: Tensor = super().training_step(batch, batch_idx)
            self.meters["loss"].update(loss.item())
            return loss

    return Metered


def test_an_object_of_the_users_own_class_counts_a_step_once() -> None:
    plain, sharp, swept = (build(metered(AverageMeter)) for _ in range(3))
    fit(plain)
    fit(sharp, callbacks=[lt.SAMCallback(rho=0.0)])
    lt.find_lr(trainer(), swept, loader())
    assert vars(sharp.meters["loss"]) == vars(plain.meters["loss"])
    assert swept.meters["loss"].values == []


def test_an_object_that_cannot_be_restored_is_refused_by_its_path() -> None:
    message = r"Metered\.meters\['loss'\] \(LockedMeter\) has changed .* cannot be set back"
    refused(metered(LockedMeter), message, [lt.SAMCallback()])
    refused(metered(LockedMeter), message, [lt.HardExampleFilter()])
    with pytest.raises(MisconfigurationException, match=message):
        lt.find_lr(trainer(), build(metered(LockedMeter)), loader())


def test_a_file_is_written_once_or_refused(tmp_path: Path) -> None:
    class Writes(PlainNet):
        hook = "training_step"

        def __init__(self, lr: float = 0.1) -> None:
            super().__init__(lr)
            self.log_file = log_file

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.write("training_step", batch_idx)
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.write("on_train_batch_end", batch_idx)

        def write(self, hook: str, batch_idx: int) -> None:
            if hook == self.hook:
                self.log_file.write(f"{batch_idx}\n")

    with (tmp_path / "refused.txt").open("w") as log_file:
        refused(Writes, r"Writes\.log_file \(TextIOWrapper\) has changed", [lt.SAMCallback()])
    Writes.hook = "on_train_batch_end"
    with (tmp_path / "losses.txt").open("w") as log_file:
        fit(build(Writes), callbacks=[lt.SAMCallback()], max_epochs=1)
    assert (tmp_path / "losses.txt").read_text() == "".join(f"{number}\n" for number in range(6))


@pytest.mark.parametrize(
    "made", [itertools.count, lambda: iter([1, 2]), lambda: (n for n in range(3)), lambda: itertools.cycle("ab")]
)
def test_an_iterator_is_refused_by_its_path(made: Callable[[], Iterator[Any]]) -> None:
    class Draws(PlainNet):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__(lr)
            self.source = made()

    refused(Draws, r"Draws\.source is an iterator", [lt.SAMCallback()])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_buffer_is_no_error() -> None:
    class Buffers(PlainNet):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__(lr)
            self.register_buffer("ragged", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), persistent=False)

    plain, tricked = build(Buffers), build(Buffers)
    fit(plain)
    fit(tricked, callbacks=[lt.SAMCallback(rho=0.0)])
    assert_equal(weights(tricked), weights(plain))


class OwnBackward(PlainNet):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        self.backwards = getattr(self, "backwards", 0) + 1


class WritingBackward(PlainNet):
    """Writes into a buffer, which stays the same object."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.register_buffer("backwards", torch.zeros(()))

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        self.backwards += 1


@pytest.mark.parametrize("kind", [OwnBackward, WritingBackward])
def test_state_that_backward_changes_is_refused_under_sam(kind: type[PlainNet]) -> None:
    refused(kind, rf"{kind.__name__}\.backwards is changed in the backward pass", [lt.SAMCallback()])


HELD: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "bytearray": (bytearray(1), lambda held: held.append(1)),
    "array": (array.array("d", [0.0]), lambda held: held.append(1.0)),
    "NumPy": (numpy.zeros(1), lambda held: held.__iadd__(1)),
    "random.Random": (random.Random(0), lambda held: held.random()),
    "torch.Generator": (torch.Generator(), lambda held: torch.rand(1, generator=held)),
    "NumPy generator": (numpy.random.default_rng(0), lambda held: held.random()),
    "RandomState": (numpy.random.RandomState(0), lambda held: held.rand()),
}


@pytest.mark.parametrize("name", HELD)
def test_arrays_and_generators_that_backward_changes_are_refused_under_sam(name: str) -> None:
    held, change = HELD[name]

    class Holding(PlainNet):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__(lr)
            self.held = [held]

        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            super().backward(loss, *args, **kwargs)
            change(held)

    refused(Holding, r"Holding\.held\[0\] is changed in the backward pass", [lt.SAMCallback()])


# -- batches ----------------------------------------------------------------------------------------------------------


class Opaque:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def to(self, device: Any) -> Opaque:
        return self


class Doubles(PlainNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch.x = batch.x * 2
        return F.cross_entropy(self(batch.x), batch.y)


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
def test_a_step_that_sets_attributes_of_an_object_in_its_batch_is_refused() -> None:
    refused(Doubles, "Doubles.training_step sets an attribute of a Opaque", [lt.SAMCallback()], train=batches(Opaque))


class Keyed(PlainNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch["x"]), batch["y"])


def test_a_batch_that_is_an_attribute_dictionary_is_cut() -> None:
    train = batches(lambda x, y: AttrDict(x=x, y=y))
    if sys.version_info < (3, 11):
        refused(Keyed, "AttrDict, cannot be copied", [lt.HardExampleFilter()], train=train)
    else:
        fit(build(Keyed), train=train, callbacks=[lt.HardExampleFilter()], limit_val_batches=0)


@pytest.mark.parametrize(
    ("name", "part"),
    [("edges", torch.zeros(2, 20, dtype=torch.long)), ("ids", torch.arange(4)), ("time", torch.ones(5, 8, 4))],
)
def test_a_part_that_may_point_to_samples_is_refused_by_its_path(name: str, part: Tensor) -> None:
    train = batches(lambda x, y: {"x": x, "y": y, name: part})
    refused(Keyed, rf"batch\['{name}'\], a tensor", [lt.HardExampleFilter()], train=train)


def test_weights_of_classes_are_the_same_for_all_samples() -> None:
    train = batches(lambda x, y: {"x": x, "y": y, "class_weights": torch.ones(2), "prior": torch.ones(1, 8)})
    fit(build(Keyed), train=train, callbacks=[lt.HardExampleFilter()], limit_val_batches=0)


class Box(MutableMapping[str, Any]):
    """A mapping whose copies share what it holds."""

    def __init__(self, **held: Any) -> None:
        self.held = held

    def __getitem__(self, key: str) -> Any:
        return self.held[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.held[key] = value

    def __delitem__(self, key: str) -> None:
        del self.held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


class KeepsItsBatch(Keyed):
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
def test_a_mapping_whose_copies_share_their_contents_is_refused_by_mixup() -> None:
    boxes = [Box(x=x, y=y) for x, y in DataLoader(data(24), 8)]
    train = DataLoader(boxes, batch_size=None, collate_fn=lambda box: box)  # type: ignore[arg-type]
    refused(KeepsItsBatch, "cannot be changed in a copy of the batch, a Box", [lt.Mixup(1.0)], train=train)


# -- parts of a batch that are neither inputs nor targets -------------------------------------------------------------


ROWS = data(24).tensors
EXTRA, WEIGHT = torch.randn(24, 8, generator=torch.Generator().manual_seed(1)), torch.linspace(0.1, 2, 24)
NUMBERS = torch.arange(24)
mixed_loss = partial(F.cross_entropy, reduction="none")


def feed(make: Callable[[Tensor, Tensor, Tensor], Any]) -> DataLoader[Any]:
    """Batches that are made of inputs, targets and the numbers of samples."""
    batches = [make(ROWS[0][ids], ROWS[1][ids], ids) for ids in NUMBERS.split(8)]
    return DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)  # type: ignore[arg-type]


def with_extra(**extra: Tensor) -> DataLoader[Any]:
    return feed(lambda x, y, ids: {"x": x, "y": y, **{name: part[ids] for name, part in extra.items()}})


def stepping(step: Callable[[Any, Any], Tensor]) -> type[PlainNet]:
    """A module with this training step."""
    return type("Steps", (PlainNet,), {"training_step": lambda self, batch, batch_idx: step(self, batch)})


def weighted(module: Any, batch: Any) -> Tensor:
    return (batch["weight"] * mixed_loss(module(batch["x"]), batch["y"])).mean()


def normed(module: Any, batch: Any) -> Tensor:
    return (mixed_loss(module(batch["x"]), batch["y"]) * (batch["weight"] / batch["weight"].sum())).sum()


def valid_only(module: Any, batch: Any) -> Tensor:
    return mixed_loss(module(batch["x"]), batch["y"])[batch["weight"] > 0.5].mean()


def ignoring(module: Any, batch: Any) -> Tensor:
    return F.cross_entropy(module(batch["x"]), batch["y"].masked_fill(batch["weight"] < 0.5, -100))


def two_labels(module: Any, batch: Any) -> Tensor:
    logits = module(batch["x"])
    return F.cross_entropy(logits, batch["y"]) + F.cross_entropy(logits, (batch["weight"] > 1).long())


@pytest.mark.parametrize("trick", [lambda: lt.Mixup(1.0), lambda: lt.Mixup(1.0, start=0.5)])
@pytest.mark.parametrize("step", [weighted, normed, valid_only, ignoring, two_labels])
def test_a_part_of_the_loss_that_is_not_mixed_with_the_target_is_refused(step: Any, trick: Any) -> None:
    message = r"Mixup.* batch\['weight'\], which is not mixed as the target is.*target=\['y', 'weight'\]"
    refused(stepping(step), message, [trick()], train=with_extra(weight=WEIGHT))


def regression(module: Any, batch: Any) -> Tensor:
    logits = module(batch["x"])
    return F.cross_entropy(logits, batch["y"]) + (batch["weight"] - logits[:, 0]).square().mean()


@pytest.mark.parametrize("step", [two_labels, regression])
def test_a_second_label_is_refused_beside_a_target_that_is_named(step: Any) -> None:
    trick = lt.Mixup(1.0, inputs="x", target="y")
    refused(stepping(step), r"target=\['y', 'weight'\]", [trick], train=with_extra(weight=WEIGHT))


@pytest.mark.parametrize("trick", [lambda: lt.Mixup(1.0), lambda: lt.HiddenMixup("layers.2")])
def test_equal_weights_need_no_name(trick: Callable[[], Any]) -> None:
    train = with_extra(weight=torch.ones(24))
    fit(build(stepping(weighted)), train=train, callbacks=[trick()], limit_val_batches=0, max_epochs=1)


@pytest.mark.parametrize("step", [weighted, normed, ignoring, two_labels])
def test_a_part_of_the_loss_that_is_named_goes_with_its_sample(step: Any) -> None:
    module, hand = build(stepping(step)), build(stepping(step))
    mixup = lt.Mixup(1.0, target=["y", "weight"])
    watch = Watch(mixup)
    fit(module, train=with_extra(weight=WEIGHT), callbacks=[mixup, watch], limit_val_batches=0, max_epochs=1)
    optimizer = hand.configure_optimizers()
    for batch, (lam, index) in zip(with_extra(weight=WEIGHT), watch.drawn, strict=True):
        batch["x"] = naive_mixup(batch["x"], lam, index)
        other = {"x": batch["x"], "y": batch["y"][index], "weight": batch["weight"][index]}
        optimizer.zero_grad()
        (lam * step(hand, batch) + (1 - lam) * step(hand, other)).backward()
        optimizer.step()
    assert_close(weights(module), weights(hand))


def test_a_weight_in_a_tuple_is_refused_with_its_index() -> None:
    def step(module: Any, batch: Any) -> Tensor:
        return (batch[2] * mixed_loss(module(batch[0]), batch[1])).mean()

    train = feed(lambda x, y, ids: (x, y, WEIGHT[ids]))
    refused(stepping(step), r"target=\['1', '2'\]", [lt.Mixup(1.0, inputs=0, target=1)], train=train)
    named = lt.Mixup(1.0, inputs=0, target=["1", "2"])
    fit(build(stepping(step)), train=train, callbacks=[named], limit_val_batches=0)


def added(module: Any, batch: Any) -> Tensor:
    return F.cross_entropy(module(batch["x"] + 0.1 * batch["extra"]), batch["y"])


def written(module: Any, batch: Any) -> Tensor:
    x = batch["x"].clone()
    x[:, 4:] += batch["extra"][:, 4:]
    return F.cross_entropy(module(x), batch["y"])


@pytest.mark.parametrize("step", [added, written])
def test_features_that_are_not_mixed_with_the_inputs_are_refused(step: Any) -> None:
    message = r"Mixup.* batch\['extra'\], which is not mixed.*inputs=\['x', 'extra'\].*inputs=\['x'\]"
    refused(stepping(step), message, [lt.Mixup(1.0)], train=with_extra(extra=EXTRA))


@pytest.mark.parametrize("inputs", ["x", ["x", "extra"]])
def test_named_inputs_are_all_that_is_mixed(inputs: Any) -> None:
    module, hand = build(stepping(added)), build(PlainNet)
    mixup = lt.Mixup(1.0, inputs=inputs)
    watch = Watch(mixup)
    fit(module, train=with_extra(extra=EXTRA), callbacks=[mixup, watch], limit_val_batches=0, max_epochs=1)
    found = train_by_hand(
        hand,
        watch.drawn,
        [((x, extra), y) for x, y, extra in (batch.values() for batch in with_extra(extra=EXTRA))],
        lambda parts, lam, index: (
            naive_mixup(parts[0], lam, index)
            + 0.1 * (naive_mixup(parts[1], lam, index) if "extra" in inputs else parts[1])
        ),
    )
    assert_close(weights(module), found)


class Sorted(PlainNet):
    """Uses numbers of samples, lengths and ages in ways that no mixture of labels depends on."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.embedding, self.seen = nn.Embedding(24, 8), torch.zeros(24)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        order = batch["ids"].argsort(descending=True)
        logits = self(batch["x"][order] + 0.1 * self.embedding(batch["ids"][order]))
        losses = mixed_loss(logits, batch["y"][order])
        self.seen[batch["ids"]] = losses.detach().as_subclass(Tensor)
        self.log("young", losses[batch["age"] < 1].mean())
        self.log("age", batch["age"].mean())
        return losses.sum() / batch["ids"].clamp(1).sum()


@pytest.mark.parametrize("trick", [lambda: lt.Mixup(1.0), lambda: lt.HiddenMixup("layers.2")])
def test_numbers_and_what_is_only_logged_is_no_error(trick: Callable[[], Any]) -> None:
    train = with_extra(ids=NUMBERS, age=WEIGHT, affine=torch.rand(24, 4, 4))
    run = fit(build(Sorted), train=train, callbacks=[trick()], limit_val_batches=0)
    assert run.callback_metrics["age"] > 0


def attending(module: Any, batch: Any) -> Tensor:
    """Features of words, of which some are padding."""
    mask = batch["attention_mask"][..., None]
    return F.cross_entropy(module((module.layers[0].weight[0] * batch["x"] * mask).sum(1) / mask.sum(1)), batch["y"])


@pytest.mark.parametrize("kind", [torch.float32, torch.long, torch.bool])
def test_an_attention_mask_stays_that_of_its_sample_in_any_numbers(kind: torch.dtype) -> None:
    words = torch.randn(24, 5, 8, generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(5) <= NUMBERS[:, None] % 5).to(kind)
    train = feed(lambda x, y, ids: {"x": words[ids], "attention_mask": mask[ids], "y": y})
    module, hand, mixup = build(stepping(attending)), build(stepping(attending)), lt.Mixup(1.0)
    watch = Watch(mixup)
    fit(module, train=train, callbacks=[mixup, watch], limit_val_batches=0, max_epochs=1)
    optimizer = hand.configure_optimizers()
    for batch, (lam, index) in zip(train, watch.drawn, strict=True):
        mixed = {**batch, "x": naive_mixup(batch["x"], lam, index)}
        optimizer.zero_grad()
        other = {**mixed, "y": batch["y"][index]}
        (lam * attending(hand, mixed) + (1 - lam) * attending(hand, other)).backward()
        optimizer.step()
    assert_close(weights(module), weights(hand))


def test_a_weight_that_hidden_mixup_does_not_mix_is_refused() -> None:
    trick = lt.HiddenMixup("layers.2")
    refused(stepping(weighted), r"target=\['y', 'weight'\]", [trick], train=with_extra(weight=WEIGHT))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_network_gets_parts_that_are_not_mixed() -> None:
    torch._dynamo.reset()

    class Compiled(Sorted):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            network = torch.compile(lambda x, ids: self(x + self.embedding(ids)), backend="eager")
            return F.cross_entropy(network(batch["x"], batch["ids"]), batch["y"])

    fit(build(Compiled), train=with_extra(ids=NUMBERS), callbacks=[lt.Mixup(1.0)], limit_val_batches=0, max_epochs=1)


def pictures_in_a_list(x: Tensor, y: Tensor, ids: Tensor) -> Any:
    return {"x": [torch.rand(3, 8, 8 + int(k) % 2) for k in ids], "y": y}


def as_many_columns_as_samples(x: Tensor, y: Tensor, ids: Tensor) -> Any:
    return {"x": [x, ids, torch.ones(2)], "y": y}


@pytest.mark.parametrize("make", [pictures_in_a_list, as_many_columns_as_samples])
def test_lists_of_three_are_known_from_three_columns(make: Any) -> None:
    batch = make(ROWS[0][:3], ROWS[1][:3], NUMBERS[:3])
    few = select_samples(batch, torch.tensor([0, 2]), 3, "Test")
    kept = [batch["x"][0], batch["x"][2]] if make is pictures_in_a_list else [ROWS[0][[0, 2]], NUMBERS[[0, 2]]]
    assert all(map(torch.equal, few["x"], kept))
    assert len(few["x"]) == (2 if make is pictures_in_a_list else 3)


# -- parts for pairs of samples ---------------------------------------------------------------------------------------


def distances(x: Tensor) -> Tensor:
    return torch.cdist(x, x)


def neighbours(x: Tensor) -> Tensor:
    return torch.cdist(x, x) < 4


def alone(module: Any, batch: Any) -> Tensor:
    return F.cross_entropy(module(batch["x"]), batch["y"])


def cutting() -> list[Any]:
    sharp = type("Sharp", (lt.SAMMixin, stepping(alone)), {"sam": lt.SAM(0.1, micro_batch_size=2)})
    plain = stepping(alone)
    return [(plain, lambda: [lt.HardExampleFilter()]), (sharp, list), (plain, lambda: [lt.Mixup(1.0, inputs="x")])]


@pytest.mark.parametrize(("kind", "tricks"), cutting())
@pytest.mark.parametrize("pairs", [distances, neighbours, lambda x: distances(x)[..., None].expand(-1, -1, 2)])
def test_a_matrix_over_pairs_of_samples_is_refused(kind: Any, tricks: Any, pairs: Callable[[Tensor], Tensor]) -> None:
    train = feed(lambda x, y, ids: {"x": x, "y": y, "pairs": pairs(x)})
    refused(kind, r"batch\['pairs'\]", tricks(), train=train)


SQUARE: dict[str, Callable[[Tensor], Tensor]] = {
    "features": lambda ids: EXTRA[ids],
    "one-hot": lambda ids: F.one_hot(ids % 8, 8).float(),
    "mask": lambda ids: torch.ones(8, 8, dtype=torch.bool),
    "windows": lambda ids: EXTRA.flatten().unfold(0, 8, 1)[:8],
    "a few labels": lambda ids: F.one_hot(torch.tensor([1, 0, 2, 3, 4, 5, 6, 7]), 8),
    "positions": lambda ids: torch.arange(8.0).expand(8, 8),
}


@pytest.mark.parametrize(("kind", "tricks"), cutting())
@pytest.mark.parametrize("name", SQUARE)
def test_as_many_features_as_samples_are_no_pairs(kind: Any, tricks: Any, name: str) -> None:
    train = feed(lambda x, y, ids: {"x": x, "y": y, "pairs": SQUARE[name](ids)})
    fit(build(kind), train=train, callbacks=tricks(), limit_val_batches=0, max_epochs=1)


# -- images and masks whose sides cannot be known ---------------------------------------------------------------------


def pictures(image: tuple[int, ...], mask: tuple[int, ...] | None = None) -> DataLoader[Any]:
    return feed(lambda x, y, ids: {"image": torch.rand(8, *image), "y": y if mask is None else torch.rand(8, *mask)})


def flat(module: Any, batch: Any) -> Tensor:
    x = batch["image"].flatten(1)[:, :8]
    return module(x).mean() * 0 + F.mse_loss(module(x).mean(1), torch.rand(8)) + batch["y"].float().mean()


@pytest.mark.parametrize("image", [(16, 16, 3), (16, 12, 1), (9, 16, 12, 4)])
def test_cutmix_refuses_channels_behind_the_image(image: tuple[int, ...]) -> None:
    refused(stepping(flat), r"CutMix .*batch\['image'\].*movedim\(-1, 1\)", [lt.CutMix()], train=pictures(image))


@pytest.mark.parametrize("image", [(3, 16, 3), (3, 16, 16), (64, 4, 4), (64, 1, 1), (13, 16, 16), (1, 16, 16, 4)])
def test_cutmix_takes_channels_before_the_image(image: tuple[int, ...]) -> None:
    def step(module: Any, batch: Any) -> Tensor:
        return F.cross_entropy(module(batch["image"].flatten(1).mean(1, keepdim=True).expand(-1, 8)), batch["y"])

    fit(build(stepping(step)), train=pictures(image), callbacks=[lt.CutMix()], limit_val_batches=0, max_epochs=1)


@pytest.mark.parametrize("image", [(3, 8, 8), (8, 8, 8)])
def test_cutmix_refuses_a_mask_with_as_many_classes_as_rows_and_columns(image: tuple[int, ...]) -> None:
    message = (
        r"which dimensions are height and width in batch\['y'\].*mask of labels without channels.*\(B, 1, D, H, W\)"
    )
    refused(stepping(flat), message, [lt.CutMix()], train=pictures(image, (8, 8, 8)))


@pytest.mark.parametrize("trick", [lambda: lt.CutMix(), lambda: lt.ProgressiveResizing(0.5, stop=9, multiple_of=2)])
@pytest.mark.parametrize("mask", [(8, 8, 8), (1, 8, 8, 8), (2, 8, 8, 8)])
def test_the_mask_of_a_cubic_volume_follows_it(mask: tuple[int, ...], trick: Callable[[], Any]) -> None:
    """Every pixel of the mask tells the volume that it came from."""

    def step(module: Any, batch: Any) -> Tensor:
        volume, mask = batch["image"], batch["y"]
        assert volume.shape[-3:] == mask.shape[-3:]
        assert torch.equal((mask if mask.ndim == 5 else mask[:, None]).mean(1), volume.mean(1))
        found.append(mask.unique().numel())
        return module(volume.mean((1, 2, 3))[:, :1].expand(-1, 8)).sum()

    found: list[int] = []
    pixels = torch.arange(8.0).view(-1, 1, 1, 1, 1)
    batch = {"image": pixels.expand(8, 2, 8, 8, 8).clone(), "y": pixels.view(-1, *[1] * len(mask)).expand(8, *mask)}
    train = DataLoader([batch], batch_size=None, collate_fn=lambda each: each)  # type: ignore[arg-type]
    fit(build(stepping(step)), train=train, callbacks=[trick()], limit_val_batches=0, max_epochs=1)
    assert found == [8]


# -- two sets of samples in one batch ---------------------------------------------------------------------------------


def two_sets(x: Tensor, y: Tensor, ids: Tensor) -> Any:
    """All samples, and those with labels, as SCANVI has them."""
    other = (ids + 1) % 24
    return [{"X": ROWS[0][other], "labels": ROWS[1][other]}, {"X": x, "labels": y}]


def of_both(module: Any, batch: Any) -> Tensor:
    return F.cross_entropy(module(batch[1]["X"]), batch[1]["labels"]) + module(batch[0]["X"]).square().mean()


def test_prune_and_mixup_refuse_two_sets_of_samples() -> None:
    module, train = stepping(of_both), feed(two_sets)
    message = r'cuts all parts of a batch to the same samples, got batch\[0\].*mode="loss"'
    refused(module, message, [lt.HardExampleFilter(target="1.labels")], train=train)
    message = r"inputs and targets of the same samples, got batch\[0\]\['X'\] beside batch\[1\]\['labels'\]"
    refused(module, message, [lt.Mixup()], train=train)
    pair = feed(lambda x, y, ids: tuple((part["X"], part["labels"]) for part in two_sets(x, y, ids)))
    step = stepping(lambda module, batch: F.cross_entropy(module(batch[0][0]), batch[0][1]))
    refused(step, r"got batch\[1\]", [lt.HardExampleFilter(target="0.1")], train=pair)


@pytest.mark.parametrize("trick", [lambda: lt.HardExampleFilter(mode="loss", target="1.labels")])
def test_two_sets_of_samples_may_have_losses_of_their_own(trick: Callable[[], Any]) -> None:
    fit(build(stepping(of_both)), train=feed(two_sets), callbacks=[trick()], limit_val_batches=0, max_epochs=1)


def test_mixup_mixes_one_of_two_sets_of_samples() -> None:
    module, hand, mixup = build(stepping(of_both)), build(PlainNet), lt.Mixup(1.0, inputs="1.X", target="1.labels")
    watch = Watch(mixup)
    fit(module, train=feed(two_sets), callbacks=[mixup, watch], limit_val_batches=0, max_epochs=1)
    optimizer = hand.configure_optimizers()
    for (everything, labelled), (lam, index) in zip(feed(two_sets), watch.drawn, strict=True):
        x, y = naive_mixup(labelled["X"], lam, index), labelled["labels"]
        optimizer.zero_grad()
        (naive_loss(hand(x), y, lam, index) + hand(everything["X"]).square().mean()).backward()
        optimizer.step()
    assert_close(weights(module), weights(hand))


def triplet(module: Any, batch: Any) -> Tensor:
    anchor, positive, negative = (module(batch[name]["x"]) for name in ("anchor", "positive", "negative"))
    return F.triplet_margin_loss(anchor, positive, negative) + F.cross_entropy(anchor, batch["y"])


def two_views(module: Any, batch: Any) -> Tensor:
    return sum((F.cross_entropy(module(view["x"]), view["y"]) for view in batch), start=torch.tensor(0.0))


VIEWS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "anchor, positive, negative": (
        lambda x, y, ids: {**{name: {"x": x + k} for k, name in enumerate(("anchor", "positive", "negative"))}, "y": y},
        triplet,
        {},
    ),
    "two views": (
        lambda x, y, ids: (x, x.flip(1), y),
        lambda module, batch: F.cross_entropy(module(batch[0]) + module(batch[1]), batch[2]),
        {"target": 2},
    ),
    "two views with their labels": (
        lambda x, y, ids: [{"x": x, "y": y}, {"x": x.flip(1), "y": y.clone()}],
        two_views,
        {"target": ["0.y", "1.y"]},
    ),
    "inputs and targets": (
        lambda x, y, ids: ((x[:, :4], x[:, 4:]), (y, 1 - y)),
        lambda module, batch: sum(F.cross_entropy(module(torch.cat(batch[0], 1)), y) for y in batch[1]),
        {"target": ["1.0", "1.1"]},
    ),
    "translation": (
        lambda x, y, ids: {name: {"input_ids": ROWS[1][ids], "mask": ids > k} for k, name in enumerate(("src", "tgt"))},
        lambda module, batch: F.cross_entropy(
            module(batch["src"]["input_ids"][:, None] * torch.ones(8)), batch["tgt"]["input_ids"]
        ),
        {"target": "tgt.input_ids"},
    ),
}


@pytest.mark.parametrize("name", VIEWS)
def test_parts_of_the_same_samples_are_pruned_together(name: str) -> None:
    make, step, named = VIEWS[name]
    sizes: list[int] = []

    def counting(module: Any, batch: Any) -> Tensor:
        torch.utils._pytree.tree_map_only(Tensor, lambda part: sizes.append(len(part)), batch)
        return step(module, batch)

    filtering = lt.HardExampleFilter(**named)
    fit(build(stepping(counting)), train=feed(make), callbacks=[filtering], limit_val_batches=0, max_epochs=1)
    assert set(sizes) == {8, 4}


# -- optimizers -------------------------------------------------------------------------------------------------------


class OwnOptimizer(PlainNet):
    """Steps an optimizer that Lightning does not know."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        self.mine = torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.mine.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.mine.step()


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_a_guard_refuses_the_steps_of_an_optimizer_that_lightning_does_not_know() -> None:
    refused(OwnOptimizer, "OwnOptimizer.training_step steps SGD past Lightning", [lt.SkipNonFinite()])


class ByHand(lt.SAMMixin, PlainNet):
    sam = lt.SAM(0.1)
    automatic_optimization = False

    def loss(self, batch: Any) -> Tensor:
        return PlainNet.training_step(self, batch, 0)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.sam_step(lambda: self.loss(batch))


class Adversarial(ByHand):
    """An optimizer of its own finds the input."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        moved = torch.zeros_like(x, requires_grad=True)
        inner = torch.optim.SGD([moved], lr=0.1)
        (moved.grad,) = torch.autograd.grad(-F.cross_entropy(self(x + moved), y), [moved])
        inner.step()
        return F.cross_entropy(self(x + moved.detach()), y)


class Chained(ByHand):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        chained = ChainedScheduler([StepLR(optimizer, 1), ExponentialLR(optimizer, 0.9)], optimizer=optimizer)
        return [optimizer], [{"scheduler": chained, "interval": "step"}]


def helped(module: Any, batch: Any) -> None:
    module.sam_step(lambda: module.loss(batch))


def decorated(step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def around(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    return around


class PlainAtFirst(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.current_epoch > 0:
            return helped(self, batch)
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))
        return self.optimizers().step()


class Decorated(PlainAtFirst):
    @decorated
    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.current_epoch > 0:
            self.sam_step(lambda: self.loss(batch))
        else:
            PlainAtFirst.training_step(self, batch, batch_idx)


class Helper:
    def __call__(self, module: Any, batch: Any) -> None:
        module.sam_step(lambda: module.loss(batch))


class HoldsAHelper(lt.SAMMixin, PlainNet):
    sam = lt.SAM(0.1)
    automatic_optimization = False

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.helper = Helper()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.current_epoch > 0:
            return self.helper(self, batch)
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))
        return self.optimizers().step()

    def loss(self, batch: Any) -> Tensor:
        return PlainNet.training_step(self, batch, 0)


@pytest.mark.parametrize("kind", [Adversarial, Chained, PlainAtFirst, Decorated, HoldsAHelper])
def test_right_steps_by_hand_are_not_refused(kind: type[PlainNet]) -> None:
    run = fit(build(kind))
    assert run.global_step == 12


class Outside(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.sam_step(lambda: loss)


def test_a_loss_from_outside_of_the_closure_is_refused_with_the_right_lines() -> None:
    message = "the closure of sam_step uses tensors of a forward pass outside of it. Write it so"
    module = build(Outside)
    with pytest.raises(MisconfigurationException, match=message):
        fit(module)
    assert module.trainer.global_step == 0


class Copies(Callback):
    """Pickles and copies the module in a fit, as callbacks of other projects do."""

    def on_train_batch_end(self, trainer: Any, pl_module: pl.LightningModule, *_: Any) -> None:
        torch.save(pl_module.layers, io.BytesIO())
        pickle.dumps({name: value for name, value in vars(pl_module).items() if name in ("backward", "log")})
        copied = copy.deepcopy(pl_module)
        assert copied.backward.wrapper is None
        self.copied = copied.layers


def test_a_module_can_be_pickled_and_copied_in_a_fit_with_sam() -> None:
    copies = Copies()
    fit(build(PlainNet), callbacks=[lt.SAMCallback(), copies])
    assert isinstance(copies.copied, nn.Sequential)


class DrawsNumbers(PlainNet):
    """Draws from generators of its own in every step."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.python, self.numpy, self.system = random.Random(0), numpy.random.default_rng(0), random.SystemRandom()
        self.nested = {"torch": torch.Generator().manual_seed(0), "numpy": numpy.random.RandomState(0)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        drawn = self.python.random() + self.numpy.random() + self.nested["numpy"].rand()
        return super().training_step(batch, batch_idx) * (drawn + torch.rand((), generator=self.nested["torch"]))


@pytest.mark.parametrize("name", ["SAMCallback", "find_lr"])
def test_random_generators_of_a_module_are_restored(name: str) -> None:
    plain, tricked = build(DrawsNumbers), build(DrawsNumbers)
    if name == "find_lr":
        lt.find_lr(trainer(), tricked, loader(), steps=10)
    pl.seed_everything(1, verbose=False)
    fit(plain)
    pl.seed_everything(1, verbose=False)
    fit(tricked, callbacks=[lt.SAMCallback(rho=0.0)] if name == "SAMCallback" else [])
    assert_equal(weights(tricked), weights(plain))


class OwnOptimizerMade(PlainNet):
    """Steps an optimizer that Lightning does not know, as ``made`` says."""

    automatic_optimization = False
    made = "in __init__"

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.mine = [super().configure_optimizers()]

    def configure_optimizers(self) -> Any:
        if self.made == "in configure_optimizers":
            self.mine = [super().configure_optimizers()]
        if self.made == "beside another":
            return torch.optim.SGD([self.layers[0].bias], lr=0.0)
        return self.mine if self.made == "and returned" else None

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.made == "in training_step" and self.current_epoch == batch_idx == 0:
            self.mine = [super().configure_optimizers()]
        self.mine[0].zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.mine[0].step()


MADE = ["in __init__", "in configure_optimizers", "in training_step", "beside another", "and returned"]


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
@pytest.mark.parametrize("made", MADE)
def test_averages_count_the_steps_of_an_optimizer_that_lightning_does_not_know(made: str) -> None:
    ema, known = lt.EMA(0.9), lt.EMA(0.9)
    module = build(OwnOptimizerMade)
    module.made = made
    fit(module, callbacks=[ema])
    fit(build(PlainNet), callbacks=[known])
    assert ema._running.updates == 12
    assert_equal(ema.averaged_state_dict(), known.averaged_state_dict())
    swa, module = lt.SWA(start=0), build(OwnOptimizerMade)
    module.made = made
    fit(module, callbacks=[swa])
    assert swa._running.updates > 0


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
@pytest.mark.parametrize("made", MADE)
def test_averages_that_start_after_steps_that_lightning_does_not_count_are_refused(made: str) -> None:
    module = build(OwnOptimizerMade)
    module.made = made
    with pytest.raises(MisconfigurationException, match=r"EMA\(start=3\) waits .* OwnOptimizerMade steps an optimizer"):
        fit(module, callbacks=[lt.EMA(0.9, start=3)], max_epochs=1)


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_averages_do_not_count_steps_on_other_tensors() -> None:
    class Attack(PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            moved = torch.zeros(8, requires_grad=True)
            moved.grad = torch.ones(8)
            torch.optim.SGD([moved], lr=0.1).step()
            return super().training_step(batch, batch_idx)

    ema = lt.EMA(0.9)
    fit(build(Attack), callbacks=[ema], accumulate_grad_batches=3)
    assert ema._running.updates == 4


class Molecules(NamedTuple):
    """A batch whose parts have positions and names, as that of chemprop."""

    x: Tensor
    nothing: None
    y: Tensor
    weight: Tensor


@pytest.mark.parametrize(("inputs", "target"), [(0, 2), ("x", "y"), (0, "y")])
def test_a_part_of_a_named_tuple_is_the_same_by_position_and_by_name(inputs: Any, target: Any) -> None:
    class Weighted(PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (F.mse_loss(self(batch.x)[:, 0], batch.y, reduction="none") * batch.weight).mean()

    train = batches(lambda x, y: Molecules(x, None, y.float(), torch.ones(len(x))))
    fit(build(Weighted), train=train, callbacks=[lt.Mixup(inputs=inputs, target=target)], limit_val_batches=0)


class Counted(nn.Module):
    """Counts its calls in a closure, which cannot be set back."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.layer, self.fails = nn.Linear(8, 2), fails
        self.count = counter()

    def forward(self, x: Tensor) -> Tensor:
        if self.count() == 2 and self.fails:
            raise RuntimeError("the user's own")
        return torch.tanh(self.layer(x)) * torch.ones_like(x[:, :1])


def counter() -> Callable[[], int]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


@pytest.mark.parametrize(
    ("fails", "error", "message"),
    [
        (False, MisconfigurationException, r"Counted\.count \(function\) has changed"),
        (True, RuntimeError, "the user's own"),
    ],
)
def test_a_recomputed_block_that_counts_is_refused_and_its_own_error_is_not_hidden(
    fails: bool, error: type[Exception], message: str
) -> None:
    class Blocks(PlainNet):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__(lr)
            self.layers = nn.Sequential(Counted(fails))

    with pytest.raises(error, match=message):
        fit(build(Blocks), callbacks=[lt.ActivationCheckpointing("Counted")], limit_val_batches=0)
