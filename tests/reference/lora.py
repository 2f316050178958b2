"""LoRA and DoRA in the plain loop: the first layer of a network has an adapter, as their formulas are written."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.reference.loop import Naive


class Adapted(nn.Module):
    """A linear layer with frozen weights and a low-rank product beside it, under the names that peft gives them.

    With "dora" each row of their sum has a length of its own, which begins as that of the frozen row.
    """

    def __init__(self, layer: nn.Linear, r: int, dora: bool) -> None:
        super().__init__()
        self.base_layer = nn.Module()
        self.base_layer.register_buffer("weight", layer.weight.detach())
        self.base_layer.register_buffer("bias", layer.bias.detach())
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, r, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(r, layer.out_features, bias=False)})
        nn.init.kaiming_uniform_(self.lora_A["default"].weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B["default"].weight)
        self.lora_magnitude_vector = nn.ModuleDict()
        if dora:
            self.lora_magnitude_vector["default"] = nn.Module()
            self.lora_magnitude_vector["default"].weight = nn.Parameter(layer.weight.detach().norm(dim=1))

    def forward(self, x: Tensor) -> Tensor:
        whole = F.linear(x, self.base_layer.weight, self.base_layer.bias)
        a, b = self.lora_A["default"], self.lora_B["default"]
        low = 2 * b(a(x))
        for length in self.lora_magnitude_vector.parameters():
            scale = length / (self.base_layer.weight + 2 * b.weight @ a.weight).detach().norm(dim=1)
            low = (scale - 1) * (whole - self.base_layer.bias) + scale * low
        return (whole + low).to(whole.dtype)  # in peft's order, since 16 bits round each sum


class LowRank(Naive):
    """A layer has an adapter of rank 2 and scale 2, whose B has a learning rate of its own; all others train."""

    depth = -1  # before others look at weights

    def __init__(self, dora: bool = False, layer: int = 0, lr_ratio: float = 1.0) -> None:
        self.dora, self.layer, self.lr_ratio = dora, layer, lr_ratio

    def begin(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        torch.manual_seed(7)  # as a fit does
        module.layers[self.layer] = Adapted(module.layers[self.layer], 2, self.dora)
        optimizer.param_groups[0]["params"] = list(module.parameters())
        if self.lr_ratio != 1:
            (group,), later = optimizer.param_groups, module.layers[self.layer].lora_B["default"].weight
            group["params"] = [weight for weight in group["params"] if weight is not later]
            optimizer.add_param_group({**group, "params": [later], "lr": group["lr"] * self.lr_ratio})
