"""Modules, batches and callbacks that other people wrote: what broke us once, each in its smallest case."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelPruning
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.utils.data import DataLoader, Dataset

import lightning_tricks as lt
from tests.nets import NormNet, PlainNet, assert_close, assert_equal, build, fit, loader, trainer, weights


def with_sam(kind: type[Any], **settings: Any) -> type[Any]:
    return type(f"Sharp{kind.__name__}", (lt.SAMMixin, kind), {"sam": lt.SAM(**settings)})


# -- 1: other people's callbacks stay ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_callbacks_of_pytorch_lightning_stay() -> None:
    stop = pytorch_lightning.callbacks.EarlyStopping("val_loss", patience=1, min_delta=10.0)
    run = fit(build(PlainNet), callbacks=[stop, lt.EMA()], max_epochs=8)
    assert run.current_epoch == 2
    assert stop in run.callbacks


# -- 2 and 6: the state of a module comes back ------------------------------------------------------------------------


class Aux(PlainNet):
    """Loops over an OrderedDict in its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = OrderedDict(l2=0.5, l1=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        for name, factor in self.aux.items():
            power = 2 if name == "l2" else 1
            loss = loss + 0.01 * factor * sum(p.abs().pow(power).sum() for p in self.parameters())
        return loss


def test_an_ordered_dict_is_not_emptied() -> None:
    plain, sharp, found = build(Aux), build(with_sam(Aux, rho=0.0)), build(Aux)
    fit(plain)
    fit(sharp)
    assert_equal(weights(plain), weights(sharp))
    lt.find_lr(trainer(), found, loader(), steps=10)
    assert list(found.aux.items()) == [("l2", 0.5), ("l1", 0.1)]


class Tagged(list):
    """A list with an attribute."""

    tag = 0


class Limited(OrderedDict):
    """Drops its oldest entries."""

    limit = 3

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        while len(self) > self.limit:
            self.popitem(last=False)


@dataclass
class Record:
    steps: int = 0
    losses: list[float] = field(default_factory=list)


Point = namedtuple("Point", ["seen", "other"])


class Remembers(NormNet):
    """Changes containers of every class in each step, and lets them into its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.ordered, self.grouped, self.counted = OrderedDict(a=1.0, b=2.0), defaultdict(list), Counter()
        self.recent, self.tagged, self.limited = deque(maxlen=2), Tagged([1.0]), Limited(a=1, b=2)
        self.point, self.record, self.user = Point([0.0], {1}), Record(), UserDict(n=0)
        self.within = {"deep": [OrderedDict(x=[1.0])]}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.ordered.move_to_end(next(iter(self.ordered)))
        self.ordered["a"] += 0.1
        self.grouped[batch_idx % 2].append(1.0)
        self.counted["steps"] += 1
        self.recent.append(float(batch_idx))
        self.tagged.append(0.5)
        self.tagged.tag += 1
        self.limited[batch_idx] = 1
        self.point.seen.append(1.0)
        self.point.other.add(batch_idx)
        self.record.steps += 1
        self.record.losses.append(0.25)
        self.user["n"] += 1
        self.within["deep"][0]["x"].append(1.0)
        first = next(iter(self.ordered.values()))
        lengths = [len(self.grouped), len(self.tagged), self.tagged.tag, len(self.limited), len(self.point.seen)]
        lengths += [len(self.point.other), self.record.steps, len(self.record.losses), self.user["n"]]
        lengths += [self.counted["steps"], sum(self.recent), len(self.within["deep"][0]["x"]), first]
        return super().training_step(batch, batch_idx) * (1 + 0.01 * sum(lengths))

    def memory(self) -> list[Any]:
        return [
            *(list(self.ordered.items()), dict(self.grouped), self.grouped.default_factory, dict(self.counted)),
            *(list(self.recent), self.recent.maxlen, list(self.tagged), self.tagged.tag, list(self.limited.items())),
            *(self.point, self.record, dict(self.user), self.within),
        ]


def test_containers_of_every_class_come_back_with_order_limits_and_attributes() -> None:
    plain, sharp = build(Remembers), build(with_sam(Remembers, rho=0.0))
    fit(plain)
    fit(sharp)
    assert_equal(weights(plain), weights(sharp))
    assert plain.memory() == sharp.memory()
    filtered = build(Remembers)
    fit(filtered, callbacks=[lt.HardExampleFilter(0.999)])
    assert filtered.memory() == plain.memory()


class Hidden(PlainNet):
    """Counts in a container that is written in C."""

    def __init__(self) -> None:
        super().__init__()
        from multidict import MultiDict

        self.seen = MultiDict()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.add("step", "1")
        return super().training_step(batch, batch_idx)


def test_a_container_that_cannot_be_restored_is_refused_by_path_before_the_first_step() -> None:
    module = build(with_sam(Hidden, rho=0.1))
    before = weights(module)
    with pytest.raises(MisconfigurationException, match=r"SharpHidden\.seen is a multidict.*MultiDict"):
        fit(module)
    assert_equal(weights(module), before)


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
    plain, sharp, parts = (
        build(Sized),
        build(with_sam(Sized, rho=0.0)),
        build(with_sam(Sized, rho=0, micro_batch_size=4)),
    )
    for module in (plain, sharp, parts):
        fit(module, train=train, limit_val_batches=0)
    assert_equal(weights(plain), weights(sharp))
    assert_close(weights(plain), weights(parts))
    fit(build(Sized), train=train, limit_val_batches=0, callbacks=[lt.HardExampleFilter(0.5)])


# -- 4: a batch is cut as a whole or not at all -----------------------------------------------------------------------


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
    module = build(GraphNet)
    before = weights(module)
    with pytest.raises(MisconfigurationException, match=rf'{path}: use mode="loss"'):
        fit(module, train=graphs(kind), limit_val_batches=0, callbacks=[lt.HardExampleFilter(0.5)])
    assert_equal(weights(module), before)
    sharp = build(with_sam(GraphNet, rho=0.1, micro_batch_size=4))
    with pytest.raises(MisconfigurationException, match=rf"{path}: leave micro_batch_size out"):
        fit(sharp, train=graphs(kind), limit_val_batches=0)
    fit(build(GraphNet), train=graphs(kind), limit_val_batches=0, callbacks=[lt.HardExampleFilter(0.5, mode="loss")])


# -- 5: CutMix pastes spatial targets ---------------------------------------------------------------------------------


class Images(Dataset[Any]):
    """Images whose every pixel tells its class; the masks, and a label of the image."""

    def __init__(self, form: str) -> None:
        self.form = form

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        mask = torch.full((8, 8), index % 3)
        one_hot = F.one_hot(mask, 3).permute(2, 0, 1).float()
        masks = {"mask": mask, "one-hot": one_hot, "multi-channel": torch.cat([one_hot, one_hot]), "both": mask}
        masks["channels-last"] = one_hot.permute(1, 2, 0)
        image = 20 * one_hot - 10
        sample = {"image": image, "mask": masks[self.form]}
        return {**sample, "label": index % 3} if self.form == "both" else sample


class Pixels(pl.LightningModule):
    """A perfect labeller of pixels: its loss is 0 on every image that is what its mask says."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits, mask = self.scale * batch["image"], batch["mask"]
        if mask.ndim == 4:
            mask = mask.permute(0, 3, 1, 2) if mask.shape[1:3] == (8, 8) else mask
            logits = logits.repeat(1, mask.shape[1] // 3, 1, 1)
            loss = F.binary_cross_entropy_with_logits(logits, mask)
        else:
            loss = F.cross_entropy(logits, mask)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Nothing to validate."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize("form", ["mask", "one-hot", "channels-last", "multi-channel"])
def test_cutmix_pastes_spatial_targets(form: str) -> None:
    module, cut = build(Pixels), lt.CutMix(target="mask")
    fit(module, train=DataLoader(Images(form), 8), callbacks=[cut], limit_val_batches=0)
    assert cut.drawn is not None
    assert 0 < cut.drawn.lam < 1
    assert max(module.losses) < 1e-3


def test_cutmix_mixes_labels_beside_masks_by_area() -> None:
    found: list[Tensor] = []

    class Labels(Pixels):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            means = self.scale * batch["image"].mean((2, 3))
            label = F.cross_entropy(means, batch["label"])
            # the share of each class in the pasted mask is its weight in the loss
            shares = F.one_hot(torch.as_tensor(batch["mask"]), 3).flatten(1, 2).float().mean(1)
            found.append(torch.stack([label.detach().as_subclass(Tensor), F.cross_entropy(means, shares).detach()]))
            return loss + label

    cut, module = lt.CutMix(target=["mask", "label"]), build(Labels)
    fit(module, train=DataLoader(Images("both"), 8), callbacks=[cut], limit_val_batches=0)
    assert max(module.losses) < 1e-3
    for mixed, expected in found:
        torch.testing.assert_close(mixed, expected)


def with_part(**extra: Any) -> DataLoader[Any]:
    def collate(samples: list[Any]) -> Any:
        x, y = torch.utils.data.default_collate(samples)
        return {
            "image": x[:, :, None].expand(-1, -1, 8).clone(),
            "label": y,
            **{k: v(len(x)) for k, v in extra.items()},
        }

    return DataLoader(loader().dataset, 8, collate_fn=collate)


class Detector(PlainNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch["image"].mean(-1)), batch["label"])


@pytest.mark.parametrize(
    ("part", "target", "message"),
    [
        (lambda n: torch.zeros(n, 3, 4), ["label", "boxes"], r"batch\['boxes'\], .* \(8, 3, 4\)"),
        (lambda n: torch.zeros(n, 3, 4), None, r"batch\['boxes'\]"),
        (lambda n: torch.zeros(n, 8, 8, dtype=torch.long), None, r"batch\['boxes'\].*name it in target="),
        (lambda n: torch.zeros(n, 4), ["label", "boxes"], r"batch\['boxes'\], .* \(8, 4\)"),
        (lambda n: torch.zeros(n, 4, 4), ["label", "boxes"], r"batch\['boxes'\], .* \(8, 4, 4\)"),
    ],
    ids=["boxes as target", "boxes beside", "a mask that is not named", "a box a sample", "heat maps of another size"],
)
def test_cutmix_refuses_geometry_that_it_cannot_paste(part: Any, target: Any, message: str) -> None:
    module = build(Detector)
    before = weights(module)
    with pytest.raises(MisconfigurationException, match=message):
        fit(module, train=with_part(boxes=part), limit_val_batches=0, callbacks=[lt.CutMix(target=target)])
    assert_equal(weights(module), before)


# -- 7: nothing is refused after training began that could be known before --------------------------------------------


class Manual(PlainNet):
    """Optimizes by hand, and never calls SAM."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self(x), y))
        optimizer.step()


def test_manual_optimization_without_sam_is_refused_before_the_first_optimizer_step() -> None:
    module = build(with_sam(Manual, rho=0.1))
    before = weights(module)
    with pytest.raises(MisconfigurationException, match=r"never called self\.sam_backward"):
        fit(module)
    assert_equal(weights(module), before)


class Ignores(PlainNet):
    """Its loss knows nothing of the target."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()


@pytest.mark.parametrize("kind", [Ignores, type("ManualIgnores", (Manual,), {})])
def test_a_target_that_no_loss_saw_is_refused_before_the_first_optimizer_step(kind: Any) -> None:
    if kind is not Ignores:
        kind.training_step = lambda self, batch, batch_idx: _by_hand(self, self(batch[0]).square().mean())
    for trick in (lt.Mixup(), lt.HardExampleFilter(mode="loss")):
        module = build(kind)
        before = weights(module)
        with pytest.raises(MisconfigurationException, match="did nothing to batch 0"):
            fit(module, callbacks=[trick])
        assert_equal(weights(module), before)


@pytest.mark.parametrize(
    ("kind", "trick", "message"),
    [
        (Ignores, lambda: lt.Mixup(start=0.9), "did nothing to batch 0"),
        (Ignores, lambda: lt.Mixup(prob=1e-9), "did nothing to batch 0"),
        (Ignores, lambda: lt.HardExampleFilter(start=0.9, mode="loss"), "did nothing to batch 0"),
        (Ignores, lambda: lt.HardExampleFilter(start=0.9), "computed no loss"),
        (PlainNet, lambda: lt.CutMix(start=0.9), "needs images"),
        (PlainNet, lambda: lt.Mixup(start=0.9, target="nowhere"), "finds no such tensor"),
        (PlainNet, lambda: lt.HiddenMixup("unused", start=0.9), "did not call the layer 'unused'"),
    ],
)
def test_what_begins_later_is_refused_at_the_first_batch(kind: Any, trick: Any, message: str) -> None:
    module = build(kind)
    module.unused = nn.Linear(8, 8)
    before = weights(module)
    with pytest.raises(MisconfigurationException, match=message):
        fit(module, callbacks=[trick()])
    assert_equal(weights(module), before)


def test_the_first_batch_is_checked_without_a_trace() -> None:
    plain, checked = build(NormNet), build(NormNet)
    tricks = [lt.Mixup(start=1.0, prob=0.5), lt.HiddenMixup("layers.2", start=1.0, prob=0.5)]
    fit(plain)
    fit(checked, callbacks=[*tricks, lt.HardExampleFilter(start=1.0), lt.HardExampleFilter(start=1.0, mode="loss")])
    assert_equal(weights(plain), weights(checked))


def _by_hand(module: Any, loss: Tensor) -> None:
    optimizer = module.optimizers()
    optimizer.zero_grad()
    module.manual_backward(loss)
    optimizer.step()


# -- 8: a step past Lightning's hooks ---------------------------------------------------------------------------------


class Bypasses(PlainNet):
    """Steps torch's optimizer itself."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.optimizer.step() if hasattr(optimizer, "optimizer") else torch.optim.SGD.step(optimizer)


@pytest.mark.parametrize(
    "trick",
    [
        lambda: lt.SkipNonFinite(),
        lambda: lt.RewindOnSpike(),
        lambda: lt.TerminateOnNonFinite(),
        lambda: lt.AutoClip(),
        lambda: lt.AdaptiveClip(),
        lambda: lt.BatchSizeWarmup(lr_rule="linear"),
    ],
    ids=["SkipNonFinite", "RewindOnSpike", "TerminateOnNonFinite", "AutoClip", "AdaptiveClip", "BatchSizeWarmup"],
)
def test_a_step_past_the_hooks_is_refused_before_it_is_made(trick: Any) -> None:
    module = build(Bypasses)
    before = weights(module)
    with pytest.raises(
        MisconfigurationException, match=r"Bypasses\.optimizer_step .*optimizer\.step\(closure=closure\)"
    ):
        fit(module, callbacks=[trick()])
    assert_equal(weights(module), before)


def test_averages_follow_a_step_past_the_hooks() -> None:
    plain, averaged = build(PlainNet), build(Bypasses)
    emas = [lt.EMA(0.9, at_end="raw"), lt.EMA(0.9, at_end="raw")]
    fit(plain, callbacks=emas[:1])
    fit(averaged, callbacks=emas[1:])
    first, second = (ema.averaged_state_dict() for ema in emas)
    assert_close(first, second)


# -- 10: weights that are renamed in mid-fit, and exceptions that stay the user's -------------------------------------


class Renames(Callback):
    """Renames weights in the middle of a fit, as pruning and parametrizations do."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3:
            layer = pl_module.layers[0]
            if self.how == "prune":
                prune.l1_unstructured(layer, "weight", amount=0.3)
            else:
                parametrize.register_parametrization(layer, "weight", nn.Identity())


@pytest.mark.parametrize("how", ["prune", "parametrize"])
def test_averages_follow_weights_that_are_renamed(how: str, tmp_path: Any) -> None:
    class Independent(Callback):
        """An average by position, which no name can disturb."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.parameters = list(pl_module.parameters())
            self.average = [p.detach().clone() for p in self.parameters]

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            for average, parameter in zip(self.average, self.parameters, strict=True):
                average.lerp_(parameter.detach(), 0.1)

    independent, ema, module = Independent(), lt.EMA(0.9, warmup=False, at_end="raw"), build(PlainNet)
    run = fit(module, callbacks=[Renames(how), independent, ema], max_epochs=1)
    found = ema.averaged_state_dict()
    names = {id(p): name for name, p in module.named_parameters()}
    for parameter, average in zip(independent.parameters, independent.average, strict=True):
        torch.testing.assert_close(found[names[id(parameter)]], average)
    run.save_checkpoint(tmp_path / "pruned.ckpt")


def test_averages_work_with_lightnings_pruning() -> None:
    def pruning() -> ModelPruning:
        return ModelPruning("l1_unstructured", amount=0.3, verbose=0, make_pruning_permanent=True)

    module, ema = build(PlainNet), lt.EMA(0.9)
    fit(module, callbacks=[ema, pruning()])
    zeros = {name: weight == 0 for name, weight in module.named_parameters()}
    assert sum(int(zero.sum()) for zero in zeros.values()) > 30
    with ema.averaged(module):
        assert all(weight.isfinite().all() for weight in module.parameters())
    with pytest.raises(MisconfigurationException, match="put EMA before ModelPruning"):
        fit(build(PlainNet), callbacks=[pruning(), lt.EMA(0.9)])
    fit(build(PlainNet), callbacks=[pruning(), lt.EMA(0.9, at_end="raw")])


# Python 3.10 has no notes on exceptions: it is warned instead.
NO_NOTES = pytest.mark.filterwarnings(
    f"{'ignore' if sys.version_info < (3, 11) else 'error'}:EMA could not undo everything:UserWarning"
)


class Loses(Callback):
    """Takes a weight out of the module altogether, then fails."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3:
            pl_module.layers[0] = nn.Linear(8, 16)
            raise KeyError("the user's own error")


@NO_NOTES
def test_the_users_own_error_is_the_one_that_is_raised() -> None:
    with pytest.raises(KeyError, match="the user's own error"):
        fit(build(PlainNet), callbacks=[lt.EMA(0.9), Loses()])


@NO_NOTES
def test_a_weight_that_is_gone_is_refused_by_name() -> None:
    class Replaces(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 3:
                pl_module.layers[0] = nn.Linear(8, 16)

    with pytest.raises(MisconfigurationException, match=r"PlainNet has lost layers\.0\.weight.* EMA"):
        fit(build(PlainNet), callbacks=[lt.EMA(0.9), Replaces()])


# -- 11: any state key ------------------------------------------------------------------------------------------------


class OldKey(Callback):
    @property
    def state_key(self) -> Any:
        return type(self)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 1}


def test_callbacks_may_have_any_state_key(tmp_path: Any) -> None:
    first = fit(build(NormNet), callbacks=[OldKey(), lt.EMA(0.9)], max_epochs=1)
    first.save_checkpoint(tmp_path / "a.ckpt")
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=False)
    assert OldKey in checkpoint["callbacks"]
    second = pl.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, callbacks=[OldKey(), lt.EMA(0.8)]
    )
    second.fit(build(NormNet), loader(), loader(24), ckpt_path=tmp_path / "a.ckpt", weights_only=False)


