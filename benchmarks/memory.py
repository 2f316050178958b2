"""Whether ``estimate_memory`` tells the truth: its bytes beside those of a training step in a Lightning Trainer.

On CPU the bytes are those that torch's allocator hands out in the second step, as the profiler notes them, on CUDA
``max_memory_allocated``. Run ``python benchmarks/memory.py`` (``--device cuda`` on a GPU); it prints the figures and
writes ``benchmarks/results/memory.json``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from machine import machine, prepare, table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from lightning_tricks.advisor import MemoryEstimate, estimate_memory

RESULTS = Path(__file__).parent / "results"
LIMIT = 0.10  # of relative error
PRECISIONS = ("32-true", "bf16-mixed")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "adamw": torch.optim.AdamW,
}


class Classifier(pl.LightningModule):
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


def resnet50() -> nn.Module:
    import timm

    return timm.create_model("resnet50")


def vit_tiny() -> nn.Module:
    import timm

    return timm.create_model("vit_tiny_patch16_224")


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
    "ResNet-50, 64 x 64": (resnet50, partial(images, 64), 4),
    "ResNet-50, 128 x 128": (resnet50, partial(images, 128), 16),
    "ViT-tiny, 224 x 224": (vit_tiny, partial(images, 224), 8),
    "BERT of 2 layers, 128 tokens": (bert, tokens, 8),
}


class Meter(Callback):
    """Bytes of the second step: what lasts, and the peaks before and in the optimizer's step."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
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

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        self.stepped = time.time_ns()
        if pl_module.device.type == "cuda" and trainer.global_step == 1:
            self.activations = torch.cuda.max_memory_allocated() - self.lasting
            torch.cuda.reset_peak_memory_stats()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 1:
            return
        if pl_module.device.type == "cuda":
            self.passing = torch.cuda.max_memory_allocated() - self.lasting
        else:
            self.profiler.stop()
            self._read()

    def _note_lasting(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
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


def trained(module: pl.LightningModule, batch: Any, precision: str, device: str) -> Meter:
    """A meter that has seen two steps of a Trainer."""
    meter = Meter()
    trainer = pl.Trainer(
        accelerator=device,
        devices=1,
        precision=precision,  # type: ignore[arg-type]
        max_epochs=1,
        callbacks=[meter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader([batch] * 2, batch_size=None))
    return meter


def compare(name: str, precision: str, optimizer: str, device: str) -> dict[str, Any]:
    """Estimated and measured bytes of a model, and the relative errors."""
    network, make, samples = MODELS[name]
    torch.manual_seed(0)
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


def measure(device: str) -> dict[str, Any]:
    """All figures."""
    rows = {
        f"{name}, {precision}, {optimizer}": compare(name, precision, optimizer, device)
        for name in MODELS
        for precision in PRECISIONS
        for optimizer in OPTIMIZERS
    }
    worst = max(abs(each[key]) for each in rows.values() for key in ("activations_error", "total_error"))
    return {"rows": rows, "worst_error": worst, "target": LIMIT, "met": worst <= LIMIT}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, help="where the figures go")
    args = parser.parse_args()
    prepare(("timm", "transformers"), args.threads)
    place = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    result = {"machine": machine("timm", "transformers"), "device": place, **measure(args.device)}
    table("estimated and measured", result["rows"])
    output = args.output or RESULTS / ("memory.json" if args.device == "cpu" else "memory_cuda.json")
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
