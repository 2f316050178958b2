"""LabelErrors: losses and margins by sample are those that a module notes by hand, and wrong labels are found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import lightning_tricks as lt
from lightning_tricks.core.replay.rerun import is_replaying
from lightning_tricks.evaluation import LabelReport
from tests.batches import refused
from tests.conformance.test_resume import Resumable
from tests.device.devices import device
from tests.evaluation.recipes import Fails
from tests.nets import (
    NormNet,
    PlainNet,
    SteppedByHand,
    Stream,
    assert_equal,
    build,
    data,
    fit,
    loader,
    quiet,
    trainer,
    weights,
)
from tests.ranks import run_ranks

SAMPLES = 44


def numbered(samples: int = SAMPLES) -> TensorDataset:
    """Samples whose last input is their number, which no weight sees."""
    x, y = data(samples)[:]
    return TensorDataset(torch.cat([x, torch.arange(samples)[:, None].float()], 1), y)


def numbers_loader(shuffle: bool = True, **settings: Any) -> DataLoader[Any]:
    return DataLoader(numbered(), 8, shuffle=shuffle, **settings)


class Noted(PlainNet):
    """Notes loss, margin and probability of every sample by a loop over them, by the number in its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: dict[int, list[list[float]]] = {}

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y)

    def note(self, logits: Tensor, batch: Any) -> None:
        for row, (number, label) in enumerate(zip(batch[0][:, 8].tolist(), torch.Tensor.tolist(batch[1]), strict=True)):
            own, other = logits[row][label].item(), logits[row][1 - label].item()
            loss = self.loss(logits[row : row + 1], torch.tensor([label])).item()
            share = logits[row].softmax(0)[label].item()
            self.noted.setdefault(int(number), []).append([loss, own - other, share])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0][:, :8])
        self.note(logits.detach(), batch)
        return self.loss(logits, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(self(batch[0][:, :8]), batch[1]))


def assert_as_noted(report: Any, noted: dict[int, list[list[float]]]) -> None:
    assert report.sample.tolist() == sorted(noted)
    for row, number in enumerate(sorted(noted)):
        seen = torch.tensor(noted[number], dtype=torch.float64)
        assert int(report.epochs[row]) == len(seen)
        expected = [*seen.mean(0).tolist(), seen[:, 2].std(correction=0).item()]
        columns = (report.loss, report.margin, report.confidence, report.variability)
        assert [float(column[row]) for column in columns] == pytest.approx(expected, abs=2e-4, rel=1e-5)


def test_the_lines_that_a_user_writes(tmp_path: Path) -> None:
    net, train, val = Noted(), numbers_loader(), numbers_loader(shuffle=False)
    callback = lt.LabelErrors(tmp_path / "labels")
    L.Trainer(**{**quiet, "callbacks": [callback]}).fit(net, train, val)
    assert_as_noted(callback.report, net.noted)
    assert sorted(path.name for path in (tmp_path / "labels").iterdir()) == ["label_errors.json", "label_errors.png"]
    found = json.loads((tmp_path / "labels" / "label_errors.json").read_text())
    assert found["sample"][: len(callback.report.suspects())] == callback.report.suspects()
    assert found["label"] == [numbered()[number][1].item() for number in found["sample"]]
    assert found["other"] == [1 - label for label in found["label"]]
    L.Trainer(**{**quiet, "callbacks": [callback]}).fit(net, train, val)
    assert (tmp_path / "labels" / "label_errors-v1.json").exists()


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 3},
    "workers": {"train": numbers_loader(num_workers=2, persistent_workers=True)},
    "not shuffled": {"train": numbers_loader(shuffle=False)},
    "some batches": {"limit_train_batches": 3},
    "clipping": {"gradient_clip_val": 0.1},
    "more epochs": {"max_epochs": 5, "check_val_every_n_epoch": 2},
    "other indices": {"train": DataLoader(Subset(numbered(), range(SAMPLES)), 8, shuffle=True)},
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.filterwarnings("ignore:.*(num_workers|prefetch_factor)")
def test_losses_and_margins_are_those_of_the_step(name: str) -> None:
    settings = {"train": numbers_loader(), "val": numbers_loader(shuffle=False), **SETTINGS[name]}
    ended = []
    for callbacks in ([], [lt.LabelErrors()]):
        torch.manual_seed(3)
        fit(module := build(Noted), callbacks=callbacks, **settings)
        ended.append(module)
    assert_equal(weights(ended[1]), weights(ended[0]))
    assert_as_noted(callbacks[0].report, ended[1].noted)  # type: ignore[union-attr]


def with_loss(loss: Callable[[Tensor, Tensor], Tensor]) -> type[Noted]:
    return type("Noted", (Noted,), {"loss": staticmethod(loss)})


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda logits, y: F.cross_entropy(logits, y, reduction="none").mean(),
    "summed": lambda logits, y: F.cross_entropy(logits, y, reduction="sum") / len(y),
    "nll": lambda logits, y: F.nll_loss(logits.log_softmax(1), y),
    "binary": lambda logits, y: F.binary_cross_entropy_with_logits(logits[:, 1] - logits[:, 0], y.float()),
    "smoothed": lambda logits, y: F.cross_entropy(logits, y, label_smoothing=0.1),
}


