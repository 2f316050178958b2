"""A batch is cut to some of its samples as a whole, or the part that cannot be cut is refused by its path."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_tricks as lt
from lightning_tricks.core.batches.cutting import micro_batches, select_samples
from tests.batches import EXTRA, IDS, ROWS, AttrDict, batches, fed, refused, stepping, with_sam
from tests.core.batches.test_mixing import Watch, naive_loss, naive_mixup
from tests.nets import PlainNet, assert_close, assert_equal, build, data, fit, loader, weights


class Sized(PlainNet):
    """Reads the attribute that a TensorDict has besides its items."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert batch.batch_size[0] == len(batch["x"])
        return F.cross_entropy(self(batch["x"]), batch["y"])


def test_a_tensordict_keeps_its_batch_size() -> None:
    tensordict = pytest.importorskip("tensordict")

    def collate(samples: list[Any]) -> Any:
        x, y = torch.utils.data.default_collate(samples)
        return tensordict.TensorDict({"x": x, "y": y}, batch_size=[len(x)])

    train = DataLoader(loader().dataset, 8, collate_fn=collate)
    kinds = (Sized, with_sam(Sized, rho=0.0), with_sam(Sized, rho=0, micro_batch_size=4))
    plain, sharp, parts = (build(kind) for kind in kinds)
    for module in (plain, sharp, parts):
        fit(module, train=train, limit_val_batches=0)
    assert_equal(weights(plain), weights(sharp))
    assert_close(weights(plain), weights(parts))
    fit(build(Sized), train=train, limit_val_batches=0, callbacks=[lt.HardExampleFilter(0.5)])


class Graph:
    """The inputs of a whole batch, in a class that nobody knows."""

    def __init__(self, x: Tensor) -> None:
        self.nodes = x.repeat_interleave(2, 0)


@dataclass
class GraphBatch:
    graph: Any
    Y: Tensor


@dataclass
class Nodes:
    """The same as a dataclass of tensors, none of which has one entry a sample."""

    x: Tensor
    edges: Tensor


def graphs(kind: str) -> DataLoader[Any]:
    def collate(samples: list[Any]) -> Any:
        x, y = torch.utils.data.default_collate(samples)
        nodes = x.repeat_interleave(2, 0)
        graph = Graph(x) if kind == "opaque" else Nodes(nodes, torch.zeros(2, 40, dtype=torch.long))
        return GraphBatch(graph, y[:, None].float())

    return DataLoader(loader().dataset, 8, collate_fn=collate)


