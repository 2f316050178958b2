"""A training step of a Llama of 7 billion weights (drawn, not pretrained) with adapters, in bfloat16: time and memory.

``python benchmarks/run.py --device cuda lora_7b``: one sequence of 1,024 tokens; adapters of rank 16 on the projections
of queries and values, alone, with ``LeanLoss``, with activations that are computed again, with frozen weights in 4
bits, and all three together. It needs some 40 GB of GPU memory, and is estimated at 5 minutes of an H100.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
from fitted import QUIET
from rows import Row, row, rows_of
from settings import SEED, Settings
from space import memory
from timing import fits, in_turns
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_tricks as lt

NAME = "lora_7b"
PEERS = ("transformers", "peft")
PLAIN, GIB = "LoRA", 2**30
KINDS: dict[str, tuple[Callable[[], Any], str]] = {  # further callbacks, and how the frozen weights are kept
    PLAIN: (list, "keep"),
    "LoRA, LeanLoss": (lambda: [lt.LeanLoss()], "keep"),
    "LoRA, ActivationCheckpointing": (lambda: [lt.ActivationCheckpointing()], "keep"),
    "LoRA, nf4": (list, "nf4"),
    "LoRA, LeanLoss, ActivationCheckpointing, nf4": (lambda: [lt.LeanLoss(), lt.ActivationCheckpointing()], "nf4"),
}


class Llama(L.LightningModule):
    """A Llama of transformers with weights in bfloat16, which is made where it is trained."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.shape = {"hidden_size": width, "num_hidden_layers": layers, "vocab_size": vocabulary}
        self.shape |= {"intermediate_size": 43 * width // 16, "num_attention_heads": max(1, width // 128)}
        self.times: list[float] = []
        self.model: Any = None

    def configure_model(self) -> None:
        """Make the network on the device."""
        from transformers import LlamaConfig, LlamaForCausalLM

        if self.model is None:
            torch.manual_seed(SEED)
            config = LlamaConfig(**self.shape, pad_token_id=None, use_cache=False, dtype=torch.bfloat16)
            self.model = LlamaForCausalLM(config).to(torch.bfloat16).train()

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        """The loss of the next token."""
        return self.model(input_ids=tokens, labels=tokens).loss

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        """Start the clock."""
        self._begin = now(self.device)

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        """Stop it."""
        self.times.append((now(self.device) - self._begin) * 1e6)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW of what trains."""
        return torch.optim.AdamW([weight for weight in self.parameters() if weight.requires_grad], lr=1e-4)


def now(device: torch.device) -> float:
    """Seconds, when the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def trained(what: str, shape: tuple[int, int, int], length: int, steps: int, device: str) -> list[float]:
    """Microseconds of each step of a fit, without the first."""
    callbacks, base = KINDS[what]
    module = Llama(*shape)
    tokens = torch.randint(shape[2], (1, length), generator=torch.Generator().manual_seed(SEED))
    lora = lt.LoRA("q_proj|v_proj", r=16, base=base)
    trainer = L.Trainer(accelerator=device, max_steps=steps, callbacks=[lora, *callbacks()], **QUIET)
    trainer.fit(module, DataLoader([tokens] * steps, batch_size=None))
    return module.times[1:]


def run(settings: Settings) -> list[Row]:
    """Time and memory of a step."""
    shape = settings.pick("width, layers, vocabulary", (4096, 32, 32000), (64, 2, 256), (64, 2, 256))
    length, steps = settings.pick("tokens", 1024, 16, 16), settings.pick("steps", 8, 3, 3)
    rounds = settings.pick("fits", 3, 1, 1)
    kinds = [what for what, (_, base) in KINDS.items() if base == "keep" or settings.device == "cuda"]
    fit = partial(trained, shape=shape, length=length, steps=steps, device=settings.device)
    timed = {what: partial(lambda what: sorted(fit(what))[(steps - 1) // 2], what) for what in kinds}
    found = rows_of("step", in_turns(fits(timed), rounds, warm_up=0), PLAIN, "ms")
    for what in kinds:
        taken, _ = memory(partial(fit, what), settings.device, GIB)
        found.append(row("peak memory, with weights", what, [taken["peak"]], "GiB"))
    left_out = [what for what in KINDS if what not in kinds]
    return [*found, *(Row("step", what, "ms", None, note="skipped: 4 bits need a GPU") for what in left_out)]


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """None: what comes out is not known."""
    return []
