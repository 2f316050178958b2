"""SAMCallback: bit-equal to the mixin, also for modules that nobody wrote for it, and refused where it cannot be."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

import lightning_tricks as lt
from tests.conformance.runs import fp16
from tests.nets import NormNet, PlainNet, assert_close, assert_equal, build, fit, loader, trained, trainer, weights

SETTINGS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "as it is": ({}, dict),
    "accumulated and clipped": ({}, lambda: {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "fp16": ({}, fp16),
    "bf16": ({}, lambda: {"precision": "bf16-mixed"}),
    "adaptive": ({"adaptive": True, "eta": 0.1}, dict),
    "every second step": ({"every_n_steps": 2}, dict),
    "micro-batches": ({"micro_batch_size": 2}, dict),
    "some parameters": ({"parameters": "norm"}, dict),
}


def with_mixin(base: type[NormNet], **sam: Any) -> type[NormNet]:
    return type(base)("Sharp", (lt.SAMMixin, base), {"sam": lt.SAM(0.3, **sam)})


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SETTINGS)
def test_it_is_bit_equal_to_the_mixin(name: str) -> None:
    sam, settings = SETTINGS[name]
    mixed = trained(with_mixin(NormNet, **sam), **settings())
    module = trained(NormNet, lt.SAMCallback(0.3, **sam), **settings())
    plain = trained(NormNet, **settings())
    assert_equal(module, mixed)
    assert any(not torch.equal(plain[key], weight) for key, weight in module.items())


class Library(NormNet):
    """A module as a library has it: logs, counts and goes its own way in ``backward``."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.seen, self.backwards = [], 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen.append(batch_idx)
        self.log("own_loss", loss, on_epoch=True, on_step=False)
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)  # without super()


def test_a_backward_of_the_librarys_own_is_used_and_the_second_run_is_not_seen() -> None:
    module = build(Library)
    mixed = trained(with_mixin(NormNet))
    fit(module, callbacks=[lt.SAMCallback(0.3)], max_epochs=2)
    assert_equal(weights(module), mixed)
    assert module.seen == [*range(6)] * 2
    assert not {"backward", "log", "_sam"} & vars(module).keys()
    plain = fit(build(Library), max_epochs=1, callbacks=[lt.SAMCallback(0.0)])
    alone = fit(build(Library), max_epochs=1)
    assert plain.callback_metrics["own_loss"] == alone.callback_metrics["own_loss"]


def test_it_is_resumed_bit_equal_and_a_checkpoint_goes_to_the_mixin(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1)
    fitted = trained(NormNet, lt.SAMCallback(0.3), saving, enable_checkpointing=True)
    for kind, callbacks in ((NormNet, [lt.SAMCallback(0.3)]), (with_mixin(NormNet), [])):
        module = build(kind)
        fit(module, callbacks=callbacks, ckpt_path=tmp_path / "step=6.ckpt")
        assert_equal(weights(module), fitted)


class Manual(PlainNet):
    automatic_optimization = False


@pytest.mark.parametrize(
    ("kind", "callbacks", "message"),
    [
        (Manual, 1, r"got Manual with automatic_optimization=False: make a subclass Manual\(SAMMixin, \.\.\.\)"),
        (PlainNet, 2, r"SAMCallback\(rho=0.05\) and SAMCallback\(rho=0.05\): .*Remove one of them"),
        (with_mixin(PlainNet), 1, r"SAMCallback\(rho=0.05\) and Sharp with SAM\(rho=0.3.*Remove one of them"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_step(kind: type[PlainNet], callbacks: int, message: str) -> None:
    module = build(kind)
    before = weights(module)
    with pytest.raises(MisconfigurationException, match=message):
        fit(module, callbacks=[lt.SAMCallback() for _ in range(callbacks)])
    assert_equal(weights(module), before)


class Failing(PlainNet):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        raise RuntimeError("planned")


def test_nothing_of_it_is_left_in_the_module_after_an_exception() -> None:
    module = build(Failing)
    before = weights(module)
    with pytest.raises(RuntimeError, match="planned"):
        fit(module, callbacks=[lt.SAMCallback()])
    assert not {"backward", "log"} & vars(module).keys()
    assert_equal(weights(module), before)


def test_the_search_for_a_batch_size_runs_steps_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []

    class Counting(PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            runs.append(len(batch[0]))
            return super().training_step(batch, batch_idx)

    def counted(*callbacks: Any) -> list[int]:
        runs.clear()
        module = build(Counting)
        lt.find_batch_size(trainer(callbacks=[*callbacks]), module, loader(16), max_size=4)
        return list(runs)

    assert len(counted(lt.SAMCallback())) == 2 * len(counted())


def test_the_mixin_passes_the_arguments_of_manual_backward_on() -> None:
    gradients: list[Tensor] = []

    class ByHand(lt.SAMMixin, PlainNet):
        sam = lt.SAM(0.1)
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for factor in (1.0, 3.0):
                self.optimizers().zero_grad()
                self.manual_backward(super().training_step(batch, batch_idx), torch.tensor(factor))
                gradients.append(self.layers[0].weight.grad.clone())
            self.sam_step(partial(super().training_step, batch, batch_idx))

    fit(build(ByHand), limit_train_batches=1, max_epochs=1)
    torch.testing.assert_close(gradients[1], 3 * gradients[0])


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")  # transformers 5.24
@pytest.mark.parametrize("micro_batch_size", [None, 4])
def test_the_reentrant_checkpoints_of_a_transformer_are_refused_with_the_remedy(micro_batch_size: int | None) -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> Tensor:
        return module.model(input_ids=(batch[0].abs() * 5).long(), labels=batch[1]).loss

    def module(**settings: Any) -> Any:
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        made = build(type("Checkpointed", (PlainNet,), {"training_step": step}))
        made.model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=50, **sizes)).train()
        made.model.gradient_checkpointing_enable(settings)
        return made

    trick = lt.SAMCallback(micro_batch_size=micro_batch_size)
    remedy = r'SAM sees no gradient in a reentrant checkpoint: .*checkpointing_enable\(\{"use_reentrant": False\}\)'
    with pytest.raises(MisconfigurationException, match=remedy):
        fit(module(use_reentrant=True), callbacks=[trick], max_epochs=1, limit_val_batches=0)
    fit(module(use_reentrant=False), callbacks=[trick], max_epochs=1, limit_val_batches=0)


STAGED: dict[str, Callable[[], Any]] = {
    "LayerFreezing": lambda: lt.LayerFreezing(start=4, stop=8, parameters=["layers.0"]),
    "GradualUnfreeze": lambda: lt.GradualUnfreeze([5], parameters=["layers.0"]),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("staged", STAGED.values(), ids=STAGED)
def test_micro_batches_train_what_is_not_frozen_at_the_time(staged: Callable[[], Any]) -> None:
    plain = trained(PlainNet, staged(), max_epochs=3)
    ours = trained(PlainNet, lt.SAMCallback(rho=0.0, micro_batch_size=4), staged(), max_epochs=3)
    assert_close(ours, plain)
    sharp = trained(PlainNet, lt.SAMCallback(rho=0.2, micro_batch_size=8), staged(), max_epochs=3)
    whole = trained(PlainNet, lt.SAMCallback(rho=0.2), staged(), max_epochs=3)
    assert_close(sharp, whole)


def test_a_loss_of_nothing_that_trains_is_refused_by_name() -> None:
    class Frozen(PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx).detach()

    with pytest.raises(MisconfigurationException, match="The loss of Frozen depends on no weight that trains now"):
        fit(build(Frozen), callbacks=[lt.SAMCallback(micro_batch_size=4)])
