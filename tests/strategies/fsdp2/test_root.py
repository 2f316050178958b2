"""A step inside of the root: the batch as it is, nobody's hooks, no lost warnings."""

from __future__ import annotations

import warnings
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import lightning_tricks as lt
from tests.nets import PlainNet, assert_close, build, fit, rank_loader
from tests.ranks import run_ranks
from tests.strategies.sharded import Transformer, two, whole


class Peculiar(PlainNet):
    """A batch in a container that cannot be rebuilt, hooks of its own, and a forward pass that returns a view."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.calls: list[int] = []
        self.kinds: set[Any] = set()
        self.register_forward_pre_hook(lambda _, args: self.calls.append(len(args)))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch = defaultdict(list, x=batch[0], y=batch[1].double())
        self.batch = batch
        return batch

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, 0]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.kinds |= {batch is self.batch, batch["y"].dtype, type(self.layers[0].weight)}
        loss = F.binary_cross_entropy_with_logits(self(batch["x"]).double(), batch["y"])
        return {"loss": loss, "more": batch}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.kinds.add(type(self.layers[0].weight))


def peculiar(precision: str) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="FSDP2-wrapped")
        module, _ = two(Peculiar, {"precision": precision}, limit_val_batches=0)
    assert isinstance(module, FSDPModule)
    return module.calls, module.kinds, [name for name in vars(module) if "gathered" in name]


@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.slow)])
def test_a_step_gets_the_very_batch_and_only_calls_of_the_module_are_calls(precision: str) -> None:
    for calls, kinds, left in run_ranks(peculiar, precision):
        assert calls == [1] * 6
        # gathered in the step, sharded between two
        assert kinds == {True, torch.float64, torch.nn.Parameter, DTensor}
        assert left == []


class Planned(RuntimeError):
    pass


class BackwardFails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise Planned


class Fails(Transformer):
    """Fails once, after some steps."""

    where = ""

    def fail(self, where: str) -> None:
        if self.where == where and self.trainer.global_step == 4:
            raise Planned

    def forward(self, x: Tensor) -> Tensor:
        self.fail("forward")
        output = super().forward(x)
        try:
            self.fail("backward")
        except Planned:
            return BackwardFails.apply(output)
        return output

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.fail("step")

    def on_train_batch_end(self, *_: Any) -> None:
        self.fail("end")


def failed_and_again() -> None:
    if hasattr(FSDPModule, "reset_iter_state"):
        del FSDPModule.reset_iter_state  # as in torch < 2.13
    data = {"train": rank_loader(), "devices": 2, "use_distributed_sampler": False, "limit_val_batches": 0}
    preset = {"precision": "32-true"}
    for where, refused in {"forward": True, "backward": True, "step": False, "end": False}.items():
        module = build(Fails)
        module.where = where
        with pytest.raises(Planned):
            fit(module, **data, **lt.preset("fsdp2_bf16", **preset))
        module.where = ""
        if refused:
            with pytest.raises(MisconfigurationException, match="was interrupted under FSDP2"):
                fit(module, **data, **lt.preset("fsdp2_bf16", **preset))
        else:
            other = build(Fails)
            other.load_state_dict(whole(module))
            for each in (module, other):
                fit(each, **data, **lt.preset("fsdp2_bf16", **preset))
            assert_close(whole(module), whole(other))


@pytest.mark.slow
def test_a_step_that_cannot_be_undone_is_not_trained_over() -> None:
    run_ranks(failed_and_again)
