"""What the memory and speed savers save and cost: checkpointing, channels_last, compilation, lean Trainer arguments.

Run ``python benchmarks/speed.py`` (about five minutes on CPU); it prints tables and writes
``benchmarks/results/speed.json`` (``speed_cuda.json`` with ``--device cuda``). In every round all contenders take their
turn, shuffled, in one process; ratios are medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from machine import Laps, Work, in_turns, machine, memory, prepare, spread, table
from torch import nn
from torch.utils.data import DataLoader

import lightning_tricks as lt
from lightning_tricks.callbacks.activation_checkpointing import recompute
from lightning_tricks.callbacks.channels_last import to_channels_last
from lightning_tricks.core.blocks import chosen_blocks
from lightning_tricks.core.wrapping import wrap_method

RESULTS = Path(__file__).parent / "results"
PEERS = ("timm",)
SEED, STEPS = 0, 1000
PLAIN = "plain"


def network(name: str, device: str, size: int) -> tuple[nn.Module, torch.Tensor]:
    import timm

    torch.manual_seed(SEED)
    options = {"img_size": size} if name.startswith("vit") else {}
    return timm.create_model(name, **options).to(device), torch.randn(8, 3, size, size, device=device)


def step(model: nn.Module, x: torch.Tensor, half: bool) -> None:
    model.zero_grad()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
        loss = model(x).square().mean()
    loss.backward()


# -- activation checkpointing -----------------------------------------------------------------------------------------


def wrapped(model: nn.Module, wrapper: Callable[[nn.Module], Callable[..., Any]]) -> nn.Module:
    """A copy whose blocks have their forward wrapped."""
    model = copy.deepcopy(model)
    for block in chosen_blocks(model).values():
        wrap_method(block, "forward", wrapper(block))
    return model


def torchs(block: nn.Module) -> Callable[..., Any]:
    """As torch's own: BatchNorm statistics are updated twice."""
    return partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)


def checkpointing(name: str, rounds: int, device: str) -> dict[str, dict[str, float]]:
    """Time of a step, and what its forward keeps for the backward pass, over those without."""
    model, x = network(name, device, 64)
    ours = {policy: wrapped(model, lambda b, p=policy: partial(recompute, b, p)) for policy in ("full", "selective")}
    models = {PLAIN: model, "torch checkpoint": wrapped(model, torchs), **ours}
    times = in_turns([{key: partial(step, each, x, False)} for key, each in models.items()], rounds, PLAIN, device)
    kept = {key: memory(lambda each=each: each(x), device, 2**20)[0]["kept"] for key, each in models.items()}
    return {key: {**row, "kept_MiB": kept[key]} for key, row in times.items()}


# -- channels_last ----------------------------------------------------------------------------------------------------


def channels_last(name: str, rounds: int, device: str, half: bool) -> dict[str, dict[str, float]]:
    """Time of a step, as the callback makes it on whole weights and where weights are sharded."""
    model, x = network(name, device, 128)
    images = copy.deepcopy(model)
    both = copy.deepcopy(model).to(memory_format=torch.channels_last)
    for each in (images, both):
        for layer in each.modules():
            if isinstance(layer, nn.Conv2d):
                layer.register_forward_pre_hook(to_channels_last)
    models = {PLAIN: model, "ChannelsLast": both, "ChannelsLast, images only": images}
    works: dict[str, Work] = {key: partial(step, each, x, half) for key, each in models.items()}
    return in_turns([{key: work} for key, work in works.items()], rounds, PLAIN, device)


# -- wrappers that have nothing to do ---------------------------------------------------------------------------------


def idle(rounds: int, device: str) -> dict[str, dict[str, float]]:
    """Time of 1000 forwards of an empty module: what a wrapper adds to a call, in ns."""
    x = torch.randn(2, 3, 4, 4, device=device).contiguous(memory_format=torch.channels_last)

    def calls(layer: nn.Module) -> None:
        with torch.no_grad():
            for _ in range(1000):
                layer(x)

    layers = {key: nn.Identity() for key in (PLAIN, "ActivationCheckpointing", "ChannelsLast", "torch.compile")}
    wrap_method(layers["ActivationCheckpointing"], "forward", partial(recompute, layers[PLAIN], "full"))
    layers["ChannelsLast"].register_forward_pre_hook(to_channels_last)
    layers["torch.compile"].forward = torch.compile(layers[PLAIN].forward, backend="eager")
    layers["Compile"] = nn.Identity()
    module = pl.LightningModule()
    module.net = nn.Sequential(nn.Linear(1, 1), layers["Compile"])
    lt.Compile("net.1", backend="eager").on_train_start(None, module)
    return in_turns([{key: partial(calls, layer)} for key, layer in layers.items()], rounds, PLAIN, device)


