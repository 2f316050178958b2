"""What processes do together on devices with NCCL, they do on CPUs: presets, checkpoints, folds, searches, losses."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from torch import Tensor

import lightning_tricks as lt
from tests.callbacks.test_preemption import Signals
from tests.conformance.preset_runs import PRECISIONS
from tests.conformance.test_presets import everything
from tests.device.devices import CUDA, Device, require_devices
from tests.device.nccl import rank_device, rank_with_nccl
from tests.device.runs import Fit, Watch
from tests.evaluation.recipes import Scored, make_trainer
from tests.evaluation.recipes import run as cross_validated
from tests.faults.runs import Resumable
from tests.few import few
from tests.nets import PlainNet, build, data, loader, rank_loader, trainer, weights
from tests.ranks import Cases, run_cases, run_ranks
from tests.strategies.ddp.test_compression import trained as compressed

Case = Callable[[Device, Path], Any]


def on(there: Device, **settings: Any) -> L.Trainer:
    return trainer(**{"accelerator": there.name, "devices": 2, "strategy": "ddp", **settings})


def plain(values: dict[str, Tensor]) -> dict[str, Any]:
    return {name: value.cpu().numpy() for name, value in values.items()}


def preempted(there: Device, folder: Path, strategy: str) -> Any:
    """A fit that a signal to the second rank ends, and one that goes on from the newest checkpoint."""

    def fit(run: Path, *signals: Any) -> dict[str, Any]:
        module, callbacks = build(PlainNet), [lt.Preemption(run), *signals]
        settings = lt.preset(strategy, precision="32-true")
        made = on(there, callbacks=callbacks, use_distributed_sampler=False, **settings)
        made.fit(module, Resumable(seed=made.global_rank), loader(24), ckpt_path="newest")
        return plain(weights(module))

    mine = [Signals("on_before_backward", 3)] if os.environ["RANK"] == "1" else []
    with pytest.raises(SIGTERMException) as raised:
        fit(folder / "ended", *mine)
    assert raised.value.code == 128 + signal.SIGTERM
    (saved,) = (folder / "ended").glob("preempted-*.ckpt")
    step = int(saved.stem.split("=")[1])
    assert step == 4 + (there.name != "cpu")  # one more, since nobody waits for the device
    return {"whole": fit(folder / "whole"), "resumed": fit(folder / "ended")}


def folds(there: Device, folder: Path) -> Any:
    made = partial(make_trainer, devices=2, strategy="ddp", accelerator=there.name)
    found = cross_validated(folder, make_module=without_dropout, make_trainer=made)
    return {"metrics": found.metrics, "predictions": found.predictions.cpu().numpy()}


def without_dropout(fold: int) -> L.LightningModule:
    """A device draws its own random numbers."""
    module = Scored()
    module.layers[3] = torch.nn.Identity()
    return module


def learning_rate(there: Device, folder: Path) -> Any:
    module = build(PlainNet)
    found = lt.find_lr(on(there, use_distributed_sampler=False), module, rank_loader(), steps=12, max_lr=10.0)
    return {"losses": found.losses, "weights": plain(weights(module))}


def batch_size(there: Device, folder: Path) -> Any:
    return lt.find_batch_size(on(there, max_epochs=1), build(PlainNet), loader(64), max_size=16).batch_size


def contrastive(there: Device, folder: Path) -> Any:
    """The loss of unequal batches, whose sizes the ranks must know: one wait."""
    rank = int(os.environ["RANK"])
    torch.distributed.is_initialized() or on(there).strategy.setup_environment()
    x = data(10).tensors[0][rank * 4 : 4 + rank * 6].to(there.name)
    with there.waits(at_most=1):
        x.requires_grad_()
        loss = lt.clip_loss(x, x.detach() + 1)
        loss.backward()
    return loss.item(), x.grad.cpu().numpy()


def integers(there: Device, folder: Path) -> Any:
    """FSDP2 hands rank 0's buffers to all ranks, also those of types that NCCL has not."""

    class Counts(PlainNet):
        def __init__(self) -> None:
            super().__init__()
            rank = int(os.environ["RANK"])
            for kind in (torch.int16, torch.bool, torch.complex64, torch.float64):
                self.register_buffer(f"of_{kind}".replace(".", "_"), torch.full((3,), 1 - rank, dtype=kind))

    module = build(Counts)
    on(there, max_steps=1, **lt.preset("fsdp2_bf16", precision="32-true")).fit(module, loader(48))
    return {name: value.cpu().numpy() for name, value in module.named_buffers()}


def rounded(there: Device, folder: Path, **arguments: Any) -> Any:
    """Gradients that are compressed, in steps that wait as often as without."""
    ended, waits = {}, {}
    for compression in ("none", arguments["compression"]):
        found = Fit()
        watch = Watch(found, there, folder / f"{compression}.ckpt")
        given = arguments if compression != "none" else {"compression": "none"}
        ended[compression] = plain(compressed(arguments=given, accelerator=there.name, callbacks=[watch]))
        waits[compression] = max(map(len, found.steps))
    assert len({*waits.values()}) == 1, waits
    return ended


