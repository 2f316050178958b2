# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Quick start: from a plain LightningModule to tricks
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/lightning-tricks/lightning_tricks/blob/main/notebooks/1_quick_start.ipynb)
#
# You have a LightningModule and a Trainer. A trick is a callback that you add, a mixin that you inherit from, or a
# word around your optimizer; the Trainer stays the stock one. This notebook adds one of them to an ordinary training,
# measures what it changes, looks whether two more help, loads the result into plain torch, and does the same from a
# YAML file.

# %%
if "google.colab" in str(get_ipython()):
    get_ipython().run_line_magic(
        "pip", "install -q 'lightning-tricks[notebooks,cli] @ git+https://github.com/lightning-tricks/lightning_tricks'"
    )
import lightning as L

import lightning_tricks as lt

_ = L.seed_everything(0, verbose=False)

# %%
import logging
import os
import statistics
import sys
import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import disable_possible_user_warnings
from torch import nn
from torch.utils.data import DataLoader

from lightning_tricks.examples.digits import load_digits

FAST = "LIGHTNING_TRICKS_FAST" in os.environ  # a short run, for tests
SEEDS, EPOCHS = (1, 1) if FAST else (5, 15)

for name in ("lightning.pytorch", "lightning.fabric"):  # without their notes on devices, seeds and tips
    logging.getLogger(name).setLevel(logging.WARNING)
disable_possible_user_warnings()  # nor on the number of workers
warnings.filterwarnings("ignore", message=".*LeafSpec")  # Lightning's use of a function of torch
torch.set_num_threads(1)  # quickest for networks as small as these
plt.rcParams.update({"figure.dpi": 80, "axes.grid": True, "grid.alpha": 0.3})

# %% [markdown]
# ## The task
#
# Handwritten digits of 8x8 pixels, from scikit-learn. To make it hard, **40% of the training labels are wrong**;
# those of validation and test are right.

# %%
data = load_digits(noise=0.4)
right = load_digits(noise=0.0)["train"][1]

figure, axes = plt.subplots(1, 10, figsize=(9, 1.4), layout="constrained")
for ax, image, label, truth in zip(axes, *data["train"], right, strict=False):
    ax.imshow(image.view(8, 8), cmap="gray_r")
    ax.set_title(str(label.item()), color="black" if label == truth else "red")
    ax.axis("off")

# %% [markdown]
# ## The module that you have


