"""Figures that stand in prose and in tables written by hand are those of the committed results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

import lightning_tricks as lt
from tests.test_docs import DOCS, ROOT

RESULTS = ROOT / "benchmarks" / "results"
FREEZING, LOOKING = "LayerFreezing: half stopped", "InspectTraining: looks"


def rows_of(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def of_cost(name: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of a benchmark of ``cost/`` by case and contender."""
    return {(row["case"], row["what"]): row for row in rows_of(name)}


# -- tables: the rows as pages have them ------------------------------------------------------------------------------


def lean_loss() -> list[str]:
    found, plain = of_cost("lean_loss"), "with logits"

    def cells(case: str, what: str) -> str:
        time = "1" if what == plain else f"{found[case, what]['over_floor']:.2f}"
        return f"{found[f'peak memory, {case}', what]['median']:.0f} MiB | {time}"

    head, llama = "head and loss", "Llama"
    return [
        f"| a Llama of two layers, width 128 | {cells(llama, plain)} |",
        f"| with `LeanLoss` | {cells(llama, 'lightning_tricks')} |",
        f"| its head and loss alone | {cells(head, plain)} |",
        f"| with `LeanLoss` | {cells(head, 'lightning_tricks')} |",
        f"| by torch's `linear_cross_entropy`, in chunks | {cells(head, 'torch, in chunks')} |",
    ]


def data() -> list[str]:
    found, shuffled = of_cost("length_buckets"), "shuffled"

    def cells(what: str) -> str:
        times = [found[case, what]["over_floor"] for case in ("epoch", "order")]
        shown = ["1" if what == shuffled else f"{time:.2f}" for time in times]
        return f"{found['padding', what]['median']:.0f}% | {' | '.join(shown)}"

    return [
        f"| shuffled | {cells(shuffled)} |",
        f"| `LengthBuckets` | {cells('lightning_tricks LengthBuckets')} |",
        f"| transformers' `LengthGroupedSampler` | {cells('transformers LengthGroupedSampler')} |",
    ]


def diffusion() -> list[str]:
    found = {(row["prediction"], row["min_snr"]): row for row in rows_of("diffusion")}
    lines = []
    for kind in ("epsilon", "sample", "v"):
        distances = [f"{row['distance']:.2f} ± {row['std']:.2f}" for row in (found[kind, False], found[kind, True])]
        lines.append(f"| {kind} | {' | '.join(distances)} | {found[kind, True]['seeds_better']} of 5 |")
    return lines


def inputs() -> list[str]:
    lines = []
    for row in rows_of("inputs"):
        name, cells = row["variant"], ["1", "1", "1"]
        if name != "plain":
            shares = [row[f"{what}_over_plain"] for what in ("inputs", "seconds")]
            cells = [f"{middle:.2f} ({least:.2f} to {most:.2f})" for middle, least, most in shares]
            cells.append(f"{row['all_inputs_over_plain'][0]:.2f}")
            name = f"`{name}`"
        accuracy = f"{row['test_accuracy']:.3f} ± {row['std']:.3f}"
        lines.append(f"| {row['task']}, {name} | {row['reached']} | {' | '.join(cells)} | {accuracy} |")
    return lines


def networks() -> list[str]:
    found, step = of_cost("networks"), "step, vit_tiny_patch16_224"
    idle = found["step, tiny", "plain"]["median"] / 1000
    cases = {
        "step of a ViT-Tiny, the first half of its layers stopped": (step, FREEZING),
        "forward pass of a ResNet-50 with blurred strides": ("forward, resnet50", "blurred"),
        "step of a ViT-Tiny while `InspectTraining` looks": (step, LOOKING),
        f"step of {idle:.1f} ms with an `InspectTraining` that does not look": ("step, tiny", "InspectTraining: idle"),
    }
    return [f"| {text} | {found[row]['over_floor']:.2f} |" for text, row in cases.items()]


@pytest.mark.parametrize(
    ("page", "rows"),
    [("losses", lean_loss), ("losses", diffusion), ("data", data), ("inputs", inputs), ("networks", networks)],
)
def test_a_table_has_the_rows_of_the_results(page: str, rows: Callable[[], list[str]]) -> None:
    head, *body = rows()
    text = (DOCS / f"{page}.md").read_text()
    assert head in text
    assert "\n".join([head, *body, ""]) in text


def test_the_limits_that_are_missed_are_all_there() -> None:
    """Each with what was measured."""
    page = (ROOT / "benchmarks" / "README.md").read_text()
    table = page.split("### Limits that are missed\n")[1].split("\n### ")[0]
    told = [cell.split()[0] for _, cells, *_ in lines(table) for cell in cells.split("; ")]
    results = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    targets = [each for result in results if "rows" in result for each in result.get("targets", [])]
    assert sorted(told) == sorted(f"{each['measured']:.3g}" for each in targets if each["met"] is False)


