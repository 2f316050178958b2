"""Recommend a configuration for a problem."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import NamedTuple

from lightning_tricks_cli.commands.target import at_least_one

CHOICES = {
    "task": ("image", "text", "tabular", "llm"),
    "labels": ("clean", "noisy"),
    "data": ("large", "small"),
    "problem": ("none", "nan", "memory", "slow", "overfits", "many-devices"),
}
QUESTIONS = {
    "task": "What do you train on?",
    "labels": "Are the training labels clean, or are some of them wrong (noisy)?",
    "data": "How much data is there?",
    "pretrained": "Do you start from pretrained weights?",
    "problem": "What goes wrong?",
    "devices": "On how many devices do you train?",
}


class Advice(NamedTuple):
    """A part of the configuration.

    Args:
        why: The reason, a sentence.
        yaml: An item of ``callbacks``, or settings of the Trainer.
        card: The page about it, docs/tricks/<card>.md; none for what is Lightning's.
    """

    why: str
    yaml: str
    card: str = ""


ADVICE = {
    "preset": Advice("A strategy and its precision.", "strategy: {preset}\ndevices: {devices}", "preset"),
    "clip": Advice("The gradients of a transformer have rare peaks.", "gradient_clip_val: 1.0"),
    "accumulate": Advice(
        "Divide batch_size by 4: steps of the same size, a quarter of the activations.",
        "accumulate_grad_batches: 4",
    ),
    "cosine": Advice(
        "A short warm-up, then half a cosine down to zero: a good default.",
        "- class_path: LRSchedule\n  init_args: {curve: cosine, warmup: 0.05}",
        "LRSchedule",
    ),
    "flat_cos": Advice(
        "With wrong labels a learning rate that falls gained on three of our four tasks.",
        "- class_path: LRSchedule\n  init_args: {curve: flat_cos, warmup: 0.05}",
        "LRSchedule",
    ),
    "linear": Advice(
        "Fine-tuning: the warm-up protects pretrained weights from the first gradients.",
        "- class_path: LRSchedule\n  init_args: {curve: linear, warmup: 0.1}",
        "LRSchedule",
    ),
    "EMA": Advice(
        "Averaged weights follow wrong labels less: a gain on three of our four tasks.",
        "- class_path: EMA\n  init_args: {decay: 0.999}",
        "EMA",
    ),
    "unfreeze image": Advice(
        "The head trains first; deeper layers join later with smaller learning rates.",
        "- class_path: GradualUnfreeze\n  init_args:\n    at: [0.2, 0.5]\n"
        "    parameters: ['network\\.layer[34]', 'network\\.(conv1|bn1|layer[12])']\n    lr_factor: 0.4",
        "GradualUnfreeze",
    ),
    "unfreeze text": Advice(
        "The head trains first; deeper layers join later with smaller learning rates.",
        "- class_path: GradualUnfreeze\n  init_args:\n    at: [0.2, 0.5]\n"
        "    parameters: ['encoder\\.(encoder|pooler)', 'encoder\\.embeddings']\n    lr_factor: 0.4",
        "GradualUnfreeze",
    ),
    "LoRA": Advice(
        "Only small adapters train and are saved; base: nf4 keeps the other weights in 4 bits.",
        "- class_path: LoRA\n  init_args: {modules: (q|k|v|o|gate|up|down)_proj, r: 8}",
        "LoRA",
    ),
    "SkipNonFinite": Advice(
        "Leaves out steps with a NaN; stops and names the parameters after ten in a row.",
        "- class_path: SkipNonFinite\n  init_args: {max_consecutive: 10}",
        "SkipNonFinite",
    ),
    "AutoClip": Advice(
        "Clips gradients by the history of their own norms, before they explode.",
        "- class_path: AutoClip\n  init_args: {percentile: 10}",
        "AdaptiveClip",
    ),
    "ActivationCheckpointing": Advice(
        "Blocks compute activations twice: less memory, one more forward pass.",
        "- class_path: ActivationCheckpointing",
        "ActivationCheckpointing",
    ),
    "DataWait": Advice(
        "Says how long training waits for data; if it does: lightning-tricks find-workers.",
        "- class_path: DataWait",
        "DataWait",
    ),
    "Compile": Advice(
        "For a model that does not wait for data: compiled, and eager where that fails.",
        "- class_path: Compile",
        "Compile",
    ),
    "best accuracy": Advice(
        "Keeps the weights of the best epoch, from before the model overfits.",
        "- class_path: ModelCheckpoint\n  init_args: {monitor: val_accuracy, mode: max}",
    ),
    "best loss": Advice(
        "Keeps the weights of the best epoch, from before the model overfits.",
        "- class_path: ModelCheckpoint\n  init_args: {monitor: val_loss, mode: min}",
    ),
}

TIMM = """\
class_path: lightning_tricks.examples.tasks.Classifier
init_args:
  network:
    class_path: timm.create_model
    init_args: {{model_name: resnet18, pretrained: false}}{pretrained}
    dict_kwargs: {{in_chans: 1, num_classes: 3}}
  lr: {lr}
  optimizer: {optimizer}"""
NETWORK = """\
class_path: lightning_tricks.examples.tasks.Classifier
init_args:
  network: lightning_tricks.examples.{network}
  lr: {lr}{pretrained}
  optimizer: {optimizer}"""
LANGUAGE = """\
class_path: lightning_tricks.examples.language.LanguageModel{pretrained}
init_args:
  lr: {lr}"""
MODELS = {  # by task: from random weights, and pretrained
    "image": (
        TIMM.format(lr=0.05, optimizer="sgd", pretrained=""),
        TIMM.format(lr=0.001, optimizer="adamw", pretrained=" # true downloads the weights"),
    ),
    "text": (
        NETWORK.format(network="glosses.GlossTransformer", lr=0.003, optimizer="adamw", pretrained=""),
        NETWORK.format(
            network="language.TextClassifier", lr=0.001, optimizer="adamw", pretrained=" # 1e-5 to 5e-5 if pretrained"
        ),
    ),
    "tabular": (NETWORK.format(network="digits.network", lr=0.1, optimizer="sgd", pretrained=""),) * 2,
    "llm": (LANGUAGE.format(lr=0.001, pretrained=""), LANGUAGE.format(lr=0.001, pretrained=" # with from_pretrained")),
}
DATA = {
    "image": "textures.TexturesData",
    "text": "glosses.GlossesData",
    "tabular": "digits.DigitsData",
    "llm": "glosses.GlossesData",
}


class Case(NamedTuple):
    """What the user has said; the defaults are those of the flags."""

    task: str
    labels: str = "clean"
    data: str = "large"
    pretrained: bool = False
    problem: str = "none"
    devices: int | None = None


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of the command."""
    recommend = commands.add_parser(
        "recommend",
        help="recommend a configuration for your task, and say why",
        description="Print a configuration for lightning-tricks fit, with the reason for each of its parts and the name"
        " of its card in docs/tricks. The model and the data are examples that run as they are: put your own in their"
        " place. In a terminal, what no flag says is asked.",
        epilog="examples:\n"
        "  lightning-tricks recommend --task image --labels noisy > config.yaml\n"
        "  lightning-tricks recommend --task llm --pretrained --problem memory --devices 8",
    )
    for name, choices in CHOICES.items():
        default = "" if name == "task" else f" (default: {choices[0]})"
        recommend.add_argument(f"--{name}", choices=choices, help=f"{', '.join(choices)}{default}")
    recommend.add_argument("--pretrained", action="store_true", default=None, help="start from pretrained weights")
    recommend.add_argument("--devices", type=at_least_one, metavar="N", help="number of devices (default: 1)")


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    said = {name: getattr(options, name) for name in Case._fields}
    if sys.stdin.isatty():
        said = {name: ask(name) if value is None else value for name, value in said.items()}
    if said["task"] is None:
        options.parser.error("the following arguments are required: --task")
    print(configuration(Case(**{name: value for name, value in said.items() if value is not None})))


