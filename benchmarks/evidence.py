"""What the cards say of docstrings, conflicts and figures: ``lightning_tricks_cli/evidence.json``.

``make tables`` writes it, so that an installed package has it without the benchmarks and without an import.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conflicts
import language_model
import quality_report
from quality_report import PLAIN
from tables import RESULTS
from tuned import best_rows, own

from lightning_tricks_cli.catalogue import CATALOGUE

FILE = Path(__file__).parent.parent / "lightning_tricks_cli" / "evidence.json"
# They are no trick of ours.
REFERENCE = ("label smoothing 0.1", "class weights", "balanced sampling", "EMA + flat_cos", "SAM + EMA + flat_cos")
NAMES = {  # of the tricks that the benchmarks call otherwise
    "Lion": "optimizer",
    "Muon": "optimizer",
    "Muon, both rates": "optimizer",
    "AdamW, both rates": "optimizer",
    "QAT int4": "QAT",
    "rounded to int4": "QAT",
    "stochastic depth 0.2": "add_stochastic_depth",
    "BlurPool": "add_blur_pool",
}
REGIMES = {"clean": "clean labels"}


def text() -> str:
    """The file."""
    found = {
        "names": names(),
        "gains": gains(),
        "told": written(TOLD),
        "measured": written(MEASURED),
        "conflicts": [
            {"names": mine, "others": conflicts.others(each), "warns": each.warns, "rule": each.rule}
            | {"remedy": each.remedy}
            for each, mine in conflicts.declared().items()
        ],
    }
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def names() -> dict[str, dict[str, str]]:
    """Of every public name the sub-package, the first line of the docstring, and its references."""
    return {name: {"kind": kind, **_docstring(name, kind)} for name, kind in conflicts.public().items()}


def _docstring(name: str, kind: str) -> dict[str, str]:
    written = inspect.getdoc(getattr(importlib.import_module(f"lightning_tricks.{kind}"), name)) or ""
    papers = re.findall(r"^References:\n((?:    .*\n?|\n)+)", written, re.MULTILINE)
    return {
        "what": written.split("\n")[0].replace("``", "`"),
        "papers": " ".join(" ".join(papers).replace("``", "`").split()),
    }


def result(name: str) -> dict[str, Any]:
    """The figures of a benchmark."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def of_quality() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Of each public name its variants, with their differences from plain training by setting."""
    found: dict[str, list[dict[str, Any]]] = {}
    for (task, regime), tricks in quality_report.columns(result("quality")).items():
        for trick, row in tricks.items():
            calibration = quality_report.sign(row["ece_gain"])
            setting = {"setting": _setting(task, regime), "seeds": row["seeds"]}
            line = {**setting, **row["gain"], "calibration": calibration, "larger": False}
            found.setdefault(trick, []).append(line)
    named: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for trick, rows in found.items():
        name = NAMES.get(trick, trick.split(",")[0])
        if name not in (PLAIN, *REFERENCE):
            named.setdefault(name, {})[trick] = rows
    return named


def _setting(task: str, regime: str) -> str:
    where = f"{regime} in test data" if regime in quality_report.SHIFTS else REGIMES.get(regime, regime)
    return f"{task}, {where}{', 0.01 nats' if task in quality_report.LOSS_TASKS else ''}"


def figure(name: str, case: str, what: str, key: str = "median") -> float:
    """One figure of a benchmark."""
    (found,) = (row[key] for row in result(name)["rows"] if (row["case"], row["what"]) == (case, what))
    return float(found)


def of_floor(name: str, case: str, what: str) -> float:
    """The ratio of a time to that of the benchmark's floor."""
    return figure(name, case, what, "over_floor")


def written(sentences: dict[str, list[Callable[[], str]]]) -> dict[str, list[str]]:
    """Sentences with figures, by card."""
    found = {name: [write() for write in writers] for name, writers in sentences.items()}
    assert found.keys() <= {row.names[0] for row in CATALOGUE}
    return found


def ema() -> str:
    ours, theirs = (
        figure("ema", "added to a step, tiny", what)
        for what in ("lightning_tricks EMA", "Lightning EMAWeightAveraging")
    )
    return f"It adds {ours:.0f} µs to a step of a tiny network; Lightning's `EMAWeightAveraging` adds {theirs:.0f} µs."


