"""The purity of SAM's second run, and what it refuses; its naive loop is in test_rules.py."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, LambdaCallback
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MinMaxMetric, RunningMean

import lightning_tricks as lt
from tests.conformance.engines import cpu_deepspeed
from tests.device.devices import CUDA, device
from tests.modules.sam.test_rules import PLAIN, SAMNet, SAMPlainNet, naive
from tests.nets import (
    Net,
    PlainNet,
    assert_close,
    assert_equal,
    build,
    data,
    fit,
    loader,
    rank_loader,
    trainer,
    weights,
)
from tests.ranks import run_ranks

# ---- the second run


def test_both_runs_see_the_same_random_numbers_and_the_log_has_the_loss_of_the_first() -> None:
    draws, losses = [], []  # outside of the module, whose state SAM restores

    class Drawing(SAMNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            draws.append((torch.rand(()).item(), numpy.random.rand(), random.random()))
            loss: Tensor = super().training_step(batch, batch_idx)
            losses.append(loss.item())
            return loss

    run = fit(build(Drawing), max_epochs=1)
    assert len(losses) == 12
    assert draws[0::2] == draws[1::2]
    assert len(set(draws)) == 6
    sizes = [8, 8, 8, 8, 8, 4]
    mean = sum(loss * size for loss, size in zip(losses[0::2], sizes, strict=True)) / 44
    assert run.callback_metrics["train_loss_epoch"].item() == pytest.approx(mean, abs=1e-6)
    assert losses[0::2] != losses[1::2]


def test_a_module_may_use_the_hooks_itself_and_return_a_dictionary() -> None:
    class Busy(SAMPlainNet):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            torch.rand(3)

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
            return {"loss": super().training_step(batch, batch_idx), "other": torch.ones(())}

    ours, theirs = build(Busy), build(PlainNet)
    fit(ours, max_epochs=1)
    naive(theirs, (PLAIN, "32-true", 1, None), list(loader()), epochs=1)
    assert_close(weights(ours), weights(theirs))


class Stateful(Net):
    """Everything that a step may carry over to the next, so that a second run could do harm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(8, 16)),
            torch.nn.Tanh(),
            torch.nn.Linear(16, 2),
        )
        self.register_buffer("center", torch.zeros(2))
        self.carried = torch.zeros(2)
        self.generator = torch.Generator().manual_seed(0)
        self.running = RunningMean(window=4)
        self.range = MinMaxMetric(MeanMetric())
        self.losses: list[Tensor] = []
        self.seen = {"steps": 0}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch = {"x": batch[0], "y": batch[1]} if isinstance(batch, list) else batch
        logits = self(batch.pop("x")) - self.center + 0.1 * self.carried
        loss = F.cross_entropy(logits + 0.1 * torch.randn(2, generator=self.generator), batch["y"])
        self.center.mul_(0.9).add_(logits.detach().mean(0), alpha=0.1)
        self.carried = logits.detach().mean(0)
        self.losses.append(loss.detach())
        self.seen["steps"] += 1
        self.running(loss)
        self.range(loss)
        return loss


def test_rho_zero_is_bit_equal_for_a_module_that_carries_state_from_step_to_step() -> None:
    class Still(lt.SAMMixin, Stateful):
        sam = lt.SAM(rho=0)

    plain, still = build(Stateful), build(Still)
    for module in (plain, still):
        fit(module, train=DataLoader([{"x": x, "y": y} for x, y in data()], batch_size=8), max_epochs=1)
    assert_equal(weights(plain), weights(still))
    assert torch.equal(torch.stack(plain.losses), torch.stack(still.losses))
    assert still.seen == {"steps": 6}
    assert plain.running.compute() == still.running.compute()
    assert plain.range.compute() == still.range.compute()


def test_only_weights_of_the_optimizer_are_perturbed() -> None:
    class Head(SAMPlainNet):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.layers[2].parameters(), lr=0.1)

    class Frozen(Head):
        def __init__(self) -> None:
            super().__init__()
            self.layers[0].requires_grad_(False)

    head, frozen = build(Head), build(Frozen)
    fit(head), fit(frozen)
    assert_equal(weights(head), weights(frozen))


def test_non_reentrant_checkpointing_changes_nothing() -> None:
    class Checkpointed(SAMPlainNet):
        def forward(self, x: Tensor) -> Tensor:
            return self.layers[2](checkpoint(self.layers[:2], x, use_reentrant=False))

    plain, checkpointed = build(SAMPlainNet), build(Checkpointed)
    fit(plain), fit(checkpointed)
    assert_equal(weights(plain), weights(checkpointed))