def lines(table: str) -> list[list[str]]:
    """The cells of the body."""
    return [line.strip("| ").split(" | ") for line in re.findall(r"^\|.*\|$", table, re.MULTILINE)[2:]]


# -- sentences --------------------------------------------------------------------------------------------------------


def test_all_of_training_took_less_time_but_not_as_much_as_inputs() -> None:
    found = {row["variant"]: row for row in rows_of("inputs")}
    resized, shorter = (
        [found[name][f"all_{what}_over_plain"][0] for what in ("seconds", "inputs")]
        for name in ("ProgressiveResizing(0.5)", "SequenceLengthWarmup(0.25, stop=0.8)")
    )
    page = " ".join((DOCS / "inputs.md").read_text().split())
    assert "took {:.2f} of the seconds with {:.2f} of the pixels".format(*resized) in page
    assert "and {:.2f} with {:.2f} of the words".format(*shorter) in page


def test_what_a_batch_in_chunks_takes() -> None:
    found, step = of_cost("grad_cache"), "step, 1024 samples"
    ours, whole = "lightning_tricks GradCacheMixin", "the whole batch"
    page = " ".join((DOCS / "contrastive.md").read_text().split())
    memory = [f"{found['peak memory', what]['median']:.0f} MiB" for what in (ours, whole)]
    assert f"in chunks of 64 take {memory[0]} instead of {memory[1]}" in page
    times = [found[step, what]["over_floor"] for what in (ours, "two passes by hand")]
    assert "takes {:.2f} times as long on a CPU, with two passes written by hand {:.2f} times".format(*times) in page


def test_what_a_step_that_saves_takes() -> None:
    found = of_cost("async_save")
    ratios = [found[kind, "async_save=True"]["over_floor"] for kind in ("file", "folder")]
    page = " ".join((DOCS / "strategies.md").read_text().split())
    assert "{:.2f} of the stall of a save that is waited for, with a folder {:.2f}".format(*ratios) in page


def test_what_faster_settings_of_the_trainer_save() -> None:
    found, over = of_cost("speed"), "over a default Trainer's step"
    saved, logs = (-found[over, what]["median"] / 1000 for what in ("speed_preset()", "default, without self.log"))
    step = found["a Trainer's step", "default"]["median"] / 1000
    told = " ".join((lt.speed_preset.__doc__ or "").split())
    assert f"they save {saved:.2f} of {step:.2f} ms on a CPU, where ``self.log`` takes {logs:.2f}" in told


def test_the_figures_of_the_checklist_of_speed() -> None:
    """Those of others have a link beside them."""
    speed, freezing, lean, lengths = (of_cost(name) for name in ("speed", "networks", "lean_loss", "length_buckets"))
    over, step = "over a default Trainer's step", speed["a Trainer's step", "default"]["median"]
    logs, bar = (-speed[over, what]["median"] for what in ("default, without self.log", "no progress bar"))
    vit = "vit_tiny_patch16_224"
    kept = [speed[f"checkpointing, kept for backward, {vit}", what]["median"] for what in ("full", "plain")]
    slower = [speed[f"checkpointing, step, {net}", "full"]["over_floor"] for net in ("resnet18", vit)]
    last = [row["over_floor"] for (case, what), row in speed.items() if what == "ChannelsLast" and "fp32" in case]
    padding = [lengths["padding", what]["median"] for what in ("lightning_tricks LengthBuckets", "shuffled")]
    epoch = lengths["epoch", "lightning_tricks LengthBuckets"]["over_floor"]
    peak = [lean["peak memory, head and loss", what]["median"] for what in ("lightning_tricks", "with logits")]
    page = (DOCS / "speed.md").read_text()
    for told in (
        f"`self.log` took {logs / 1000:.2f} ms of a step of {step / 1000:.2f} ms,",
        f"and no progress bar saved {bar / 1000:.2f}",
        "{:.1f} in place of {:.1f} MiB for a ViT-Tiny (ours)".format(*kept),
        "{:.0f} to {:.0f}% of the time".format(*(100 * (time - 1) for time in slower)),
        f"{min(last):.2f} to {max(last):.2f} of a step in fp32",
        "{:.0f}% padding in place of {:.0f}%, {:.2f} of the time".format(*padding, epoch),
        "{:.0f} in place of {:.0f} MiB (ours)".format(*peak),
        f"({freezing[f'step, {vit}', FREEZING]['over_floor']:.2f} of a step with half of a ViT stopped, ours)",
    ):
        assert told in page


def test_the_command_and_the_recipe_say_the_same_of_clean_labels() -> None:
    """That of the recipe is compared with the results in test_readme."""
    command = (ROOT / "lightning_tricks_cli" / "commands" / "recommend.py").read_text()
    recipe = (ROOT / "configs" / "recipes" / "image_scratch.yaml").read_text()
    (most,) = re.findall(r"no trick gained more than ([\d.]+) points", command)
    assert f"than {most} points in our measurements" in recipe
