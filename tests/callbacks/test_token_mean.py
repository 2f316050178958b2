"""TokenMean: windows of ragged batches, on any number of ranks, train what one large batch trains."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import lightning_tricks as lt
from tests.conformance.runs import fp16
from tests.losses.test_lean_loss import causal
from tests.nets import PlainNet, SaveAt, ShardedLayers, Steps, assert_close, assert_equal, build, fit, loader, weights
from tests.ranks import Cases, run_cases

IGNORED, WORDS, ACCUMULATED = -100, 11, 3
CLASS_WEIGHTS = torch.arange(1.0, WORDS + 1)


def batches(count: int = 8) -> list[dict[str, Tensor]]:
    """Padded sentences of other lengths in each batch, of whose labels some are ignored; in one of them all are."""
    generator, made = torch.Generator().manual_seed(1), []
    for number in range(count):
        length = int(torch.randint(3, 12, (), generator=generator))
        ids = torch.randint(1, WORDS, (4, length), generator=generator)
        labels = ids.masked_fill(torch.rand(4, length, generator=generator) < 0.1 * number, IGNORED)
        labels[:, 1] = ids[:, 1]
        made.append({"input_ids": ids, "labels": labels})
    made[1]["labels"][:] = IGNORED
    return made


def large(window: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The batches of a window as one."""
    length = max(batch["labels"].shape[1] for batch in window)
    values = {"input_ids": 0, "labels": IGNORED}
    return {
        name: torch.cat([F.pad(batch[name], (0, length - batch[name].shape[1]), value=value) for batch in window])
        for name, value in values.items()
    }


def counted(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"][:, 1:] != IGNORED).sum()


Loss = Callable[[Tensor, Tensor], Tensor]
CE = F.cross_entropy


def of_entries(logits: Tensor, labels: Tensor) -> Tensor:
    """A mean by hand over what is not ignored."""
    return CE(logits, labels, reduction="none")[labels != IGNORED].mean()


def of_two(logits: Tensor, labels: Tensor) -> Tensor:
    """Two losses of the same labels, and a penalty."""
    return CE(logits, labels) + 0.5 * CE(2 * logits, labels) + 1e-3 * logits.new_ones(()).square()


def masked(logits: Tensor, labels: Tensor) -> Tensor:
    """A mean by hand, which is 0 without a target."""
    mask = labels != IGNORED
    return (CE(logits, labels, reduction="none") * mask).sum() / mask.sum().clamp(min=1)


def divided(logits: Tensor, labels: Tensor) -> Tensor:
    """A sum that is divided by a number of Python's."""
    return CE(logits, labels, reduction="sum") / max(1, int((labels != IGNORED).sum()))


def twice(logits: Tensor, labels: Tensor) -> Tensor:
    """Two sums that are divided together."""
    return (0.5 * CE(logits, labels, reduction="sum") + CE(2 * logits, labels, reduction="none").sum()) / (
        labels != IGNORED
    ).sum().clamp(min=1)


def smooth(logits: Tensor, labels: Tensor) -> Tensor:
    return CE(logits, labels, label_smoothing=0.1)


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    return CE(logits, labels, weight=CLASS_WEIGHTS)


def zero_is_padding(logits: Tensor, labels: Tensor) -> Tensor:
    return CE(logits, labels.masked_fill(labels == IGNORED, 0), ignore_index=0)


class Language(L.LightningModule):
    """A small language model."""

    def __init__(self, loss: Loss = CE) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(WORDS, 8), nn.Tanh(), nn.Linear(8, WORDS))
        self.loss, self.logged = loss, []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits, labels = self.layers(batch["input_ids"][:, :-1]), batch["labels"][:, 1:]
        loss = self.loss(logits.flatten(0, 1), labels.flatten())
        self.log("loss", loss, batch_size=4)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(self.layers(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Logged(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))
        returned = outputs["loss"] * trainer.accumulate_grad_batches
        torch.testing.assert_close(returned, trainer.callback_metrics["loss"], equal_nan=True)


def trained(*callbacks: Any, loss: Loss = CE, kind: Any = Language, given: Any = None, **settings: Any) -> Any:
    """A module after a fit of two epochs, whose last window of three is short."""
    module = build(kind, loss=loss)
    given = batches() if given is None else given
    callbacks = (*callbacks, *settings.pop("callbacks", []))
    settings = {"accumulate_grad_batches": ACCUMULATED, "limit_val_batches": 0, **settings}
    fit(module, train=DataLoader(given, batch_size=None), callbacks=[*callbacks], **settings)
    return module


def in_large_batches(loss: Loss = CE, size: int = ACCUMULATED, **settings: Any) -> dict[str, Tensor]:
    """The end weights of a fit with a large batch for each window."""
    given = batches()
    windows = [large(given[first : first + size]) for first in range(0, len(given), size)]
    return weights(trained(loss=loss, given=windows, accumulate_grad_batches=1, **settings))


LOSSES = [CE, of_entries, of_two, smooth, weighted, zero_is_padding, masked, divided, twice]


@pytest.mark.few(5)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_a_large_batch_gives_the_same(loss: Loss) -> None:
    expected, plain = in_large_batches(loss), weights(trained(loss=loss))
    assert_close(weights(trained(lt.TokenMean(), loss=loss)), expected)
    assert any((plain[name] - expected[name]).abs().max() > 1e-3 for name in expected)


@pytest.mark.parametrize("kind", [torch.tensor, int, float, np.int64])
def test_targets_may_be_counted_by_a_function(kind: Any) -> None:
    assert_close(weights(trained(lt.TokenMean(lambda batch: kind(counted(batch).item())))), in_large_batches())


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({"gradient_clip_val": 0.1}, 1e-6),
        ({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, 1e-6),
        ({"precision": "64-true"}, 1e-6),
        (fp16(), 2e-3),
        ({"precision": "bf16-mixed"}, 2e-2),
    ],
    ids=["norm", "value", "fp64", "fp16", "bf16"],
)
def test_so_it_does_with_clips_and_precisions(settings: dict[str, Any], tolerance: float) -> None:
    assert_close(weights(trained(lt.TokenMean(), **settings)), in_large_batches(**settings), tolerance)


