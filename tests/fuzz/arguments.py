"""Arguments of everything public, right and wrong: what a call must do with them, told from its annotations alone."""

from __future__ import annotations

import collections.abc
import inspect
import math
import os
import sys
import tempfile
import types
import typing
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

import lightning_tricks as lt
from lightning_tricks.evaluation import CrossValidation
from tests.nets import Net, PlainNet, data, loader, trainer
from tests.public import PUBLIC

# ---- the calls: what each one needs besides the arguments that are tried


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)


def layers() -> nn.Module:
    return Net().layers


FILE, FOLDER, KEPT = "weights.pt", "sharded.ckpt", "non_finite-step=2"  # in the current folder, by ``make_files``


def snapshots() -> str:
    for sigma_rel in (0.05, 0.1):
        state = {"state_dict": {"w": torch.ones(2)}, "averaged": ["w"]}
        torch.save(state, f"step=4-sigma_rel={sigma_rel}.pt")
    return "."


def make_files() -> None:
    torch.save({"w": torch.ones(2)}, FILE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there is no process group
        dcp.save({"state_dict": {"w": torch.ones(2)}}, checkpoint_id=FOLDER, no_dist=True)
    torch.save({}, f"{FOLDER}/meta.pt")
    run = trainer(max_steps=2)
    run.fit(PlainNet(), loader(16), loader(16))
    run.save_checkpoint(f"{KEPT}/last_good.ckpt")
    torch.save(next(iter(loader(16))), f"{KEPT}/batch-rank=0.pt")


def loss(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@cache
def crossed() -> CrossValidation:
    """A cross-validation whose folds have two checkpoints each."""

    def make_trainer(fold: int, folder: Any) -> L.Trainer:
        kept = ModelCheckpoint(folder, monitor="val_loss", save_top_k=2)
        return trainer(max_epochs=2, callbacks=[kept], enable_checkpointing=True)

    return lt.cross_validate(lambda fold: PlainNet(), data(8), make_trainer, folder=tempfile.mkdtemp(), splitter=2)


PERTURBED = {"weights": lambda: [torch.ones(2)], "gradients": lambda: [torch.ones(2)]}
SCHEDULE = {"optimizer": sgd, "module": lambda: None, "total_steps": lambda: 20}
SCALE = {"batch_size": lambda: 64, "base_batch_size": lambda: 32}
TRAINED = {"trainer": trainer, "module": PlainNet, "train_dataloaders": lambda: loader(16)}
WRITTEN = {"output": lambda: "out.pt", "force": lambda: True}
ARMS = {name: lambda _: (trainer(max_epochs=1), PlainNet(), loader(16), loader(16)) for name in ("plain", "trick")}
FACTORIES = (
    *("constant", "cosine", "cosine_restarts", "flat_cos", "inverse_sqrt", "linear", "one_cycle", "polynomial"),
    *("reduce_on_plateau", "step_decay", "wsd"),
)

STEPPED = nn.Parameter(torch.ones(2))


NEEDED: dict[str, dict[str, Callable[[], Any]]] = {
    **dict.fromkeys(FACTORIES, SCHEDULE),
    "reduce_on_plateau": {"optimizer": sgd, "module": lambda: None},
    "swa_tail": {"schedule": lambda: lt.cosine(sgd(), total_steps=20), "swa_lr": lambda: 0.05},
    "ActivationCheckpointing": {"modules": lambda: "layers"},
    "BatchTransform": {"transform": nn.Identity},
    "Float8": {"emulate": lambda: True},
    "LayerFreezing": {"parameters": lambda: ["0"]},
    "LeanLoss": {"module": lambda: "layers.4"},
    "ProgressiveResizing": {"multiple_of": lambda: 1},
    "InspectTraining": {"folder": lambda: "pictures"},
    "inspect_training": TRAINED,
    "add_blur_pool": {"model": lambda: nn.Sequential(nn.Conv2d(16, 4, 3, 2))},
    "add_squeeze_excite": {"model": layers, "modules": lambda: "BatchNorm1d"},
    "init_weights": {"model": layers, "recipe": lambda: "kaiming"},
    "GradualUnfreeze": {"at": lambda: [0.2], "parameters": lambda: ["0"]},
    "Hardware": {"device_memory": lambda: 8e9},
    "HiddenMixup": {"layer": lambda: "layers.0"},
    "LengthBuckets": {"lengths": lambda: [3, 1, 2], "batch_size": lambda: 2},
    "DistributedWeightedSampler": {"weights": lambda: [3.0, 1.0, 2.0]},
    "balanced_sampler": {"labels": lambda: [0, 1, 1]},
    "LoRA": {"modules": lambda: "layers.0"},
    "export_adapters": {"checkpoint": lambda: "adapters.ckpt", "output": lambda: "adapters", "force": lambda: True},
    "CurveLR": {"optimizer": sgd, "curve": lambda: partial(lambda step: 1.0)},
    "PlateauLR": {"optimizer": sgd},
    "adamw": {"module": Net, "lr": lambda: 1e-3},
    "optimizer": {"name": lambda: "lion", "module": Net, "lr": lambda: 1e-3},
    "asam_perturb_": {**PERTURBED, "rho": lambda: 0.05, "eta": lambda: 0.01, "adapts": lambda: [True]},
    "sam_perturb_": {**PERTURBED, "rho": lambda: 0.05},
    "balance_experts_": {"bias": lambda: torch.zeros(2), "load": lambda: torch.ones(2), "rate": lambda: 0.1},
    "resize_images": {"x": lambda: torch.ones(1, 1, 4, 4), "size": lambda: (2, 2)},
    "sharpness": {"model": Net, "loader": lambda: loader(8), "loss": lambda: loss, "iterations": lambda: 2},
    "find_num_workers": {"loader": lambda: loader(8), "most": lambda: 0, "seconds": lambda: 0.01},
    "soup_and_ensemble": {
        "result": crossed,
        "kind": lambda: PlainNet,
        "dataset": lambda: data(8),
        "make_trainer": lambda: lambda fold, folder: trainer(max_epochs=1),
        "output": lambda: "layers",
    },
    "adaptive_clip_": {"parameters": lambda: [nn.Parameter(torch.ones(2))]},
    "add_stochastic_depth": {"model": layers, "rate": lambda: 0.1, "modules": lambda: "0"},
    "clip_loss": {"images": lambda: torch.eye(4), "texts": lambda: torch.eye(4)},
    "info_nce": {"queries": lambda: torch.eye(4), "keys": lambda: torch.eye(4)},
    "logit_adjustment": {
        "logits": lambda: torch.ones(4, 3),
        "targets": lambda: torch.tensor([0, 1, 2, 0]),
        "prior": lambda: torch.tensor([0.5, 0.3, 0.2]),
    },
    "Averager": {"tensors": lambda: [torch.zeros(2)]},
    "bce_targets": {"labels": lambda: torch.tensor([0, 2, 1]), "classes": lambda: 3},
    "Distill": {"teacher": lambda: nn.Linear(8, 2)},
    "distillation_loss": {"student": lambda: torch.zeros(4, 3), "teacher": lambda: torch.ones(4, 3)},
    "min_snr_weight": {"alphas_cumprod": lambda: torch.linspace(0.9, 0.1, 4), "t": lambda: torch.tensor([0, 3])},
    "average_checkpoints": {"paths": lambda: [FILE], **WRITTEN},
    "compare": {
        "arms": lambda: ARMS,
        "metric": lambda: "val_loss",
        "mode": lambda: "min",
        "folder": lambda: "compare",
        "seeds": lambda: 2,
    },
    "cross_validate": {
        "make_module": lambda: lambda fold: PlainNet(),
        "dataset": lambda: data(8),
        "make_trainer": lambda: lambda fold, folder: trainer(max_epochs=1),
        "folder": tempfile.mkdtemp,  # another one for each call, whose settings differ
        "splitter": lambda: 2,
    },
    "Preemption": {"folder": lambda: "runs"},
    "PostHocEMA": {"folder": lambda: "snapshots"},
    "power_decay": {"step": lambda: 3, "sigma_rel": lambda: 0.1},
    "post_hoc_average": {"folder": snapshots, "sigma_rel": lambda: 0.1},
    "post_hoc_sweep": {"folder": snapshots, "evaluate": lambda: lambda state: 1.0, "sigma_rels": lambda: (0.05, 0.1)},
    "newest_checkpoint": {"folder": lambda: "runs"},
    "consolidate": {"checkpoint": lambda: FOLDER, **WRITTEN},
    "ema_decay": {"updates": lambda: 3, "decay": lambda: 0.99},
    "discriminative_groups": {"model": layers, "lrs": lambda: {"0": 0.1, "": 0.01}},
    "effective_batch_size": {"trainer": trainer, "per_device": lambda: 8},
    "estimate_memory": {"model": lambda: 10**6},
    "export_weights": {"checkpoint": lambda: FILE, **WRITTEN},
    "find_batch_size": {
        "trainer": trainer,
        "module": PlainNet,  # BatchNorm trains on no batch of one
        "train_dataloaders": lambda: loader(16),
        "max_size": lambda: 4,
    },
    "find_lr": {"trainer": trainer, "module": PlainNet, "train_dataloaders": lambda: loader(16), "steps": lambda: 10},
    "find_non_finite": {"trainer": trainer, "module": PlainNet, "folder": lambda: KEPT},
    "freeze": {"model": layers, "parameters": lambda: "0"},
    "growing_size": {"step": lambda: 3, "full": lambda: 64, "initial": lambda: 0.5, "stop": lambda: 8},
    "greedy_soup": {
        "paths": lambda: [FILE],
        "evaluate": lambda: lambda state: 1.0,
        "output": lambda: "out.pt",
        "force": lambda: True,
    },
    "layer_decay_groups": {"model": layers, "lr": lambda: 1e-3, "decay": lambda: 0.7, "pattern": lambda: r"^(\d+)"},
    "no_weight_decay_groups": {"model": layers, "weight_decay": lambda: 0.1},
    "plot_schedule": {"schedule": lambda: lt.cosine(sgd(), total_steps=20)},
    "SequenceLengthWarmup": {"inputs": lambda: 0},
    "preset": {"name": lambda: "single_bf16"},
    "quantize": {"module": layers},
    "scale_adam": {"lr": lambda: 1e-3, **SCALE},
    "sam_step": {
        "closure": lambda: lambda: STEPPED.square().sum(),
        "optimizer": lambda: torch.optim.SGD([STEPPED], 0.1),
    },
    "scale_ema_decay": {"decay": lambda: 0.99, **SCALE},
    "scale_lr": {"lr": lambda: 1e-3, **SCALE},
    "tta": {"module": PlainNet, "views": lambda: [nn.Identity()]},
    "TokenBuckets": {"lengths": lambda: [3, 1, 2], "max_tokens": lambda: 8},
    "suggest_plan": {"model": lambda: lt.TransformerShape.of(10**6), "hardware": lambda: lt.Hardware.of("h100")},
    "suggest_strategy": {"model": lambda: 10**6, "hardware": lambda: lt.Hardware(8e9)},
}
# What a required argument of any other call gets, by its name or by its annotation.
USUAL: dict[str, Callable[[], Any]] = {
    "x": lambda: torch.ones(2, 1, 4, 4),
    "index": lambda: torch.tensor([1, 0]),
    "losses": lambda: torch.ones(4),
    "model": layers,
    "int": lambda: 2,
    "float": lambda: 0.5,
}


def needed(name: str) -> dict[str, Any]:
    """The arguments that a call cannot do without."""
    if name in NEEDED:
        return {argument: make() for argument, make in NEEDED[name].items()}
    every = inspect.signature(PUBLIC[name]).parameters.values()
    required = [each for each in every if each.default is each.empty]
    kinds = {each.name: each.name if each.name in USUAL else str(each.annotation).split(" | ")[0] for each in required}
    return {argument: USUAL[kind]() for argument, kind in kinds.items() if kind in USUAL}


LEFT_OUT = {
    "drop_bias_before_batchnorm": "has a model only",
    "lean_loss": "has a model only",
    "merge_adapters": "has a module only",
    "Ensemble": "has a constructor of its own; tests/evaluation/test_ensemble.py",
    "label_report": "has tensors only; tests/evaluation/test_label_report.py",
    "fit_temperature": "has a module and a loader only; tests/evaluation/test_temperature.py",
    "BatchedDataset": "has a data set only",
    "pack_sequences": "has samples only; tests/data/test_packing.py",
    "profile_tricks": "has a Trainer only",
    **dict.fromkeys(
        [
            *("BatchSizeResult", "Comparison", "CrossValidation", "EnvironmentReport", "LRFinderResult"),
            *("MemoryEstimate", "PostHocSweep", "Sharpness", "SoupAndEnsemble", "Suggestion", "Temperature"),
            *("LabelReport", "NonFiniteOrigin", "TrainingInspection", "TrainingPlan", "TricksProfile", "WorkersResult"),
        ],
        "a result, which nobody constructs",
    ),
    "UnknownTotalSteps": "an error, which nobody constructs",
    "GradCacheMixin": "has no arguments",
    "SAMMixin": "has no arguments",
    "ScheduleFree": "has no arguments",
    "StepInBackward": "has no arguments",
    "optimizers": "has no arguments",
    "ChannelsLast": "has no arguments",
    "ExactResume": "has no arguments",
    "environment_report": "has no arguments",
    "presets": "has no arguments",
    "optimizer_steps": "has a Trainer only; tests/core/lightning/test_steps_fuzz.py has its settings",
    "ray_trainer": "needs Ray's workers",
}
NAMES = [name for name in PUBLIC if name not in LEFT_OUT]
# What is done so often, or takes so long; larger numbers are tried as these.
LIMITS = {
    **dict.fromkeys(["steps", "max_size", "effective", "iterations", "points"], 12),
    **{"seeds": 3, "rounds": 3, "most": 2, "seconds": 0.01, "step_seconds": 0.01, "radius": 1.0, "model": 10**8},
}
# Objects that are tried, too, besides numbers, names, flags, and collections of those.
OBJECTS = {
    ("BatchTransform", "transform"),
    ("CurveLR", "momentum"),
    ("cross_validate", "splitter"),
    ("cross_validate", "targets"),
    ("estimate_memory", "lora"),
    ("min_snr_weight", "t"),
    ("suggest_strategy", "hardware"),
}
UNTRIED = {("resize_images", "size"), ("plot_schedule", "schedule")}  # takes as much memory; a function of the user's
# What is passed on by **settings, and a name that nothing has.
PASSED_ON: dict[str, dict[str, Any]] = {
    **{name: {"nothing": typing.NoReturn} for name in ["DDPPreset", "PlateauLR", "SinglePreset", "preset"]},
    "LRSchedule": {"flat": float, "nothing": typing.NoReturn},
    "optimizer": {"betas": Any, "nothing": typing.NoReturn},
}


@cache
def parameters(name: str) -> dict[str, Any]:
    """The annotations of the arguments that are tried."""
    call = PUBLIC[name]
    function = call.__init__ if inspect.isclass(call) else call
    home = vars(sys.modules[call.__module__])  # a decorator's function has another
    hints = typing.get_type_hints(function, {**vars(collections.abc), "Axes": Any, "Figure": Any, **home})
    kinds = {each.name: each.kind for each in inspect.signature(call).parameters.values()}
    named = {
        each: hints.get(each, Any)
        for each, kind in kinds.items()
        if kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        and (is_plain(hints.get(each, Any)) or (name, each) in OBJECTS)
        and (name, each) not in UNTRIED
    }
    return {**named, **PASSED_ON.get(name, {})}


SEQUENCES = (list, tuple, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
MAPPINGS = (dict, collections.abc.Mapping)


def is_plain(hint: Any) -> bool:
    """Whether an annotation has numbers, names, flags, or collections of those; others are objects of the user's."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(map(is_plain, inner))
    if origin in SEQUENCES:
        return all(is_plain(each) for each in inner if each is not Ellipsis)
    if origin in MAPPINGS:
        return is_plain(inner[0]) and (inner[1] is Any or is_plain(inner[1]))
    path = origin is None and isinstance(hint, type) and issubclass(hint, os.PathLike)
    return path or origin is typing.Literal or hint in (bool, int, float, str, bytes, timedelta)


# ---- what fits an annotation


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is what the annotation says; no number may be undefined or infinite, and no bool is a number."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in (Any, typing.NoReturn):
        return hint is Any
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, each) for each in inner)
    if origin is typing.Literal:
        return any(type(value) is type(each) and value == each for each in inner)
    if hint is float or hint is int:
        number = isinstance(value, int | float if hint is float else int) and not isinstance(value, bool)
        return number and (hint is int or abs(value) <= sys.float_info.max)
    if origin in SEQUENCES:
        value = value.tolist() if isinstance(value, np.ndarray) else value
        if isinstance(value, str | bytes) or not isinstance(value, (list | tuple) if origin is list else origin):
            return False
        if origin is tuple and inner[-1:] != (Ellipsis,):
            return len(value) == len(inner) and all(map(fits, value, inner))
        return all(fits(each, inner[0]) for each in value)
    if origin in MAPPINGS:
        return isinstance(value, dict) and all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    return isinstance(value, origin or hint)


# ---- values

NUMBERS = (
    0,
    1,
    2,
    3,
    10,
    -1,
    2**31,
    2**63,
    10**400,
    -(10**400),
    0.0,
    -0.0,
    0.5,
    0.9,
    1.0,
    1.5,
    -0.5,
    1e-9,
    1e308,
    5e-324,
)
STRANGE = (
    math.nan,
    math.inf,
    -math.inf,
    True,
    False,
    None,
    "",
    "x",
    "0.5",
    "nan",
    b"x",
    "\x00",
    "(",
    "a.b",
    [],
    (),
    {},
)


def strange() -> st.SearchStrategy[Any]:
    """Values that most arguments must refuse."""
    alone = st.one_of(
        st.sampled_from(NUMBERS),
        st.sampled_from(STRANGE),
        st.sampled_from([np.float64(0.5), np.float32(0.5), np.int64(2), np.array([1, 2]), np.bool_(True)]),
        st.sampled_from([torch.tensor(0.5), torch.tensor(2), torch.ones(2), torch.tensor(math.nan)]),
        st.sampled_from([object, len, nn.Identity(), timedelta(seconds=1), {1}, 1j, slice(2), range(3)]),
    )
    several = st.lists(alone, max_size=3)
    return st.one_of(alone, several, several.map(tuple), st.dictionaries(st.text(max_size=3), alone, max_size=2))


def fitting(hint: Any) -> st.SearchStrategy[Any]:
    """Values of the annotation's type, among them those out of range."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(fitting, inner))
    if origin is typing.Literal:
        return st.sampled_from(inner)
    if origin is tuple and inner[-1:] != (Ellipsis,):
        return st.tuples(*map(fitting, inner))
    if origin in SEQUENCES:
        return st.lists(fitting(inner[0]), max_size=3)
    if origin in MAPPINGS:
        return st.dictionaries(fitting(inner[0]), fitting(inner[1]), max_size=3)
    simple = {
        bool: st.booleans(),
        int: st.one_of(st.integers(-3, 12), st.integers()),
        float: st.one_of(st.floats(0, 1), st.floats(), st.integers(-3, 12)),
        str: st.one_of(st.sampled_from(["cosine", "layers", "0", "", "val_loss", "32-true"]), st.text(max_size=5)),
        types.NoneType: st.none(),
        timedelta: st.timedeltas(),
    }
    return simple.get(hint, st.none())


@st.composite
def changes(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """One argument of a call, seldom two, with a value of its type or a strange one."""
    hints = parameters(name)
    chosen = draw(st.lists(st.sampled_from(sorted(hints)), min_size=1, max_size=2, unique=True))
    kinds = {each: draw(st.booleans()) for each in chosen}
    drawn = {each: draw(fitting(hints[each]) if right else strange()) for each, right in kinds.items()}
    above = [each for each in drawn.keys() & LIMITS.keys() if fits(drawn[each], float) and drawn[each] > LIMITS[each]]
    return {**drawn, **{each: LIMITS[each] for each in above}}


# ---- calls

NAMED = (ValueError, TypeError, MisconfigurationException, ImportError)


def problem(name: str, changed: dict[str, Any]) -> str | None:
    """What is wrong with how a call takes these arguments; None if nothing is."""
    call, hints = PUBLIC[name], parameters(name)
    arguments = {**needed(name), **changed}
    positional = [arguments.pop(each) for each in positional_only(name) if each in arguments]
    try:
        call(*positional, **arguments)
    except (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, lt.UnknownTotalSteps):
        return None  # which name the file, or what is missing
    except NAMED as error:
        said = str(error)
        if any(each in said for each in changed):
            return None
        return f"{type(error).__name__} names none of the arguments: {said.splitlines()[0] if said else ''}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    wrong = [each for each, value in changed.items() if not fits(value, hints[each])]
    return f"accepts {', '.join(wrong)}" if wrong else None


def positional_only(name: str) -> list[str]:
    kinds = inspect.signature(PUBLIC[name]).parameters.values()
    return [each.name for each in kinds if each.kind is inspect.Parameter.POSITIONAL_ONLY]
