"""Whether Min-SNR weights help: a small diffusion model of the digits, with and without them, mean of 5 seeds.

Run it with ``python benchmarks/diffusion.py``; it writes ``benchmarks/results/diffusion.json`` in three minutes. The
figure is the Fréchet distance (lower is better) of as many samples as there are digits to the digits, by the means and
covariances of their pixels.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import lightning as L
import torch
from machine import machine
from rows import written
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_tricks as lt
from lightning_tricks_cli.runs.demo import small_runs

SEEDS, STEPS, BATCH, TIMESTEPS, DENOISING = range(5), 1000, 128, 1000, 50
PREDICTIONS = ("epsilon", "sample", "v")
ALPHAS = torch.cumprod(1 - torch.linspace(1e-4, 2e-2, TIMESTEPS), 0)
OUTPUT = Path(__file__).parent / "results" / "diffusion.json"


class Diffusion(L.LightningModule):
    """Predicts the noise, the image or v from noisy digits (B, 64) and their timesteps."""

    def __init__(self, prediction: Any, weighted: bool) -> None:
        super().__init__()
        self.prediction, self.weighted = prediction, weighted
        self.time = nn.Embedding(TIMESTEPS, 64)
        self.layers = nn.Sequential(
            nn.Linear(128, 256),
            nn.SiLU(),
            nn.Linear(256, 256),
            nn.SiLU(),
            nn.Linear(256, 256),
            nn.SiLU(),
            nn.Linear(256, 64),
        )
        frequencies = torch.exp(torch.linspace(0, -9, 32))
        angles = torch.arange(TIMESTEPS)[:, None] * frequencies
        self.time.weight = nn.Parameter(torch.cat([angles.sin(), angles.cos()], 1), requires_grad=False)

    def forward(self, noisy: Tensor, t: Tensor) -> Tensor:
        return self.layers(torch.cat([noisy, self.time(t)], 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (image,) = batch
        t, noise = torch.randint(TIMESTEPS, (len(image),)), torch.randn_like(image)
        a = ALPHAS[t, None]
        targets = {"epsilon": noise, "sample": image, "v": a.sqrt() * noise - (1 - a).sqrt() * image}
        errors = (self(a.sqrt() * image + (1 - a).sqrt() * noise, t) - targets[self.prediction]).square().mean(1)
        if self.weighted:
            errors = errors * lt.min_snr_weight(ALPHAS, t, prediction=self.prediction)
        return errors.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.layers.parameters(), lr=1e-3)

    @torch.no_grad()
    def generate(self, count: int) -> Tensor:
        """Images (count, 64) by the deterministic sampler of DDIM."""
        noisy = torch.randn(count, 64, generator=torch.Generator().manual_seed(0))
        times = torch.linspace(TIMESTEPS - 1, 0, DENOISING).long().tolist()
        for t, following in zip(times, [*times[1:], None], strict=True):
            a = ALPHAS[t]
            found = self(noisy, torch.full((count,), t))
            if self.prediction == "epsilon":
                image = (noisy - (1 - a).sqrt() * found) / a.sqrt()
            else:
                image = found if self.prediction == "sample" else a.sqrt() * noisy - (1 - a).sqrt() * found
            image = image.clamp(-1, 1)
            noise = (noisy - a.sqrt() * image) / (1 - a).sqrt()
            b = torch.tensor(1.0) if following is None else ALPHAS[following]
            noisy = b.sqrt() * image + (1 - b).sqrt() * noise
        return noisy


def distance(one: Tensor, other: Tensor) -> float:
    """The Fréchet distance of two normal distributions with the means and covariances of images (n, 64)."""
    one, other = one.double(), other.double()
    a, b = torch.cov(one.T), torch.cov(other.T)
    roots = torch.linalg.eigvals(a @ b).real.clamp(min=0).sqrt()
    return float((one.mean(0) - other.mean(0)).square().sum() + a.trace() + b.trace() - 2 * roots.sum())


def fitted(images: Tensor, prediction: str, weighted: bool, seed: int) -> float:
    L.seed_everything(seed, verbose=False)
    module = Diffusion(prediction, weighted)
    loader = DataLoader(TensorDataset(images), BATCH, shuffle=True, drop_last=True)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    L.Trainer(accelerator="cpu", max_steps=STEPS, max_epochs=-1, **quiet).fit(module, loader)
    return distance(module.eval().generate(len(images)), images)


def main() -> None:
    from sklearn.datasets import load_digits

    images, rows = torch.from_numpy(load_digits().data).float() / 8 - 1, []
    with small_runs():
        for prediction in PREDICTIONS:
            found = {w: [fitted(images, prediction, w, seed) for seed in SEEDS] for w in (False, True)}
            for weighted, distances in found.items():
                mean, spread = statistics.fmean(distances), statistics.stdev(distances)
                row = {
                    "prediction": prediction,
                    "min_snr": weighted,
                    "distance": round(mean, 3),
                    "std": round(spread, 3),
                }
                better = sum(a < b for a, b in zip(found[True], found[False], strict=True))
                rows.append({**row, "seeds_better": better} if weighted else row)
                print(rows[-1], flush=True)
    settings = {"seeds": list(SEEDS), "steps": STEPS, "batch": BATCH, "timesteps": TIMESTEPS, "denoising": DENOISING}
    result = {"benchmark": "diffusion", "machine": machine("scikit-learn"), "settings": settings, "rows": rows}
    OUTPUT.write_text(written(result))


if __name__ == "__main__":
    main()