# %%
class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(
            *(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)),
        )

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return F.cross_entropy(self.network(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("val_accuracy", (self.network(images).argmax(-1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.03, momentum=0.9)


# %% [markdown]
# This learning rate is the one with which plain training is best.
#
# ## Two lines of difference
#
# ```diff
# +import lightning_tricks as lt
#
# -trainer = L.Trainer(max_epochs=epochs)
# +trainer = L.Trainer(max_epochs=epochs, callbacks=[lt.EMA()])
# ```
#
# `EMA` averages the weights while they move ([2_averages](2_averages.ipynb)). The average is what is validated, what
# is saved, and what the module holds after `fit`. Two more tricks, for comparison, take a mixin and a schedule:
#
# - `SAM` takes the gradient where the loss is worst nearby, at `w + rho * g/||g||`, so that every batch runs twice:
#   [3_sam_and_sharpness](3_sam_and_sharpness.ipynb);
# - `flat_cos` keeps the learning rate, then lowers it to zero: [5_schedules](5_schedules.ipynb).


# %%
class ThreeTricks(lt.SAMMixin, Net):
    sam = lt.SAM(rho=0.05)

    def configure_optimizers(self):
        return lt.flat_cos(super().configure_optimizers(), self)


# %% [markdown]
# ## Train


# %%
class Curve(Callback):
    def on_validation_end(self, trainer, pl_module):
        pl_module.curve = [*getattr(pl_module, "curve", []), trainer.callback_metrics["val_accuracy"].item()]


def fit(module_class, seed, *callbacks):
    L.seed_everything(seed, verbose=False)
    module = module_class()
    trainer = L.Trainer(
        max_epochs=EPOCHS,
        callbacks=[*callbacks, Curve()],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    train, val = (list(zip(*data[part], strict=True)) for part in ("train", "val"))
    trainer.fit(module, DataLoader(train, batch_size=64, shuffle=True), DataLoader(val, batch_size=300))
    return trainer, module


seeds = range(SEEDS)
runs = {
    "plain": [fit(Net, seed) for seed in seeds],
    "EMA": [fit(Net, seed, lt.EMA()) for seed in seeds],
    "SAM + EMA + flat_cos": [fit(ThreeTricks, seed, lt.EMA()) for seed in seeds],
}


# %%
def test_accuracy(network):
    images, labels = data["test"]
    with torch.no_grad():
        return (network(images).argmax(-1) == labels).float().mean().item()


figure, ax = plt.subplots(figsize=(6, 3.2))
for name, fits in runs.items():
    curves = torch.tensor([module.curve for _, module in fits])
    mean, std = curves.mean(0), curves.std(0, correction=0)
    ax.plot(range(1, EPOCHS + 1), mean, label=name)
    ax.fill_between(range(1, EPOCHS + 1), mean - std, mean + std, alpha=0.2)
    values = [test_accuracy(module.network) for _, module in fits]
    print(f"{name:20}  test accuracy {statistics.fmean(values):.3f} ± {statistics.pstdev(values):.3f}, {SEEDS} seeds")
ax.set(xlabel="epoch", ylabel="validation accuracy")
_ = ax.legend(loc="lower right", frameon=False)

# %% [markdown]
# The average is better than plain training, and calmer: its seeds end near each other. Two more tricks add nothing,
# and take twice the time: [in the evidence](../benchmarks/README.md), too, the three are better than `EMA` alone in 4
# of 27 settings, and worse in 5.
#
# ## The checkpoint, in plain torch
#
# A checkpoint holds the weights that were validated, the averaged ones, under the names that your module gives them.
# It loads without this package and without Lightning.

# %%
folder = Path(tempfile.mkdtemp())
trainer, module = runs["EMA"][0]
trainer.save_checkpoint(folder / "net.ckpt")

state = torch.load(folder / "net.ckpt", weights_only=True)["state_dict"]
network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
network.load_state_dict({name.removeprefix("network."): weight for name, weight in state.items()})
print(f"in plain torch: {test_accuracy(network):.3f}, in the module: {test_accuracy(module.network):.3f}")

# %% [markdown]
# From a shell, with a file without the rest of the checkpoint, for a bare module:

# %%
# !cd {folder} && {sys.executable} -m lightning_tricks_cli.main export net.ckpt -o net.pt --strip-prefix network
network.load_state_dict(torch.load(folder / "net.pt"))
print(f"exported: {test_accuracy(network):.3f}")

# %% [markdown]
# ## The same from YAML
#
# Tricks have short names wherever `lightning_tricks` is imported before `LightningCLI` is made. A script of two lines
# does it, run as `python fit.py fit -c config.yaml`; the cell below imitates that script.

# %%
from lightning.pytorch.cli import LightningCLI

(folder / "config.yaml").write_text(f"""
seed_everything: 0
trainer:
  max_epochs: {EPOCHS}
  accelerator: cpu
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - class_path: EMA
      init_args: {{decay: 0.999}}
model:
  class_path: lightning_tricks.examples.digits.Digits  # your own module, in its place
  init_args: {{lr: 0.03}}
data:
  class_path: lightning_tricks.examples.digits.DigitsData
  init_args: {{noise: 0.4}}
""")
sys.argv = ["fit.py", "fit", "-c", str(folder / "config.yaml")]
cli = LightningCLI(save_config_callback=None)
print(f"from YAML: {test_accuracy(cli.model.network):.3f}")

# %% [markdown]
# ## When not to use them
#
# - **The labels are right.** There is less to gain: 0.9 points on the same digits, 1.8 on texts, nothing on textures.
# - **The learning rate falls to zero anyway.** `flat_cos` gains about what `EMA` does, and both together no more.
# - **A step must not take longer.** SAM runs every batch twice; `EMA` and `flat_cos` are almost free.
#
# ## What we learned
#
# - A trick is one line more, in Python or in YAML; the Trainer stays the stock one.
# - With 40% wrong labels `EMA` gains a few points over plain training at its best learning rate, and costs a second
#   copy of the weights.
# - More is not better: begin with one trick, and let [compare](../docs/tricks/compare.md) say whether it helps on your
#   task.
# - The checkpoint holds the averaged weights under your module's own names, so plain torch reads it.
#
# The cards of these tricks have starting values, costs, measurements and pitfalls: [EMA](../docs/tricks/EMA.md),
# [SAM](../docs/tricks/SAMMixin.md), [flat_cos](../docs/tricks/flat_cos.md),
# [LRSchedule](../docs/tricks/LRSchedule.md). Each of the other notebooks takes one kind of trick apart.
