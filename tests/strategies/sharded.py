"""Modules whose authors never thought of sharding, and what is looked at after a fit."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import lightning_tricks as lt
from tests.nets import PlainNet, SaveAt, assert_equal, build, fit, loader, rank_loader, trainer


class Block(nn.Module):
    calls = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        Block.calls += 1
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class Transformer(PlainNet):
    """Tied weights, weights of its own, used as functions, frozen, unused; several forward passes; AdamW."""

    def __init__(self, lr: float = 0.01, *, depth: int = 2) -> None:
        super().__init__(lr)
        del self.layers
        self.embedding = nn.Embedding(12, 16)
        self.position = nn.Parameter(0.1 * torch.randn(8, 16))
        self.blocks = nn.ModuleList([Block(16) for _ in range(depth)])
        self.norm = nn.LayerNorm(16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(16, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding((2 * x + 6).long().clamp(0, 11)) + self.position
        for block in self.blocks:
            x = block(x)
        self.seen["block"] = x.dtype
        return self.head(self.frozen(self.norm(x)).mean(1))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen["batch"] = batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.seen["same"] = batch is self.seen.pop("batch")
        self.seen["weights"] = {p.dtype for p in self.parameters()}
        loss = F.cross_entropy(self(x), y) + 0.3 * F.cross_entropy(self(x.flip(1)), y)
        used = F.linear(F.layer_norm(x, (8,)), self.embedding.weight[:, :8])
        self.seen["product"], self.seen["loss"] = used.dtype, loss.dtype
        return loss + 0.01 * (used.float() ** 2).mean() + 0.01 * self.position.square().sum()

    def configure_optimizers(self) -> Any:
        bias = [p for name, p in self.named_parameters() if name.endswith("bias") and p.requires_grad]
        others = [p for name, p in self.named_parameters() if not name.endswith("bias") and p.requires_grad]
        groups = [{"params": bias, "weight_decay": 0.0}, {"params": others}]  # not the order of the module
        # the gradient of the keys' bias is zero but for rounding, of which Adam makes whole steps with a small eps
        return torch.optim.AdamW(groups, lr=self.lr, eps=1e-3)


class ConvBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(width, width, 3, padding=1), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


class CNN(PlainNet):
    """BatchNorm inside of blocks and outside."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.layers = nn.Sequential(
            nn.Conv1d(1, 4, 3, padding=1),
            nn.BatchNorm1d(4),
            nn.Sequential(ConvBlock(4), ConvBlock(4)),
            nn.Flatten(),
            nn.Linear(32, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x[:, None])


class Stateless(PlainNet):
    """An optimizer without states."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Manual(PlainNet):
    """Two optimizer steps in a training step, and layers that are called between them."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        for sign in (1, -1):
            loss = F.cross_entropy(self.layers[2](self.layers[1](self.layers[0](sign * x))), y)
            self.manual_backward(loss)
            if batch_idx % 2:
                optimizer.step()
                optimizer.zero_grad()


def whole(module: nn.Module) -> dict[str, Tensor]:
    """A copy of the whole parameters and buffers; all ranks take part."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()
    named = module.state_dict().items()
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in named}


def local_bytes(tensors: Any) -> int:
    """Bytes of this rank's slices."""
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def two(kind: type[PlainNet], arguments: dict[str, Any] | None = None, **settings: Any) -> tuple[Any, L.Trainer]:
    """Fit a module on this rank and another by the preset with these arguments, or by another strategy."""
    strategy = lt.preset("fsdp2_bf16", **{"precision": "32-true", **(arguments or {})})
    module = build(kind)
    data = {"train": rank_loader(), "devices": int(os.environ["LOCAL_WORLD_SIZE"]), "use_distributed_sampler": False}
    return module, fit(module, **{**data, **strategy, **settings})


def one(kind: type[PlainNet], **settings: Any) -> tuple[Any, L.Trainer]:
    """Fit a module in one process on the batches of both ranks together."""
    module = build(kind)
    return module, fit(module, **{"train": loader(48, 16), **settings})


def evaluated(run: L.Trainer, module: L.LightningModule, path: Any = None) -> dict[str, Any]:
    """All ranks see all data, so that each result is that of one process."""
    scores = {
        **run.validate(module, loader(24), verbose=False, ckpt_path=path)[0],
        **run.test(module, loader(24), verbose=False, ckpt_path=path)[0],
    }
    return {"scores": scores, "predicted": torch.cat(run.predict(module, loader(24), ckpt_path=path)).float()}


def resumed(arguments: dict[str, Any], path: str, **settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A fit that is resumed after an epoch ends as one that is not, and what was saved evaluates the same."""
    emas = [lt.EMA(0.9, at_end="raw") for _ in range(2)]
    first, _ = two(Transformer, arguments, callbacks=[emas[0], SaveAt(path, epoch=0)], max_epochs=3, **settings)
    again, run = two(Transformer, arguments, callbacks=[emas[1]], max_epochs=3, ckpt_path=path, **settings)
    assert_equal(whole(again), whole(first))
    assert_equal(emas[0].averaged_state_dict(), emas[1].averaged_state_dict())
    assert run.global_step == 9
    trained, run = two(Transformer, arguments, max_epochs=1, **settings)
    run.save_checkpoint(f"{path}.end")
    strategy = lt.preset("fsdp2_bf16", **{"precision": "32-true", **arguments})
    fresh = trainer(**{"devices": 2, "use_distributed_sampler": False, **strategy, **settings})
    return evaluated(run, trained), evaluated(fresh, build(Transformer, lr=1.0), f"{path}.end")