@pytest.mark.parametrize("first", [True, False])
def test_clips_of_other_tricks_come_behind_it_in_any_order(first: bool) -> None:
    callbacks = [lt.TokenMean(), lt.AutoClip(0)][:: 1 if first else -1]
    assert_close(weights(trained(*callbacks)), in_large_batches(callbacks=[lt.AutoClip(0)]))


def test_the_loss_that_is_logged_and_returned_is_not_changed() -> None:
    ours, plain = Logged(), Logged()
    trained(lt.TokenMean(), ours, max_epochs=1)
    trained(plain, max_epochs=1)
    assert ours.losses[0] == plain.losses[0]
    assert ours.losses[2] == plain.losses[2]  # before the first step


def test_with_equal_batches_it_is_bit_equal_to_a_fit_without() -> None:
    def ended(*callbacks: Any) -> dict[str, Tensor]:
        module = build(PlainNet)
        fit(module, train=loader(48), callbacks=[*callbacks])
        return weights(module)

    assert_equal(ended(lt.TokenMean()), ended())
    assert_equal(
        weights(trained(lt.TokenMean(), accumulate_grad_batches=1)), weights(trained(accumulate_grad_batches=1))
    )


def test_windows_that_grow_are_followed() -> None:
    scheduler = GradientAccumulationScheduler({0: 2, 1: 4})
    given = batches()
    windows = [large(given[first : first + 2]) for first in range(0, 8, 2)], [large(given[:4]), large(given[4:])]

    class InTurn(IterableDataset[Any]):
        """The windows of the first epoch, and then those of the second."""

        epoch = -1

        def __iter__(self) -> Any:
            self.epoch += 1
            return iter(windows[self.epoch])

    expected = trained(given=InTurn(), accumulate_grad_batches=1)
    assert_close(weights(trained(lt.TokenMean(), scheduler, accumulate_grad_batches=1)), weights(expected))


@pytest.mark.filterwarnings("ignore:.*training_step. returned .None")
@pytest.mark.parametrize("skipped", [0, 2])  # the first and the last batch of a window
def test_a_batch_that_is_skipped_has_no_targets(skipped: int) -> None:
    class Skips(Language):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx % ACCUMULATED == skipped else {"loss": loss}

    kept = [batch for number, batch in enumerate(batches()) if number % ACCUMULATED != skipped]
    windows = [large(kept[first : first + 2]) for first in range(0, len(kept), 2)]
    expected = weights(trained(given=windows, accumulate_grad_batches=1))
    assert_close(weights(trained(lt.TokenMean(), kind=Skips)), expected)


def test_a_window_that_an_epoch_ends_in_does_not_count_in_the_next_one() -> None:
    class Ends(Language):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 4 else None  # whose window has a batch

    given = batches()
    expected = weights(trained(given=[large(given[:3])], accumulate_grad_batches=1))
    assert_close(weights(trained(lt.TokenMean(), kind=Ends)), expected)


