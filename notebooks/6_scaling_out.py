# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Scaling out: presets, memory, several devices
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/lightning-tricks/lightning_tricks/blob/main/notebooks/6_scaling_out.ipynb)
#
# A preset is one word for a strategy *and* its precision: `Trainer(strategy="zero3_offload_bf16", devices=8)`. This
# notebook says which one to take, counts what it costs in memory, and runs two of them on two processes of this
# machine's CPU.

# %%
if "google.colab" in str(get_ipython()):
    get_ipython().run_line_magic(
        "pip",
        "install -q 'lightning-tricks[notebooks,deepspeed] @ git+https://github.com/lightning-tricks/lightning_tricks'",
    )
import lightning as L

import lightning_tricks as lt

_ = L.seed_everything(0, verbose=False)

# %%
import logging

for name in ("torchao", "torch.utils._pytree"):  # without their notes when transformers imports them
    logging.getLogger(name).setLevel(logging.ERROR)

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_tricks.examples.digits import load_digits, network
from lightning_tricks.examples.tasks import accuracy

FAST = "LIGHTNING_TRICKS_FAST" in os.environ  # a short run, for tests
EPOCHS = 1 if FAST else 10
os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed need not look for another

logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # without its notes on devices and tips
plt.rcParams.update({"figure.dpi": 80, "axes.grid": True, "grid.alpha": 0.3})

# %% [markdown]
# ## The presets

# %%
rows = [f"| `{row['name']}` | {row['when']} |" for row in lt.presets()]
Markdown("\n".join(["| preset | when |", "|---|---|", *rows]))

# %% [markdown]
# ## How much memory does it take?
#
# In mixed precision AdamW keeps 16 bytes for each weight: weight, gradient and two averages, 4 bytes each. DDP has
# all of it on each device; ZeRO and FSDP2 slice it:
#
# | | weights | gradients | optimizer |
# |---|---|---|---|
# | `ddp` | whole | whole | whole |
# | `zero1` | whole | whole | sliced |
# | `zero2` | whole | sliced | sliced |
# | `zero3`, `fsdp2` | sliced | sliced | sliced |
# | `..._offload` | the same in the memory of the host | | |
#
# `lt.estimate_memory` adds up what is in between as well: 16-bit copies, layers that are gathered, buckets on the
# way, and activations, which it measures by running a step of your module without allocating anything. GPT-2, none of
# whose weights is in memory here (`meta`), with two sequences of 1,024 tokens on each device:

# %%
with torch.device("meta"):
    model = GPT2LMHeadModel(GPT2Config(n_layer=2 if FAST else 12))
model.loss_type = "ForCausalLM"  # or transformers says that it guesses
tokens = torch.zeros(2, 1024, dtype=torch.long)
print(lt.estimate_memory(model, strategy="ddp_bf16", devices=8, batch={"input_ids": tokens, "labels": tokens}))

# %% [markdown]
# For a model that is not written yet, a number of weights will do; then activations are not counted. Seven billion:

# %%
names = ("ddp_bf16", "zero1_bf16", "zero2_bf16", "zero3_bf16", "fsdp2_bf16", "zero3_offload_bf16")
estimates = {name: lt.estimate_memory(7_000_000_000, strategy=name, devices=8) for name in names}
parts = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "on the way": ("casts", "gathered", "communication"),
}
figure, ax = plt.subplots(figsize=(8, 3), layout="constrained")
left = [0.0] * len(names)
for part, keys in parts.items():
    sizes = [sum(getattr(each, key) for key in keys) / 1e9 for each in estimates.values()]
    ax.barh(names, sizes, left=left, label=part)
    left = [a + b for a, b in zip(left, sizes, strict=True)]
ax.invert_yaxis()
ax.set(xlabel="GB on each of 8 devices")
_ = ax.legend(frameon=False, loc="lower right")

# %% [markdown]
# ## Which one, then?
#
# `lt.suggest_strategy` goes from the fastest to the most frugal and takes the first that fits. Seven billion weights
# on four kinds of machines:

# %%
machines = {
    "4 nodes of 8 x 80 GB": lt.Hardware(device_memory=80e9, devices=8, nodes=4, host_memory=1000e9),
    "8 x 80 GB": lt.Hardware(device_memory=80e9, devices=8, host_memory=1000e9),
    "8 x 16 GB": lt.Hardware(device_memory=16e9, devices=8, host_memory=500e9),
    "1 x 24 GB": lt.Hardware(device_memory=24e9, host_memory=256e9),
}
for name, hardware in machines.items():
    print(f"{name:21} {lt.suggest_strategy(7_000_000_000, hardware=hardware).preset}")
print("\nwhy the last one:")
for reason in lt.suggest_strategy(7_000_000_000, hardware=machines["1 x 24 GB"]).reasons:
    print("-", reason)

# %% [markdown]
# ## Two processes, really
#
# A notebook has one process, and it cannot start the others of a preset:

# %%
try:
    L.Trainer(strategy="ddp_bf16", devices=2, accelerator="cpu")
except Exception as error:
    print(f"{type(error).__name__}: {error}")

# %% [markdown]
# Lightning's own `ddp_notebook`, which the message names, forks this process; it has to come before anything touches
# CUDA, and no preset does it. So the training goes into a script, which has to exist anyway on a larger machine. It
# takes the preset and the number of devices; nothing else in it knows of them.

