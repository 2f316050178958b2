"""Further pictures of the cards, each of a small fit, a sampler or a schedule; ``illustrations.py`` draws them."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from picture_parts import GREY, OURS, PLAIN, WARM, bare, digits, network, train
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_tricks as lt
from lightning_tricks.functional import logit_adjustment, power_decay

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Shares(L.LightningModule):
    """A weight for each target, whose gradient is what the target counts for in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.targets, self.counted = nn.Parameter(torch.zeros(32)), torch.zeros(32)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.targets[batch].mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.targets.grad is not None
        self.counted = self.targets.grad.clone()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def counted(figure: Any) -> None:
    """What each target counts for in a step of two batches, of 4 and of 28 targets."""
    batches = [torch.arange(4), torch.arange(4, 32)]
    axes = figure.subplots(1, 2, sharey=True)
    tricks = {"mean of the batches' means": [], "TokenMean": [lt.TokenMean(count=len)]}
    for axis, (title, callbacks) in zip(axes, tricks.items(), strict=True):
        module, loader = Shares(), DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
        steps = {"max_epochs": 1, "accumulate_grad_batches": 2, "logger": False}
        L.Trainer(callbacks=callbacks, **steps, **QUIET).fit(module, loader)
        axis.bar(range(32), 100 * module.counted, color=[WARM] * 4 + [OURS] * 28)
        axis.set_title(f"{title}: the short batch counts for {module.counted[:4].sum():.0%}")
        axis.set_xlabel("targets: 4 of the one batch, 28 of the other")
    axes[0].set_ylabel("% of the gradient")
    bare(*axes)


def remembered(figure: Any) -> None:
    """What the weights of each step count for at the end, in averages of several lengths."""
    steps = 400
    axis = figure.subplots()

    def profile(decays: list[float]) -> Tensor:
        later = torch.tensor([*decays[1:], 1.0], dtype=torch.float64).flip(0).cumprod(0).flip(0)
        return (1 - torch.tensor(decays, dtype=torch.float64)) * later

    for length, colour in ((0.05, OURS), (0.1, WARM), (0.2, PLAIN)):
        decays = [power_decay(step, length) for step in range(1, steps + 1)]
        axis.plot(torch.arange(1, steps + 1) / steps, 100 * profile(decays), color=colour, lw=2, label=f"{length:g}")
    axis.set_xlabel("share of training")
    axis.set_title("what the weights of a step count for in the average at the end, %, by sigma_rel")
    axis.legend(frameon=False)
    axis.set_ylim(0)
    bare(axis)


def balanced(figure: Any) -> None:
    """The classes of 2,000 labels, and of an epoch of ``balanced_sampler``."""
    labels = [number for number, count in enumerate((1200, 500, 200, 70, 30)) for _ in range(count)]
    axes = figure.subplots(1, 3, sharey=True)
    orders = {"as they are": range(2000)}
    orders |= {f"power={power:g}": lt.balanced_sampler(labels, power=power, seed=0) for power in (0.5, 1.0)}
    for axis, (title, order) in zip(axes, orders.items(), strict=True):
        drawn = torch.tensor([labels[index] for index in order]).bincount(minlength=5)
        axis.bar(range(5), drawn, color=PLAIN if title == "as they are" else OURS)
        axis.set_title(f"samples of an epoch, {title}")
        axis.set_xlabel("class")
    bare(*axes)


