"""ZeRO presets on CPU: two real processes against one that has the batches of both."""

from __future__ import annotations

import os
import subprocess
import sys
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

import lightning_tricks as lt
from lightning_tricks.strategies.zero.preset import ZeROPreset, check_shards
from tests.conformance.runs import Gather
from tests.few import few
from tests.nets import (
    NormNet,
    PlainNet,
    SaveAt,
    SteppedByHand,
    assert_close,
    assert_equal,
    build,
    data,
    fit,
    loader,
    spelled,
    trainer,
    weights,
)
from tests.ranks import run_ranks

PARTITIONED = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}  # else tiny weights stay whole
STEPS = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}  # 5 batches an epoch: windows of 2, 2 and 1
ENGINES = [(stage, offload) for stage in (1, 2, 3) for offload in ("none", "cpu")]


class CosineNet(PlainNet):
    """The learning rate follows optimizer steps."""

    def configure_optimizers(self) -> Any:
        return lt.cosine(super().configure_optimizers(), self)


class Stateless(PlainNet):
    """An optimizer without states, of which a file of full weights restores none."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Frozen(CosineNet):
    """Its first layer does not train."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.layers[0].requires_grad_(False)


class Late(CosineNet):
    """Its layers are made in ``configure_model``, where stage 3 makes them in slices."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.layers = None

    def configure_model(self) -> None:
        if self.layers is None:
            L.seed_everything(5, verbose=False)
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


class Manual(SteppedByHand, PlainNet):
    """Steps by itself."""


class ManualClipping(Manual):
    """Clips by itself, the first batches only."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
        if batch_idx < 3:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        optimizer.step()


class ManualAccumulation(Manual):
    """Steps after every second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]) / 2)
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


@dataclass
class End:
    """What there is at the end of training, before it is torn down."""

    weights: dict[str, Tensor]
    held: dict[str, int]
    dtypes: set[torch.dtype]
    steps: tuple[int, int]
    lrs: list[list[float]]


class Look(Callback):
    """Takes notes of the end."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        from deepspeed.utils import safe_get_full_fp32_param

        named = dict(pl_module.named_parameters())
        self.end = End(
            weights={
                name: safe_get_full_fp32_param(weight).detach().clone()
                for name, weight in named.items()
                if weight.requires_grad
            },
            held={name: weight.numel() for name, weight in named.items()},
            dtypes={weight.dtype for weight in named.values()},
            steps=(trainer.global_step, trainer.strategy.deepspeed_engine.global_steps),
            lrs=[config.scheduler.get_last_lr() for config in trainer.lr_scheduler_configs],
        )


