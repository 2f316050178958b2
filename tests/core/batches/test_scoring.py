"""What a filter does to batches of every kind, and steps that must not notice being scored."""

from __future__ import annotations

import pathlib
import types
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import transformers
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

import lightning_tricks as lt
from tests.batches import refused
from tests.modules.sam.test_mixin import Stateful
from tests.nets import Net, PlainNet, assert_close, assert_equal, build, data, fit, loader, trainer, weights

modes = pytest.mark.parametrize("mode", ["prune", "loss"])
X, Y = data(8).tensors
CE = F.cross_entropy


def given(*batches: Any) -> DataLoader[Any]:
    """Batches as they are."""
    return DataLoader(list(batches), batch_size=None, collate_fn=lambda batch: batch)


def top(losses: Tensor, count: int | None = None) -> Tensor:
    """The harder half, by a sort of our own."""
    count = max(1, round(len(losses) / 2)) if count is None else count
    return torch.tensor(sorted(sorted(range(len(losses)), key=lambda i: -losses[i].item())[:count]))


@torch.no_grad()
def scored(module: Any, x: Tensor, y: Tensor) -> Tensor:
    """The losses of samples in training mode, from the random numbers that come next; nothing moves."""
    numbers, buffers = torch.get_rng_state(), [buffer.clone() for buffer in module.buffers()]
    losses = CE(module(x), y, reduction="none")
    torch.set_rng_state(numbers)
    for buffer, before in zip(module.buffers(), buffers, strict=True):
        buffer.copy_(before)
    return losses


class Keeping(L.LightningModule):
    """Keeps the batches that it trains on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if torch.is_grad_enabled():
            self.kept.append(batch)
        return super().training_step(batch, batch_idx)


class KeepingNet(Keeping, Net):
    pass


class KeepingPlain(Keeping, PlainNet):
    pass


class Task(PlainNet):
    """A loss of ``batch["x"]`` and ``batch["y"]``, or of these by attributes."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor] = CE, out: int = 2) -> None:
        super().__init__()
        self.layers, self.loss = nn.Sequential(nn.Linear(8, out)), loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self(batch["x"]), batch["y"])


class KeepingTask(Keeping, Task):
    pass


def rows(count: int, *shape: int) -> Tensor:
    return torch.randint(count, (8, *shape), generator=torch.Generator().manual_seed(1))


def run_one(module: Any, batch: Any, *callbacks: Callback, **settings: Any) -> dict[str, Tensor]:
    """The weights after a step on one batch."""
    settings = {"max_epochs": 1, "limit_val_batches": 0, "log_every_n_steps": 1, **settings}
    module.own_run = fit(module, train=given(batch), callbacks=list(callbacks), **settings)
    return weights(module)


# ---- batches


SURROUNDINGS: dict[str, Any] = {
    "strings": list("abcdefgh"),
    "tuple": tuple(range(8)),
    "numpy": Y.numpy() + 0.5,
    "nested": {"deep": [X[:, 0], {"names": list("ijklmnop")}]},
    "for all": torch.zeros(3),
    "number": 7,
    "nothing": None,
}


@pytest.mark.parametrize("pack", [dict, transformers.BatchEncoding])
def test_everything_with_an_entry_a_sample_is_filtered(pack: Any) -> None:
    batch = pack({"x": X, "y": Y, **SURROUNDINGS})
    module = build(KeepingTask)
    kept = top(CE(module(X), Y, reduction="none")).tolist()
    run_one(module, batch, lt.HardExampleFilter())
    (got,) = module.kept
    assert type(got) is pack
    assert torch.equal(got["x"], X[kept])
    assert torch.equal(got["y"], Y[kept])
    assert got["strings"] == ["abcdefgh"[n] for n in kept]
    assert got["tuple"] == tuple(kept)
    assert got["numpy"].tolist() == [Y[n] + 0.5 for n in kept]
    assert torch.equal(got["nested"]["deep"][0], X[kept, 0])
    assert got["nested"]["deep"][1]["names"] == ["ijklmnop"[n] for n in kept]
    assert (len(got["for all"]), got["number"], got["nothing"]) == (3, 7, None)
    assert len(batch["x"]) == len(SURROUNDINGS["nested"]["deep"][0]) == 8  # the loader's own is left alone