# %%
folder = Path(tempfile.mkdtemp())
(folder / "train.py").write_text("""
import json, sys
from pathlib import Path
import lightning as L
import torch
import lightning_tricks as lt
from lightning_tricks.examples.digits import Digits, DigitsData

class Counted(Digits):
    def configure_optimizers(self):
        self.planned = lt.optimizer_steps(self.trainer)
        return lt.flat_cos(super().configure_optimizers(), self)

preset, devices, epochs, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
L.seed_everything(0)
trainer = L.Trainer(strategy=preset, devices=devices, accelerator="cpu", max_epochs=epochs, callbacks=[lt.EMA()],
                     logger=False, enable_checkpointing=False, enable_progress_bar=False)
module = Counted()
trainer.fit(module, datamodule=DigitsData(batch_size=64 // devices))
trainer.save_checkpoint(folder / f"{preset}.ckpt")
if trainer.is_global_zero:
    result = {"preset": preset, "processes": trainer.world_size, "precision": trainer.precision}
    result |= {"planned steps": module.planned, "steps": trainer.global_step}
    result |= {"val_accuracy": round(trainer.callback_metrics["val_accuracy"].item(), 3)}
    (folder / f"{preset}.json").write_text(json.dumps(result))
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()  # a process that ends with threads of gloo may abort
""")


def train(preset, devices):
    command = [sys.executable, "train.py", preset, str(devices), str(EPOCHS), str(folder)]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # each, which suits a tiny network
    run = subprocess.run(command, cwd=folder, env=one_thread, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(run.stderr)
    return json.loads((folder / f"{preset}.json").read_text())


wanted = [("single_bf16", 1), ("ddp_bf16", 2), ("zero3_bf16", 2)]
for preset, devices in wanted[-1:] if FAST else wanted:
    for key, value in train(preset, devices).items():
        print(f"{key:14} {value}")
    print()

# %% [markdown]
# The count of steps, and so the schedule's length, takes the devices into account: half the batch on each of two makes
# as many steps of the same size. Accuracies are close to each other, as they should be: a preset saves memory and
# time; it does not change what is learnt. (They need not be equal: the processes draw other batches.) The averages
# of `EMA()` are sliced like the weights, so the folder below has them in slices, too.
#
# ## One file from a sharded checkpoint
#
# DDP saves one file. Under ZeRO-3 and FSDP2 each process has a slice and writes it: the checkpoint is a folder. To
# resume, pass it as `ckpt_path` like any file. For everything else, `lt.consolidate` makes one file of it, on one
# machine without a GPU, with one tensor in memory at a time.

# %%
checkpoint = folder / "zero3_bf16.ckpt"
for path in sorted(checkpoint.rglob("*")):
    if path.is_file():
        print(f"{path.stat().st_size / 1e3:7.1f} kB  {path.relative_to(checkpoint)}")

file = lt.consolidate(checkpoint, folder / "digits.pt")
net = network()  # a plain nn.Sequential
state = torch.load(file)
net.load_state_dict({name.removeprefix("network."): weight for name, weight in state.items()})
print(f"in plain torch: validation accuracy {accuracy(net, *load_digits(0)['val']):.3f}")

# %% [markdown]
# ## What to type on 8 GPUs
#
# The same script, or the CLI of [configs/multi_node](../configs/multi_node/train.py), in one command; Lightning
# starts the other seven processes:
#
# ```bash
# python train.py fit -c digits.yaml --trainer.devices 8 --trainer.strategy ddp_bf16
# ```
#
# ## ... and on 4 machines with 8 GPUs each
#
# By torchrun, the same line on each machine; `HEAD` is the name of one of them, which the others reach:
#
# ```bash
# NODES=4 DEVICES=8 HEAD=node-0 bash torchrun.sh --trainer.strategy fsdp2_bf16
# ```
#
# By SLURM, once:
#
# ```bash
# sbatch slurm.sh --trainer.strategy fsdp2_bf16
# ```
#
# The scripts are in [configs/multi_node](../configs/multi_node), the explanations, Ray, slow links and the usual
# errors in [docs/multi_node.md](../docs/multi_node.md). Two things to mind wherever the number of devices changes:
# the global batch is batch size x devices x nodes x accumulated batches, so scale the learning rate with it
# (`lt.scale_lr`); and checkpoints need a disk that all machines share.
#
# ## When not to use it
#
# - **It fits on one device and is fast enough**: `single_bf16`. Every preset beyond it pays for communication.
# - **It fits on each device**: `ddp_bf16`, not ZeRO-3 or FSDP2, which gather every layer twice in each step to save
#   memory that is not short.
# - **Offloading** is slow: the optimizer steps on the CPU, and weights travel. It is for models that do not fit
#   otherwise.
# - **Tiny networks**, like the one above: two processes take longer than one.
#
# ## What we learned
#
# - A preset is one word for a strategy and its precision; the script does not change.
# - `estimate_memory` counts the bytes before anything is allocated, and `suggest_strategy` takes the fastest preset
#   that fits.
# - A preset changes memory and time, not what is learnt: the accuracies of one and two processes are close.
# - A notebook has one process, so several devices need a script.
# - A sharded checkpoint becomes one file with `consolidate`, without a GPU.
#
# Cards: [presets](../docs/tricks/preset.md), [estimate_memory and suggest_strategy](../docs/tricks/estimate_memory.md),
# [consolidate](../docs/tricks/consolidate.md).
