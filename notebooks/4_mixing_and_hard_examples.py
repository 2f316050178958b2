# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Mixing samples, and training on the hard ones
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/lightning-tricks/lightning_tricks/blob/main/notebooks/4_mixing_and_hard_examples.ipynb)
#
# - **Mixup** trains on blends of two samples: `x' = lam * x_i + (1 - lam) * x_j`, and the loss is blended likewise,
#   `lam * L(f(x'), y_i) + (1 - lam) * L(f(x'), y_j)`, with `lam ~ Beta(alpha, alpha)`.
# - **CutMix** puts a box of one image into another; `lam` is the share of the area that is left.
# - **HiddenMixup** blends what a layer gets, for inputs that cannot be blended: text.
# - **The hard-example filter** does the opposite of soothing: of each batch it trains on the samples with the largest
#   losses.
#
# All are callbacks. Your module computes its loss as usual: the labels that it gets look like labels, and know with
# whom they are mixed.

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

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import disable_possible_user_warnings
from torch.utils.data import DataLoader

from lightning_tricks.examples import digits, glosses, textures
from lightning_tricks.examples.tasks import Classifier, accuracy

FAST = "LIGHTNING_TRICKS_FAST" in os.environ  # a short run, for tests
SEEDS, EPOCHS = (1, 1) if FAST else (5, 40)

logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # without its notes on devices and tips
disable_possible_user_warnings()  # nor on the number of workers
warnings.filterwarnings("ignore", message=".*LeafSpec")  # Lightning's use of a function of torch
torch.set_num_threads(1)  # quickest for networks as small as these
plt.rcParams.update({"figure.dpi": 80, "axes.grid": True, "grid.alpha": 0.3})
QUIET = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
QUIET |= {"enable_progress_bar": False, "enable_model_summary": False}

# %% [markdown]
# ## What the network sees
#
# Patches of three photographs (brick, grass, gravel), mixed by the two functions behind the callbacks. They work on any
# tensor, without Lightning.

# %%
images, labels = textures.load_textures(noise=0.0)["train"]
chosen = images[[0, 64, 128]]
others = torch.tensor([1, 2, 0])
rows = {
    "as they are": chosen,
    "mixup, lam=0.7": lt.functional.mixup(chosen, 0.7, others),
    "cutmix, lam=0.7": lt.functional.cutmix(chosen, 0.7, others, torch.Generator().manual_seed(2))[0],
}
figure, axes = plt.subplots(1, 3, figsize=(9, 1.5), layout="constrained")
for ax, (name, patches) in zip(axes, rows.items(), strict=True):
    ax.imshow(torch.cat(list(patches[:, 0]), dim=1), cmap="gray")
    ax.set_title(name)
    ax.axis("off")

# %% [markdown]
# ## Images
#
# 192 patches for a small convolutional network, 40% of them with a wrong label; the test patches, with right ones,
# are from the other half of each photograph. And handwritten digits, with right labels and with 40% wrong ones.


# %%
def train(data, network, *callbacks, seed, lr=0.1, optimizer="sgd", epochs=EPOCHS):
    """Test accuracy after training on a split into train, val and test."""
    L.seed_everything(seed, verbose=False)
    module = Classifier(network(), lr, optimizer)
    trainer = L.Trainer(max_epochs=epochs, callbacks=list(callbacks), **QUIET)
    trainer.fit(module, DataLoader(list(zip(*data["train"], strict=True)), batch_size=64, shuffle=True))
    return accuracy(module.network.eval(), *data["test"]).item()


def shown(values):
    return f"{statistics.fmean(values):.3f} ± {statistics.pstdev(values):.3f}"