class GraphNet(PlainNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        nodes = batch.graph.nodes if isinstance(batch.graph, Graph) else batch.graph.x
        return F.mse_loss(self(nodes.unflatten(0, (-1, 2)).mean(1))[:, :1], batch.Y)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
@pytest.mark.parametrize("kind", ["opaque", "dataclass"])
def test_a_batch_that_cannot_be_cut_is_refused_by_path(kind: str) -> None:
    path = r"batch\['graph'\], a Graph" if kind == "opaque" else r"batch\['graph'\]\['x'\], a tensor \(16, 8\)"
    refused(GraphNet, rf'{path}: use mode="loss"', [lt.HardExampleFilter(0.5)], train=graphs(kind))
    sharp = with_sam(GraphNet, rho=0.1, micro_batch_size=4)
    refused(sharp, rf"{path}: leave micro_batch_size out", [], train=graphs(kind))
    fit(build(GraphNet), train=graphs(kind), limit_val_batches=0, callbacks=[lt.HardExampleFilter(0.5, mode="loss")])


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


def pictures_in_a_list(x: Tensor, y: Tensor, ids: Tensor) -> Any:
    return {"x": [torch.rand(3, 8, 8 + int(k) % 2) for k in ids], "y": y}


def as_many_columns_as_samples(x: Tensor, y: Tensor, ids: Tensor) -> Any:
    return {"x": [x, ids, torch.ones(2)], "y": y}


@pytest.mark.parametrize("make", [pictures_in_a_list, as_many_columns_as_samples])
def test_lists_of_three_are_known_from_three_columns(make: Any) -> None:
    batch = make(ROWS[0][:3], ROWS[1][:3], IDS[:3])
    few = select_samples(batch, torch.tensor([0, 2]), 3, "Test")
    kept = [batch["x"][0], batch["x"][2]] if make is pictures_in_a_list else [ROWS[0][[0, 2]], IDS[[0, 2]]]
    assert all(map(torch.equal, few["x"], kept))
    assert len(few["x"]) == (2 if make is pictures_in_a_list else 3)


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
    train = fed(lambda x, y, ids: {"x": x, "y": y, "pairs": pairs(x)})
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
    train = fed(lambda x, y, ids: {"x": x, "y": y, "pairs": SQUARE[name](ids)})
    fit(build(kind), train=train, callbacks=tricks(), limit_val_batches=0, max_epochs=1)


def two_sets(x: Tensor, y: Tensor, ids: Tensor) -> Any:
    """All samples, and those with labels, as SCANVI has them."""
    other = (ids + 1) % 24
    return [{"X": ROWS[0][other], "labels": ROWS[1][other]}, {"X": x, "labels": y}]


def of_both(module: Any, batch: Any) -> Tensor:
    return F.cross_entropy(module(batch[1]["X"]), batch[1]["labels"]) + module(batch[0]["X"]).square().mean()


def test_prune_and_mixup_refuse_two_sets_of_samples() -> None:
    module, train = stepping(of_both), fed(two_sets)
    message = r'cuts all parts of a batch to the same samples, got batch\[0\].*mode="loss"'
    refused(module, message, [lt.HardExampleFilter(target="1.labels")], train=train)
    message = r"inputs and targets of the same samples, got batch\[0\]\['X'\] beside batch\[1\]\['labels'\]"
    refused(module, message, [lt.Mixup()], train=train)
    pair = fed(lambda x, y, ids: tuple((part["X"], part["labels"]) for part in two_sets(x, y, ids)))
    step = stepping(lambda module, batch: F.cross_entropy(module(batch[0][0]), batch[0][1]))
    refused(step, r"got batch\[1\]", [lt.HardExampleFilter(target="0.1")], train=pair)


@pytest.mark.parametrize("trick", [lambda: lt.HardExampleFilter(mode="loss", target="1.labels")])
def test_two_sets_of_samples_may_have_losses_of_their_own(trick: Callable[[], Any]) -> None:
    fit(build(stepping(of_both)), train=fed(two_sets), callbacks=[trick()], limit_val_batches=0, max_epochs=1)


def test_mixup_mixes_one_of_two_sets_of_samples() -> None:
    module, hand, mixup = build(stepping(of_both)), build(PlainNet), lt.Mixup(1.0, inputs="1.X", target="1.labels")
    watch = Watch(mixup)
    fit(module, train=fed(two_sets), callbacks=[mixup, watch], limit_val_batches=0, max_epochs=1)
    optimizer = hand.configure_optimizers()
    for (everything, labelled), (lam, index) in zip(fed(two_sets), watch.drawn, strict=True):
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
    fit(build(stepping(counting)), train=fed(make), callbacks=[filtering], limit_val_batches=0, max_epochs=1)
    assert set(sizes) == {8, 4}


def test_micro_batches_have_every_sample_once() -> None:
    batch = {"x": torch.arange(14).view(7, 2), "y": [torch.arange(7)], "for all": torch.ones(3), "text": "a"}
    trick, remedy = "SAM(micro_batch_size=3)", "leave micro_batch_size out"
    cut = micro_batches(partial(lambda b, number: (b, number), batch, 5), 3, trick, remedy)
    assert [share for share, _ in cut] == pytest.approx([3 / 7, 3 / 7, 1 / 7])
    got = [run() for _, run in cut]
    assert torch.equal(torch.cat([each["x"] for each, _ in got]), batch["x"])
    assert torch.equal(torch.cat([each["y"][0] for each, _ in got]), batch["y"][0])
    assert all((len(each["for all"]), each["text"], number) == (3, "a", 5) for each, number in got)
    with pytest.raises(
        MisconfigurationException, match=r"SAM\(micro_batch_size=3\) needs targets with one entry per sample"
    ):
        micro_batches(partial(print, {"a": torch.tensor(1.0)}), 3, trick, remedy)