@pytest.mark.parametrize(
    "each",
    [lambda n: ["a", str(n)], lambda n: {"id": n}, lambda n: torch.full((n + 1,), n), lambda n: pathlib.Path(str(n))],
    ids=["lists", "dictionaries", "tensors", "paths"],
)
def test_lists_of_objects_are_filtered(each: Any) -> None:
    module = build(KeepingTask)
    kept = top(CE(module(X), Y, reduction="none")).tolist()
    meta = [each(n) for n in range(8)]
    run_one(module, {"x": X, "y": Y, "meta": meta}, lt.HardExampleFilter())
    assert str(module.kept[0]["meta"]) == str([meta[n] for n in kept])


def test_a_batch_that_cannot_be_filtered_is_refused() -> None:
    class ByAttribute(Task):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(vars(batch), batch_idx)

    with pytest.raises(
        MisconfigurationException, match=r"cannot know how samples are stored in batch, a SimpleNamespace"
    ):
        run_one(build(ByAttribute), types.SimpleNamespace(x=X, y=Y), lt.HardExampleFilter(target="y"))


@pytest.mark.parametrize("other", [None, "name", {"id": torch.arange(2)}], ids=["none", "string", "dictionary"])
def test_a_container_of_as_many_parts_as_samples_stays_whole(other: Any) -> None:
    class Inner(Task):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, _ = batch["inputs"]
            return CE(self(x), batch["y"])

    run_one(build(Inner), {"inputs": [X[:2], other], "y": Y[:2]}, lt.HardExampleFilter(target="y"))


# ---- steps that do more than compute


class Writes(Task):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch["x"].mul_(2)
        return super().training_step(batch, batch_idx)


class Pops(Task):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch["inner"].pop("z")
        return super().training_step(batch, batch_idx)


class Teaches(Task):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(2, 2).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.teacher.weight.mul_(0.9)
        return super().training_step(batch, batch_idx)


def test_what_a_step_takes_out_of_its_batch_is_there_again() -> None:
    kept = top(CE(build(Pops)(X), Y, reduction="none").detach())
    ours = run_one(build(Pops), {"x": X, "y": Y, "inner": {"z": 0}}, lt.HardExampleFilter())
    assert_equal(ours, run_one(build(Pops), {"x": X[kept], "y": Y[kept], "inner": {"z": 0}}))


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Writes, "Writes.training_step writes into its batch"), (Teaches, "writes into the frozen parameter teacher.wei")],
)
def test_writes_that_would_be_done_twice_are_refused_and_right_in_loss_mode(kind: type[Task], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        run_one(build(kind), {"x": X.clone(), "y": Y}, lt.HardExampleFilter())
    kept = top(CE(build(kind)(X * (2 if kind is Writes else 1)), Y, reduction="none").detach())
    ours = run_one(build(kind), {"x": X.clone(), "y": Y}, lt.HardExampleFilter(mode="loss"))
    assert_close(ours, run_one(build(kind), {"x": X[kept], "y": Y[kept]}))


def test_weights_that_are_trained_may_be_written() -> None:
    class Bounded(Task):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 8, max_norm=0.5)  # writes into its weights as it looks them up

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return CE(self(self.embed(batch["x"])), batch["y"])

    x = torch.arange(8)
    kept = top(torch.stack([build(Bounded).training_step({"x": x[n], "y": Y[n]}, 0).detach() for n in x]))
    ours = run_one(build(Bounded), {"x": x, "y": Y}, lt.HardExampleFilter())
    alone = run_one(build(Bounded), {"x": x[kept], "y": Y[kept]})
    for end in (ours, alone):
        end["embed.weight"] = end["embed.weight"][kept]  # the others are looked up by the scoring pass alone
    assert_close(ours, alone)


def test_writes_into_tensors_in_a_list_are_refused() -> None:
    class Shrinks(Task):
        def __init__(self) -> None:
            super().__init__()
            self.scales = [torch.ones(1)]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.scales[0].mul_(0.5)
            return self.scales[0] * super().training_step(batch, batch_idx)

    with pytest.raises(MisconfigurationException, match=r"writes into the tensor Shrinks\.scales\[0\]"):
        run_one(build(Shrinks), {"x": X, "y": Y}, lt.HardExampleFilter())