@pytest.mark.parametrize("times", [0, 2])
def test_batches_of_which_the_module_does_not_make_one_step_each_count_alone(times: int) -> None:
    class Steps(Language):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer_closure()
            for _ in range(times if batch_idx % 2 else 1):
                optimizer.step()

    settings = {"kind": Steps, "accumulate_grad_batches": 1}
    assert_equal(weights(trained(lt.TokenMean(), **settings)), weights(trained(**settings)))


def test_gradients_that_are_stepped_twice_are_divided_once() -> None:
    class Steps(Language):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer.step(closure=optimizer_closure)
            optimizer.step()

    assert_close(weights(trained(lt.TokenMean(), kind=Steps)), in_large_batches(kind=Steps))


def test_beside_sam_both_runs_count_alike() -> None:
    """A window of one batch, whose perturbation is that of the batch."""

    class Sharp(lt.SAMMixin, Language):
        sam = lt.SAM(0.05)

    class SharpByHand(Language):
        def backward(self, loss: Tensor, *_: Any) -> None:
            own = list(self.parameters())
            gradients = torch.autograd.grad(loss, own)
            norm = torch.stack([g.norm() for g in gradients]).norm()
            with torch.no_grad():
                old = [p.clone() for p in own]
                for p, g in zip(own, gradients, strict=True):
                    p += 0.05 * g / (norm + 1e-12)
            batch = self.batch
            logits = self.layers(batch["input_ids"][:, :-1]).flatten(0, 1)
            share = counted(batch) / self.targets
            again = torch.autograd.grad(CE(logits, batch["labels"][:, 1:].flatten()) * share, own)
            with torch.no_grad():
                for p, g, value in zip(own, again, old, strict=True):
                    p.copy_(value)
                    p.grad = g if p.grad is None else p.grad + g

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.batch, first = batch, batch_idx // ACCUMULATED * ACCUMULATED
            self.targets = sum(counted(each) for each in given[first : first + ACCUMULATED])

    given = [batch for number, batch in enumerate(batches()) if number != 1]
    expected = weights(trained(kind=SharpByHand, given=given))
    assert_close(weights(trained(lt.TokenMean(), kind=Sharp, given=given)), expected)
    for order in (1, -1):
        callbacks = [lt.SAMCallback(0.05), lt.TokenMean()][::order]
        assert_close(weights(trained(*callbacks, given=given)), expected)


def test_the_targets_of_a_transformers_model_are_counted_also_without_logits() -> None:
    class Causal(Language):
        def __init__(self, loss: Loss) -> None:
            super().__init__(loss)
            self.layers, self.model = nn.Identity(), causal("llama")

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss

    expected = in_large_batches(kind=Causal)
    assert_close(weights(trained(lt.TokenMean(), kind=Causal)), expected, 1e-5)
    assert_close(weights(trained(lt.TokenMean(), lt.LeanLoss(), kind=Causal)), expected, 1e-5)
    plain = weights(trained(kind=Causal))
    assert any((plain[name] - expected[name]).abs().max() > 1e-3 for name in expected)


def test_a_run_is_resumed_with_another_function_that_counts(tmp_path: Path) -> None:
    def ended(*callbacks: Callback, **settings: Any) -> dict[str, Tensor]:
        module = build(Language, loss=CE)
        settings |= {"train": DataLoader(batches(), batch_size=None), "accumulate_grad_batches": ACCUMULATED}
        fit(module, callbacks=[lt.TokenMean(lambda batch: counted(batch)), *callbacks], limit_val_batches=0, **settings)
        return weights(module)

    whole = ended(SaveAt(tmp_path / "a.ckpt", epoch=0))
    assert_equal(ended(ckpt_path=tmp_path / "a.ckpt"), whole)


# -- two ranks --------------------------------------------------------------------------------------------------------


class Sharded(ShardedLayers, Language):
    """Under FSDP2."""


class Gather(Callback):
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if isinstance(trainer.strategy, ModelParallelStrategy):
            pl_module.layers.reshard()
        self.weights = weights(pl_module)


def on_ranks(case: tuple[str, int]) -> dict[str, Any]:
    name, accumulated = case
    kind, strategy = (Sharded, ModelParallelStrategy(2, 1)) if name == "fsdp2" else (Language, name)
    settings = {"given": batches()[int(os.environ["RANK"]) :: 2], "devices": 2, "use_distributed_sampler": False}
    settings |= {"accumulate_grad_batches": accumulated, "gradient_clip_val": 0.1}
    trained(lt.TokenMean(), gather := Gather(), kind=kind, strategy=strategy, **settings)
    return gather.weights


CASES = [(strategy, accumulated) for strategy in ("ddp", "fsdp2") for accumulated in (1, 3)]


