"""DataWait: the share of waiting is that of loaders that sleep or compute, and the advice is what was measured."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import lightning_tricks as lt
from lightning_tricks.callbacks import data_wait
from lightning_tricks.callbacks.data_wait import useful_workers
from tests.device.devices import CUDA, device
from tests.nets import NormNet, PlainNet, SaveAt, assert_equal, build, data, fit, trained, trainer, weights


def spend(seconds: float, computing: bool) -> None:
    """Sleep, or have a core for so long."""
    if not computing:
        return time.sleep(seconds)
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
    return None


class Slow(Dataset[Any]):
    """Samples that take a while."""

    def __init__(self, seconds: float, size: int = 48, computing: bool = False) -> None:
        self.seconds, self.computing, self.samples = seconds, computing, data(size)
        self.spent = 0.0  # seconds in which this process has loaded samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Any:
        started = time.perf_counter()
        spend(self.seconds, self.computing)
        self.spent += time.perf_counter() - started
        return self.samples[number]


class Working(PlainNet):
    """Its step takes a while."""

    def __init__(self, seconds: float = 0.0, computing: bool = False) -> None:
        super().__init__()
        self.seconds, self.computing = seconds, computing

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        spend(self.seconds, self.computing)
        return super().training_step(batch, batch_idx)


class Shares(Callback):
    """The logged shares."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append(float(trainer.callback_metrics["tricks/data_wait"]))


def measured(samples: Dataset[Any], module: Any, *others: Any, num_workers: int = 0, **settings: Any) -> Any:
    """The last share of a fit that logs at its last step, the message, and all that was logged."""
    callbacks = [lt.DataWait(), *others, shares := Shares()]
    run = trainer(**{"max_epochs": 1, "log_every_n_steps": 1, **settings, "callbacks": callbacks})
    with pytest.warns(UserWarning, match="Training waits for data") as caught:
        run.fit(module, DataLoader(samples, 4, num_workers=num_workers), DataLoader(data(8), 4))
    (said,) = [str(each.message) for each in caught if "waits for data" in str(each.message)]
    return int(re.findall(r"data (\d+)%", said)[0]) / 100, said, shares.seen


# -- the share --------------------------------------------------------------------------------------------------------


def test_the_share_is_that_of_a_loader_that_sleeps() -> None:
    class Epoch(Callback):
        def on_train_epoch_start(self, *_: Any) -> None:
            self.started = time.perf_counter()

        def on_train_epoch_end(self, *_: Any) -> None:
            self.took = time.perf_counter() - self.started

    samples, epoch = Slow(0.01), Epoch()
    share, said, logged = measured(samples, Working(0.04), epoch)
    assert share == pytest.approx(samples.spent / epoch.took, abs=0.06)
    assert 0.3 < share < 0.7
    assert 0.3 < sum(logged) / len(logged) < 0.7
    assert re.search(r"With num_workers=[12] instead of 0 an epoch should be [12]\.\d times faster", said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("per_sample", "work", "num_workers", "truth"),
    [(0.01, 0.04, 0, 0.5), (0.01, 0.12, 0, 0.25), (0.03, 0.04, 0, 0.75), (0.09, 0.12, 2, 1 / 3)],
)
@pytest.mark.parametrize("computing", [False, True])
def test_the_share_is_within_five_points(
    per_sample: float, work: float, num_workers: int, truth: float, computing: bool
) -> None:
    if computing and num_workers:
        pytest.skip("workers and training would share the cores of a small machine")
    size = 4 * (30 + 4 * num_workers)
    share, _, _ = measured(Slow(per_sample, size, computing), Working(work, computing), num_workers=num_workers)
    assert share == pytest.approx(truth, abs=0.05)


def test_validation_is_no_part_of_it() -> None:
    class Validated(Working):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            time.sleep(0.1)

    share, _, _ = measured(Slow(0.02, 24), Validated(0.0), val_check_interval=2)
    assert share > 0.6, "0.44 with validation"


def test_it_begins_anew_with_every_fit_and_warns_once_in_each() -> None:
    callback, module = lt.DataWait(), Working()
    for epochs in (2, 4):
        run = trainer(max_epochs=epochs, callbacks=[callback])
        with pytest.warns(UserWarning, match="Training waits for data") as caught:
            run.fit(module, DataLoader(Slow(0.005, 8), 4), DataLoader(data(8), 4))
        (said,) = [str(each.message) for each in caught if "waits for data" in str(each.message)]
        share = pytest.approx(int(re.findall(r"data (\d+)%", said)[0]) / 100, abs=0.01)
        assert float(run.callback_metrics["tricks/data_wait"]) == share, "nothing was logged yet"


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
def test_an_epoch_that_is_resumed_is_measured_too(tmp_path: Path) -> None:
    fit(PlainNet(), train=DataLoader(data(24), 4), callbacks=[SaveAt(tmp_path / "half.ckpt", step=3)], max_epochs=1)
    shares, again = Shares(), {"train": DataLoader(Slow(0.02, 24), 4), "ckpt_path": tmp_path / "half.ckpt"}
    with pytest.warns(UserWarning, match="Training waits for data"):
        fit(PlainNet(), callbacks=[lt.DataWait(), shares], max_epochs=1, log_every_n_steps=1, **again)
    assert min(shares.seen) > 0.4


def test_a_fit_that_hardly_waits_is_not_warned_of() -> None:
    fit(Working(0.02), callbacks=[lt.DataWait(warn=0.5)], max_epochs=1)