def sam() -> str:
    ratio = of_floor("sam", "step over a plain one, resnet50", "lightning_tricks SAM")
    return f"A step of a ResNet-50 takes {ratio:.2f} times as long."


def mixup() -> str:
    ratio = figure("mixup", "lightning_tricks over timm", "Mixup, 64x3x224x224")
    return f"A batch of 64 images of 224 x 224 and its loss take {ratio:.2f} of the time of timm's `Mixup`."


def resizing() -> str:
    seconds = {
        row["variant"]: row["seconds_to_target"][0] for row in result("inputs")["rows"] if row["task"] == "textures"
    }
    crop, resize = 'ProgressiveResizing(0.5, mode="crop")', "ProgressiveResizing(0.5)"
    reached = {row["variant"]: row["reached"] for row in result("inputs")["rows"] if row["task"] == "textures"}
    return (
        f'Textures: with `mode="crop"` the accuracy that plain training reaches in {seconds["plain"]:.2f} s was there'
        f' after {seconds[crop]:.2f} s. With `mode="resize"` only {reached[resize]} runs reached it at all.'
    )


def length() -> str:
    words = {row["variant"]: row["inputs_to_target"][0] for row in result("inputs")["rows"] if row["task"] == "glosses"}
    share = words["SequenceLengthWarmup(0.25, stop=0.8)"] / words["plain"]
    return f"Dictionary definitions: `SequenceLengthWarmup(0.25, stop=0.8)` needed {share:.2f} of the words."


def hard_examples() -> str:
    scaled, full, loss = (
        of_floor("hard_examples", "step, resnet18", f"HardExampleFilter(0.5{rest})")
        for rest in (", score_scale=0.5", "", ', mode="loss"')
    )
    return (
        f"A step of a ResNet-18 takes {scaled:.2f} of a plain one with `score_scale=0.5`, {full:.2f} without it, and"
        f' {loss:.2f} with `mode="loss"`.'
    )


def lean_loss() -> str:
    case = "peak memory, head and loss"
    ours, plain = (figure("lean_loss", case, what) for what in ("lightning_tricks", "with logits"))
    ratio = of_floor("lean_loss", "head and loss", "lightning_tricks")
    return f"Head and loss took {ours:.0f} MiB in place of {plain:.0f} MiB, and {ratio:.2f} times the time."


def min_snr() -> str:
    rows = {(row["prediction"], row["min_snr"]): row for row in result("diffusion")["rows"]}
    sample, plain, v = rows["sample", True], rows["sample", False], rows["v", True]
    return (
        f"Diffusion of digits, five seeds: for a network that predicts the sample, the distance fell from"
        f" {plain['distance']:.2f} to {sample['distance']:.2f}; for one that predicts v it was better in"
        f" {v['seeds_better']} of 5 seeds."
    )


def wrong_labels() -> str:
    rows = {(row["wrong"], row["epochs"]): row for row in result("label_errors")["rows"]}
    many, few = rows[0.4, 30], rows[0.1, 30]
    return (
        f"Of the 1,797 digits of scikit-learn, 40% with a wrong label, {many['margin']:.1%} of the most suspect 40% are"
        f" wrong after 30 epochs (by the mean loss {many['loss']:.1%}, by the loss in the last epoch"
        f" {many['last loss']:.1%}). A mean margin below 0 finds {many['recall below 0']:.1%} of the wrong labels, and"
        f" {many['precision below 0']:.1%} of those are wrong. With 10% wrong labels {few['margin']:.1%} of the most"
        f" suspect 10% are; means of 5 seeds."
    )


def schedules() -> str:
    ours, theirs = (figure("schedules", "1 group", what) for what in ("CurveLR flat_cos", "torch CosineAnnealingLR"))
    return f"A step of the schedule takes {ours:.1f} µs; that of torch's `CosineAnnealingLR` {theirs:.1f} µs."


def guards() -> str:
    ratio = of_floor("guards", "step, vit_tiny", "SkipNonFinite")
    return f"The check takes {ratio:.2f} of the time of `clip_grad_norm_` (ViT-tiny)."


def rewinds() -> str:
    check, take = (
        of_floor("guards", case, what)
        for case, what in (("step, vit_tiny", "RewindOnSpike"), ("snapshot of RewindOnSpike, vit_tiny", "take"))
    )
    return (
        f"The check takes {check:.2f} of the time of `clip_grad_norm_`, and a snapshot {take:.1f} times it (ViT-tiny)."
    )


