# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # SAM and sharpness
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/lightning-tricks/lightning_tricks/blob/main/notebooks/3_sam_and_sharpness.ipynb)
#
# Some minima are wide, some are sharp: a small move of the weights and the loss is large again. Sharpness-aware
# minimization looks for the wide ones. It asks for a low loss not at the weights `w` but at the worst place within
# `rho`, which one gradient finds well enough:
#
# $$e = \rho \, \frac{g}{\lVert g \rVert}, \quad g = \nabla L(w); \qquad \text{the optimizer gets } \nabla L(w + e).$$
#
# So every batch runs twice, and a step takes twice as long.

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
import time
import warnings

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import disable_possible_user_warnings
from torch.utils.data import DataLoader

from lightning_tricks.examples.digits import Digits, load_digits
from lightning_tricks.examples.tasks import accuracy

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
# ## One mixin
#
# The mixin goes before the module's own base class; `sam` says how. Nothing else changes: the Trainer accumulates,
# clips and scales as usual, since all of it happens inside `backward()`.


# %%
class SAMDigits(lt.SAMMixin, Digits):  # Digits: a LightningModule with SGD, for handwritten digits
    def __init__(self, sam):
        super().__init__()
        self.sam = sam


class Curve(Callback):
    def __init__(self):
        self.values = []

    def on_validation_end(self, trainer, pl_module):
        self.values.append(trainer.callback_metrics["val_accuracy"].item())


def loaders(noise):
    """Digits of which a share `noise` of the training labels is wrong; those of validation and test are right."""
    train, val = (list(zip(*load_digits(noise)[part], strict=True)) for part in ("train", "val"))
    return DataLoader(train, batch_size=64, shuffle=True), DataLoader(val, batch_size=300)


def fit(sam, noise, seed):
    L.seed_everything(seed, verbose=False)
    module, curve = SAMDigits(sam) if sam else Digits(), Curve()
    start = time.process_time()
    L.Trainer(max_epochs=EPOCHS, callbacks=[curve], **QUIET).fit(module, *loaders(noise))
    return {
        "module": module,
        "curve": curve.values,
        "test": accuracy(module.network, *load_digits(noise)["test"]).item(),
        "seconds": time.process_time() - start,
    }


# %% [markdown]
# ## With 40% wrong labels, and with right ones
#
# A network memorizes a wrong label in a sharp corner of its own. ASAM makes the radius relative to each weight;
# its good radii are about ten times as large.

# %%
CHOICES = {
    "SGD": None,
    "SAM(rho=0.05)": lt.SAM(),
    "SAM(rho=0.3)": lt.SAM(rho=0.3),
    "ASAM(rho=0.5)": lt.SAM(rho=0.5, adaptive=True),
}
runs = {
    noise: {name: [fit(sam, noise, s) for s in range(SEEDS)] for name, sam in CHOICES.items()} for noise in (0.4, 0.0)
}


def shown(values):
    return f"{statistics.fmean(values):.3f} ± {statistics.pstdev(values):.3f}"


print(f"test accuracy of {SEEDS} seeds  wrong labels   right labels   time of SGD")
for name in CHOICES:
    noisy, clean = ([run["test"] for run in runs[noise][name]] for noise in (0.4, 0.0))
    seconds, of_sgd = (statistics.fmean(run["seconds"] for run in runs[0.4][each]) for each in (name, "SGD"))
    print(f"{name:24}  {shown(noisy)}  {shown(clean)}  {seconds / of_sgd:.1f}")

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
for ax, (noise, title) in zip(axes, [(0.4, "40% wrong labels"), (0.0, "right labels")], strict=True):
    for name in CHOICES:
        ax.plot(range(1, EPOCHS + 1), torch.tensor([run["curve"] for run in runs[noise][name]]).mean(0), label=name)
    ax.set(title=title, xlabel="epoch", ylim=(0.4, 1))
axes[0].set(ylabel="validation accuracy")
_ = axes[1].legend(loc="lower right", frameon=False)

# %% [markdown]
# With wrong labels SAM and ASAM are some nine points above SGD at the larger radius, at the price of twice the time;
# the five points of the default radius are within the spread of the seeds. With right labels there is nothing to gain
# here: the small radius changes **nothing**, and the large one has a lower accuracy, since it slows learning down.
# The radius is the one number to choose, on validation data.
#
# ## Is the minimum flatter?
#
# `lt.sharpness` measures it: the largest eigenvalue of the loss's Hessian, the curvature in the steepest direction,
# and the rise of the loss at a distance `radius` along the gradient. It is the loss on the training data, wrong
# labels included.


# %%
def loss(module, batch):
    images, labels = batch
    return F.cross_entropy(module.network(images), labels)


