# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Averaged weights: EMA and SWA
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/lightning-tricks/lightning_tricks/blob/main/notebooks/2_averages.ipynb)
#
# The weights of a network in training jump around the place they are heading for. Their average lies nearer to it.
#
# - **EMA** averages all the time and forgets: `average = d * average + (1-d) * weight` after every optimizer step.
# - **SWA** averages the last part of the training with equal weights: `average += (weight - average) / (n+1)`.
#
# Training itself goes on with the raw weights, as if the average was not there. Validation, checkpoints and the module
# after training have the averaged ones.

# %%
if "google.colab" in str(get_ipython()):
    get_ipython().run_line_magic(
        "pip", "install -q 'lightning-tricks[notebooks] @ git+https://github.com/lightning-tricks/lightning_tricks'"
    )
import lightning as L

import lightning_tricks as lt

_ = L.seed_everything(0, verbose=False)

# %%
import logging
import os
import statistics
import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities import disable_possible_user_warnings
from torch.utils.data import DataLoader

from lightning_tricks.examples.digits import Digits, load_digits, network
from lightning_tricks.examples.tasks import Classifier, accuracy

FAST = "LIGHTNING_TRICKS_FAST" in os.environ  # a short run, for tests
SEEDS, EPOCHS = (1, 1) if FAST else (5, 40)

logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # without its notes on devices and tips
disable_possible_user_warnings()  # nor on the number of workers
warnings.filterwarnings("ignore", message=".*LeafSpec")  # Lightning's use of a function of torch
torch.set_num_threads(1)  # quickest for networks as small as these
plt.rcParams.update({"figure.dpi": 80, "axes.grid": True, "grid.alpha": 0.3})
QUIET = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
QUIET |= {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}

# %% [markdown]
# ## Raw against averaged
#
# `validate="both"` validates twice: metrics of the averaged weights keep their names, those of the raw ones end in
# `_raw`. The task: handwritten digits with 40% wrong training labels; the labels of validation and test are
# right.


# %%
def loaders(noise, batch_size=64, shuffle=True):
    train, val = (list(zip(*load_digits(noise)[part], strict=True)) for part in ("train", "val"))
    return DataLoader(train, batch_size, shuffle=shuffle), DataLoader(val, batch_size=300)


class Curves(Callback):
    def __init__(self):
        self.raw, self.averaged = [], []

    def on_validation_end(self, trainer, pl_module):
        self.averaged.append(trainer.callback_metrics["val_accuracy"].item())
        self.raw.append(trainer.callback_metrics["val_accuracy_raw"].item())


def fit(average, noise, seed, schedule=False):
    L.seed_everything(seed, verbose=False)
    module, curves = Digits(schedule=schedule), Curves()
    L.Trainer(max_epochs=EPOCHS, callbacks=[average, curves], **QUIET).fit(module, *loaders(noise))
    return module, curves


# %%
AVERAGES = {
    "EMA(decay=0.999)": lambda: lt.EMA(decay=0.999, validate="both"),
    "SWA(start=0.5)": lambda: lt.SWA(start=0.5, validate="both"),
}
runs = {name: [fit(make(), 0.4, seed)[1] for seed in range(SEEDS)] for name, make in AVERAGES.items()}

figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
for ax, (name, curves) in zip(axes, runs.items(), strict=True):
    for which in ("raw", "averaged"):
        values = torch.tensor([getattr(curve, which) for curve in curves])
        mean, std, epochs = values.mean(0), values.std(0, correction=0), range(1, EPOCHS + 1)
        ax.plot(epochs, mean, label=f"{which} weights")
        ax.fill_between(epochs, mean - std, mean + std, alpha=0.2)
    ax.set(title=name, xlabel="epoch")
axes[0].set(ylabel="validation accuracy")
_ = axes[0].legend(loc="lower left", frameon=False)

# %% [markdown]
# The raw weights memorize the wrong labels, one after the other; their average never follows any of them that
# far. It is above them from the second epoch on (EMA) or from its start on (SWA), with less spread between the seeds.
# Even the average falls in the end, though: it is a remedy for jumping, no cure for wrong labels.
#
# ## At the end, with wrong and with right labels
#
# And next to the other remedy for jumping, a learning rate that falls: `flat_cos` (see
# [5_schedules](5_schedules.ipynb)).