def preset(there: Device, folder: Path, name: str) -> Any:
    return everything(name, "fp32", folder, there.name)


QUICK: dict[str, Case] = {
    "Preemption": partial(preempted, strategy="ddp_bf16"),
    "cross_validate": folds,
    "clip_loss": contrastive,
    "int16": integers,
    "powersgd": partial(rounded, compression="powersgd", compression_start=2),
    "fsdp2_bf16": partial(preset, name="fsdp2_bf16"),
}
SLOW: dict[str, Case] = {
    "find_lr": learning_rate,
    "find_batch_size": batch_size,
    "Preemption, fsdp2": partial(preempted, strategy="fsdp2_bf16"),
    **{kind: partial(rounded, compression=kind) for kind in ("bf16", "fp16", "local_sgd")},
    "DiLoCo": partial(
        rounded, compression="local_sgd", local_sgd_period=2, outer_lr=0.7, outer_momentum=0.9, fragments=2
    ),
    **{
        name: partial(preset, name=name)
        for name in PRECISIONS
        if name.startswith(("ddp", "fsdp2", "hsdp", "tp")) and "offload" not in name and name not in QUICK
    },
}
CASES = {**QUICK, **SLOW}


def outcome(name: str, folder: str, on: str) -> Any:
    """What a rank finds."""
    here = Path(folder, on, name)
    here.mkdir(parents=True, exist_ok=True)
    with rank_device(on) as there:
        found = CASES[name](there, here)
        assert there.simulation is None or not there.simulation.races
    return found


@pytest.fixture(scope="module")
def found(selected: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Cases]:
    """What the ranks find in a place, in the same two processes."""
    folder = str(tmp_path_factory.mktemp("collectives"))
    return cache(lambda on: run_cases(outcome, selected("name"), folder, on))


def same(a: Any, b: Any, tolerance: float) -> None:
    """Compare nested results."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key], tolerance)
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            same(one, other, tolerance)
    elif isinstance(a, float | np.ndarray):
        np.testing.assert_allclose(a, b, rtol=10 * tolerance, atol=tolerance)
    else:
        assert a == b


NAMES = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


@pytest.mark.slow
@pytest.mark.parametrize("on", CUDA)
@pytest.mark.parametrize("name", few(NAMES, 3))
def test_devices_do_together_what_cpus_do(name: str, on: str, found: Callable[[str], Cases]) -> None:
    if on == "real cuda":
        require_devices(2)
    for on_devices, on_cpus in zip(found(on)[name], found("host cpu")[name], strict=True):
        same(on_devices, on_cpus, 1e-6 if on == "simulated cuda" else 1e-3)
        if name.startswith("Preemption"):
            same(on_devices["whole"], on_devices["resumed"], 0.0)


# -- a process group of both backends, which is made once in a process ------------------------------------------------


def offloaded(folder: str) -> tuple[Any, Any]:
    with rank_with_nccl() as simulation:
        return everything("fsdp2_offload_bf16", "fp32", Path(folder), "cuda")["weights"], simulation.races


@pytest.mark.slow
def test_offloading_asks_for_a_backend_of_host_memory(tmp_path: Path) -> None:
    for weights_, races in run_ranks(offloaded, str(tmp_path)):
        assert not races
        assert weights_.keys() == weights(build(PlainNet)).keys()


def group_of_others() -> str:
    """Ray makes the group before the strategy does."""
    with rank_with_nccl():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl")
        with pytest.raises(MisconfigurationException) as raised:
            trainer(accelerator="cuda", devices=2, **lt.preset("fsdp2_offload_bf16")).fit(build(PlainNet), loader())
        return str(raised.value)


def test_a_group_without_one_is_refused_by_name() -> None:
    for said in run_ranks(group_of_others):
        assert "strategy='fsdp2_offload_bf16' adds up the norms of gradients in host memory" in said
        assert "got 'cuda:nccl'. Ray makes it by TorchConfig(backend=...), others" in said
        assert "pass 'cpu:gloo,cuda:nccl', or leave the group to the strategy" in said


# -- one device -------------------------------------------------------------------------------------------------------


def evaluated(name: str) -> list[Any]:
    with rank_with_nccl():
        module, batches = build(PlainNet), loader(24)
        made = trainer(accelerator="cuda", devices=1, **lt.preset(name, precision="32-true"))
        return [made.validate(module, batches, verbose=False), len(made.predict(module, batches))]


@pytest.mark.parametrize("name", ["fsdp2_bf16", "ddp_bf16", "single_bf16"])
def test_a_preset_evaluates_on_one_device(name: str) -> None:
    """With NCCL, and without a group, Lightning evaluates in inference mode."""
    expected = trainer().validate(build(PlainNet), loader(24), verbose=False)
    ((found, batches),) = run_ranks(evaluated, name, nprocs=1)
    assert found[0]["val_loss"] == pytest.approx(expected[0]["val_loss"])
    assert batches == 3