def ask(name: str) -> str | bool | int | None:
    """Ask a question on stderr until there is an answer; an empty one is the default."""
    allowed = {"pretrained": ("no", "yes"), "devices": ("1", "2", "8", "...")}.get(name) or CHOICES[name]
    while True:
        print(f"{QUESTIONS[name]} [{'/'.join(allowed)}] ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        answer = line.strip().lower()
        if not answer and name != "task":
            return None
        if name == "devices" and answer.isdecimal() and int(answer):
            return int(answer)
        if name != "devices" and answer in allowed:
            return answer == "yes" if name == "pretrained" else answer


def noisy(case: Case) -> bool:
    """Whether what helps against wrong labels applies; the texts of a language model have none."""
    return case.labels == "noisy" and case.task != "llm"


def chosen(case: Case) -> Iterator[str]:
    """The names in ``ADVICE`` for a case; what is first is listed first."""
    yield "preset"
    if case.task in ("text", "llm"):
        yield "clip"
    if case.problem == "memory":
        yield "accumulate"
    if case.problem == "nan":
        yield from ("SkipNonFinite", "AutoClip")
    if case.problem == "memory" and case.task != "tabular":
        yield "ActivationCheckpointing"
    if case.pretrained and case.task == "llm":
        yield "LoRA"
    elif case.pretrained and case.data == "small" and case.task in ("image", "text"):
        yield f"unfreeze {case.task}"
    if noisy(case):  # one of both, and pretrained weights need the warm-up
        yield "flat_cos" if case.pretrained else "EMA"
    else:
        yield "linear" if case.pretrained else "cosine"
    if case.problem == "slow":
        yield from ("DataWait", "Compile")
    if case.problem == "overfits":
        yield "best loss" if case.task == "llm" else "best accuracy"


def notes(case: Case) -> Iterator[str]:
    """What is to be said about a case as a whole."""
    if (case.labels, case.data, case.problem) == ("clean", "large", "none") and case.task != "llm":
        yield "Clean labels: a schedule is a good start. On our small tasks no trick gained more than 2.5 points."
    if case.task == "llm":
        yield "Our small language model gained by ScheduleFree, flat_cos and EMA: measure, by lightning-tricks compare."
    if noisy(case):
        yield "EMA alone and flat_cos alone gained as much as both. SAM (docs/tricks/SAMMixin.md) gained less."
        yield "Leave out HardExampleFilter: wrong labels are the hardest examples, so it does harm."
    if case.data == "small" and not case.pretrained and case.task != "tabular":
        yield "With little data, pretrained weights usually bring more than any trick (--pretrained)."
    if case.problem == "nan":
        yield "bf16 has the range of fp32: leave fp16 presets to devices without bf16."
    if case.problem == "memory":
        yield "lightning-tricks memory and suggest count the bytes, and name the preset that fits."
    if case.problem == "overfits":
        yield "Also try a larger weight_decay, and label smoothing, which gained on clean digits in our benchmarks."
    if case.problem == "many-devices" or (case.devices or 1) > 1:
        yield "A larger global batch wants another learning rate: lt.scale_lr (docs/tricks/BatchSizeWarmup.md)."


def configuration(case: Case) -> str:
    """The configuration of a case as YAML, with its reasons as comments."""
    many = case.problem == "many-devices" or (case.devices or 1) > 1
    whole = case.task == "llm" and not case.pretrained  # its gradients and optimizer states are the largest
    preset = ("fsdp2_bf16" if whole else "ddp_bf16") if many else "single_bf16"
    devices = case.devices or ("auto" if many else 1)
    parts = [ADVICE[name] for name in chosen(case)]
    settings = [part for part in parts if not part.yaml.startswith("-")]
    callbacks = [part for part in parts if part.yaml.startswith("-")]
    model, data = MODELS[case.task][case.pretrained], f"class_path: lightning_tricks.examples.{DATA[case.task]}"
    lines = [f"# {note}" for note in notes(case)]
    lines += ["# Run it: lightning-tricks fit -c config.yaml", "seed_everything: 0", "trainer:"]
    lines += ["  accelerator: auto", "  max_epochs: 10"]
    for part in settings:
        lines += [f"  # {reason(part)}", *indented(part.yaml.format(preset=preset, devices=devices), 2)]
    lines.append("  callbacks:")
    for part in callbacks:
        lines += [f"    # {reason(part)}", *indented(part.yaml, 4)]
    lines += ["model: # an example: put your own LightningModule in its place", *indented(model, 2)]
    lines += ["data: # an example: put your own LightningDataModule in its place", *indented(data, 2)]
    return "\n".join(lines)


def reason(part: Advice) -> str:
    """The comment above a part."""
    return f"{part.why[:-1]} (docs/tricks/{part.card}.md)." if part.card else part.why


def indented(text: str, width: int) -> list[str]:
    """The lines of a text, moved to the right."""
    return [" " * width + line for line in text.splitlines()]