# -- the Trainer ------------------------------------------------------------------------------------------------------


class Tiny(pl.LightningModule):
    """A step of which the Trainer is most."""

    def __init__(self, logs: bool = True) -> None:
        super().__init__()
        self.net, self.logs = nn.Linear(32, 2), logs

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        if self.logs:
            self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


QUIET = {"enable_progress_bar": False}
TRAINERS: dict[str, tuple[dict[str, Any], bool]] = {  # arguments, and whether the step logs
    "default": ({}, True),
    "no progress bar": (QUIET, True),
    "log every 500 steps": ({"log_every_n_steps": 500}, True),
    "no logger": ({"logger": False}, True),
    "no checkpoints": ({"enable_checkpointing": False}, True),
    "speed_preset()": (lt.speed_preset("highest"), True),
    "speed_preset(), no logger, no checkpoints": (
        {**lt.speed_preset("highest"), "logger": False, "enable_checkpointing": False},
        True,
    ),
    "default, without self.log": ({}, False),
    "speed_preset(), without self.log": (lt.speed_preset("highest"), False),
}


def trainers(fits: int, device: str) -> dict[str, dict[str, float]]:
    """Microseconds of a training step, and how many fewer than by default."""
    batch = torch.randn(16, 32, device=device), torch.zeros(16, device=device).long()
    times: dict[str, list[float]] = {name: [] for name in TRAINERS}
    for _ in range(1 + fits):  # the first is not counted
        for name, (arguments, logs) in TRAINERS.items():
            laps = Laps(20)
            with TemporaryDirectory() as folder:
                settings = {"accelerator": device, "devices": 1, "max_epochs": 1, "default_root_dir": folder}
                trainer = pl.Trainer(**settings, callbacks=[laps], **arguments)
                trainer.fit(Tiny(logs), DataLoader([batch] * STEPS, batch_size=None))
            times[name].append(laps.step())
    rows = {}
    for name, each in times.items():
        saved = [default - own for default, own in zip(times["default"][1:], each[1:], strict=True)]
        rows[name] = {**spread(each[1:]), "saved_us": round(median(saved), 1)}
    return rows


# -- all --------------------------------------------------------------------------------------------------------------

CHECKPOINTED = ("resnet18", "vit_tiny_patch16_224")
CONVOLUTIONS = ("resnet18", "mobilenetv3_small_100", "convnext_atto")


def measure(rounds: int, fits: int, device: str) -> dict[str, Any]:
    """All figures, printed as they come."""
    result: dict[str, Any] = {"trainers": trainers(fits, device), "idle": idle(rounds, device)}
    result["checkpointing"] = {name: checkpointing(name, rounds, device) for name in CHECKPOINTED}
    result["channels_last"] = {
        f"{name}, {'bf16' if half else 'fp32'}": channels_last(name, rounds, device, half)
        for name in CONVOLUTIONS
        for half in (False, True)
    }
    for title in ("trainers", "idle"):
        table(title, result[title])
    for title in ("checkpointing", "channels_last"):
        for name, rows in result[title].items():
            table(f"{title}: {name}", rows)
    place = torch.cuda.get_device_name() if device == "cuda" else device
    settings = {"device": place, "threads": torch.get_num_threads(), "seed": SEED, "rounds": rounds, "fits": fits}
    return {"machine": machine(*PEERS), "settings": settings, **result}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--fits", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="few rounds: whether it runs, not how fast")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="1 on a machine that others use")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, help="where the figures go")
    args = parser.parse_args()
    prepare(PEERS, args.threads)
    rounds, fits = (1, 1) if args.quick else (args.rounds, args.fits)
    output = args.output or RESULTS / ("speed.json" if args.device == "cpu" else "speed_cuda.json")
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps(measure(rounds, fits, args.device), indent=1) + "\n")


if __name__ == "__main__":
    main()