def clips() -> str:
    auto = of_floor("guards", "step, vit_tiny", "AutoClip")
    units = of_floor("guards", "clipping by unit, vit_tiny", "AdaptiveClip")
    return (
        f"`AutoClip` takes {auto:.2f} times as long as `clip_grad_norm_`, `AdaptiveClip` {units:.2f} of the time of"
        " timm's (ViT-tiny)."
    )


def freezing() -> str:
    ratio = of_floor("networks", "step, vit_tiny_patch16_224", "LayerFreezing: half stopped")
    return f"With half of the layers stopped, a step of a ViT-tiny takes {ratio:.2f} of a plain one."


def checkpointing() -> str:
    case, step = "checkpointing, kept for backward, vit_tiny_patch16_224", "checkpointing, step, vit_tiny_patch16_224"
    full, selective, plain = (figure("speed", case, what) for what in ("full", "selective", "plain"))
    longer, longest = (of_floor("speed", step, what) for what in ("full", "selective"))
    return (
        f"A ViT-tiny keeps {full:.1f} MiB of activations in place of {plain:.1f} MiB, and a step takes {longer:.2f}"
        f' times as long (on a CPU); with `policy="selective"` it keeps {selective:.1f} MiB, and takes {longest:.2f}'
        " times as long."
    )


def layouts() -> str:
    best, worst = (
        of_floor("speed", f"channels last, step, {case}", "ChannelsLast")
        for case in ("mobilenetv3_small_100, fp32", "resnet18, fp32")
    )
    return f"`ChannelsLast`, fp32 on a CPU: {best:.2f} of a plain step for a MobileNetV3, {worst:.2f} for a ResNet-18."


def estimate() -> str:
    total, activations = (
        max(abs(row["over_floor"] - 1) for row in result("memory")["rows"] if row["case"].startswith(case))
        for case in ("total", "activations")
    )
    return (
        f"On a CPU, with ResNet-50, ViT and BERT, estimated totals are within {total:.1%} of the measured bytes,"
        f" activations alone within {activations:.1%}."
    )


def cached_gradients() -> str:
    step = of_floor("grad_cache", "step, 1024 samples", "lightning_tricks GradCacheMixin")
    ours, whole = (
        figure("grad_cache", "peak memory", what) for what in ("lightning_tricks GradCacheMixin", "the whole batch")
    )
    return (
        f"1,024 samples in chunks of 64 take {ours:.0f} MiB in place of {whole:.0f} MiB, and a step takes {step:.2f}"
        " times as long (on a CPU)."
    )


def buckets() -> str:
    ours, shuffled = (
        figure("length_buckets", "padding", what) for what in ("lightning_tricks LengthBuckets", "shuffled")
    )
    epoch = of_floor("length_buckets", "epoch", "lightning_tricks LengthBuckets")
    return (
        f"Of the tokens of samples between 4 and 256 long, {ours:.0f}% are padding in place of {shuffled:.0f}%, and an"
        f" epoch of a small transformer takes {epoch:.2f} of the time."
    )


def adapters() -> str:
    case = "vit_tiny_patch16_224"
    step = figure("lora", f"step, {case}", "lightning_tricks LoRA") / figure("lora", f"step, {case}", "full training")
    ours, full = (figure("lora", f"checkpoint, {case}", what) for what in ("lightning_tricks LoRA", "full training"))
    return (
        f"With a ViT-tiny a checkpoint takes {ours:.1f} MB in place of {full:.1f} MB, and a step {step:.2f} of the time"
        " of full training (on a CPU)."
    )


def waiting() -> str:
    ours, theirs = (
        figure("data_wait", "added to a step, tiny", what)
        for what in ("lightning_tricks DataWait", "Lightning SimpleProfiler")
    )
    return f"It adds {ours:.0f} µs to a step of a tiny network; Lightning's `SimpleProfiler` adds {theirs:.0f} µs."


def looks() -> str:
    busy = of_floor("networks", "step, vit_tiny_patch16_224", "InspectTraining: looks")
    idle = of_floor("networks", "step, tiny", "InspectTraining: idle")
    return f"While `InspectTraining` looks, a step takes {busy:.2f} times as long; between, {idle:.2f} (tiny network)."