def mine(size: int = 80) -> DataLoader[Any]:
    """This rank's half of ``loader(size, 16)``."""
    rank = int(os.environ["RANK"])
    samples = [i for batch in range(rank, size // 8, 2) for i in range(8 * batch, 8 * batch + 8)]
    return DataLoader(Subset(data(size), samples), batch_size=8)


def zero(**arguments: Any) -> ZeROPreset:
    return lt.preset("zero3_bf16", **{"precision": "32-true", "config": PARTITIONED, **arguments})["strategy"]


def both(module: L.LightningModule, strategy: Any, callbacks: Any = (), **settings: Any) -> tuple[L.Trainer, End]:
    """Fit on this rank's half."""
    look = Look()
    run = fit(
        module,
        train=mine(),
        val=loader(48),
        callbacks=[*callbacks, look],
        strategy=strategy,
        devices=2,
        use_distributed_sampler=False,
        **settings,
    )
    return run, look.end


def alone(module: L.LightningModule, **settings: Any) -> L.Trainer:
    """The same in one process, on all."""
    return fit(module, train=loader(80, 16), val=loader(48), **settings)


def fit_the_engines() -> dict[Any, End]:
    return {
        (stage, offload): both(build(CosineNet), zero(stage=stage, offload=offload), **STEPS)[1]
        for stage, offload in ENGINES
    }


@pytest.fixture(scope="module")
def engines() -> list[dict[Any, End]]:
    return run_ranks(fit_the_engines)


@pytest.mark.parametrize("engine", ENGINES, ids=spelled)
def test_a_fit_equals_that_of_one_process(engines: list[dict[Any, End]], engine: Any) -> None:
    module = build(CosineNet)
    run = alone(module, **STEPS)
    for rank in engines:
        assert rank[engine].steps == (run.global_step, run.global_step) == (6, 6)
        assert rank[engine].lrs == [[0.0]]  # the schedule has ended at its floor
        assert_close(rank[engine].weights, weights(module), 1e-6)


def test_stage_3_holds_no_whole_weights(engines: list[dict[Any, End]]) -> None:
    assert set(engines[0][3, "cpu"].held.values()) == {0}
    assert set(engines[0][2, "cpu"].held.values()) != {0}


# -- one strategy, one config, several runs ---------------------------------------------------------------------------


def fit_again() -> dict[str, Any]:
    config = deepcopy(PARTITIONED)
    strategy = zero(config=config, offload="cpu")
    both(build(CosineNet), strategy, accumulate_grad_batches=5, gradient_clip_val=0.01)
    first = deepcopy(strategy.config)
    assert "clip_gradients" not in vars(strategy.precision_plugin)  # nothing is left of the strategy's own
    strategy.accelerator = strategy.parallel_devices = None  # else Lightning takes them for the user's own
    _, second = both(build(CosineNet), strategy, **STEPS)
    _, third = both(build(CosineNet), zero(config=config, offload="cpu"), **STEPS)
    return {"config": config, "first": first, "now": strategy.config, "second": second, "third": third}


@pytest.mark.slow
def test_a_strategy_and_a_config_serve_several_trainers(engines: list[dict[Any, End]]) -> None:
    for rank, seen in zip(engines, run_ranks(fit_again), strict=True):
        assert seen["config"] == PARTITIONED
        assert (seen["first"]["gradient_accumulation_steps"], seen["first"]["gradient_clipping"]) == (5, 0.01)
        assert (seen["now"]["gradient_accumulation_steps"], seen["now"]["gradient_clipping"]) == (2, 1.0)
        assert_equal(seen["second"].weights, rank[3, "cpu"].weights)
        assert_equal(seen["third"].weights, rank[3, "cpu"].weights)


# -- precision --------------------------------------------------------------------------------------------------------


def fit_in_16_bits() -> dict[str, End]:
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # CPUs without AMX compute in fp16 as well, slowly
    names = ("zero1_bf16", "zero2_offload_bf16", "zero3_offload_bf16", "zero2_fp16", "zero3_offload_fp16")
    results = {}
    for name in names:  # a small loss scale: from 2**16 the first steps would be skipped
        config = {**PARTITIONED, "fp16": {"initial_scale_power": 4}} if name.endswith("fp16") else PARTITIONED
        results[name] = both(build(CosineNet), **lt.preset(name, config=config), **STEPS)[1]
    return results


@pytest.mark.slow
def test_16_bits_give_nearly_the_same() -> None:
    module = build(CosineNet)
    alone(module, **STEPS)
    for rank in run_ranks(fit_in_16_bits):
        for name, end in rank.items():
            assert end.steps == (6, 6)
            assert end.lrs == [[0.0]]
            assert end.dtypes == {torch.bfloat16 if "bf16" in name else torch.float16}
            assert {weight.dtype for weight in end.weights.values()} == {torch.float32}
            assert_close(end.weights, weights(module), 3e-2)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def evaluate(module: L.LightningModule, path: str | None, **settings: Any) -> dict[str, Any]:
    run = trainer(devices=2, use_distributed_sampler=False, **settings)
    return {
        "validate": run.validate(module, loader(48), ckpt_path=path, verbose=False),
        "test": run.test(module, loader(48), ckpt_path=path, verbose=False),
        "predict": torch.cat(run.predict(module, loader(48), ckpt_path=path)).float(),
    }


def save_and_load(folder: str, whole: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for stage, offload in ((2, "cpu"), (3, "none"), (3, "cpu")):
        path = f"{folder}/{stage}{offload}"
        module = build(CosineNet)
        run, through = both(module, zero(stage=stage, offload=offload), [SaveAt(path, epoch=0), lt.EMA(0.5)], **STEPS)
        after = run.validate(module, loader(48), verbose=False)
        _, resumed = both(build(CosineNet), zero(stage=stage, offload=offload), [lt.EMA(0.5)], **STEPS, ckpt_path=path)
        results[stage, offload] = {
            "through": through,
            "after": after,
            "resumed": resumed,
            **evaluate(build(CosineNet), path, strategy=zero(stage=stage, offload=offload)),
        }
    for stage in (1, 2, 3):
        strategy = zero(stage=stage, load_full_weights=True)
        results[stage, "whole"] = both(build(Stateless), strategy, **STEPS, ckpt_path=f"{whole}/plain")[1]
        results[stage, "buffers"] = evaluate(
            build(NormNet), f"{whole}/norm", strategy=zero(stage=stage, load_full_weights=True)
        )
    return results


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("zero")
    for name, kind in (("plain", Stateless), ("norm", NormNet)):
        alone(build(kind), **STEPS, callbacks=[SaveAt(str(folder / name), epoch=0)])
    ranks = run_ranks(save_and_load, str(folder), str(folder))
    return [{**rank, "folder": folder} for rank in ranks]


SAVED = pytest.mark.parametrize("engine", [(2, "cpu"), (3, "none"), (3, "cpu")], ids=spelled)


@SAVED
def test_a_resumed_fit_is_exact(loaded: list[dict[str, Any]], engine: Any) -> None:
    for rank in loaded:
        assert_equal(rank[engine]["resumed"].weights, rank[engine]["through"].weights)
        assert rank[engine]["resumed"].steps == (6, 6)


@SAVED
def test_a_folder_is_validated_tested_and_predicted_with(
    loaded: list[dict[str, Any]], engine: Any, tmp_path: Path
) -> None:
    path = str(tmp_path / "half")
    module = build(CosineNet)
    run = alone(module, **STEPS, callbacks=[SaveAt(path, epoch=0), lt.EMA(0.5)])
    after = run.validate(module, loader(48), verbose=False)[0]
    for rank in loaded:
        assert rank[engine]["after"][0] == pytest.approx(after, abs=1e-5)
        same_evaluation(rank[engine], CosineNet, path)


def same_evaluation(seen: dict[str, Any], kind: type[L.LightningModule], path: str) -> None:
    run = trainer()
    for what in ("validate", "test"):
        expected = getattr(run, what)(build(kind), loader(48), ckpt_path=path, verbose=False)[0]
        assert seen[what][0] == pytest.approx(expected, abs=1e-5)
    predicted = torch.cat(run.predict(build(kind), loader(48), ckpt_path=path))
    torch.testing.assert_close(seen["predict"], predicted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_whole_weights_of_a_file_are_trained_on(loaded: list[dict[str, Any]], stage: int) -> None:
    module = build(Stateless)
    alone(module, **STEPS, ckpt_path=loaded[0]["folder"] / "plain")
    for rank in loaded:
        assert_close(rank[stage, "whole"].weights, weights(module), 1e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_whole_weights_of_a_file_are_evaluated_with_their_buffers(loaded: list[dict[str, Any]], stage: int) -> None:
    for rank in loaded:
        same_evaluation(rank[stage, "buffers"], NormNet, str(rank["folder"] / "norm"))


# -- other ways to train ----------------------------------------------------------------------------------------------


def train_otherwise() -> dict[Any, End]:
    results = {}
    for stage, offload in ((2, "none"), (3, "cpu")):
        manual = both(build(Manual), zero(stage=stage, offload=offload), gradient_clip_val=None)
        results[stage, "manual"] = manual[1]
        clipping = both(build(ManualClipping), zero(stage=stage, offload=offload), gradient_clip_val=None)
        results[stage, "clipping"] = clipping[1]
        watched = {"val_check_interval": 1, "num_sanity_val_steps": 2}  # validates between the batches of a step, too
        results[stage, "watched"] = both(build(CosineNet), zero(stage=stage, offload=offload), **STEPS, **watched)[1]
        frozen = zero(stage=stage, offload=offload, exclude_frozen_parameters=True)
        results[stage, "frozen"] = both(build(Frozen), frozen, **STEPS)[1]
        results[stage, "late"] = both(build(Late), zero(stage=stage, offload=offload), **STEPS)[1]
        growing = [lt.BatchSizeWarmup(1, final=2, over=1)]
        results[stage, "growing"] = both(build(PlainNet), zero(stage=stage, offload=offload), growing)[1]
    return results


@pytest.fixture(scope="module")
def otherwise() -> list[dict[Any, End]]:
    return run_ranks(train_otherwise)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("case", "kind"), [("manual", Manual), ("clipping", ManualClipping)])
def test_a_module_that_steps_by_itself_equals_one_process(
    otherwise: list[dict[Any, End]], stage: int, case: str, kind: type[PlainNet]
) -> None:
    module = build(kind)
    alone(module)
    for rank in otherwise:
        assert_close(rank[stage, case].weights, weights(module), 1e-6)


def accumulate_by_hand(stage: int) -> str | dict[str, Tensor]:
    try:
        return both(build(ManualAccumulation), zero(stage=stage), limit_train_batches=4)[1].weights
    except MisconfigurationException as error:
        return str(error)


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_that_a_step_would_forget_are_an_error(stage: int) -> None:
    assert "got another one before it. Step after each" in str(run_ranks(accumulate_by_hand, stage)[0])


def test_stage_3_accumulates_by_hand() -> None:
    module = build(ManualAccumulation)
    alone(module, limit_train_batches=4)
    assert_close(run_ranks(accumulate_by_hand, 3)[0], weights(module), 1e-6)


@pytest.mark.parametrize("stage", few([2, 3], 1))
@pytest.mark.parametrize(("case", "kind"), [("watched", CosineNet), ("frozen", Frozen), ("late", Late)])
def test_a_fit_that_validates_freezes_or_is_made_late_equals_one_process(
    otherwise: list[dict[Any, End]], stage: int, case: str, kind: type[PlainNet]
) -> None:
    module = build(kind)
    alone(module, **STEPS)
    for rank in otherwise:
        expected = weights(module)
        assert_close({**expected, **rank[stage, case].weights}, expected, 1e-6)


@pytest.mark.parametrize("stage", [2, 3])
def test_an_accumulation_that_grows_equals_one_process(otherwise: list[dict[Any, End]], stage: int) -> None:
    module = build(PlainNet)
    run = alone(module, callbacks=[lt.BatchSizeWarmup(1, final=2, over=1)])
    for rank in otherwise:
        assert rank[stage, "growing"].steps == (run.global_step, run.global_step) == (8, 8)  # 5 of 1 batch, 3 of 2
        assert_close(rank[stage, "growing"].weights, weights(module), 1e-6)


# -- spellings, and what is refused -----------------------------------------------------------------------------------


def test_the_string_the_preset_and_the_class_in_yaml_give_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    yaml = tmp_path / "config.yaml"
    yaml.write_text(
        "trainer:\n  accelerator: cpu\n  logger: false\n  strategy:\n    class_path: lightning_tricks.ZeROPreset\n"
        "    init_args: {stage: 3, offload: cpu}\n"
    )
    monkeypatch.setattr("sys.argv", ["fit.py", "--config", str(yaml)])
    cli = LightningCLI(PlainNet, run=False, save_config_callback=None)
    string = trainer(strategy="zero3_offload_bf16")
    for other in (trainer(**lt.preset("zero3_offload_bf16")), cli.trainer):
        assert type(other.strategy) is type(string.strategy) is ZeROPreset
        assert other.strategy.config == string.strategy.config
        assert other.precision == string.precision == "bf16-mixed"
        assert type(other.precision_plugin) is type(string.precision_plugin) is DeepSpeedPrecision


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "by their norm, got .*'value'.*'norm'"),
        ({"plugins": [MixedPrecision("bf16-mixed", "cpu")]}, "the plugin DeepSpeedPrecision, got MixedPrecision"),
    ],
    ids=spelled,
)
def test_what_deepspeed_cannot_do_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        fit(build(PlainNet), strategy="zero2_bf16", **settings)


@pytest.mark.parametrize(
    ("name", "asked", "answer", "message"),
    [
        ("zero2_bf16", "device_name", "cuda", r"trains on cpu, but .* for cuda. Set DS_ACCELERATOR=cpu"),
        ("zero2_fp16", "is_fp16_supported", False, r"'zero2_fp16' trains in '16-mixed', which .* in bf16"),
    ],
)
def test_a_deepspeed_for_other_devices_and_fp16_where_there_is_none_are_refused_with_the_remedy(
    name: str, asked: str, answer: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(type(get_accelerator()), asked, lambda *_: answer)
    with pytest.raises(MisconfigurationException, match=message):
        fit(build(PlainNet), strategy=name)


def test_an_nvme_folder_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match=r"nvme_path='.*nowhere', which is not a writable .* Create it"):
        fit(build(PlainNet), **lt.preset("zero3_nvme_bf16", nvme_path=str(tmp_path / "nowhere")))


def has_libaio() -> bool:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(AsyncIOBuilder().is_compatible())


def test_without_libaio_nvme_is_refused_with_the_remedy(tmp_path: Path) -> None:
    if has_libaio():
        pytest.skip("libaio is installed")
    with pytest.raises(MisconfigurationException, match=r"needs libaio .*apt install libaio-dev"):
        fit(build(PlainNet), **lt.preset("zero3_nvme_bf16", nvme_path=str(tmp_path)))


def fit_on_nvme(folder: str) -> End:
    return both(build(CosineNet), zero(offload="nvme", nvme_path=folder), **STEPS)[1]


@pytest.mark.slow  # compiles async_io
def test_a_fit_on_nvme_equals_that_of_one_process(tmp_path: Path) -> None:
    if not has_libaio():
        pytest.skip("needs libaio-dev")
    module = build(CosineNet)
    alone(module, **STEPS)
    for end in run_ranks(fit_on_nvme, str(tmp_path), timeout=400):
        assert_close(end.weights, weights(module), 1e-6)


@pytest.mark.parametrize(
    ("found", "message"),
    [(None, r"needs DeepSpeed: pip install 'lightning-tricks\[deepspeed\]"), ("0.18.9", "or newer, got 0.18.9: pip")],
)
def test_a_missing_or_old_deepspeed_is_named(monkeypatch: pytest.MonkeyPatch, found: Any, message: str) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", found and SimpleNamespace(__version__=found))
    with pytest.raises(ImportError, match=message):
        ZeROPreset()


def load_a_folder_as_one_file(folder: str) -> str:
    with pytest.raises(MisconfigurationException) as caught:
        trainer(devices=2, strategy=zero(load_full_weights=True)).validate(build(PlainNet), loader(), ckpt_path=folder)
    return str(caught.value)


def test_a_folder_is_no_file_of_whole_weights(tmp_path: Path) -> None:
    assert "Leave load_full_weights= out" in run_ranks(load_a_folder_as_one_file, str(tmp_path))[0]


def save_shards(folder: str) -> None:
    both(build(PlainNet), zero(), [SaveAt(folder, epoch=0)])


def resume_alone(path: str) -> str:
    try:
        trainer(strategy=zero(), max_epochs=3).fit(build(PlainNet), loader(), ckpt_path=path)
    except MisconfigurationException as error:
        return str(error)
    return "resumed"


def test_shards_of_other_ranks_and_one_file_are_errors_with_a_remedy(tmp_path: Path) -> None:
    shards, whole = str(tmp_path / "shards"), str(tmp_path / "whole.ckpt")
    run_ranks(save_shards, shards)
    fit(build(PlainNet)).save_checkpoint(whole)
    assert "has the shards of 2 processes" in run_ranks(resume_alone, shards, nprocs=1)[0]
    said = run_ranks(resume_alone, whole, nprocs=1)[0]
    assert "is one file, " in said
    assert "Pass load_full_weights=True" in said


# -- on a GPU ---------------------------------------------------------------------------------------------------------


def on_cuda(name: str, folder: str) -> None:
    """Fit, save, and go on from the checkpoint, in an interpreter in which DeepSpeed is imported for CUDA."""
    path, gather = f"{folder}/{name}.ckpt", Gather()
    for epochs, resumes in ((1, None), (2, path)):
        preset = lt.preset(name, precision="32-true", config=PARTITIONED)
        settings = {"accelerator": "cuda", "log_every_n_steps": 1, "max_epochs": epochs, "ckpt_path": resumes}
        run = fit(build(PlainNet), callbacks=[gather], use_distributed_sampler=False, **settings, **preset)
        run.save_checkpoint(path if epochs == 1 else f"{folder}/end.ckpt")
    torch.save({key: value.cpu() for key, value in gather.weights.items()}, f"{folder}/weights.pt")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["zero1_bf16", "zero2_bf16", "zero3_bf16", "zero3_offload_bf16"])
def test_on_a_gpu_it_trains_what_one_process_trains_on_a_cpu(name: str, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    program = f"from tests.strategies.zero.test_preset import on_cuda; on_cuda({name!r}, {str(tmp_path)!r})"
    root = Path(__file__).parents[3]
    environment = {**os.environ, "DS_ACCELERATOR": "cuda", "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, cwd=root, env=environment)
    module = build(PlainNet)
    fit(module)
    assert_close(torch.load(tmp_path / "weights.pt", weights_only=True), weights(module), 1e-3)


# -- what DeepSpeed cannot do is an error with a remedy; the others are in test_preset.py, through a Trainer ----------


def test_shards_are_loaded_by_as_many_ranks(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    for rank in range(2):
        (tmp_path / "checkpoint" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    check_shards("zero3_bf16", tmp_path, 2)
    check_shards("zero2_bf16", tmp_path, None)
    with pytest.raises(MisconfigurationException, match=r"shards of 2 processes, .* got 3. Resume on 2"):
        check_shards("zero3_bf16", tmp_path, 3)