@pytest.fixture(scope="module")
def ended() -> Cases:
    return run_cases(on_ranks, CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_train_what_one_process_trains(case: tuple[str, int], ended: Cases) -> None:
    first, second = ended[case]
    size = 2 * case[1]
    expected = in_large_batches(size=size, gradient_clip_val=0.1)
    alone = weights(trained(lt.TokenMean(), accumulate_grad_batches=size, gradient_clip_val=0.1))
    assert_equal(first, second)
    for other in (expected, alone):
        assert_close(first, other)


# -- what is refused --------------------------------------------------------------------------------------------------


def by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    return -logits.log_softmax(1).gather(1, labels.clamp(min=0)[:, None]).mean()


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return 1e-3 * CE(logits, labels, reduction="sum")


def by_another(logits: Tensor, labels: Tensor) -> Tensor:
    return CE(logits, labels, reduction="sum") / 1000


def of_others(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum of means over other numbers of targets."""
    return CE(logits, labels) + CE(logits, labels.masked_fill(labels == 1, IGNORED))


def without_targets(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.square().mean()


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (by_hand, r"gather\(\) of the target"),
        (summed, r"a sum of losses does not say by how many"),
        (by_another, r"a sum of losses is divided by 1000, which is not the number of the labels"),
        (of_others, r"means over different numbers of targets"),
        (without_targets, r"no loss of Language.training_step was computed from the targets"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_what_does_not_say_its_targets_is_refused(loss: Loss, why: str) -> None:
    steps = Steps()
    given = [batch for number, batch in enumerate(batches()) if number != 1]
    with pytest.raises(MisconfigurationException, match=why) as caught:
        trained(lt.TokenMean(), steps, loss=loss, given=given)
    assert "Pass TokenMean a function count=" in str(caught.value)
    assert steps.made == 0
    trained(lt.TokenMean(counted), loss=loss, given=given)


def test_a_batch_without_known_targets_is_refused() -> None:
    class Plain(Language):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step({"input_ids": batch, "labels": batch}, batch_idx)

    given = [batch["input_ids"] for batch in batches()]
    with pytest.raises(MisconfigurationException, match="finds no targets in the batch, which has a tensor: int64"):
        trained(lt.TokenMean(), kind=Plain, given=given)
    trained(lt.TokenMean(lambda batch: batch[:, 1:].numel()), kind=Plain, given=given)


def test_the_label_that_is_ignored_by_hand_is_told() -> None:
    def by_hand(logits: Tensor, labels: Tensor) -> Tensor:
        labels = labels.masked_fill(labels == IGNORED, 0)
        kept = labels != 0
        return (CE(logits, labels, reduction="none") * kept).sum() / max(1, kept.sum().item())

    expected = weights(trained(lt.TokenMean(), loss=zero_is_padding))
    assert_equal(
        weights(trained(lt.TokenMean(ignore_index=7), loss=zero_is_padding)), expected
    )  # the loss knows better
    kept = [batch for number, batch in enumerate(batches()) if number != 1]
    windows = [large(kept[first : first + ACCUMULATED]) for first in range(0, len(kept), ACCUMULATED)]
    expected = weights(trained(loss=by_hand, given=windows, accumulate_grad_batches=1))
    assert_close(weights(trained(lt.TokenMean(ignore_index=0), loss=by_hand, given=kept)), expected)
    with pytest.raises(MisconfigurationException, match="which is not the number of the labels"):
        trained(lt.TokenMean(), loss=by_hand, given=[large(kept)])


@pytest.mark.parametrize(("number", "error"), [("three", TypeError), (True, TypeError), (-1, ValueError)])
def test_what_is_no_number_of_targets_is_refused(number: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="count must return"):
        trained(lt.TokenMean(lambda batch: number))


@pytest.mark.parametrize(
    "arguments", [{"count": 3}, {"count": "labels"}, {"ignore_index": 1.0}, {"ignore_index": True}]
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(arguments))} must be"):
        lt.TokenMean(**arguments)


def test_a_loss_that_is_only_logged_does_not_count() -> None:
    class Logs(Language):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            logits, labels = self.layers(batch["input_ids"][:, :-1]).flatten(0, 1), batch["labels"][:, 1:].flatten()
            self.log("first", CE(logits.detach()[:3], labels[:3]), batch_size=3)
            with torch.no_grad():
                self.log("sum", CE(logits, labels, reduction="sum"), batch_size=3)
            return super().training_step(batch, batch_idx)

    assert_equal(weights(trained(lt.TokenMean(), kind=Logs)), weights(trained(lt.TokenMean())))