def adjusted(figure: Any) -> None:
    """Where a classifier of one number decides, trained on a class that is 2% of the samples."""
    generator = torch.Generator().manual_seed(0)
    classes = (torch.arange(20_000) % 50 == 0).long()
    x = torch.randn(len(classes), generator=generator) + 2 * classes
    share = classes.float().mean()
    prior = torch.stack([1 - share, share])
    axis = figure.subplots()
    line = torch.linspace(-3.5, 5.5, 300)
    for number, colour in enumerate((PLAIN, OURS)):
        density = torch.exp(-((line - 2 * number) ** 2) / 2) / (2 * torch.pi) ** 0.5
        axis.fill_between(line, 0, density, color=colour, alpha=0.35, linewidth=0)
    axis.text(-0.3, 0.1, "98% of\nthe samples", color="#4b5563", ha="center")
    axis.text(2.1, 0.1, "2%", color=OURS, ha="center")
    losses: dict[str, Callable[[Tensor], Tensor]] = {
        "cross-entropy": lambda logits: F.cross_entropy(logits, classes),
        "LogitAdjustment": lambda logits: logit_adjustment(logits, classes, prior),
    }
    for (name, loss), (style, side) in zip(losses.items(), ((":", "left"), ("-", "right")), strict=True):
        weight, bias = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
        optimizer = torch.optim.LBFGS([weight, bias], max_iter=100, line_search_fn="strong_wolfe")

        def closure(loss: Any = loss, weight: Tensor = weight, bias: Tensor = bias) -> Tensor:
            weight.grad = bias.grad = None
            value = loss(x[:, None] * weight + bias)
            value.backward()
            return value

        optimizer.step(closure)  # type: ignore[arg-type]
        limit = ((bias[0] - bias[1]) / (weight[1] - weight[0])).item()
        axis.axvline(limit, color="black", linestyle=style, linewidth=1.2)
        found = (x[classes == 1] > limit).float().mean()
        place = limit + (0.08 if side == "left" else -0.08)
        axis.text(place, 0.45, f"{name}: finds {found:.0%} of the rare class", ha=side)
    axis.set_ylim(0, 0.5)
    axis.set_yticks([])
    axis.set_xlabel("the feature; right of a line the rare class is predicted")
    bare(axis)


def taught(figure: Any) -> None:
    """What a trained network says of a digit, at two temperatures."""
    x, y = digits()
    net = network()
    train(net)
    with torch.no_grad():
        logits = net(x)
    sure = torch.softmax(logits, -1)
    sample = int(torch.where((y == 9) & (logits.argmax(-1) == 9), 1 - sure.amax(-1), -1).argmax())
    image, *axes = figure.subplots(1, 3, width_ratios=(1, 2, 2))
    image.imshow(x[sample].view(8, 8), cmap="gray", vmin=0, vmax=1, interpolation="none")
    image.set_title("a 9")
    image.set_axis_off()
    for axis, temperature in zip(axes, (1.0, 4.0), strict=True):
        axis.bar(range(10), torch.softmax(logits[sample] / temperature, -1), color=OURS)
        axis.set_title(f"the teacher, temperature={temperature:g}")
        axis.set_xticks(range(10))
        axis.set_ylim(0, 1)
    bare(*axes)


class Spiked(L.LightningModule):
    """A network for the digits that gets broken batches for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.losses = network(), list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = 200 * x if 120 <= batch_idx < 123 else x
        loss = F.cross_entropy(self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def rewound(figure: Any) -> None:
    """The loss of a training with three broken batches."""
    x, y = digits()
    order = torch.randint(len(x), (300 * 16,), generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x[order], y[order]), batch_size=16)
    axis = figure.subplots()
    tricks = {"plain training": [], "RewindOnSpike": [lt.RewindOnSpike(every_n_steps=20, window=20)]}
    for (name, callbacks), colour in zip(tricks.items(), (PLAIN, OURS), strict=True):
        module = Spiked()
        L.Trainer(max_epochs=1, callbacks=callbacks, logger=False, **QUIET).fit(module, loader)
        axis.plot(module.losses, color=colour, linewidth=1.3, label=name)
    axis.set_yscale("log")
    axis.set_xlabel("batch; three broken ones after 120")
    axis.set_title("training loss")
    axis.legend(frameon=False, loc="lower left")
    bare(axis)


class Swept(L.LightningModule):
    """A network for the digits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Training and validation data of the digits."""
    x, y = digits()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train_set, val_set = (
        TensorDataset(x[order[:1200]], y[order[:1200]]),
        TensorDataset(x[order[1200:]], y[order[1200:]]),
    )
    return DataLoader(train_set, batch_size=32), DataLoader(val_set, batch_size=len(val_set))


def swept(figure: Any) -> None:
    """A sweep of learning rates, and what it suggests."""
    with TemporaryDirectory() as folder:
        trainer = L.Trainer(max_epochs=3, logger=False, default_root_dir=folder, **QUIET)
        found = lt.find_lr(trainer, Swept(), loaders()[0], max_lr=10.0, steps=100)
    axis = figure.subplots()
    axis.plot(found.lrs, found.losses, color=GREY, linewidth=1, label="loss of a step")
    axis.plot(found.lrs, found.smoothed, color=OURS, linewidth=2, label="smoothed")
    axis.axvline(found.suggestion(), color=WARM, linewidth=1.5, label=f"suggestion(): {found.suggestion():.2g}")
    axis.set_xscale("log")
    axis.set_ylim(0, 3)
    axis.set_xlabel("learning rate")
    axis.legend(frameon=False, loc="lower left")
    bare(axis)


class Rates(L.LightningModule):
    """One weight, whose optimizer has no schedule of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rates = nn.Linear(1, 1), list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class SaveAt(L.Callback):
    """Saves a checkpoint after each of some steps."""

    def __init__(self, folder: str, steps: tuple[int, ...]) -> None:
        self.folder, self.steps = folder, steps

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(f"{self.folder}/{trainer.global_step}.ckpt")


