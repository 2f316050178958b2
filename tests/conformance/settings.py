"""How each public trick is switched on and brought to its no-op limit: one entry enrols a trick in every regime."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import lightning_tricks as lt
from tests.callbacks.test_distill import NaiveDistill, other
from tests.callbacks.test_float8 import NaiveFloat8
from tests.callbacks.test_moe_balance import NaiveBalance
from tests.callbacks.test_qat import NaiveQAT
from tests.conformance.trick import Enrolment, guard, neutral, schedule, scheduled, stepped, terminator
from tests.modules.grad_cache.naive import NaiveChunks
from tests.reference import tricks as naive
from tests.reference.lora import LowRank


class LeanLoss(lt.LeanLoss):  # type: ignore[misc]
    """Of a module whose layers are not known before."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.module = f"layers.{len(pl_module.layers) - 1}"
        super().on_fit_start(trainer, pl_module)


def schedule_free(optimizer: Any, module: Any) -> Any:
    """Not a schedule, but in its place: another optimizer of the same weights."""
    return lt.optimizer("schedulefree_sgd", module, 0.05, parameters=held(optimizer, module))


def held(optimizer: Any, module: Any) -> list[str]:
    """Patterns of the weights that an optimizer has."""
    weights = {weight for group in optimizer.param_groups for weight in group["params"]}
    return [f"^{re.escape(name)}$" for name, weight in module.named_parameters() if weight in weights]


def lookahead(optimizer: Any, module: Any) -> Any:
    return lt.optimizer("lookahead_sgd", module, 0.1, parameters=held(optimizer, module), k=2, **SGD)


def sgd(optimizer: Any, module: Any) -> Any:
    return lt.optimizer("sgd", module, 0.1, parameters=held(optimizer, module), **SGD)


SGD = {"momentum": 0.9, "weight_decay": 1e-3, "no_decay": False}  # of the tests' networks
PICTURES = str(Path(tempfile.gettempdir()) / "lightning_tricks_pictures")
SNAPSHOTS = str(Path(tempfile.gettempdir()) / "lightning_tricks_snapshots")

NO_LOGITS = "computes F.cross_entropy(logits (N, C), target) without the logits"
WITHOUT_LOGITS = {  # what a lean loss does not go with
    **dict.fromkeys(
        ("CutMix", "Distill", "GradCacheMixin", "HiddenMixup", "LabelErrors", "LogitAdjustment", "Mixup"), NO_LOGITS
    ),
    **dict.fromkeys(('HardExampleFilter(mode="loss")', "Mixup(per_sample=True)"), NO_LOGITS),
    "QAT": "layers.3.forward is another one already",
}