batches = [load_digits(0.4)["train"]]  # one batch of all 900
found = {name: [lt.sharpness(run["module"], batches, loss, radius=0.3) for run in runs[0.4][name]] for name in CHOICES}
print("40% wrong labels  training loss   eigenvalue     rise at 0.3")
for name, results in found.items():
    values = [[getattr(each, key) for each in results] for key in ("loss", "eigenvalue", "rise")]
    print(f"{name:16}  {shown(values[0])}  {shown(values[1]):15}  {shown(values[2])}")

# %% [markdown]
# The loss along directions, of the first seed: left along the gradient, which is where SAM looks (`Sharpness.plot`
# draws the same for one model), right along random directions, where nobody has looked.


# %%
@torch.no_grad()
def along(module, direction, distances):
    """The training loss at `w + distance * direction`."""
    weights = torch.nn.utils.parameters_to_vector(module.parameters())
    losses = []
    for distance in distances:
        torch.nn.utils.vector_to_parameters(weights + distance * direction, module.parameters())
        losses.append(loss(module, batches[0]).item())
    torch.nn.utils.vector_to_parameters(weights, module.parameters())
    return losses


figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
distances = torch.linspace(-20, 20, 21)
for name in ("SGD", "SAM(rho=0.3)"):
    here = found[name][0]
    left.plot(here.distances, torch.tensor(here.losses) - here.loss, marker=".", label=name)
    module = runs[0.4][name][0]["module"]
    generator = torch.Generator().manual_seed(0)
    size = sum(weight.numel() for weight in module.parameters())
    directions = [F.normalize(torch.randn(size, generator=generator), dim=0) for _ in range(5)]
    losses = torch.tensor([along(module, direction, distances) for direction in directions]).mean(0)
    right.plot(distances, losses - here.loss, marker=".", label=name)
left.set(title="along the gradient", xlabel="distance", ylabel="rise of the training loss")
right.set(title="mean of five random directions", xlabel="distance")
_ = left.legend(frameon=False)

# %% [markdown]
# It is. The eigenvalue falls with the radius, and so does the rise along the gradient; in random directions, which
# are flat for a long way, the bowl of SAM is wider as well. The price is in the column of the loss: the flatter
# network fits the training data, of which 40% are wrong, less well.
#
# Compare sharpness only between networks of one architecture: rescaling layers changes it without changing the
# function.
#
# ## What it costs, and how to pay less
#
# `every_n_steps=2` perturbs in every other step. `micro_batch_size` takes a perturbation for each part of the batch:
# smaller groups see sharper corners (m-sharpness, as many devices have it by themselves), for a third forward pass.

# %%
cheaper = {
    "SGD": None,
    "rho=0.3": lt.SAM(rho=0.3),
    "rho=0.3, every_n_steps=2": lt.SAM(rho=0.3, every_n_steps=2),
    "rho=0.3, micro_batch_size=16": lt.SAM(rho=0.3, micro_batch_size=16),
}
print(f"{'':28}  test accuracy  CPU seconds")
for name, sam in cheaper.items():
    rows = [fit(sam, 0.4, seed) for seed in range(min(3, SEEDS))]
    print(f"{name:28}  {shown([row['test'] for row in rows])}  {statistics.fmean(row['seconds'] for row in rows):.1f}")

# %% [markdown]
# Perturbing in every other step only is as good here for four fifths of the time. Micro-batches of 16 add some two
# points, hardly more than the spread, for more than twice the time of SAM: each of them is a small batch with a
# perturbation of its own. (Seconds are those of the machine that ran this notebook; compare them with one another
# only.)
#
# ## When not to use it
#
# - **The labels are right and the model is small**: no gain above, and steps that take twice as long. SGD with twice
#   the epochs is the comparison to make.
# - **Short runs with a large `rho`**: SAM learns slowly at first, as the curves show.
# - **DeepSpeed**: it owns the gradients, so `SAMMixin` refuses it; DDP and FSDP2 are fine.
# - **16-bit weights** (`bf16-true`): a total perturbation of 0.05 drowns in their rounding; refused as well. Mixed
#   precision is fine.
#
# ## What we learned
#
# - With wrong labels `SAM(rho=0.3)` is some nine points above SGD; the default radius of 0.05 cannot be told from SGD.
# - With right labels there is no gain, and a radius that is too large costs two points.
# - The minimum is flatter, and it can be measured: the largest eigenvalue is a third of SGD's.
# - A step takes twice as long; `every_n_steps=2` saves a third of what that adds, for the same accuracy here.
#
# Cards: [SAM](../docs/tricks/SAMMixin.md), [SAMCallback](../docs/tricks/SAMMixin.md),
# [sharpness](../docs/tricks/sharpness.md).
