"""Behind the transfer of batches: who sees what, what is left behind, and where random numbers come from."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

import lightning_tricks as lt
from lightning_tricks import Mixup
from tests.callbacks.test_mixup import feed
from tests.core.batches.test_mixing import ImageNet, Watch, images
from tests.nets import PlainNet, SteppedByHand, assert_equal, build, fit, loader, trainer, weights

ONCE = {"max_epochs": 1, "limit_val_batches": 0}


def watched(**settings: Any) -> tuple[Watch, list[Any]]:
    mixup = Mixup(1.0, **settings)
    watch = Watch(mixup)
    return watch, [mixup, watch]


# ---- what is left alone


def test_evaluation_sees_the_data_itself_before_between_and_after() -> None:
    plain, compared = list(loader(24)), []

    def compare(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        compared.append(all(map(torch.equal, batch, plain[batch_idx])) and type(batch[1]) is Tensor)

    watch, callbacks = watched()
    spy = LambdaCallback(on_validation_batch_end=compare, on_test_batch_end=compare)
    module, settings = build(PlainNet), {"val_check_interval": 2, "num_sanity_val_steps": 2}
    run = fit(module, callbacks=[*callbacks, spy], **settings)
    run.validate(module, loader(24), verbose=False)
    run.test(module, loader(24), verbose=False)
    assert compared == [True] * (2 + 6 * 3 + 3 + 3)
    assert all(watch.drawn)


@pytest.mark.parametrize("kind", [lt.Mixup, lt.CutMix, lambda alpha: lt.ProgressiveResizing(0.5, multiple_of=1)])
def test_sparse_inputs_are_refused_by_name(kind: Any) -> None:
    batch = {"x": torch.ones(4, 1, 8, 8).to_sparse(), "y": torch.zeros(4, dtype=torch.long)}
    with pytest.raises(MisconfigurationException, match=r"(Mixup|CutMix|Resizing) needs dense inputs .*to_dense\(\)"):
        fit(build(PlainNet), train=feed(batch), callbacks=[kind(1.0)], **ONCE)


@pytest.mark.parametrize("kind", [lt.Mixup, lt.CutMix])
def test_the_data_sets_memory_is_bit_unchanged(kind: Any) -> None:
    batches = list(images())
    before = copy.deepcopy(batches)
    fit(build(ImageNet), train=feed(*batches), val=feed(*batches), callbacks=[kind(1.0)])
    for ours, theirs in zip(batches, before, strict=True):
        assert all(map(torch.equal, ours, theirs))
        assert all(type(part) is Tensor for part in ours)


def states() -> list[Any]:
    numbers = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), numbers[1].tolist(), numbers[2]]


def test_global_random_numbers_are_not_drawn_from() -> None:
    ends = []
    for callbacks in ([], [lt.Mixup(per_sample=True), lt.CutMix(), lt.HiddenMixup("layers.2")]):
        fit(build(ImageNet), train=images(), val=images(), callbacks=callbacks)
        ends.append(states())
    assert ends[0] == ends[1]


# ---- hooks of transfer


class Doubling:
    """Doubles the inputs in each hook of transfer."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return [batch[0].to(device) * 2, batch[1].to(device)]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert type(batch[1]) is Tensor
        return {"x": batch[0] * 2, "label": batch[1]}