def test_it_changes_nothing() -> None:
    watched = build(NormNet)
    plain = trained(NormNet)
    run = fit(watched, callbacks=[lt.DataWait(warn=1.0)])
    assert_equal(weights(watched), plain)
    assert "_on_before_fetch" not in vars(run.fit_loop.epoch_loop), "nothing stays wrapped"


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor", "ignore:Found `dataloader_iter`")
def test_steps_that_take_an_iterator_are_measured_too() -> None:
    class Own(PlainNet):
        def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:  # type: ignore[override]
            x, y = next(dataloader_iter)[0]
            return F.cross_entropy(self(x), y)

    share, _, _ = measured(Slow(0.02), Own())
    assert share > 0.6


# -- the advice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wait", "work", "cpu", "workers", "cores", "expected"),
    [
        (0.1, 0.1, 0.0, 0, 8, (1, 2.0)),
        (0.3, 0.1, 0.0, 0, 8, (3, 4.0)),
        (0.3, 0.1, 0.0, 0, 2, (2, 0.4 / 0.15)),
        (0.3, 0.1, 0.4, 0, 2, (2, 2.0)),  # all of it computes, so that two cores bring two at most
        (0.1, 0.1, 0.0, 2, 8, (4, 2.0)),
        (0.1, 0.1, 0.0, 4, 4, (4, 1.0)),
        (0.1, 0.1, 0.0, 8, 4, (8, 1.0)),  # more than cores already
    ],
)
def test_the_advice_is_what_the_cores_can_bring(
    wait: float, work: float, cpu: float, workers: int, cores: int, expected: tuple[int, float]
) -> None:
    assert useful_workers(wait, work, cpu, workers, cores) == pytest.approx(expected)


def test_the_cores_are_shared_by_the_devices_and_none_may_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_wait, "available_cores", lambda: 1)
    _, said, _ = measured(Slow(0.01, 16), Working(), num_workers=1)
    assert "would not help on 1 cores for each device: make samples cheaper" in said


def test_each_of_several_loaders_is_to_be_measured() -> None:
    class Both(PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch[0], batch_idx)

    both = [DataLoader(Slow(0.02, 8), 4), DataLoader(data(8), 4)]
    with pytest.warns(UserWarning, match=r"find_num_workers\(loader\) says how many workers each of the loaders needs"):
        trainer(max_epochs=1, callbacks=[lt.DataWait()]).fit(Both(), both, DataLoader(data(8), 4))


def test_what_is_no_data_loader_has_an_advice_of_its_own() -> None:
    class Batches:
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[Any]:
            for batch in DataLoader(data(16), 4):
                time.sleep(0.02)
                yield batch

    with pytest.warns(UserWarning, match=r"Load in other processes, as a DataLoader\(num_workers"):
        trainer(max_epochs=1, callbacks=[lt.DataWait()]).fit(build(PlainNet), Batches(), DataLoader(data(8), 4))


@pytest.mark.slow
def test_the_advice_comes_true() -> None:
    """As many workers as it says give the epoch that it promises, once they have started."""

    class Epoch(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.started = time.perf_counter() if batch_idx == 0 else self.started

        def on_train_epoch_end(self, *_: Any) -> None:
            self.took = time.perf_counter() - self.started

    def seconds(num_workers: int) -> float:
        loader = DataLoader(Slow(0.02, 240), 4, num_workers=num_workers)
        trainer(max_epochs=1, callbacks=[epoch := Epoch()]).fit(Working(0.06), loader, DataLoader(data(8), 4))
        return epoch.took

    _, said, _ = measured(Slow(0.02, 160), Working(0.06))
    found = re.search(r"num_workers=(\d+) instead of 0 an epoch should be (\d\.\d) times faster", said)
    assert found is not None
    assert seconds(0) / seconds(int(found[1])) == pytest.approx(float(found[2]), rel=0.3)


@pytest.mark.parametrize(
    ("wrong", "error"), [(-0.1, ValueError), (1.1, ValueError), ("x", TypeError), (True, TypeError)]
)
def test_wrong_values_are_refused(wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="warn must be"):
        lt.DataWait(warn=wrong)


@pytest.mark.gpu
def test_on_cuda_the_time_counts_in_which_the_device_idles() -> None:
    class Heavy(PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            torch.cuda._sleep(40_000_000)  # the device works on while Python asks for the next batch
            return super().training_step(batch, batch_idx)

    run = trainer(accelerator="cuda", max_epochs=1, log_every_n_steps=12, callbacks=[lt.DataWait(warn=1.0)])
    run.fit(Heavy(), DataLoader(Slow(0.001), 4), DataLoader(data(8), 4))
    assert run.callback_metrics["tricks/data_wait"] < 0.2


@pytest.mark.few(1)
@pytest.mark.parametrize("on", CUDA)
@pytest.mark.parametrize("every", [0, 1])
def test_no_more_events_are_kept_than_the_device_has_batches_to_do(every: int, on: str) -> None:
    class Kept(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            kept.append(len(wait._events))

    wait, kept = lt.DataWait(warn=1.0), list[int]()
    with device(on) as there:
        settings = {"accelerator": there.name, "log_every_n_steps": every, "max_epochs": 4}
        trainer(**settings, callbacks=[wait, Kept()]).fit(PlainNet(), DataLoader(data(40), 4), DataLoader(data(8), 4))
    assert len(kept) == 40
    assert max(kept) <= (4 if there.simulation else 40)
