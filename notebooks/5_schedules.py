# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Learning-rate schedules
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/lightning-tricks/lightning_tricks/blob/main/notebooks/5_schedules.ipynb)
#
# A schedule here is a curve `f` of the optimizer step: `lr = base * f(t)`, where `base` is the learning rate that you
# gave to the optimizer. Its length is counted for you, whatever the Trainer accumulates and on however many devices.
# This notebook draws the curves, finds a base learning rate, and measures what a schedule, a warm-up and a larger
# batch change.

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
import warnings
from functools import partial

import matplotlib.pyplot as plt
import torch
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
# ## The curves, before anything is trained
#
# `lt.plot_schedule` draws any of them, and any scheduler of torch, by stepping a copy of it.

# %%
CURVES = {
    "constant": partial(lt.constant, warmup=0.1),
    "linear": partial(lt.linear, warmup=0.1),
    "cosine": partial(lt.cosine, warmup=0.1),
    "cosine_restarts": partial(lt.cosine_restarts, cycles=3),
    "flat_cos": partial(lt.flat_cos, warmup=0.1),
    "one_cycle": lt.one_cycle,
    "wsd": partial(lt.wsd, warmup=0.1),
    "step_decay": partial(lt.step_decay, warmup=0.1),
    "polynomial": partial(lt.polynomial, warmup=0.1),
    "inverse_sqrt": partial(lt.inverse_sqrt, warmup=0.1),
}
figure, axes = plt.subplots(2, 5, figsize=(12, 4.4), sharex=True, sharey=True, layout="constrained")
for ax, (name, curve) in zip(axes.flat, CURVES.items(), strict=True):
    lt.plot_schedule(curve, steps=300, ax=ax)
    ax.set(title=name, ylim=(0, 1.05))
    ax.label_outer()

# %% [markdown]
# In a module it is one word around the optimizer. What it returns is Lightning's own dictionary with
# `interval="step"`, which everyone forgets once: without it a curve of 300 steps is stepped once an epoch and never
# falls.
#
# Durations are steps (`warmup=50`) or fractions of the training (`warmup=0.05`). In YAML, or for a module that you do
# not want to touch, `callbacks=[lt.LRSchedule("wsd", warmup=0.05)]` is the same.


# %%
class WithSchedule(Digits):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return lt.wsd(optimizer, self, warmup=0.05, cooldown=0.3)  # instead of: return optimizer


# %% [markdown]
# Parameter groups keep their ratios. `layer_decay_groups`, for fine-tuning, gives the layers near the input smaller
# rates:

# %%
groups = lt.layer_decay_groups(network(), 1e-3, 0.5, pattern=r"^(\d+)")
figure, ax = plt.subplots(figsize=(6, 2.8))
_ = lt.plot_schedule(lt.cosine(torch.optim.AdamW(groups), total_steps=300, warmup=30), ax=ax)

# %% [markdown]
# ## How many steps will there be?
#
# A curve needs its length, in *optimizer* steps. `lt.optimizer_steps(self.trainer)` counts them: limits, accumulation
# with its ragged last window, devices, `max_steps`; the factories call it when they get `self`. Here is the count
# beside what the Trainer then did (two devices are counted in [6_scaling_out](6_scaling_out.ipynb)):


# %%
def loaders(noise=0.0, batch_size=64):
    """Handwritten digits; a share `noise` of the training labels is wrong."""
    train, val = (list(zip(*load_digits(noise)[part], strict=True)) for part in ("train", "val"))
    return DataLoader(train, batch_size, shuffle=True), DataLoader(val, batch_size=300)


class Counted(Digits):
    def configure_optimizers(self):
        self.planned = lt.optimizer_steps(self.trainer)
        return super().configure_optimizers()


settings = [
    {"max_epochs": 3},
    {"max_epochs": 3, "accumulate_grad_batches": 4},
    {"max_epochs": 3, "limit_train_batches": 0.5},
    {"max_epochs": 3, "max_steps": 20},
]
print("900 images in batches of 64 are 15 batches an epoch\n\nplanned  taken  Trainer")
for setting in settings:
    module, trainer = Counted(), L.Trainer(**setting, **QUIET)
    trainer.fit(module, *loaders())
    shown = ", ".join(f"{name}={value}" for name, value in setting.items())
    print(f"{module.planned:7}  {trainer.global_step:5}  {shown}")