SETTINGS: dict[str, Enrolment] = {
    "AdaptiveClip": Enrolment(
        naive=lambda batches, seen: naive.UnitClip(),
        callbacks={"on": lambda: [lt.AdaptiveClip(0.02)], "off": lambda: [lt.AdaptiveClip(1e9)]},
        yaml={"trainer": {"callbacks": [{"class_path": "AdaptiveClip", "init_args": {"clip_factor": 0.02}}]}},
        refused=("DeepSpeed",),
    ),
    "AutoClip": Enrolment(
        naive=lambda batches, seen: naive.PercentileClip(),
        callbacks={"on": lambda: [lt.AutoClip(10)], "off": lambda: [lt.AutoClip(100)]},
        yaml={"trainer": {"callbacks": ["AutoClip"]}},
        refused=("DeepSpeed",),
        ordered=("AdaptiveClip",),
    ),
    "ActivationCheckpointing": neutral(
        lambda: lt.ActivationCheckpointing("layers"),
        {"class_path": "ActivationCheckpointing", "init_args": {"modules": "layers"}},
    ),
    "Compile": neutral(
        lambda: lt.Compile("layers", backend="aot_eager"),
        {"class_path": "Compile", "init_args": {"modules": "layers", "backend": "aot_eager"}},
        no_client="compiling takes a minute for each model",
    ),
    "ChannelsLast": neutral(lt.ChannelsLast, "ChannelsLast", net="ConvNet", convolutions=True),
    "CutMix": Enrolment(
        naive=lambda batches, seen: naive.Cut(seen),
        callbacks={"on": lambda: [lt.CutMix()], "off": lambda: [lt.CutMix(prob=0.0)]},
        images=True,
        by_batches=True,
        yaml={
            "trainer": {"callbacks": ["CutMix"]},
            "model": {"class_path": "tests.conformance.yaml_nets.ImagesNet"},
        },
    ),
    'CutMix(target="mask")': Enrolment(  # found by its size
        naive=lambda batches, seen: naive.CutMasks(seen),
        callbacks={"on": lambda: [lt.CutMix()], "off": lambda: [lt.CutMix(prob=0.0)]},
        images=True,
        masks=True,
        by_batches=True,
        yaml={
            "trainer": {"callbacks": ["CutMix"]},
            "model": {"class_path": "tests.conformance.yaml_nets.MasksNet"},
        },
        twin="CutMix",
    ),
    "BatchTransform": Enrolment(
        naive=lambda batches, seen: naive.Transformed(seen),
        callbacks={
            "on": lambda: [lt.BatchTransform(lt.CutOut(0.5))],
            "off": lambda: [lt.BatchTransform(lt.CutOut(0.0))],
        },
        images=True,
        by_batches=True,
        yaml={
            "trainer": {
                "callbacks": [
                    {
                        "class_path": "BatchTransform",
                        "init_args": {
                            "transform": {"class_path": "lightning_tricks.CutOut", "init_args": {"length": 0.5}}
                        },
                    }
                ]
            },
            "model": {"class_path": "tests.conformance.yaml_nets.ImagesNet"},
        },
        twin="CutMix",
        unseen=("CutMix", "HardExampleFilter", "Mixup", "Mixup(per_sample=True)"),
    ),
    "BatchTransform(ColOut())": Enrolment(
        naive=lambda batches, seen: naive.Dropped(seen),
        callbacks={
            "on": lambda: [lt.BatchTransform(lt.ColOut(0.5, 0.5))],
            "off": lambda: [lt.BatchTransform(lt.ColOut(0.0, 0.0))],
        },
        images=True,
        grows=True,
        by_batches=True,
        yaml={
            "trainer": {
                "callbacks": [
                    {
                        "class_path": "BatchTransform",
                        "init_args": {
                            "transform": {
                                "class_path": "lightning_tricks.ColOut",
                                "init_args": {"rows": 0.5, "columns": 0.5},
                            }
                        },
                    }
                ]
            },
            "model": {"class_path": "tests.conformance.yaml_nets.GrowingImagesNet"},
        },
        twin="CutMix",
    ),
    "DataWait": neutral(lambda: lt.DataWait(warn=1.0), {"class_path": "DataWait", "init_args": {"warn": 1.0}}),
    "Doctor": neutral(lt.Doctor, "Doctor"),
    "EMA": Enrolment(
        naive=lambda batches, seen: naive.EMA(),
        callbacks={"on": lambda: [lt.EMA(0.9)], "off": lambda: [lt.EMA(0)]},
        yaml={"trainer": {"callbacks": [{"class_path": "EMA", "init_args": {"decay": 0.9}}]}},
    ),
    "FitsMemory": neutral(
        lt.FitsMemory,
        "FitsMemory",
        *("DeepSpeed", "FSDP2", "manual"),
    ),
    "Float8": Enrolment(  # its scales are those of each batch
        naive=lambda batches, seen: NaiveFloat8(),
        callbacks={"on": lambda: [lt.Float8(emulate=True)]},
        wide=True,
        by_batches=True,
        yaml={
            "trainer": {"callbacks": [{"class_path": "Float8", "init_args": {"emulate": True}}]},
            "model": {"class_path": "tests.conformance.yaml_nets.WideNet"},
        },
        refused=("DeepSpeed", "LoRA"),
    ),
    "GradCacheMixin": Enrolment(
        naive=lambda batches, seen: NaiveChunks(2),
        chunk={"on": 4, "off": 8},
        yaml={"model": {"class_path": "tests.conformance.yaml_nets.ChunkedNet", "init_args": {"chunk": 4}}},
        refused=("DeepSpeed", "manual"),
        no_client="works in modules that are written for it, with embed() and contrast()",
        refuses={
            "LabelErrors": "a part of the loss is ambiguous",
            "StepInBackward": "Net.backward may call backward more than once",
        },
    ),
    "GradientStats": neutral(
        lambda: lt.GradientStats(every_n_steps=1),
        {"class_path": "GradientStats", "init_args": {"every_n_steps": 1}},
        "DeepSpeed",
        no_client="reads the gradients and weights that InspectTraining reads",
    ),
    "GradualUnfreeze": Enrolment(
        naive=lambda batches, seen: naive.Unfrozen(),
        callbacks={
            "on": lambda: [lt.GradualUnfreeze([3], parameters=[r"^layers\.0"], lr_factor=0.5)],
            "off": lambda: [lt.GradualUnfreeze([0], parameters=[r"^layers\.0"])],
        },
        yaml={
            "trainer": {
                "callbacks": [
                    {
                        "class_path": "GradualUnfreeze",
                        "init_args": {"at": [3], "parameters": [r"^layers\.0"], "lr_factor": 0.5},
                    }
                ]
            }
        },
        refused=("DeepSpeed", "LoRA"),
    ),
    "HardExampleFilter": Enrolment(
        naive=lambda batches, seen: naive.Hardest(),
        callbacks={"on": lambda: [lt.HardExampleFilter()], "off": lambda: [lt.HardExampleFilter(1.0)]},
        by_batches=True,
        yaml={"trainer": {"callbacks": ["HardExampleFilter"]}},
        refused=("manual",),
    ),
    'HardExampleFilter(mode="loss")': Enrolment(
        naive=lambda batches, seen: naive.HardestLosses(),
        callbacks={
            "on": lambda: [lt.HardExampleFilter(mode="loss")],
            "off": lambda: [lt.HardExampleFilter(1.0, mode="loss")],
        },
        by_batches=True,
        yaml={"trainer": {"callbacks": [{"class_path": "HardExampleFilter", "init_args": {"mode": "loss"}}]}},
    ),
    "HiddenMixup": Enrolment(
        naive=lambda batches, seen: naive.Hidden(seen),
        callbacks={"on": lambda: [lt.HiddenMixup("layers.1")], "off": lambda: [lt.HiddenMixup("layers.1", alpha=0)]},
        by_batches=True,
        yaml={"trainer": {"callbacks": [{"class_path": "HiddenMixup", "init_args": {"layer": "layers.1"}}]}},
    ),
    "Distill": Enrolment(
        naive=lambda batches, seen: NaiveDistill(),
        callbacks={
            "on": lambda: [lt.Distill(lt.Teacher(0.9))],
            "off": lambda: [lt.Distill(lt.Teacher(0.9), weight=0.0)],
        },
        yaml={
            "trainer": {
                "callbacks": [
                    {
                        "class_path": "Distill",
                        "init_args": {
                            "teacher": {"class_path": "lightning_tricks.Teacher", "init_args": {"decay": 0.9}}
                        },
                    }
                ]
            }
        },
        refused=("DeepSpeed", "manual"),
        unseen=("Float8", "QAT"),  # whose plain loops round what the teacher computes, too
        ordered=("MoEBalance",),
        no_client="compares logits, which few of their steps return; tests/callbacks has models of timm, transformers",
    ),
    "Distill(module)": Enrolment(
        naive=lambda batches, seen: NaiveDistill(other=other().eval()),
        callbacks={"on": lambda: [lt.Distill(other())], "off": lambda: [lt.Distill(other(), weight=0.0)]},
        yaml={
            "trainer": {
                "callbacks": [
                    {
                        "class_path": "Distill",
                        "init_args": {"teacher": {"class_path": "tests.conformance.yaml_nets.OtherTeacher"}},
                    }
                ]
            }
        },
        refused=("manual",),
        twin="Distill",
        no_client="compares outputs by name, which few of their steps have; tests/callbacks distils models of timm",
    ),
    "InspectTraining": neutral(
        lambda: lt.InspectTraining(PICTURES, every_n_steps=100, steps=2),
        {"class_path": "InspectTraining", "init_args": {"folder": PICTURES, "every_n_steps": 100, "steps": 2}},
        "DeepSpeed",
    ),
    "LabelErrors": neutral(
        lt.LabelErrors,
        "LabelErrors",
        "iterable",
        by_numbers=True,
        no_client="looks at losses as HardExampleFilter does, which is tried, and changes nothing",
    ),
    "LayerFreezing": Enrolment(
        naive=lambda batches, seen: naive.Frozen(),
        callbacks={
            "on": lambda: [lt.LayerFreezing(start=3, stop=3, parameters=[r"^layers\.0"])],
            "off": lambda: [lt.LayerFreezing(0.0, parameters=[r"^layers\.0"])],
        },
        yaml={
            "trainer": {
                "callbacks": [
                    {
                        "class_path": "LayerFreezing",
                        "init_args": {"start": 3, "stop": 3, "parameters": [r"^layers\.0"]},
                    }
                ]
            }
        },
        refused=("DeepSpeed",),
    ),
    "LoRA": Enrolment(
        naive=lambda batches, seen: LowRank(),
        callbacks={"on": lambda: [lt.LoRA(r"layers\.0", r=2, train=r"layers\.[1-9]")]},
        yaml={
            "trainer": {
                "callbacks": [
                    {
                        "class_path": "LoRA",
                        "init_args": {"modules": r"layers\.0", "r": 2, "train": r"layers\.[1-9]"},
                    }
                ]
            }
        },
    ),
    'LoRA(variant="dora")': Enrolment(
        naive=lambda batches, seen: LowRank(dora=True),
        callbacks={"on": lambda: [lt.LoRA(r"layers\.0", r=2, train=r"layers\.[1-9]", variant="dora")]},
        yaml={
            "trainer": {
                "callbacks": [
                    {
                        "class_path": "LoRA",
                        "init_args": {
                            "modules": r"layers\.0",
                            "r": 2,
                            "train": r"layers\.[1-9]",
                            "variant": "dora",
                        },
                    }
                ]
            }
        },
        twin="LoRA",
    ),
    "LoRA(lr_ratio=4)": Enrolment(
        naive=lambda batches, seen: LowRank(lr_ratio=4.0),
        callbacks={"on": lambda: [lt.LoRA(r"layers\.0", r=2, train=r"layers\.[1-9]", lr_ratio=4.0)]},
        yaml={
            "trainer": {
                "callbacks": [
                    {
                        "class_path": "LoRA",
                        "init_args": {
                            "modules": r"layers\.0",
                            "r": 2,
                            "train": r"layers\.[1-9]",
                            "lr_ratio": 4.0,
                        },
                    }
                ]
            }
        },
        refused=("DeepSpeed",),
        twin="LoRA",
    ),
    "LRSchedule": Enrolment(
        naive=scheduled("LRSchedule"),
        callbacks={
            "on": lambda: [lt.LRSchedule("cosine", warmup=2)],
            "off": lambda: [lt.LRSchedule("cosine", floor=1.0)],
        },
        yaml={"trainer": {"callbacks": [{"class_path": "LRSchedule", "init_args": {"curve": "cosine", "warmup": 2}}]}},
        refused=("DeepSpeed", "manual"),
    ),
    "LRSchedule(replace=True)": Enrolment(
        naive=scheduled("LRSchedule"),
        callbacks={
            "on": lambda: [lt.LRSchedule("cosine", warmup=2, replace=True)],
            "off": lambda: [lt.LRSchedule("cosine", floor=1.0, replace=True)],
        },
        schedule={"on": stepped, "off": stepped},
        yaml={
            "trainer": {
                "callbacks": [
                    {
                        "class_path": "LRSchedule",
                        "init_args": {"curve": "cosine", "warmup": 2, "replace": True},
                    }
                ]
            },
            "model": {"class_path": "tests.conformance.yaml_nets.SteppedNet"},
        },
        refused=("DeepSpeed", "manual"),
        twin="LRSchedule",
    ),
    "LeanLoss": neutral(
        LeanLoss,
        {"class_path": "lightning_tricks.LeanLoss", "init_args": {"module": "layers.3"}},
        "FSDP2",
        "DeepSpeed",
        refuses=WITHOUT_LOGITS,
    ),
    "lean_loss": Enrolment(
        lean=True,
        neutral=True,
        yaml={"model": {"class_path": "tests.conformance.yaml_nets.LeanNet"}},
        refused=("FSDP2", "DeepSpeed"),
        twin="LeanLoss",
        refuses={**WITHOUT_LOGITS, "LeanLoss": "the head is a Linear, whose forward pass is another one"},
    ),
    "LogitAdjustment": Enrolment(
        naive=lambda batches, seen: naive.Adjusted(batches),
        callbacks={"on": lambda: [lt.LogitAdjustment()], "off": lambda: [lt.LogitAdjustment(tau=0.0)]},
        yaml={"trainer": {"callbacks": ["LogitAdjustment"]}},
        refused=("iterable",),
        no_client="changes the losses of classifiers alone; tests/callbacks compares it with modules by hand",
    ),
    "MoEBalance": Enrolment(
        naive=lambda batches, seen: NaiveBalance(0.05),
        callbacks={"on": lambda: [lt.MoEBalance(0.05)], "off": lambda: [lt.MoEBalance(0.0)]},
        experts=True,
        yaml={
            "trainer": {"callbacks": [{"class_path": "MoEBalance", "init_args": {"rate": 0.05}}]},
            "model": {"class_path": "tests.conformance.yaml_nets.MixtureNet"},
        },
        no_client="no model has experts",
    ),
    "Mixup": Enrolment(
        naive=lambda batches, seen: naive.Mixed(seen),
        callbacks={"on": lambda: [lt.Mixup()], "off": lambda: [lt.Mixup(alpha=0)]},
        by_batches=True,
        yaml={"trainer": {"callbacks": [{"class_path": "Mixup", "init_args": {"alpha": 0.2}}]}},
        unseen=("Mixup(per_sample=True)",),
    ),
    "Mixup(per_sample=True)": Enrolment(
        naive=lambda batches, seen: naive.Mixed(seen),
        callbacks={
            "on": lambda: [lt.Mixup(per_sample=True)],
            "off": lambda: [lt.Mixup(per_sample=True, prob=0.0)],
        },
        by_batches=True,
        yaml={"trainer": {"callbacks": [{"class_path": "Mixup", "init_args": {"per_sample": True}}]}},
    ),
    "NEFTune": Enrolment(
        naive=lambda batches, seen: naive.Noisy(seen),
        callbacks={"on": lambda: [lt.NEFTune(5.0)], "off": lambda: [lt.NEFTune(0.0)]},
        tokens=True,
        by_batches=True,
        yaml={
            "trainer": {"callbacks": ["NEFTune"]},
            "model": {"class_path": "tests.conformance.yaml_nets.TokensNet"},
        },
        no_client="has random numbers that no oracle draws; tests/callbacks adds its noise in models of transformers",
    ),
    "ProgressiveResizing": Enrolment(
        naive=lambda batches, seen: naive.GrowingImages(),
        callbacks={
            "on": lambda: [lt.ProgressiveResizing(0.5, stop=4, multiple_of=1)],
            "off": lambda: [lt.ProgressiveResizing(0.999, multiple_of=1)],  # which rounds to full sizes
        },
        images=True,
        grows=True,
        yaml={
            "trainer": {
                "callbacks": [
                    {"class_path": "ProgressiveResizing", "init_args": {"initial": 0.5, "stop": 4, "multiple_of": 1}}
                ]
            },
            "model": {"class_path": "tests.conformance.yaml_nets.GrowingImagesNet"},
        },
        twin="SequenceLengthWarmup",
    ),
    "PostHocEMA": neutral(
        lambda: lt.PostHocEMA(SNAPSHOTS, every_n_steps=100),
        {"class_path": "PostHocEMA", "init_args": {"folder": SNAPSHOTS, "every_n_steps": 100}},
        "DeepSpeed",
        no_client="follows the weights as EMA does, which is tried, and puts nothing into the module",
    ),
    "Preemption": neutral(lambda: lt.Preemption("runs"), {"class_path": "Preemption", "init_args": {"folder": "runs"}}),
    "ExactResume": neutral(
        lt.ExactResume,
        "ExactResume",
        "iterable",
        no_client="is a part of Preemption",
    ),
    "RewindOnSpike": guard(
        lambda: lt.RewindOnSpike(every_n_steps=3),
        {"class_path": "RewindOnSpike", "init_args": {"every_n_steps": 3}},
        "DeepSpeed",
        "manual",
        naive=lambda batches, seen: naive.Rewinding(len(batches)),
        ordered=("SkipNonFinite",),
    ),
    "QAT": Enrolment(
        naive=lambda batches, seen: NaiveQAT(first=1),
        callbacks={"on": lambda: [lt.QAT(modules=r"layers\.[1-9]")], "off": lambda: [lt.QAT(start=1.0)]},
        yaml={"trainer": {"callbacks": [{"class_path": "QAT", "init_args": {"modules": r"layers\.[1-9]"}}]}},
        refused=("LoRA", "fp64"),
        rounded=("HiddenMixup", "NEFTune", "SAMCallback", "SAMMixin", "ScheduleFree"),
    ),
    "SAMCallback": Enrolment(
        callbacks={"on": lambda: [lt.SAMCallback(0.1)], "off": lambda: [lt.SAMCallback(0.0)]},
        yaml={"trainer": {"callbacks": [{"class_path": "SAMCallback", "init_args": {"rho": 0.1}}]}},
        refused=("DeepSpeed", "manual"),
        naive=lambda batches, seen: naive.SAM(),
        twin="SAMMixin",
    ),
    "SAMMixin": Enrolment(
        naive=lambda batches, seen: naive.SAM(),
        sam={"on": lt.SAM(0.1), "off": lt.SAM(0.0)},
        yaml={"model": {"class_path": "tests.conformance.yaml_nets.SharpNet", "init_args": {"sam": {"rho": 0.1}}}},
        refused=("DeepSpeed",),
    ),
    "SAMMixin(adaptive=True)": Enrolment(
        naive=lambda batches, seen: naive.SAM(eta=0.01),
        sam={"on": lt.SAM(0.1, adaptive=True), "off": lt.SAM(0.0, adaptive=True)},
        yaml={
            "model": {
                "class_path": "tests.conformance.yaml_nets.SharpNet",
                "init_args": {"sam": {"rho": 0.1, "adaptive": True}},
            }
        },
        refused=("DeepSpeed",),
        twin="SAMMixin",
    ),
    "ScheduleFree": Enrolment(
        naive=lambda batches, seen: naive.ScheduleFree(batches),
        callbacks={"on": lambda: [lt.ScheduleFree()]},
        schedule={"on": schedule_free},
        yaml={
            "trainer": {"callbacks": ["ScheduleFree"]},
            "model": {"class_path": "tests.conformance.yaml_nets.FreeNet"},
        },
        refused=("DeepSpeed",),
        refuses=dict.fromkeys(("cosine", "swa_tail"), "takes no schedule"),
    ),
    "SequenceLengthWarmup": Enrolment(
        naive=lambda batches, seen: naive.GrowingSequences(),
        callbacks={
            "on": lambda: [lt.SequenceLengthWarmup(0.5, stop=4, multiple_of=1, inputs=0)],
            "off": lambda: [lt.SequenceLengthWarmup(0.999, multiple_of=1, inputs=0)],  # the same
        },
        grows=True,
        yaml={
            "trainer": {
                "callbacks": [
                    {
                        "class_path": "SequenceLengthWarmup",
                        "init_args": {"initial": 0.5, "stop": 4, "multiple_of": 1, "inputs": 0},
                    }
                ]
            },
            "model": {"class_path": "tests.conformance.yaml_nets.GrowingNet"},
        },
    ),
    "StepInBackward": neutral(
        lt.StepInBackward, "StepInBackward", "accumulate", "clip", "DDP", "DeepSpeed", "FSDP2", "fp16", "manual"
    ),
    "SWA": Enrolment(
        naive=lambda batches, seen: naive.SWA(batches),
        callbacks={
            "on": lambda: [lt.SWA(start=3)],
            "off": lambda: [lt.SWA(start=1.0, recalibrate_batchnorm=False)],  # the last weights alone
        },
        yaml={"trainer": {"callbacks": [{"class_path": "SWA", "init_args": {"start": 3}}]}},
    ),
    "BatchSizeWarmup": Enrolment(
        naive=lambda batches, seen: naive.Growing(),
        callbacks={
            "on": lambda: [lt.BatchSizeWarmup(1, final=2, over=1)],
            "off": lambda: [lt.BatchSizeWarmup(1, final=1)],
        },
        yaml={"trainer": {"callbacks": [{"class_path": "BatchSizeWarmup", "init_args": {"final": 2, "over": 1}}]}},
        refused=("DeepSpeed", "accumulate", "manual"),
    ),
    "SkipNonFinite": guard(
        lt.SkipNonFinite, "SkipNonFinite", "DeepSpeed", naive=lambda batches, seen: naive.Skipping(len(batches))
    ),
    "Teacher": neutral(
        lambda: lt.Teacher(0.9),
        {"class_path": "Teacher", "init_args": {"decay": 0.9}},
        "DeepSpeed",
        no_client="is called by the module; Distill, which is tried, has the same teacher",
    ),
    "Throughput": neutral(lt.Throughput, "Throughput"),
    "TerminateOnNonFinite": terminator(lt.TerminateOnNonFinite, "TerminateOnNonFinite"),
    "constant": Enrolment(
        naive=scheduled("constant"),
        schedule={"on": partial(lt.constant, warmup=3), "off": lt.constant},
        twin="cosine",
    ),
    "cosine": schedule(lt.cosine),
    "cosine_restarts": schedule(lt.cosine_restarts),
    "flat_cos": schedule(lt.flat_cos),
    "inverse_sqrt": schedule(lt.inverse_sqrt),
    "linear": schedule(lt.linear),
    "one_cycle": schedule(lt.one_cycle, initial=1.0),
    "polynomial": schedule(lt.polynomial),
    'optimizer("lookahead_sgd")': Enrolment(  # and plain SGD where it is off
        naive=lambda batches, seen: naive.Lookahead(),
        schedule={"on": lookahead, "off": sgd},
        refused=("DeepSpeed",),
        refuses={"StepInBackward": "tries an optimizer on small weights, which Lookahead does not allow"},
    ),
    "reduce_on_plateau": Enrolment(
        naive=lambda batches, seen: naive.WarmUp(),  # no second epoch ends before the last step
        schedule={
            # no epoch is as much better than the one before: after the second one the rate falls with each
            "on": partial(lt.reduce_on_plateau, warmup=3, factor=0.5, patience=0, threshold=0.9),
            "off": lt.reduce_on_plateau,
        },
    ),
    "step_decay": schedule(lt.step_decay),
    "swa_tail": Enrolment(
        naive=scheduled("swa_tail"),
        schedule={
            "on": lambda o, m=None, **total: lt.swa_tail(lt.cosine(o, m, **total), start=0.5, swa_lr=0.05),
            "off": lambda o, m: lt.swa_tail(lt.cosine(o, m, floor=1.0), swa_lr=0.1),
        },
    ),
    "wsd": schedule(lt.wsd),
    "TokenMean": Enrolment(
        naive=lambda batches, seen: naive.AllTargets(),
        callbacks={"on": lambda: [lt.TokenMean()]},
        windows=True,
        yaml={"trainer": {"callbacks": ["TokenMean"]}},
        refused=("DeepSpeed", "manual"),
        no_client="changes nothing without accumulation; tests/callbacks compares it with large batches of a Llama",
    ),
}