def branched(figure: Any) -> None:
    """The learning rate of a run that is flat, and of cooldowns that branch from its checkpoints."""
    import warnings

    loader = DataLoader(TensorDataset(torch.ones(320, 1)))
    branches = (80, 160, 240)
    axis = figure.subplots()

    def rates(steps: int, tricks: list[L.Callback], **given: Any) -> list[float]:
        module = Rates()
        trainer = L.Trainer(max_epochs=-1, max_steps=steps, callbacks=tricks, logger=False, **QUIET)
        trainer.fit(module, loader, **given)
        return module.rates

    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a branch has another curve than its checkpoint
        flat = rates(300, [lt.LRSchedule("constant", warmup=20), SaveAt(folder, branches)])
        for step in branches:
            path = f"{folder}/{step}.ckpt"
            cooldown = rates(
                step + 40, [lt.LRSchedule("wsd", warmup=20, cooldown=40)], ckpt_path=path, weights_only=True
            )
            label = 'branches, LRSchedule("wsd", cooldown=40)' if step == branches[0] else None
            axis.plot(range(step, step + 40), cooldown, color=OURS, linewidth=2, label=label)
    axis.plot(flat, color=PLAIN, linewidth=2, label='the long run, LRSchedule("constant", warmup=20)', zorder=0)
    axis.set_xlabel("optimizer step")
    axis.set_title("factor of the learning rate")
    axis.set_ylim(0, 1.5)
    axis.legend(frameon=False, loc="upper right", ncols=2)
    bare(axis)


def dashboard(figure: Any) -> None:
    """What a CSV logger has of a run with four tricks, as a dashboard shows it."""
    callbacks = [
        lt.EMA(0.99),
        lt.AutoClip(),
        lt.GradientStats(every_n_steps=8),
        lt.LRSchedule("cosine", warmup=0.1),
        LearningRateMonitor("step"),
    ]
    with TemporaryDirectory() as folder:
        trainer = L.Trainer(max_epochs=6, callbacks=callbacks, logger=CSVLogger(folder), log_every_n_steps=8, **QUIET)
        trainer.fit(Swept(), *loaders())
        with open(Path(str(trainer.log_dir)) / "metrics.csv") as file:
            rows = [*csv.DictReader(file)]
    shown = ("train_loss", "val_loss", "lr-SGD", "tricks/grad_norm", "tricks/clip_value", "tricks/ema_decay")
    shown += ("tricks/ema_distance", "tricks/update_ratio")
    for axis, name in zip(figure.subplots(2, 4).flat, shown, strict=True):
        points = [(int(row["step"]), float(row[name])) for row in rows if row.get(name)]
        axis.plot(*zip(*points, strict=True), color=OURS, linewidth=1.2, marker="o" if len(points) < 10 else "", ms=3)
        axis.set_title(name, loc="left")
        axis.tick_params(labelsize=6, colors="#6b7280", length=0)
        axis.locator_params(nbins=4)
        axis.grid(color="#e5e7eb", linewidth=0.6)
        axis.spines[:].set_color("#e5e7eb")


PICTURES: dict[str, tuple[Callable[[Any], None], tuple[float, float]]] = {
    "counted": (counted, (8, 2.1)),
    "remembered": (remembered, (7, 2.2)),
    "balanced": (balanced, (8, 2)),
    "adjusted": (adjusted, (7, 2.3)),
    "taught": (taught, (7.5, 1.9)),
    "rewound": (rewound, (7, 2.3)),
    "swept": (swept, (7, 2.4)),
    "branched": (branched, (7, 2.2)),
    "dashboard": (dashboard, (9.5, 3.4)),
}  # How each is drawn, and its size in inches.
