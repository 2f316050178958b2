"""The loss of a large vocabulary: with its logits, by LeanLoss, and by torch's own linear_cross_entropy.

A layer is the head and its loss, forward and back; a model is a Llama of two layers in fp32 with 2,048 tokens a batch.
Memory is what a step takes beyond weights and inputs, gradients included. cut-cross-entropy is no contender on a CPU:
it imports Triton, also for its way without kernels, which is ``torch.compile`` of the loss with its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from rows import Row, figure, over, ratio, row, rows_of, target
from settings import Settings
from space import memory
from timing import Work, in_turns, works
from torch import Tensor, nn

import lightning_tricks as lt
from lightning_tricks.losses.linear_cross_entropy import linear_cross_entropy

NAME = "lean_loss"
PEERS = ("transformers",)
LOGITS, OURS, TORCHS = "with logits", "lightning_tricks", "torch, in chunks"
MIB = 2**20


def layer(tokens: int, width: int, vocabulary: int, device: str) -> dict[str, Callable[[], Work]]:
    """The head and its loss, with the gradients of its inputs and weights."""
    hidden = torch.randn(tokens, width, device=device, requires_grad=True)
    weight = (torch.randn(vocabulary, width, device=device) / width**0.5).requires_grad_()
    y = torch.randint(vocabulary, (tokens,), device=device)

    def of(loss: Callable[[], Tensor]) -> Callable[[], Work]:
        def work() -> None:
            torch.autograd.grad(loss(), (hidden, weight))

        return lambda: work

    found = {
        LOGITS: of(lambda: F.cross_entropy(hidden @ weight.T, y)),
        OURS: of(lambda: linear_cross_entropy(hidden, weight, y)),
    }
    if hasattr(nn, "LinearCrossEntropyOptions"):  # of torch 2.13
        options: Any = nn.LinearCrossEntropyOptions()
        found[TORCHS] = of(lambda: F.linear_cross_entropy(hidden, weight, y, options=options))
    return found


def llama(tokens: int, width: int, vocabulary: int, device: str) -> dict[str, Callable[[], Work]]:
    """A training step without the optimizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = torch.randint(vocabulary, (tokens // 64, 64), device=device)

    def of(lean: bool) -> Callable[[], Work]:
        def make() -> Work:
            model = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **sizes)).to(device).train()
            if lean:
                lt.lean_loss(model)

            def work() -> None:
                model.zero_grad()
                model(input_ids=ids, labels=ids).loss.backward()

            return work

        return make

    return {LOGITS: of(False), OURS: of(True)}


def run(settings: Settings) -> list[Row]:
    """All figures."""
    tokens: int = settings.pick("tokens", 2048, 2048, 256)
    width: int = settings.pick("width", 128, 128, 32)
    vocabulary: int = settings.pick("vocabulary", 32_000, 32_000, 2000)
    rounds: int = settings.pick("rounds", 5, 2, 1)
    found = []
    for case, make in (("head and loss", layer), ("Llama", llama)):
        contenders = make(tokens, width, vocabulary, settings.device)
        for name, making in contenders.items():
            work = making()
            work()
            taken, _ = memory(work, settings.device, MIB)
            found.append(row(f"peak memory, {case}", name, [taken["peak"]], "MiB"))
        measured = in_turns(works(contenders, settings.device), rounds)
        found += rows_of(case, measured, LOGITS)
        for name in [each for each in contenders if each != LOGITS]:
            found.append(
                row(f"{name} over logits", case, [over(measured.times[name], measured.times[LOGITS])], "ratio")
            )
    return found


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A fifth of the memory."""
    return [
        target(
            f"{case}: memory over that with logits",
            ratio(figure(rows, f"peak memory, {case}", OURS), figure(rows, f"peak memory, {case}", LOGITS)),
            "<=",
            0.2,
        )
        for case in ("head and loss", "Llama")
    ]
