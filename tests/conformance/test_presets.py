"""Every preset in two real processes: it trains what one process trains on their batches, saves, resumes, evaluates."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

import lightning_tricks as lt
from tests.conformance.preset_runs import PRECISIONS, settings_of, whole
from tests.conformance.runs import Compiled
from tests.few import few
from tests.nets import PlainNet, assert_equal, build, fit, loader, rank_loader, trainer, weights
from tests.ranks import Cases, run_cases, run_ranks

EPOCHS = 4


class Scheduled(PlainNet):
    """Adam with a schedule that ends at its floor."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return lt.cosine(optimizer, self, warmup=2, floor=0.1)


class Watch(Callback):
    """The full weights and the last learning rate at the end, in fp32, and a checkpoint half way."""

    def __init__(self, half: Path | None = None) -> None:
        self.half = half

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.half is not None and trainer.current_epoch == EPOCHS // 2 - 1:
            trainer.save_checkpoint(self.half)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.weights = whole(trainer, pl_module)
        self.lr = trainer.optimizers[0].param_groups[0]["lr"]
        self.steps = trainer.global_step


def train(name: str, precision: str, watch: Watch, batches: Any, **more: Any) -> L.Trainer:
    settings = {"max_epochs": EPOCHS, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, **more}
    return fit(
        build(Scheduled),
        train=batches,
        callbacks=[watch],
        use_distributed_sampler=False,
        **settings_of(name, precision),
        **settings,
    )


def everything(name: str, form: str, folder: Path, accelerator: str = "cpu") -> dict[str, Any]:
    """What a rank has to tell."""
    precision, folder = precision_of(name, form), folder / f"{name} {form}"
    folder.mkdir(exist_ok=True)
    torch.compiler.reset()
    if name.startswith("zero"):
        from deepspeed.accelerator import get_accelerator

        get_accelerator().is_fp16_supported = lambda: True  # CPUs without AMX compute in fp16 as well, slowly
    half, end = folder / "half.ckpt", folder / "end.ckpt"
    watch, resumed = Watch(half), Watch()
    batches = loader(48, batch_size=16) if name.startswith("tp_") else rank_loader()  # both compute each batch
    where: dict[str, Any] = {"accelerator": accelerator, "devices": 2}
    run = train(name, precision, watch, batches, **where)
    run.save_checkpoint(end)
    train(name, precision, resumed, batches, **where, ckpt_path=half)
    assert_equal(resumed.weights, watch.weights)
    told = {"weights": {key: value.cpu().numpy() for key, value in watch.weights.items()}, "steps": watch.steps}
    told.update(lr=watch.lr, resumed=resumed.steps, precision=run.precision)
    for evaluate in ("validate", "test", "predict"):
        new = trainer(**where, use_distributed_sampler=False, **settings_of(name, precision))
        given = getattr(new, evaluate)(build(Scheduled), loader(24), ckpt_path=end)
        told[evaluate] = torch.cat(given).float().cpu().numpy() if evaluate == "predict" else given[0]
    dist.barrier()
    return told


def precision_of(name: str, form: str) -> str:
    return "32-true" if form == "fp32" else PRECISIONS[name]


@pytest.fixture(scope="module")
def told(selected: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Cases]:
    """What the ranks tell of all presets of a library, which share two processes."""

    def of(library: str, form: str) -> Cases:
        names = [name for name in selected("name", form=form) if name.startswith(library)]
        return run_cases(everything, names, form, tmp_path_factory.mktemp(library))

    return cache(of)


@pytest.mark.parametrize("name", [name for name in PRECISIONS if name.endswith("fp16")])
def test_in_fp32_a_preset_in_fp16_is_that_in_bf16(name: str) -> None:
    ours, theirs = (settings_of(each, "32-true") for each in (name, name.replace("fp16", "bf16")))
    own = {"strategy_name", "_undo", "_forward_redirection"}  # the latter two are objects without a state yet
    ours["strategy"], theirs["strategy"] = (
        (type(strategy), {key: repr(value) for key, value in vars(strategy).items() if key not in own})
        for strategy in (ours["strategy"], theirs["strategy"])
    )
    assert ours == theirs