class Logged(Noted):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss


class Twice(SteppedByHand, Logged):
    """In manual optimization, with a loss that is only logged."""


class Sharp(lt.SAMMixin, Noted):
    """SAM runs the step a second time with other weights, which does not count."""

    sam = lt.SAM(rho=0.5)

    def note(self, logits: Tensor, batch: Any) -> None:
        if not is_replaying():
            super().note(logits, batch)


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", [*map(with_loss, LOSSES.values()), Twice, Sharp], ids=[*LOSSES, "Twice", "Sharp"])
def test_losses_of_every_form_have_margins(kind: Any) -> None:
    fit(plain := build(kind), train=numbers_loader(shuffle=False))
    fit(module := build(kind), train=numbers_loader(shuffle=False), callbacks=[callback := lt.LabelErrors()])
    assert_equal(weights(module), weights(plain))
    assert_as_noted(callback.report, module.noted)


def test_a_loss_that_is_written_by_hand_is_refused() -> None:
    """The negative of a loss is summed up."""
    kind = with_loss(lambda logits, y: -logits.log_softmax(1).gather(1, y[:, None])[:, 0].mean())
    message = r"Compute the loss by a function of torch\.nn\.functional"
    refused(kind, message, [lt.LabelErrors()], train=numbers_loader())


def test_a_loss_without_logits_is_compared_by_itself() -> None:
    huber = with_loss(lambda logits, y: F.smooth_l1_loss(logits[:, 0], y.float()))
    fit(module := build(huber), train=numbers_loader(), callbacks=[callback := lt.LabelErrors()])
    report = callback.report
    losses = {number: sum(row[0] for row in rows) / len(rows) for number, rows in module.noted.items()}
    assert report.margin.isnan().all()
    assert report.loss.tolist() == pytest.approx([losses[number] for number in range(SAMPLES)], rel=1e-5)
    assert report.suspects(0.25) == sorted(losses, key=lambda number: -losses[number])[:11]
    with pytest.raises(ValueError, match="share must be a number where the loss has no logits"):
        report.suspects()
    assert report.plot()[1].get_xlabel() == "mean loss"