# -- 9: smaller ones, in words that a library's user can act on -------------------------------------------------------


class Lazy(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.Linear(16, 2))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_layers_are_refused_or_averaged_from_their_first_values_on() -> None:
    seen: list[Tensor] = []

    class See(Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
            if not seen:  # the first forward pass has drawn them
                seen.append(pl_module.layers[0].weight.detach().clone())

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            seen.append(pl_module.layers[0].weight.detach().clone())

    ema = lt.EMA(0.9, warmup=False, at_end="raw")
    fit(build(Lazy), callbacks=[See(), ema], max_epochs=1)
    average = seen[0]
    for weight in seen[1:]:
        average = average.lerp(weight, 0.1)
    assert_close({"layers.0.weight": average}, {"layers.0.weight": ema.averaged_state_dict()["layers.0.weight"]})
    with pytest.raises(MisconfigurationException, match=r"RewindOnSpike needs weights that exist.*layers\.0\.weight"):
        fit(build(Lazy), callbacks=[lt.RewindOnSpike()])


class Sparse(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 8, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0] + self.embedding(batch[1])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("trick", [lt.AdaptiveClip, lt.AutoClip])
def test_sparse_gradients_are_refused_by_name(trick: Any) -> None:
    module = build(Sparse)
    before = weights(module)
    with pytest.raises(MisconfigurationException, match=rf"{trick.__name__} .*sparse.*embedding\.weight.*sparse=False"):
        fit(module, callbacks=[trick()])
    assert_equal(weights(module), before)


class Library(PlainNet):
    """A loss that torch does not know, as libraries have it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        return torch.linalg.vector_norm(logits.sum(0) - F.one_hot(batch[1], 2).float().sum(0))


def test_a_loss_that_cannot_be_taken_apart_is_refused_in_words_for_its_user() -> None:
    module = build(Library)
    before = weights(module)
    with pytest.raises(MisconfigurationException, match=r"HardExampleFilter.*leave HardExampleFilter out"):
        fit(module, callbacks=[lt.HardExampleFilter(mode="loss")])
    assert_equal(weights(module), before)