CHOICES = {
    "plain": lambda: [],
    "Mixup(0.2)": lambda: [lt.Mixup(alpha=0.2)],
    "Mixup(1.0)": lambda: [lt.Mixup(alpha=1.0)],
    "Mixup(1.0, stop=0.8)": lambda: [lt.Mixup(alpha=1.0, stop=0.8)],
    "CutMix()": lambda: [lt.CutMix()],
}
tasks = {
    "textures, 40% wrong": (textures.load_textures(0.4), textures.network),
    "digits, right": (digits.load_digits(0.0), digits.network),
    "digits, 40% wrong": (digits.load_digits(0.4), digits.network),
}
accuracies = {task: {} for task in tasks}
for task, (data, network) in tasks.items():
    for name, callbacks in CHOICES.items():
        if "textures" in task or name != "CutMix()":  # a digit is a row of 64 numbers here, without boxes
            accuracies[task][name] = [train(data, network, *callbacks(), seed=seed) for seed in range(SEEDS)]
for task, rows in accuracies.items():
    print(f"{task}: test accuracy of {SEEDS} seeds")
    for name, values in rows.items():
        print(f"  {name:20}  {shown(values)}")

# %%
figure, ax = plt.subplots(figsize=(8, 3), layout="constrained")
for shift, name in enumerate(CHOICES):
    found = [rows.get(name, [float("nan")]) for rows in accuracies.values()]
    means, stds = [statistics.fmean(v) for v in found], [statistics.pstdev(v) if len(v) > 1 else 0 for v in found]
    ax.bar([place + 0.16 * shift for place in range(3)], means, 0.15, yerr=stds, capsize=2, label=name)
ax.set(xticks=[place + 0.32 for place in range(3)], xticklabels=accuracies, ylabel="test accuracy", ylim=(0.35, 1.02))
_ = ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)

# %% [markdown]
# What five seeds can say, and what not:
#
# - Digits with wrong labels: strong mixing is some eight points better than plain training, with a fifth of the
#   spread. Memorizing a blend of a right and a wrong label does not pay.
# - Digits with right labels: **no difference**.
# - Textures with wrong labels: plain training ends near chance, a third; with any of the three that mix to the end it
#   is thirty points better. Which of the three is best, five seeds cannot tell: they differ by less than their
#   spread.
# - Switching it off for the last fifth (`stop=0.8`), a common recipe for clean data, gives the wrong labels their
#   chance: more than half of the gain is gone.
#
# ## Text
#
# Word 17 mixed with word 402 is not a word, so `Mixup` refuses:

# %%
sentences = glosses.load_glosses(noise=0.0)  # definitions of animals, artifacts, food, persons and plants: which is it?
try:
    train(sentences, glosses.GlossTransformer, lt.Mixup(), seed=0, optimizer="adamw", lr=3e-3, epochs=1)
except Exception as error:
    print(f"{type(error).__name__}: {error}")

# %% [markdown]
# `HiddenMixup("network.head")` mixes what the head gets from the encoder: the mean over the words of a tiny
# transformer, here. Each sentence is encoded once, as usual.

# %%
wrong = glosses.load_glosses(noise=0.3)
TEXT_EPOCHS = 1 if FAST else 8
for name, make in {"plain": lambda: [], "HiddenMixup": lambda: [lt.HiddenMixup("network.head", alpha=0.4)]}.items():
    settings = {"lr": 3e-3, "optimizer": "adamw", "epochs": TEXT_EPOCHS}
    columns = [
        [train(data, glosses.GlossTransformer, *make(), seed=seed, **settings) for seed in range(min(SEEDS, 3))]
        for data in (sentences, wrong)
    ]
    print(f"{name:12}  right labels {shown(columns[0])}, 30% wrong {shown(columns[1])}")

# %% [markdown]
# Less than a point with right labels and two with wrong ones, of three seeds: hardly more than the spread. **No clear
# gain** here.
#
# ## Hard examples
#
# `HardExampleFilter(keep=0.5)` runs each batch without gradients, keeps the half with the largest losses, and trains
# on these. When most samples are learnt already, that is where there is something left to learn. But which samples
# are hard? A network after ten epochs of plain training, and the losses of its training samples:

