"""What is hung on a BatchNorm layer stays when ``Trainer(sync_batchnorm=True)`` makes a new layer of it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from torch import Tensor, nn

import lightning_tricks as lt


class Branch(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))


class Blocks(nn.Module):
    """Residual blocks whose norms stand in a Sequential that is called, in one that is iterated, and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.iterated, self.norms = Branch(), Branch(), nn.ModuleList([nn.BatchNorm2d(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.called(x)
        y = x
        for layer in self.iterated:
            y = layer(y)
        return x + y + self.norms[0](x)


def outputs(model: nn.Module) -> Tensor:
    torch.manual_seed(2)
    return model(torch.randn(16, 4, 5, 5))


@pytest.mark.parametrize("change", ["depth", "excite"])
def test_hooks_of_a_batchnorm_layer_stay_behind_the_sync_batchnorm(change: str) -> None:
    torch.manual_seed(0)
    model = Blocks()
    names = ["called.1", "iterated.1", "norms.0"]
    if change == "depth":
        assert list(lt.add_stochastic_depth(model, 0.5, modules="BatchNorm2d")) == names
    else:
        pytest.importorskip("timm")
        assert lt.add_squeeze_excite(model, modules="BatchNorm2d") == names
    plain: Any = Blocks()
    plain.load_state_dict(model.state_dict(), strict=False)
    expected = outputs(copy.deepcopy(model))
    synced = TorchSyncBatchNorm().apply(copy.deepcopy(model))
    for each in (pickle.loads(pickle.dumps(synced)), synced, synced):  # from the first forward pass on, and only once
        assert torch.equal(outputs(each), expected)
    assert isinstance(synced.norms[0], nn.SyncBatchNorm)
    assert not torch.equal(outputs(plain), expected)