def test_a_learning_rate_search_works() -> None:
    run, module = trainer(), build(SAMPlainNet)
    found = Tuner(run).lr_find(module, loader(400), loader(24), num_training=20, attr_name="lr")
    assert found is not None
    assert len(found.results["lr"]) >= 10


def test_hyperparameters_with_sam_load_with_weights_only(tmp_path: Any) -> None:
    class Saved(SAMPlainNet):
        def __init__(self, sam: lt.SAM) -> None:
            super().__init__()
            self.sam = sam
            self.save_hyperparameters()

    fit(build(Saved, sam=lt.SAM(0.2))).save_checkpoint(tmp_path / "x.ckpt")
    assert torch.load(tmp_path / "x.ckpt", weights_only=True)["hyper_parameters"]["sam"] == lt.SAM(0.2)


def test_frozen_and_unused_weights_are_left_alone() -> None:
    class Partial(SAMPlainNet):
        def __init__(self) -> None:
            super().__init__()
            self.unused = torch.nn.Linear(2, 2)
            self.layers[0].weight.requires_grad_(False)

    module, start = build(Partial), weights(build(Partial))
    fit(module)
    ended = weights(module)
    for name in ("unused.weight", "layers.0.weight"):
        assert torch.equal(ended[name], start[name])
    assert not torch.equal(ended["layers.0.bias"], start["layers.0.bias"])


def test_a_second_fit_and_a_plain_module_in_the_same_trainer_work() -> None:
    run = fit(build(SAMPlainNet), max_epochs=1)
    assert "training_step" not in vars(run.strategy)
    plain, reference = build(PlainNet), build(PlainNet)
    run.fit_loop.epoch_progress.reset()
    run.fit_loop.max_epochs = 1
    run.fit(plain, loader(), loader(24))
    fit(reference, max_epochs=1)
    assert_equal(weights(plain), weights(reference))


# ---- two processes


def fit_rank(kind: type[Net], rho: float, settings: dict[str, Any]) -> dict[str, Any]:
    module = build(kind)
    module.sam = lt.SAM(rho)
    settings = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False, "max_epochs": 2, **settings}
    fit(module, train=rank_loader(), **settings)
    return {name: value.numpy() for name, value in weights(module).items()}


@pytest.mark.parametrize(
    "settings", [{"strategy": "ddp_find_unused_parameters_true"}, {"strategy": "ddp_bf16"}], ids=str
)
def test_two_ranks_equal_one_rank_with_two_micro_batches(settings: dict[str, Any]) -> None:
    first, second = run_ranks(fit_rank, SAMPlainNet, 0.1, settings)
    assert all((first[name] == second[name]).all() for name in first)
    module = build(SAMPlainNet)
    precision = "bf16-mixed" if settings.get("strategy") == "ddp_bf16" else "32-true"
    fit(module, train=loader(48), accumulate_grad_batches=2, max_epochs=2, precision=precision)
    for name, value in weights(module).items():
        torch.testing.assert_close(torch.from_numpy(first[name]), value, atol=1e-6, rtol=1e-5)


def fit_ranks_accumulating() -> list[dict[str, Any]]:
    return [fit_rank(SAMNet, rho, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}) for rho in (0.0, 0.1)]


def test_ranks_agree_bit_for_bit_with_accumulation_and_clipping() -> None:
    first, second = run_ranks(fit_ranks_accumulating)
    for a, b in zip(first, second, strict=True):
        for name in a:
            if "running" not in name:
                assert (a[name] == b[name]).all(), name


# ---- refusals


def refused(strategy: Callable[..., Strategy], arguments: dict[str, Any]) -> str:
    module = build(SAMPlainNet)
    module.configure_model = lambda: None
    with pytest.raises(MisconfigurationException) as caught:
        fit(module, strategy=strategy(**arguments))
    return str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "arguments", "message"),
    [
        (DDPStrategy, {"static_graph": True}, "Remove static_graph"),
        (cpu_deepspeed, {"stage": 2}, "got CPUDeepSpeedStrategy"),
    ],
)
def test_a_strategy_that_cannot_be_right_is_refused_by_name(
    strategy: Callable[..., Strategy], arguments: dict[str, Any], message: str
) -> None:
    assert message in run_ranks(refused, strategy, arguments, nprocs=1)[0]