# %%
data, right = digits.load_digits(0.4), digits.load_digits(0.0)["train"][1]
L.seed_everything(0, verbose=False)
module = Classifier(digits.network())
loader = DataLoader(list(zip(*data["train"], strict=True)), batch_size=64, shuffle=True)
L.Trainer(max_epochs=10, **QUIET).fit(module, loader)

images, labels = data["train"]
with torch.no_grad():
    losses = F.cross_entropy(module.network(images), labels, reduction="none")
is_wrong, hard = labels != right, losses >= losses.median()
figure, ax = plt.subplots(figsize=(6, 2.8))
ax.hist([losses[~is_wrong], losses[is_wrong]], bins=30, stacked=True, label=["right label", "wrong label"])
ax.axvline(losses.median(), color="black", linestyle="--", label="median: the filter keeps what is right of it")
ax.set(xlabel="loss of a training sample", ylabel="samples")
ax.legend(frameon=False)
print(
    f"wrong labels: {is_wrong.float().mean():.0%} of all samples, {is_wrong[hard].float().mean():.0%} of the hard half"
)

# %% [markdown]
# The filter cannot tell a hard sample from a wrong one. So measure it with both. "As many samples": plain training
# for half of the epochs, in which as many samples go through the backward pass.

# %%
half = max(1, EPOCHS // 2)
for title, noise in (("right labels", 0.0), ("40% wrong labels", 0.4)):
    data = digits.load_digits(noise)
    found = {"plain": [], "plain, as many samples": [], "HardExampleFilter": [], "ohem: keep=0.5, mode='loss'": []}
    for seed in range(SEEDS):
        found["plain"].append(train(data, digits.network, seed=seed))
        found["plain, as many samples"].append(train(data, digits.network, seed=seed, epochs=half))
        for name, mode in (("HardExampleFilter", "prune"), ("ohem: keep=0.5, mode='loss'", "loss")):
            found[name].append(train(data, digits.network, lt.HardExampleFilter(keep=0.5, mode=mode), seed=seed))
    print(title)
    for name, values in found.items():
        print(f"  {name:27}  {shown(values)}")

# %% [markdown]
# With right labels the filter is level with plain training for as many epochs, and skips half of the backward passes,
# and about a point above plain training with as many samples, within the spread: **no clear gain** on a
# task as easy as this one. With wrong labels it is the worst you can do: it loses more than ten points.
#
# ## When not to use them
#
# - **The hard-example filter, unless you trust the labels.** Also not for a small network, where the pass that finds
#   the hard samples costs as much as it saves; with images `score_scale=0.5` makes it cheaper.
# - **Mixing, when the last epochs should see real samples** (`stop=0.9`), and when a blend means nothing: token ids
#   (`HiddenMixup`), categories in a table, targets with a meaning of their own such as boxes.
# - **Mixing and a training accuracy that you look at**: it is that of blends, so it is lower than you are used to.
#   Look at validation.
# - **Both at once** work together (what was kept is mixed), but they pull in opposite directions.
#
# ## What we learned
#
# - With wrong labels mixing gains up to thirty points on the textures and eight on the digits, if it goes on to the
#   end. With right labels it changes nothing on the digits.
# - Those gains belong to the settings of this notebook. In the [benchmarks](../benchmarks/README.md), where the
#   learning rate of plain training was tuned first, `Mixup` cannot be told from plain training.
# - `HiddenMixup` is the way to mix text; it has no clear gain here.
# - The hard-example filter cannot tell a hard sample from a wrong one. With wrong labels it loses more than ten points.
#
# Cards: [Mixup and CutMix](../docs/tricks/Mixup.md), [HiddenMixup](../docs/tricks/HiddenMixup.md),
# [HardExampleFilter](../docs/tricks/HardExampleFilter.md).