def blur() -> str:
    ratio = of_floor("networks", "forward, resnet50", "blurred")
    return f"`add_blur_pool`: a forward pass of a ResNet-50 takes {ratio:.2f} times as long."


def gains() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The differences of all networks, the larger ones last and at the best of their rates.

    What has a cosine is compared with AdamW with the best cosine, but for other optimizers.
    """
    found = of_quality()
    for benchmark, network in NETWORKS.items():
        made = result(benchmark)
        over = language_model.over_cosine(made)
        steps = {row.get("regime"): f"{row['steps']:,} steps" for row in made["rows"] if row["trick"] == PLAIN}
        for row in best_rows(made):
            trick = own(row["trick"])
            variant = trick.removeprefix("cosine, ")
            where = REGIMES.get(row["regime"], row["regime"].lower()) if "regime" in row else ""
            for name in (name for name, tricks in TRAINED.items() if trick in tricks):
                both = row["trick"] in over and name != "optimizer"
                cosine = f"{'both ' * both}beside a cosine" if variant != trick else ""
                words = (network, steps[row.get("regime")], where, cosine, f"{row['seeds']} seeds")
                line = {
                    "setting": ", ".join(filter(None, words)),
                    "seeds": row["seeds"],
                    "calibration": 0,
                    "larger": True,
                }
                line |= over[row["trick"]] if both else row["gain"]
                found.setdefault(name, {}).setdefault(VARIANTS.get(variant, variant), []).append(line)
    return found


NETWORKS = {"finetune": "MiniLM", "finetune_images": "EfficientNet", "language_model": "GPT"}
TRAINED = {
    "EMA": ("EMA", "cosine, EMA"),
    "PostHocEMA": ("PostHocEMA",),
    "SWA": ("SWA",),
    "flat_cos": ("flat_cos", "cosine", "wsd"),
    "SAM": ("SAM", "SAM, half the steps", "cosine, SAM, half the steps"),
    "Mixup": ("Mixup",),
    "HiddenMixup": ("HiddenMixup",),
    "NEFTune": ("NEFTune",),
    "GradualUnfreeze": ("GradualUnfreeze",),
    "LayerFreezing": ("LayerFreezing",),
    "SequenceLengthWarmup": ("cosine, SequenceLengthWarmup",),
    "layer_decay_groups": ("layer decay 0.8",),
    "LoRA": ("LoRA, r 4", "LoRA, r 16", "LoRA, r 16, linear", "DoRA, r 4", "LoRA, r 4, Muon"),
    "ScheduleFree": ("ScheduleFree",),
    "optimizer": (
        "Muon",
        "cosine, Muon",
        "cosine, Muon, both rates",
        "cosine, both rates",
        "cosine, SOAP",
        "cosine, Lion",
        "cosine, Lion as published",
        "cosine, AdEMAMix",
        "cosine, AdEMAMix as published",
    ),
    "average_checkpoints": ("soup of three, 3 times the steps",),
}  # the tricks of each public name
VARIANTS = {
    "both rates": "AdamW, both rates",
    "SAM, half the steps": "SAM, half the epochs",
}  # as smaller networks have
TOLD: dict[str, list[Callable[[], str]]] = {
    "SequenceLengthWarmup": [resizing, length],
    "LabelErrors": [wrong_labels],
    "min_snr_weight": [min_snr],
    "estimate_memory": [estimate],
}  # what was found, beside the table of gains
MEASURED: dict[str, list[Callable[[], str]]] = {
    "EMA": [ema],
    "SAMMixin": [sam],
    "Mixup": [mixup],
    "HardExampleFilter": [hard_examples],
    "LeanLoss": [lean_loss],
    "flat_cos": [schedules],
    "SkipNonFinite": [guards],
    "RewindOnSpike": [rewinds],
    "AdaptiveClip": [clips],
    "LayerFreezing": [freezing],
    "LoRA": [adapters],
    "GradCacheMixin": [cached_gradients],
    "LengthBuckets": [buckets],
    "DataWait": [waiting],
    "ActivationCheckpointing": [checkpointing],
    "Compile": [layouts],
    "inspect_training": [looks],
    "add_stochastic_depth": [blur],
}