# %% [markdown]
# Where the number cannot be known (an `IterableDataset` without a length, `max_time`) it raises `UnknownTotalSteps`
# and says why, instead of a guess that would end the curve too early; then pass `total_steps=`.
#
# ## A base learning rate
#
# `lt.find_lr` takes 100 steps of rising learning rate and looks where the loss falls, before it explodes. Afterwards
# everything is as it was: weights, random numbers, loaders, callbacks.

# %%
L.seed_everything(0, verbose=False)
found = lt.find_lr(L.Trainer(max_epochs=1, **QUIET), Digits(), loaders(0.4)[0], min_lr=1e-4, max_lr=10)
figure, ax = plt.subplots(figsize=(6, 3))
found.plot(ax)
print(f"suggestion {found.suggestion():.3g}")

# %% [markdown]
# Is it a good one? Training says, with learning rates below and above it. 40% of the training labels are wrong here, so
# there is something to lose; all accuracies are those of test images with right labels, as mean ± standard deviation.


# %%
def train(schedule=None, *, seed, lr=0.1, optimizer="sgd", noise=0.0, batch_size=64, callbacks=()):
    """Test accuracy and optimizer steps of a training with a schedule."""

    class Scheduled(Classifier):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return schedule(optimizer, self) if schedule else optimizer

    L.seed_everything(seed, verbose=False)
    module = Scheduled(network(), lr, optimizer)
    trainer = L.Trainer(max_epochs=EPOCHS, callbacks=list(callbacks), **QUIET)
    trainer.fit(module, loaders(noise, batch_size)[0])
    return accuracy(module.network, *load_digits(noise)["test"]).item(), trainer.global_step


def over_seeds(schedule=None, seeds=SEEDS, **kwargs):
    return [train(schedule, seed=seed, **kwargs)[0] for seed in range(seeds)]


def shown(values):
    return f"{statistics.fmean(values):.3f} ± {statistics.pstdev(values):.3f}"


for factor in (0.1, 0.3, 1, 3, 10):
    lr = factor * found.suggestion()
    print(f"lr {lr:.3f}: {shown(over_seeds(CURVES['cosine'], seeds=min(3, SEEDS), lr=lr, noise=0.4))}")

# %% [markdown]
# The suggestion is the best of the five; a factor of 3 costs three points, a factor of 10 more than ten. It is a
# place to start, found in a few seconds; it knows nothing of what happens in the epochs after.
#
# ## Does a schedule help?
#
# The same network with a learning rate of 0.1 at the highest point, with wrong labels and with right ones.

# %%
names = ("constant", "cosine", "flat_cos", "one_cycle", "wsd")
plain = {**CURVES, "constant": None}
results = {noise: {name: over_seeds(plain[name], noise=noise) for name in names} for noise in (0.4, 0.0)}
print(f"{'':10}  40% wrong labels  right labels")
for name in names:
    print(f"{name:10}  {shown(results[0.4][name]):16}  {shown(results[0.0][name])}")

# %%
figure, ax = plt.subplots(figsize=(6.5, 3), layout="constrained")
for shift, (noise, label) in zip((-0.19, 0.19), [(0.4, "40% wrong labels"), (0.0, "right labels")], strict=True):
    means, stds = ([f(values) for values in results[noise].values()] for f in (statistics.fmean, statistics.pstdev))
    ax.bar([place + shift for place in range(len(names))], means, 0.36, yerr=stds, capsize=3, label=label)
ax.set(xticks=range(len(names)), xticklabels=names, ylabel="test accuracy", ylim=(0.5, 1.12))
_ = ax.legend(loc="upper left", ncols=2, frameon=False)

# %% [markdown]
# With wrong labels every curve that falls is at least ten points better than a constant rate: the last, small steps
# do not follow each wrong label any more. With right labels there is **no difference**; each of these digits is
# learnt long before the rate falls. Between the falling curves the differences are small.
#
# ## Warm-up
#
# The first gradients are the largest and the least meaningful, and Adam's averages of them are young. A warm-up,
# `f(t) = (t+1)/W` for the first W steps, lets a learning rate in that would otherwise throw the weights away. Right
# labels:

# %%
for optimizer, lr in (("sgd", 0.1), ("adamw", 0.01), ("adamw", 0.1)):
    without, with_warmup = (
        over_seeds(partial(lt.cosine, warmup=warmup), optimizer=optimizer, lr=lr) for warmup in (0, 0.1)
    )
    print(f"{optimizer:5} lr {lr:4}: without warm-up {shown(without)}, with {shown(with_warmup)}")

# %% [markdown]
# At a learning rate that works anyway a warm-up changes **nothing** that five seeds could show; at one that is ten
# times too large it saves the training. It widens the range of learning rates, no more.
#
# ## Larger batches
#
# A batch k times as large takes a k-th of the steps, so each must go further: `lr * k` for SGD, `lr * sqrt(k)` for
# Adam (`lt.scale_lr`, and `lt.scale_adam` for betas and eps as well). `BatchSizeWarmup` grows the batch while
# training goes on: small steps while the gradient is large against its noise, large ones later. Schedules follow,
# since the count of steps knows of the growth, and `lr_rule="linear"` scales the learning rate along, from one that
# is right for the end.

# %%
large = lt.scale_lr(0.02, batch_size=256, base_batch_size=16, warmup=0.1)
growth = lt.BatchSizeWarmup(initial=1, final=16, over=0.5, lr_rule="linear")
planned = L.Trainer(max_epochs=EPOCHS, callbacks=[growth], **QUIET)
figure, ax = plt.subplots(figsize=(6, 2.5))
ax.step(range(EPOCHS), [16 * growth.factor(planned, epoch) for epoch in range(EPOCHS)], where="post")
_ = ax.set(xlabel="epoch", ylabel="samples a step", title="BatchSizeWarmup(final=16) over batches of 16")

# %%
cases = {
    "batch 16, lr 0.02": {"lr": 0.02, "batch_size": 16},
    "batch 256, lr 0.02": {"lr": 0.02, "batch_size": 256},
    f"batch 256, lr {large}": {"lr": large, "batch_size": 256},
    f"batch 16 to 256, lr to {large}": {"lr": large, "batch_size": 16, "callbacks": [growth]},
}
for name, case in cases.items():
    runs = [train(CURVES["constant"], seed=seed, **case) for seed in range(SEEDS)]
    print(f"{name:26}  {runs[0][1]:4} steps  {shown([run[0] for run in runs])}")

# %% [markdown]
# The large batch with the old learning rate is behind; with the scaled one it is as good as the small batch, in a
# fourteenth of its steps. The growing batch takes a quarter of the small one's steps and gets to the same place, **no
# better one**: here the large batch is right from the start.
#
# ## When not to use it
#
# - **A schedule that ends** is wrong for a run that may go on: after the last step the rate stays at the floor.
#   `lt.wsd` and `lt.constant` can be continued from before their fall.
# - **The loss depends on a metric** more than on time: `lt.reduce_on_plateau`.
# - **Averaged weights** ([2_averages](2_averages.ipynb)) do much of what a falling rate does; use a curve that stays
#   high for long (`flat_cos`, `constant`) with them.
# - **A large batch** is for many devices, or for a device that is not busy with a small one; it is no aim in itself.
#
# ## What we learned
#
# - With wrong labels every curve that falls is at least ten points better than a constant learning rate. With right
#   labels there is no difference here.
# - Which falling curve it is matters little; `one_cycle` and `cosine` lead here.
# - A warm-up saves a learning rate that is too large, and changes nothing at one that is right.
# - The length of a schedule is counted for you, in optimizer steps.
# - A batch 16 times as large needs a learning rate 16 times as large (SGD), and then does as well.
#
# Cards: [flat_cos](../docs/tricks/flat_cos.md), [one_cycle and the other curves](../docs/tricks/one_cycle.md),
# [LRSchedule](../docs/tricks/LRSchedule.md), [find_lr](../docs/tricks/find_lr.md),
# [optimizer_steps](../docs/tricks/optimizer_steps.md),
# [BatchSizeWarmup and scale_lr](../docs/tricks/BatchSizeWarmup.md).