# Where a fit costs much: what has a twin there is left to `make test-all` and `make matrix`.
NAMES = [pytest.param(name, marks=pytest.mark.slow) if trick.twin else name for name, trick in SETTINGS.items()]


def quick(*names: str) -> list[Any]:
    """All tricks, of which these stand for the others in ``make test``."""
    return [pytest.param(name, marks=[] if name in names else [pytest.mark.slow]) for name in SETTINGS]


def every_third(first: int) -> list[Any]:
    """All tricks, of which every third one is quick, from this one on, unless it has a twin."""
    names = [name for number, (name, trick) in enumerate(SETTINGS.items()) if number % 3 == first and not trick.twin]
    return quick(*names)


def in_regimes(regimes: Iterable[str]) -> list[Any]:
    """All pairs of a regime and a trick: quick are all tricks in fp32, and every fifth one in each other regime.

    What has a twin is quick in fp32 alone, and what compiles in two regimes.
    """

    def pair(regime: str, name: str, number: int) -> Any:
        quick = number % 5 == 0 and not SETTINGS[name].twin
        if name == "Compile":
            quick = regime in ("bf16", "bf16-mixed")
        return pytest.param(regime, name, marks=[] if quick or regime == "fp32" else [pytest.mark.slow])

    numbered = list(enumerate(SETTINGS))
    return [pair(regime, name, shift + number) for shift, regime in enumerate(regimes) for number, name in numbered]
