"""Whether ``estimate_memory`` tells the truth: its bytes beside those of a training step in a Lightning Trainer.

On CPU the bytes are those that torch's allocator hands out in the second step, as the profiler notes them, on CUDA
``max_memory_allocated``. Weights, gradients and optimizer states must be equal to the byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import lightning as L
import torch
from fitted import QUIET, architecture
from lightning.pytorch.callbacks import Callback
from rows import Row, target
from settings import SEED, Settings
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from lightning_tricks.advisor import MemoryEstimate, estimate_memory

NAME = "memory"
PEERS = ("timm", "transformers")
LIMIT = 0.10  # of relative error
PRECISIONS = ("32-true", "bf16-mixed")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "adamw": torch.optim.AdamW,
}


class Classifier(L.LightningModule):
    """Images or tokens to classes, with an optimizer from outside."""

    def __init__(self, network: nn.Module, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        self.network = network
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        output = self.network(x)
        loss = nn.functional.cross_entropy(getattr(output, "logits", output), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


def bert() -> nn.Module:
    """Two layers."""
    import transformers

    config = transformers.BertConfig(num_hidden_layers=2, num_labels=10)
    return transformers.BertForSequenceClassification(config)


def images(size: int, samples: int) -> Any:
    return torch.randn(samples, 3, size, size), torch.randint(10, (samples,))


def tokens(samples: int) -> Any:
    return torch.randint(1000, (samples, 128)), torch.randint(10, (samples,))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], int]] = {
    "ResNet-50, 64 x 64": (partial(architecture, "resnet50"), partial(images, 64), 4),
    "ResNet-50, 128 x 128": (partial(architecture, "resnet50"), partial(images, 128), 8),
    "ViT-tiny, 224 x 224": (partial(architecture, "vit_tiny_patch16_224"), partial(images, 224), 8),
    "BERT of 2 layers, 128 tokens": (bert, tokens, 8),
}


class Meter(Callback):
    """Bytes of the second step: what lasts, and the peaks before and in the optimizer's step."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        on_cpu = pl_module.device.type == "cpu"
        if batch_idx == 0 and on_cpu:  # the profiler sees a block freed only if it saw it made
            self.before = total([*pl_module.parameters(), *pl_module.buffers(), *batch])
            self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self.profiler.start()
        if batch_idx == 1:
            self._note_lasting(trainer, pl_module)
            self.began = time.time_ns()
            if not on_cpu:
                torch.cuda.reset_peak_memory_stats()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        self.stepped = time.time_ns()
        if pl_module.device.type == "cuda" and trainer.global_step == 1:
            self.activations = torch.cuda.max_memory_allocated() - self.lasting
            torch.cuda.reset_peak_memory_stats()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 1:
            return
        if pl_module.device.type == "cuda":
            self.passing = torch.cuda.max_memory_allocated() - self.lasting
        else:
            self.profiler.stop()
            self._read()

    def _note_lasting(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
        self.weights = total(pl_module.parameters())
        self.gradients = total(p.grad for p in pl_module.parameters() if p.grad is not None)
        self.optimizer = total(value for value in states if isinstance(value, Tensor))
        self.lasting = self.weights + self.gradients + self.optimizer + total(pl_module.buffers())

    def _read(self) -> None:
        events = self.profiler.profiler.kineto_results.events()
        now, self.activations, self.passing = self.before - self.lasting, 0, 0
        for at, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
            now += size
            if self.began < at < self.stepped:
                self.activations = max(self.activations, now)
            elif at > self.stepped:
                self.passing = max(self.passing, now)


def total(tensors: Any) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def trained(module: L.LightningModule, batch: Any, precision: Any, device: str) -> Meter:
    """A meter that has seen two steps of a Trainer."""
    meter = Meter()
    trainer = L.Trainer(accelerator=device, precision=precision, callbacks=[meter], **QUIET)
    trainer.fit(module, DataLoader([batch] * 2, batch_size=None))
    return meter


def compare(name: str, precision: str, optimizer: str, device: str) -> dict[str, Any]:
    """Estimated and measured bytes of a model, and the relative errors."""
    network, make, samples = MODELS[name]
    torch.manual_seed(SEED)
    module, batch = Classifier(network(), OPTIMIZERS[optimizer]), make(samples)
    estimate = estimate_memory(
        module, optimizer=OPTIMIZERS[optimizer], precision=precision, batch=make(2), batch_size=samples, device=device
    )
    return row(estimate, trained(module, batch, precision, device))


def row(estimate: MemoryEstimate, meter: Meter) -> dict[str, Any]:
    measured = meter.lasting + max(meter.activations, meter.passing)
    activations = estimate.casts + estimate.activations
    return {
        "weights_exact": estimate.weights == meter.weights,
        "gradients_exact": estimate.gradients == meter.gradients,
        "optimizer_exact": estimate.optimizer == meter.optimizer,
        "activations_mb": round(activations / 1e6, 2),
        "measured_mb": round(meter.activations / 1e6, 2),
        "activations_error": round(activations / meter.activations - 1, 4),
        "total_mb": round(estimate.total / 1e6, 2),
        "measured_total_mb": round(measured / 1e6, 2),
        "total_error": round(estimate.total / measured - 1, 4),
    }


def run(settings: Settings) -> list[Row]:
    """All models, precisions and optimizers."""
    models = settings.pick("models", tuple(MODELS), ("ViT-tiny, 224 x 224",), ("BERT of 2 layers, 128 tokens",))
    precisions = settings.pick("precisions", PRECISIONS, PRECISIONS[:1], PRECISIONS[:1])
    optimizers = settings.pick("optimizers", tuple(OPTIMIZERS), tuple(OPTIMIZERS), ("sgd",))
    found = []
    for model, precision, optimizer in product(models, precisions, optimizers):
        compared, what = compare(model, precision, optimizer, settings.device), f"{precision}, {optimizer}"
        wrong = [key for key, equal in compared.items() if key.endswith("exact") and not equal]
        note = f"not to the byte: {', '.join(wrong)}" if wrong else ""
        for part, key in {"activations": "", "total": "total_"}.items():
            estimated = Row(f"{part}, {model}", what, "MB", compared[f"{part}_mb"], note=note)
            over = round(1 + compared[f"{part}_error"], 4)
            found.append(estimated._replace(floor=f"{compared[f'measured_{key}mb']} measured", over_floor=over))
    return found


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The largest relative error, and all that is known to the byte."""
    worst = max(abs(each.over_floor - 1) for each in rows if each.over_floor)
    wrong = sum(bool(each.note) for each in rows)
    return [
        target("largest relative error", round(worst, 4), "<=", LIMIT),
        target("weights, gradients and states that are not equal to the byte", wrong, "<=", 0),
    ]