# %%
def shown(values):
    return f"{statistics.fmean(values):.3f} ± {statistics.pstdev(values):.3f}"


print(f"test accuracy of {SEEDS} seeds     40% wrong      right labels")
choices = {"raw weights": lambda: lt.EMA(at_end="raw", validate="both"), **AVERAGES}
for schedule in (False, True):
    for name, make in choices.items():
        columns = []
        for noise in (0.4, 0.0):
            modules = [fit(make(), noise, seed, schedule)[0] for seed in range(SEEDS)]
            columns.append([accuracy(module.network, *load_digits(noise)["test"]).item() for module in modules])
        print(f"{name + ', flat_cos' * schedule:27}  {shown(columns[0])}  {shown(columns[1])}")

# %% [markdown]
# With wrong labels both averages are some ten points above the raw weights; after `flat_cos`, which alone gains seven,
# it is two points for EMA, within the spread, and four for SWA. With right labels there is **no difference**.
#
# ## What is in a checkpoint?
#
# The `state_dict` has the weights that were *validated*, the averaged ones, so that the best checkpoint scores what its
# name says, and loads into plain torch. The raw weights, with which training goes on, are in the callback's state.

# %%
folder = Path(tempfile.mkdtemp())
L.seed_everything(0, verbose=False)
module = Digits()
trainer = L.Trainer(max_epochs=EPOCHS, callbacks=[lt.EMA()], **QUIET)
trainer.fit(module, *loaders(0.4))
trainer.save_checkpoint(folder / "last.ckpt")

lt.export_weights(folder / "last.ckpt", folder / "averaged.pt", strip_prefix="network")
lt.export_weights(folder / "last.ckpt", folder / "raw.pt", which="raw", strip_prefix="network")
net = network()  # an nn.Sequential that has never seen Lightning
for name in ("averaged", "raw"):
    net.load_state_dict(torch.load(folder / f"{name}.pt"))
    print(f"{name:8} weights: test accuracy {accuracy(net, *load_digits(0.4)['test']):.3f}")

checkpoint = torch.load(folder / "last.ckpt", weights_only=True)
print("\nstate_dict:", ", ".join(list(checkpoint["state_dict"])[:2]), "...")
for name, state in checkpoint["callbacks"].items():
    print(f"callbacks[{name!r}]:", ", ".join(state))

# %% [markdown]
# ## Resume
#
# A run that stops and goes on ends where the uninterrupted run ends, bit for bit: here half of the epochs, a
# checkpoint, a new Trainer, the other half. (The loader does not shuffle here, since Lightning does not restore the
# order of one that does.)


# %%
def half_by_half(epochs, ckpt_path=None):
    L.seed_everything(0, verbose=False)
    module = Digits()
    trainer = L.Trainer(max_epochs=epochs, callbacks=[lt.EMA()], **QUIET)
    trainer.fit(module, loaders(0.4, shuffle=False)[0], ckpt_path=ckpt_path)
    trainer.save_checkpoint(folder / f"{epochs}.ckpt")
    return module.state_dict()


straight = half_by_half(4)
half_by_half(2)
resumed = half_by_half(4, folder / "2.ckpt")
print("equal:", all(torch.equal(straight[name], resumed[name]) for name in straight))

# %% [markdown]
# ## Averages of files
#
# Nothing was averaged during training, but the checkpoints are there? `average_checkpoints` averages those that you
# name; `greedy_soup` goes from the best to the worst and keeps each that does not harm the score on held-out data.

# %%
images, labels = load_digits(0.4)["val"]


def score(state_dict):
    net.load_state_dict({name.removeprefix("network."): value for name, value in state_dict.items()})
    return accuracy(net, images, labels).item()


rows = {"last": [], "best": [], "mean of the last ten": [], "greedy soup of all": []}
for seed in range(SEEDS):
    L.seed_everything(seed, verbose=False)
    place = folder / f"seed {seed}"
    every = ModelCheckpoint(place, filename="{epoch:02d}", save_top_k=-1)
    L.Trainer(max_epochs=EPOCHS, callbacks=[every], **QUIET | {"enable_checkpointing": True}).fit(
        Digits(), *loaders(0.4)
    )
    files = sorted(place.glob("*.ckpt"))
    lt.average_checkpoints(files[-10:], place / "mean.pt")
    chosen = lt.greedy_soup(files, score, place / "soup.pt")
    for name, file in zip(rows, (files[-1], chosen[0], place / "mean.pt", place / "soup.pt"), strict=True):
        state = torch.load(file, weights_only=True)
        score(state.get("state_dict", state))
        rows[name].append(accuracy(net, *load_digits(0.4)["test"]).item())