def test_the_mixin_after_lightning_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"class Wrong\(SAMMixin, LightningModule\)"):

        class Wrong(Net, lt.SAMMixin):
            pass


class Reentrant(SAMPlainNet):
    def forward(self, x: Tensor) -> Tensor:
        return self.layers[2](checkpoint(self.layers[:2], x.requires_grad_(), use_reentrant=True))


class Sparse(SAMPlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(2, 2, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + self.embedding((x[:, 0] > 0).long())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Inplace(SAMPlainNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch[0].mul_(2)
        return super().training_step(batch, batch_idx)


class OwnBackward(SAMPlainNet):
    def backward(self, loss: Tensor) -> None:
        loss.backward()


class Writes(SAMPlainNet):
    """Writes into a file between the two runs of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.file = io.BytesIO()

    def on_before_backward(self, loss: Tensor) -> None:
        self.file.write(b"line")


class Iterates(SAMPlainNet):
    def training_step(self, dataloader_iter: Any) -> Tensor:
        return super().training_step(next(dataloader_iter)[0], 0)


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")  # which is what is refused
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Reentrant, "pass use_reentrant=False"),
        (Sparse, "pass sparse=False"),
        (Inplace, "Inplace.training_step writes into its batch"),
        (OwnBackward, r"OwnBackward.backward must call super\(\).backward\(loss\)"),
        (Writes, r"Writes.file \(BytesIO\) has changed in a step of Writes"),
        (Iterates, "Iterates.training_step must not take dataloader_iter"),
    ],
)
def test_a_step_that_cannot_be_run_twice_is_refused_by_name(kind: type[Net], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        fit(build(kind))


def test_a_configure_callbacks_that_forgets_super_is_refused() -> None:
    class Forgetful(SAMPlainNet):
        def configure_callbacks(self) -> list[Callback]:
            return []

    with pytest.raises(MisconfigurationException, match="super"):
        fit(build(Forgetful))


@pytest.mark.few(2)
@pytest.mark.parametrize("on", [*CUDA, "simulated mps"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_on_a_device_rho_zero_is_bit_equal_to_no_mixin_with_dropout(on: str, precision: Any) -> None:
    class Still(SAMNet):
        sam = lt.SAM(rho=0)

    for kind in (plain := build(Net), still := build(Still)):
        with device(on) as there:
            fit(kind, accelerator=there.name, precision=precision, accumulate_grad_batches=2)
    assert_equal(weights(plain), weights(still))


def test_layers_made_in_the_first_step_are_made_again_in_its_second_run() -> None:
    class Lazy(SAMPlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if not hasattr(self, "scale"):
                self.head, self.scale = torch.nn.Identity(), 1.0
            return super().training_step((self.head(batch[0]) * self.scale, batch[1]), batch_idx)

    lazy, plain = build(Lazy), build(SAMPlainNet)
    fit(lazy), fit(plain)
    assert_equal(weights(lazy), weights(plain))


def test_a_checkpoint_saved_inside_a_step_holds_the_weights_themselves_and_disturbs_nothing(tmp_path: Any) -> None:
    class Saving(SAMPlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.trainer.save_checkpoint(tmp_path / f"{self.trainer.global_step}.ckpt")  # in the second run too
            return loss

    own: list[dict[str, Tensor]] = []
    note = LambdaCallback(on_train_batch_start=lambda trainer, module, *_: own.append(weights(module)))
    saving, plain = build(Saving), build(SAMPlainNet)
    fit(plain, max_epochs=1)
    fit(saving, max_epochs=1, callbacks=[note])
    assert_equal(weights(saving), weights(plain))
    for step, expected in enumerate(own):
        assert_equal(torch.load(tmp_path / f"{step}.ckpt", weights_only=True)["state_dict"], expected)


class Copies(Callback):
    """Pickles and copies the module in a fit, as callbacks of other projects do."""

    def on_train_batch_end(self, trainer: Any, pl_module: L.LightningModule, *_: Any) -> None:
        torch.save(pl_module.layers, io.BytesIO())
        pickle.dumps({name: value for name, value in vars(pl_module).items() if name in ("backward", "log")})
        copied = copy.deepcopy(pl_module)
        assert copied.backward.wrapper is None
        self.copied = copied.layers


def test_a_module_can_be_pickled_and_copied_in_a_fit_with_sam() -> None:
    copies = Copies()
    fit(build(PlainNet), callbacks=[lt.SAMCallback(), copies])
    assert isinstance(copies.copied, nn.Sequential)