class Taking(PlainNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        seen = batch["x"]
        assert torch.equal(seen, lt.functional.mixup(self.plain[batch_idx] * 8, *self.numbers()))
        return F.cross_entropy(self(seen), batch["label"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert torch.equal(batch["x"], self.plain[batch_idx] * 8)


@pytest.mark.parametrize("where", ["module", "datamodule"])
def test_batches_are_mixed_behind_all_hooks_of_transfer(where: str) -> None:
    class Data(Doubling, L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader()

        val_dataloader = train_dataloader

    class Module(Doubling, Taking):
        pass

    mixup, module = Mixup(1.0), build(Module if where == "module" else Taking)
    module.plain = [x for x, _ in loader()]
    module.numbers = lambda: (mixup.drawn.lam, mixup.drawn.index)
    run = trainer(callbacks=[mixup], num_sanity_val_steps=2)
    run.fit(
        module, *([loader(), loader()] if where == "module" else []), datamodule=Data() if where != "module" else None
    )
    assert run.global_step == 12


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
def test_a_step_that_takes_the_iterator_is_refused_by_name_at_setup() -> None:
    class Iterating(PlainNet):
        def training_step(self, dataloader_iter: Any) -> Tensor:
            raise AssertionError

    message = r"Mixup changes the batch .*got Iterating.training_step\(dataloader_iter\)"
    with pytest.raises(MisconfigurationException, match=message):
        fit(build(Iterating), callbacks=[Mixup()])
    trainer(callbacks=[Mixup()]).validate(build(Iterating), loader(), verbose=False)


@pytest.mark.parametrize(
    "step", [lambda self, x, y: self(x).sum(), lambda self, x, y: F.cross_entropy(self(x), torch.tensor(y.tolist()))]
)
def test_a_loss_without_the_target_is_refused(step: Callable[..., Tensor]) -> None:
    module = build(PlainNet)
    module.training_step = lambda batch, batch_idx: step(module, *batch)
    with pytest.raises(MisconfigurationException, match=r"Mixup did nothing to batch 0: .*from the target, batch\[1\]"):
        fit(module, callbacks=[Mixup()])


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_skipped_batches_and_none_are_nobodys_fault() -> None:
    class Skipping(PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx % 2 else super().training_step(batch, batch_idx)

    watch, callbacks = watched()
    fit(build(Skipping), callbacks=callbacks)
    assert len(watch.drawn) == 12
    with pytest.warns(UserWarning, match="yielded None"):
        fit(build(PlainNet), train=feed(None, *loader()), callbacks=[Mixup()], **ONCE)


def test_manual_optimization_may_skip_batches() -> None:
    class Manual(SteppedByHand, PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            if batch_idx % 2 == 0:
                super().training_step(batch, batch_idx)

    assert fit(build(Manual), callbacks=[Mixup()]).global_step == 6


class Auto(PlainNet):
    """Predicts its inputs, which are the target, or trains on two batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = (batch["x"],) * 2 if isinstance(batch, dict) else (batch[0], batch[1])
        assert type(x) is Tensor
        return F.mse_loss(self.layers[0](x).mean(1), y[:, 0])


def test_inputs_that_are_the_target_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"Mixup needs a target that is not an input, got \('x',\)"):
        fit(
            build(Auto), train=feed(*({"x": x} for x, _ in loader())), callbacks=[Mixup(inputs="x", target="x")], **ONCE
        )


def test_an_input_that_is_the_target_by_another_name_is_refused() -> None:
    class Same(PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise AssertionError("mixed twice")

    with pytest.raises(MisconfigurationException, match="that is not an input"):
        fit(build(Same), train=feed(*((x, x) for x, _ in loader())), callbacks=[Mixup(inputs=-1, target=1)], **ONCE)


# ---- nothing is left behind


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("broken")


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("where", "how"),
    [
        *((hook, fail) for hook in ("setup", "on_train_start", "on_train_batch_start", "on_before_backward")),
        *((hook, fail) for hook in ("on_train_batch_end", "on_validation_batch_start", "on_train_epoch_end")),
        ("on_before_backward", interrupt),
        (None, None),
    ],
)
def test_the_wrapper_is_gone_and_a_second_fit_equals_a_fresh_one(where: str | None, how: Any, monkeypatch: Any) -> None:
    callback = Mixup(1.0)
    run = trainer(callbacks=[callback, *([LambdaCallback(**{where: how})] if where else [])])
    expected = {
        None: nullcontext(),
        fail: pytest.raises(RuntimeError, match="broken"),
        interrupt: pytest.raises(SystemExit),
    }
    with expected[how]:
        run.fit(build(PlainNet), loader(), loader(24))
    assert "batch_to_device" not in vars(run.strategy)
    x, y = next(iter(loader()))
    assert torch.equal(run.strategy.batch_to_device((x, y))[0], x)
    again, fresh = build(PlainNet), build(PlainNet)
    watches = [Watch(callback), Watch(Mixup(1.0))]
    for module, watch in zip((again, fresh), watches, strict=True):
        fit(module, callbacks=[*watch.callbacks, watch])
    assert watches[0].numbers() == watches[1].numbers()
    assert_equal(weights(again), weights(fresh))