@modes
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_batch_may_be_left_out_by_returning_none(mode: Any) -> None:
    class Second(KeepingTask):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss if batch_idx else None

    module, batch = build(Second), {"x": X, "y": Y}
    fit(module, train=given(batch, batch), callbacks=[lt.HardExampleFilter(mode=mode)], max_epochs=1)
    assert [len(each["y"]) for each in module.kept] == ([8, 4] if mode == "prune" else [8, 8])
    assert_close(weights(module), run_one(build(Task), batch, lt.HardExampleFilter(mode=mode)))


class Recorder(DummyLogger):
    """What was logged, and what was asked of the experiment."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Any] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines += [(name, float(value), step) for name, value in metrics.items() if name[:6] != "tricks"]


class Busy(Keeping, Stateful):
    """Carries all kinds of state, draws random numbers, and logs in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.average = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) + 0.1 * F.dropout(self.layers[0].weight).sum()
        self.average(loss)
        self.log_dict({"step": loss, "mean": self.average}, on_step=True, on_epoch=True)
        self.logger.log_metrics({"by hand": loss.item()}, step=batch_idx)
        return loss


@pytest.mark.parametrize("kind", [Busy, KeepingNet])
def test_scoring_leaves_no_trace_in_statistics_metrics_random_numbers_and_logs(kind: type[Any]) -> None:
    ended = []
    ours, theirs = build(kind), build(kind)
    for module, callbacks in ((ours, [lt.HardExampleFilter()]), (theirs, [])):
        logger, train = Recorder(), given(*ours.kept) if ours.kept else loader()
        run = fit(module, train=train, callbacks=callbacks, logger=logger, max_epochs=1, log_every_n_steps=1)
        metrics = {name: value for name, value in run.callback_metrics.items() if name[:6] != "tricks"}
        ended.append((metrics, logger.lines, torch.get_rng_state().tolist()))
    assert [len(batch[1]) for batch in ours.kept] == [4] * 5 + [2]
    assert_equal(weights(ours), weights(theirs))
    assert ended[0] == ended[1]  # the mean of an epoch too: by the size of what was kept
    if kind is Busy:
        assert (ours.seen, len(ours.losses)) == ({"steps": 6}, 6)
        assert ours.running.compute() == theirs.running.compute()
        assert torch.equal(ours.generator.get_state(), theirs.generator.get_state())


def test_scoring_makes_no_graph_and_runs_in_training_mode_on_the_same_batch_number() -> None:
    steps: list[Any] = []

    class Noting(PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            steps.append((batch_idx, len(batch[1]), self.training, loss.requires_grad))
            return loss

    fit(build(Noting), callbacks=[lt.HardExampleFilter(0.25)], max_epochs=1, limit_train_batches=2)
    assert steps == [(n, size, True, size == 2) for n in (0, 1) for size in (8, 2)]


def test_an_exception_in_scoring_leaves_module_and_trainer_as_they_were() -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            super().training_step(batch, batch_idx)
            self.mark = 1
            if not torch.is_grad_enabled():
                raise ValueError("planned")
            raise AssertionError("not scored")

    module, start, logger = build(Fails), weights(build(Fails)), DummyLogger()
    run = trainer(callbacks=[lt.HardExampleFilter()], logger=logger, log_every_n_steps=1)
    with pytest.raises(ValueError, match="planned"):
        run.fit(module, loader(), loader(24))
    assert_equal(weights(module), start)
    assert not {"log", "mark", "training_step"} & set(vars(module))
    assert not {"batch_to_device", "training_step"} & set(vars(run.strategy))
    assert run.loggers == [logger]
    assert torch.is_grad_enabled()


# ---- cheap scoring


class Images(Task):
    def __init__(self, dense: bool) -> None:
        super().__init__(CE)
        body = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1)]
        self.layers = nn.Sequential(*body, *([] if dense else [nn.AdaptiveAvgPool2d(1), nn.Flatten()]))


class Tokens(Task):
    def __init__(self, dense: bool) -> None:
        super().__init__(lambda z, y: CE(z.flatten(0, -2), y.flatten()))
        self.embed, self.layers, self.dense = nn.Embedding(20, 8), nn.Linear(8, 2), dense

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.embed(batch["x"]) * batch["mask"][..., None]
        return self.loss(self.layers(h if self.dense else h.mean(1)), batch["y"])