class Tokens(PlainNet):
    """Three labels a sample, of which some are ignored: the first of all samples, and all of the fifth sample."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.seen = self(x)[:, None].expand(-1, 3, -1) * torch.tensor([1.0, 2.0, 3.0])[:, None]
        return F.cross_entropy(self.seen.reshape(-1, 2), y.reshape(-1))


def test_several_labels_of_a_sample_have_their_mean() -> None:
    x, y = data(8)[:]
    y = torch.stack([torch.full_like(y, -100), y, 1 - y], 1)
    y[5] = -100
    callback = lt.LabelErrors()
    fit(module := build(Tokens), train=DataLoader(TensorDataset(x, y), 8), max_epochs=1, callbacks=[callback])
    report, logits = callback.report, module.seen.detach()
    assert report.sample.tolist() == [0, 1, 2, 3, 4, 6, 7]
    for row, number in enumerate(report.sample.tolist()):
        margins = [(logits[number, k, y[number, k]] - logits[number, k, 1 - y[number, k]]).item() for k in (1, 2)]
        assert float(report.margin[row]) == pytest.approx(sum(margins) / 2, rel=1e-4, abs=1e-5)
    assert report.label.tolist() == [-1] * 7


def test_it_looks_between_start_and_stop() -> None:
    class From(Noted):
        def note(self, logits: Tensor, batch: Any) -> None:
            if 0.25 * 24 <= self.global_step < 18:
                super().note(logits, batch)

    callback = lt.LabelErrors(start=0.25, stop=18)
    fit(module := build(From), train=numbers_loader(), max_epochs=4, callbacks=[callback])
    assert_as_noted(callback.report, module.noted)
    assert callback.report.epochs.tolist() == [2] * SAMPLES


# -- going on, and several ranks --------------------------------------------------------------------------------------


def columns(report: Any) -> dict[str, Tensor]:
    return dict(vars(report))


def test_a_fit_that_is_resumed_amid_an_epoch_ends_with_the_same_report(tmp_path: Path) -> None:
    whole, part, rest = lt.LabelErrors(), lt.LabelErrors(), lt.LabelErrors()
    settings = {"max_epochs": 3}
    torch.manual_seed(5)
    fit(build(NormNet), train=loader(shuffle=True), callbacks=[whole], **settings)
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=8, save_top_k=-1)
    torch.manual_seed(5)
    with pytest.raises(RuntimeError, match="died"):
        saving = {"callbacks": [part, save, Fails(10)], "enable_checkpointing": True}
        fit(build(NormNet), train=loader(shuffle=True), **saving, **settings)
    fit(build(NormNet), train=loader(shuffle=True), callbacks=[rest], ckpt_path=tmp_path / "step=8.ckpt", **settings)
    assert_equal(columns(rest.report), columns(whole.report))


def of_ranks(folder: Path, resumed: bool) -> dict[str, Any]:
    """What two ranks have found, and noted."""
    settings: dict[str, Any] = {"devices": 2, "strategy": "ddp", "max_epochs": 3, "use_distributed_sampler": True}
    torch.manual_seed(5)
    callback, module = lt.LabelErrors(), build(Noted)
    if resumed:
        save = ModelCheckpoint(folder, "{step}", every_n_train_steps=5, save_top_k=-1)
        with pytest.raises(RuntimeError, match="died"):
            saving = {"callbacks": [lt.LabelErrors(), save, Fails(6)], "enable_checkpointing": True}
            fit(build(Noted), train=numbers_loader(), **saving, **settings)
        settings["ckpt_path"] = folder / "step=5.ckpt"
    fit(module, train=numbers_loader(), callbacks=[callback], **settings)
    return {"report": columns(callback.report), "noted": module.noted}


@pytest.mark.slow
def test_all_ranks_have_what_all_have_seen_also_after_a_resume(tmp_path: Path) -> None:
    whole = run_ranks(of_ranks, tmp_path, False)
    noted: dict[int, list[list[float]]] = {}
    for rank in whole:
        for number, rows in rank["noted"].items():
            noted.setdefault(number, []).extend(rows)
    assert len(noted) == SAMPLES
    assert sum(map(len, noted.values())) == 3 * SAMPLES
    for rank in whole:
        assert_as_noted(LabelReport(**rank["report"]), noted)
    for rank in run_ranks(of_ranks, tmp_path, True):
        assert_equal(rank["report"], whole[0]["report"])


class Whole(Noted):
    """Has its weights whole in each process of a group that shares a batch."""

    def configure_model(self) -> None:
        pass


def of_one_group() -> dict[str, Any]:
    """What two processes that share their batches have found, and noted."""
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
    callback, module = lt.LabelErrors(), build(Whole)
    fit(module, train=numbers_loader(), callbacks=[callback], devices=2, strategy=strategy)
    return {"report": columns(callback.report), "noted": module.noted}


def test_processes_that_share_a_batch_count_it_once() -> None:
    for rank in run_ranks(of_one_group):
        assert_as_noted(LabelReport(**rank["report"]), rank["noted"])


# -- what is refused --------------------------------------------------------------------------------------------------


def without_one(samples: list[Any]) -> Any:
    return torch.utils.data.default_collate(samples[1:])


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a stream": (
        lambda: DataLoader(Stream(data()), 8),
        "LabelErrors cannot find its place in .* with an IterableDataset",
    ),
    "a loader with a state": (lambda: Resumable(data()), "needs one loader whose sampler gives the number of each"),
    "several loaders": (lambda: [loader(), loader()], "needs one loader whose sampler gives the number of each"),
    "samples left out": (
        lambda: DataLoader(data(), 8, collate_fn=without_one),
        r"got \[0, 1, 2, 3, 4, 5, 6, 7\] for a batch of 7",
    ),
}


class First(PlainNet):
    """Takes the first of several batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch[0] if isinstance(batch[0], list) else batch, batch_idx)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:.*IterableDataset")
def test_samples_without_numbers_are_refused(name: str) -> None:
    make, message = REFUSED[name]
    callback = lt.LabelErrors(target="0.1" if name == "several loaders" else None)
    refused(First, message, [callback], train=make())
    with pytest.raises(ValueError, match="has seen no sample yet"):
        _ = callback.report


def test_a_device_finds_what_the_host_finds() -> None:
    reports = []
    for name in ("host cpu", "simulated cuda"):
        with device(name) as there:
            torch.manual_seed(5)
            callback = lt.LabelErrors()
            fit(build(NormNet), train=loader(shuffle=True), callbacks=[callback], accelerator=there.name)
            reports.append(columns(callback.report))
    assert_equal(reports[1], reports[0])


# -- digits, of which 40% have a wrong label --------------------------------------------------------------------------


class Digits(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 3e-3)


def test_wrong_labels_of_digits_are_found() -> None:
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    generator = torch.Generator().manual_seed(0)
    wrong = torch.rand(len(labels), generator=generator) < 0.4
    labels = torch.where(wrong, (labels + torch.randint(1, 10, labels.shape, generator=generator)) % 10, labels)
    callback = lt.LabelErrors()
    torch.manual_seed(0)
    run = trainer(callbacks=[callback], max_epochs=12)
    run.fit(Digits(), DataLoader(TensorDataset(images.float() / 16, labels), 128, shuffle=True))
    share = float(wrong.float().mean())
    assert wrong[callback.report.suspects(share)].float().mean() > 0.93
    suspects = callback.report.suspects()
    assert wrong[suspects].float().mean() > 0.85
    assert wrong[suspects].sum() > 0.93 * wrong.sum()
