"""A snapshot is gone back to bit for bit; in a fit see tests/callbacks/test_rewind_on_spike.py."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

import lightning_tricks as lt
from lightning_tricks.callbacks.rewind_on_spike import Snapshot
from tests.nets import Net, assert_equal, build, fit, weights


def facts(trainer: Any, module: Any) -> dict[str, torch.Tensor]:
    """Everything that a snapshot holds, as tensors."""
    optimizer = trainer.optimizers[0].state_dict()
    state = {f"{n}/{key}": value.clone() for n, each in optimizer["state"].items() for key, value in each.items()}
    averages = {f"ema/{key}": value.clone() for key, value in trainer.callbacks[0]._running.tensors.items()}
    scalars = {
        "lr": optimizer["param_groups"][0]["lr"],
        "weight_decay": optimizer["param_groups"][0]["weight_decay"],
        "schedule": trainer.lr_scheduler_configs[0].scheduler.last_epoch,
        "step": trainer.global_step,
        "updates": trainer.callbacks[0]._running.updates,
    }
    scalars = {key: torch.tensor(float(value)) for key, value in scalars.items()}
    return {**weights(module), **state, **averages, **scalars, "random": torch.get_rng_state()}


class Adam(Net):
    def configure_optimizers(self) -> Any:
        return lt.cosine(torch.optim.AdamW(self.parameters(), lr=0.02), self)


class GoesBack(Callback):
    """Takes snapshots at the start and after two batches, goes back to each twice, the later first."""

    def __init__(self) -> None:
        self.held: list[tuple[Snapshot, dict[str, torch.Tensor]]] = []
        self.went = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (0, 2) and trainer.current_epoch == 0:
            self.held.append((Snapshot(trainer, pl_module), facts(trainer, pl_module)))
        if batch_idx in (3, 5) and trainer.current_epoch == 0:
            snapshot, before = self.held[1 if batch_idx == 3 else 0]
            for _ in range(2):
                with torch.no_grad():
                    pl_module.layers[0].weight.add_(1)
                torch.rand(3)
                trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.7
                snapshot.restore(trainer, pl_module)
                assert_equal(facts(trainer, pl_module), before)
                self.went += 1


class Nested(torch.optim.SGD):
    """Keeps a list of tensors for each weight."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for weight in self.param_groups[0]["params"]:
            self.state[weight].setdefault("list", [torch.zeros(1)])[0] += 1
        return loss


class KeepsLists(Net):
    def configure_optimizers(self) -> Any:
        return Nested(self.parameters(), lr=0.1)


class ListsGoBack(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        def counts() -> set[float]:
            return {state["list"][0].item() for state in trainer.optimizers[0].state.values()}

        if batch_idx == 1:
            self.snapshot = Snapshot(trainer, pl_module)
        if batch_idx in (3, 4):
            assert counts() == {3.0 if batch_idx == 3 else 2.0}
            self.snapshot.restore(trainer, pl_module)
            assert counts() == {1.0}


def test_tensors_within_the_state_of_an_optimizer() -> None:
    fit(build(KeepsLists), callbacks=[ListsGoBack()], max_epochs=1)


def test_everything_is_as_it_was() -> None:
    callback = GoesBack()
    fit(build(Adam), callbacks=[lt.EMA(0.9, at_end="raw"), callback])
    assert callback.went == 4


class Remakes(Net):
    """Makes a new parameter for its codes in every step."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.codes = nn.Parameter(torch.ones(8), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.codes = nn.Parameter(self.codes * 0.5, requires_grad=False)
        return super().training_step([batch[0] + self.codes.clone(), batch[1]], batch_idx)


class Returns(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.snapshot, self.before = Snapshot(trainer, pl_module), weights(pl_module)
        if batch_idx in (3, 4):
            self.snapshot.restore(trainer, pl_module)
            assert_equal(weights(pl_module), self.before)


def test_a_parameter_that_a_step_has_made_anew_goes_back() -> None:
    module = build(Remakes)
    fit(module, callbacks=[Returns()], max_epochs=1, limit_val_batches=0)
    assert module.codes.tolist() == [0.125] * 8  # one step before the snapshot, and two behind the last return