for name, values in rows.items():
    print(f"{name:20}  {shown(values)}")
print("the last soup took", len(chosen), "of", len(files), "files")

# %% [markdown]
# The soup is far above the last checkpoint and above the best single one, with nothing trained anew; the validation
# images chose, the test images measured. A plain mean of the last ten gains more than half as much and needs no
# validation data.
#
# ## Another batch size
#
# `decay` is per optimizer step. A batch 8 times as large takes an eighth of the steps; with the same decay the
# average would look 8 times as far back. `scale_ema_decay(decay, ...)` is `decay ** 8`, which remembers as many
# *samples*:

# %%
scaled = lt.functional.scale_ema_decay(0.999, batch_size=256, base_batch_size=32)
figure, ax = plt.subplots(figsize=(6, 2.8))
for batch_size, decay, style, width in ((32, 0.999, "-", 5), (256, 0.999, "-", 1.5), (256, scaled, "--", 1.5)):
    steps = range(0, 900 * 80 // batch_size)
    epochs_ago = [step * batch_size / 900 for step in steps]
    ax.plot(
        epochs_ago,
        [decay**step for step in steps],
        style,
        linewidth=width,
        label=f"batch {batch_size}, decay {decay:.4f}",
    )
ax.set(xlabel="epochs ago", ylabel="weight in the average\n(that of now: 1)")
_ = ax.legend(frameon=False)

# %%
cases = {"batch 32": (32, 0.02, 0.995), "batch 256, same decay": (256, 0.16, 0.995)}
cases["batch 256, scaled decay"] = (256, 0.16, lt.functional.scale_ema_decay(0.995, batch_size=256, base_batch_size=32))
for name, (batch_size, lr, decay) in cases.items():
    values = []
    for seed in range(SEEDS):
        L.seed_everything(seed, verbose=False)
        module, average = Classifier(network(), lr), lt.EMA(decay, warmup=False)
        L.Trainer(max_epochs=EPOCHS, callbacks=[average], **QUIET).fit(module, loaders(0.4, batch_size)[0])
        values.append(accuracy(module.network, *load_digits(0.4)["test"]).item())
    print(f"{name:23}  decay {decay:.3f}  {shown(values)}")

# %% [markdown]
# Scaled, the average of the large batch is near that of the small one. Unscaled it looks further back, and that
# happens to be **better** here, where early weights know least of the wrong labels: the rule keeps what you had, it
# does not look for the best decay. (`warmup=False` is for the comparison. With the default warm-up, `min(decay,
# (1+n)/(10+n))` after n updates, a run as short as this never reaches its decay, and both come out the same.)
#
# ## When not to use it
#
# - **The labels are right and the training has settled**: no difference in the right column of the table above, for a
#   copy of the weights in memory.
# - **The learning rate falls to zero**: the last weights move little, so the average is close to them: two to four
#   points in the table in place of ten.
# - **Very short runs** with a large decay and `warmup=False`: the average is still where the training began.
# - **BatchNorm with SWA**: the average needs statistics of its own, which `SWA` takes in one more pass over the data;
#   `EMA` copies those of the module.
#
# ## What we learned
#
# - With wrong labels an average of the weights is about ten points above the weights themselves, and `EMA` takes one
#   line. With right labels it changes nothing here; in the benchmarks, with plain training tuned, it gains a little.
# - A learning rate that falls does part of the same job; the two gains do not add up.
# - A checkpoint has the averaged weights, and the raw ones to resume from. Resuming is exact.
# - Files that were never averaged can be averaged afterwards; a greedy soup beat every single checkpoint here.
#
# Cards: [EMA](../docs/tricks/EMA.md), [SWA](../docs/tricks/SWA.md),
# [average_checkpoints and greedy_soup](../docs/tricks/average_checkpoints.md).