class Attends(Tokens):
    def __init__(self) -> None:
        super().__init__(dense=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step({**batch, "mask": batch["attention_mask"]}, batch_idx)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("kind", [Images, Tokens])
def test_samples_are_compared_by_a_smaller_version(kind: Any, dense: bool) -> None:
    images = torch.randn(8, 3, 7, 10, generator=torch.Generator().manual_seed(2))
    if kind is Images:
        y = rows(2, 7, 10) if dense else rows(2)
        small = F.interpolate(y[:, None].float(), (4, 5), mode="nearest")[:, 0].long() if dense else y
        batch, cheap = {"x": images, "y": y}, {"x": F.interpolate(images, (4, 5), mode="bilinear"), "y": small}
    else:
        batch = {"x": rows(20, 7), "mask": rows(2, 7), "y": rows(2, 7) if dense else rows(2)}
        cheap = {name: value[:, :4] if value.ndim == 2 else value for name, value in batch.items()}
    module, reference = build(type(kind)("Kept", (Keeping, kind), {}), dense=dense), build(kind, dense=dense)
    each = [{name: value[n : n + 1] for name, value in cheap.items()} for n in range(8)]
    kept = top(torch.stack([reference.training_step(one, 0).detach() for one in each]))
    run_one(module, batch, lt.HardExampleFilter(score_scale=0.5))
    for name, value in module.kept[0].items():
        assert torch.equal(value, batch[name][kept])


def test_a_mask_of_tokens_in_floating_point_numbers_shrinks_with_them() -> None:
    ends = []
    for kind in (torch.float32, torch.long):
        batch = {"x": rows(20, 7), "attention_mask": rows(2, 7).to(kind), "y": rows(2)}
        ends.append(run_one(build(Attends), batch, lt.HardExampleFilter(score_scale=0.5)))
    assert_equal(*ends)


@pytest.mark.parametrize("kind", [Images, Tokens])
def test_a_smaller_version_can_be_flattened_by_view(kind: Any) -> None:
    def flat(z: Tensor, y: Tensor) -> Tensor:
        z = z.movedim(1, -1).reshape(-1, 2) if kind is Images else z.view(-1, 2)
        return CE(z, y.view(-1))

    def flattened(z: Tensor, y: Tensor) -> Tensor:
        return CE((z.movedim(1, -1) if kind is Images else z).flatten(0, -2), y.flatten())

    images = torch.randn(8, 3, 7, 10, generator=torch.Generator().manual_seed(2))
    tokens = {"x": rows(20, 7), "mask": rows(2, 7), "y": rows(2, 7)}
    batch = {"x": images, "y": rows(2, 7, 10)} if kind is Images else tokens
    ends = []
    for loss in (flat, flattened):
        module = build(kind, dense=True)
        module.loss = loss
        ends.append(run_one(module, batch, lt.HardExampleFilter(score_scale=0.5)))
    assert_equal(*ends)


def test_one_hot_targets_of_the_shape_of_an_image_are_no_mask() -> None:
    images = torch.randn(8, 3, 8, 2, generator=torch.Generator().manual_seed(2))
    batch = {"x": images, "y": F.one_hot(rows(2), 2).float()}
    run_one(build(Images, dense=False), batch, lt.HardExampleFilter(score_scale=0.5))


def test_inputs_that_cannot_be_shrunk_are_refused() -> None:
    with pytest.raises(
        MisconfigurationException, match=r"score_scale=0.5 shrinks images .* got a batch with 0: float32"
    ):
        fit(build(PlainNet), callbacks=[lt.HardExampleFilter(score_scale=0.5)])


class Library(PlainNet):
    """A loss that torch does not know, as libraries have it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        return torch.linalg.vector_norm(logits.sum(0) - F.one_hot(batch[1], 2).float().sum(0))


def test_a_loss_that_cannot_be_taken_apart_is_refused_in_words_for_its_user() -> None:
    refused(Library, r"HardExampleFilter.*leave HardExampleFilter out", [lt.HardExampleFilter(mode="loss")])
