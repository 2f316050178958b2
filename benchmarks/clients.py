"""What the tricks do in other projects' models as Markdown: docs/clients.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tables import grid

ROOT = Path(__file__).parent.parent
JSON = ROOT / "benchmarks" / "results" / "clients.json"
PAGE = ROOT / "docs" / "clients.md"

SIGNS = {
    "right": "✓",
    "refused": "refused",
    "late": "refused late",
    "wrong": "**wrong**",
    "error": "**error**",
    "none": "n/a",
}
HEAD = """\
# In other projects' models

Written by `make test-clients` from what it found: each project in an environment of its own, with its
models, its loaders and, where it has one, its way to train, on small data; one set of oracles for all. How to write the
tricks in each of them is in [In your library](your_library.md)."""
LEGEND = """\
- ✓: equal to something that was computed without the trick, and bit-equal to plain training at the trick's no-op limit:
  - `EMA`, `SWA`: averages that another callback took of the same fit. `SAMCallback`, `SAMMixin`: a naive perturbation
    inside the project's own step. `ScheduleFree`: its formula, from the gradients. `optimizer`: bit-equal to timm's
    own, made by hand. `LRSchedule`: the formula; where a project ships a schedule, in place of it. `LayerFreezing`:
    bit-equal to a weight that gets no gradient from a step on. `AutoClip`, `AdaptiveClip`, `GradualUnfreeze`: by what
    they did. `StepInBackward`: bit-equal to plain training.
  - `Mixup`, `CutMix`, `HiddenMixup`: the mean of the project's own losses of both targets. `HardExampleFilter`: the
    project's own step on the half with the largest losses (`mode="loss"`: their mean). `BatchTransform`, `CutOut`,
    `ProgressiveResizing`, `SequenceLengthWarmup`: the project's own step on batches that were changed by hand.
    `LengthBuckets`, `DistributedWeightedSampler`: a loader that has these batches. `BatchSizeWarmup`: bit-equal to
    Lightning's accumulation. `FitsMemory`: the whole batch, where the step with it was made to run out of memory.
  - `LoRA`: only adapters train, the first time by the gradient of the layer's weight. `merge_adapters`: the class
    without adapters validates the same loss. `QAT`: the project's own step with the weights that `quantize` makes;
    `quantize`: the loss that was validated. `Float8`: bit-equal to torchao's own conversion. `LeanLoss`,
    `ChannelsLast`: plain training but for rounding. `add_blur_pool`, `add_squeeze_excite`: a network that was changed
    by hand. `ActivationCheckpointing`: bit-equal to plain training.
  - `Doctor`, `DataWait`, `InspectTraining`, `Throughput`: bit-equal to plain training. `SkipNonFinite`,
    `RewindOnSpike`, `TerminateOnNonFinite`: the same on a healthy fit, and at a loss that is no number the weights
    before it. `Preemption`: a signal ends the fit after its step, and the next fit ends as one that nothing disturbs.
    `single_bf16`: bit-equal to `precision="bf16-mixed"`. `find_lr`: the fit after it is bit-equal to one without.
    `cross_validate`: folds that were fitted by hand. **callbacks**: EarlyStopping and ModelCheckpoint of the project's
    Lightning work beside ours. **resume**: bit-equal to the project's own resume.
- *refused*: an error by name before the first optimizer step. *refused late*: by name, after it. n/a: not applicable.
- **wrong**: silently, or **error**: not ours, from inside."""


def cells() -> dict[str, dict[str, Any]]:
    """Of each project its versions, and of its models what was found for each trick."""
    found: dict[str, dict[str, Any]] = json.loads(JSON.read_text())
    return found


def page() -> str:
    """docs/clients.md: a row for each trick, a column for each project, and what refusals say."""
    projects, notes = cells(), list[str]()
    tricks = list(
        dict.fromkeys(trick for of in projects.values() for cells in of["models"].values() for trick in cells)
    )
    heads = [next(iter(of["versions"])) for of in projects.values()]
    rows = [
        [
            name if name in ("callbacks", "resume") else f"`{name}`",
            *(_cell(of, name, notes) for of in projects.values()),
        ]
        for name in tricks
    ]
    numbered = "\n".join(f"{number}. {why}".replace("['", "\\['") for number, why in enumerate(notes, 1))
    table = grid(["", *heads], rows)
    return (
        "\n\n".join([HEAD, LEGEND, _count(projects), table, "## Models", _models(projects), "## Notes", numbered])
        + "\n"
    )


def _cell(project: dict[str, Any], trick: str, notes: list[str]) -> str:
    """Each thing that was found in a project's models, with its reasons."""
    found: dict[str, list[int]] = {}
    models = project["models"]
    for cells in models.values():
        numbers = found.setdefault(SIGNS[cells[trick]["cell"]], [])
        if why := cells[trick].get("why"):
            alike = [each for each in models if models[each][trick] == cells[trick]]
            note = why if len(alike) == len(models) else f"{', '.join(alike)}: {why}"
            if note not in notes:
                notes.append(note)
            numbers.append(notes.index(note) + 1)
    return ", ".join(
        sign + "".join(f" [{number}](#notes)" for number in dict.fromkeys(found[sign]))
        for sign in SIGNS.values()
        if sign in found
    )


def _count(projects: dict[str, dict[str, Any]]) -> str:
    every = [cell["cell"] for of in projects.values() for cells in of["models"].values() for cell in cells.values()]
    parts = [f"{every.count(name)} {sign.strip('*')}" for name, sign in SIGNS.items()]
    return f"{len(every)} cells of {sum(len(of['models']) for of in projects.values())} models: {', '.join(parts)}."


def _models(projects: dict[str, dict[str, Any]]) -> str:
    lines = []
    for of in projects.values():
        (name, number), *others = of["versions"].items()
        with_what = ", ".join(f"{other} {version}" for other, version in others)
        lines.append(f"- {name} {number} ({with_what}): {'; '.join(of['models'])}")
    return "\n".join(lines)
