"""Weights, buffers and optimizer states stay in their memory, which CUDA graphs have recorded."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from tests.conformance.runs import run
from tests.conformance.settings import SETTINGS, every_third
from tests.nets import loader


class Addresses(Callback):
    """Where everything is that a compiled training step reads or writes, in each step; and the tensors, which stay."""

    def on_fit_start(self, *_: Any) -> None:
        self.seen: list[dict[str, int]] = []
        self.kept: list[Tensor] = []  # freed memory could be given to another tensor

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        tensors = dict(pl_module.named_parameters()) | dict(pl_module.named_buffers())
        for number, optimizer in enumerate(trainer.optimizers):
            for name, weight in pl_module.named_parameters():
                state = optimizer.state.get(weight, {})
                tensors |= {
                    f"{number}.{name}.{key}": value
                    for key, value in state.items()
                    if isinstance(value, Tensor) and value.ndim
                }
        self.kept += tensors.values()
        self.seen.append({name: tensor.data_ptr() for name, tensor in tensors.items()})


@pytest.mark.few(9)
@pytest.mark.parametrize("name", every_third(2))
def test_nothing_moves_over_steps_and_validations(name: str) -> None:
    addresses = Addresses()
    run(SETTINGS[name], callbacks=[addresses], train=loader(80), max_epochs=2, val_check_interval=5)
    assert len(addresses.seen) >= (10 if SETTINGS[name].stops else 20)
    before = addresses.seen[0]
    for now in addresses.seen[1:]:
        assert [key for key in before if now.get(key, before[key]) != before[key]] == []  # states may be freed
        before = now