QUICK = ("ddp_bf16", "fsdp2_bf16", "tp_bf16", "zero2_bf16", "zero3_offload_bf16")
FORMS = [  # in fp32 one preset stands for the other, as the test before this one says
    pytest.param(form, name, marks=[] if form == "fp32" and name in QUICK else [pytest.mark.slow])
    for form in ("fp32", "as named")
    for name in PRECISIONS
    if name != "ddp_diloco_bf16"  # whose plain loop is in tests/strategies/ddp/test_outer.py
]


@pytest.mark.parametrize(("form", "name"), few(FORMS, 3))
def test_two_ranks_train_what_one_process_trains_on_their_batches(
    name: str, form: str, tmp_path: Path, told: Callable[..., Cases]
) -> None:
    precision = precision_of(name, form)
    alone, batches = Watch(), loader(48, batch_size=16)
    run = train("single_bf16", "32-true", alone, batches)
    if name.startswith("single"):
        watch = Watch(tmp_path / "half.ckpt")
        train(name, precision, watch, batches)
        return
    library = "zero" if name.startswith("zero") else name[:4]
    first, second = told(library, form)[name]
    tolerance = 1e-5 if form == "fp32" and name != "ddp_compressed_bf16" else 0.02
    for rank in (first, second):
        assert rank["precision"] == precision
        assert rank["steps"] == rank["resumed"] == run.global_step == 8  # the third batch of an epoch is a step
        assert rank["lr"] == pytest.approx(0.002)
        for key, value in alone.weights.items():
            torch.testing.assert_close(torch.from_numpy(rank["weights"][key]), value, atol=tolerance, rtol=tolerance)
            assert (rank["weights"][key] == first["weights"][key]).all()
    for evaluate, expected in evaluated(alone.weights).items():
        close = {"atol": 1e-5 if tolerance < 0.01 else 0.05, "rtol": 1e-3}
        for rank in (first, second):
            if evaluate == "predict":
                torch.testing.assert_close(torch.from_numpy(rank[evaluate]), expected, **close)
            else:
                name_of = {"validate": "val_loss", "test": "test_loss"}[evaluate]
                torch.testing.assert_close(rank[evaluate][name_of], expected[name_of], **close)


def evaluated(weights: dict[str, Tensor]) -> dict[str, Any]:
    """What a plain Trainer finds with these weights."""
    module = build(Scheduled)
    module.load_state_dict(weights)
    run = trainer()
    return {
        "validate": run.validate(module, loader(24), verbose=False)[0],
        "test": run.test(module, loader(24), verbose=False)[0],
        "predict": torch.cat(run.predict(module, loader(24))),
    }


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "settings",
    [{"accumulate_grad_batches": 4}, {"gradient_clip_val": 0.1}, {"max_steps": 5}],
    ids=str,
)
def test_a_preset_equals_strategy_and_precision_apart(settings: dict[str, Any]) -> None:
    together, apart = build(Compiled), build(Compiled)
    fit(together, strategy="single_bf16", **settings)
    fit(apart, precision="bf16-mixed", **settings)
    assert_equal(weights(together), weights(apart))


def preset_and_apart(settings: dict[str, Any]) -> None:
    ours = {"strategy": "ddp_bf16"}
    theirs = {"strategy": DDPStrategy(gradient_as_bucket_view=True), "precision": "bf16-mixed"}
    ended = []
    for strategy in (ours, theirs):
        module = build(Compiled)
        fit(module, train=rank_loader(), devices=2, use_distributed_sampler=False, **strategy, **settings)
        ended.append(weights(module))
    assert_equal(*ended)


def test_two_ranks_of_a_preset_equal_strategy_and_precision_apart() -> None:
    run_ranks(preset_and_apart, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1})
