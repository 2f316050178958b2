"""A preset of each family through the regimes, in two processes where it has two: equal to one process, or refused."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

import lightning_tricks as lt
from tests.conformance.preset_runs import IN_STEP, PLAN, settings_of, whole
from tests.conformance.runs import fp16
from tests.conformance.test_again import Stop
from tests.conformance.test_manual import ManualNet
from tests.conformance.test_resume import Resumable
from tests.conformance.test_several import TwoOptimizers
from tests.nets import PlainNet, Stream, assert_close, assert_equal, build, data, fit, loader, quiet, trainer, weights
from tests.ranks import run_ranks

FAMILIES = {
    "single_*": "single_bf16",
    "ddp_*": "ddp_bf16",
    "ddp_*(async_save=True)": "ddp_bf16+async",
    "ddp_diloco_*": "ddp_diloco_bf16",
    "fsdp2_*": "fsdp2_bf16",
    "fsdp2_*(async_save=True)": "fsdp2_bf16+async",
    "hsdp_*": "hsdp_bf16",
    "tp_*": "tp_bf16",
    "zero*": "zero3_bf16",
}
PROCESSES = {
    "single_*": 1,
    "hsdp_*": 4,
    "tp_*": 4,
}  # of two nodes, where there are four; two processes of one node elsewhere
OWN = {"ddp_": "DDP", "fsdp2_": "FSDP2", "hsdp_": "FSDP2", "tp_": "FSDP2", "zero": "DeepSpeed"}  # of names' beginnings
PRECISIONS = {"bf16": "bf16-mixed", "fp16": "16-mixed"}  # of a regime
FIT: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {},
    "fp16": {},
    "accumulate": {"accumulate_grad_batches": 3},
    "clip": {"gradient_clip_val": 0.1},
}
REFUSED = [("fsdp2_bf16", "fp16"), ("hsdp_bf16", "fp16"), ("tp_bf16", "fp16")]
ALIKE: dict[str, Any] = {"use_distributed_sampler": False}


class Whole(Callback):
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.weights = {name: value.detach().float() for name, value in whole(trainer, pl_module).items()}


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def machines() -> dict[str, int]:
    """The devices and nodes of the Trainer."""
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return {"devices": devices, "num_nodes": ranks() // devices}


def share(name: str) -> Resumable:
    """This rank's share of every 16 samples of 80: five batches, which two ranks compute together under "tp_*"."""
    together = 2 if name.startswith("tp_") else 1
    size = 16 * together // ranks()
    begin = size * (int(os.environ.get("RANK", 0)) // together)
    return Resumable(Subset(data(80), [16 * batch + n for batch in range(5) for n in range(begin, begin + size)]), size)


def trained(name: str, precision: str = "32-true", net: Any = PlainNet, **settings: Any) -> dict[str, Tensor]:
    """The end weights of a fit with a preset."""
    gather, given = Whole(), settings_of(name, precision)
    callbacks = [*settings.pop("callbacks", []), gather]
    fit(build(net), callbacks=callbacks, **{"train": share(name), **machines(), **given, **ALIKE, **settings})
    return gather.weights


def again(module: Any, train: Any, **settings: Any) -> dict[str, Tensor]:
    """The end weights of two fits of one Trainer, an epoch each."""
    gather = Whole()
    run = trainer(callbacks=[gather], **{**settings, "max_epochs": 1})
    for epochs in (1, 2):
        run.fit_loop.max_epochs = epochs
        run.fit(module, train, loader(24))
    return gather.weights


def own_regime(family: str) -> str | None:
    """The regime that the strategies of a family are."""
    return next((regime for begin, regime in OWN.items() if family.startswith(begin)), None)


def clipped_apart(train: Any) -> dict[str, Tensor]:
    """A plain loop of two workers, which clip the gradients of their halves, and take the mean of their weights."""
    module = build(PlainNet)
    workers = [deepcopy(module) for _ in range(2)]
    optimizers = [worker.configure_optimizers() for worker in workers]
    for x, y in list(train) * quiet["max_epochs"]:
        for worker, optimizer, own, labels in zip(workers, optimizers, x.chunk(2), y.chunk(2), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(worker(own), labels).backward()
            nn.utils.clip_grad_norm_(worker.parameters(), FIT["clip"]["gradient_clip_val"])
            optimizer.step()
        for parameters in zip(*(worker.parameters() for worker in workers), strict=True):
            mean = torch.stack([parameter.detach() for parameter in parameters]).mean(0)
            for parameter in parameters:
                parameter.data.copy_(mean)
    return weights(workers[0])


def lora() -> lt.LoRA:
    return lt.LoRA(r"layers\.0$", r=2, train=r"layers\.2")


def right_or_refused(train: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor] | str:
    try:
        return train()
    except MisconfigurationException as error:
        return str(error)


def configured(name: str, folder: Path) -> dict[str, Tensor]:
    """The same by a configuration file."""
    strategy: Any = name
    if name.startswith("tp_"):  # a plan that is not the model's own
        arguments = {"tensor_parallel": "node", "plan": PLAN}
        strategy = {"class_path": "lightning_tricks.FSDP2Preset", "init_args": arguments}
    elif name.endswith("+async"):
        kind = "DDPPreset" if name.startswith("ddp_") else "FSDP2Preset"
        strategy = {"class_path": f"lightning_tricks.{kind}", "init_args": {"async_save": True}}
    elif name == "ddp_diloco_bf16":
        arguments = {"compression": "local_sgd", **IN_STEP}
        strategy = {"class_path": "lightning_tricks.DDPPreset", "init_args": arguments}
    settings = {**quiet, **ALIKE, **machines(), "strategy": strategy, "callbacks": []}
    path = folder / f"{os.environ.get('RANK', 0)}.yaml"
    path.write_text(
        json.dumps({"trainer": settings, "model": {"class_path": "tests.nets.PlainNet"}, "seed_everything": 3})
    )
    sys.argv = ["fit.py", "--config", str(path)]
    cli, gather = LightningCLI(save_config_callback=None, run=False), Whole()
    cli.trainer.callbacks.append(gather)
    L.seed_everything(7, verbose=False)
    cli.trainer.fit(cli.model, share(name), loader(24))
    return gather.weights


def everything(name: str, folder: Path) -> dict[str, Any]:
    """The end weights in each regime; of one that is refused the message."""
    if name.startswith("zero"):
        from deepspeed.accelerator import get_accelerator

        get_accelerator().is_fp16_supported = lambda: True  # CPUs without AMX compute in fp16 as well, slowly
    found: dict[str, Any] = {}
    for regime, settings in FIT.items():
        if (preset := name.partition("+async")[0], regime) in REFUSED:
            with pytest.raises((ValueError, MisconfigurationException), match="16-mixed") as caught:
                trainer(strategy=preset, precision="16-mixed")
            found[regime] = str(caught.value)
        else:
            found[regime] = trained(name, PRECISIONS.get(regime, "32-true"), **settings)
    found["manual"] = trained(name, net=ManualNet)
    found["several"] = right_or_refused(lambda: trained(name, net=TwoOptimizers))
    found["iterable"] = trained(name, train=DataLoader(Stream(share(name)), batch_size=None))
    found["compile"] = trained(name, callbacks=[lt.Compile("layers", backend="aot_eager")])
    save = ModelCheckpoint(folder, "middle", every_n_train_steps=7, save_top_k=-1, enable_version_counter=False)
    saved = trained(name, callbacks=[save], enable_checkpointing=True)
    if name == "ddp_diloco_bf16":  # a save makes the workers' momenta their mean
        assert_close(saved, found["fp32"], 1e-6)
    else:
        assert_equal(saved, found["fp32"])
    found["resume"] = trained(name, ckpt_path=folder / "middle.ckpt")
    found["ranks"] = right_or_refused(lambda: trained(name, ckpt_path=folder / "alone.ckpt"))
    found["LoRA"] = right_or_refused(lambda: trained(name, callbacks=[lora()]))
    with pytest.raises(RuntimeError, match="planned"):
        trained(name, callbacks=[Stop(7)])
    found["exception"] = trained(name)
    twice = {**machines(), **settings_of(name, "32-true"), **ALIKE}
    found["again"] = right_or_refused(lambda: again(build(PlainNet), share(name), **twice))
    trained(name, "bf16-mixed", max_epochs=1)
    found["second"] = trained(name)
    assert_equal(found["resume"], saved)
    for regime in ("iterable", "exception", "second"):
        assert_equal(found[regime], found["fp32"])
    found["yaml"] = configured(name, folder)
    assert_equal(found["yaml"], found["bf16"])
    if dist.is_initialized():
        dist.barrier()
    as_numpy = {
        regime: {key: each.numpy() for key, each in value.items()}
        for regime, value in found.items()
        if isinstance(value, dict)
    }
    return {**found, **as_numpy}


def by_itself(name: str, folder: Path) -> dict[str, Any]:
    """The end weights of one process that goes on from the checkpoint of several; one of shards is read by FSDP2."""
    return {key: value.numpy() for key, value in trained(name, ckpt_path=folder / "middle.ckpt").items()}


@pytest.mark.slow  # accumulation, clipping and resume of each preset are among the fast ones, in test_presets
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_right_or_refused(family: str, tmp_path: Path, cell: Callable[..., None]) -> None:
    name, processes = FAMILIES[family], PROCESSES.get(family, 2)
    save = ModelCheckpoint(tmp_path, "alone", every_n_train_steps=7, save_top_k=-1, enable_version_counter=False)
    fit(build(PlainNet), train=Resumable(data(80), 16), callbacks=[save], enable_checkpointing=True)
    told = run_ranks(everything, name, tmp_path, nprocs=processes, nodes=max(1, processes // 2), timeout=600)
    for regime, value in told[0].items():
        if isinstance(value, str):
            said = {"several": "optimizer", "LoRA": "plan cannot split 'layers.0', which has an adapter"}
            assert said.get(regime, name.partition("+async")[0]) in value
            cell(family, regime, "refused", value)
            continue
        alone, beside = build(PlainNet), {"callbacks": [lora()]} if regime == "LoRA" else {}
        own = {"precision": "bf16-mixed"} if regime in ("bf16", "yaml") else fp16() if regime == "fp16" else {}
        if regime == "again":
            again(alone, loader(80, 16))
        else:
            fit(alone, train=loader(80, 16), **{**FIT.get(regime, {}), **own, **beside})
        expected = clipped_apart(loader(80, 16)) if (name, regime) == ("ddp_diloco_bf16", "clip") else weights(alone)
        for rank in told:
            given = {key: torch.from_numpy(each) for key, each in rank[regime].items()}
            assert_close(given, expected, 5e-3 if own else 1e-5)  # DeepSpeed computes with 16-bit weights
        if regime == "ranks":
            (one,) = run_ranks(by_itself, "fsdp2_bf16" if own_regime(family) == "FSDP2" else name, tmp_path, nprocs=1)
            assert_close({key: torch.from_numpy(each) for key, each in one.items()}, weights(alone), 1e-5)
        cell(family, regime, "right", "goes on with its weights" if regime == "again" else "")
    for other in ("DDP", "FSDP2", "DeepSpeed"):
        if other == own_regime(family):
            cell(family, other)  # in fact all that is above
        else:
            cell(family, other, "none", "a strategy itself")
    own_ddp = own_regime(family) == "DDP"
    cell(family, "compiled DDP", *([] if own_ddp else ["none", "a strategy itself"]))
