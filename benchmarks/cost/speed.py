"""What the memory and speed savers save and cost: checkpointing, channels_last, compilation, lean Trainer arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from fitted import PLAIN, Laps, architecture
from rows import Row, added_rows, figure, row, rows_of, target
from settings import SEED, Settings
from space import memory
from timing import fits, in_turns, works
from torch import nn
from torch.utils.data import DataLoader

import lightning_tricks as lt
from lightning_tricks.callbacks.activation_checkpointing import recompute
from lightning_tricks.callbacks.channels_last import to_channels_last
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.selection import select_blocks

NAME = "speed"
PEERS = ("timm",)
VIT = "vit_tiny_patch16_224"


def network(name: str, device: str, size: int) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(SEED)
    model = architecture(name, **({"img_size": size} if name.startswith("vit") else {}))
    return model.to(device), torch.randn(8, 3, size, size, device=device)


def step(model: nn.Module, x: torch.Tensor, half: bool) -> None:
    model.zero_grad()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
        loss = model(x).square().mean()
    loss.backward()


CALLS = 1000


# -- activation checkpointing -----------------------------------------------------------------------------------------


def wrapped(model: nn.Module, wrapper: Callable[[nn.Module], Callable[..., Any]]) -> nn.Module:
    """A copy whose blocks have their forward wrapped."""
    model = copy.deepcopy(model)
    for block in select_blocks(model).values():
        wrap_method(block, "forward", wrapper(block))
    return model


def torchs(block: nn.Module) -> Callable[..., Any]:
    """As torch's own: BatchNorm statistics are updated twice."""
    return partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)


def checkpointing(name: str, rounds: int, device: str) -> list[Row]:
    """Time of a step, and what its forward keeps for the backward pass."""
    model, x = network(name, device, 64)
    ours = {policy: wrapped(model, lambda b, p=policy: partial(recompute, b, p)) for policy in ("full", "selective")}
    models = {PLAIN: model, "torch checkpoint": wrapped(model, torchs), **ours}
    contenders = {key: lambda each=each: partial(step, each, x, False) for key, each in models.items()}
    found = rows_of(f"checkpointing, step, {name}", in_turns(works(contenders, device), rounds), PLAIN, "ms")
    for key, each in models.items():
        kept, _ = memory(lambda each=each: each(x), device, 2**20)
        found.append(row(f"checkpointing, kept for backward, {name}", key, [kept["kept"]], "MiB"))
    return found


# -- channels_last ----------------------------------------------------------------------------------------------------


def channels_last(name: str, rounds: int, device: str, half: bool) -> list[Row]:
    """Time of a step, as the callback makes it on whole weights and where weights are sharded."""
    model, x = network(name, device, 128)
    images = copy.deepcopy(model)
    both = copy.deepcopy(model).to(memory_format=torch.channels_last)
    for each in (images, both):
        for layer in each.modules():
            if isinstance(layer, nn.Conv2d):
                layer.register_forward_pre_hook(to_channels_last)
    models = {PLAIN: model, "ChannelsLast": both, "ChannelsLast, images only": images}
    contenders = {key: lambda each=each: partial(step, each, x, half) for key, each in models.items()}
    case = f"channels last, step, {name}, {'bf16' if half else 'fp32'}"
    return rows_of(case, in_turns(works(contenders, device), rounds), PLAIN, "ms")


# -- wrappers that have nothing to do ---------------------------------------------------------------------------------


def idle(rounds: int, device: str) -> list[Row]:
    """Time of the forward of an empty module: what a wrapper adds to a call."""
    x = torch.randn(2, 3, 4, 4, device=device).contiguous(memory_format=torch.channels_last)

    def calls(layer: nn.Module) -> None:
        with torch.no_grad():
            for _ in range(CALLS):
                layer(x)

    layers = {key: nn.Identity() for key in (PLAIN, "ActivationCheckpointing", "ChannelsLast", "torch.compile")}
    wrap_method(layers["ActivationCheckpointing"], "forward", partial(recompute, layers[PLAIN], "full"))
    layers["ChannelsLast"].register_forward_pre_hook(to_channels_last)
    layers["torch.compile"].forward = torch.compile(layers[PLAIN].forward, backend="eager")
    layers["Compile"] = nn.Identity()
    module = L.LightningModule()
    module.net = nn.Sequential(nn.Linear(1, 1), layers["Compile"])
    compiled = lt.Compile("net.1", backend="eager")
    trainer = L.Trainer(callbacks=[compiled], accelerator="cpu", logger=False, enable_model_summary=False)
    compiled.on_train_start(trainer, module)
    contenders = {key: lambda layer=layer: partial(calls, layer) for key, layer in layers.items()}
    return rows_of("a call of an empty module", in_turns(works(contenders, device), rounds), PLAIN, per=CALLS)


# -- the Trainer ------------------------------------------------------------------------------------------------------


class Tiny(L.LightningModule):
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


DEFAULT, QUIET = "default", {"enable_progress_bar": False}
TRAINERS: dict[str, tuple[dict[str, Any], bool]] = {  # arguments, and whether the step logs
    DEFAULT: ({}, True),
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


def of_trainer(arguments: dict[str, Any], logs: bool, steps: int, device: str) -> float:
    """Microseconds of a step."""
    batch = torch.randn(16, 32, device=device), torch.zeros(16, device=device).long()
    laps = Laps(20)
    with TemporaryDirectory() as folder:
        settings = {"accelerator": device, "devices": 1, "max_epochs": 1, "default_root_dir": folder}
        trainer = L.Trainer(**settings, callbacks=[laps], **arguments)
        trainer.fit(Tiny(logs), DataLoader([batch] * steps, batch_size=None))
    return laps.step()


def trainers(rounds: int, steps: int, device: str) -> list[Row]:
    """A training step, and how much less it is than by default."""
    contenders = {name: partial(of_trainer, *each, steps, device) for name, each in TRAINERS.items()}
    measured = in_turns(fits(contenders), rounds, warm_up=0)
    return [
        *rows_of("a Trainer's step", measured, DEFAULT),
        *added_rows("over a default Trainer's step", measured, DEFAULT),
    ]


# -- all --------------------------------------------------------------------------------------------------------------

CHECKPOINTED = ("resnet18", VIT)
CONVOLUTIONS = ("resnet18", "mobilenetv3_small_100", "convnext_atto")


def run(settings: Settings) -> list[Row]:
    """All figures."""
    device, rounds = settings.device, settings.pick("rounds", 5, 2, 1)
    steps = settings.pick("steps", 600, 200, 60)
    found = trainers(settings.pick("fits", 3, 1, 1), steps, device) + idle(rounds, device)
    for name in settings.pick("checkpointed", CHECKPOINTED, (VIT,), ()):
        found += checkpointing(name, rounds, device)
    for name in settings.pick("channels last", CONVOLUTIONS, ("mobilenetv3_small_100",), ()):
        found += channels_last(name, rounds, device, False) + channels_last(name, rounds, device, True)
    return found


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What full checkpointing keeps; the gains in time are what they are."""
    cases = dict.fromkeys(each.case for each in rows if each.case.startswith("checkpointing, kept"))
    found = []
    for case in cases:
        share = round(figure(rows, case, "full") / figure(rows, case, PLAIN), 3)
        found.append(target(f"{case}: full over plain", share, "<=", 0.6))
    return found
