"""Each row of the table of conflicts meets a Trainer in which it applies, and one in which it just does not."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    ModelCheckpoint,
    ModelPruning,
    SpikeDetection,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import lightning_tricks as lt
from lightning_tricks.core.conflicts import Conflict
from tests.callbacks.test_float8 import Wide
from tests.callbacks.test_moe_balance import with_experts
from tests.conformance.settings import SNAPSHOTS
from tests.conformance.trick import embed
from tests.nets import PlainNet, assert_close, build, fit, loader, weights

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import conflicts


class Cosine(PlainNet):
    def configure_optimizers(self) -> Any:
        return lt.cosine(super().configure_optimizers(), self)


class Free(PlainNet):
    def configure_optimizers(self) -> Any:
        return lt.optimizer("schedulefree_sgd", self, 0.05)


class Plateau(PlainNet):
    def configure_optimizers(self) -> Any:
        return lt.reduce_on_plateau(super().configure_optimizers(), self, monitor="train_loss")


class Stepped(PlainNet):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [StepLR(optimizer, 1)]


class SteppedFree(Stepped, Free):
    pass


class Sharp(lt.SAMMixin, PlainNet):
    sam = lt.SAM(0.05)


class Split(Sharp):
    sam = lt.SAM(0.05, micro_batch_size=4)


class Chunked(lt.GradCacheMixin, PlainNet):
    chunk = 4

    def embed(self, batch: Any) -> Any:
        return self(batch[0]), batch[1]

    def contrast(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, y)


class SharpChunks(lt.SAMMixin, Chunked):
    sam = lt.SAM(0.05)


class Mixture(PlainNet):
    def __init__(self) -> None:
        with_experts(PlainNet, self)


class Tokens(PlainNet):
    def __init__(self) -> None:
        embed(PlainNet, self)


class Backbone(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.layers[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.1)


class Pooled(PlainNet):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mean((1, 2))[:, None].expand(-1, 8))


class Run(NamedTuple):
    callbacks: tuple[Any, ...]
    kind: Any = PlainNet
    settings: Mapping[str, Any] = MappingProxyType({})

    def fit(self) -> None:
        fit(build(self.kind), callbacks=[make() for make in self.callbacks], max_epochs=1, **self.settings)


resizing = partial(lt.ProgressiveResizing, multiple_of=2, inputs=0)
squares = DataLoader(TensorDataset(torch.ones(8, 8, 8), torch.zeros(8).long()), 4)
images = {"train": lambda: squares, "limit_val_batches": 0}
unfreeze = partial(lt.GradualUnfreeze, [2], parameters=[r"^layers\.0"])
freezing = partial(lt.LayerFreezing, start=2, stop=2, parameters=[r"^layers\.0"])
backbone = partial(BackboneFinetuning, 1, verbose=False)
float8 = partial(lt.Float8, emulate=True)
adapters = partial(lt.LoRA, r"layers\.2")
raw = partial(lt.SWA, validate="raw", at_end="raw")
snapshots = partial(lt.PostHocEMA, SNAPSHOTS)
mean_teacher = partial(lt.Distill, lt.Teacher(0.9))
lightnings_swa = partial(StochasticWeightAveraging, 0.01, swa_epoch_start=1)
loss_filter = partial(lt.HardExampleFilter, mode="loss")
saves_on_exception = partial(ModelCheckpoint, save_on_exception=True)
saves_nothing = partial(ModelCheckpoint, save_top_k=0)
saving = {"enable_checkpointing": True}
spikes = partial(SpikeDetection, warmup=100)
anomaly = {"detect_anomaly": True}
static = {"strategy": lambda: lt.DDPPreset(static_graph=True, precision="32-true")}

# For each row: the runs in which it applies, and near ones in which it does not.
CASES: dict[str, tuple[list[Run], list[Run]]] = {
    "EMA-AveragingCallback": (
        [
            Run((lt.EMA, lt.SWA)),
            Run((lt.EMA, partial(lt.EMA, 0.9, at_end="raw"))),
            Run((lt.EMA, partial(lt.EMA, 0.9, validate="raw"))),
        ],
        [Run((lt.EMA, raw))],
    ),
    "EMA-WeightAveraging": (
        [Run((lt.EMA, WeightAveraging)), Run((raw, EMAWeightAveraging)), Run((lightnings_swa, lt.SWA))],
        [Run((lt.SkipNonFinite, EMAWeightAveraging))],
    ),
    "RewindOnSpike-WeightAveraging": (
        [Run((lt.RewindOnSpike, EMAWeightAveraging)), Run((lt.RewindOnSpike, lightnings_swa))],
        [Run((lt.RewindOnSpike, lt.EMA))],
    ),
    "LRSchedule-StochasticWeightAveraging": (
        [Run((lt.LRSchedule, lightnings_swa)), Run((lightnings_swa,), Cosine), Run((lightnings_swa,), Plateau)],
        [Run((lt.SWA,), Cosine), Run((lt.SkipNonFinite, lightnings_swa))],
    ),
    "Preemption-Preemption": (
        [Run((partial(lt.Preemption, "a"), partial(lt.Preemption, "b")))],
        [Run((partial(lt.Preemption, "a"), lt.EMA))],
    ),
    "LoRA-GradualUnfreeze": (
        [Run((adapters, unfreeze)), Run((adapters, backbone), Backbone)],
        [Run((adapters, lt.EMA))],
    ),
    "LoRA-WeightAveraging": (
        [Run((adapters, WeightAveraging)), Run((EMAWeightAveraging, adapters)), Run((adapters, lightnings_swa))],
        [Run((adapters, lt.SWA))],
    ),
    "LRSchedule-LRSchedule": ([Run((lt.LRSchedule, partial(lt.LRSchedule, "cosine")))], [Run((lt.LRSchedule,))]),
    "LRSchedule-BackboneFinetuning": (
        [Run((lt.LRSchedule, backbone), Backbone)],
        [Run((lt.LRSchedule, unfreeze)), Run((lt.EMA, backbone), Backbone)],
    ),
    "LRSchedule-schedule from configure_optimizers": (
        [Run((lt.LRSchedule,), Stepped), Run((lt.LRSchedule,), Cosine), Run((lt.LRSchedule,), Plateau)],
        [Run((lt.EMA,), Stepped), Run((partial(lt.LRSchedule, replace=True),), Stepped)],
    ),
    "FitsMemory-static_graph": (
        [
            *(Run((), Sharp, static), Run((lt.SAMCallback,), PlainNet, static), Run((), Chunked, static)),
            Run((lt.FitsMemory,), PlainNet, static),
        ],
        [Run((), PlainNet, static), Run((), Sharp, {"strategy": lambda: lt.DDPPreset(precision="32-true")})],
    ),
    "SAMCallback-SAMHooks": (
        [Run((lt.SAMCallback,), Sharp), Run((lt.SAMCallback, lt.SAMCallback))],
        [Run((lt.SAMCallback,)), Run((lt.EMA,), Sharp)],
    ),
    "HardExampleFilter-SAMHooks": (
        [Run((loss_filter,), Split), Run((loss_filter, partial(lt.SAMCallback, micro_batch_size=2)))],
        [Run((lt.HardExampleFilter,), Split), Run((loss_filter,), Sharp), Run((lt.Mixup,), Split)],
    ),
    "LabelErrors-MixingCallback": (
        [Run((lt.LabelErrors, lt.Mixup)), Run((lt.HardExampleFilter, lt.LabelErrors))],
        [Run((lt.LabelErrors, lt.EMA))],
    ),
    "LabelErrors-SAMHooks": (
        [Run((lt.LabelErrors,), Split), Run((lt.LabelErrors, partial(lt.SAMCallback, micro_batch_size=2)))],
        [Run((lt.LabelErrors,), Sharp)],
    ),
    "HiddenMixup-SAMHooks": (
        [Run((partial(lt.HiddenMixup, "layers.2"),), Split)],
        [Run((partial(lt.HiddenMixup, "layers.2"),), Sharp)],
    ),
    "GradCacheMixin-SAMHooks": ([Run((), SharpChunks), Run((lt.SAMCallback,), Chunked)], [Run((), Chunked)]),
    "GradCacheMixin-MixingCallback": (
        [Run((lt.Mixup,), Chunked), Run((lt.HardExampleFilter,), Chunked)],
        [Run((lt.EMA, lt.AutoClip), Chunked)],
    ),
    "ProgressiveResizing-GrowingInputs": (
        [
            Run((resizing, partial(resizing, 0.7))),
            Run((lt.SequenceLengthWarmup, partial(lt.SequenceLengthWarmup, 0.9))),
        ],
        [Run((resizing,), Pooled, images)],
    ),
    "LoRA-LoRA": ([Run((adapters, partial(lt.LoRA, r"layers\.0"))), Run((adapters, adapters))], [Run((adapters,))]),
    "MoEBalance-MoEBalance": ([Run((lt.MoEBalance, lt.MoEBalance), Mixture)], [Run((lt.MoEBalance,), Mixture)]),
    "BatchSizeWarmup-GradientAccumulationScheduler": (
        [Run((partial(lt.BatchSizeWarmup, final=2), partial(GradientAccumulationScheduler, {0: 2})))],
        [Run((lt.EMA, partial(GradientAccumulationScheduler, {0: 2})))],
    ),
    "BatchSizeWarmup-accumulate_grad_batches": (
        [Run((partial(lt.BatchSizeWarmup, final=2),), settings={"accumulate_grad_batches": 2})],
        [Run((partial(lt.BatchSizeWarmup, final=2, grow="loader"),), settings={"accumulate_grad_batches": 2})],
    ),
    "LayerFreezing-BaseFinetuning": (
        [Run((freezing, backbone), Backbone), Run((unfreeze, freezing))],
        [Run((freezing,)), Run((lt.EMA, freezing))],
    ),
    "LayerFreezing-ScheduleFree": (
        [Run((freezing, lt.ScheduleFree)), Run((lt.ScheduleFree, freezing))],
        [Run((freezing, lt.SWA))],
    ),
    "GradualUnfreeze-BaseFinetuning": (
        [Run((unfreeze, backbone), Backbone)],
        [Run((unfreeze,)), Run((lt.EMA, backbone), Backbone)],
    ),
    "RewindOnSpike-SpikeDetection": (
        [Run((lt.SkipNonFinite, spikes)), Run((spikes, lt.RewindOnSpike))],
        [Run((lt.TerminateOnNonFinite, spikes))],
    ),
    "PostHocEMA-ModelPruning": (
        [Run((snapshots, partial(ModelPruning, "l1_unstructured", amount=0.2)))],
        [Run((snapshots, lt.EMA))],
    ),
    "ScheduleFree-Averaging": (
        [
            Run((lt.ScheduleFree, raw), Free),
            Run((WeightAveraging, lt.ScheduleFree), Free),
            Run((snapshots, lt.ScheduleFree), Free),
            Run((mean_teacher, lt.ScheduleFree), Free),
        ],
        [
            Run((lt.ScheduleFree, lt.RewindOnSpike), Free),
            Run((lt.ScheduleFree, partial(lt.Distill, nn.Linear(8, 2))), Free),
        ],
    ),
    "ScheduleFree-schedule from configure_optimizers": (
        [Run((lt.ScheduleFree,), SteppedFree), Run((lt.ScheduleFree, partial(lt.LRSchedule, "cosine")), Free)],
        [Run((lt.ScheduleFree, lt.AutoClip), Free)],
    ),
    "StepInBackward-accumulate_grad_batches": (
        [
            Run((lt.StepInBackward,), settings={"accumulate_grad_batches": 2}),
            Run((lt.StepInBackward, partial(lt.BatchSizeWarmup, final=2))),
            Run((lt.StepInBackward, partial(GradientAccumulationScheduler, {0: 2}))),
        ],
        [Run((lt.StepInBackward, lt.EMA))],
    ),
    "StepInBackward-GradientCallback": (
        [
            *(Run((lt.StepInBackward, trick)) for trick in (lt.AutoClip, lt.AdaptiveClip, lt.SkipNonFinite)),
            *(Run((trick, lt.StepInBackward)) for trick in (lt.RewindOnSpike, lt.TerminateOnNonFinite)),
        ],
        [Run((lt.StepInBackward, lt.Mixup, lt.Doctor))],
    ),
    "StepInBackward-SAMHooks": (
        [Run((lt.StepInBackward,), Sharp), Run((lt.StepInBackward, lt.SAMCallback))],
        [Run((lt.StepInBackward,), Cosine)],
    ),
    "FitsMemory-SAMHooks": (
        [Run((lt.FitsMemory,), Sharp), Run((lt.SAMCallback, lt.FitsMemory))],
        [Run((lt.FitsMemory,), Cosine)],
    ),
    "FitsMemory-GradCacheHooks": ([Run((lt.FitsMemory,), Chunked)], [Run((lt.FitsMemory, lt.EMA))]),
    "FitsMemory-StepInBackward": ([Run((lt.FitsMemory, lt.StepInBackward))], [Run((lt.FitsMemory, lt.AutoClip))]),
    "FitsMemory-HiddenMixup": (
        [Run((lt.FitsMemory, partial(lt.HiddenMixup, r"layers\.0"))), Run((lt.FitsMemory, lt.LabelErrors))],
        [Run((lt.FitsMemory, lt.Mixup))],
    ),
    "FitsMemory-HardExampleFilter": (
        [Run((lt.FitsMemory, loss_filter))],
        [Run((lt.FitsMemory, partial(lt.HardExampleFilter, mode="prune")))],
    ),
    "FitsMemory-TokenMean": ([Run((lt.FitsMemory, lt.TokenMean))], [Run((lt.FitsMemory,))]),
    "FitsMemory-Distill": (
        [Run((lt.FitsMemory, mean_teacher))],
        [Run((partial(lt.FitsMemory, count=lambda batch: len(batch[1])), mean_teacher))],
    ),
    "StepInBackward-StepInBackward": ([Run((lt.StepInBackward, lt.StepInBackward))], [Run((lt.StepInBackward,))]),
    "StepInBackward-ModelCheckpoint": (
        [Run((lt.StepInBackward, saves_on_exception), settings=saving)],
        [Run((lt.StepInBackward, saves_nothing), settings=saving)],
    ),
    "SkipNonFinite-TerminateOnNonFinite": (
        [Run((lt.SkipNonFinite, lt.TerminateOnNonFinite))],
        [Run((lt.RewindOnSpike, lt.TerminateOnNonFinite))],
    ),
    "RewindOnSpike-detect_anomaly": (
        [Run((lt.SkipNonFinite,), settings=anomaly), Run((lt.RewindOnSpike,), settings=anomaly)],
        [Run((lt.TerminateOnNonFinite,), settings=anomaly)],
    ),
    "ActivationCheckpointing-ActivationCheckpointing": (
        [Run((partial(lt.ActivationCheckpointing, "layers"), partial(lt.ActivationCheckpointing, "layers")))],
        [Run((partial(lt.ActivationCheckpointing, "layers.0"), partial(lt.ActivationCheckpointing, "layers.2")))],
    ),
    "QAT-QAT": (
        [Run((lt.QAT, partial(lt.QAT, "int4")))],
        [Run((partial(lt.QAT, modules="layers.0"), partial(lt.QAT, "int4", modules="layers.2")))],
    ),
    "QAT-LoRA": (
        [Run((lt.QAT, partial(lt.LoRA, "layers.0"))), Run((partial(lt.LoRA, "layers.0"), lt.QAT))],
        [Run((partial(lt.LoRA, "layers.0"), lt.EMA))],
    ),
    "Float8-Float8": (
        [Run((float8, partial(float8, recipe="rowwise")), Wide)],
        [Run((partial(float8, "layers.2"), partial(float8, "layers.4")), Wide)],
    ),
    "Float8-QAT": (
        [Run((float8, lt.QAT), Wide), Run((partial(float8, "layers.2"), lt.QAT), Wide)],
        [Run((partial(float8, "layers.2"), partial(lt.QAT, modules="layers.0")), Wide)],
    ),
    "Float8-LoRA": ([Run((float8, adapters), Wide)], [Run((float8,), Wide)]),
    "TokenMean-SAMHooks": ([Run((lt.TokenMean,), Split)], [Run((lt.TokenMean,), Sharp)]),
    "TokenMean-HardExampleFilter": (
        [Run((lt.TokenMean, partial(loss_filter, across_ranks=True)))],
        [Run((lt.TokenMean, loss_filter)), Run((lt.HardExampleFilter, lt.TokenMean))],
    ),
    "TokenMean-TokenMean": ([Run((lt.TokenMean, partial(lt.TokenMean, len)))], [Run((lt.TokenMean,))]),
    "LogitAdjustment-LogitAdjustment": (
        [Run((lt.LogitAdjustment, partial(lt.LogitAdjustment, tau=0.5)))],
        [Run((lt.LogitAdjustment,))],
    ),
    "Distill-GradCacheHooks": ([Run((mean_teacher,), Chunked)], [Run((lt.Teacher,), Chunked)]),
    "Distill-TokenMean": ([Run((mean_teacher, lt.TokenMean))], [Run((lt.Teacher, lt.TokenMean))]),
    "Distill-HiddenMixup": (
        [Run((partial(lt.Distill, nn.Linear(8, 2)), partial(lt.HiddenMixup, "layers.2")))],
        [Run((mean_teacher, partial(lt.HiddenMixup, "layers.2")))],
    ),
    "Teacher-Teacher": ([Run((lt.Teacher, partial(lt.Teacher, 0.9)))], [Run((lt.Teacher, mean_teacher))]),
    "NEFTune-NEFTune": ([Run((lt.NEFTune, partial(lt.NEFTune, 1.0)), Tokens)], [Run((lt.NEFTune,), Tokens)]),
    "Compile-Compile": (
        [Run((partial(lt.Compile, "layers", backend="eager"), partial(lt.Compile, "layers", backend="aot_eager")))],
        [Run((partial(lt.Compile, "layers.0", backend="eager"), partial(lt.Compile, "layers.2", backend="eager")))],
    ),
}

DECLARED = conflicts.declared()
# Rows about tensor_parallel and those of DDPPreset need two processes: tests/strategies has them.
ROWS = {
    f"{names[0]}-{row.others[0]}": row
    for row, names in DECLARED.items()
    if row.others != ("tensor_parallel",) and names != ["DDPPreset"]
}


def test_every_row_has_its_cases() -> None:
    assert sorted(CASES) == sorted(ROWS)
    assert all(fights and near for fights, near in CASES.values())


def cases(which: int) -> list[Any]:
    return [
        pytest.param(ROWS[name], run, id=f"{name}-{number}")
        for name, both in CASES.items()
        for number, run in enumerate(both[which])
        if name in ROWS
    ]


def run_it(run: Run) -> None:
    made = {name: value() if callable(value) else value for name, value in run.settings.items()}
    run._replace(settings=made).fit()


@pytest.mark.few(51)
@pytest.mark.parametrize(("row", "run"), cases(0))
def test_a_pair_that_fights_is_found(row: Conflict, run: Run) -> None:
    expected = f"{re.escape(row.rule)}. {re.escape(row.remedy)}"
    if not row.warns:
        with pytest.raises(MisconfigurationException, match=expected):
            run_it(run)
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_it(run)
    assert [bool(re.search(expected, str(each.message))) for each in caught].count(True) == 1


@pytest.mark.few(12)
@pytest.mark.filterwarnings("ignore:SWA is currently only supported every epoch")  # Lightning's
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch, of a compiled layer behind another
@pytest.mark.parametrize(("row", "run"), cases(1))
def test_its_near_miss_trains(row: Conflict, run: Run) -> None:
    run_it(run)


def test_the_error_names_what_its_user_wrote() -> None:
    said = r"EMA\(decay=0.9\) and SWA\(start=0.5, at_end='raw'\): "
    with pytest.raises(MisconfigurationException, match=said):
        Run((partial(lt.EMA, 0.9), partial(lt.SWA, 0.5, at_end="raw"))).fit()
    with pytest.raises(MisconfigurationException, match=r"Split with SAM\(rho=0.05.*micro_batch_size=4"):
        Run((loss_filter,), Split).fit()
    with pytest.raises(MisconfigurationException, match=r"and Trainer\(accumulate_grad_batches=2\): "):
        Run((partial(lt.BatchSizeWarmup, final=2),), settings={"accumulate_grad_batches": 2}).fit()


def test_evaluation_is_let_be() -> None:
    run = fit(build(PlainNet), max_epochs=1)
    run.callbacks = [lt.LRSchedule(), lt.LRSchedule()]
    run.validate(build(PlainNet), loader(), verbose=False)


def test_the_page_has_the_table() -> None:
    assert conflicts.PAGE.read_text() == conflicts.page(), "`make tables` writes it"


class Smoothed(PlainNet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(batch[0], batch[1], label_smoothing=0.1) + 0 * self(torch.ones(1, 8)).sum()


def test_the_filter_compares_by_the_smoothed_loss() -> None:
    logits, labels = torch.tensor([[30.0, -30.0], [-1.0, 1.0]]), torch.tensor([0, 0])  # far too sure, and wrong
    plain, smoothed = (F.cross_entropy(logits, labels, reduction="none", label_smoothing=e) for e in (0.0, 0.1))
    assert plain.argmax() == 1
    assert smoothed.argmax() == 0
    seen: list[Any] = []
    see = LambdaCallback(on_train_batch_start=lambda _, __, batch, ___: seen.append(batch[0]))
    data = DataLoader(TensorDataset(logits, labels), 2)
    fit(build(Smoothed), train=data, callbacks=[lt.HardExampleFilter(0.5), see], max_epochs=1)
    assert torch.equal(seen[0], logits[:1])


class OneHot(PlainNet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert batch[1].is_floating_point()
        return super().training_step(batch, batch_idx)


def test_mixup_of_one_hot_targets_is_that_of_labels() -> None:
    x, y = loader().dataset.tensors
    soft = DataLoader(TensorDataset(x, F.one_hot(y, 2).float()), 8)
    labels, probabilities = build(PlainNet), build(OneHot)
    fit(labels, callbacks=[lt.Mixup(1.0)])
    fit(probabilities, train=soft, val=[], callbacks=[lt.Mixup(1.0)], limit_val_batches=0)
    assert_close(weights(labels), weights(probabilities))


class Bad(PlainNet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1]) * (torch.nan if batch_idx == 2 else 1.0)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss


@pytest.mark.parametrize(("monitor", "epochs"), [("loss", 1), ("val_loss", 2)])
def test_early_stopping_sees_the_loss_of_a_step_left_out(monitor: str, epochs: int) -> None:
    run = fit(build(Bad), callbacks=[lt.SkipNonFinite(), EarlyStopping(monitor, patience=9)])
    assert run.global_step == 5 * epochs


def test_each_clip_gets_what_the_one_before_left() -> None:
    norms: list[float] = []

    class Note(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in pl_module.parameters()])))

    fit(build(PlainNet), callbacks=[Note(), lt.AdaptiveClip(0.02), Note(), lt.AutoClip(0), Note()], max_epochs=1)
    first, unit_wise, last = norms[::3], norms[1::3], norms[2::3]
    assert all(a > b for a, b in zip(first, unit_wise, strict=True))
    assert last == pytest.approx([min(unit_wise[: k + 1]) for k in range(6)], rel=1e-4)


def test_sam_trains_what_joins_later() -> None:
    module = build(Sharp)
    before = weights(module)
    fit(module, callbacks=[unfreeze()], max_epochs=1)
    assert all((weights(module)[name] != value).any() for name, value in before.items())


def test_growing_batches_and_rewinding_both_scale_the_learning_rate() -> None:
    rates: list[float] = []

    class Recorded(PlainNet):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            optimizer.register_step_pre_hook(lambda each, *_: rates.append(each.param_groups[0]["lr"]))
            return optimizer

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * (1e4 if batch_idx == 3 else 1.0)

    growth = lt.BatchSizeWarmup(1, final=2, over=1, lr_rule="linear")
    rewind = lt.RewindOnSpike(6.0, window=2, every_n_steps=1, lr_factor=0.1, lr_steps=1)
    fit(build(Recorded), callbacks=[growth, rewind], max_epochs=1)
    assert rewind.rewinds == 1
    assert 0.1 * 0.5 * 0.1 in [pytest.approx(rate) for rate in rates]  # the base, the growth's half, the rewind's tenth
