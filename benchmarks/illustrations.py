"""The pictures of the cards: what a trick does to images, layers, lengths, gradients and weights, as it does it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import illustrated_fits
import lightning as L
import torch
import torch.nn.functional as F
from picture_parts import GREY, OURS, PLAIN, WARM, bare, digits, network, train
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_tricks as lt
from lightning_tricks.callbacks.auto_clip import clip_value
from lightning_tricks.callbacks.batch_size_warmup import doublings, factor_at
from lightning_tricks.functional import (
    colout,
    cutmix,
    cutout,
    ema_decay,
    growing_size,
    min_snr_weight,
    mixup,
    sam_perturb_,
)

FOLDER = Path(__file__).parent.parent / "docs" / "tricks"


def photograph() -> Tensor:
    """A grey photograph (1, 1, 64, 64) of scikit-learn in [0, 1]."""
    from sklearn.datasets import load_sample_image

    rgb = torch.tensor(load_sample_image("flower.jpg")).float().permute(2, 0, 1)[None, :, :420, 120:540] / 255
    return F.interpolate(rgb.mean(1, keepdim=True), size=64, mode="bilinear", antialias=True)


def _images(figure: Any, images: dict[str, Tensor]) -> None:
    for axis, (title, image) in zip(figure.subplots(1, len(images)), images.items(), strict=True):
        axis.imshow(image.squeeze().numpy(), cmap="gray", vmin=0, vmax=1, interpolation="none")
        axis.set_title(title)
        axis.set_axis_off()


def mixed(figure: Any) -> None:
    """A three and an eight, and their mixtures."""
    x, y = digits()
    pair = torch.stack([x[y == 3][0], x[y == 8][0]]).view(2, 1, 8, 8)
    swap = torch.tensor([1, 0])
    pasted, lam = cutmix(pair, 0.6, swap, torch.Generator().manual_seed(0))
    _images(
        figure,
        {
            "a 3": pair[0],
            "an 8": pair[1],
            "Mixup: 0.7 of 3, 0.3 of 8": mixup(pair, 0.7, swap)[0],
            f"CutMix: {lam:.2f} of 3, {1 - lam:.2f} of 8": pasted[0],
        },
    )


def cut(figure: Any) -> None:
    """A photograph, without a square and without rows and columns."""
    x, generator = photograph(), torch.Generator().manual_seed(1)
    images = {
        "the sample": x,
        "CutOut(0.5)": cutout(x[0], 0.5, generator),
        "ColOut(0.3, 0.3)": colout(x[0], 0.3, 0.3, generator),
    }
    _images(figure, images)


def blurred(figure: Any) -> None:
    """Rings that get finer outwards, through a convolution of stride 2 with and without BlurPool."""
    place = torch.linspace(-1, 1, 96)
    x = (0.5 + 0.5 * torch.cos(75 * (place[:, None] ** 2 + place**2)))[None, None]
    strided = nn.Sequential(nn.Conv2d(1, 1, 3, 2, padding=1, bias=False)).requires_grad_(False)
    strided[0].weight.zero_()[0, 0, 1, 1] = 1
    images = {"the input": x, "every second pixel: false rings": strided(x)}
    lt.add_blur_pool(strided, modules="0")
    _images(figure, {**images, "with add_blur_pool": strided(x)})


class Layers(L.LightningModule):
    """Six layers, with a list of which of them train in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
        self.trains: list[list[bool]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.trains.append([layer.weight.requires_grad and layer.weight.grad is not None for layer in self.layers])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _trained_layers(figure: Any, trick: L.Callback) -> None:
    """Which layers a fit of 60 steps trains in each."""
    import matplotlib.colors

    module = Layers()
    loader = DataLoader(TensorDataset(torch.ones(120, 4)), batch_size=2)
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    L.Trainer(max_epochs=1, accelerator="cpu", callbacks=[trick], **quiet).fit(module, loader)
    axis = figure.subplots()
    trains = torch.tensor(module.trains).T.flip(0)
    colours = matplotlib.colors.ListedColormap([GREY, OURS])
    axis.imshow(trains.numpy(), aspect="auto", cmap=colours, vmin=0, vmax=1, extent=(0, 1, -0.5, 5.5))
    axis.set_yticks(range(6), ["stem", *(f"block {number}" for number in range(1, 5)), "head"])
    axis.hlines([0.5, 1.5, 2.5, 3.5, 4.5], 0, 1, color="white", linewidth=2)
    axis.set_xlabel("share of training; violet: trains, grey: frozen")
    axis.spines[:].set_visible(False)


def unfrozen(figure: Any) -> None:
    """From the head to the stem."""
    _trained_layers(figure, lt.GradualUnfreeze([0.15, 0.3, 0.45, 0.6, 0.75], parameters=r"layers\.(\d+)"))


def frozen(figure: Any) -> None:
    """From the stem on."""
    _trained_layers(figure, lt.LayerFreezing(0.7, start=0.4, stop=0.9, parameters=r"layers\.(\d+)"))


def batches(figure: Any) -> None:
    """The batch of an optimizer step, by epoch."""
    axis, factors = figure.subplots(), doublings(1, 8)
    axis.stairs(
        [32 * factor_at(epoch, factors, growth=10) for epoch in range(20)], baseline=None, color=OURS, linewidth=2
    )
    axis.set_xlabel("epoch")
    axis.set_title("samples in an optimizer step: BatchSizeWarmup(1, final=8, over=0.5), loader of 32")
    axis.set_ylim(0, 280)
    bare(axis)


def lengths(figure: Any) -> None:
    """Tokens and pixels, over training."""
    axes = figure.subplots(1, 2)
    steps = [step / 500 for step in range(501)]
    tokens = [growing_size(step, full=512, initial=0.25, stop=0.3, multiple_of=8) for step in steps]
    pixels = [growing_size(step, full=224, initial=0.5, stop=0.8, multiple_of=32) for step in steps]
    titles = ("tokens: SequenceLengthWarmup(0.25)", "height and width: ProgressiveResizing(0.5)")
    for axis, sizes, title in zip(axes, (tokens, pixels), titles, strict=True):
        axis.plot(steps, sizes, color=OURS, linewidth=2)
        axis.set_title(title)
        axis.set_ylim(0)
        axis.set_xlabel("share of training")
    bare(*axes)


def averaged(figure: Any) -> None:
    """Noisy gradient descent in a narrow valley, and two averages of its path."""
    curvature, generator = torch.tensor([1.0, 12.0]), torch.Generator().manual_seed(0)
    weight = torch.tensor([-2.0, 1.0])
    ema, mean, count = weight.clone(), torch.zeros(2), 0
    paths: dict[str, list[Tensor]] = {"weights": [], "EMA": [], "SWA": []}
    for step in range(160):
        weight = weight - 0.1 * (curvature * weight + 3 * torch.randn(2, generator=generator))
        ema = torch.lerp(weight, ema, ema_decay(step, 0.95))
        paths["weights"].append(weight)
        paths["EMA"].append(ema)
        if step >= 100:
            count += 1
            mean = mean + (weight - mean) / count
            paths["SWA"].append(mean)
    axis = figure.subplots()
    across, up = torch.meshgrid(torch.linspace(-2.6, 2.2, 60), torch.linspace(-1.6, 1.6, 60), indexing="xy")
    axis.contour(across, up, (across.square() + 12 * up.square()) / 2, levels=8, colors=GREY, linewidths=0.8)
    for (name, path), colour in zip(paths.items(), (PLAIN, OURS, WARM), strict=True):
        points = torch.stack(path)
        axis.plot(*points.T, color=colour, linewidth=0.9 if name == "weights" else 2.2, label=name)
        axis.plot(*points[-1], "o", color=colour)
    axis.plot(0, 0, "k+", markersize=10, label="minimum")
    axis.legend(frameon=False, ncols=4, loc="upper right")
    axis.set_axis_off()


def flat(figure: Any) -> None:
    """A loss with a sharp and a flat minimum, and the loss at the perturbed weight, which SAM descends."""

    def loss(weight: Tensor) -> Tensor:
        return 0.25 * (1 - torch.cos(1.4 * weight)) - 0.8 * torch.exp(-(((weight - 2.2) / 0.1) ** 2))

    line = torch.linspace(-1.8, 3, 600)
    perturbed = line.clone()
    for number in range(len(line)):
        weight = line[number : number + 1].clone().requires_grad_()
        gradient = torch.autograd.grad(loss(weight).sum(), weight)
        sam_perturb_([weight], gradient, 0.15)
        perturbed[number] = weight.item()
    axis = figure.subplots()
    for values, colour, label in (
        (loss(line), WARM, "loss at w"),
        (loss(perturbed), OURS, "loss at w + e, which SAM descends"),
    ):
        axis.plot(line, values, color=colour, linewidth=1.5, label=label)
        axis.plot(line[values.argmin()], values.min(), "o", color=colour, markersize=8)
    axis.legend(frameon=False, loc="lower left")
    axis.set_xlabel("weight; dots: the minima of both")
    axis.set_yticks([])
    bare(axis)


def rounded(figure: Any) -> None:
    """The weights of a trained layer, and what they are with 4 bits."""
    net = network()
    train(net)
    before = net[0].weight.detach().clone()
    after = lt.quantize(net, "int4")[0].weight.dequantize()
    axes, limits = figure.subplots(1, 2, sharex=True), (before[0].min().item(), before[0].max().item())
    for axis, weights, title in zip(axes, (before[0], after[0]), ("a row of weights", "after 4 bits"), strict=True):
        axis.hist(weights.numpy(), bins=120, range=limits, color=OURS, histtype="stepfilled")
        axis.set_title(f"{title}: {len(weights.unique())} values")
        axis.set_xlabel("weight")
        axis.set_yticks([])
    bare(*axes)


def clipped(figure: Any) -> None:
    """Norms of gradients in a training on digits, and AutoClip's threshold."""
    norms = torch.stack(train(network()))
    limits = [clip_value(norms[: step + 1], 10) for step in range(len(norms))]
    axis = figure.subplots()
    axis.plot(norms.numpy(), color=PLAIN, linewidth=0.8, label="norm of the gradient")
    axis.plot(limits, color=OURS, linewidth=2, label="AutoClip(10): the 10th percentile so far")
    axis.set_xlabel("optimizer step")
    axis.set_yscale("log")
    axis.legend(frameon=False)
    bare(axis)


def filtered(figure: Any) -> None:
    """Losses of digits of which 40% have a wrong label, and the half that is kept."""
    x, y = digits()
    generator = torch.Generator().manual_seed(0)
    wrong = torch.rand(len(y), generator=generator) < 0.4
    labels = torch.where(wrong, (y + torch.randint(1, 10, y.shape, generator=generator)) % 10, y)
    net = network()
    train(net, labels)
    losses = F.cross_entropy(net(x), labels, reduction="none").detach()
    axis = figure.subplots()
    axis.hist(
        [losses[~wrong].numpy(), losses[wrong].numpy()],
        bins=60,
        stacked=True,
        histtype="stepfilled",
        color=[OURS, WARM],
        label=["right label", "wrong label"],
    )
    limit = losses.median()
    axis.axvline(limit, color="black", linewidth=1)
    axis.text(
        limit + 0.05, axis.get_ylim()[1] * 0.9, f"kept with keep=0.5: {wrong[losses > limit].float().mean():.0%} wrong"
    )
    axis.set_xlabel("loss of a sample after four epochs, digits with 40% wrong labels")
    axis.set_yticks([])
    axis.legend(frameon=False)
    bare(axis)


def padded(figure: Any) -> None:
    """What is padding in batches of sequences, shuffled and in buckets."""
    import matplotlib.colors

    generator = torch.Generator().manual_seed(0)
    found = (24 * torch.exp(0.7 * torch.randn(4096, generator=generator))).int().clamp(4, 200)
    shuffled = torch.randperm(4096, generator=generator).split(16)
    bucketed = torch.tensor([*lt.LengthBuckets(found, 16, seed=0)]).split(16)
    colours = matplotlib.colors.ListedColormap(["white", GREY, OURS])
    axes = figure.subplots(1, 2)
    for axis, parts, title in zip(axes, (shuffled, bucketed), ("shuffled", "LengthBuckets"), strict=True):
        used, held = found.sum(), sum(found[part].max() * len(part) for part in parts)
        rows = torch.zeros(6, 19, 200)  # 0 is no batch, 1 padding, 2 a token
        for row, part in zip(rows, parts[:6], strict=True):
            row[:16, : found[part].max()] = 1
            row[:16][torch.arange(200) < found[part][:, None]] = 2
        axis.imshow(rows.flatten(0, 1).numpy(), aspect="auto", cmap=colours, interpolation="none")
        axis.set_title(f"{title}: {1 - used / held:.0%} is padding")
        axis.set_xlabel("tokens; six batches of 16")
        axis.set_yticks([])
    bare(*axes)


def weighted(figure: Any) -> None:
    """Weights by timestep of a cosine noise schedule."""
    t = torch.arange(1000)
    alphas = torch.cos((t / 1000 + 0.008) / 1.008 * torch.pi / 2).square().clamp(1e-4, 0.9999)
    axis = figure.subplots()
    for gamma, colour in ((1.0, PLAIN), (5.0, OURS), (20.0, WARM)):
        axis.plot(t, min_snr_weight(alphas, t, gamma=gamma), color=colour, label=f"gamma={gamma:g}", linewidth=2)
    axis.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axis.set_xlabel("timestep, from clean to noise (a cosine schedule)")
    axis.set_title("weight of the loss of a predicted noise")
    axis.set_ylim(0, 1.08)
    axis.legend(frameon=False)
    bare(axis)


def replanned(figure: Any) -> None:
    """The learning rate of a fit of four epochs that goes on from its middle, with larger steps or for longer."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "middle.ckpt"
        whole, *others = [
            _rates(4, 1, save=path), _rates(4, 4, ckpt_path=path), _rates(8, 1, ckpt_path=path)
        ]  # fmt: skip
    axis = figure.subplots()
    axis.plot(*whole, color=PLAIN, linewidth=3, label="max_epochs=4")
    axis.plot(*others[0], color=WARM, marker="o", markersize=3, linewidth=1, label="resumed with accumulation 4")
    axis.plot(*others[1], color=OURS, linewidth=2, label="resumed with max_epochs=8")
    axis.axvline(2, color="black", linewidth=0.8, linestyle=":")
    axis.set_xlabel("epochs")
    axis.set_title("learning rate of lt.cosine, resumed after two epochs")
    axis.legend(frameon=False)
    bare(axis)


def _rates(
    epochs: int, accumulate: int, *, save: Path | None = None, ckpt_path: Path | None = None
) -> tuple[list[float], list[float]]:
    """The epochs at which a fit has stepped, and the learning rates of the steps."""
    module = Curved()
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    callbacks = [Saved(save)] if save else []
    run = L.Trainer(
        max_epochs=epochs, accumulate_grad_batches=accumulate, callbacks=callbacks, accelerator="cpu", **quiet
    )
    run.fit(module, DataLoader(TensorDataset(torch.ones(20, 1))), ckpt_path=ckpt_path, weights_only=True)
    begun = 2.0 if ckpt_path else 0.0
    return [begun + step * accumulate / 20 for step in range(len(module.rates))], module.rates


class Saved(L.Callback):
    """Saves a checkpoint at the end of the second epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


class Curved(L.LightningModule):
    """One weight, whose optimizer follows a cosine."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rates = nn.Linear(1, 1), list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        return lt.cosine(torch.optim.SGD(self.parameters(), lr=1.0), self)


PICTURES: dict[str, tuple[Callable[[Any], None], tuple[float, float]]] = {
    "mixed": (mixed, (8.5, 2.3)),
    "cut": (cut, (6.5, 2.3)),
    "blurred": (blurred, (6.8, 2.5)),
    "unfrozen": (unfrozen, (7, 2.2)),
    "frozen": (frozen, (7, 2.2)),
    "batches": (batches, (7, 2)),
    "lengths": (lengths, (8, 2.1)),
    "averaged": (averaged, (7, 2.6)),
    "flat": (flat, (7, 2.4)),
    "rounded": (rounded, (7.5, 2)),
    "clipped": (clipped, (7, 2.4)),
    "filtered": (filtered, (7, 2.4)),
    "padded": (padded, (8, 2.6)),
    "weighted": (weighted, (7, 2.2)),
    "replanned": (replanned, (7, 2.4)),
    **illustrated_fits.PICTURES,
}  # How each is drawn, and its size in inches.


def draw(path: Path) -> None:
    """Draw the picture of that name, an SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    how, size = PICTURES[path.stem]
    with matplotlib.rc_context(
        {"svg.hashsalt": path.stem, "svg.fonttype": "none", "font.size": 8, "axes.titlesize": 9}
    ):
        figure = pyplot.figure(figsize=size, layout="constrained")
        figure.get_layout_engine().set(h_pad=0.1, w_pad=0.1)
        how(figure)
        figure.savefig(path, metadata={"Date": None}, facecolor="white")
        pyplot.close(figure)
