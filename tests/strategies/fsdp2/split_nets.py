"""Transformers whose layers are split among processes: written by hand, and by transformers."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

import lightning_tricks as lt
from tests.nets import PlainNet, build, data, fit, loader

ATTENTION = {"[qkv]$": "colwise", "q_norm": "replicated_with_grad_allreduce", "o$": "rowwise"}
HEAD = {"embedding": "rowwise", "head": "colwise_gather_output"}
HAND = {**ATTENTION, **HEAD, "up": "colwise", "down": "rowwise"}
SEQUENCE = {
    "embedding|position": "rowwise_sequence",
    r"^norm|\d.norm": "sequence_parallel",
    "q_norm": "replicated_with_grad_allreduce",
    "[qkv]$|up": "sequence_colwise",
    "o$|down": "rowwise_sequence",
    "head": "sequence_colwise_gather_output",
}


class Attention(nn.Module):
    """With the number of heads left open, as it is another one on a process that has some of them."""

    head_dim = 4

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.v, self.o = (nn.Linear(width, width) for _ in range(3))
        self.k = nn.Linear(width, width, bias=False)  # The gradient of a bias here is zero but for rounding.

        self.q_norm = nn.LayerNorm(self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.q, self.k, self.v))
        heads = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (self.q_norm(q), k, v)))
        return self.o(heads.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width)
        hidden = 2 * width - 2  # Whose halves are not even on two processes.
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(F.gelu(self.up(x)))


class Words(PlainNet):
    """Takes eight numbers as eight tokens; a frozen norm, a weight of its own, AdamW."""

    def __init__(self, lr: float = 0.01, *, depth: int = 2) -> None:
        super().__init__(lr)
        del self.layers
        self.embedding, self.position = nn.Embedding(12, 16), nn.Embedding(8, 16)
        self.blocks = nn.ModuleList([Block(16) for _ in range(depth)])
        self.norm = nn.LayerNorm(16).requires_grad_(False)
        self.head = nn.Linear(16, 12, bias=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        tokens = _tokens(x)
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]).expand_as(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).mean(1) * self.scale

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(
            [p for p in self.parameters() if p.requires_grad], lr=self.lr, eps=1e-4
        )  # Small gradients are rounded otherwise where sums are.


class Tied(Words):
    """The head has the weight of the embedding."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__(lr)
        self.head.weight = self.embedding.weight


OWN = {**ATTENTION, **HEAD, "up": "colwise", "down": "rowwise"}
OWN_SEQUENCE = {
    "embedding": "rowwise_sequence",
    "^norm": "sequence_parallel",
    "q_norm": "replicated_with_grad_allreduce",
    "[qkv]$|up": "sequence_colwise",
    "o$|down": "rowwise_sequence",
    "head": "sequence_colwise_gather_output",
}


class Own(PlainNet):
    """Every layer is the LightningModule's own, and runs in ``training_step`` itself; a weight without a layer, too."""

    shape = (-1, 4)  # of heads

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__(lr)
        del self.layers
        self.embedding, self.norm, self.q_norm = nn.Embedding(12, 16), nn.LayerNorm(16), nn.LayerNorm(4)
        self.q, self.v, self.o = (nn.Linear(16, 16) for _ in range(3))
        self.k = nn.Linear(16, 16, bias=False)
        self.up, self.down, self.head = nn.Linear(16, 30), nn.Linear(30, 16), nn.Linear(16, 12, bias=False)
        self.temperature = nn.Parameter(torch.ones(1))

    def positions(self, x: Tensor) -> Tensor | float:
        return 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(_tokens(x))
        x = x + self.positions(x)
        q, k, v = (layer(self.norm(x)).unflatten(-1, self.shape) for layer in self.qkv)
        heads = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (self.q_norm(q), k, v)))
        x = x + self.o(heads.transpose(1, 2).flatten(2))
        return self.head(x + self.down(F.gelu(self.up(x)))).mean(1) * self.temperature

    @property
    def qkv(self) -> tuple[nn.Module, ...]:
        return self.q, self.k, self.v

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.forward(batch[0]), batch[1])  # calls no hooks of the module
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.forward(batch[0]), batch[1]))

    configure_optimizers = Words.configure_optimizers


class OwnCounted(Own):
    """Makes four heads of what a process has."""

    shape = (4, -1)

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__(lr)
        self.q_norm = nn.Identity()


class OwnPositions(Own):
    """Adds the positions of the first tokens to those that a process has."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__(lr)
        self.register_buffer("table", torch.randn(8, 16))

    def positions(self, x: Tensor) -> Tensor | float:
        return self.table[: x.shape[1]]


class Pretrained(Words):
    """A small model of transformers, with two heads of keys for four of queries."""

    family, tied = "Llama", False

    def __init__(self, lr: float = 0.01) -> None:
        import transformers

        L.LightningModule.__init__(self)
        self.lr = lr
        config = getattr(transformers, f"{self.family}Config")(
            vocab_size=12, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=4, max_position_embeddings=16, tie_word_embeddings=self.tied,
        )  # fmt: skip
        self.model = getattr(transformers, f"{self.family}ForCausalLM")(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(_tokens(x)).logits.mean(1)


class Qwen(Pretrained):
    """With norms of single heads."""

    family, tied = "Qwen3", True


class Gemma(Pretrained):
    """Whose embedding has a factor in a buffer."""

    family, tied = "Gemma", True


def _tokens(x: Tensor) -> Tensor:
    return (2 * x + 6).long().clamp(0, 11)


def batches(tensor_parallel: int) -> Any:
    """The part of ``loader(48, 16)`` of this process and those that compute with it."""
    groups = max(1, int(os.environ["WORLD_SIZE"]) // tensor_parallel)
    group, size = int(os.environ["RANK"]) // tensor_parallel, 16 // groups
    mine = [16 * step + size * group + number for step in range(3) for number in range(size)]
    return DataLoader(Subset(data(48), mine), batch_size=size)


def together(kind: type[PlainNet], arguments: dict[str, Any], **settings: Any) -> tuple[Any, L.Trainer]:
    """Fit a module on all processes, of which two compute each batch unless the arguments say otherwise."""
    given = {"tensor_parallel": 2, "precision": "32-true", **arguments}
    own = {"train": batches(given["tensor_parallel"]), "use_distributed_sampler": False}
    module = build(kind)
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    return module, fit(module, **{**own, "devices": devices, **lt.preset("tp_bf16", **given), **settings})


def alone(kind: type[PlainNet], **settings: Any) -> tuple[Any, L.Trainer]:
    """Fit a module in one process, on the batches of all."""
    module = build(kind)
    return module, fit(module, **{"train": loader(48, 16), **settings})
